"""What a bench runs in its timing process: checks one entry of a peer at a cell, and times peers
and our variants there together.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from gdntune import peers
from gdntune.checking.cases import Case
from gdntune.device.arch import clocks, settled, throttled
from gdntune.errors import CheckFailed
from gdntune.kernels.spec import Variant
from gdntune.peers.compare import Expected
from gdntune.peers.spec import Bound
from gdntune.problem import Problem
from gdntune.timing import summary
from gdntune.tuning.config import Search
from gdntune.tuning.worker import LaidOut, Session, Start, Took, current

# Quick rounds: to find the best floors, and to see what a round of everything takes.
LOOK_ROUNDS = 3
FLOORS_KEPT = 2
LEAST_ROUNDS = 20
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


class Found(NamedTuple):
    """A cell's final samples in microseconds, in the order that was asked for; floors: the best of
    those that were tried.
    """

    ours: list[list[float]]
    floors: list[tuple[Variant, list[float]]]
    peers: list[list[float]]
    took: Took


def probe_task(start: Start, problem: Problem, named: Named) -> Probe:
    """Calls an entry once at a cell's own sizes and compares a few requests with the reference.

    An exception that leaves the device usable is the entry's failure; one that does not passes
    through, and ends this process.
    """
    session = current(start)
    began = time.perf_counter()

    def probe(
        status: Literal["ok", "failed"], reason: str = "", error: float | None = None
    ) -> Probe:
        return Probe(status, reason[:REASON_LENGTH], error, round(time.perf_counter() - began, 4))

    try:
        verdict = _checked(session, problem, named)
    except Exception as e:  # noqa: BLE001  whatever a peer raises is its own failure
        # raises again where the device is lost
        session.synchronize()
        return probe("failed", f"{type(e).__name__}: {' '.join(str(e).split())}")
    finite = verdict.error if verdict.error < float("inf") else None
    return (
        probe("ok", "", finite)
        if verdict.ok
        else probe("failed", f"check failed: {verdict.worst}", finite)
    )


def _checked(session: Session, problem: Problem, named: Named) -> Any:
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


def time_task(
    start: Start,
    problem: Problem,
    ours: list[Variant],
    floors: list[Variant],
    entries: list[Named],
    search: Search,
) -> Found:
    """Times our variants, the best floors and the entries of peers on shared tensors, interleaved
    in one measurement.
    """
    session = current(start)
    before = settled(session.gpu)
    if throttled(before):
        return Found([], [], [], Took("throttled", 0.0, before, before))
    began = time.perf_counter()
    session.load(problem.contract, [*ours, *floors])
    best, cycles = _best_floors(session, problem, ours, floors), [1] * len(entries)

    def lay_out() -> LaidOut:
        calls = session.calls(problem, "decode", ours)
        floor_calls = session.calls(problem, "floor", best).calls if best else []
        bound = [
            [peers.get(peer).entry(name).bind(case) for case in calls.cases]
            for peer, name in entries
        ]
        cycles[:] = [of[0].cycle for of in bound]
        return LaidOut(calls, [*calls.calls, *floor_calls, *map(_peer_call, bound)])

    sets = [lay_out()]
    everything = range(len(sets[0].everything))
    rounds, stop = _rounds(session, sets[0].everything, search, began)
    # on each set of tensors whole cycles
    if more := -rounds % (
        math.lcm(*cycles) * (search.placements if max(cycles, default=1) > 1 else 1)
    ):
        rounds, stop = rounds + more, f"{stop}, and {more} to end whole cycles"
    samples = session.final(problem, sets, lay_out, everything, rounds, search.placements)
    after = clocks(session.gpu)
    n, m = len(ours), len(ours) + len(best)
    timed_floors = [*zip(best, samples[n:m], strict=True)]
    took = Took(stop, time.perf_counter() - began, before, after)
    return Found(samples[:n], timed_floors, [*map(_whole_cycles, samples[m:], cycles)], took)


def _best_floors(
    session: Session, problem: Problem, ours: list[Variant], floors: list[Variant]
) -> list[Variant]:
    """The best floors by a quick look, fastest first."""
    if len(floors) <= FLOORS_KEPT:
        return floors
    if session.chained is not None:
        session.calls(
            problem, "decode", ours
        )  # the layers of a chain are those of the decode calls
    calls = session.calls(problem, "floor", floors).calls
    looks = session.timer.measure(calls, LOOK_ROUNDS)
    best = sorted(range(len(calls)), key=lambda i: (summary(looks[i]).median_us, i))[:FLOORS_KEPT]
    return [floors[i] for i in best]


def _peer_call(bound: Sequence[Bound]) -> Callable[[int], Any]:
    """An entry's call on the cell's tensors: as ours, on other slots each turn under `rotate`, in
    each layer under `chain`.
    """
    return lambda turn: bound[turn % len(bound)].call()


def _whole_cycles(samples: Sequence[float], cycle: int) -> list[float]:
    """The means of `cycle` samples that follow one another; of whole cycles, wherever they begin."""
    return [math.fsum(samples[i : i + cycle]) / cycle for i in range(0, len(samples), cycle)]


def _rounds(
    session: Session, everything: Sequence[Callable[[int], Any]], search: Search, began: float
) -> tuple[int, str]:
    """How many rounds fit into the cell's time, by what a round takes, launches of other libraries
    included, and the rule.
    """
    session.timer.measure(everything, 1)
    session.synchronize()
    look = time.perf_counter()
    session.timer.measure(everything, LOOK_ROUNDS, warmup=0)
    one_round = (time.perf_counter() - look) / LOOK_ROUNDS
    fit = int((search.max_cell_seconds - (time.perf_counter() - began)) / max(one_round, 1e-9))
    if fit >= search.final_rounds:
        return search.final_rounds, f"{search.final_rounds} rounds"
    return (
        max(min(search.final_rounds, LEAST_ROUNDS), fit),
        f"max_cell_seconds={search.max_cell_seconds:g}",
    )
