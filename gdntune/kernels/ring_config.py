"""Knobs of `ring`: which settings are legal and which are worth trying."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels import wy_block_config
from gdntune.kernels.spec import Block, Facts, Kernel, knob
from gdntune.problem import ITEMSIZE, Contract

# blocks ahead whose inputs a block has fetched, where it does: half of those that an H200 has at once
AHEAD = 256


@dataclasses.dataclass(frozen=True)
class Knobs(wy_block_config.BlockKnobs):
    """One setting of the tensor-core kernel behind a ring."""

    shared: bool = knob(
        "sh",
        "k_last: the state comes to shared memory by whole lines and leaves its registers to more"
        " warps; else to registers",
        default=False,
    )
    late: bool = knob(
        "lt",
        "k and q are awaited once the state has been asked for, else where the compiler puts it",
        default=False,
    )
    prefetch: int = knob(
        "pf",
        "blocks ahead whose ring and inputs, but not state, this one has L2 fetch; 0: none",
        default=0,
    )


def facts(c: Contract) -> Facts:
    """What an object is compiled for; of one token as of up to four."""
    tokens = {"tokens": 4} if c.tokens <= 4 else {}
    own = {name: getattr(c, name) for name in ("ring", "ring_dtype", "ring_rounding")}
    return {**wy_block_config.block_facts(c), **tokens, **own}


def _inner(c: Contract) -> Contract:
    """The contract that `wy_block` would serve in its place."""
    plain = {"ring": 0, "ring_dtype": "fp32", "ring_rounding": "nearest"}
    return c.replace(**plain, tokens=max(c.tokens, 2))


def _block_knobs(s: Knobs) -> wy_block_config.Knobs:
    return wy_block_config.Knobs(s.rows, s.warps, s.threads, s.passes, s.registers)


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.op != "gdn_decode":
        return f"op={c.op}: expected gdn_decode, whose decay is one a head"
    if c.input_dtype == "fp32":
        return "input_dtype=fp32: keys are one or two terms of bf16, expected bf16 or fp16"
    if s.shared and (c.layout != "k_last" or s.passes > 1 or s.threads != 32 * s.warps):
        return (
            f"shared=True with layout={c.layout}, passes={s.passes}, {s.warps} warps of"
            f" {s.threads // 32}: expected k_last, one pass, all warps"
        )
    if s.threads == 64:
        # `wy_block` has no such block: legal as one of twice the warps in half the passes
        if s.warps != 2:
            return f"threads=64 with warps={s.warps}: expected 2"
        double = 2 if s.passes > 1 else 1
        s = dataclasses.replace(s, threads=128, warps=2 * double, passes=s.passes // double)
    return wy_block_config.refuse(_inner(c), _block_knobs(s))


def block(c: Contract, s: Knobs) -> Block:
    """Threads, and the shared memory that the kernel's allocations add up to."""
    inner, terms = _inner(c).replace(mode="frozen"), wy_block_config.TERMS[c.input_dtype]
    threads, shared = wy_block_config.block(inner, _block_knobs(s), values=False)
    tokens = facts(c)["tokens"]
    N = 4 if tokens <= 4 else 8 * (-(-tokens // 8))
    # instead of a line of each row of V: the ring's keys, and matrices of 128 bytes, two terms each
    shared += 2 * (c.K + 8) * terms * c.ring - 4 * s.warps * s.rows * (2 * N + 4)
    tiles = -(-N // 8)
    columns = 1 if N == 4 else 2 * tiles
    shared += 128 * (3 * columns * tiles + 1)
    # sums of 32 lanes over each part of K
    shared += max(threads // 32, c.ring // 8) * 256 * columns
    shared += s.shared * s.warps * s.rows * c.K * ITEMSIZE[c.state_dtype]
    return Block(threads, shared)


def _cap(c: Contract) -> int:
    """Registers a thread where states are in shared memory: many corrections and tokens spill at 96."""
    return 0 if c.ring > 16 and c.tokens > 4 else 96


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first: all of a head a block, then less of it for few heads."""
    # blocks of two warps: fewer wait at a barrier
    small = Knobs(32, 2, 64, registers=_cap(c), shared=True)
    shared = Knobs(32, 4, registers=_cap(c), shared=True, late=True)
    most = Knobs(32, 4, registers=128, late=True)
    tried = [small]
    for s in (dataclasses.replace(small, late=True), shared, most):
        tried += [s, dataclasses.replace(s, prefetch=AHEAD)]
    # more registers, or half as many rows a warp: for few heads, and for wider states
    tried += [Knobs(32, 4), Knobs(16, 4, registers=96), Knobs(16, 4, shared=True)]
    if c.state_dtype == "fp32":
        tried += [Knobs(16, 8, 256, registers=80, shared=True)]
    if c.V % 64:
        tried += [Knobs(16, 2), Knobs(16, 1)]
    return tuple(s for s in dict.fromkeys(tried) if not refuse(c, s))


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks: what was fastest on an H200."""
    half = Knobs(16, 4, shared=True)
    if c.state_dtype == "fp32":
        wanted = [half]
    elif work_units < 2 * device.sm_count:
        wanted = [Knobs(16, 4, registers=96) if c.tokens <= 4 else half]
    else:
        wanted = [Knobs(32, 4, registers=_cap(c), shared=True, late=True, prefetch=AHEAD)]
    wanted += [Knobs(32, 4, registers=128, late=True, prefetch=AHEAD), half]
    smaller = [Knobs(rows, w) for w in (4, 2, 1) for rows in (32, 16)]
    legal = [s for s in (*wanted, *smaller) if not refuse(c, s)]
    if not legal:
        raise UnsupportedProblem(f"no setting of ring serves {c.key()}: {refuse(c, Knobs(16, 1))}")
    return legal[0]


KERNEL = Kernel(
    name="ring",
    device="cuda",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="gdntune.kernels.ring:compile",
    sources=("gdntune.kernels.ring",),
    block=block,
    ring=True,
)
