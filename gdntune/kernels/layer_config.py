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
from gdntune.kernels.dependent_launch import in_every_form, under
from gdntune.kernels.facts import compiled_tokens as delta_tokens
from gdntune.kernels.facts import facts as delta_facts
from gdntune.kernels.recurrent_config import chunk_rows, held_elements
from gdntune.kernels.spec import Block, Facts, Kernel, knob
from gdntune.problem import ITEMSIZE, Contract

# blocks of a cluster: what every GPU that has clusters can start
MOST = 8
# Value heads of a q/k head whose window is shifted in place: one block has them all, so that
# nobody reads a window that another shifts.
SHIFTED_HEADS = 8
MANY_HEADS = 1 << 16


@dataclasses.dataclass(frozen=True)
class Knobs(recurrent_config.Knobs):
    """One setting of the layer's kernel. With a norm, blocks that share a head's V are a cluster."""

    share: int = knob(
        "sh",
        "value heads of one q/k head that a block has one after another; their q and k are convolved"
        " once",
        default=1,
    )
    ahead: int = knob(
        "ah", "chunks of rows whose loads are in flight; early=True, where more than one", default=1
    )


def compiled_tokens(c: Contract) -> int:
    """The largest T that a contract's object serves. To 4 there is one of its own: a convolution's
    tokens are held in registers, and their rows in shared memory.
    """
    tokens = delta_tokens(c)
    return 4 if tokens > 1 and c.tokens <= 4 else tokens


def facts(c: Contract) -> Facts:
    """What an object is compiled for: the delta rule's facts, and those of what is around it."""
    return {
        **delta_facts(c),
        "tokens": compiled_tokens(c),
        "norm": c.norm,
        "norm_weight_dtype": c.norm_weight_dtype if c.norm != "none" else None,
        "conv": c.conv,
        "conv_width": c.conv_width,
        "conv_bias": c.conv_bias,
        # a ring's objects are what they were before there was another window
        **({"shifted": True} if c.conv_window == "shifted" else {}),
    }


def most_heads(c: Contract) -> int:
    """The most value heads of a q/k head that a contract serves."""
    if c.conv == "none" or c.conv_window == "ring":
        return MANY_HEADS
    # KDA's heads have their own q and k
    return 1 if c.op == "kda_decode" else SHIFTED_HEADS


