"""Knobs of `wy_lanes`: which settings are legal and which are worth trying."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.dependent_launch import in_every_form, pdl_fault, pdl_knob, under
from gdntune.kernels.facts import facts
from gdntune.kernels.spec import Block, Facts, Kernel, knob
from gdntune.problem import ITEMSIZE, Contract


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting of the kernel of few tokens in one pass."""

    ilp: int = knob("ilp", "rows of V a thread has in flight")
    lanes: int = knob("ln", "threads that share a row, a power of two")
    threads: int = knob("th", "threads a block")
    shared: bool = knob(
        "shared",
        "a block's warps share the sums over q and k; else every row's threads take all",
        default=False,
    )
    pdl: str = pdl_knob()


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.op != "gdn_decode":
        return f"op={c.op}: its sums want one decay a head, expected gdn_decode"
    if c.layout != "k_last":
        return f"layout={c.layout}: a row's threads read along K, expected k_last"
    if not 2 <= c.tokens <= 4:
        return f"tokens={c.tokens}: every token's keys stay in registers, expected 2, 3 or 4"
    if s.threads not in (32, 64, 128, 256):
        return f"threads={s.threads}: expected one of 32, 64, 128, 256"
    if s.lanes not in (4, 8, 16, 32):
        return f"lanes={s.lanes}: a row's sums are butterflies within a warp, expected one of 4, 8, 16, 32"
    vec = 16 // ITEMSIZE[c.state_dtype]
    if c.K % (s.lanes * vec):
        return f"K={c.K} is not a multiple of lanes*{vec}={s.lanes * vec}, what a row's threads load at once"
    if s.ilp not in (1, 2, 4):
        return f"ilp={s.ilp}: expected one of 1, 2, 4"
    if s.shared and s.threads == 32:
        return (
            "shared=True of one warp: there is no other to share with, expected threads from 64 on"
        )
    if fault := pdl_fault(s):
        return fault
    if c.V % (s.threads // s.lanes * s.ilp):
        return f"V={c.V} is not a multiple of threads/lanes*ilp={s.threads // s.lanes * s.ilp}"
    held = c.K // s.lanes * (2 * c.tokens + s.ilp)
    if held > 160:
        return (
            f"{held} elements of keys and state a thread in fp32: beyond 160 registers would spill"
        )
    return None


def exact(c: Contract) -> Facts:
    """`facts`, but compiled for the contract's own T."""
    return {**facts(c), "tokens": c.tokens}


def block(c: Contract, s: Knobs) -> Block:
    """Threads, and the shared memory that the kernel's allocations add up to."""
    # sums over q and k: of each warp its share, rounded up to a power of two
    warps = s.threads // 32
    each: int = 1 << (-(-c.tokens * (c.tokens + 2) // warps) - 1).bit_length()
    return Block(s.threads, 4 * warps * each if s.shared else 0)


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first: in two sweeps of an
    H200, which had 54, no other was ahead of these at a cell by 0.1%.
    """
    settings = [
        Knobs(ilp, lanes, threads, shared=True)
        for threads in (128, 64)
        for lanes in (16, 8, 4)
        for ilp in (1, 2, 4)
    ]
    legal = [s for s in settings if not refuse(c, s)]
    # four lanes a row are for a K that no more can share
    return in_every_form([s for s in legal if s.lanes > 4] or legal)


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A middling setting."""
    legal = [s for s in space(c, device) if s.pdl == "none"]
    if not legal:
        raise UnsupportedProblem(
            f"no setting of wy_lanes serves {c.key()}: {refuse(c, Knobs(1, 16, 128))}"
        )
    return min(legal, key=lambda s: (abs(s.lanes - 16), abs(s.threads - 128), s.ilp))


KERNEL = Kernel(
    name="wy_lanes",
    device="cuda",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=exact,
    compiler="gdntune.kernels.wy_lanes:compile",
    sources=("gdntune.kernels.wy_lanes",),
    block=block,
    under=under,
)
