"""`gdntune.check_table`: whether the table in use still says what is so on this device."""

import itertools
import statistics
from typing import Literal, NamedTuple

import msgspec

from gdntune import kernels
from gdntune.errors import ToolMissing, UnsupportedProblem
from gdntune.problem import Op, Problem
from gdntune.results.records import policy_words
from gdntune.results.table import Evidence, Rule, Table
from gdntune.runtime import dispatch
from gdntune.runtime.compiling import compile_missing
from gdntune.runtime.dispatch import Runtime
from gdntune.timing import Policy
from gdntune.tuning.config import Search
from gdntune.tuning.measure import time_cell
from gdntune.tuning.plan import session_objects
from gdntune.tuning.session import Session

# Another card of the same model differs by less; so does a choice from what it ties with.
DRIFT, REGRESSION = 0.10, 0.03
SEARCH = Search(screen_rounds=3, keep=2, final_rounds=60, precision=0.0, max_cell_seconds=5.0)
HEADS = (64, 48, 32, 16, 8, 4, 2, 1)


class CellCheck(NamedTuple):
    """One cell, timed again.

    status: `REGRESSED` where the default rule's variant is faster than the table's choice by more
    than 3%, `DRIFT` where the choice's time is more than 10% off the table's, else `OK`; `UNTIMED`
    where it could not be timed here as it was for the table, which says nothing of it.
    table_us: the choice's mean in the table; now_us: its mean now; default_us: the default's now;
    None where untimed. policy: what the table's time was taken under, and these. reason: why it is
    untimed.
    """

    status: Literal["OK", "DRIFT", "REGRESSED", "UNTIMED"]
    problem: Problem
    variant: str
    table_us: float
    now_us: float | None
    default: str
    default_us: float | None
    policy: dict[str, str]
    reason: str = ""

    def __str__(self) -> str:
        at = f"{self.status}: {self.problem.key()}, {policy_words(self.policy)}: {self.variant}"
        if self.now_us is None or self.default_us is None:
            return f"{at}: {self.reason}"
        return (
            f"{at} takes {self.now_us:.4g} us, {self.now_us / self.table_us - 1:+.1%} of the"
            f" table's {self.table_us:.4g} us; the default rule's {self.default}"
            f" {self.default_us:.4g} us"
        )


def judged(cell: CellCheck) -> CellCheck:
    """A cell that was timed, with the status that its times give it."""
    assert cell.now_us is not None and cell.default_us is not None
    status: Literal["OK", "DRIFT", "REGRESSED"] = "OK"
    if abs(cell.now_us / cell.table_us - 1) > DRIFT:
        status = "DRIFT"
    if cell.now_us > cell.default_us * (1 + REGRESSION):
        status = "REGRESSED"
    return cell._replace(status=status)


class Measured(NamedTuple):
    """A time in a table: evidence of a rule's choice for calls as it is, or, where `alone`, for
    those without dependent launch; policy: the rule's.
    """

    rule: Rule
    evidence: Evidence
    alone: bool
    policy: dict[str, str]


def measured(found: Table) -> list[Measured]:
    """All times in a table."""
    return [
        Measured(rule, e, alone, found.policy_of(rule))
        for rule in found.rules
        for alone in ((False, True) if rule.alone else (False,))
        for i in rule.serving(dependent_launch=not alone)
        for e in i.evidence
    ]


def check_table(
    device: str = "cuda", index: int = 0, *, op: Op = "gdn_decode", cells: int = 4
) -> list[CellCheck]:
    """Times a few cells of the table in use, its choice beside the default rule's, on this device:
    some seconds, at start-up, while nothing else runs there. Each is timed as its rule was, whose
    policy may not be the table's; those of one policy come together. `UNTIMED`: that policy cannot
    be had here, or the GPU is throttled.

    cells: how many, spread over the table's evidence. UnsupportedProblem where no table is in use,
    or it has no evidence; ToolMissing where something must be compiled and nothing can, BuildError
    as of a sweep, MeasurementError for times that cannot be true and for a chain that the memory
    does not hold. Clones of tensors of up to the cells' sizes are allocated, in a chain of each
    layer's.
    """
    runtime = dispatch.runtime(device, index)
    source = runtime.source(op)
    if source is None:
        raise UnsupportedProblem(f"no table for {op} on {runtime.device.name}: nothing to check")
    seen = measured(source.table)
    if not seen or cells < 1:
        raise UnsupportedProblem(
            f"{cells} cells of {source.path}, which has evidence of {len(seen)}: expected both from"
            " 1"
        )
    picked = seen[:: max(1, len(seen) // cells)][:cells]
    found: list[CellCheck] = []
    # One session at a time: each has a buffer of its own, a chain's the layers too.
    for _, alike in itertools.groupby(sorted(picked, key=_under), _under):
        its = list(alike)
        session = _session(runtime, index, its[0].policy)
        found += [_checked(session, runtime, one) for one in its]
    return found


def _under(one: Measured) -> str:
    return policy_words(one.policy)


def _session(runtime: Runtime, index: int, named: dict[str, str]) -> Session | str:
    """What times under a policy that a table names, or why this device cannot."""
    try:
        policy, _ = msgspec.convert(named, Policy, strict=False).resolve(runtime.device)
    except (msgspec.ValidationError, UnsupportedProblem, ToolMissing) as e:
        return f"times are not to be had as its rule's were: {e}"
    needed = session_objects(runtime.device, {policy.l2})
    if missing := [pair for pair in needed if runtime.store.find(pair[0]) is None]:
        compile_missing(missing, runtime.store, kernels.flush()[0])
    return Session(runtime.device, index, runtime.store, policy)


def _checked(session: Session | str, runtime: Runtime, one: Measured) -> CellCheck:
    """A cell timed again, or, where there is no session, why not."""
    when, e = one.rule.when, one.evidence
    HV = next(n for n in HEADS if e.work_units % n == 0)
    problem = Problem(when, e.work_units // HV, max(1, HV // 4), HV)
    bound = runtime.bind(when, dependent_launch=False if one.alone else None)
    chosen = bound.choice(e.work_units).variant
    default = kernels.default(when, e.work_units, runtime.device)
    cell = CellCheck(
        "UNTIMED", problem, chosen.id, e.mean_us, None, default.id, None, dict(one.policy)
    )
    if isinstance(session, str):
        return cell._replace(reason=session)
    variants = [chosen, *([default] if default != chosen else [])]
    # what is not there yet is compiled, as at a call
    runtime.functions(when, variants)
    ids = [v.id for v in variants]
    timed = time_cell(session, problem, variants, [], SEARCH, always_final=ids)
    if not timed.timed:
        return cell._replace(reason=f"nothing could be timed: {timed.timing.stop}")
    means = {t.variant.id: statistics.fmean(t.final_us) for t in timed.timed if t.final_us}
    # the default is the choice, where they are one
    return judged(cell._replace(now_us=means[chosen.id], default_us=means[default.id]))
