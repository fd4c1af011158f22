"""Journals to one tidy table of times, and from it a report: Markdown, CSV, HTML, terminal. The
same journals give the same bytes.

The frame has one row a cell and implementation: every variant, floor or peer that was tried at a
    cell, with its last stage.
"""

import functools
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import pandas as pd

from gdntune import kernels, sol
from gdntune.errors import GdntuneError, JournalError, MeasurementError
from gdntune.problem import Contract, Problem
from gdntune.report import against
from gdntune.report.document import Document
from gdntune.report.html import html
from gdntune.report.markdown import markdown
from gdntune.report.panels import Fact, Panel, facts, panel
from gdntune.report.peers import compared, is_theirs
from gdntune.report.sections import Letters, bases, document, of_contract
from gdntune.results import derive, journal, table
from gdntune.results.baseline import Baseline, add_baseline
from gdntune.results.journal import Cell, Check, Record, Run, Trial
from gdntune.results.published import Published
from gdntune.timing import summary

if TYPE_CHECKING:
    from rich.console import Console

# The frame's columns and their kinds. Text is never empty and no whole number is missing, so that
# pandas reads back what it wrote.
COLUMNS: dict[str, str] = {
    "run": "text",
    "device": "text",
    "device_kind": "text",
    "timer": "text",
    "l2": "text",
    **{
        f.name: {bool: "bool", int: "int"}.get(f.type, "text")
        for f in msgspec.structs.fields(Contract)
    },
    "B": "int",
    "H": "int",
    "HV": "int",
    "work_units": "int",
    "kernel": "text",
    "variant": "text",
    "role": "text",
    "stage": "text",
    "status": "text",
    "reason": "text",
    "verified": "text",
    "median_us": "float",
    "mean_us": "float",
    "q1_us": "float",
    "q3_us": "float",
    "min_us": "float",
    "samples": "int",
    "outliers": "int",
    "bytes_moved": "int",
    "bandwidth_gb_s": "float",
    "sol": "float",
    "floor_us": "float",
    "over_floor": "float",
    "bound": "text",
    "chosen": "bool",
    "default_mean_us": "float",
    "speedup_over_default": "float",
    "chosen_speedup": "float",
}
NOTHING = "-"


class Source(NamedTuple):
    """One sweep. name: its config's, numbered where several runs share it. table: None where no
    cell has a choice.

    defaults: what the default rule chose at a cell when it was timed, where the journal has it.
        regret: what the report was asked for.
    """

    name: str
    run: Run
    records: list[Record]
    table: table.Table | None
    digest: str
    notes: tuple[str, ...]
    defaults: dict[Problem, str]
    regret: float | None = None

    @property
    def peak_gb_s(self) -> float | None:
        """The DRAM's peak that shares are of: the device's, else the measured one."""
        return self.run.device.peak_gb_s or self.run.peaks.get("measured")

    @property
    def left(self) -> int:
        """How many of the cells that the config asks for were not tried to the end; 0 where an
        older journal does not say.
        """
        if self.run.cells is msgspec.UNSET:
            return 0
        own = {
            r.problem for r in self.records if isinstance(r, Cell) and r.purpose is msgspec.UNSET
        }
        return max(0, self.run.cells - len(own))

    @property
    def cells(self) -> int:
        """How many cells were asked for: by the config, as far as the journal says, and those that
        the sweep added.
        """
        closed = {r.problem for r in self.records if isinstance(r, Cell)}
        seen = {r.problem for r in self.records if isinstance(r, (Cell, Trial))}
        return max(len(seen), len(closed) + self.left)


