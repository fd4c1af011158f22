"""Knobs of `ring`: which settings are legal and which are worth trying."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels import wy_block_config
from gdntune.kernels.spec import Block, Facts, Kernel, knob
from gdntune.problem import Contract


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting of the tensor-core kernel behind a ring."""

    rows: int = knob("rw", "rows of V a warp has in registers")
    warps: int = knob("wp", "warps of a block that have rows of V")
    threads: int = knob(
        "th",
        "threads a block, all of which work on what depends on q, k and the gates alone",
        default=128,
    )
    passes: int = knob("ps", "times that a warp takes new rows", default=1)
    registers: int = knob(
        "rg", "at most so many registers a thread, for more warps at once; 0: no cap", default=0
    )


def facts(c: Contract) -> Facts:
    """What an object is compiled for; of one token as of up to four."""
    tokens = {"tokens": 4} if c.tokens <= 4 else {}
    return {**wy_block_config.block_facts(c), **tokens, "ring": c.ring, "ring_dtype": c.ring_dtype}


def _inner(c: Contract) -> Contract:
    """The contract that `wy_block` would serve in its place."""
    return c.replace(ring=0, ring_dtype="fp32", tokens=max(c.tokens, 2))


def _block_knobs(s: Knobs) -> wy_block_config.Knobs:
    return wy_block_config.Knobs(s.rows, s.warps, s.threads, s.passes, s.registers)


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.op != "gdn_decode":
        return f"op={c.op}: expected gdn_decode, whose decay is one a head"
    if c.input_dtype == "fp32":
        return "input_dtype=fp32: keys are one or two terms of bf16, expected bf16 or fp16"
    if s.threads == 64:
        # `wy_block` has no such block: legal as one of twice the warps in half the passes
        if s.warps != 2:
            return f"threads=64 with warps={s.warps}: expected 2"
        double = 2 if s.passes > 1 else 1
        s = dataclasses.replace(s, threads=128, warps=2 * double, passes=s.passes // double)
    return wy_block_config.refuse(_inner(c), _block_knobs(s))


def block(c: Contract, s: Knobs) -> Block:
    """Threads, and the shared memory that the kernel's allocations add up to."""
    threads, shared = wy_block_config.block(_inner(c).replace(mode="frozen"), _block_knobs(s))
    terms = wy_block_config.TERMS[c.input_dtype]
    return Block(threads, shared + 2 * (c.K + 8) * terms * c.ring)


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first: those of `wy_block`, and more caps on registers."""
    tried = [Knobs(32, 4), Knobs(32, 4, registers=128)]
    tried += [Knobs(16, 4, registers=r) for r in (0, 96, 80)]
    tried += [Knobs(16, 4, passes=2, registers=128), Knobs(16, 2)]
    # blocks of two warps: fewer wait at a barrier
    tried += [Knobs(32, 2, 64, registers=r) for r in (0, 128)]
    tried += [Knobs(32, 2, 64, passes=2)]
    return tuple(s for s in dict.fromkeys(tried) if not refuse(c, s))


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks: what was fastest on an H200 at B=1, and from B=64 on."""
    few = work_units < 2 * device.sm_count
    wanted = Knobs(32, 4, registers=128)
    if few:
        wanted = Knobs(16, 4, registers=96) if c.tokens <= 4 else Knobs(32, 4)
    smaller = [Knobs(rows, w) for w in (4, 2, 1) for rows in (32, 16)]
    legal = [s for s in (wanted, *smaller) if not refuse(c, s)]
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
