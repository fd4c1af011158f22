"""Runs as one tidy pandas frame: a row a cell and implementation, every variant, floor or peer that
was tried there, with its last stage.
"""

import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import pandas as pd

from gdntune.problem import Contract, Problem
from gdntune.results.samples import NOTHING, LoadedRun, Row, rows

# What is the same for all rows of a cell, by name and kind.
_CELL: dict[str, str] = {
    **dict.fromkeys(("run", "device", "device_kind", "timer", "l2"), "text"),
    **{
        f.name: {bool: "bool", int: "int"}.get(f.type, "text")
        for f in msgspec.structs.fields(Contract)
    },
    **dict.fromkeys(("B", "H", "HV", "work_units"), "int"),
}
_ROW: dict[str, str] = {
    f.name: {str: "text", bool: "bool", int: "int"}.get(f.type, "float")
    for f in msgspec.structs.fields(Row)
}
# The frame's columns and their kinds. Text is never empty and no whole number is missing, so that
# pandas reads back what it wrote.
COLUMNS: dict[str, str] = {**_CELL, **_ROW}
_DTYPES = {"float": "float64", "int": "int64", "bool": "bool", "text": None}


def frame(runs: Sequence[LoadedRun]) -> pd.DataFrame:
    """One row a cell and implementation; a failed one has its reason and no times."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    # Column by column: a row each as a dict, 200,000 of them, would be made and taken apart again.
    own = []
    for run in runs:
        for problem, found in rows(run):
            for name, value in zip(_CELL, _cell(run, problem), strict=True):
                columns[name] += [value] * len(found)
            own += [row for _, row in found]
    for name in _ROW:
        # by columns: of 140,000 rows of 40 values it takes a fifth of the time
        columns[name] = list(map(operator.attrgetter(name), own))
    return pd.DataFrame(
        {name: pd.Series(columns[name], dtype=_DTYPES[kind]) for name, kind in COLUMNS.items()}
    )


def _cell(run: LoadedRun, problem: Problem) -> tuple[Any, ...]:
    device, policy = run.run.device, run.run.policy
    return (
        run.name,
        device.name,
        device.kind,
        policy.get("timer", NOTHING),
        policy.get("l2", NOTHING),
        *msgspec.structs.astuple(problem.contract),
        problem.B,
        problem.H,
        problem.HV,
        problem.work_units,
    )
