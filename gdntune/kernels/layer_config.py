"""Knobs of `layer`, which are `recurrent`'s where a block has all of V: which settings are legal,
which are worth trying, and the default rule.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem, listed
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
STORES = ("plain", "first", "bulk", "bulkfirst")
# Blocks further on: more than any GPU has at once are nobody's next.
BEYOND = 4096
# Shared memory of a block: what every GPU can give one.
SHARED_BYTES = 99 << 10


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
    copied: bool = knob(
        "cp",
        "rows on their way are in shared memory, by cp.async (k_last); else in registers",
        default=False,
    )
    group: int = knob(
        "gr",
        "blocks, a cluster, that share a q/k head's value heads where its window is shifted",
        default=1,
    )
    stores: str = knob(
        "st",
        "the state's stores (k_last): plain; first, L2 is told to evict them first; bulk and bulkfirst,"
        " the same of a warp's rows at once, by cp.async.bulk from shared memory (from sm_90 on)",
        default="plain",
    )
    beyond: int = knob(
        "by",
        "L2 is asked for the state of the block so many further on, of whole requests; 0: not"
        " (k_last, from sm_90 on)",
        default=0,
    )
    sent: bool = knob(
        "sn",
        "all rows of a block are on their way at once in shared memory, a warp's by cp.async.bulk"
        " (k_last, from sm_90 on); ahead is the number of chunks",
        default=False,
    )
    once: bool = knob(
        "on",
        "KDA's decays are computed once a block, a key a thread, ahead of the convolution's barrier"
        " (T = 1); else all of them by each warp",
        default=False,
    )
    window_first: bool = knob(
        "wf",
        "the convolution's window is asked for ahead of rows that are copied, or, with roles, ahead of"
        " all warps' rows (T = 1)",
        default=False,
    )
    apart: bool = knob(
        "ap",
        "warps that have channels convolve them, and those that have KDA's decays compute these,"
        " before they ask for their rows, which the other warps do at once; of several tokens only warps"
        " that have channels ask for them",
        default=False,
    )
    roles: bool = knob(
        "ro",
        "of apart: a warp asks for what its part needs alone, the first ones for taps and channels, the"
        " last ones for gates, the last one for the norm's weight and gate; decays and beta are computed"
        " once a block",
        default=False,
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
        **({"shifted": True} if c.conv_window != "ring" else {}),
        **({"dims_first": True} if c.conv_window == "dims_first" else {}),
        **({"interleaved": True} if c.conv_input == "interleaved" else {}),
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
    if s.roles:
        # a decay of GDN, and beta
        shared += 32
    if s.copied:
        shared += s.ahead * chunk_rows(c, s) * c.K * ITEMSIZE[c.state_dtype]
    if s.sent:
        # the tile, an mbarrier a warp and chunk, and alignment
        shared += s.tile_v * c.K * ITEMSIZE[c.state_dtype] + s.ahead * threads // 4 + 128
    if s.stores.startswith("bulk"):
        # two places for each thread's rows, and alignment
        shared += 2 * threads * held_elements(c, s) * ITEMSIZE[c.state_dtype] + 128
    return Block(threads, shared)


def _decays(c: Contract) -> bool:
    """Whether a block may compute a token's decays once: KDA's, ahead of a convolution's barrier."""
    return c.op == "kda_decode" and c.conv != "none" and compiled_tokens(c) == 1


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if c.conv == "none" or c.conv_window == "ring":
        if s.group != 1:
            return f"group={s.group} with conv_window={c.conv_window!r}: expected 1"
    elif s.share * s.group != most_heads(c):
        return (
            f"share={s.share}, group={s.group} with conv_window={c.conv_window!r}: expected"
            f" share * group = {most_heads(c)}, all readers of a window in one block or cluster"
        )
    elif s.group * (c.V // s.tile_v) > MOST or (s.tile_v != c.V and c.norm == "none"):
        return (
            f"tile_v={s.tile_v}, group={s.group} with conv_window={c.conv_window!r}: expected"
            f" tile_v={c.V}, or with a norm at most {MOST} blocks in all"
        )
    if s.group > 1 and s.heads:
        return "heads=True with group > 1: a cluster's blocks are neighbours, expected False"
    if s.fence and not s.roles and not (c.conv == "none" and compiled_tokens(c) > 1):
        return (
            "fence=True with roles=False: expected False, but of several tokens without a convolution,"
            " whose barrier stands there already"
        )
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
    if s.copied and (c.layout != "k_last" or not s.early or s.vec * ITEMSIZE[c.state_dtype] != 16):
        return (
            "copied=True: expected k_last, early=True and loads of 16 bytes, vec="
            f"{16 // ITEMSIZE[c.state_dtype]}"
        )
    if s.stores not in STORES:
        return f"stores={s.stores!r}: expected one of {listed(STORES)}"
    if s.stores != "plain" and (c.layout != "k_last" or s.vec * ITEMSIZE[c.state_dtype] != 16):
        return f"stores={s.stores!r}: expected plain but for k_last and stores of 16 bytes"
    if s.stores.startswith("bulk") and s.split != 1:
        return f"stores={s.stores!r} with split={s.split}: expected split=1, rows of one warp"
    if not 0 <= s.beyond <= BEYOND:
        return f"beyond={s.beyond}: expected 0 to {BEYOND}"
    if s.beyond and (c.layout != "k_last" or s.heads):
        return f"beyond={s.beyond}: expected 0 but for k_last without heads=True"
    chunks = s.tile_v // chunk_rows(c, s)
    if s.ahead not in (1, 2, 4) or chunks % s.ahead or (s.ahead > 1 and not s.early):
        return (
            f"ahead={s.ahead} of {chunks} chunks of rows: expected 1, or with early=True one of 2, 4"
            " that divides them"
        )
    if s.sent and (c.layout != "k_last" or s.copied or s.split != 1 or s.share != 1):
        return "sent=True: expected k_last with copied=False, split=1 and share=1, a head's rows"
    if s.sent and s.ahead != chunks:
        return f"sent=True with ahead={s.ahead}: expected {chunks}, all chunks of rows at once"
    one = compiled_tokens(c) == 1
    if s.once and not (_decays(c) and s.threads >= c.K):
        return "once=True: expected KDA at T=1 with a convolution, and a thread a key"
    if s.window_first and not ((s.copied or s.roles) and one and c.conv != "none"):
        return "window_first=True: expected copied=True or roles=True at T=1 with a convolution"
    if s.apart and (why := _refuse_apart(c, s)):
        return why
    if s.roles and not (s.apart and one):
        return "roles=True: expected apart=True, warps that convolve first, and T=1"
    if block(c, s).shared_bytes > SHARED_BYTES:
        return (
            f"{block(c, s).shared_bytes} bytes of shared memory a block: expected at most"
            f" {SHARED_BYTES}, fewer tokens or heads a block"
        )
    return None


def _refuse_apart(c: Contract, s: Knobs) -> str | None:
    """Why warps cannot convolve ahead of their own rows' loads."""
    ring = c.conv != "none" and c.conv_window == "ring"
    if not ring or c.intermediate not in ("none", "slots") or c.layout != "k_last":
        return (
            "apart=True: expected k_last, a window as a ring and no states of tokens but in slots"
        )
    if s.copied or (s.sent and not s.roles) or s.share != 1:
        return "apart=True: expected share=1 and rows in registers, or with roles=True rows that are sent"
    if s.pdl == "state":
        return (
            "apart=True with pdl=state: expected none or first, the convolution waits for its input"
        )
    if _decays(c) != s.once:
        return f"apart=True with once={s.once}: expected {_decays(c)}"
    if s.once and s.threads % c.K:
        return f"apart=True with threads={s.threads}: expected a multiple of K={c.K}"
    if 2 * c.K + s.tile_v > 4 * s.threads:
        return f"apart=True: {2 * c.K + s.tile_v} channels, expected at most four a thread"
    return None


def _candidates(c: Contract) -> list[Knobs]:
    wide = 16 // ITEMSIZE[c.state_dtype]
    k_last = c.layout == "k_last"
    shifted = c.conv != "none" and c.conv_window != "ring"
    # without a norm, or windows that are shifted, a block may have a part of V
    tiles = (c.V,) if c.norm != "none" or shifted else (128, 64, 32, 16)
    most = most_heads(c) if shifted else 1
    return [
        Knobs(
            tile_v, ilp, vec, lanes, threads, split, 0, early, False, spread,
            share=share, group=most // share,
        )
        for share in dict.fromkeys((most, 1))
        for early in ((True,) if k_last and c.K % 64 == 0 else (True, False))
        for threads in ((128, 256) if k_last and c.K % 64 == 0 else (128, 256, 64, 512))
        for vec in ((wide,) if k_last and c.K % 64 == 0 else (wide, wide // 2))
        for lanes in ((16, 8, 32) if k_last else (4, 8, 2))
        for ilp in ((8, 4, 2, 1) if k_last else (1,))
        for split in ((1,) if k_last else (1, 2, 4))
        for spread in (True, False)
        for tile_v in tiles
    ]  # fmt: skip


def _worth(c: Contract, s: Knobs) -> bool:
    """Whether a legal setting is worth trying: what `recurrent`'s winners with a large tile have in
    common. More than four chunks of rows keep a head's memory waiting in line.
    """
    chunks, elements = s.tile_v // chunk_rows(c, s), held_elements(c, s)
    return chunks <= 4 and 16 <= elements <= 64 and (s.early or chunks == 1)


class _Form(NamedTuple):
    """A setting with its rows spread; tile_v 0: a whole head."""

    threads: int
    ilp: int
    tile_v: int = 0
    share: int = 1
    ahead: int = 1
    copied: bool = False
    registers: int = 0
    group: int = 1
    stores: str = "plain"
    beyond: int = 0
    sent: bool = False
    once: bool = False
    window_first: bool = False
    apart: bool = False
    roles: bool = False
    fence: bool = False
    lanes: int = 16


# What won somewhere, or was within 1% of it, on an H200 with H=16, HV=64 (KDA: 32 and 12), K=V=128,
# B=1 to 256, in a chain, with and without dependent launch: of one token, of several, of windows
# that are shifted. Left out, though legal: rows that are not spread, 8 or 32 lanes, four heads a
# block of a ring, bulk stores of one token, and `beyond` of one token; bulk stores of five blocks a
# multiprocessor, of whole heads and behind copies; copies by 256 threads. They won nowhere.
_ONE = (
    _Form(256, 4),
    _Form(256, 4, 64),
    _Form(128, 8, 64),
    _Form(128, 8, 64, stores="first"),
    _Form(128, 4, 32),
    _Form(128, 4, 32, stores="first"),
    _Form(128, 4, share=2),
    _Form(128, 4, share=2, stores="first"),
    _Form(128, 4, ahead=2, copied=True, registers=80),
    _Form(128, 4, ahead=2, copied=True, registers=80, stores="first"),
    _Form(128, 8, ahead=2, copied=True),
    _Form(128, 2, ahead=4, copied=True, registers=64),
)
# For few heads: rows that are sent, KDA's decays once a block, with rows in registers too, and
# copies behind the window. Of KDA decays once a block win at B=1; the others are within 3% there,
# and ahead by one where L2 was emptied (H200, 2026-11-30; docs/measured.md).
_SENT = (
    _Form(256, 4, ahead=2, sent=True),
    _Form(256, 4, ahead=2, sent=True, stores="first"),
    _Form(256, 2, ahead=4, sent=True),
    _Form(256, 4, 64, sent=True),
    _Form(128, 8, 64, sent=True),
    _Form(128, 4, 32, sent=True),
    _Form(128, 4, 32, sent=True, stores="first"),
    _Form(256, 4, once=True),
    _Form(256, 4, once=True, stores="first"),
    _Form(128, 4, 32, once=True, stores="first"),
    _Form(256, 4, ahead=2, copied=True, once=True, window_first=True),
)
# Warps that convolve before they ask for their rows, in blocks that have a whole head's rows on
# their way at once: the best of KDA at B=4 (the same sweeps), two chunks by 256 threads.
_APART = (
    _Form(512, 4, apart=True),
    _Form(512, 4, stores="first", apart=True),
    _Form(512, 4, registers=64, apart=True),
    _Form(512, 4),
    _Form(256, 4, ahead=2, apart=True),
    _Form(256, 4, 64, apart=True),
    _Form(256, 4, 64, stores="first", apart=True),
    _Form(128, 4, 32, stores="first", apart=True),
)
# Of these, warps with roles. In machine code for sm_90a each warp of `apart` waits for all constants
# before it asks for its rows: their registers are written again. Here a warp without a role waits for
# the state's index alone, and with `window_first` for the window to be asked for, which otherwise
# stands behind others' rows. KDA at B=4, fp32, HV=32, on an H200: 7.83 us in a chain with it, 8.19
# without, 8.05 without roles; where L2 was emptied 5.95, 5.60, 6.24 (docs/measured.md).
_ROLES = tuple(
    form._replace(apart=True, roles=True, fence=fence, window_first=first)
    for form, fences in (
        (_Form(512, 4), (True,)),
        (_Form(512, 4, stores="first"), (True,)),
        (_Form(512, 4, registers=64, stores="first"), (True,)),
        (_Form(256, 4, ahead=2), (False, True)),
        (_Form(256, 4, ahead=2, stores="first"), (True,)),
        (_Form(256, 4, 64), (True,)),
        (_Form(128, 4, 32), (True,)),
    )
    for fence in fences
    for first in (False, True)
)
# Rows that are sent, those of the warps that convolve with the others': KDA at B=4, fp32, HV=32, takes 0.6% less
# than without where L2 was emptied, 0.9% more than FlashInfer's; a head's rows by 256 threads won nowhere.
_ROLES_SENT = tuple(
    _Form(512, 4, stores="first", sent=True, apart=True, roles=True, fence=True, window_first=first)
    for first in (False, True)
)
# a warp's load is a whole row of a state in fp32
_ROLES_WIDE = (_Form(512, 8, apart=True, roles=True, fence=True, window_first=True, lanes=32),)
# of states in fp32, where a head's 64 KB on their way at once are four chunks, or two of 256 threads
_ONE_WIDE = (
    *_ONE,
    _Form(128, 2, ahead=4, copied=True, registers=80),
    _Form(256, 4, ahead=2),
    _Form(256, 4, stores="first"),
    _Form(128, 4, ahead=4, copied=True),
)
_SEVERAL = (
    _Form(256, 4),
    _Form(256, 4, 64),
    _Form(256, 4, 64, stores="first"),
    _Form(256, 4, 64, registers=64),
    _Form(256, 4, 64, registers=64, stores="bulk"),
    _Form(256, 4, 64, registers=64, stores="bulkfirst"),
    _Form(128, 8, 64),
    _Form(128, 8, 64, stores="first"),
    _Form(128, 8, 64, stores="bulk"),
    _Form(128, 8, 64, stores="bulkfirst"),
    _Form(128, 8, 64, stores="bulkfirst", beyond=256),
    _Form(128, 8, 64, stores="bulkfirst", beyond=192),
    _Form(256, 4, 64, registers=64, stores="bulkfirst", beyond=256),
    _Form(256, 4, 64, registers=64, stores="bulkfirst", beyond=192),
    _Form(128, 8, ahead=2, copied=True),
    _Form(128, 8, ahead=2, copied=True, stores="first"),
)
# as `_SENT`, of several tokens
_SEVERAL_SENT = (
    _Form(256, 4, 64, sent=True),
    _Form(128, 8, 64, sent=True, stores="first"),
    _Form(256, 4, ahead=2, sent=True),
)
# Where no convolution's barrier stands ahead of what waits for the tokens: the norm alone, B=64, 175.2
# us, 175.8 without the fence (H200, a chain, HV=64, bf16; 178.0 before, `beyond=256`); a tie at B=8
# and 16, and others lead by 2% and more below.
_SEVERAL_FENCED = (
    _Form(128, 8, 64, stores="bulkfirst", beyond=192, fence=True),
    _Form(128, 8, 64, stores="bulkfirst", fence=True),
)
# What won drafts with fp32 states at a request or two, and bf16 ones at two.
_SEVERAL_APART = (
    _Form(256, 4, 64, apart=True),
    _Form(256, 4, 64, stores="first", apart=True),
    _Form(128, 8, 64, apart=True),
    _Form(256, 4, apart=True),
)
_SEVERAL_WIDE = (
    _Form(256, 4),
    _Form(256, 4, 64),
    _Form(256, 4, 64, stores="first"),
    _Form(256, 4, 64, stores="bulk"),
    _Form(128, 8, 64, stores="first"),
    _Form(128, 4, 32, stores="first"),
    _Form(128, 4, 32, stores="bulk"),
    _Form(128, 4, ahead=2, copied=True, stores="first"),
    _Form(128, 8, ahead=2, copied=True, stores="first"),
)
_ONE_SHIFTED = (
    _Form(256, 4, share=2, group=4),
    _Form(128, 4, registers=96, share=2, group=4),
    _Form(128, 8, ahead=2, copied=True, share=2, group=4),
    _Form(256, 4, share=SHIFTED_HEADS),
    _Form(128, 4, share=SHIFTED_HEADS),
    _Form(128, 8, ahead=2, copied=True, share=SHIFTED_HEADS),
)
_SEVERAL_SHIFTED = (
    _Form(256, 4, share=2, group=4),
    _Form(128, 4, registers=96, share=2, group=4),
    _Form(128, 8, ahead=2, copied=True, registers=128, share=2, group=4),
    _Form(256, 4, share=SHIFTED_HEADS),
    _Form(256, 4, share=SHIFTED_HEADS, stores="first"),
    _Form(256, 4, share=SHIFTED_HEADS, stores="bulk"),
    _Form(128, 4, registers=96, share=2, group=4, stores="bulk"),
    _Form(128, 8, ahead=2, copied=True, share=SHIFTED_HEADS),
)


def _measured(c: Contract, device: Device) -> list[Knobs]:
    """The settings above, for the sizes that they were measured with; none for others."""
    if (c.layout, c.K, c.V) != ("k_last", 128, 128) or c.norm == "none":
        return []
    wide = c.state_dtype == "fp32"
    forms: tuple[_Form, ...] = (
        *(_SEVERAL_WIDE if wide else _SEVERAL),
        *_SEVERAL_SENT,
        *_SEVERAL_APART,
        *(_SEVERAL_FENCED if c.conv == "none" else ()),
    )
    if compiled_tokens(c) == 1:
        forms = (*(_ONE_WIDE if wide else _ONE), *_SENT, *_APART, *_ROLES, *_ROLES_SENT)
        forms += _ROLES_WIDE if wide else ()
    if c.conv != "none" and c.conv_window != "ring" and c.op == "gdn_decode":
        forms = _ONE_SHIFTED if compiled_tokens(c) == 1 else _SEVERAL_SHIFTED
    found = [
        Knobs(
            f.tile_v or c.V, f.ilp, 16 // ITEMSIZE[c.state_dtype], f.lanes, f.threads, early=True,
            fence=f.fence, spread=True, registers=f.registers, ahead=f.ahead, copied=f.copied,
            share=f.share, group=f.group, stores=f.stores, beyond=f.beyond,
            row=c.intermediate == "slots", sent=f.sent, window_first=f.window_first,
            once=f.once or ((f.sent or f.apart) and _decays(c)), apart=f.apart, roles=f.roles,
        )
        for f in forms
        if _has_clusters(device)
        or not (f.tile_v or f.group > 1 or f.stores.startswith("bulk") or f.sent)
    ]  # fmt: skip
    return [s for s in dict.fromkeys(found) if not refuse(c, s)]


def _clusters(c: Contract, s: Knobs) -> list[Knobs]:
    """Of a setting for a whole head, that whose tile of V is one chunk of rows."""
    if c.norm == "none" or not (s.early and s.spread) or held_elements(c, s) < 32:
        return []
    rows = chunk_rows(c, s)
    return [dataclasses.replace(s, tile_v=rows)] if rows < c.V else []


def _pairs(c: Contract, s: Knobs) -> list[Knobs]:
    """Of a setting for a whole head, that for two of one q/k head."""
    one = compiled_tokens(c) == 1 and s.early and s.threads == 128
    return [dataclasses.replace(s, share=2)] if one and held_elements(c, s) >= 32 else []


def _general(c: Contract, device: Device) -> list[Knobs]:
    """Settings for sizes that were not measured."""
    joins = _has_clusters(device)
    found = [
        s for s in _candidates(c) if not refuse(c, s) and _worth(c, s) and (joins or s.group == 1)
    ]
    more = [x for s in found if s.lanes == 16 or c.layout == "v_last" for x in _pairs(c, s)]
    if _has_clusters(device):
        more += [x for s in found if s.lanes == 16 for x in _clusters(c, s)]
    found += [s for s in dict.fromkeys(more) if not refuse(c, s)]
    if c.intermediate == "slots":
        found += [dataclasses.replace(s, row=True) for s in found if s.early]
    return found


def _has_clusters(device: Device) -> bool:
    """From sm_90 on."""
    return int(device.arch[3:].rstrip("af")) >= 90


@functools.lru_cache(maxsize=256)
def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    found = _measured(c, device) or _general(c, device)
    return tuple(s for s in in_every_form(found) if not refuse(c, s))


class _Target(NamedTuple):
    """What the default rule looks for: rows of V a block, threads, elements a thread, heads,
    whether rows are copied to shared memory, and how states are stored.
    """

    tile_v: int
    threads: int
    elements: int
    share: int = 1
    copied: bool = False
    group: int = 1
    stores: str = "plain"


def _target(c: Contract, heads: float) -> _Target:
    """From the winners without dependent launch on an H200 (above). heads: value heads in flight
    for each SM.
    """
    if most_heads(c) == SHIFTED_HEADS:
        several = compiled_tokens(c) > 1
        if heads < 4:
            return _Target(c.V, 256 if heads < 1 else 128, 32, 2, group=4)
        if heads < 16:
            return _Target(c.V, 256, 32, SHIFTED_HEADS)
        if several:
            return _Target(c.V, 128, 64, 2, True, group=4)
        return _Target(c.V, 128, 64, SHIFTED_HEADS, True)
    wide = c.state_dtype == "fp32"
    if c.norm != "none" and wide and compiled_tokens(c) == 1 and heads < 1:
        return _Target(c.V // 4, 128, 32) if heads < 0.5 else _Target(c.V, 256, 32)
    if c.norm != "none" and heads < 1:
        return _Target(c.V // 2, 256, 32)
    if compiled_tokens(c) > 1:
        # two blocks a head, but where a convolution would be made twice for few heads
        if c.norm == "none" or (heads < 4 and c.conv != "none"):
            return _Target(c.V, 128, 32)
        if wide:
            return _Target(c.V // 2, 256, 32, stores="bulk" if heads >= 4 else "plain")
        if 4 <= heads < 16:
            return _Target(c.V, 128, 64, copied=True)
        return _Target(c.V // 2, 128, 64, stores="bulk" if heads >= 16 else "plain")
    if heads < 4:
        return _Target(c.V, 256, 32)
    return _Target(c.V, 128, 32, 1 if heads >= 16 else 2, copied=heads >= 16)


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks: the legal setting nearest to what won elsewhere."""
    legal = list(space(c, device)) or [s for s in _candidates(c) if not refuse(c, s)]
    if not legal:
        raise UnsupportedProblem(
            f"no setting of layer serves {c.key()}: {refuse(c, Knobs(c.V, 1, 4, 8, 64))}"
        )
    target = _target(c, work_units / device.sm_count)

    def distance(s: Knobs) -> tuple[Any, ...]:
        return (
            s.pdl != "none",
            s.sent or s.once or s.window_first or s.apart or s.threads > 256,
            0 if s.stores == target.stores else 1 if s.stores == "plain" else 2,
            s.beyond > 0,
            c.intermediate == "slots" and not s.row,
            abs(math.log2(s.tile_v / target.tile_v)),
            abs(math.log2(s.group / target.group)),
            abs(s.share - target.share),
            not s.spread,
            s.copied != target.copied,
            abs(math.log2(s.threads / target.threads)),
            not s.early,
            abs(held_elements(c, s) - target.elements),
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
