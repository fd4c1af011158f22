"""Runs as one tidy pandas frame: a row a cell and implementation, every variant, floor or peer that
was tried there, with its last stage.
"""

import operator
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
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


def frame(runs: Sequence[LoadedRun], first_looks: bool = True) -> pd.DataFrame:
    """One row a cell and implementation; a failed one has its reason and no times. first_looks: see
    `samples.rows`.
    """
    # Column by column: a row each as a dict, 200,000 of them, would be made and taken apart again.
    cells: list[tuple[Any, ...]] = []
    own: list[Row] = []
    times: list[int] = []
    for run in runs:
        for problem, found in rows(run, first_looks):
            cells.append(_cell(run, problem))
            own += [row for _, row in found]
            times.append(len(found))
    place = np.repeat(np.arange(len(cells)), times)
    columns = {
        name: _series(name, [cell[i] for cell in cells]).take(place).reset_index(drop=True)
        for i, name in enumerate(_CELL)
    }
    for name in _ROW:
        columns[name] = _series(name, list(map(operator.attrgetter(name), own)))
    return pd.DataFrame(columns)


def _series(name: str, values: list[Any]) -> "pd.Series[Any]":
    return pd.Series(values, dtype=_DTYPES[COLUMNS[name]])


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
