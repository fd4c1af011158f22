"""A journal of every kind of record, for the tests of journals."""

import contextlib

from gdntune.device.arch import target
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.results.journal import Journal
from gdntune.results.records import Build, Cell, Check, Run, Trial

RUN = Run(
    config="small",
    config_sha256="c0ffee",
    device=target("sm_90a"),
    software={"torch": "2"},
    policy={"timer": "cupti", "l2": "cold-clean"},
    kernels={"recurrent": "f1"},
    peaks={"datasheet": 3352.0},
    started="2026-11-28T00:00:00+00:00",
    command="gdntune sweep",
)
PROBLEM = Problem(Contract(state_dtype="fp32"), 4, 2, 8)
VARIANT = Variant("recurrent", "recurrent.tv8", {"tile_v": 8, "wide": True, "order": "early"})
RECORDS = [
    Build(
        kernel="recurrent",
        variant=VARIANT.id,
        object_key="k",
        status="ok",
        seconds=0.5,
        registers=40,
        spill_bytes=0,
    ),
    Build(
        kernel="recurrent",
        variant="recurrent.tv9",
        object_key="k",
        status="failed",
        reason="ptxas: no\n",
    ),
    Check(contract=PROBLEM.contract, variant=VARIANT.id, status="ok", error=1e-7),
    Trial(
        problem=PROBLEM,
        variant=VARIANT,
        role="floor",
        stage="screen",
        status="timeout",
        reason="30 s",
    ),
    Trial(
        problem=PROBLEM,
        variant=VARIANT,
        stage="final",
        status="ok",
        samples_us=[3.0, 3.125],
        seconds=1.0,
    ),
    Cell(
        problem=PROBLEM,
        status="ok",
        stop="final_rounds",
        clocks_before={"sm_mhz": 1980, "event_reasons": []},
    ),
]


@contextlib.contextmanager
def written(folder, records=RECORDS):
    """An open journal that holds `records`."""
    with Journal.open(folder, RUN) as j:
        for record in records:
            j.append(record)
        yield j
