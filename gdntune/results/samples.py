"""Journals with their tables, ready to be reported: which trial of each implementation counts at a
cell, and what its samples say.
"""

import dataclasses
import functools
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from gdntune import kernels, sol
from gdntune.errors import GdntuneError, JournalError, MeasurementError
from gdntune.kernels.spec import BY_INDEX, FLOORS, floor_name
from gdntune.problem import Contract, Problem
from gdntune.results import derive, journal, records
from gdntune.results.records import Cell, Check, Record, Run, Trial
from gdntune.results.summaries import Summary, summaries
from gdntune.results.table import Rule, Table
from gdntune.results.table import load as load_table

NOTHING = "-"
# Of a failure's reason, which may be a compiler's whole output.
REASON_CHARACTERS = 500


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedRun:
    """A journal and its table. name: its config's, numbered where several runs share it. table:
    None where no cell has a choice.

    defaults: what the default rule chose at a cell when it was timed, where the journal has it.
    regret: what the choices were asked for with; None for the sweep's own.
    """

    name: str
    run: Run
    records: list[Record]
    table: Table | None
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

    @functools.cached_property
    def cells(self) -> int:
        """How many cells were asked for: by the config, as far as the journal says, and those that
        the sweep added.
        """
        closed = {r.problem for r in self.records if isinstance(r, Cell)}
        seen = {r.problem for r in self.records if isinstance(r, (Cell, Trial))}
        return max(len(seen), len(closed) + self.left)

    @functools.cached_property
    def counted(self) -> dict[Problem, list[Trial]]:
        """The cells in order, each with the one trial that counts of each implementation."""
        again = derive.evidence_passes(self.records)
        return {
            p: _that_count([*trials, *again.get(p, ())])
            for p, trials in sorted(derive.passes(self.records).items())
        }

    @functools.cached_property
    def noise(self) -> dict[Problem, str]:
        """Why the times of a cell cannot be believed, where they cannot."""
        return {cell.problem: cell.reason for cell in records.noisy(self.records)}

    @functools.cached_property
    def power_capped(self) -> set[Problem]:
        """The cells that were last timed at the device's power limit."""
        return records.power_capped(self.records)

    @functools.cached_property
    def _rules(self) -> dict[Contract, Rule]:
        return {rule.when: rule for rule in self.table.rules} if self.table else {}

    def choice(self, problem: Problem) -> str | None:
        """The variant that the table names for a cell."""
        rule = self._rules.get(problem.contract)
        return None if rule is None else rule.at(problem.work_units).variant

    def default(self, problem: Problem) -> str | None:
        """The variant of the default rule: as the journal has it, else as it is installed; None
        where there is none for the contract.
        """
        noted = self.defaults.get(problem)
        if noted is not None:
            return noted
        try:
            return kernels.default(problem.contract, problem.work_units, self.run.device).id
        except (GdntuneError, LookupError, ValueError):
            return None


class Row(msgspec.Struct):
    """An implementation at a cell, by its last stage. Times in microseconds, None where it has
    none; over_floor, sol and the speed-ups are ratios.

    reason: why it has no times, or why those of its cell cannot be believed (`noisy: ...`). beside:
    what chosen_speedup is over: the choice, or its partner, where a peer's call does more than the
    contract. floor: which floor over_floor is over: states in order, where they were timed, else by
    the pool's index. over_bytes_floor: over all bytes of the problem at that floor's rate.
    power_capped: whether the cell was timed at the device's power limit. kernels: what one call of
    a peer launches, names joined by ` + `.
    """

    kernel: str
    variant: str
    role: str
    stage: str
    status: str
    reason: str
    verified: str
    median_us: float | None = None
    mean_us: float | None = None
    q1_us: float | None = None
    q3_us: float | None = None
    min_us: float | None = None
    samples: int = 0
    outliers: int = 0
    bytes_moved: int = 0
    bandwidth_gb_s: float | None = None
    sol: float | None = None
    floor_us: float | None = None
    over_floor: float | None = None
    floor: str = NOTHING
    over_index_floor: float | None = None
    over_bytes_floor: float | None = None
    bound: str = NOTHING
    power_capped: bool = False
    kernels: str = NOTHING
    chosen: bool = False
    beside: str = NOTHING
    default_mean_us: float | None = None
    speedup_over_default: float | None = None
    chosen_speedup: float | None = None

    @property
    def median_ms(self) -> float | None:
        """The median in milliseconds, to the nanosecond's thousandth."""
        return None if self.median_us is None else round(self.median_us / 1e3, 9)


def load(paths: Sequence[str | os.PathLike[str]], regret: float | None = None) -> list[LoadedRun]:
    """The runs of sweeps' folders (or journals), in the order given.

    regret: the choices are those of `judge.replay` with it, instead of the folder's table or the
    sweep's own regret. Raises JournalError for one that cannot be read, TableError for a folder's
    table that is not valid.
    """
    read = [(Path(path), *journal.read(path)) for path in paths]
    names = _names([run for _, run, _ in read])
    return [_loaded(name, *one, regret) for name, one in zip(names, read, strict=True)]


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


