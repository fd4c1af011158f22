"""Knobs of `wy`: which settings are legal and which are worth trying."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels import wy_block_config
from gdntune.kernels.dependent_launch import in_every_form, pdl_fault, pdl_knob, under
from gdntune.kernels.facts import compiled_tokens, facts
from gdntune.kernels.spec import Block, Facts, Kernel, knob
from gdntune.problem import ITEMSIZE, Contract


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting of the tensor-core kernel."""

    rows: int = knob("rw", "rows of V a warp has in registers")
    warps: int = knob("wp", "warps a block, each on rows of its own")
    passes: int = knob(
        "ps",
        "times that a warp takes new rows; what hangs on q and k alone is computed once",
        default=1,
    )
    registers: int = knob(
        "rg", "at most so many registers a thread, for more warps at once; 0: no cap", default=0
    )
    pdl: str = pdl_knob()


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.op != "gdn_decode":
        return f"op={c.op}: its products want one decay a head, expected gdn_decode"
    if c.layout != "k_last":
        return f"layout={c.layout}: an operand's rows are read along K, expected k_last"
    if c.intermediate != "none":
        return (
            f"intermediate={c.intermediate}: states between tokens are never formed, expected none"
        )
    if compiled_tokens(c) == 1:
        return "tokens=1: there is nothing to gather into a product, expected 2 to 16, or ragged"
    if c.input_dtype != "bf16":
        # fp16's exponent does not hold the second term of u where u is small
        return f"input_dtype={c.input_dtype}: products take bf16 terms, expected bf16"
    if s.rows not in (16, 32):
        return f"rows={s.rows}: expected one of 16, 32"
    if s.warps not in (1, 2, 4, 8):
        return f"warps={s.warps}: expected one of 1, 2, 4, 8"
    size = ITEMSIZE[c.state_dtype]
    if c.K % (64 // size):
        return (
            f"K={c.K} is not a multiple of the {64 // size} elements that four threads load at once"
        )
    if s.registers not in (0, 128, 168):
        return f"registers={s.registers}: expected one of 0, 128, 168"
    if fault := pdl_fault(s):
        return fault
    if s.passes not in (1, 2, 4, 8):
        return f"passes={s.passes}: expected one of 1, 2, 4, 8"
    if c.V % (s.rows * s.warps * s.passes):
        return f"V={c.V} is not a multiple of rows*warps*passes={s.rows * s.warps * s.passes}"
    registers = s.rows * c.K * size // 128
    if registers > 64:
        return f"the state takes {registers} registers a thread: expected at most 64"
    if c.state_dtype != "bf16" and c.mode == "update":
        # a token alone, behind a decay that leaves nothing: 7e-6 of its row, of 4e-6 that may be
        return f"state_dtype={c.state_dtype} with mode=update: u has two bf16 terms, expected mode=frozen"
    return None


def wy_facts(c: Contract) -> Facts:
    """`facts`, but up to four tokens are compiled apart where no more can come and it won: half the
    arithmetic a row.
    """
    return (
        {**facts(c), "tokens": 4}
        if c.tokens <= 4 and c.mode == "frozen" and not c.ragged
        else facts(c)
    )


def block(c: Contract, s: Knobs) -> Block:
    """Threads, and the shared memory that the kernel's allocations add up to."""
    N = -(-wy_facts(c)["tokens"] // 8) * 8
    # of each warp sL, sE and sT, and a line of sP for each of its rows; the last line's padding is
    # not there
    shared = 4 * s.warps * (2 * N * N + 4 * N + s.rows * (2 * N + 4)) - 16
    if c.mode == "update":
        # a line of sW, in the inputs' 16 bits
        shared += 2 * s.warps * s.rows * (2 * N + 8) - 16
    return Block(32 * s.warps, shared)


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first: at HV=64, B=1 to 512, the others won nowhere on an
    H100, and of bf16 states that are only read no more than 1.5% anywhere on an H200
    (docs/measured.md).
    """
    wide = ITEMSIZE[c.state_dtype] > 2
    # rows, warps, passes, registers
    tried: list[tuple[int, tuple[int, ...], int, tuple[int, ...]]]
    if c.mode == "update":
        # of an fp32 state the terms cost more than the products save
        tried = [(32, (1, 2, 4), 1, (0,)), (16, (1, 2, 4), 1, (0,))] if not wide else []
    elif wide:
        tried = [(16, (1, 2, 4), 1, (128,)), (16, (1, 2, 4), 2, (0,))]
    else:
        tried = [
            (32, (1, 2), 1, (0, 128)),
            (32, (2,), 1, (168,)),
            (32, (4,), 1, (128,)),
            (32, (1, 2), 2, (0,)),
            (32, (1,), 4, (0, 168)),
            (16, (1, 2), 1, (0,)),
            (16, (1,), 2, (168,)),
        ]
    settings = (
        Knobs(rows, w, passes, r)
        for rows, warps, passes, registers in tried
        for r in registers
        for w in warps
    )
    return in_every_form([s for s in settings if not refuse(c, s)])


def space_of_default(c: Contract) -> list[Knobs]:
    """The plain settings, of which the default rule takes one."""
    most = max((rows for rows in (16, 32) if not refuse(c, Knobs(rows, 1))), default=0)
    cap = {most: 128} if c.mode == "frozen" else {}
    settings = (
        Knobs(rows, warps, registers=cap.get(rows, 0))
        for rows in (32, 16)
        for warps in (1, 2, 4, 8)
    )
    return [s for s in settings if not refuse(c, s)]


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks: few warps a block while the heads are few, and mostly one
    where the state is only read.
    """
    legal = space_of_default(c)
    if not legal:
        raise UnsupportedProblem(f"no setting of wy serves {c.key()}: {refuse(c, Knobs(16, 1))}")
    few, many = work_units < 2 * device.sm_count, work_units >= 16 * device.sm_count
    if c.mode == "update":
        wanted = 32 if few else 64
    elif wy_facts(c)["tokens"] == 4:
        wanted = 16 if few else 32
    else:
        wanted = 32 if few or many else 64
    return min(legal, key=lambda s: (abs(s.rows * s.warps - wanted), -s.rows))


def leads(c: Contract) -> bool:
    """Where it beats `recurrent` at nearly every batch on an H100, and `wy_block` does not lead: bf16
    states, from four tokens on, or from two where it only reads.
    """
    return (
        not wy_block_config.leads(c)
        and c.state_dtype == "bf16"
        and c.tokens >= (2 if c.mode == "frozen" else 4)
        and bool(space_of_default(c))
    )


KERNEL = Kernel(
    name="wy",
    device="cuda",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=wy_facts,
    compiler="gdntune.kernels.wy:compile",
    sources=("gdntune.kernels.wy",),
    leads=leads,
    block=block,
    under=under,
)
