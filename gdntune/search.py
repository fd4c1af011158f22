"""The sweep: chooses variants, compiles, checks, times, journals, derives the table. Knows no kernel by name.

The parent compiles and journals; one child process checks and times, so that a variant that crashes or hangs costs itself alone. What
is in the journal is not done again.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from pebble import ProcessExpired, ProcessPool

from gdntune import kernels, session
from gdntune.arch import Device, cpu_threads, software
from gdntune.build import SPILL_LIMIT_BYTES, Built, compile_objects
from gdntune.config import Config
from gdntune.derive import derive
from gdntune.errors import GdntuneError, JournalError, MeasurementError
from gdntune.journal import FILE, Build, Cell, Check, Journal, Record, Run, Trial, now
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.processes import SPAWN, hidden_main
from gdntune.store import ObjectSpec, Store, object_spec
from gdntune.table import Table, save
from gdntune.timing import Policy

T = TypeVar("T")
# A check compares a few small problems, a cell at most search.max_cell_seconds of timing: what takes longer hangs.
CHECK_TIMEOUT_S = 120.0
CHECK_EACH_S = 2.0
CELL_GRACE_S = 120.0
# A throttled cell, and one whose times cannot be true, is timed again.
RETRIES = 1


class Progress:
    """What a sweep tells of itself while it runs; this one is silent."""

    def start(self, label: str, total: int) -> None: ...
    def step(self, n: int = 1) -> None: ...
    def end(self) -> None: ...


class Outcome(NamedTuple):
    """A finished sweep. table: None where no cell has a choice; notes say why, and what else a user should know."""

    table: Table | None
    run: Run
    records: list[Record]
    notes: list[str]


class Crashed(NamedTuple):
    """A task that took its process with it, or its time."""

    status: str
    reason: str


class Child:
    """The timing process of one device: runs one task after another, and is replaced when one crashes it or hangs."""

    def __init__(self, start: session.Start):
        self._start = start
        self._pool = ProcessPool(max_workers=1, context=SPAWN)

    def run(self, function: Callable[..., T], *args: Any, timeout: float) -> "T | Crashed":
        """The task's result; a crash or a hang is a value, what gdntune itself raises is raised."""
        try:
            with hidden_main():
                return self._pool.schedule(function, args=[self._start, *args], timeout=timeout).result()
        except FutureTimeout:
            return Crashed("timeout", f"no answer within {timeout:.0f} s")
        except ProcessExpired as e:
            return Crashed("crashed", f"the process died (exit code {e.exitcode})")
        except (GdntuneError, KeyboardInterrupt):
            raise
        except Exception as e:  # noqa: BLE001  whatever a variant brings about is its own failure, not the sweep's
            # after an illegal access every later call of the process fails too
            self._restart()
            return Crashed("crashed", f"{type(e).__name__}: {str(e)[-500:]}")

    def _restart(self) -> None:
        self._pool.stop()
        self._pool.join()
        self._pool = ProcessPool(max_workers=1, context=SPAWN)

    def close(self) -> None:
        self._pool.stop()
        self._pool.join()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def plan(config: Config, device: Device) -> dict[Contract, tuple[tuple[Variant, ...], tuple[Variant, ...]]]:
    """For each contract of a config the decode variants that it admits, and the floor's."""
    return {
        c: (
            config.admitted(c, kernels.variants(c, device)),
            kernels.variants(c, device, "floor"),
        )
        for c in config.all_contracts()
    }


def plan_objects(config: Config, device: Device) -> list[tuple[ObjectSpec, str]]:
    """Every object that a sweep of a config needs, with its kernel's compiler, each once."""
    found: dict[str, tuple[ObjectSpec, str]] = {}

    def add(contract: Contract, variant: Variant, label: str | None = None) -> None:
        kernel = kernels.get(variant.kernel)
        spec = object_spec(kernel, contract, variant, device, label=label)
        found.setdefault(spec.key, (spec, kernel.compiler))

    if device.kind == "cuda":
        add(*kernels.flush(), label="flush")
    for problem in config.problems():
        add(problem.contract, kernels.default(problem.contract, problem.work_units, device))
    for contract, (decode, floor) in plan(config, device).items():
        for variant in (*decode, *floor):
            add(contract, variant)
    return list(found.values())


