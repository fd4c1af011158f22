"""One contract's checks, or one cell's times, on one worker, as records: tries again, and finds the
variants that take a process down.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from gdntune.errors import MeasurementError
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.results.journal import Cell, Check, Record, Trial
from gdntune.tuning import worker as session
from gdntune.tuning.config import Search
from gdntune.tuning.executors import Crashed, Worker

# A check compares a few small problems, a cell at most search.max_cell_seconds of timing: what
# takes longer hangs.
CHECK_TIMEOUT_S = 120.0
CHECK_EACH_S = 2.0
CELL_GRACE_S = 120.0
# A throttled cell, one during which a clock moved, and one whose times cannot be true, is timed
# again.
RETRIES = 1
# So many throttled cells of a device in a row, each twice and after a wait, are no accident.
THROTTLED_IN_A_ROW = 3
_THROTTLED = "throttled by "
# How torch, CUDA and the system say that there was no memory; an illegal access is of another kind.
_NO_MEMORY = re.compile(
    r"out of memory|OutOfMemory|MemoryError|not enough memory|(can't|cannot) allocate",
    re.IGNORECASE,
)


class _Timing(Protocol):
    """What a timing process returns of a cell."""

    @property
    def took(self) -> session.Took: ...


T = TypeVar("T", bound=_Timing)


def attempts(measure: "Callable[[], T | Crashed]") -> "T | Crashed | MeasurementError":
    """The first measurement that nothing disturbed; once something did for the second time, what
    there is.

    That is one during which a clock moved, or else the last: throttled, or MeasurementError where
        its times cannot be true. A crash
    is returned at once.
    """
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
            got, took = found, found.took
            what = "throttled" if took.throttled else "shifted" if took.shifted else ""
            if not what:
                return found
            if what == "shifted":
                kept = found
        disturbed[what] += 1
        if disturbed[what] > RETRIES:
            return kept or got


def check_limit(variants: Sequence[Variant]) -> float:
    """Seconds after which a check of some variants hangs."""
    return CHECK_TIMEOUT_S + CHECK_EACH_S * len(variants)


def check(worker: Worker, contract: Contract, variants: Sequence[Variant]) -> list[Check]:
    """Checks variants together; where that takes the process down, in halves, so that the culprit
    is found.
    """
    if not variants:
        return []
    limit = check_limit(variants)
    got = worker.run(session.check_task, contract, list(variants), timeout=limit)
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
    middle = len(variants) // 2
    return check(worker, contract, variants[:middle]) + check(worker, contract, variants[middle:])


class Plan(NamedTuple):
    """A cell to time. default: the default rule's choice, the first of `variants`, or unset where
    it is not among them.

    purpose: why it is timed where it is no cell of the config. named: whether the journal says
        which device timed it.
    sure: ids of `variants` that are timed to the end whatever their first samples say.
    """

    problem: Problem
    variants: list[Variant]
    floors: list[Variant]
    search: Search
    default: str | msgspec.UnsetType = msgspec.UNSET
    purpose: Literal["bisection", "held-out"] | msgspec.UnsetType = msgspec.UNSET
    named: bool = False
    sure: frozenset[str] = frozenset()

    def cell(self, worker: Worker, status: Literal["ok", "failed"], **fields: Any) -> Cell:
        """The record that closes the cell."""
        where = worker.name if self.named else msgspec.UNSET
        return Cell(
            problem=self.problem, status=status, purpose=self.purpose, timed_on=where, **fields
        )


def time(worker: Worker, plan: Plan, retries: int = RETRIES) -> list[Record]:
    """A cell's trials, and the Cell that closes them, last."""
    limit = plan.search.max_cell_seconds + CELL_GRACE_S
    cell = plan.problem, plan.variants, plan.floors, plan.search, plan.sure
    got = attempts(lambda: worker.run(session.time_task, *cell, timeout=limit))
    if isinstance(got, MeasurementError):
        # records that a timer lost, say: the cell's fault, and no reason to end the sweep
        return [plan.cell(worker, "failed", reason=str(got))]
    if isinstance(got, Crashed):
        return _culprits(worker, plan, got, limit, retries)
    records: list[Record] = []
    for t in got.timed if not got.took.throttled else ():
        screen = Trial(
            problem=plan.problem,
            variant=t.variant,
            role=t.role,
            stage="screen",
            status="ok",
            samples_us=t.screen_us,
        )
        records.append(screen)
        if t.final_us:
            records.append(msgspec.structs.replace(screen, stage="final", samples_us=t.final_us))
    return [*records, plan.cell(worker, default_variant=plan.default, **went(got.took))]