class Report:
    """What was found. frame: one row a cell and implementation, with COLUMNS. sources: the sweeps
    it came from.

    publications: what stands beside ours. baseline: what times are compared with too, by its name;
        see `baseline.add_baseline`.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        publications: Sequence[Published] = (),
        baseline: str | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.publications = tuple(publications)
        self.frame = frame(self.sources)
        self.baseline: Baseline | None = None
        if baseline is not None:
            self.frame, self.baseline = add_baseline(
                self.frame, [s.name for s in self.sources], baseline
            )

    @property
    def document(self) -> Document:
        """The report apart from how it looks."""
        return self._document(Letters())

    def _document(self, letters: Letters) -> Document:
        more = [
            s
            for p in self.publications
            for s in against.sections(self.sources, self.frame, p, self.baseline)
        ]
        return document(self.sources, self.frame, letters, more, self.baseline)

    def peers(self) -> list[dict[str, Any]]:
        """How our choices compare with each peer, as plain values: one a sweep and peer that was
        asked for.
        """
        return [
            summary
            for s in self.sources
            for summary in compared(self.frame[self.frame["run"] == s.name], s.records)
        ]

    def markdown(self) -> str:
        """The report for GitHub; tables are at most 100 columns wide."""
        return markdown(self.document)

    def csv(self) -> str:
        """The frame; `pandas.read_csv` gives its dtypes back, and there is no index column."""
        return self.frame.to_csv(index=False, lineterminator="\n")

    def html(self) -> str:
        """The report as one file, with pictures and samples. Raises ToolMissing where matplotlib is
        not installed.
        """
        letters = Letters()
        # First, since it fills in the letters.
        text = self._document(letters)
        panels: dict[tuple[str, str], Panel] = {}
        numbers: list[Fact] = []
        for source in self.sources:
            mine = self.frame[self.frame["run"] == source.name]
            trials = [
                (problem, trial) for problem, found in _counted(source.records) for trial in found
            ]
            for base in bases(source):
                its = [(p, t) for p, t in trials if p.contract.replace(tokens=1) == base]
                default = functools.lru_cache(maxsize=None)(functools.partial(_default, source))
                part, title = of_contract(mine, base), f"{source.name}: {base.key()}"
                panels[source.name, base.key()] = panel(
                    title, part, its, source.table, letters, default, self.baseline
                )
            for p in self.publications:
                panels[against.subject(source, p)] = against.panel(source, self.frame, p)
            checks = Counter[str](
                r.status for r in source.records if isinstance(r, Check) and not is_theirs(r)
            )
            name = source.name if len(self.sources) > 1 else ""
            numbers += facts(name, mine, source.cells, checks, compared(mine, source.records))
        return html(text, numbers, panels)

    def terminal(self, console: "Console", *, details: bool = False) -> None:
        """Prints the report, cells coloured by their share of the DRAM's peak."""
        from gdntune.report.terminal import print_document

        print_document(self.document, console, details=details)


def report(
    folders: Sequence[str | os.PathLike[str]],
    publications: Sequence[Published] = (),
    baseline: str | None = None,
    regret: float | None = None,
) -> Report:
    """The report of sweeps' folders (or journals), in the order given, beside publications'
    figures, over a baseline.

    regret: the choices are those of `judge.replay` with it, instead of the folder's table or the
        sweep's own regret.
    Raises JournalError for one that cannot be read, UnknownName for a baseline that is not in them.
    """
    if not folders:
        raise JournalError(
            "no sweep was named: accepted are one or more folders that `gdntune sweep` wrote"
        )
    read = [(Path(folder), *journal.read(folder)) for folder in folders]
    names = _names([run for _, run, _ in read])
    sources = [_source(name, *one, regret) for name, one in zip(names, read, strict=True)]
    return Report(sources, publications, baseline)


def _names(runs: Sequence[Run]) -> list[str]:
    """A name for each run: its config's; where several share it, with the L2 policy, and numbered
    if that is shared too.
    """
    configs = [run.config for run in runs]
    long = [
        c if configs.count(c) == 1 else f"{c}, {run.policy.get('l2')}"
        for c, run in zip(configs, runs, strict=True)
    ]
    return [
        n if long.count(n) == 1 else f"{n} ({long[: i + 1].count(n)})" for i, n in enumerate(long)
    ]


