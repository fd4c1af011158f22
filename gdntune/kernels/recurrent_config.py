"""Knobs of `recurrent`: which settings are legal, which are worth trying, and the default rule."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.dependent_launch import in_every_form, pdl_fault, pdl_knob, under
from gdntune.kernels.facts import compiled_tokens, facts
from gdntune.kernels.spec import Block, Kernel, knob
from gdntune.problem import ITEMSIZE, Contract


@dataclasses.dataclass(frozen=True)
class TileKnobs:
    """What a kernel on CUDA cores has: how a tile of rows of V lies on a block's threads."""

    tile_v: int = knob("tv", "rows of V a thread block owns")
    ilp: int = knob("ilp", "rows a thread has in flight (k_last; a v_last thread holds vec rows)")
    vec: int = knob("vec", "state elements one load moves")
    lanes: int = knob("ln", "threads that share a row, a power of two")
    threads: int = knob("th", "threads a block")


@dataclasses.dataclass(frozen=True)
class Knobs(TileKnobs):
    """One setting of `recurrent`."""

    split: int = knob("sp", "warps that share a row's K (v_last)", default=1)
    run: int = knob(
        "run", "key positions side by side in a thread (v_last); 0: all that it has", default=0
    )
    early: bool = knob(
        "early",
        "the state's loads go before the gate, and the next rows' before this ones' stores",
        default=False,
    )
    fence: bool = knob(
        "fence",
        "a branch keeps what needs q, k and the gate behind the state's loads; at T=1 q and k are"
        " normalised there",
        default=False,
    )
    spread: bool = knob(
        "spread",
        "a row's sums end in a few of its threads, which hand u round; else in all of them",
        default=False,
    )
    heads: bool = knob(
        "heads",
        "T=1: neighbouring blocks have neighbouring heads, not one head's tiles",
        default=False,
    )
    registers: int = knob(
        "rg", "at most so many registers a thread, for more warps at once; 0: no cap", default=0
    )
    row: bool = knob(
        "row",
        "intermediate=slots: a warp reads a request's slots at once; else each where it is needed",
        default=False,
    )
    pdl: str = pdl_knob()


def held_rows(c: Contract, s: Knobs) -> int:
    """Rows of V that a thread holds at once."""
    return s.ilp if c.layout == "k_last" else s.vec