def went(took: session.Took) -> dict[str, Any]:
    """The fields of a Cell that say how its timing went; one that was throttled failed, so that its
    sweep tries it again.

    One during which a clock moved in every attempt is kept: a device at its power limit is at its
        own clocks.
    """
    reason = f"{_THROTTLED}{took.throttled}" if took.throttled else ""
    return {
        "status": "failed" if took.throttled else "ok",
        "reason": reason or (f"clocks moved: {took.shifted}" if took.shifted else ""),
        "stop": took.stop,
        "seconds": round(took.seconds, 4),
        "clocks_before": msgspec.to_builtins(took.before),
        "clocks_after": msgspec.to_builtins(took.after),
    }


def _culprits(
    worker: Worker, plan: Plan, whole: Crashed, limit: float, retries: int
) -> list[Record]:
    """After a cell took its process down: finds the variants that do so alone, records them, times
    the rest.

    Where none does so, something else ended the process (the system, short of memory; a kill): the
    cell is timed again. Where the first two find no memory, each alone, the cell is too large for
    what is free, and no variant is to blame.
    """
    quick = msgspec.structs.replace(plan.search, screen_rounds=2, final_rounds=2, keep=1)
    bad: dict[str, Crashed] = {}
    for n, v in enumerate(plan.variants, 1):
        # times that cannot be true are no crash
        with contextlib.suppress(MeasurementError):
            got = worker.run(session.time_task, plan.problem, [v], [], quick, timeout=limit)
            if isinstance(got, Crashed):
                bad[v.id] = got
                full = all(_NO_MEMORY.search(crash.reason) for crash in bad.values())
                if full and len(bad) == n == min(2, len(plan.variants)):
                    return [plan.cell(worker, "failed", reason=whole.reason)]
            elif got.took.throttled:
                return [plan.cell(worker, **went(got.took))]
    if not bad and retries:
        return time(worker, plan, retries - 1)
    if not bad:
        return [plan.cell(worker, "failed", reason=f"{whole.reason}; no variant does so alone")]
    trials: list[Record] = [
        Trial(
            problem=plan.problem,
            variant=v,
            stage="screen",
            status=bad[v.id].status,  # type: ignore[arg-type]
            reason=bad[v.id].reason,
        )
        for v in plan.variants
        if v.id in bad
    ]
    rest = [v for v in plan.variants if v.id not in bad]
    if not rest:
        return [*trials, plan.cell(worker, "failed", reason=whole.reason)]
    default = plan.default if plan.default not in bad else msgspec.UNSET
    return trials + time(worker, plan._replace(variants=rest, default=default))


class Throttling:
    """Counts the throttled cells that each device had in a row; a device is named where several
    share the cells.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[str | msgspec.UnsetType] = Counter()

    def see(self, records: Sequence[Record]) -> None:
        """Takes note of a cell's records."""
        for cell in (r for r in records if isinstance(r, Cell)):
            self._in_a_row[cell.timed_on] = (
                self._in_a_row[cell.timed_on] + 1 if was_throttled(cell) else 0
            )

    def fit(self, device: str | msgspec.UnsetType = msgspec.UNSET) -> bool:
        """Whether a device holds its clocks, as far as its last cells say."""
        return self._in_a_row[device] < THROTTLED_IN_A_ROW


def was_throttled(cell: Cell) -> bool:
    """Whether a cell has no times because its device was throttled."""
    return cell.status != "ok" and cell.reason.startswith(_THROTTLED)


def cannot_hold_its_clocks(records: Sequence[Record]) -> MeasurementError:
    """What ends a sweep or bench whose last cell is the third in a row that was throttled."""
    last = next(r.reason for r in reversed(records) if isinstance(r, Cell) and was_throttled(r))
    return MeasurementError(
        f"the last {THROTTLED_IN_A_ROW} cells were {last}, and so when timed again: at such clocks"
        " another variant can be the fastest, so the run ends here. What is journalled stays, and"
        " `gdntune report` of its folder shows it. See to the device's cooling and power, or take"
        " another of its model, and give the same command again: it goes on with the cells that"
        " are left, these last"
    )


def broken(records: Sequence[Record]) -> set[str]:
    """The decode variants that took a process down in these trials, by id."""
    return {
        r.variant.id
        for r in records
        if isinstance(r, Trial) and r.role == "decode" and r.status != "ok"
    }
