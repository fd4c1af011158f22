"""The sweep: chooses variants, compiles, checks, times, journals, derives the table. Knows no
kernel by name.

The parent compiles and journals; workers, a process for each device, check and time, so that a
variant that crashes or hangs costs itself alone. What is in the journal is not done again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from gdntune import kernels, sol
from gdntune.device.arch import Device, cpu_threads, software
from gdntune.errors import JournalError, MeasurementError, UnsupportedProblem, listed
from gdntune.kernels.spec import Variant
from gdntune.objects.build import SPILL_LIMIT_BYTES, Built, compile_objects
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract, Problem
from gdntune.results.derive import derive, marked
from gdntune.results.journal import (
    Build,
    Cell,
    Check,
    Journal,
    Record,
    Run,
    Trial,
    latest,
    now,
    timed,
    tried,
)
from gdntune.results.table import Table, save
from gdntune.timing import Policy
from gdntune.tuning import attempts as trials
from gdntune.tuning import cells, executors
from gdntune.tuning import worker as session
from gdntune.tuning.config import Config, same
from gdntune.tuning.executors import Crashed, Worker
from gdntune.tuning.plan import plan, plan_objects

Executor = Literal["local", "ray"]
Purpose = Literal["bisection", "held-out"] | msgspec.UnsetType
# The ids of the variants that are timed to the end at a problem, whatever their first samples say.
Choices = Callable[[Problem], frozenset[str]]


class Progress:
    """What a sweep tells of itself while it runs; this one is silent."""

    def start(self, label: str, total: int) -> None: ...
    def step(self, n: int = 1) -> None: ...
    def end(self) -> None: ...


class Outcome(NamedTuple):
    """A finished sweep. table: None where no cell has a choice; notes say why, and what else a user
    should know.
    """

    table: Table | None
    run: Run
    records: list[Record]
    notes: list[str]


def run_header(
    config: Config,
    device: Device,
    policy: Policy,
    command: str,
    cells: int,
    origins: Mapping[str, str] | None = None,
) -> Run:
    """A journal's first line as far as it is known before anything runs; `resolved` completes it.

    origins: what else must be equal for two runs to share a journal, by name. Raises
        UnsupportedProblem for a timer that a CPU
    cannot have; on CUDA the timing process finds out.
    """
    if device.kind == "cpu":
        policy, _ = policy.resolve(device)
    return Run(
        config=config.name,
        config_sha256=config.sha256,
        device=device,
        software={**software(), **(origins or {})},
        policy=_known(policy),
        kernels=kernels.fingerprints(device.kind),
        started=now(),
        command=command,
        workload=(
            config.search.workload if isinstance(config.search.workload, tuple) else msgspec.UNSET
        ),
        cells=cells,
        rounds=config.search.final_rounds,
    )


def resolved(header: Run, policy: Policy, peaks: Mapping[str, float]) -> Run:
    """A header with the policy in force and the measured peaks."""
    return msgspec.structs.replace(
        header,
        policy=_known(policy),
        peaks={name: round(value, 1) for name, value in peaks.items()},
    )


def _known(policy: Policy) -> dict[str, str]:
    return {name: x for name, x in (("timer", policy.timer), ("l2", policy.l2)) if x != "auto"}


def sweep(
    config: Config,
    folder: Path,
    *,
    device: Device,
    index: int = 0,
    devices: Sequence[int] = (),
    executor: Executor = "local",
    store: Store,
    jobs: int | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
    command: str = "",
    judged: Sequence[Table] = (),
) -> Outcome:
    """Runs a config on a device: writes folder/journal.jsonl and folder/table.json, or goes on
    where the journal ends.

    devices: CUDA devices of this host, by torch's numbering, that share the cells, instead of
        `index` alone; on a CPU a process
    for each number. executor: where the workers are; `ray` has one for each device of the Ray
    cluster at hand. policy: instead of
    the config's. judged: tables whose choices are timed to the end at the config's cells, so that
    `judge` compares final samples; what
    of them the config does not time is in the notes. Raises GdntuneError for a journal of another
    sweep, a folder in use, devices
    that differ, a tool that is missing, a device that cannot hold its clocks.
    """
    return _Sweep(
        config, Path(folder), device, tuple(devices) or (index,), executor, store, jobs, policy or config.policy,
        progress or Progress(), command, tuple(judged),
    ).run()  # fmt: skip


class _Sweep:
    def __init__(
        self, config: Config, folder: Path, device: Device, devices: tuple[int, ...], executor: Executor, store: Store,
        jobs: int | None, policy: Policy, progress: Progress, command: str, judged: tuple[Table, ...],
    ):  # fmt: skip
        self.config, self.folder, self.device, self.devices, self.executor = (
            config,
            folder,
            device,
            devices,
            executor,
        )
        self.store, self.jobs, self.policy, self.progress, self.command = (
            store, jobs or cpu_threads(), policy, progress, command,
        )  # fmt: skip
        self.judged = judged
        self.plan = plan(config, device)
        self.notes: list[str] = []
        self.throttling = trials.Throttling()
        self.built: dict[str, Built] = {}
        self.usable: dict[Contract, list[Variant]] = {}
        self.floors: dict[Contract, list[Variant]] = {}
        self.checked: set[tuple[Contract, str]] = set()
        self.workers: list[Worker] = []

    def run(self) -> Outcome:
        self.config.check_kernels(kernels.KERNELS)
        for other in (t.device for t in self.judged if t.device.kind != self.device.kind):
            raise UnsupportedProblem(
                f"a table of {other.name} ({other.kind}) to be judged on {self.device.name}"
                f" ({self.device.kind}): accepted are tables of the same kind of device; leave"
                " it out"
            )
        if not self.config.parts:
            # of a config's parts others may have been left out, whose contracts a value serves
            self.config.check_knobs(kernels.KERNELS)
        cells.listed_held_out(self.config)
        header = run_header(
            self.config, self.device, self.policy, self.command, len(self.config.problems())
        )
        header = msgspec.structs.replace(
            header, regret=self.config.search.regret, keeps_default=True
        )
        with ExitStack() as stack:
            # a place that cannot be had is refused before anything is compiled; the journal is
            # begun after that, since the timing
            # process needs the flush kernel to say what policy it can keep
            journal = stack.enter_context(Journal.claim(self.folder, header))
            self.built = built = self._compile()
            self.workers = self._workers(built)
            for worker in self.workers:
                stack.callback(worker.close)
            policy, peaks = self._resolved(journal.fresh)
            journal.begin(resolved(header, policy, peaks))
            self._journal_builds(journal, built)
            self._check_all(journal)
            self._time_all(journal)
            return self._finish(journal)

    # -- workers

    def _workers(self, built: Mapping[str, Built]) -> list[Worker]:
        bundles = tuple(str(path) for path, _ in self.store.bundles)
        starts = [
            session.Start(self.device, i, str(self.store.root), bundles, self.policy)
            for i in self.devices
        ]
        if self.executor == "ray":
            from gdntune.tuning.ray import ray_workers

            keys = [key for key, b in built.items() if b.ok]
            return ray_workers(starts[0], keys, self.store, session.begin_task)
        if len(starts) > 1 and self.device.kind == "cpu":
            self.notes.append(
                f"{len(starts)} processes timed on one CPU at once: their times disturb each other;"
                " good to try with, not for a table"
            )
        return [
            executors.Child(start, f"{self.device.kind}:{start.index}", session.begin_task)
            for start in starts
        ]

    def _resolved(self, measure: bool) -> tuple[Policy, dict[str, float]]:
        """The policy in force and the peaks, measured where asked for, by the first worker; several
        must be of one kind.
        """
        first, others = self.workers[0], self.workers[1:]
        policy, note, peaks = self._asked(first, session.resolve_task, measure)
        self.notes += [note] if note else []
        if others or self.executor != "local":
            here = {
                **session.identity(self.device),
                "timing policy": f"{policy.timer}, {policy.l2}",
            }
            for worker, theirs in zip(
                self.workers, executors.on_each(self.workers, self._identity), strict=True
            ):
                names = sorted(n for n in {**here, **theirs} if here.get(n) != theirs.get(n))
                if names:
                    said = "; ".join(
                        f"{n}: {here.get(n, 'none')} here, {theirs.get(n, 'none')} there"
                        for n in names
                    )
                    raise UnsupportedProblem(
                        f"{worker.name} cannot share this sweep: {said}; accepted are devices of"
                        " one model with the same software: leave the others out, or sweep them by"
                        " themselves"
                    )
        return policy, peaks

    def _identity(self, worker: Worker) -> dict[str, str]:
        policy, _, _ = self._asked(worker, session.resolve_task, False)
        return {
            **self._asked(worker, session.identity_task),
            "timing policy": f"{policy.timer}, {policy.l2}",
        }

    def _asked(self, worker: Worker, task: Callable[..., Any], *args: Any) -> Any:
        got = worker.run(task, *args, timeout=trials.CHECK_TIMEOUT_S)
        if isinstance(got, Crashed):
            raise MeasurementError(
                f"the timing process of {worker.name} does not start: {got.reason}"
            )
        return got

    # -- compile

    def _compile(self) -> dict[str, Built]:
        objects = plan_objects(self.config, self.device)
        self.progress.start("compile", len(objects))
        built = compile_objects(
            objects, self.store, jobs=self.jobs, on_done=lambda _: self.progress.step()
        )
        self.progress.end()
        return {b.spec.key: b for b in built}

    def _journal_builds(self, journal: Journal, built: dict[str, Built]) -> None:
        seen = {r.object_key: r.reason for r in journal.records if isinstance(r, Build)}
        fresh: list[Record] = []
        for key, b in built.items():
            m, reason = b.manifest, b.reason
            if m and (m.spill_bytes or 0) > SPILL_LIMIT_BYTES:
                reason = (
                    f"spills {m.spill_bytes} bytes a thread: more than {SPILL_LIMIT_BYTES} are not"
                    " timed"
                )
            if seen.get(key) == reason:
                continue
            fresh.append(
                Build(
                    kernel=b.spec.kernel,
                    variant=b.spec.label,
                    object_key=key,
                    status="failed" if reason else "ok",
                    reason=reason,
                    seconds=m.seconds if m else 0.0,
                    registers=m.registers if m else None,
                    spill_bytes=m.spill_bytes if m else None,
                    shared_bytes=m.shared_bytes if m else None,
                    cached=b.cached,
                )
            )
        journal.extend(fresh)
        for contract, (decode, floor) in self.plan.items():
            self.usable[contract] = [v for v in decode if self._sound(contract, v)]
            self.floors[contract] = [v for v in floor if self._sound(contract, v)]

    def _sound(self, contract: Contract, variant: Variant) -> bool:
        """Whether a variant compiled and does not spill."""
        b = self.built[object_spec(kernels.get(variant.kernel), contract, variant, self.device).key]
        return b.manifest is not None and (b.manifest.spill_bytes or 0) <= SPILL_LIMIT_BYTES

    # -- check

    def _check_all(self, journal: Journal) -> None:
        known = {(r.contract, r.variant): r.status for r in journal.records if isinstance(r, Check)}
        todo = {c: [v for v in self._with_defaults(c) if (c, v.id) not in known] for c in self.plan}
        self.progress.start("check", sum(map(len, todo.values())))
        # a contract is a job, or, since its reference takes longer than a variant, one for each
        # worker where there are few
        parts = max(1, -(-len(self.workers) // max(1, sum(map(bool, todo.values())))))
        checks = (
            partial(trials.check, contract=contract, variants=part)
            for contract, variants in todo.items()
            for part in _parts(variants, parts)
        )
        for records in self._shared(checks):
            journal.extend(records)
            known |= {(r.contract, r.variant): r.status for r in records}
            self.progress.step(len(records))
        self.progress.end()
        self.checked = {key for key, status in known.items() if status == "ok"}
        for contract, usable in self.usable.items():
            self.usable[contract] = [v for v in usable if (contract, v.id) in self.checked]

    def _shared(
        self,
        jobs: Iterable[Callable[[Worker], Any]],
        fit: Callable[[Worker], bool] = lambda _: True,
    ) -> Iterator[Any]:
        """The jobs' results as they come from the workers that are fit."""
        with closing(executors.share_out(self.workers, iter(jobs), fit)) as results:  # type: ignore[type-var]
            yield from results

    def _with_defaults(self, contract: Contract) -> list[Variant]:
        """A contract's variants and the default rule's choices at its cells, those that compiled,
        each once.
        """
        found = {v.id: v for v in self.usable[contract]}
        for problem in self.config.problems():
            if problem.contract == contract:
                v = kernels.default(contract, problem.work_units, self.device)
                if v.id not in found and self._sound(contract, v):
                    found[v.id] = v
        return list(found.values())

    # -- time

    def _time_all(self, journal: Journal) -> None:
        """The config's cells, then those between two that choose otherwise, then those that the
        table is judged at.
        """
        self._note_untimed(journal)
        self._note_untried()
        self._time(journal, "time", self.config.problems(), msgspec.UNSET, chosen_by(self.judged))
        # those that failed when this journal was last written to; `crossovers` names none twice
        self._time(journal, "bisect", marked(journal.records, "bisection"), "bisection", _nothing)
        while more := cells.crossovers(self.config, journal.records, journal.run):
            self._time(journal, "bisect", more, "bisection", _nothing)
        if aside := cells.held_out(self.config, journal.records):
            self._time(journal, "held out", aside, "held-out", self._choices(journal))

    def _note_untimed(self, journal: Journal) -> None:
        """Notes what the judged tables choose that is no variant of this config, or has no final
        samples where a cell was timed before.
        """
        if not self.judged:
            return
        chosen = chosen_by(self.judged)
        known = {contract: {v.id for v in self._with_defaults(contract)} for contract in self.plan}
        missing = {
            (p.contract, name)
            for p in self.config.problems()
            for name in chosen(p) - known[p.contract]
        }
        if missing:
            self.notes.append(
                f"{len(missing)} choices of the judged tables are not timed, since they are no"
                " sound variants of this config: " + listed(sorted({name for _, name in missing}))
            )
        done = timed(journal.records)
        finals = {
            (r.problem, r.variant.id)
            for r in journal.records
            if isinstance(r, Trial) and r.stage == "final"
        }
        asked = {
            (p, name)
            for p in self.config.problems()
            if p in done
            for name in chosen(p) & known[p.contract]
        }
        if late := len(asked - finals):
            self.notes.append(
                f"{late} choices of the judged tables have no final samples, since their cells were"
                " timed before they were asked for: judge compares these by the screen's few; a"
                " sweep into another folder times them to the end"
            )

    def _note_untried(self) -> None:
        """Notes the values of the config's `kernels` that no variant has here; they are legal, but
        not worth trying.
        """
        mine = {k.name for k in kernels.serving(self.device, "decode")}
        tried: dict[str, bool] = {}
        for part in self.config.each_part():
            variants = [v for c in part.own_contracts() for v in self.plan[c][0]]
            for kernel, knob, value in part.values():
                here = any(v.kernel == kernel and same(v.knobs[knob], value) for v in variants)
                if kernel in mine:
                    tried[f"{kernel}.{knob}={value}"] = here or tried.get(
                        f"{kernel}.{knob}={value}", False
                    )
        if missing := [name for name, found in tried.items() if not found]:
            self.notes.append(
                f"{len(missing)} values of the config's kernels are tried nowhere:"
                f" {listed(missing)}"
            )

    def _choices(self, journal: Journal) -> Choices:
        """What the table chooses that the journal's cells give so far."""
        try:
            table = derive(journal.records, journal.run, regret=self.config.search.regret)
        except JournalError:
            return _nothing
        return chosen_by([table])

    def _time(
        self,
        journal: Journal,
        label: str,
        problems: Sequence[Problem],
        purpose: Purpose,
        judged: Choices,
    ) -> None:
        """Times those cells that have no times. judged: what is timed to the end, beside the
        default rule's choice and the leaders.
        """
        done = timed(journal.records)
        todo = [p for p in problems if p not in done]
        if len(self.workers) > 1:
            # the longest first, so that no worker is left with one while the others are done
            todo.sort(key=sol.bytes_moved, reverse=True)
        # what failed before last: a device that it throttles gets to the others
        todo.sort(key=tried(journal.records).__contains__)
        while todo:
            out, hot = self._out(), list[Cell]()
            self.progress.start(label, len(todo))
            # made when a worker is free: what took a process down before is left out
            for records in self._shared(
                (self._job(p, purpose, judged(p)) for p in todo), self._fit
            ):
                contract = records[-1].problem.contract
                bad = trials.broken(records)
                self.usable[contract] = [v for v in self.usable[contract] if v.id not in bad]
                journal.extend(records)
                self.progress.step()
                self.throttling.see(records)
                hot += [r for r in records if isinstance(r, Cell) and trials.was_throttled(r)]
            self.progress.end()
            if len(self._out()) == len(self.workers):
                raise trials.cannot_hold_its_clocks(journal.records)
            # what a device had that is left out from now on goes to the others
            todo = [r.problem for r in hot if r.timed_on in self._out() - out]

    def _fit(self, worker: Worker) -> bool:
        return self.throttling.fit(worker.name if len(self.workers) > 1 else msgspec.UNSET)

    def _out(self) -> set[str]:
        """The names of the workers whose device cannot hold its clocks."""
        return {worker.name for worker in self.workers if not self._fit(worker)}

    def _job(
        self, problem: Problem, purpose: Purpose, judged: frozenset[str]
    ) -> Callable[[Worker], list[Record]]:
        """What times a cell with all variants that are usable, the default rule's choice first."""
        contract = problem.contract
        default = kernels.default(contract, problem.work_units, self.device)
        variants = [v for v in self.usable[contract] if v.id != default.id]
        if (contract, default.id) in self.checked:
            variants.insert(0, default)
        asked = trials.Plan(
            problem,
            variants,
            kernels.at(problem, self.device, self.floors[contract]),
            cells.effort(self.config, problem),
            default.id if default in variants else msgspec.UNSET,
            purpose,
            len(self.workers) > 1,
            judged | {default.id},
        )
        reason = "" if variants else "no variant compiled and passed its check"
        # 0: a system that does not say
        if 0 < self.device.memory_bytes < (states := sol.state_bytes(problem)):
            reason = (
                f"its states take {states / 2**30:.1f} GiB of the device's"
                f" {self.device.memory_bytes / 2**30:.1f}"
            )
        if reason:
            return lambda worker: [asked.cell(worker, "failed", reason=reason)]
        return partial(trials.time, plan=asked)

    # -- finish

    def _finish(self, journal: Journal) -> Outcome:
        self.notes += failures(journal.records)
        self.notes += [
            f"{name} was left out when its last {trials.THROTTLED_IN_A_ROW} cells were throttled:"
            " see to its cooling and power"
            for name in sorted(self._out())
        ]
        try:
            table = derive(journal.records, journal.run, regret=self.config.search.regret)
        except JournalError as e:
            self.notes.append(str(e))
            return Outcome(None, journal.run, journal.records, self.notes)
        save(table, self.folder / "table.json")
        return Outcome(table, journal.run, journal.records, self.notes)


