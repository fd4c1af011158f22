"""One contract's checks, or one cell's times, on one worker, as records: tries again, and finds
what takes a process down.
"""

import re
import time as time_module
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from gdntune.device.arch import Device
from gdntune.errors import GdntuneError, MeasurementError
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.results.records import NOISY, Cell, Check, Purpose, Record, Trial
from gdntune.tuning import noise, probe, worker
from gdntune.tuning.config import Search
from gdntune.tuning.executors import Crashed, NotStarted, Worker
from gdntune.tuning.measure import CellResult, CellTiming, Role
from gdntune.tuning.probe import Named, Probe
from gdntune.tuning.throttling import THROTTLED

if TYPE_CHECKING:
    from gdntune.peers.spec import Entry, Peer

# A check compares a few small problems, a cell at most search.max_cell_seconds of timing: what
# takes longer hangs. A peer's first call at a shape compiles, and the first of all imports its
# library.
CHECK_TIMEOUT_S = 120.0
CHECK_EACH_S = 2.0
CELL_GRACE_S = 120.0
PROBE_TIMEOUT_S = 300.0
# A throttled cell, one during which a clock moved, and one whose times cannot be true, is timed
# again.
RETRIES = 1
# Before a cell at the device's power limit is timed again.
POWER_PAUSE_S = 2.0
# Of the tensors on which a choice is timed again: other values, and slots in another order.
FRESH_SEED = 1
# How torch, CUDA and the system say that there was no memory; an illegal access is of another kind.
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|not enough memory|(can't|cannot) allocate",
    re.IGNORECASE,
)


class _Timing(Protocol):
    """What a timing process returns of a cell."""

    @property
    def timing(self) -> CellTiming: ...


T = TypeVar("T", bound=_Timing)


def attempts(measure: "Callable[[], T | Crashed]") -> "T | Crashed | MeasurementError":
    """The first measurement that nothing disturbed; once something did for the second time, what
    there is.

    That is one during which a clock moved, or whose times cannot be believed, or else the last:
    throttled, or MeasurementError where its times cannot be true. A crash is returned at once.
    """
    # Counted by kind: a throttled attempt and then a noisy one are two causes, and each may pass.
    disturbed: Counter[str] = Counter()
    kept: T | None = None
    while True:
        got: T | MeasurementError
        try:
            found = measure()
        except MeasurementError as e:
            got, what = e, "untrue"
        else:
            if isinstance(found, Crashed):
                return found
            got, timing = found, found.timing
            what = (
                "throttled"
                if timing.throttled
                else "shifted"
                if timing.shifted
                else "noisy"
                if timing.noise
                else "capped"
                if timing.capped
                else ""
            )
            if not what:
                return found
            if what == "capped" and disturbed[what] < RETRIES:
                time_module.sleep(POWER_PAUSE_S)
            # A device that throttled gives times of another device; they are not kept even as a
            # last resort.
            if what != "throttled":
                kept = found
        disturbed[what] += 1
        if disturbed[what] > RETRIES:
            return kept or got


def check_limit(variants: Sequence[Variant]) -> float:
    """Seconds after which a check of some variants hangs."""
    return CHECK_TIMEOUT_S + CHECK_EACH_S * len(variants)


def check(on: Worker, contract: Contract, variants: Sequence[Variant]) -> list[Check]:
    """Checks variants together; where that takes the process down, in halves, so that the culprit
    is found.
    """
    if not variants:
        return []
    limit = check_limit(variants)
    got = on.run(worker.check_task, contract, list(variants), timeout=limit)
    if not isinstance(got, Crashed):
        return [
            Check(contract=contract, variant=v.id, status="ok" if ok else "failed",
                reason="" if ok else worst, error=error, seconds=round(s, 4))
            for v, (ok, worst, error, s) in zip(variants, got, strict=True)
        ]  # fmt: skip
    if len(variants) == 1:
        return [
            Check(contract=contract, variant=variants[0].id, status=got.status, reason=got.reason)  # type: ignore[arg-type]
        ]
    # Halves, since one culprit among hundreds is the usual case: eight restarts instead of
    # hundreds.
    middle = len(variants) // 2
    return check(on, contract, variants[:middle]) + check(on, contract, variants[middle:])