def _source(name: str, path: Path, run: Run, records: list[Record], regret: float | None) -> Source:
    digest = journal.digest(run, records)
    notes: list[str] = []
    found: table.Table | None = None
    stored = (path if path.is_dir() else path.parent) / "table.json"
    if regret is not None:
        notes.append(f"The choices are those of `gdntune replay --regret {regret:g}`.")
    elif stored.exists():
        # The sweep's own table: older journals do not hold the regret that its config allows.
        found = table.load(stored)
        if found.evidence.journal_sha256 != digest:
            notes.append(
                "`table.json` is not of this journal as it stands; the choices here were derived"
                " anew"
            )
            found = None
    if found is None:
        try:
            found = derive.derive(records, run, regret=regret)
        except (JournalError, MeasurementError) as e:
            notes.append(f"no table could be made: {e}")
    cells = (r for r in records if isinstance(r, Cell))
    defaults = {r.problem: r.default_variant for r in cells if isinstance(r.default_variant, str)}
    return Source(name, run, records, found, digest, tuple(notes), defaults, regret)


def frame(sources: Sequence[Source]) -> "pd.DataFrame":
    """One row a cell and implementation; a failed one has its reason and no times."""
    rows = [row for source in sources for _, row in tried(source)]
    columns: dict[str, Any] = {}
    for name, kind in COLUMNS.items():
        values = [row[name] for row in rows]
        if kind == "float":
            columns[name] = pd.Series(
                [float("nan") if v is None else v for v in values], dtype="float64"
            )
        elif kind == "int":
            columns[name] = pd.Series(values, dtype="int64")
        else:
            columns[name] = pd.Series(values, dtype="bool" if kind == "bool" else None)
    return pd.DataFrame(columns)


def tried(source: Source) -> Iterator[tuple[Trial, dict[str, Any]]]:
    """Each trial that counts with its row, by COLUMNS; what a row lacks is None."""
    verified = _verified(source.records)
    for problem, trials in _counted(source.records):
        rows = [_row(source, t, verified) for t in trials]
        _relate(source, problem, rows)
        yield from zip(trials, rows, strict=True)


def _counted(records: Sequence[Record]) -> list[tuple[Problem, list[Trial]]]:
    """The problems in order, each with the one trial that counts of each implementation."""
    found = []
    for problem, trials in sorted(derive.passes(records).items()):
        last: dict[tuple[str, str], Trial] = {}
        for trial in trials:
            last[trial.role, trial.variant.id] = _later(
                last.get((trial.role, trial.variant.id)), trial
            )
        found.append((problem, list(last.values())))
    return found


def _later(one: Trial | None, other: Trial) -> Trial:
    """The trial that counts: a failed one, else the final one, else the later one."""
    if one is None:
        return other
    if one.status != "ok" or (
        one.stage == "final" and other.stage == "screen" and other.status == "ok"
    ):
        return one
    return other


def _verified(records: Sequence[Record]) -> dict[tuple[Contract, str], str]:
    found: dict[tuple[Contract, str], str] = {}
    for r in records:
        if isinstance(r, Check) and found.get((r.contract, r.variant), "ok") == "ok":
            found[r.contract, r.variant] = r.status
    return found


