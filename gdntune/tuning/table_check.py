"""`gdntune.check_table`: whether the table in use still says what is so on this device."""

import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from gdntune import kernels
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.objects.store import object_spec
from gdntune.problem import Op, Problem
from gdntune.results.table import Evidence, Rule
from gdntune.runtime import dispatch
from gdntune.runtime.compiling import compile_missing
from gdntune.timing import Policy
from gdntune.tuning.config import Search
from gdntune.tuning.measure import time_cell
from gdntune.tuning.session import Session

# Another card of the same model differs by less; so does a choice from what it ties with.
DRIFT, REGRESSION = 0.10, 0.03
SEARCH = Search(screen_rounds=3, keep=2, final_rounds=60, precision=0.0, max_cell_seconds=5.0)
HEADS = (64, 48, 32, 16, 8, 4, 2, 1)


class CellCheck(NamedTuple):
    """One cell, timed again.

    status: `REGRESSED` where the default rule's variant is faster than the table's choice by more
    than 3%, `DRIFT` where the choice's time is more than 10% off the table's, else `OK`.
    table_us: the choice's mean in the table; now_us: its mean now; default_us: the default's now.
    """

    status: Literal["OK", "DRIFT", "REGRESSED"]
    problem: Problem
    variant: str
    table_us: float
    now_us: float
    default: str
    default_us: float

    def __str__(self) -> str:
        return (
            f"{self.status}: {self.problem.key()}: {self.variant} takes {self.now_us:.4g} us,"
            f" {self.now_us / self.table_us - 1:+.1%} of the table's {self.table_us:.4g} us; the"
            f" default rule's {self.default} {self.default_us:.4g} us"
        )


def judged(
    problem: Problem, variant: str, table_us: float, now_us: float, default: str, default_us: float
) -> CellCheck:
    """A cell by its means."""
    status: Literal["OK", "DRIFT", "REGRESSED"] = "OK"
    if abs(now_us / table_us - 1) > DRIFT:
        status = "DRIFT"
    if now_us > default_us * (1 + REGRESSION):
        status = "REGRESSED"
    return CellCheck(status, problem, variant, table_us, now_us, default, default_us)


def check_table(
    device: str = "cuda", index: int = 0, *, op: Op = "gdn_decode", cells: int = 4
) -> list[CellCheck]:
    """Times a few cells of the table in use, its choice beside the default rule's, on this device:
    some seconds, at start-up, while nothing else runs there.

    cells: how many, spread over the table's evidence. UnsupportedProblem where no table is in use,
    or it has no evidence; ToolMissing and BuildError as of a sweep, MeasurementError for times that
    cannot be true. Clones of tensors of up to the cells' sizes are allocated.
    """
    runtime = dispatch.runtime(device, index)
    source = runtime.source(op)
    if source is None:
        raise UnsupportedProblem(f"no table for {op} on {runtime.device.name}: nothing to check")
    seen = [(rule, e) for rule in source.table.rules for i in rule.intervals for e in i.evidence]
    if not seen or cells < 1:
        raise UnsupportedProblem(
            f"{cells} cells of {source.path}, which has evidence of {len(seen)}: expected both from"
            " 1"
        )
    policy = msgspec.convert(dict(source.table.policy), Policy, strict=False)
    if runtime.device.kind == "cuda":
        _compile_flush(runtime)
    session = Session(runtime.device, index, runtime.store, policy)
    picked = seen[:: max(1, len(seen) // cells)][:cells]
    return [_checked(session, runtime, rule, e) for rule, e in picked]


def _checked(session: Session, runtime: Any, rule: Rule, e: Evidence) -> CellCheck:
    HV = next(n for n in HEADS if e.work_units % n == 0)
    problem = Problem(rule.when, e.work_units // HV, max(1, HV // 4), HV)
    chosen = runtime.bind(rule.when).choice(e.work_units).variant
    default = kernels.default(rule.when, e.work_units, runtime.device)
    variants = [chosen, *([default] if default != chosen else [])]
    # what is not there yet is compiled, as at a call
    runtime.functions(rule.when, variants)
    means = _means(session, problem, variants)
    # the default is the choice, where they are one
    return judged(problem, chosen.id, e.mean_us, means[chosen.id], default.id, means[default.id])


def _compile_flush(runtime: Any) -> None:
    """What empties the cache between samples, where neither store nor bundle has it."""
    contract, variant = kernels.flush()
    kernel = kernels.get(variant.kernel)
    spec = object_spec(kernel, contract, variant, runtime.device, label="flush")
    if runtime.store.find(spec) is None:
        compile_missing([(spec, kernel.compiler)], runtime.store, contract)


def _means(session: Session, problem: Problem, variants: Sequence[Variant]) -> dict[str, float]:
    ids = [v.id for v in variants]
    found = time_cell(session, problem, variants, [], SEARCH, always_final=ids)
    return {t.variant.id: statistics.fmean(t.final_us) for t in found.timed if t.final_us}