def run_header(
    config: Config,
    device: Device,
    policy: Policy,
    peaks: Mapping[str, float],
    command: str,
    origins: Mapping[str, str] | None = None,
) -> Run:
    """A journal's first line. policy: as resolved. origins: what else must be equal for two runs to share a journal, by name."""
    return Run(
        config=config.name,
        config_sha256=config.sha256,
        device=device,
        software={**software(), **(origins or {})},
        policy={"timer": policy.timer, "l2": policy.l2},
        kernels=kernels.fingerprints(device.kind),
        peaks={name: round(value, 1) for name, value in peaks.items()},
        started=now(),
        command=command,
    )


def sweep(
    config: Config,
    folder: Path,
    *,
    device: Device,
    index: int = 0,
    store: Store,
    jobs: int | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Outcome:
    """Runs a config on a device: writes folder/journal.jsonl and folder/table.json, or goes on where the journal ends.

    policy: instead of the config's. Raises GdntuneError for a journal of another sweep, a folder in use, a tool that is missing.
    """
    return _Sweep(
        config, Path(folder), device, index, store, jobs, policy or config.policy, progress or Progress(), command
    ).run()


class _Sweep:
    def __init__(
        self, config: Config, folder: Path, device: Device, index: int, store: Store, jobs: int | None,
        policy: Policy, progress: Progress, command: str,
    ):  # fmt: skip
        self.config, self.folder, self.device, self.index, self.store = config, folder, device, index, store
        self.jobs, self.policy, self.progress, self.command = jobs or cpu_threads(), policy, progress, command
        self.plan = plan(config, device)
        self.notes: list[str] = []
        self.built: dict[str, Built] = {}
        self.usable: dict[Contract, list[Variant]] = {}
        self.floors: dict[Contract, list[Variant]] = {}

    def run(self) -> Outcome:
        self.config.check_kernels(
            {k.name: tuple(f.name for f in dataclasses.fields(k.knobs)) for k in kernels.KERNELS.values()}
        )
        if self.device.kind == "cpu":
            # a timer that this device cannot have is refused before anything is compiled; on CUDA the timing process finds out
            self.policy.resolve(self.device)
        # compiled before the journal is opened: the timing process needs the flush kernel to say what policy it can keep
        self.built = built = self._compile()
        start = session.Start(
            self.device,
            self.index,
            str(self.store.root),
            tuple(str(path) for path, _ in self.store.bundles),
            self.policy,
        )
        with Child(start) as child:
            resolved = child.run(session.resolve_task, not (self.folder / FILE).exists(), timeout=CHECK_TIMEOUT_S)
            if isinstance(resolved, Crashed):
                raise MeasurementError(f"the timing process does not start: {resolved.reason}")
            policy, note, peaks = resolved
            if note:
                self.notes.append(note)
            header = run_header(self.config, self.device, policy, peaks, self.command)
            with Journal.open(self.folder, header) as journal:
                self._journal_builds(journal, built)
                self._check_all(journal, child)
                self._time_all(journal, child)
                return self._finish(journal)

    # -- compile

    def _compile(self) -> dict[str, Built]:
        objects = plan_objects(self.config, self.device)
        self.progress.start("compile", len(objects))
        built = compile_objects(objects, self.store, jobs=self.jobs, on_done=lambda _: self.progress.step())
        self.progress.end()
        return {b.spec.key: b for b in built}

    def _journal_builds(self, journal: Journal, built: dict[str, Built]) -> None:
        seen = {(r.object_key, r.reason) for r in journal.records if isinstance(r, Build)}
        fresh: list[Record] = []
        for key, b in built.items():
            m, reason = b.manifest, b.reason
            if m and (m.spill_bytes or 0) > SPILL_LIMIT_BYTES:
                reason = f"spills {m.spill_bytes} bytes a thread: more than {SPILL_LIMIT_BYTES} are not timed"
            if (key, reason) in seen:
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
            self.usable[contract] = [v for v in decode if self._sound(contract, v, built)]
            self.floors[contract] = [v for v in floor if self._sound(contract, v, built)]

    def _sound(self, contract: Contract, variant: Variant, built: dict[str, Built]) -> bool:
        """Whether a variant compiled and does not spill."""
        b = built[object_spec(kernels.get(variant.kernel), contract, variant, self.device).key]
        return b.manifest is not None and (b.manifest.spill_bytes or 0) <= SPILL_LIMIT_BYTES

    # -- check

    def _check_all(self, journal: Journal, child: Child) -> None:
        known = {(r.contract, r.variant): r.status for r in journal.records if isinstance(r, Check)}
        todo = {c: [v for v in self._with_defaults(c) if (c, v.id) not in known] for c in self.plan}
        self.progress.start("check", sum(map(len, todo.values())))
        for contract, variants in todo.items():
            for record in self._checked(child, contract, variants):
                journal.append(record)
                known[contract, record.variant] = record.status
                self.progress.step()
        self.progress.end()
        for contract, usable in self.usable.items():
            self.usable[contract] = [v for v in usable if known.get((contract, v.id)) == "ok"]

    def _with_defaults(self, contract: Contract) -> list[Variant]:
        """A contract's variants and the default rule's choices at its cells, those that compiled, each once."""
        found = {v.id: v for v in self.usable[contract]}
        for problem in self.config.problems():
            if problem.contract == contract:
                v = kernels.default(contract, problem.work_units, self.device)
                if v.id not in found and self._sound(contract, v, self.built):
                    found[v.id] = v
        return list(found.values())

    def _checked(self, child: Child, contract: Contract, variants: list[Variant]) -> list[Check]:
        """Checks variants together; where that takes the process down, in halves, so that the culprit is found."""
        if not variants:
            return []
        got = child.run(session.check_task, contract, variants, timeout=CHECK_TIMEOUT_S + CHECK_EACH_S * len(variants))
        if not isinstance(got, Crashed):
            return [
                Check(contract=contract, variant=v.id, status="ok" if ok else "failed",
                    reason="" if ok else worst, error=error, seconds=round(s, 4))
                for v, (ok, worst, error, s) in zip(variants, got, strict=True)
            ]  # fmt: skip
        if len(variants) == 1:
            return [Check(contract=contract, variant=variants[0].id, status=got.status, reason=got.reason)]  # type: ignore[arg-type]
        middle = len(variants) // 2
        return self._checked(child, contract, variants[:middle]) + self._checked(child, contract, variants[middle:])

    # -- time

    def _time_all(self, journal: Journal, child: Child) -> None:
        done = {r.problem for r in journal.records if isinstance(r, Cell)}
        todo = [p for p in self.config.problems() if p not in done]
        self.progress.start("time", len(todo))
        checked = {(r.contract, r.variant) for r in journal.records if isinstance(r, Check) and r.status == "ok"}
        for problem in todo:
            default = kernels.default(problem.contract, problem.work_units, self.device)
            variants = [v for v in self.usable[problem.contract] if v.id != default.id]
            if (problem.contract, default.id) in checked:
                variants.insert(0, default)
            if variants:
                journal.extend(
                    self._timed(child, problem, variants, default.id if default in variants else msgspec.UNSET)
                )
            else:
                journal.append(
                    Cell(problem=problem, status="failed", reason="no variant compiled and passed its check")
                )
            self.progress.step()
        self.progress.end()

    def _timed(
        self,
        child: Child,
        problem: Problem,
        variants: list[Variant],
        default: str | msgspec.UnsetType,
        retries: int = RETRIES,
    ) -> list[Record]:
        floors = self.floors[problem.contract]
        limit = self.config.search.max_cell_seconds + CELL_GRACE_S
        got: Any = Crashed("", "")
        for attempt in range(1 + RETRIES):
            try:
                got = child.run(session.time_task, problem, variants, floors, self.config.search, timeout=limit)
            except MeasurementError as e:
                # records that a timer lost, say: the cell's fault, and no reason to end the sweep
                if attempt == RETRIES:
                    return [Cell(problem=problem, status="failed", reason=str(e))]
                continue
            if isinstance(got, Crashed) or not got.throttled:
                break
        if isinstance(got, Crashed):
            return self._culprits(child, problem, variants, floors, got, limit, default, retries)
        records: list[Record] = []
        for t in got.timed:
            records.append(
                Trial(
                    problem=problem, variant=t.variant, role=t.role, stage="screen", status="ok", samples_us=t.screen_us
                )
            )
            if t.final_us:
                records.append(
                    Trial(
                        problem=problem,
                        variant=t.variant,
                        role=t.role,
                        stage="final",
                        status="ok",
                        samples_us=t.final_us,
                    )
                )
        reason = "throttled" if got.throttled else ""
        if reason:
            self.notes.append(f"{problem.key()}: timed while the device was throttled, twice")
        records.append(
            Cell(
                problem=problem,
                status="ok",
                reason=reason,
                stop=got.stop,
                seconds=round(got.seconds, 4),
                clocks_before=msgspec.to_builtins(got.before),
                clocks_after=msgspec.to_builtins(got.after),
                default_variant=default,
            )
        )
        return records

    def _culprits(
        self,
        child: Child,
        problem: Problem,
        variants: list[Variant],
        floors: list[Variant],
        whole: Crashed,
        limit: float,
        default: str | msgspec.UnsetType,
        retries: int,
    ) -> list[Record]:
        """After a cell took its process down: finds the variants that do so alone, journals them, times the rest.

        Where none does so, something else ended the process (the system, short of memory; a kill): the cell is timed again.
        """
        quick = msgspec.structs.replace(self.config.search, screen_rounds=2, final_rounds=2, keep=1)
        bad: dict[str, Crashed] = {}
        for v in variants:
            got = child.run(session.time_task, problem, [v], [], quick, timeout=limit)
            if isinstance(got, Crashed):
                bad[v.id] = got
        trials: list[Record] = [
            Trial(problem=problem, variant=v, stage="screen", status=bad[v.id].status, reason=bad[v.id].reason)  # type: ignore[arg-type]
            for v in variants
            if v.id in bad
        ]
        if not bad and retries:
            return self._timed(child, problem, variants, default, retries - 1)
        if not bad:
            return [Cell(problem=problem, status="failed", reason=f"{whole.reason}; no variant does so alone")]
        for contract, usable in self.usable.items():
            if contract == problem.contract:
                self.usable[contract] = [v for v in usable if v.id not in bad]
        rest = [v for v in variants if v.id not in bad]
        return trials + (
            self._timed(child, problem, rest, default if default not in bad else msgspec.UNSET)
            if rest
            else [Cell(problem=problem, status="failed", reason=whole.reason)]
        )

    # -- finish

    def _finish(self, journal: Journal) -> Outcome:
        self.notes += failures(journal.records)
        try:
            table = derive(journal.records, journal.run, regret=self.config.search.regret)
        except JournalError as e:
            self.notes.append(str(e))
            return Outcome(None, journal.run, journal.records, self.notes)
        save(table, self.folder / "table.json")
        return Outcome(table, journal.run, journal.records, self.notes)


def failures(records: Sequence[Record]) -> list[str]:
    """One line for each kind of failure, with its count and first reason."""
    lines = []
    for kind, name in (
        (Build, "did not compile"),
        (Check, "did not pass the check"),
        (Trial, "failed while timed"),
        (Cell, "cells have no times"),
    ):
        failed = [r for r in records if isinstance(r, kind) and r.status != "ok"]
        if failed:
            what = getattr(failed[0], "variant", "")
            label = what.id if isinstance(what, Variant) else what
            lines.append(f"{len(failed)} {name}; the first: {label} {failed[0].reason[:300]}".replace("  ", " "))
    return lines