def _row(
    source: Source, trial: Trial, verified: Mapping[tuple[Contract, str], str]
) -> dict[str, Any]:
    run, problem = source.run, trial.problem
    moved = sol.floor_bytes(problem) if trial.role == "floor" else sol.bytes_moved(problem)
    # What a peer moves beyond what it must, by its adapter's word.
    moved += int(trial.variant.knobs.get("extra_bytes", 0)) if trial.role == "peer" else 0
    row: dict[str, Any] = dict.fromkeys(COLUMNS)
    row |= msgspec.structs.asdict(problem.contract)
    row |= {
        "run": source.name,
        "device": run.device.name,
        "device_kind": run.device.kind,
        "timer": run.policy.get("timer", NOTHING),
        "l2": run.policy.get("l2", NOTHING),
        "B": problem.B,
        "H": problem.H,
        "HV": problem.HV,
        "work_units": problem.work_units,
        "kernel": trial.variant.kernel,
        "variant": trial.variant.id,
        "role": trial.role,
        "stage": trial.stage,
        "status": trial.status,
        "reason": " ".join(trial.reason.split())[:500] or NOTHING,
        # A floor computes nothing that could be wrong.
        "verified": verified.get(
            (problem.contract, trial.variant.id), NOTHING if trial.role == "floor" else "unchecked"
        ),
        "samples": len(trial.samples_us),
        "outliers": 0,
        "bytes_moved": moved,
        "bound": NOTHING,
        "chosen": False,
    }
    if trial.status == "ok" and trial.samples_us:
        _add_times(source, trial, row)
    return row


def _add_times(source: Source, trial: Trial, row: dict[str, Any]) -> None:
    stats = summary(trial.samples_us)
    row |= {
        "median_us": round(stats.median_us, 3),
        "mean_us": round(stats.mean_us, 3),
        "q1_us": round(stats.q1_us, 3),
        "q3_us": round(stats.q3_us, 3),
        "min_us": round(stats.min_us, 3),
        "outliers": stats.outliers,
    }
    us = row["median_us"]
    if not us > 0:
        row |= {"status": "failed", "reason": "a median of 0 us is no time"}
        return
    row["bandwidth_gb_s"] = round(row["bytes_moved"] / us / 1e3, 1)
    if source.peak_gb_s:
        row["sol"] = round(sol.sol(row["bytes_moved"], us, source.peak_gb_s), 4)
    if trial.role == "floor":
        return
    try:
        row["bound"] = sol.classify(
            trial.problem, us, source.run.device, source.run.policy.get("l2", "cold-clean")
        )
    except MeasurementError as e:
        # More than the DRAM can do is no result, whatever it would do for the tables.
        row |= {"status": "impossible", "reason": str(e)[:500]}


def _relate(source: Source, problem: Problem, rows: list[dict[str, Any]]) -> None:
    """Fills in what a cell's rows are compared with: its floor, its default, the table's choice."""
    timed = [r for r in rows if r["status"] == "ok" and r["median_us"] is not None]
    floors = [r for r in timed if r["role"] == "floor"]
    finals = [r for r in floors if r["stage"] == "final"] or floors
    floor_us = min((r["median_us"] for r in finals), default=None)
    default = _default(source, problem)
    defaults = [r["mean_us"] for r in timed if r["role"] == "decode" and r["variant"] == default]
    choice = _choice(source, problem)
    for row in timed:
        if floor_us:
            row |= {"floor_us": floor_us, "over_floor": round(row["median_us"] / floor_us, 4)}
        if defaults and row["role"] != "floor":
            # By means, as the choice is.
            speedup = round(defaults[0] / row["mean_us"], 4)
            row |= {"default_mean_us": defaults[0], "speedup_over_default": speedup}
        row["chosen"] = (
            row["role"] == "decode" and row["stage"] == "final" and row["variant"] == choice
        )
    chosen_us = next((r["median_us"] for r in timed if r["chosen"]), None)
    for row in timed:
        if chosen_us and row["role"] != "floor":
            row["chosen_speedup"] = round(row["median_us"] / chosen_us, 4)


def _choice(source: Source, problem: Problem) -> str | None:
    """The variant that the sweep's table names for a cell."""
    for rule in source.table.rules if source.table else ():
        if rule.when == problem.contract:
            return rule.at(problem.work_units).variant
    return None


def _default(source: Source, problem: Problem) -> str | None:
    """The variant of the default rule: as the journal has it, else as it is installed; None where
    there is none for the contract.
    """
    noted = source.defaults.get(problem)
    if noted is not None:
        return noted
    try:
        return kernels.default(problem.contract, problem.work_units, source.run.device).id
    except (GdntuneError, LookupError, ValueError):
        return None
