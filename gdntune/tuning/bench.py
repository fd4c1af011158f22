"""The bench: other libraries' kernels beside ours, in one measurement a cell. Journals like a
sweep; what fails is a row with its reason.

The parent plans and journals; the timing process checks and times, so that a peer that crashes it
costs itself alone.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from gdntune import kernels, peers
from gdntune.device.arch import Device
from gdntune.errors import GdntuneError, JournalError, MeasurementError
from gdntune.kernels.spec import Variant
from gdntune.objects.build import Built, compile_objects
from gdntune.objects.store import ObjectSpec, Store, object_spec
from gdntune.problem import Contract, Problem
from gdntune.results.derive import as_chosen, derive, timed_cells
from gdntune.results.journal import (
    PEER,
    TABLE,
    Build,
    Cell,
    Check,
    Journal,
    Record,
    Run,
    Trial,
    timed,
    tried,
)
from gdntune.results.table import Table, save
from gdntune.runtime.dispatch import Runtime
from gdntune.search import Progress, failures, resolved, run_header
from gdntune.timing import Policy
from gdntune.tuning import bench_session
from gdntune.tuning import worker as session
from gdntune.tuning.attempts import (
    CELL_GRACE_S,
    CHECK_EACH_S,
    CHECK_TIMEOUT_S,
    Throttling,
    attempts,
    cannot_hold_its_clocks,
    went,
)
from gdntune.tuning.bench_session import Found, Named, Probe
from gdntune.tuning.config import Config
from gdntune.tuning.executors import Child, Crashed

# A peer's first call at a shape compiles, and the first of all imports its library.
PROBE_TIMEOUT_S = 300.0
QUICK_ROUNDS = 2


class Outcome(NamedTuple):
    """A finished bench. table: of our choices as measured here; None where no cell has one. timed:
    cells with times of our choice.
    """

    table: Table | None
    run: Run
    records: list[Record]
    notes: list[str]
    timed: int


def bench(
    config: Config,
    folder: Path,
    *,
    peer_names: Sequence[str],
    device: Device,
    index: int = 0,
    store: Store,
    table: Path | None = None,
    rounds: int | None = None,
    jobs: int | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
    command: str = "",
) -> Outcome:
    """Times a config's cells, each B, H and HV: the table's choice, the default rule's, the floor
    and each peer, interleaved.

    table: instead of the one in use. rounds: instead of the config's final_rounds. Writes
        folder/journal.jsonl and folder/table.json,
    or goes on where the journal ends. Raises GdntuneError for a peer that is not known, a journal
    of another bench, a folder in use, a
    device that cannot hold its clocks.
    """
    if rounds is not None:
        config = msgspec.structs.replace(
            config, search=msgspec.structs.replace(config.search, final_rounds=rounds)
        )
    runtime = Runtime(device, store)
    if table is not None:
        runtime.use(table)
    found = [peers.get(name) for name in dict.fromkeys(peer_names)]
    named = dict(zip(dict.fromkeys(peer_names), found, strict=True))
    return _Bench(
        config, Path(folder), named, device, index, store, runtime, jobs, policy or config.policy,
        progress or Progress(), command,
    ).run()  # fmt: skip


class _Bench:
    def __init__(
        self, config: Config, folder: Path, named: dict[str, peers.Peer], device: Device, index: int, store: Store,
        runtime: Runtime, jobs: int | None, policy: Policy, progress: Progress, command: str,
    ):  # fmt: skip
        self.config, self.folder, self.peers, self.device, self.index = (
            config,
            folder,
            named,
            device,
            index,
        )
        self.store, self.runtime, self.jobs, self.policy = store, runtime, jobs, policy
        self.progress, self.command = progress, command
        self.notes: list[str] = []
        self.ours = {p: self._ours(p) for p in config.all_problems()}
        self.choices = {p: variants[0].id for p, variants in self.ours.items()}
        self.floors = {
            c: list(kernels.variants(c, device, "floor")) for c in config.all_contracts()
        }
        self.child: Child

    def _ours(self, problem: Problem) -> list[Variant]:
        """The variant that the runtime would call, then the default rule's where that is another."""
        choice = self.runtime.bind(problem.contract).choice(problem.work_units).variant
        default = kernels.default(problem.contract, problem.work_units, self.device)
        return [choice] if choice.id == default.id else [choice, default]

    def run(self) -> Outcome:
        cells = len(self.config.all_problems())
        header = run_header(
            self.config, self.device, self.policy, self.command, cells, self._origins()
        )
        # as a sweep: a place that cannot be had is refused before anything is compiled
        with Journal.claim(self.folder, header) as journal:
            built = self._compile()
            bundles = tuple(str(path) for path, _ in self.store.bundles)
            start = session.Start(
                self.device, self.index, str(self.store.root), bundles, self.policy
            )
            with Child(start, begin=session.begin_task) as self.child:
                found = self.child.run(session.resolve_task, journal.fresh, timeout=CHECK_TIMEOUT_S)
                if isinstance(found, Crashed):
                    raise MeasurementError(f"the timing process does not start: {found.reason}")
                policy, note, peaks = found
                self.notes += [note] if note else []
                journal.begin(resolved(header, policy, peaks))
                self._drop_unbuilt(journal, built)
                self._check(journal)
                self._time(journal)
                return self._finish(journal)

    def _ask(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        """A task's result, or Crashed where it raised, crashed or hung."""
        try:
            return self.child.run(function, *arguments, timeout=timeout)
        except GdntuneError as e:
            return _refused(e)

    def _origins(self) -> dict[str, str]:
        """Whose word the choices are, and the peers' versions, so that a journal holds one of each."""
        found = {}
        for op in sorted({c.op for c in self.config.all_contracts()}):
            source = self.runtime.source(op)
            said = "none: the default rule"
            if source is not None:
                said = (
                    f"{source.path.name} sha256"
                    f" {hashlib.sha256(source.path.read_bytes()).hexdigest()[:16]}"
                )
            found[f"{TABLE}{op}"] = said
        for peer in self.peers.values():
            found[f"{PEER}{peer.name}"] = "not installed" if peer.absent() else peer.version()
        return found

    # -- compile and check our own

    def _compile(self) -> dict[str, Built]:
        pairs: dict[str, tuple[ObjectSpec, str]] = {}

        def add(contract: Contract, variant: Variant, label: str | None = None) -> None:
            kernel = kernels.get(variant.kernel)
            spec = object_spec(kernel, contract, variant, self.device, label=label)
            pairs.setdefault(spec.key, (spec, kernel.compiler))

        if self.device.kind == "cuda":
            add(*kernels.flush(), label="flush")
        for problem, variants in self.ours.items():
            for variant in variants:
                add(problem.contract, variant)
        for contract, variants in self.floors.items():
            for variant in variants:
                add(contract, variant)
        self.progress.start("compile", len(pairs))
        built = compile_objects(
            pairs.values(), self.store, jobs=self.jobs, on_done=lambda _: self.progress.step()
        )
        self.progress.end()
        return {b.spec.key: b for b in built}

    def _drop_unbuilt(self, journal: Journal, built: dict[str, Built]) -> None:
        seen = {r.object_key: r.reason for r in journal.records if isinstance(r, Build)}
        for key, b in built.items():
            if seen.get(key) != b.reason:
                m = b.manifest
                journal.append(
                    Build(kernel=b.spec.kernel, variant=b.spec.label, object_key=key, status="ok" if b.ok else "failed",
                        reason=b.reason, seconds=m.seconds if m else 0.0, registers=m.registers if m else None,
                        spill_bytes=m.spill_bytes if m else None, shared_bytes=m.shared_bytes if m else None,
                        cached=b.cached)
                )  # fmt: skip

        def is_built(contract: Contract, v: Variant) -> bool:
            return built[object_spec(kernels.get(v.kernel), contract, v, self.device).key].ok

        self.ours = {
            p: [v for v in variants if is_built(p.contract, v)] for p, variants in self.ours.items()
        }
        self.floors = {
            c: [v for v in variants if is_built(c, v)] for c, variants in self.floors.items()
        }

    def _check(self, journal: Journal) -> None:
        """Checks our variants as a sweep does: together, and one by one where that takes the
        process down.
        """
        known = {(r.contract, r.variant): r.status for r in journal.records if isinstance(r, Check)}
        todo: dict[Contract, dict[str, Variant]] = {}
        for problem, variants in self.ours.items():
            for v in variants:
                if (problem.contract, v.id) not in known:
                    todo.setdefault(problem.contract, {})[v.id] = v
        self.progress.start("check", len(todo))
        for contract, wanted in todo.items():
            variants = list(wanted.values())
            records = self._checked(contract, variants)
            if records is None:
                records = [
                    record for v in variants for record in self._checked(contract, [v]) or []
                ]
            journal.extend(records)
            known |= {(r.contract, r.variant): r.status for r in records}
            self.progress.step()
        self.progress.end()
        self.ours = {
            p: [v for v in variants if known.get((p.contract, v.id)) == "ok"]
            for p, variants in self.ours.items()
        }

    def _checked(self, contract: Contract, variants: list[Variant]) -> list[Check] | None:
        """The checks; None where several took the process down together."""
        limit = CHECK_TIMEOUT_S + CHECK_EACH_S * len(variants)
        got = self._ask(session.check_task, contract, variants, timeout=limit)
        if not isinstance(got, Crashed):
            return [
                Check(contract=contract, variant=v.id, status="ok" if ok else "failed", reason="" if ok else worst,
                    error=error, seconds=round(s, 4))
                for v, (ok, worst, error, s) in zip(variants, got, strict=True)
            ]  # fmt: skip
        if len(variants) > 1:
            return None
        return [
            Check(contract=contract, variant=variants[0].id, status=got.status, reason=got.reason)  # type: ignore[arg-type]
        ]

    # -- time

    def _time(self, journal: Journal) -> None:
        done = timed(journal.records)
        todo = sorted(
            (p for p in self.config.all_problems() if p not in done),
            key=tried(journal.records).__contains__,
        )
        self.progress.start("time", len(todo))
        throttling = Throttling()
        for problem in todo:
            if self.ours[problem]:
                records, entries = self._probed(problem)
                records += self._timed(problem, entries)
            else:
                reason = "no variant of ours compiled and passed its check"
                records = [Cell(problem=problem, status="failed", reason=reason)]
            journal.extend(records)
            self.progress.step()
            throttling.see(records)
            if not throttling.fit():
                raise cannot_hold_its_clocks(records)
        self.progress.end()

    def _probed(self, problem: Problem) -> tuple[list[Record], list[Named]]:
        """The peers' entries that may be timed here, each called once and checked; for the others a
        row with its reason.
        """
        records: list[Record] = []
        ready: list[Named] = []
        for name, peer in self.peers.items():
            reason = peer.absent()
            if reason is None and peer.device != self.device.kind:
                reason = (
                    f"runs on {peer.device} alone, this device is {self.device.name}"
                    f" ({self.device.kind})"
                )
            entries: list[peers.Entry] = []
            if reason is None:
                entries, reason = peer.serving(problem)
            if not entries:
                records.append(
                    _lost(problem, peer.variant(), Crashed("failed", reason or "it has no entries"))
                )
            for entry in entries:
                got = self._ask(
                    bench_session.probe_task, problem, (name, entry.name), timeout=PROBE_TIMEOUT_S
                )
                variant = peer.variant(entry, problem)
                if isinstance(got, Probe) and got.status == "ok":
                    check = Check(contract=problem.contract, variant=variant.id, status="ok", error=got.error,
                        seconds=got.seconds)  # fmt: skip
                    records.append(check)
                    ready.append((name, entry.name))
                else:
                    records.append(_lost(problem, variant, got))
        return records, ready

    def _timed(self, problem: Problem, entries: list[Named]) -> list[Record]:
        """Times a cell; after a crash without the entries that bring it about, each of which
        becomes a row that says so.
        """
        ours, search = self.ours[problem], self.config.search
        floors = kernels.at(problem, self.device, self.floors[problem.contract])
        got = self._measure(problem, ours, floors, entries, search)
        if isinstance(got, Found):
            if got.took.throttled:
                return [Cell(problem=problem, **went(got.took))]
            return self._cell(problem, ours, entries, got)
        quick = msgspec.structs.replace(search, final_rounds=QUICK_ROUNDS)
        if not entries or not isinstance(self._measure(problem, ours, floors, [], quick), Found):
            # Without them it fails too: it is not theirs.
            return [Cell(problem=problem, status="failed", reason=got.reason)]
        alone = {e: self._measure(problem, ours[:1], [], [e], quick) for e in entries}
        for found in alone.values():
            if isinstance(found, Found) and found.took.throttled:
                return [Cell(problem=problem, **went(found.took))]
        bad = {e: crash for e, crash in alone.items() if isinstance(crash, Crashed)}
        if not bad:
            together = Crashed(
                got.status, f"with others in one measurement, though not alone: {got.reason}"
            )
            bad = dict.fromkeys(entries, together)
        records: list[Record] = [
            _lost(problem, self._variant(e, problem), crash) for e, crash in bad.items()
        ]
        return records + self._timed(problem, [e for e in entries if e not in bad])

    def _measure(
        self,
        problem: Problem,
        ours: list[Variant],
        floors: list[Variant],
        entries: list[Named],
        search: Any,
    ) -> Found | Crashed:
        limit = search.max_cell_seconds + CELL_GRACE_S + PROBE_TIMEOUT_S * bool(entries)
        cell = problem, ours, floors, entries, search
        try:
            got = attempts(lambda: self.child.run(bench_session.time_task, *cell, timeout=limit))
        except GdntuneError as e:
            return _refused(e)
        return _refused(got) if isinstance(got, MeasurementError) else got

    def _variant(self, named: Named, problem: Problem) -> Variant:
        peer = self.peers[named[0]]
        return peer.variant(peer.entry(named[1]), problem)

    def _cell(
        self, problem: Problem, ours: list[Variant], entries: list[Named], got: Found
    ) -> list[Record]:
        timed: list[tuple[Any, Variant, list[float]]] = [
            *(("decode", v, us) for v, us in zip(ours, got.ours, strict=True)),
            *(("floor", v, us) for v, us in got.floors),
            *(
                ("peer", self._variant(e, problem), us)
                for e, us in zip(entries, got.peers, strict=True)
            ),
        ]
        return [
            *(
                Trial(
                    problem=problem, variant=v, role=role, stage="final", status="ok", samples_us=us
                )
                for role, v, us in timed
            ),
            Cell(
                problem=problem,
                **went(got.took),
                default_variant=kernels.default(
                    problem.contract, problem.work_units, self.device
                ).id,
                choice=self.choices[problem],
            ),
        ]

    # -- finish

    def _finish(self, journal: Journal) -> Outcome:
        records, run = journal.records, journal.run
        self.notes += failures(
            [r for r in records if not (isinstance(r, Trial) and r.role == "peer")]
        )
        try:
            table = derive(records, run)
        except (JournalError, MeasurementError) as e:
            self.notes.append(str(e))
            return Outcome(None, run, records, self.notes, 0)
        save(table, self.folder / "table.json")
        return Outcome(
            table, run, records, self.notes, len(as_chosen(timed_cells(records), records))
        )


def _refused(e: GdntuneError) -> Crashed:
    return Crashed("failed", f"{type(e).__name__}: {e}")


def _lost(problem: Problem, variant: Variant, end: Probe | Crashed) -> Trial:
    """The row of a peer that has no times."""
    return Trial(
        problem=problem,
        variant=variant,
        role="peer",
        stage="final",
        status=end.status,  # type: ignore[arg-type]
        reason=end.reason,
    )