def block(c: Contract, s: Knobs) -> Block:
    """As `recurrent`'s, with the outputs of all tokens in fp32 and the convolved inputs."""
    tokens, wide = compiled_tokens(c), c.V * s.share
    tile = s.tile_v * s.share
    threads, shared = recurrent_config.block(c, dataclasses.replace(s, tile_v=tile))
    # of tokens that its object stages and ours does not
    staged = 4 * ((3 if c.op == "kda_decode" else 2) * c.K + 4) + ITEMSIZE[c.input_dtype] * tile
    shared -= (delta_tokens(c) - tokens) * staged
    if c.norm != "none":
        shared += 4 * tokens * wide
        if s.tile_v < c.V:
            # the cluster's sums of squares and their mbarrier
            shared += 4 * tokens * (c.V // s.tile_v) + 16
    if c.conv != "none":
        shared += ITEMSIZE[c.input_dtype] * tokens * (2 * c.K + wide)
    if s.share > 1:
        # decay and beta
        shared += 8 * tokens * s.share
    return Block(threads, shared)


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.conv_window == "shifted" and (s.share != most_heads(c) or s.tile_v != c.V):
        return (
            f"share={s.share}, tile_v={s.tile_v} with conv_window='shifted': expected"
            f" share={most_heads(c)} and tile_v={c.V}, a block that has all readers of a window"
        )
    if s.fence:
        return "fence=True: a convolution's barrier stands there already, expected False"
    if c.norm != "none" and s.tile_v != c.V:
        if c.V // s.tile_v > MOST or s.tile_v % 32:
            return (
                f"tile_v={s.tile_v} of V={c.V}: a norm's tiles are a cluster of at most {MOST}"
                " blocks, expected a multiple of 32"
            )
        if s.heads:
            return "heads=True: a cluster's blocks are neighbours, expected False"
    if s.share not in (1, 2, 4, SHIFTED_HEADS):
        return f"share={s.share}: expected one of 1, 2, 4, {SHIFTED_HEADS}"
    if s.share > 1:
        if c.op == "kda_decode" or c.conv == "none" or c.layout == "v_last":
            return (
                f"share={s.share}: expected 1 but for GDN with a convolution and k_last, whose heads"
                " share q and k and are rows of one tile"
            )
        if s.tile_v != c.V:
            return f"share={s.share} with tile_v={s.tile_v}: expected V={c.V}, whole heads"
    if s.registers not in (0, 64, 80, 96, 128):
        return f"registers={s.registers}: expected one of 0, 64, 80, 96, 128"
    if why := recurrent_config.refuse(c, dataclasses.replace(s, registers=0)):
        return why
    chunks = s.tile_v // chunk_rows(c, s)
    if s.ahead not in (1, 2, 4) or chunks % s.ahead or (s.ahead > 1 and not s.early):
        return (
            f"ahead={s.ahead} of {chunks} chunks of rows: expected 1, or with early=True one of 2, 4"
            " that divides them"
        )
    return None


def _candidates(c: Contract) -> list[Knobs]:
    wide = 16 // ITEMSIZE[c.state_dtype]
    k_last = c.layout == "k_last"
    # without a norm a block may have a part of V
    tiles = (c.V,) if c.norm != "none" else (128, 64, 32, 16)
    share = most_heads(c) if c.conv_window == "shifted" else 1
    return [
        Knobs(tile_v, ilp, vec, lanes, threads, split, 0, early, False, spread, share=share)
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


def _clusters(c: Contract, s: Knobs) -> list[Knobs]:
    """Of a setting for a whole head, those whose tile of V is one chunk of rows: small batches."""
    if c.norm == "none" or not s.early:
        return []
    rows = chunk_rows(c, s)
    return [dataclasses.replace(s, tile_v=rows)] if rows < c.V else []


def _deeper(c: Contract, s: Knobs) -> list[Knobs]:
    """Of a setting for a whole head, those with more of the state in flight and heads that share a
    block: large batches. Few rows at once and a cap on registers leave room for what is on its way.
    """
    if not (s.early and s.spread and s.threads in (128, 256) and c.layout == "k_last"):
        return []
    found = [dataclasses.replace(s, share=n) for n in (2, 4)]
    if held_elements(c, s) == 16:
        narrow = ITEMSIZE[c.state_dtype] == 2
        caps = {2: (0, 64, 80), 4: (0, 96)} if narrow else {2: (0, 96)}
        found += [
            dataclasses.replace(s, ahead=ahead, registers=cap, share=n)
            for ahead, some in caps.items()
            for cap in some
            for n in ((s.share,) if c.conv_window == "shifted" else (1, 2, 4))
        ]
    return found


def _has_clusters(device: Device) -> bool:
    """From sm_90 on."""
    return int(device.arch[3:].rstrip("af")) >= 90


@functools.lru_cache(maxsize=256)
def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    legal = [s for s in _candidates(c) if not refuse(c, s)]
    found = [s for s in legal if _worth(c, s)]
    more = (
        [x for s in found if s.lanes == 16 for x in _clusters(c, s)]
        if _has_clusters(device)
        else []
    )
    more += [x for s in legal if s.lanes == 16 for x in _deeper(c, s)]
    found += [s for s in dict.fromkeys(more) if not refuse(c, s)]
    if c.intermediate == "slots":
        found += [dataclasses.replace(s, row=True) for s in found if s.early]
    return tuple(s for s in in_every_form(found) if not refuse(c, s))


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
            s.row or s.pdl != "none" or s.share not in (1, SHIFTED_HEADS),
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
    under=under,
    layer=True,
)
