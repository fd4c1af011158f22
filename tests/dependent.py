"""A sweep, and a table, that choose apart for calls without dependent launch. No figure in them was
measured.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import synthetic

from gdntune import kernels
from gdntune.device import gpus
from gdntune.device.arch import Device
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.results import table
from gdntune.results.records import Cell, Check, Record, Trial
from gdntune.results.table import Evidence, Interval, Origin, Rule, Table, TableVariant

CONTRACT = Contract()
RUN = synthetic.run(regret=0.01, alone=True)
# `a` and `b` start early; `c` is the form of `a` that does not, and `d` is another setting.
PDL = {"a": "first", "b": "state", "c": "none", "d": "none"}
VARIANTS = {
    name: Variant("recurrent", name, {"tile_v": 16 if name in "ac" else 32, "pdl": pdl})
    for name, pdl in PDL.items()
}
TIMES = {
    8: {"a": 7.8, "b": 9.0, "c": 8.4, "d": 8.1},
    64: {"a": 20.0, "b": 18.0, "c": 24.0, "d": 24.1},
}


Times = Mapping[int, Mapping[str, float]]


def swept(
    times: Times = TIMES, fresh: Times | None = None, contract: Contract = CONTRACT
) -> list[Record]:
    """Records of a sweep whose cells, by work units, have final samples with these means."""
    found: list[Record] = [Check(contract=contract, variant=name, status="ok") for name in VARIANTS]
    for stage, cells in (("final", times), ("evidence", fresh or {})):
        for units, means in cells.items():
            p = Problem(contract, units, 1, 1)
            found += [
                Trial(
                    problem=p,
                    variant=VARIANTS[name],
                    stage=stage,
                    status="ok",
                    samples_us=[us] * 20,
                )
                for name, us in means.items()
            ]
            why = {"purpose": "evidence"} if stage == "evidence" else {}
            found.append(Cell(problem=p, status="ok", **why))
    return found


class Apart(NamedTuple):
    """A table's file, its device, the variants that its rule names: what starts early from 1 and
    from 64 work units on, and what calls without dependent launch take of all sizes; plain: the
    forms of the first two without it.
    """

    path: Path
    device: Device
    early: tuple[Variant, Variant]
    alone: Variant
    plain: tuple[Variant, Variant]


def write(path: Path, with_alone: bool = True) -> Apart:
    """Writes a table of an H200 under chain."""
    device, kernel = gpus.named("h200"), kernels.get("recurrent")
    found = [v for v in kernel.variants(CONTRACT, device, "chain") if v.knobs["pdl"] == "none"]
    small, large, alone = found[0], found[1], found[2]

    def early(v: Variant) -> Variant:
        return kernel.variant(dataclasses.replace(kernel.setting(v.knobs), pdl="first"))

    def evidence(units: int, us: float) -> Evidence:
        return Evidence(units, us, us, us, us, 20, 0.0)

    first, second = early(small), early(large)
    intervals = (
        Interval(1, 63, first.id, (evidence(8, 7.8),)),
        Interval(64, None, second.id, (evidence(64, 20.0),)),
    )
    apart = {"alone": (Interval(1, None, alone.id, (evidence(8, 8.1), evidence(64, 21.0))),)}
    made = Table(
        schema="gdntune.table/1",
        device=device,
        software={},
        kernels={"recurrent": kernels.fingerprints("cuda")["recurrent"]},
        policy={"timer": "graph", "l2": "chain"},
        evidence=Origin("0", "test", "0", "2026-01-01T00:00:00+00:00", 2, 2, {}, 0.0, 0.0),
        variants={
            v.id: TableVariant(v.kernel, v.knobs)
            for v in (first, second, *([alone] if with_alone else []))
        },
        rules=(Rule(CONTRACT, intervals, **(apart if with_alone else {})),),
    )
    table.save(made, path)
    return Apart(path, device, (first, second), alone, (small, large))