def _nothing(problem: Problem) -> frozenset[str]:
    return frozenset()


def chosen_by(tables: Iterable[Table]) -> Choices:
    """What tables choose for a problem, by variants' ids; nothing where none has a rule for its
    contract.
    """
    every = [{rule.when: rule for rule in table.rules} for table in tables]

    def of(problem: Problem) -> frozenset[str]:
        found = (rules.get(problem.contract) for rules in every)
        return frozenset(rule.at(problem.work_units).variant for rule in found if rule)

    return of


def _parts(variants: Sequence[Variant], n: int) -> Iterator[Sequence[Variant]]:
    """At most `n` parts of about equal length, none of them empty."""
    size = max(1, -(-len(variants) // n))
    return (variants[i : i + size] for i in range(0, len(variants), size))


def failures(records: Sequence[Record]) -> list[str]:
    """One line for each kind of failure, with its count and first reason; what was done again
    counts as it ended last.
    """
    last = latest(records)
    lines = []
    for kind, name in (
        (Build, "did not compile"),
        (Check, "did not pass the check"),
        (Trial, "failed while timed"),
        (Cell, "cells have no times"),
    ):
        failed = [r for r in last if isinstance(r, kind) and r.status != "ok"]
        if failed:
            what = getattr(failed[0], "variant", "")
            label = what.id if isinstance(what, Variant) else what
            lines.append(
                f"{len(failed)} {name}; the first: {label} {failed[0].reason[:300]}".replace(
                    "  ", " "
                )
            )
    return lines
