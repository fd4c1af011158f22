"""Knobs of `stream`, the floor: the memory knobs that a kernel has, and nothing else."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.kernels.spec import Block, Facts, Kernel, Variant, knob
from gdntune.problem import ITEMSIZE, Contract, Problem
from gdntune.sol import state_bytes


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting of the streaming kernel."""

    tile: int = knob("t", "state elements a thread block moves")
    ilp: int = knob("ilp", "loads a thread has in flight")
    vec: int = knob("vec", "state elements one load moves")
    threads: int = knob("th", "threads a block")
    early: bool = knob("early", "the next loads go before this ones' stores", default=False)
    indexed: bool = knob(
        "idx",
        "over the slots that an index names, in its order; else over those from 0 on",
        default=False,
    )
    ahead: bool = knob(
        "ahead",
        "kernels of programmatic dependent launch behind it may start at once",
        default=False,
    )


def facts(c: Contract) -> Facts:
    """The form of a contract's floor: whether the state is rewritten, and whether a copy a token is
    written too.
    """
    return {
        "state_dtype": c.state_dtype,
        "update": c.always_writes,
        "steps": c.intermediate != "none",
    }


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None."""
    if s.vec * ITEMSIZE[c.state_dtype] not in (4, 8, 16):
        return f"vec={s.vec} of {c.state_dtype}: expected loads of 4, 8 or 16 bytes"
    if s.threads % 32 or not 32 <= s.threads <= 1024:
        return f"threads={s.threads}: expected a multiple of 32, at most 1024"
    if s.tile % (s.threads * s.vec * s.ilp):
        return f"tile={s.tile} is not a multiple of threads*vec*ilp={s.threads * s.vec * s.ilp}"
    if (c.K * c.V) % s.tile:
        return f"K*V={c.K * c.V} is not a multiple of tile={s.tile}"
    if s.indexed and not c.pool:
        return (
            "indexed=True without a pool: states lie in the order of the requests, expected False"
        )
    return None


def at(p: Problem, device: Device, s: Knobs) -> bool:
    """Whether a setting is a floor of a problem.

    States in order are, always. Of a pool whose states are more than L2 holds the slots in the
    order of the case's index, shuffled, are another: what their order alone costs. Of fewer it
    costs nothing, and to wait for an index would hide what kernels lose.
    """
    return not s.indexed or (p.contract.pool and state_bytes(p) > device.l2_bytes)


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    vec = 16 // ITEMSIZE[c.state_dtype]
    kept = []
    for early, indexed in (
        (e, i) for i in ((False, True) if c.pool else (False,)) for e in (False, True)
    ):
        for threads in (128, 256, 64):
            for ilp in (1, 2, 4, 8):
                for tile in (1024, 2048, 4096, 8192, 16384):
                    s = Knobs(tile, ilp, vec, threads, early, indexed)
                    chunks = tile // (threads * vec * ilp)
                    if not refuse(c, s) and chunks <= 4 and not (early and chunks == 1):
                        kept.append(s)
    return tuple(kept)


# Threads and independent loads of each. At 1866 cells of the published sweeps of an H100 and an H200
# the best of these four is 0.8% above the best of all in the mean, 9% at most.
_FEW = ((64, 4), (256, 1), (256, 2), (256, 4))


def few(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """Four shapes of each form, each thread's loads all at once."""
    return tuple(
        s
        for s in space(c, device)
        if (s.threads, s.ilp) in _FEW and not s.early and s.tile == s.threads * s.ilp * s.vec
    )


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A middling shape."""
    vec = 16 // ITEMSIZE[c.state_dtype]
    best = [
        s
        for s in space(c, device)
        if s.threads == 128 and s.vec == vec and not s.early and not s.indexed
    ]
    return min(best, key=lambda s: (abs(s.tile - 4096), abs(s.ilp - 4)))


KERNEL = Kernel(
    name="stream",
    device="cuda",
    role="floor",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    at=at,
    compiler="gdntune.kernels.stream:compile",
    sources=("gdntune.kernels.stream",),
    block=lambda _, s: Block(s.threads, 0),
    few=few,
)


def flush() -> tuple[Contract, Variant]:
    """The read form over fp32: what empties L2 between timed launches. A row of its buffer is one
    tile, 16 KiB.
    """
    return Contract(state_dtype="fp32", mode="frozen"), KERNEL.variant(
        Knobs(tile=4096, ilp=4, vec=4, threads=256)
    )


def producer() -> tuple[Contract, Variant]:
    """A copy of fp32 rows, one to one, that lets the kernels behind it start at once: what writes a
    call's inputs in a chain. A row of its buffers is whole tiles of 4 KiB.
    """
    contract = Contract(state_dtype="fp32", mode="frozen", intermediate="dense")
    return contract, KERNEL.variant(Knobs(tile=1024, ilp=2, vec=4, threads=128, ahead=True))