def _loaded(
    name: str, path: Path, run: Run, records: list[Record], regret: float | None
) -> LoadedRun:
    notes: list[str] = []
    found: Table | None = None
    digest = ""
    stored = (path if path.is_dir() else path.parent) / "table.json"
    if regret is not None:
        notes.append(f"The choices are those of `gdntune replay --regret {regret:g}`.")
    elif stored.exists():
        # The sweep's own table: older journals do not hold the regret that its config allows.
        found = load_table(stored)
        digest = journal.digest(run, records)
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
    # What is derived has it already, and to digest 100,000 records twice takes a second.
    digest = digest or (found.evidence.journal_sha256 if found else journal.digest(run, records))
    cells = (r for r in records if isinstance(r, Cell))
    defaults = {r.problem: r.default_variant for r in cells if isinstance(r.default_variant, str)}
    return LoadedRun(name, run, records, found, digest, tuple(notes), defaults, regret)


def rows(
    run: LoadedRun, first_looks: bool = True
) -> Iterator[tuple[Problem, list[tuple[Trial, Row]]]]:
    """Each cell with the trials that count there and what they say.

    first_looks: without them, most of a sweep's trials are left out: variants that were no leaders
    at their cell, nor its default. The other rows are the same.
    """
    verified = _verified(run.records)
    counted = run.counted if first_looks else {p: _led(run, p) for p in run.counted}
    # Of the whole run at once: a cell has few trials of each number of samples.
    timed = [t.samples_us for trials in counted.values() for t in filter(_has_times, trials)]
    stats = iter(summaries(timed))
    for problem, trials in counted.items():
        place = _Place(run, problem, verified.get(problem.contract, {}))
        found = [place.row(t, next(stats) if _has_times(t) else None) for t in trials]
        partners = {
            t.variant.id: str(t.variant.knobs["partner"])
            for t in trials
            if "partner" in t.variant.knobs
        }
        _relate(run, problem, found, partners)
        yield problem, list(zip(trials, found, strict=True))


def _led(run: LoadedRun, problem: Problem) -> list[Trial]:
    """A cell's trials but for first looks at variants that went no further. What failed stays, and
    all of a cell where none went further, or where a time can be refused as impossible.
    """
    trials, default = run.counted[problem], run.default(problem)
    if run.run.policy.get("l2") == "cold-dirty" or not any(
        t.role == "decode" and t.to_the_end for t in trials
    ):
        return trials
    return [
        t
        for t in trials
        if t.to_the_end or t.role != "decode" or t.status != "ok" or t.variant.id == default
    ]


def tried(run: LoadedRun) -> Iterator[tuple[Trial, Row]]:
    """Each trial that counts with its row, cell by cell."""
    for _, found in rows(run):
        yield from found


def _that_count(trials: Sequence[Trial]) -> list[Trial]:
    last: dict[tuple[str, str], Trial] = {}
    for trial in trials:
        key = trial.role, trial.variant.id
        last[key] = _later(last.get(key), trial)
    return list(last.values())


_STAGES = ("screen", "final", "evidence")


def _later(one: Trial | None, other: Trial) -> Trial:
    """The trial that counts: a failed one, else what was timed after the choice, else the final
    one, else the later one.
    """
    if one is None:
        return other
    if one.status != "ok" or (
        _STAGES.index(one.stage) > _STAGES.index(other.stage) and other.status == "ok"
    ):
        return one
    return other


def _has_times(trial: Trial) -> bool:
    return trial.status == "ok" and bool(trial.samples_us)


def _verified(records: Sequence[Record]) -> dict[Contract, dict[str, str]]:
    found: dict[Contract, dict[str, str]] = {}
    for r in records:
        if isinstance(r, Check):
            mine = found.setdefault(r.contract, {})
            # A failed check stays failed, whatever a later one says: the code is the same.
            if mine.get(r.variant, "ok") == "ok":
                mine[r.variant] = r.status
    return found