def held_elements(c: Contract, s: Knobs) -> int:
    """State elements that a thread holds at once, in fp32."""
    return held_rows(c, s) * (c.K // (s.lanes * s.split))


def chunk_rows(c: Contract, s: Knobs) -> int:
    """Rows of V that a block holds at once."""
    return s.threads // (s.lanes * s.split) * held_rows(c, s)


def block(c: Contract, s: Knobs) -> Block:
    """Threads, and the shared memory that the kernel's allocations add up to."""
    tokens, floats, values = compiled_tokens(c), 0, 0
    if s.split > 1:
        # two turns of a row's sums over its warps, padded to whole vectors
        floats += 2 * (s.threads // s.lanes) * ((2 * held_rows(c, s) + 6) // 4 * 4)
    if tokens > 1:
        # q and k, of KDA the decays, and four scalars a token; and v
        floats += tokens * ((3 if c.op == "kda_decode" else 2) * c.K + 4)
        values = tokens * s.tile_v
    elif c.op == "kda_decode":
        # a warp's decays
        floats += s.threads // 32 * c.K
    return Block(s.threads, 4 * floats + ITEMSIZE[c.input_dtype] * values)


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if s.threads not in (32, 64, 128, 256, 512):
        return f"threads={s.threads}: expected one of 32, 64, 128, 256, 512"
    if s.lanes not in (1, 2, 4, 8, 16, 32):
        # another number compiles in silence, and its butterfly sums are wrong
        return (
            f"lanes={s.lanes}: the row's sums are butterflies within a warp, expected a power of"
            " two to 32"
        )
    size = s.vec * ITEMSIZE[c.state_dtype]
    if size not in (4, 8, 16):
        return f"vec={s.vec} of {c.state_dtype} is {size} bytes a load: expected one of 4, 8, 16"
    if c.layout == "k_last":
        if c.K % (s.vec * s.lanes):
            return f"K={c.K} is not a multiple of vec*lanes={s.vec * s.lanes}"
        if s.split != 1:
            return f"split={s.split} with k_last: a row is one warp's, expected 1"
        if s.run:
            return f"run={s.run} with k_last: a thread's neighbours are those of a load, expected 0"
    else:
        if s.split not in (1, 2, 4, 8, 16) or s.threads // 32 % s.split:
            return (
                f"split={s.split} of {s.threads // 32} warps: expected one of 1, 2, 4, 8, 16 that"
                " divide the warps"
            )
        if c.K % (s.lanes * s.split):
            return f"K={c.K} is not a multiple of lanes*split={s.lanes * s.split}"
        if s.ilp != 1:
            return f"ilp={s.ilp} with v_last: a thread holds vec rows, expected 1"
        held = c.K // (s.lanes * s.split)
        if s.run not in (0, 1, 2, 4, 8) or (s.run and (s.run >= held or held % s.run)):
            return (
                f"run={s.run} of the {held} key positions that a thread holds: expected 0 or one of"
                " 1, 2, 4, 8 that divide them"
            )
    if s.spread and (held_rows(c, s) == 1 or s.lanes == 1):
        return (
            "spread=True: accepted with rows, and threads that share them, to spread over: more"
            " than one of each"
        )
    if s.registers not in (0, 64, 96, 128):
        return f"registers={s.registers}: expected one of 0, 64, 96, 128"
    if s.heads and (compiled_tokens(c) > 1 or s.tile_v == c.V):
        return (
            f"heads=True: accepted at T=1 with more than one tile a head, tile_v={s.tile_v} of"
            f" V={c.V}"
        )
    if s.fence and (not s.early or c.layout == "v_last"):
        return "fence=True: accepted with k_last and early=True, where loads stand before the gate"
    if s.row and c.intermediate != "slots":
        return (
            f"row=True with intermediate={c.intermediate}: expected slots, of which a row is read"
        )
    if fault := pdl_fault(s):
        return fault
    if s.pdl == "state" and not s.early:
        return "pdl='state' without early=True: the state's loads stand before the gates'"
    rows = chunk_rows(c, s)
    if s.tile_v % rows:
        return (
            f"tile_v={s.tile_v} is not a multiple of the {rows} rows that {s.threads} threads hold"
        )
    if s.split > 1 and s.tile_v != rows:
        return (
            f"tile_v={s.tile_v} with split={s.split}: warps that share rows go over them once,"
            f" expected {rows}"
        )
    if c.V % s.tile_v:
        return f"V={c.V} is not a multiple of tile_v={s.tile_v}"
    held = held_elements(c, s)
    if held > 128:
        return f"{held} state elements a thread in fp32: beyond 128 registers would spill"
    return None


def _candidates(c: Contract) -> tuple[Knobs, ...]:
    wide = 16 // ITEMSIZE[c.state_dtype]
    k_last = c.layout == "k_last"
    vectors = (wide,) if k_last and c.K % 64 == 0 else (wide, wide // 2)
    return _all_of(vectors, k_last, compiled_tokens(c) > 1)


@functools.cache
def _all_of(vectors: tuple[int, ...], k_last: bool, loop: bool) -> tuple[Knobs, ...]:
    """Thousands, of a few kinds of contracts: made once."""
    return tuple(
        Knobs(tile_v, ilp, vec, lanes, threads, split, run, early, fence, spread, heads, registers)
        for early in (True, False)
        for fence in ((False, True) if early else (False,))
        for threads in ((128, 64, 256, 32) if k_last else (128, 64, 256, 512))
        for vec in vectors
        for lanes in ((16, 8, 32, 4) if k_last else (4, 8, 2, 16, 1))
        for ilp in ((1, 2, 4, 8) if k_last else (1,))
        for split in ((1,) if k_last else (1, 2, 4, 8, 16))
        for run in ((0,) if k_last or loop else (4, 2, 1, 0))
        for spread in (False, True)
        for heads in ((False,) if loop else (False, True))
        for registers in ((0,) if k_last != loop else (0, 96) if k_last else (0, 64))
        for tile_v in (8, 16, 32, 64, 128)
    )


class _Tried(NamedTuple):
    """A setting for a contract, and what it comes to."""

    c: Contract
    s: Knobs
    rows: int
    elements: int
    chunks: int
    loop: bool
    narrow: bool


def _tried(c: Contract, s: Knobs) -> _Tried:
    chunks = s.tile_v // chunk_rows(c, s)
    loop, narrow = compiled_tokens(c) > 1, ITEMSIZE[c.state_dtype] == 2
    return _Tried(c, s, held_rows(c, s), held_elements(c, s), chunks, loop, narrow)


def _v_last_cap(x: _Tried) -> bool:
    """Whether a cap on registers lets one more block of a v_last setting run, and nothing spills."""
    c, s = x.c, x.s
    near = c.op == "gdn_decode" and c.gate == "raw" and c.pool and s.lanes in (2, 4)
    runs = s.run == 4 or (s.run == 1 and not s.heads)
    return near and runs and x.elements == 32 and not x.narrow and not s.spread


def _loop_cap(x: _Tried) -> bool:
    """The same of k_last and several tokens: a fifth block an SM."""
    s = x.s
    tiles = s.tile_v == 64 or (s.tile_v == 128 and not s.early and x.c.intermediate == "none")
    shape = s.spread and s.lanes == 16 and s.threads == 128 and x.elements == 64
    return x.narrow and shape and tiles


def _many_warps(x: _Tried) -> bool:
    """Whether enough warps share a row's K to keep a v_last thread's registers few."""
    return x.s.split >= 4 or (x.chunks == 1 and x.s.split == 2)


_Row = tuple[Callable[[_Tried], bool], str]

# What is left out, and what was measured on an H100, HV=64, B=1 to 512 (docs/measured.md, "What the
# recurrent kernel owes to what").
_ANYWHERE: tuple[_Row, ...] = (
    (lambda x: x.chunks > 2, "won nowhere"),
    (lambda x: x.elements < 8, "won nowhere"),
    (
        lambda x: (
            x.s.fence
            and not x.loop
            and (x.c.op == "gdn_decode" or x.elements > 32 or not x.s.spread)
        ),
        "at T=1 a fence pays for KDA alone, whose gates are many, where few registers wait behind it",
    ),
    (
        lambda x: x.s.fence and x.loop and not (x.s.spread and x.elements >= 32),
        "of several tokens it was not measured yet: tried beside what won most",
    ),
)
_V_LAST: tuple[_Row, ...] = (
    (
        lambda x: x.s.vec * ITEMSIZE[x.c.state_dtype] != 16 or x.s.lanes > 8 or x.s.threads < 64,
        "4 threads or more of 16 bytes side by side won",
    ),
    (lambda x: not x.s.early, "won nowhere"),
    (
        lambda x: x.elements > (128 if x.s.split == 1 and (x.chunks == 1 or x.narrow) else 64),
        "more registers than a split row needs; two chunks of 128 elements in fp32 spill",
    ),
)
_V_LAST_ONE: tuple[_Row, ...] = (
    (lambda x: not _many_warps(x), "K split over warps won, which keeps registers few"),
    (
        lambda x: x.s.registers > 0 and not _v_last_cap(x),
        "a cap pays where a few registers too many cost a block, and nothing spills",
    ),
    (
        lambda x: not x.s.registers and x.s.run == 0,
        "a thread's rows of K all side by side: up to 4% slower",
    ),
    (
        lambda x: not x.s.registers and (x.s.threads > 256 or not (x.s.spread or x.s.lanes == 1)),
        "won nowhere",
    ),
)
_V_LAST_LOOP: tuple[_Row, ...] = (
    (lambda x: not (x.s.spread or x.s.split == 4 or x.s.lanes == 1), "won nowhere"),
)
_K_LAST: tuple[_Row, ...] = (
    (lambda x: x.elements > 64, "won nowhere"),
    (
        lambda x: not x.s.spread and x.rows > (2 if x.s.tile_v <= 32 or not x.loop else 1),
        "to hand u round is a wait, which counts where few blocks run, and half the instructions,"
        " which count elsewhere",
    ),
)
_K_LAST_ONE: tuple[_Row, ...] = (
    (lambda x: not x.s.early or x.chunks > 1, "won nowhere"),
    (
        lambda x: x.s.lanes < 8 and x.c.K % 64 == 0,
        "four lanes a row or eight bytes a load: more registers or more instructions for the same"
        " bytes in flight",
    ),
)
_K_LAST_LOOP: tuple[_Row, ...] = (
    (
        lambda x: (
            x.c.op == "kda_decode" and (x.s.early, x.chunks, x.s.lanes, x.s.vec) == (True, 2, 4, 4)
        ),
        "a decay for each of 32 key positions, beside two chunks of the state: 16 bytes spill",
    ),
    (
        lambda x: x.s.registers > 0 and not _loop_cap(x),
        "a cap pays where it lets a fifth block run, and nothing spills",
    ),
    (
        lambda x: (
            not x.s.registers
            and (
                x.s.threads < 64
                or x.s.lanes > 16
                or x.elements < 16
                or not (x.s.early or x.s.spread)
            )
        ),
        "won nowhere",
    ),
)


def _left_out(c: Contract) -> tuple[_Row, ...]:
    """The rows that speak about a contract."""
    loop = compiled_tokens(c) > 1
    if c.layout == "v_last":
        return (*_ANYWHERE, *_V_LAST, *(_V_LAST_LOOP if loop else _V_LAST_ONE))
    return (*_ANYWHERE, *_K_LAST, *(_K_LAST_LOOP if loop else _K_LAST_ONE))


def why_left_out(c: Contract, s: Knobs) -> str | None:
    """What was measured of a legal setting that is not worth trying; None of one that is."""
    x = _tried(c, s)
    return next((measured for drops, measured in _left_out(c) if drops(x)), None)


@functools.lru_cache(maxsize=256)
def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    found = [s for s in _candidates(c) if not refuse(c, s) and why_left_out(c, s) is None]
    if c.intermediate == "slots":
        found += [dataclasses.replace(s, row=True) for s in found if s.early]
    return tuple(s for s in in_every_form(found) if not refuse(c, s))


@dataclasses.dataclass(frozen=True)
class _Target:
    """What the default rule looks for."""

    tile_v: int
    lanes: int
    elements: int
    threads: int = 128
    spread: bool = True
    early: bool = True
    run: int = 0


def _target(c: Contract, heads: float) -> _Target:
    """From the winners on an H100, HV=64 and 32 (docs/results). heads: value heads in flight for
    each SM.
    """
    narrow = ITEMSIZE[c.state_dtype] == 2
    if c.layout == "v_last":
        if narrow:
            return _Target(64, 4, 64, run=2) if heads < 24 else _Target(128, 2, 64, 256, run=2)
        return _Target(32, 4, 32, run=4) if heads < 12 else _Target(64, 2, 32, 256, run=4)
    if heads < 0.4:
        return _Target(16, 16, 16, spread=False)
    if compiled_tokens(c) == 1:
        if heads < 8:
            return _Target(32, 8, 32, spread=False)
        return _Target(64, 16, 64) if narrow else _Target(32, 16, 32)
    if heads < 1.2:
        return _Target(32, 16, 32)
    if narrow:
        return _Target(64 if heads < 4 else 128, 16, 64, early=False)
    return _Target(64, 16, 64) if heads >= 4 else _Target(32, 16, 32)


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks, by value heads in flight for each SM."""
    legal = list(space(c, device)) or [s for s in _candidates(c) if not refuse(c, s)]
    if not legal:
        raise UnsupportedProblem(
            f"no setting of recurrent serves {c.key()}: {refuse(c, Knobs(32, 1, 8, 16, 128))}"
        )
    target = _target(c, work_units / device.sm_count)

    def distance(s: Knobs) -> tuple[Any, ...]:
        return (
            s.heads or s.fence or s.registers > 0 or s.row or s.pdl != "none",
            abs(math.log2(s.tile_v / target.tile_v)),
            s.threads != target.threads,
            s.spread != target.spread,
            -s.vec,
            abs(math.log2(s.lanes / target.lanes)),
            abs(held_elements(c, s) - target.elements),
            s.early != target.early,
            s.split,
            abs(s.run - target.run),
        )

    return min(legal, key=distance)


KERNEL = Kernel(
    name="recurrent",
    device="cuda",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="gdntune.kernels.recurrent:compile",
    sources=("gdntune.kernels.recurrent",),
    block=block,
    under=under,
)