class CellJob(NamedTuple):
    """A cell to time. default: the default rule's choice, unset where it is not among `variants`.

    choice: of a bench, the variant that was chosen beforehand. purpose: why it is timed where it is
    no cell of the config. named: whether the journal says which device timed it. always_final: ids
    of `variants` that are timed to the end whatever their first samples say. peers: whose entries
    are timed beside them. device: where, so that noise can be told; None: it is not asked.
    """

    problem: Problem
    variants: list[Variant]
    floors: list[Variant]
    search: Search
    default: str | msgspec.UnsetType = msgspec.UNSET
    choice: str | msgspec.UnsetType = msgspec.UNSET
    purpose: Purpose | msgspec.UnsetType = msgspec.UNSET
    named: bool = False
    always_final: frozenset[str] = frozenset()
    peers: "Mapping[str, Peer]" = MappingProxyType({})
    device: Device | None = None
    entries: tuple[Named, ...] = ()

    @property
    def again(self) -> bool:
        """Whether it is timed once its choice was made."""
        return self.purpose == "evidence"

    @property
    def last_stage(self) -> Literal["final", "evidence"]:
        """What its samples are recorded as that are no first look."""
        return "evidence" if self.again else "final"

    def cell(self, on: Worker, status: Literal["ok", "failed"], **fields: Any) -> Cell:
        """The record that closes the cell."""
        where = on.name if self.named else msgspec.UNSET
        return Cell(
            problem=self.problem, status=status, purpose=self.purpose, timed_on=where, **fields
        )

    def lost(self, variant: Variant, end: Probe | Crashed, role: Role = "decode") -> Trial:
        """The row of what has no times."""
        return Trial(
            problem=self.problem,
            variant=variant,
            role=role,
            stage=self.last_stage if role != "decode" or self.again else "screen",
            status=end.status,  # type: ignore[arg-type]
            reason=end.reason,
        )

    def alone(self, variants: list[Variant], entries: Sequence[Named] = ()) -> "CellJob":
        """A quick look at some of it, to see whether it takes the process down."""
        # Whether it crashes shows at its first calls; rounds only cost time.
        quick = msgspec.structs.replace(
            self.search, screen_rounds=2, final_rounds=2, keep=1, precision=0.0
        )
        return self._replace(
            # Two samples of each say nothing of noise.
            device=None,
            variants=variants,
            floors=[],
            search=quick,
            entries=tuple(entries),
            always_final=frozenset(),
        )


def time(on: Worker, job: CellJob) -> list[Record]:
    """A cell's trials, and the Cell that closes them, last. Entries of peers are checked first; one
    that fails is a row with its reason.
    """
    records, entries = _probed(on, job)
    return records + _timed(on, job._replace(entries=tuple(entries)), RETRIES)


def _probed(on: Worker, job: CellJob) -> tuple[list[Record], list[Named]]:
    """The peers' entries that may be timed, each called once and checked; a row for the others."""
    records: list[Record] = []
    ready: list[Named] = []
    for name, peer in job.peers.items():
        found, reason = _serving(peer, job)
        if not found:
            lost = Crashed("failed", reason or "it has no entries")
            records.append(job.lost(peer.variant(), lost, "peer"))
        for entry in found:
            got: Probe | Crashed
            try:
                got = on.run(
                    worker.probe_task,
                    job.problem,
                    (name, entry.name),
                    job.variants[:1],
                    timeout=PROBE_TIMEOUT_S,
                )
            except NotStarted:
                raise
            except GdntuneError as e:
                got = _refused(e)
            variant = peer.variant(entry, job.problem)
            if isinstance(got, Probe) and got.status == "ok":
                ready.append((name, entry.name))
                records.append(
                    Check(
                        contract=job.problem.contract,
                        variant=variant.id,
                        status="ok",
                        error=got.error,
                        seconds=got.seconds,
                    )
                )
            else:
                records.append(job.lost(variant, got, probe.role((name, entry.name))))
    return records, ready


def _serving(peer: "Peer", job: CellJob) -> "tuple[list[Entry], str]":
    """A peer's entries that serve a cell; where there are none, why."""
    if reason := peer.absent():
        return [], reason
    if job.device is not None and peer.device != job.device.kind:
        here = f"{job.device.name} ({job.device.kind})"
        return [], f"runs on {peer.device} alone, this device is {here}"
    return peer.serving(job.problem)


def _refused(e: GdntuneError) -> Crashed:
    return Crashed("failed", f"{type(e).__name__}: {e}")


def cell_limit(job: CellJob) -> float:
    """Seconds after which timing a cell hangs."""
    peers = PROBE_TIMEOUT_S if job.entries else 0.0
    return job.search.max_cell_seconds + CELL_GRACE_S + peers


def _measured(on: Worker, job: CellJob) -> CellResult | Crashed | MeasurementError:
    """A cell's samples. With entries of peers, what gdntune refuses there is theirs too."""
    limit = cell_limit(job)
    cell = job.problem, job.variants, job.floors, job.search, job.always_final, job.entries
    seed = FRESH_SEED if job.again else 0
    # where choices were made before, their ratios are to be known well
    narrow = isinstance(job.choice, str)

    def measure() -> CellResult | Crashed:
        found = on.run(worker.time_task, *cell, seed, narrow, timeout=limit)
        if isinstance(found, Crashed) or job.device is None:
            return found
        heard = noise.noise(job.device, found.timed)
        return found._replace(timing=found.timing._replace(noise=heard))

    try:
        got = attempts(measure)
    except NotStarted:
        raise
    except GdntuneError as e:
        if not job.entries:
            raise
        return _refused(e)
    return _refused(got) if job.entries and isinstance(got, MeasurementError) else got