class _Place:
    """What the rows of a cell share. Looked up once a cell: of 140,000 rows, to hash a problem for
    each takes as long as to summarize its samples.
    """

    def __init__(self, run: LoadedRun, problem: Problem, verified: Mapping[str, str]) -> None:
        self.verified = verified
        self.limits = sol.Limits(problem, run.run.device, run.run.policy.get("l2", "cold-clean"))
        self.floor_bytes = sol.floor_bytes(problem)
        self.noise = run.noise.get(problem)
        self.power_capped = problem in run.power_capped
        self.peak_gb_s = run.peak_gb_s

    def row(self, trial: Trial, stats: Summary | None) -> Row:
        """What a trial says, before it is compared with the others. stats: of its times, where it
        has any.
        """
        variant, is_floor = trial.variant, trial.role == "floor"
        moved = self.floor_bytes if is_floor else self.limits.moved
        # What a peer moves beyond what it must, by its adapter's word.
        moved += int(variant.knobs.get("extra_bytes", 0))
        reason = trial.reason and " ".join(trial.reason.split())[:REASON_CHARACTERS]
        row = Row(
            kernel=variant.kernel,
            variant=variant.id,
            role=trial.role,
            stage=trial.stage,
            status=trial.status,
            reason=reason or NOTHING,
            # A floor computes nothing that could be wrong.
            verified=self.verified.get(variant.id, NOTHING if is_floor else "unchecked"),
            samples=len(trial.samples_us),
            bytes_moved=moved,
        )
        if stats is not None:
            self._add_times(trial, row, stats)
        return row

    def _add_times(self, trial: Trial, row: Row, stats: Summary) -> None:
        row.reason = self.noise or row.reason
        row.power_capped = self.power_capped
        if isinstance(trial.kernels, tuple) and trial.kernels:
            row.kernels = " + ".join(trial.kernels)
        row.median_us, row.mean_us, row.q1_us, row.q3_us, row.min_us, row.outliers = stats
        us = stats.median_us
        if not us > 0:
            row.status, row.reason = "failed", "a median of 0 us is no time"
            return
        row.bandwidth_gb_s = round(row.bytes_moved / us / 1e3, 1)
        if self.peak_gb_s:
            row.sol = round(sol.sol(row.bytes_moved, us, self.peak_gb_s), 4)
        if trial.role == "floor":
            return
        try:
            row.bound = self.limits.bound(us)
        except MeasurementError as e:
            # More than the DRAM can do is no result, whatever it would do for the tables.
            row.status, row.reason = "impossible", str(e)[:REASON_CHARACTERS]


def _floors(run: LoadedRun, problem: Problem, timed: Sequence[Row]) -> dict[str, float]:
    """The least median of each floor that was timed, the headlines' first."""
    names = {t.variant.id: floor_name(t.variant) for t in run.counted[problem] if t.role == "floor"}
    found: dict[str, float] = {}
    for name in FLOORS:
        mine = [r for r in timed if r.role == "floor" and names[r.variant] == name and r.median_us]
        for stages in (("evidence",), ("final",), ("screen",)):
            us = [r.median_us for r in mine if r.stage in stages and r.median_us]
            if us and name not in found:
                found[name] = min(us)
    return found


def _relate(
    run: LoadedRun, problem: Problem, found: Sequence[Row], partners: Mapping[str, str]
) -> None:
    """Fills in what a cell's rows are compared with: its floor, its default, the table's choice.

    partners: what a peer's entry is compared with instead, by its id.
    """
    timed = [r for r in found if r.status == "ok" and r.median_us is not None]
    default, choice = run.default(problem), run.choice(problem)
    for row in timed:
        row.chosen = row.role == "decode" and row.stage != "screen" and row.variant == choice
    floors = _floors(run, problem, timed)
    # By means, as the choice is.
    default_us = next(
        (r.mean_us for r in timed if r.role == "decode" and r.variant == default), None
    )
    chosen = next((r for r in timed if r.chosen), None)
    ours = {r.variant: r for r in timed if r.role == "partner"}
    # What else must move, at the rate at which the floor moves states.
    share = sol.bytes_moved(problem) / sol.floor_bytes(problem)
    for row in timed:
        _add_floors(share, row, floors)
        if row.role != "floor":
            # Like with like: a call that does more is set beside ours with the same added.
            mine = ours.get(partners[row.variant]) if row.variant in partners else chosen
            _compare(row, default_us, mine)


def _add_floors(share: float, row: Row, floors: Mapping[str, float]) -> None:
    """Fills in a row's time over its cell's floors, the first of which is the cell's own. share:
    the bytes that must move over the floor's.
    """
    if row.median_us is None:
        return
    name = next(iter(floors), NOTHING)
    if floor_us := floors.get(name):
        row.floor, row.floor_us = name, floor_us
        row.over_floor = round(row.median_us / floor_us, 4)
        row.over_bytes_floor = round(row.over_floor / share, 4)
    if by_index_us := floors.get(BY_INDEX):
        row.over_index_floor = round(row.median_us / by_index_us, 4)


def _compare(row: Row, default_us: float | None, mine: Row | None) -> None:
    """Fills in a row's speed-ups: over the default rule by means, ours over it by medians."""
    if row.median_us is None or row.mean_us is None:
        return
    if default_us is not None:
        row.default_mean_us = default_us
        row.speedup_over_default = round(default_us / row.mean_us, 4)
    if mine is not None and mine.median_us:
        row.chosen_speedup = round(row.median_us / mine.median_us, 4)
        row.beside = mine.variant
