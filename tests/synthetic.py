"""A sweep's folder made up from a formula, for tests of what reads one. No figure in it was
measured.
"""

import math
from pathlib import Path

from gdntune.device.arch import Clocks, Device, target
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.results.derive import derive
from gdntune.results.journal import FILE, encode
from gdntune.results.records import Build, Cell, Check, Record, Run, Trial
from gdntune.results.table import save
from gdntune.sol import bytes_moved, floor_bytes

VARIANTS = [
    Variant("recurrent", f"recurrent.tv{tv}.ilp{ilp}", {"tile_v": tv, "ilp": ilp})
    for tv in (16, 32)
    for ilp in (2, 4)
]
FLOOR = Variant("stream", "stream.t4096.ilp4", {"tile": 4096, "ilp": 4})


def run(device: Device | None = None, **changes: object) -> Run:
    """A header; by default of an H100 under cold-clean."""
    fields = {
        "config": "synthetic",
        "config_sha256": "c0ffee" * 10,
        "device": device or target("sm_90a"),
        "software": {"torch": "2.13.0", "python": "3.11.7"},
        "policy": {"timer": "cupti", "l2": "cold-clean"},
        "kernels": {"recurrent": "f1", "stream": "f2"},
        "peaks": {"datasheet": 3352.0, "measured": 3005.0},
        "started": "2026-11-28T00:00:00+00:00",
        "command": "gdntune sweep configs/synthetic.yaml --out results/synthetic",
    }
    return Run(**{**fields, **changes})


def contracts(
    tokens: tuple[int, ...] = (1, 2, 4), states: tuple[str, ...] = ("bf16", "fp32")
) -> list[Contract]:
    """A decode contract of each state dtype and T."""
    return [Contract(tokens=t, state_dtype=s) for s in states for t in tokens]  # type: ignore[arg-type]


def cell(problem: Problem, header: Run, *, slow: float = 1.0, favoured: int = 0) -> list[Record]:
    """A cell's records: each variant screened, two leaders and the floor timed to the end;
    `favoured` is the fastest.
    """
    peak = header.device.peak_gb_s or header.peaks["measured"]
    # A launch of 2 us, then 90% of the peak.
    floor_us = 2 + floor_bytes(problem) / (0.9e3 * peak)
    least_us = 2 + bytes_moved(problem) / (0.85e3 * peak)
    found: list[Record] = []
    for i, v in enumerate(VARIANTS):
        us = slow * least_us * (1 + 0.05 * ((i - favoured) % len(VARIANTS)))
        found.append(
            Trial(
                problem=problem,
                variant=v,
                stage="screen",
                status="ok",
                samples_us=_samples(us * 1.01, 6),
            )
        )
        if (i - favoured) % len(VARIANTS) < 2:
            found.append(
                Trial(
                    problem=problem,
                    variant=v,
                    stage="final",
                    status="ok",
                    samples_us=_samples(us, 20),
                )
            )
    found.append(
        Trial(
            problem=problem,
            variant=FLOOR,
            role="floor",
            stage="final",
            status="ok",
            samples_us=_samples(floor_us, 20),
        )
    )
    clocks = {"sm_mhz": 1980, "event_reasons": []}
    return [
        *found,
        Cell(
            problem=problem,
            status="ok",
            stop="20 final rounds",
            seconds=0.5,
            clocks_before=clocks,
            clocks_after=clocks,
        ),
    ]


def _samples(us: float, n: int) -> list[float]:
    return [us * (1 + 0.01 * math.sin(i)) for i in range(n)]


def records(
    header: Run,
    *,
    batches: tuple[int, ...] = (1, 8, 64),
    HV: int = 64,
    extra: tuple[Record, ...] = (),
    swap: int = 0,
) -> list[Record]:
    """A whole sweep: builds, checks, cells. Large batches favour another variant than small ones;
    `swap` shifts both.
    """
    found: list[Record] = [
        Build(
            kernel=v.kernel,
            variant=v.id,
            object_key=v.id,
            status="ok",
            seconds=0.5,
            registers=40,
            spill_bytes=0,
        )
        for v in (*VARIANTS, FLOOR)
    ]
    for c in contracts():
        found += [Check(contract=c, variant=v.id, status="ok", error=1e-3) for v in VARIANTS]
        for B in batches:
            found += cell(Problem(c, B, HV // 4, HV), header, favoured=swap + (2 if B > 8 else 0))
    return [*found, *extra]


def write(folder: Path, header: Run, found: list[Record], *, with_table: bool = True) -> Path:
    """Writes the folder of a sweep."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_bytes(b"".join(map(encode, [header, *found])))
    if with_table:
        save(derive(found, header), folder / "table.json")
    return folder


def cpu() -> Device:
    """A CPU whose peak is only measured."""
    return Device("cpu", "AMD EPYC 9B14", "x86_64-avx512-1a2b3c4d", 2, 32 << 20, 8 << 30)


def no_clocks() -> Clocks:
    """What a CPU's cell holds."""
    return Clocks()
