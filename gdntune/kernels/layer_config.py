"""Knobs of `layer`, which are `recurrent`'s where a block has all of V: which settings are legal,
which are worth trying, and the default rule.
"""

import dataclasses
import functools
import math
from typing import Any

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels import recurrent_config
from gdntune.kernels.facts import compiled_tokens
from gdntune.kernels.facts import facts as delta_facts
from gdntune.kernels.recurrent_config import PDL, Knobs, chunk_rows, held_elements
from gdntune.kernels.spec import Block, Facts, Kernel
from gdntune.problem import ITEMSIZE, Contract


def facts(c: Contract) -> Facts:
    """What an object is compiled for: the delta rule's facts, and those of what is around it."""
    return {
        **delta_facts(c),
        "norm": c.norm,
        "norm_weight_dtype": c.norm_weight_dtype if c.norm != "none" else None,
        "conv": c.conv,
        "conv_width": c.conv_width,
        "conv_bias": c.conv_bias,
    }


def block(c: Contract, s: Knobs) -> Block:
    """As `recurrent`'s, with the outputs of all tokens in fp32 and the convolved inputs."""
    threads, shared = recurrent_config.block(c, s)
    if c.norm != "none":
        shared += 4 * compiled_tokens(c) * c.V
    if c.conv != "none":
        shared += ITEMSIZE[c.input_dtype] * compiled_tokens(c) * (2 * c.K + c.V)
    return Block(threads, shared)


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.conv_window == "shifted":
        return (
            "conv_window='shifted': blocks that share a q/k head would read a window while another"
            " shifts it; expected a ring"
        )
    if c.norm != "none" and s.tile_v != c.V:
        return f"tile_v={s.tile_v} of V={c.V}: a norm needs all of a head's V, expected {c.V}"
    return recurrent_config.refuse(c, s)


def _candidates(c: Contract) -> list[Knobs]:
    wide = 16 // ITEMSIZE[c.state_dtype]
    k_last = c.layout == "k_last"
    # without a norm a block may have a part of V
    tiles = (c.V,) if c.norm != "none" else (128, 64, 32, 16)
    return [
        Knobs(tile_v, ilp, vec, lanes, threads, split, 0, early, False, spread)
        for early in (True, False)
        for threads in (128, 256, 64, 512)
        for vec in ((wide,) if k_last and c.K % 64 == 0 else (wide, wide // 2))
        for lanes in ((16, 8, 32) if k_last else (4, 8, 2))
        for ilp in ((8, 4, 2, 1) if k_last else (1,))
        for split in ((1,) if k_last else (1, 2, 4))
        for spread in (True, False)
        for tile_v in tiles
    ]


def _worth(c: Contract, s: Knobs) -> bool:
    """Whether a legal setting is worth trying: what `recurrent`'s winners with a large tile have in
    common. More than four chunks of rows keep a head's memory waiting in line.
    """
    chunks, elements = s.tile_v // chunk_rows(c, s), held_elements(c, s)
    return chunks <= 4 and 16 <= elements <= 64 and (s.early or chunks == 1)


@functools.lru_cache(maxsize=256)
def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    found = [s for s in _candidates(c) if not refuse(c, s) and _worth(c, s)]
    if c.intermediate == "slots":
        found += [dataclasses.replace(s, row=True) for s in found if s.early]
    dependent = (dataclasses.replace(s, pdl=p) for p in PDL[1:] for s in found)
    return (*found, *(s for s in dependent if not refuse(c, s)))


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks: 128 threads, 64 bytes of a row's state a thread at once, as
    a prototype's best on an H200 from B=4 on.
    """
    legal = list(space(c, device)) or [s for s in _candidates(c) if not refuse(c, s)]
    if not legal:
        raise UnsupportedProblem(
            f"no setting of layer serves {c.key()}: {refuse(c, Knobs(c.V, 1, 4, 8, 64))}"
        )
    elements = 64 if ITEMSIZE[c.state_dtype] == 2 else 32

    def distance(s: Knobs) -> tuple[Any, ...]:
        return (
            s.row or s.pdl != "none",
            -s.tile_v,
            not s.spread,
            s.threads != 128,
            not s.early,
            abs(held_elements(c, s) - elements),
            abs(math.log2(s.lanes / 16)),
            -s.vec,
            s.split,
        )

    return min(legal, key=distance)


KERNEL = Kernel(
    name="layer",
    device="cuda",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="gdntune.kernels.layer:compile",
    sources=("gdntune.kernels.layer",),
    block=block,
    under=recurrent_config.under,
    layer=True,
)
