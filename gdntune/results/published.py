"""Figures that others published, as they printed them: a GPU, an L2 policy, and shares of the
DRAM's peak by problem.
"""

import csv
import difflib
from pathlib import Path
from typing import Any, NamedTuple

from gdntune.errors import UnknownName, listed
from gdntune.problem import Contract, Problem

PREFIX = "published:"


class PublishedCell(NamedTuple):
    """What was printed of a problem; None: an error was printed in its place. sol: a share, 1 is
    the peak.
    """

    problem: Problem
    time_us: float | None
    sol: float | None


class Published(NamedTuple):
    """A publication. l2: the policy under which its authors timed, in this package's words."""

    name: str
    title: str
    url: str
    gpu: str
    l2: str
    peak_gb_s: float
    cells: tuple[PublishedCell, ...]


# name: (file in data/, the rest of Published in order)
_ALL = {
    "flashinfer-pr-3127": (
        "flashinfer_pr_3127.csv",
        "FlashInfer's pull request 3127",
        "https://github.com/flashinfer-ai/flashinfer/pull/3127",
        "NVIDIA B200",
        "cold-dirty",
        8000.0,
    )
}
NAMES = tuple(f"{PREFIX}{name}" for name in _ALL)


def published(name: str) -> Published:
    """The publication of a name such as `published:flashinfer-pr-3127`. Raises UnknownName, which
    lists those that are here.
    """
    if name not in NAMES:
        near = difflib.get_close_matches(name, NAMES, 1, 0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UnknownName(f"{name}: no such publication; expected one of {listed(NAMES)}{hint}")
    name = name.removeprefix(PREFIX)
    file, title, url, gpu, l2, peak_gb_s = _ALL[name]
    return Published(
        name, title, url, gpu, l2, peak_gb_s, _cells(Path(__file__).parent.parent / "data" / file)
    )


def _cells(path: Path) -> tuple[PublishedCell, ...]:
    lines = [
        line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    ]
    values: dict[Problem, dict[str, float | None]] = {}
    for row in csv.DictReader(lines):
        values.setdefault(_problem(row), {})[row["metric"]] = (
            float(row["value"]) if row["value"] else None
        )
    found = []
    for problem, printed in sorted(values.items()):
        percent = printed.get("dram_sol_percent")
        found.append(
            PublishedCell(
                problem,
                printed.get("time_us"),
                None if percent is None else round(percent / 100, 4),
            )
        )
    return tuple(found)


def _problem(row: dict[str, Any]) -> Problem:
    # Their `cache`: the state after each token is written to a buffer, and the state itself stays
    # as it was.
    writes: dict[str, Any] = (
        {"mode": "frozen", "intermediate": "dense"}
        if row["mode"] == "cache"
        else {"mode": "update"}
    )
    size = int(row["head_size"])
    contract = Contract(
        op=row["op"],
        tokens=int(row["tokens"]),
        K=size,
        V=size,
        state_dtype=row["state_dtype"],
        **writes,
    )
    return Problem(contract, int(row["batch"]), int(row["num_q_heads"]), int(row["num_v_heads"]))
