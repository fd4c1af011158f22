"""Knobs of `cpu_recurrent`: which settings are legal, which are worth trying, and the default rule."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.kernels.spec import Facts, Kernel, knob
from gdntune.problem import ITEMSIZE, MAX_TOKENS, Contract

TILES = (16, 32, 64, 128)
WIDTHS = (4, 8, 16)
FLIGHTS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting of the CPU kernel."""

    tile_v: int = knob("tv", "rows of V a task owns")
    ilp: int = knob("ilp", "rows in flight (k_last), or groups of vec rows (v_last)")
    vec: int = knob("vec", "fp32 lanes of a vector; 16 is one AVX-512 register")
    ahead: bool = knob("ahead", "the next tile is fetched into the cache meanwhile", default=False)
    around: bool = knob(
        "around", "states after a token go around the cache to memory", default=False
    )


def facts(c: Contract) -> Facts:
    """What an object is compiled for: what a call's arguments cannot tell, and what the inner loops
    are made of.

    Dynamic are all sizes but K, every stride but the innermost, the dtypes of all tensors but the
    state, GDN or KDA, which index tensors are given, intermediate states. `gate` tells
    `lower_bound` from the others alone: without A_log the log decay is given.
    """
    return {
        "state_dtype": c.state_dtype,
        "layout": c.layout,
        "K": c.K,
        "beta": c.beta,
        "gate": "lower_bound" if c.gate == "lower_bound" else "other",
        "writes": "never" if c.mode == "frozen" else "by_index" if c.pool else "by_row",
        "tokens": c.tokens if c.ragged else MAX_TOKENS,
    }


def lot(c: Contract, s: Knobs) -> int:
    """State elements that one access moves: bf16 goes in pairs, so that 32-bit shifts convert it."""
    return s.vec * (2 if c.state_dtype == "bf16" else 1)


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    for name, accepted in (("tile_v", TILES), ("vec", WIDTHS), ("ilp", FLIGHTS)):
        if getattr(s, name) not in accepted:
            return f"{name}={getattr(s, name)}: expected one of {', '.join(map(str, accepted))}"
    if c.V % s.tile_v:
        return f"V={c.V} is not a multiple of tile_v={s.tile_v}"
    if c.K % lot(c, s):
        return f"K={c.K} is not a multiple of the {lot(c, s)} elements of an access"
    rows = s.ilp if c.layout == "k_last" else s.ilp * lot(c, s)
    if s.tile_v % rows:
        return f"tile_v={s.tile_v} is not a multiple of the {rows} rows in flight"
    if s.around and c.intermediate == "none":
        return (
            "around=True without intermediate states: the final state is stored where it was read,"
            " in the cache"
        )
    return None


def _native(device: Device) -> int:
    """fp32 lanes of the widest register."""
    return 16 if "avx512" in device.arch else 8 if "avx" in device.arch else 4


def _legal(c: Contract, device: Device) -> list[Knobs]:
    """Legal settings that fetch ahead, the simplest first: native vectors, small tiles, few rows in
    flight.
    """
    widths = sorted(WIDTHS, key=lambda vec: (vec > _native(device), abs(vec - _native(device))))
    return [
        s
        for vec in widths
        for tile_v in TILES
        for ilp in FLIGHTS
        if not refuse(c, s := Knobs(tile_v, ilp, vec, ahead=True))
    ]


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    native, legal = _native(device), _legal(c, device)
    other = native // 2 if native > 4 else 8
    # k_last: one row in flight leaves the latency of its sums bare (1.4 to 1.6 times the time, AMD
    # EPYC); v_last has few
    # legal settings, all are tried
    found = [s for s in legal if c.layout == "v_last" or (s.ilp > 1 and s.vec in (native, other))]
    few = [s for s in found if s.vec == native and s.tile_v <= 32]
    found = [dataclasses.replace(s, ahead=False) for s in few] + found
    if c.intermediate != "none":
        found = few + [dataclasses.replace(s, around=True) for s in found]
    return tuple(found)


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks, from what won on an AMD EPYC of two cores: native vectors
    and as many rows in flight as may be.

    k_last: a tile is 8 KiB of memory, so that it, its fp32 copy and the next tile share L1. v_last
        wants long rows of memory:
    64 rows of V at K=128, and all of them at T=1, where no tile is kept. Smaller while threads
    would idle.
    """
    elements = (
        8192 // ITEMSIZE[c.state_dtype] if c.layout == "k_last" else 8192 if c.tokens > 1 else 16384
    )
    while elements > 1024 and work_units * c.K * c.V // elements < 4 * device.sm_count:
        elements //= 2

    def distance(s: Knobs) -> tuple[int, ...]:
        return (s.vec != _native(device), abs(s.tile_v * c.K - elements), -s.ilp)

    best = min(_legal(c, device), key=distance)
    return dataclasses.replace(best, around=c.intermediate != "none")


KERNEL = Kernel(
    name="cpu_recurrent",
    device="cpu",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="gdntune.kernels.cpu_recurrent:compile",
    sources=("gdntune.kernels.cpu_recurrent", "kernels/cpu/decode.h"),
)