def _timed(on: Worker, job: CellJob, retries: int) -> list[Record]:
    got = _measured(on, job)
    if isinstance(got, MeasurementError):
        # Records that a timer lost, say: the cell's fault, and no reason to end the sweep.
        return [job.cell(on, "failed", reason=str(got))]
    if isinstance(got, Crashed):
        return _without_entries(on, job, got, retries)
    records: list[Record] = []
    for t in got.timed if not got.timing.throttled else ():
        trial = Trial(
            problem=job.problem,
            variant=t.variant,
            role=t.role,
            stage="screen",
            status="ok",
            kernels=msgspec.UNSET if t.kernels is None else t.kernels,
        )
        for stage, us in (("screen", t.screen_us), (job.last_stage, t.final_us)):
            if us:
                records.append(msgspec.structs.replace(trial, stage=stage, samples_us=us))
    closed = job.cell(on, default_variant=job.default, choice=job.choice, **went(got.timing))
    return [*records, closed]


def went(timing: CellTiming) -> dict[str, Any]:
    """The fields of a Cell that say how its timing went; one that was throttled failed, so that its
    sweep tries it again.

    One during which a clock moved in every attempt is kept: a device at its power limit is at its
    own clocks.
    """
    if timing.throttled:
        reason = f"{THROTTLED}{timing.throttled}"
    elif timing.noise:
        reason = f"{NOISY}{timing.noise}"
    else:
        reason = f"clocks moved: {timing.shifted}" if timing.shifted else ""
    return {
        "status": "failed" if timing.throttled else "ok",
        "reason": reason,
        "stop": timing.stop,
        "interval": msgspec.UNSET if timing.interval is None else round(timing.interval, 5),
        "seconds": round(timing.seconds, 4),
        "clocks_before": msgspec.to_builtins(timing.before),
        "clocks_after": msgspec.to_builtins(timing.after),
    }


def _without_entries(on: Worker, job: CellJob, whole: Crashed, retries: int) -> list[Record]:
    """After a cell took its process down: where it does not so without the entries of peers, finds
    those that bring it about, each a row that says so, and times the rest.

    Where none does so alone, all do together.
    """
    if not job.entries:
        return _without_variants(on, job, whole, retries)
    # Ours alone first: one look tells whether any entry has a part in it.
    ours = _measured(on, job.alone(job.variants)._replace(floors=job.floors))
    if not isinstance(ours, CellResult):
        # It crashes without the entries too: the culprit is one of ours.
        return _without_variants(on, job, whole, retries)
    bad: dict[Named, Crashed] = {}
    for entry in job.entries:
        got = _measured(on, job.alone(job.variants[:1], [entry]))
        if isinstance(got, CellResult) and got.timing.throttled:
            return [job.cell(on, **went(got.timing))]
        if isinstance(got, Crashed):
            bad[entry] = got
    if not bad:
        said = f"with others in one measurement, though not alone: {whole.reason}"
        # Left out together, so that the cell keeps the times of ours.
        bad = dict.fromkeys(job.entries, Crashed(whole.status, said))
    rows: list[Record] = [
        job.lost(probe.recorded(e, job.problem), crash, probe.role(e)) for e, crash in bad.items()
    ]
    rest = tuple(e for e in job.entries if e not in bad)
    return rows + _timed(on, job._replace(entries=rest), retries)


def _without_variants(on: Worker, job: CellJob, whole: Crashed, retries: int) -> list[Record]:
    """Finds the variants that take a process down alone, records them, times the rest.

    Where none does so, something else ended the process (the system, short of memory; a kill): the
    cell is timed again. Where the first two find no memory, each alone, the cell is too large for
    what is free, and no variant is to blame.
    """
    bad: dict[str, Crashed] = {}
    for n, v in enumerate(job.variants, 1):
        got = _measured(on, job.alone([v]))
        if isinstance(got, Crashed):
            bad[v.id] = got
            # Every variant would find no memory one after the other, each with a process to start
            # again; two are proof enough.
            full = all(_NO_MEMORY.search(crash.reason) for crash in bad.values())
            if full and len(bad) == n == min(2, len(job.variants)):
                return [job.cell(on, "failed", reason=whole.reason)]
        elif isinstance(got, CellResult) and got.timing.throttled:
            return [job.cell(on, **went(got.timing))]
    # No variant does so alone: something else ended the process, and may not come again.
    if not bad and retries:
        return _timed(on, job, retries - 1)
    if not bad:
        return [job.cell(on, "failed", reason=f"{whole.reason}; no variant does so alone")]
    rows: list[Record] = [job.lost(v, bad[v.id]) for v in job.variants if v.id in bad]
    rest = [v for v in job.variants if v.id not in bad]
    if not rest:
        return [*rows, job.cell(on, "failed", reason=whole.reason)]
    # A default rule's choice that crashes is no baseline; the cell's record then names none.
    default = job.default if job.default not in bad else msgspec.UNSET
    return rows + _timed(on, job._replace(variants=rest, default=default), RETRIES)


def broken(records: Sequence[Record]) -> set[str]:
    """The decode variants that took a process down in these trials, by id."""
    return {
        r.variant.id
        for r in records
        if isinstance(r, Trial) and r.role == "decode" and r.status != "ok"
    }
