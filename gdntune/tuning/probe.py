"""Other libraries' entries in a timing process: one is called once and checked, then bound to the
tensors of a cell.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from gdntune import peers
from gdntune.checking.cases import Case
from gdntune.checking.check import Verdict
from gdntune.errors import CheckFailed
from gdntune.kernels.spec import Variant
from gdntune.peers.compare import Expected
from gdntune.peers.spec import Bound
from gdntune.problem import Problem
from gdntune.tuning.session import Calls, Session

REASON_LENGTH = 500

Named = tuple[str, str]  # a peer and one of its entries


class Probe(NamedTuple):
    """One call of an entry on fresh states: whether it ran and agreed with the reference, and by
    how much.
    """

    status: Literal["ok", "failed"]
    reason: str
    error: float | None
    seconds: float


def probe(session: Session, problem: Problem, named: Named) -> Probe:
    """Calls an entry once at a cell's own sizes and compares a few requests with the reference.

    An exception that leaves the device usable is the entry's failure; one that does not passes
    through, and ends this process.
    """
    began = time.perf_counter()

    def ended(
        status: Literal["ok", "failed"], reason: str = "", error: float | None = None
    ) -> Probe:
        return Probe(status, reason[:REASON_LENGTH], error, round(time.perf_counter() - began, 4))

    try:
        verdict = _checked(session, problem, named)
    except Exception as e:  # noqa: BLE001  whatever a peer raises is its own failure
        # raises again where the device is lost
        session.synchronize()
        return ended("failed", f"{type(e).__name__}: {' '.join(str(e).split())}")
    finite = verdict.error if verdict.error < float("inf") else None
    if verdict.ok:
        return ended("ok", "", finite)
    return ended("failed", f"check failed: {verdict.worst}", finite)


def _checked(session: Session, problem: Problem, named: Named) -> Verdict:
    entry = peers.get(named[0]).entry(named[1])
    calls = session.calls(problem, "decode", [])
    case: Case = calls.case
    expected = Expected(case, entry.tolerance)
    bound = entry.bind(case)
    case.output.fill_(float("nan"))
    returned = bound.call()
    session.synchronize()
    verdict = expected.judge(case, bound, returned)
    c = problem.contract
    if c.mode == "frozen" and c.intermediate != "slots" and not bool(case.state.equal(calls.kept)):
        raise CheckFailed("the state is frozen in this contract, and the call wrote to it")
    return verdict


class BoundEntries(NamedTuple):
    """Entries bound to a cell's tensors: the callables that are timed, and after how many calls
    each comes again to what it did.
    """

    calls: list[Callable[[int], Any]]
    cycles: list[int]


def bind(entries: Sequence[Named], calls: Calls) -> BoundEntries:
    """Entries on a cell's tensors, each on every case that ours are called on: as ours, on other
    slots each turn under `rotate`, in each layer under `chain`.
    """
    bound = [[peers.get(peer).entry(name).bind(x) for x in calls.cases] for peer, name in entries]
    return BoundEntries([_call(of) for of in bound], [of[0].cycle for of in bound])


def _call(bound: Sequence[Bound]) -> Callable[[int], Any]:
    return lambda turn: bound[turn % len(bound)].call()


def recorded(named: Named, problem: Problem) -> Variant:
    """What a trial of an entry is recorded as."""
    peer = peers.get(named[0])
    return peer.variant(peer.entry(named[1]), problem)
