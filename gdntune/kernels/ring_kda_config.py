"""Knobs of `ring_kda`: which settings are legal and which are worth trying."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels import recurrent_config
from gdntune.kernels.facts import facts as decode_facts
from gdntune.kernels.spec import Block, Facts, Kernel, knob
from gdntune.problem import ITEMSIZE, Contract


@dataclasses.dataclass(frozen=True)
class Knobs(recurrent_config.TileKnobs):
    """One setting of the kernel behind a ring whose entries have a decay a key."""

    registers: int = knob(
        "rg", "at most so many registers a thread, for more warps at once; 0: no cap", default=0
    )


def _tokens(c: Contract) -> int:
    return 4 if c.tokens <= 4 else 8 if c.tokens <= 8 else 16


def facts(c: Contract) -> Facts:
    """What an object is compiled for; of one token as of up to four."""
    own = {name: getattr(c, name) for name in ("ring", "ring_dtype", "ring_rounding")}
    return {**decode_facts(c), "tokens": _tokens(c), **own}


def _inner(c: Contract) -> Contract:
    """The contract that `recurrent` would serve in its place."""
    plain = {"ring": 0, "ring_dtype": "fp32", "ring_rounding": "nearest"}
    return c.replace(**plain, tokens=max(c.tokens, 2))


def _recurrent(s: Knobs) -> recurrent_config.Knobs:
    return recurrent_config.Knobs(**dataclasses.asdict(s), early=True, spread=True)


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.op != "kda_decode":
        return f"op={c.op}: expected kda_decode, whose decays are one a key"
    if fault := recurrent_config.refuse(_inner(c), _recurrent(s)):
        return fault
    held = recurrent_config.held_elements(_inner(c), _recurrent(s))
    if c.ring_rounding == "stochastic" and held % 8:
        return f"ring_rounding=stochastic with {held} elements a thread: expected a multiple of 8"
    shared = block(c, s).shared_bytes
    # of what any architecture has without asking
    if shared > 48 * 1024:
        return f"tile_v={s.tile_v} with ring={c.ring}: {shared} bytes of shared memory, over 48 KiB"
    return None


def block(c: Contract, s: Knobs) -> Block:
    """Threads, and the shared memory that the kernel's allocations add up to."""
    T = _tokens(c)
    floats = T * (3 * c.K + 4) + c.ring * (c.K + s.tile_v) + c.K
    return Block(s.threads, 4 * floats + T * s.tile_v * ITEMSIZE[c.input_dtype])


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    wide = 16 // ITEMSIZE[c.state_dtype]
    if c.layout == "k_last":
        vecs = (wide, wide // 2) if c.K % 64 else (wide,)
        shapes = [(ilp, v, lanes) for v in vecs for ilp in (4, 8, 2) for lanes in (16, 8, 32)]
    else:
        shapes = [(1, v, lanes) for v in (wide, wide // 2) for lanes in (8, 4, 16)]
    # few: it is bound by arithmetic, in which they differ little
    blocks = [(32, 128), (64, 128), (128, 128), (64, 64), (16, 64), (128, 256)]
    tried = [
        Knobs(tile_v, ilp, vec, lanes, threads)
        for ilp, vec, lanes in shapes
        for tile_v, threads in blocks
    ]
    found = [s for s in tried if not refuse(c, s)]
    return tuple(found[:12])


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks: what was fastest on an H200 at B=1, and from B=16 on."""
    found = space(c, device)
    if not found:
        why = refuse(c, Knobs(32, 4, 16 // ITEMSIZE[c.state_dtype], 16, 128))
        raise UnsupportedProblem(f"no setting of ring_kda serves {c.key()}: {why}")
    few = work_units < 2 * device.sm_count
    wanted = [s for s in found if (s.tile_v <= 32 if few else s.tile_v == 128)]
    return (wanted or list(found))[0]


KERNEL = Kernel(
    name="ring_kda",
    device="cuda",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="gdntune.kernels.ring_kda:compile",
    sources=("gdntune.kernels.ring_kda",),
    leads=lambda c: c.op == "kda_decode",
    block=block,
    ring=True,
)
