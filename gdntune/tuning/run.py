"""The engine of sweeps and benches: compiles, checks, times and journals what a plan says, and
derives the table. Knows no kernel by name.

The parent compiles and journals; workers, a process for each device, check and time, so that a
variant that crashes or hangs costs itself alone. What is in the journal is not done again.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import msgspec

from gdntune import kernels, sol
from gdntune.device import arch
from gdntune.device.arch import cpu_threads
from gdntune.errors import JournalError, MeasurementError
from gdntune.kernels.spec import Variant
from gdntune.objects.build import SPILL_LIMIT_BYTES, Built, compile_objects
from gdntune.objects.store import Store
from gdntune.problem import Contract, Problem
from gdntune.results import records as kinds
from gdntune.results.derive import as_chosen, derive, marked, timed_cells
from gdntune.results.journal import Journal
from gdntune.results.records import (
    Build,
    Cell,
    Check,
    Record,
    Run,
    noise_notes,
    noisy,
    timed,
    tried,
)
from gdntune.results.table import Table, save
from gdntune.timing import Policy
from gdntune.tuning import attempts, cells, notes
from gdntune.tuning.attempts import CellJob
from gdntune.tuning.cells import Again
from gdntune.tuning.estimate import again_s, cell_s
from gdntune.tuning.executors import Worker
from gdntune.tuning.header import resolved, run_header
from gdntune.tuning.plan import Choices, Plan, Usable, chosen_by
from gdntune.tuning.progress import Progress
from gdntune.tuning.team import Executor, Team, start_team
from gdntune.tuning.throttling import (
    THROTTLED_IN_A_ROW,
    Throttling,
    cannot_hold_its_clocks,
    was_throttled,
)

Purpose = kinds.Purpose | msgspec.UnsetType


class Means(NamedTuple):
    """With what a plan is run. devices: by torch's numbering; on a CPU a process for each number.
    jobs: compiling processes. command: as the header has it. workers_per_device: processes that
    take turns on a device: what one of them compiles takes no other's time.
    """

    store: Store
    policy: Policy
    devices: tuple[int, ...] = (0,)
    executor: Executor = "local"
    jobs: int | None = None
    progress: Progress = Progress()
    command: str = ""
    workers_per_device: int = 1


class Outcome(NamedTuple):
    """A finished run. table: None where no cell has a choice; notes say why, and what else a user
    should know.
    """

    table: Table | None
    run: Run
    records: list[Record]
    notes: list[str]

    @property
    def timed(self) -> int:
        """The cells that have times of what was to be chosen, or was chosen beforehand."""
        return len(as_chosen(timed_cells(self.records), self.records))


def run(plan: Plan, folder: Path, means: Means) -> Outcome:
    """Writes folder/journal.jsonl and folder/table.json, or resumes where the journal ends.

    Raises GdntuneError for a journal of another run, a folder in use, devices that differ, a tool
    that is missing, a device that cannot hold its clocks.
    """
    header = run_header(plan, means.policy, means.command)
    if means.workers_per_device > 1:
        header = msgspec.structs.replace(header, workers_per_device=means.workers_per_device)
    with ExitStack() as stack:
        # A place that cannot be had is refused before anything is compiled; the journal is begun
        # after that, since the timing process needs the flush kernel to say what policy it can
        # keep.
        journal = stack.enter_context(Journal.claim(folder, header))
        stack.callback(means.progress.stop)
        built = _compile(plan, means, journal)
        team = stack.enter_context(
            start_team(
                plan.device,
                means.devices,
                means.executor,
                means.store,
                built,
                means.policy,
                means.workers_per_device,
            )
        )
        policy, note, peaks = team.agreed(journal.fresh)
        local = plan.device.kind == "cuda" and means.executor == "local"
        cards = [arch.card(i) for i in means.devices] if local else []
        journal.begin(resolved(header, policy, peaks, cards))
        engine = _Run(plan, journal, team, means.progress)
        engine.notes += [note] if note else []
        engine.notes += team.of_other_cards(journal.run.cards, cards)
        engine.notes += notes.peers(plan)
        if team.several and plan.device.kind == "cpu":
            engine.notes.append(
                f"{len(team.workers)} processes timed on one CPU at once: their times disturb each"
                " other; good to try with, not for a table"
            )
        elif team.in_turns and plan.device.kind == "cpu":
            engine.notes.append(
                f"{len(team.workers)} processes took turns on one CPU: what one compiles disturbs"
                " another's times; good to try with, not for a table"
            )
        usable = engine.record_builds(built)
        usable = engine.check(usable)
        engine.time(usable)
        return engine.finish(folder)


def _compile(plan: Plan, means: Means, journal: Journal) -> dict[str, Built]:
    def done(_: Built) -> None:
        # Minutes of compiling are for nothing where the folder is gone.
        journal.require_place()
        means.progress.step()

    objects = plan.objects()
    means.progress.start("compile", len(objects))
    built = compile_objects(objects, means.store, jobs=means.jobs or cpu_threads(), on_done=done)
    means.progress.end()
    return {b.spec.key: b for b in built}


class _Run:
    """A run's steps after its journal was begun; what may be timed goes from one to the next."""

    def __init__(self, plan: Plan, journal: Journal, team: Team, progress: Progress):
        self.plan, self.journal, self.team, self.progress = plan, journal, team, progress
        self.notes: list[str] = []
        self.throttling = Throttling()
        # Of an earlier run of this sweep, whose times cannot be believed: they are taken once more.
        marked_cells = noisy(journal.records)
        self.noisy = {cell.problem for cell in marked_cells if cell.chooses}
        self.noisy_again = {cell.problem for cell in marked_cells if not cell.chooses}

    # -- what compiled

    def record_builds(self, built: Mapping[str, Built]) -> Usable:
        """Journals the builds that are news, and gives what compiled and does not spill."""
        # An object is journalled again only where its outcome changed: a resumed sweep repeats no
        # line.
        known = {r.object_key: r.reason for r in self.journal.records if isinstance(r, Build)}
        fresh = [_build_record(b) for b in built.values()]
        self.journal.extend(r for r in fresh if known.get(r.object_key) != r.reason)
        good = {r.object_key for r in fresh if r.status == "ok"}

        def sound(contract: Contract, variants: Sequence[Variant]) -> tuple[Variant, ...]:
            return tuple(v for v in variants if self.plan.key(contract, v) in good)

        plan = self.plan
        return Usable(
            {c: sound(c, variants) for c, variants in plan.tried.items()},
            {c: sound(c, variants) for c, variants in plan.floors.items()},
            frozenset((c, v.id) for c in plan.tried for v in sound(c, plan.variants(c))),
        )

    # -- what is right

    def check(self, usable: Usable) -> Usable:
        """Checks what the journal has no check of, and gives what passed."""
        known = {
            (r.contract, r.variant): r.status for r in self.journal.records if isinstance(r, Check)
        }
        todo = {
            c: [v for v in self.plan.variants(c) if (c, v.id) in usable.sound.difference(known)]
            for c in self.plan.tried
        }
        self.progress.start("check", sum(map(len, todo.values())))
        # A contract is a job, since its reference takes longer than a variant; or several, where
        # there are fewer contracts than workers.
        parts = max(1, -(-self.team.count // max(1, sum(map(bool, todo.values())))))
        jobs = (
            partial(attempts.check, contract=contract, variants=part)
            for contract, variants in todo.items()
            for part in _parts(variants, parts)
        )
        for records in self.team.share(jobs):
            self.journal.extend(records)
            known |= {(r.contract, r.variant): r.status for r in records}
            self.progress.step(len(records))
        self.progress.end()
        return usable.checked(key for key, status in known.items() if status == "ok")

    # -- how long it takes

    def time(self, usable: Usable) -> Usable:
        """The plan's cells, then, where the run chooses, those between two whose choices differ,
        then those that the table is judged at.
        """
        plan, journal = self.plan, self.journal
        if plan.choices is not None:
            return self._cells("time", plan.problems, msgspec.UNSET, _nothing, usable)
        self.notes += notes.untimed(plan, usable, journal.records)
        self.notes += notes.untried(plan)
        usable = self._cells("time", plan.problems, msgspec.UNSET, chosen_by(plan.judged), usable)
        # Those that failed when this journal was last written to; `crossovers` names none twice.
        again = marked(journal.records, "bisection")
        usable = self._cells("bisect", again, "bisection", _nothing, usable)
        while more := cells.crossovers(plan.config, journal.records, journal.run):
            usable = self._cells("bisect", more, "bisection", _nothing, usable)
        if aside := cells.held_out(plan.config, journal.records):
            usable = self._cells("held out", aside, "held-out", self._choices(), usable)
        return self._again(usable)

    def _again(self, usable: Usable) -> Usable:
        """Times each choice of the table anew, beside what it is compared with, on tensors of their
        own: its first samples chose it, and flatter it.
        """
        if not cells.fresh_rounds(self.plan.config.search):
            return usable
        try:
            table = derive(self.journal.records, self.journal.run, regret=self.plan.regret)
        except (JournalError, MeasurementError):
            return usable
        todo = cells.again(self.journal.records, table, self.noisy_again)
        return self._cells("again", list(todo), "evidence", _nothing, usable, todo)

    def _choices(self) -> Choices:
        """What the table chooses that the journal's cells give so far."""
        try:
            table = derive(self.journal.records, self.journal.run, regret=self.plan.regret)
        except JournalError:
            return _nothing
        return chosen_by([table])

    def _cells(
        self,
        label: str,
        problems: Sequence[Problem],
        purpose: Purpose,
        judged: Choices,
        usable: Usable,
        again: Mapping[Problem, Again] | None = None,
    ) -> Usable:
        """Times those cells that have no times, or had noisy ones when this journal was last
        written to. judged: what is timed to the end, beside what is named there and the leaders.
        again: of cells that have times, what is timed anew.
        """
        # Once a run: cells that stay noisy would be timed again at every resumption of the same
        # run.
        done = set() if again is not None else timed(self.journal.records) - self.noisy
        self.noisy -= set(problems)
        todo = [p for p in problems if p not in done]
        if self.team.several:
            # The longest first, so that no worker is left with one while the others are done.
            todo.sort(key=sol.bytes_moved, reverse=True)

        def job(worker: Worker, *, deal: Deal) -> list[Record]:
            # Made when a worker is free: what took a process down before is left out.
            problem = deal.next(worker)
            few = None if again is None else again[problem]
            return self._job(problem, purpose, judged(problem), usable, few)(worker)

        def jobs(todo: Sequence[Problem]) -> Iterator[Callable[[Worker], list[Record]]]:
            deal = Deal(todo, apart=self.team.in_turns)
            return (partial(job, deal=deal) for _ in todo)

        # What failed before comes last: a device that it throttles gets to the others first.
        todo.sort(key=tried(self.journal.records).__contains__)
        while todo:
            out, hot = self._out(), list[Cell]()
            # A cell of 256 requests takes a hundred times one of a single request.
            expected = cell_s if again is None else again_s
            work = {p: self._expected_s(p, usable, expected) for p in todo}
            self.progress.start(label, len(todo), sum(work.values()))
            for records in self.team.share(jobs(todo), self._fit):
                contract = records[-1].problem.contract
                usable = usable.without(contract, attempts.broken(records))
                self.journal.extend(records)
                self.progress.step(work=work[records[-1].problem])
                self.throttling.see(records)
                hot += [r for r in records if isinstance(r, Cell) and was_throttled(r)]
            self.progress.end()
            if self._out() == self.team.devices:
                raise cannot_hold_its_clocks(self.journal.records)
            # What a device had that is left out from now on goes to the others.
            todo = [r.problem for r in hot if r.timed_on in self._out() - out]
        return usable

    def _expected_s(
        self, problem: Problem, usable: Usable, expected: Callable[..., float]
    ) -> float:
        c, plan = problem.contract, self.plan
        return expected(plan.config, problem, plan.device, usable.tried[c], plan.floors[c], plan.l2)

    def _fit(self, worker: Worker) -> bool:
        return self.throttling.fit(worker.name if self.team.several else msgspec.UNSET)

    def _out(self) -> set[str]:
        """The names of the workers whose device cannot hold its clocks."""
        return {worker.name for worker in self.team.workers if not self._fit(worker)}

    def _job(
        self,
        problem: Problem,
        purpose: Purpose,
        judged: frozenset[str],
        usable: Usable,
        again: Again | None = None,
    ) -> Callable[[Worker], list[Record]]:
        """What times a cell with all variants that are usable, or again with a few of them."""
        plan = self.plan
        variants = plan.candidates(problem, usable)
        floors = kernels.at(problem, plan.device, usable.floors[problem.contract])
        effort = plan.effort(problem)
        choice = msgspec.UNSET if plan.choices is None else plan.choices[problem].id
        if again is not None:
            by_id = {v.id: v for v in variants}
            variants = [by_id[name] for name in again.variants if name in by_id]
            floors = [f for f in floors if f.id in again.floors] or floors
            choice, judged = again.variants[0], frozenset(again.variants)
            rounds = cells.fresh_rounds(effort)
            ends = min(effort.max_cell_seconds, cells.FRESH_SECONDS)
            effort = msgspec.structs.replace(effort, final_rounds=rounds, max_cell_seconds=ends)
        ids, default = {v.id for v in variants}, plan.default(problem).id
        asked = CellJob(
            problem,
            variants,
            floors,
            effort,
            default=default if default in ids else msgspec.UNSET,
            choice=choice,
            purpose=purpose,
            named=self.team.several,
            always_final=judged | {v.id for v in plan.named(problem)},
            peers=plan.peers,
            device=plan.device,
        )
        reason = "" if variants else "no variant compiled and passed its check"
        # Refused here, since running out of memory takes a process.
        reason = cells.too_large(problem, plan.device) or reason
        if reason:
            return lambda worker: [asked.cell(worker, "failed", reason=reason)]
        return partial(attempts.time, job=asked)

    # -- the table

    def finish(self, folder: Path) -> Outcome:
        """Saves the table, and says what failed."""
        records, header = self.journal.records, self.journal.run
        self.notes += notes.failures(records)
        self.notes += noise_notes(records)
        self.notes += [
            f"{name} was left out when its last {THROTTLED_IN_A_ROW} cells were throttled:"
            " see to its cooling and power"
            for name in sorted(self._out())
        ]
        try:
            table = derive(records, header, regret=self.plan.regret)
        except (JournalError, MeasurementError) as e:
            self.notes.append(str(e))
            return Outcome(None, header, records, self.notes)
        # A folder that is gone must not come back with a table alone.
        self.journal.require_place()
        save(table, folder / "table.json")
        return Outcome(table, header, records, self.notes)


class Deal:
    """Problems for workers, in order. Used by several threads.

    apart: a worker goes on with the contract and heads of its last one, and otherwise begins with
    some that no other has: a library's kernels are compiled in one process each time.
    """

    def __init__(self, problems: Sequence[Problem], apart: bool = False):
        self._left, self._apart = list(problems), apart
        self._last: dict[int, Hashable] = {}
        self._lock = Lock()

    def next(self, worker: Worker) -> Problem:
        """The next problem of a worker; there must be one."""
        with self._lock:
            found = self._left[0]
            if self._apart:
                mine, taken = self._last.get(id(worker)), set(self._last.values())
                same = (p for p in self._left if _kind(p) == mine)
                new = (p for p in self._left if _kind(p) not in taken)
                found = next(same, None) or next(new, found)
                self._last[id(worker)] = _kind(found)
            self._left.remove(found)
            return found


def _kind(problem: Problem) -> Hashable:
    return problem.contract, problem.H, problem.HV


def _nothing(problem: Problem) -> frozenset[str]:
    return frozenset()


def _build_record(b: Built) -> Build:
    m, reason = b.manifest, b.reason
    if m and (m.spill_bytes or 0) > SPILL_LIMIT_BYTES:
        reason = (
            f"spills {m.spill_bytes} bytes a thread: more than {SPILL_LIMIT_BYTES} are not timed"
        )
    return Build(
        kernel=b.spec.kernel,
        variant=b.spec.label,
        object_key=b.spec.key,
        status="failed" if reason or m is None else "ok",
        reason=reason,
        seconds=m.seconds if m else 0.0,
        registers=m.registers if m else None,
        spill_bytes=m.spill_bytes if m else None,
        shared_bytes=m.shared_bytes if m else None,
        cached=b.cached,
    )


def _parts(variants: Sequence[Variant], n: int) -> Iterator[Sequence[Variant]]:
    """At most `n` parts of about equal length, none of them empty."""
    size = max(1, -(-len(variants) // n))
    return (variants[i : i + size] for i in range(0, len(variants), size))
