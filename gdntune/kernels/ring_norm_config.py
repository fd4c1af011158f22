"""Knobs of `ring_norm`: `ring`'s, of which those are legal whose blocks have all of a head's V, as its norm needs."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels import ring_config
from gdntune.kernels.layer_config import SHARED_BYTES
from gdntune.kernels.ring_config import Knobs
from gdntune.kernels.spec import Block, Facts
from gdntune.problem import Contract


def _inner(c: Contract) -> Contract:
    """The contract without its norm, which `ring` serves."""
    return c.replace(norm="none", norm_weight_dtype="fp32")


def facts(c: Contract) -> Facts:
    """What an object is compiled for: `ring`'s, and the norm."""
    own = {"norm": c.norm, "norm_weight_dtype": c.norm_weight_dtype}
    return {**ring_config.facts(_inner(c)), **own}


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.V & (c.V - 1):
        return (
            f"V={c.V}: a norm adds up a head's V in one block, which has a power of two of rows;"
            " expected 32, 64, 128, 256 or 512"
        )
    if fault := ring_config.refuse(_inner(c), s):
        return fault
    if s.rows * s.warps * s.passes != c.V:
        return (
            f"V={c.V} with rows*warps*passes={s.rows * s.warps * s.passes}: expected all of V in a"
            " block, whose norm adds it up"
        )
    # wide blocks of many tokens: 121 KB of K=256, T=16
    if (shared := block(c, s).shared_bytes) > SHARED_BYTES:
        return f"{shared} bytes of shared memory a block: expected at most {SHARED_BYTES}"
    return None


def block(c: Contract, s: Knobs) -> Block:
    """Threads, and the shared memory of `ring` with a head's outputs in fp32 beside it."""
    threads, shared = ring_config.block(_inner(c), s)
    return Block(threads, shared + 4 * facts(c)["tokens"] * c.V)


def _whole(c: Contract, found: tuple[Knobs, ...]) -> tuple[Knobs, ...]:
    """Settings with as many warps as a head's V takes, and passes beyond eight; those that are legal."""
    made = []
    for s in found:
        warps = min(max(c.V // s.rows, 1), 8)
        # a block of two warps has no others where the state is in shared memory
        threads = 64 if warps == 2 and s.shared else max(128, 32 * warps)
        passes = max(c.V // (s.rows * warps), 1)
        made.append(dataclasses.replace(s, warps=warps, threads=threads, passes=passes))
    return tuple(s for s in dict.fromkeys(made) if not refuse(c, s))


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying: `ring`'s, each with warps for all of a head."""
    return _whole(c, ring_config.space(_inner(c), device))


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """`ring`'s rule, with warps for all of a head. Not timed yet."""
    fallback = [Knobs(rows, 1) for rows in (32, 16)]
    legal = _whole(c, (ring_config.default(_inner(c), work_units, device), *fallback))
    if not legal:
        fault = refuse(c, dataclasses.replace(fallback[1], warps=8, threads=256))
        raise UnsupportedProblem(f"no setting of ring_norm serves {c.key()}: {fault}")
    return legal[0]


KERNEL = dataclasses.replace(
    ring_config.KERNEL,
    name="ring_norm",
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="gdntune.kernels.ring_norm:compile",
    sources=("gdntune.kernels.ring_norm",),
    block=block,
    layer=True,
)
