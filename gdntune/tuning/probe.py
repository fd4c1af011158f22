"""Other libraries' entries in a timing process: one is called once and checked, then bound to the
tensors of a cell.
"""

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gdntune import peers
from gdntune.checking.cases import Case
from gdntune.checking.check import Verdict
from gdntune.device.graphs import Recorder
from gdntune.errors import CheckFailed, GdntuneError
from gdntune.kernels.spec import Variant
from gdntune.peers.compare import Expected
from gdntune.problem import Problem
from gdntune.tuning import rings
from gdntune.tuning.session import Calls, Session

REASON_LENGTH = 500

# A peer and one of its entries.
Named = tuple[str, str]


class Probe(NamedTuple):
    """One call of an entry on fresh states: whether it ran and agreed with the reference, and by
    how much.
    """

    status: Literal["ok", "failed"]
    reason: str
    error: float | None
    seconds: float


def probe(session: Session, problem: Problem, named: Named, ours: Sequence[Variant] = ()) -> Probe:
    """Calls an entry once at a cell's own sizes and compares a few requests with the reference.

    ours: a variant of ours, for an entry that is called behind it.
    An exception that leaves the device usable is the entry's failure; one that does not passes
    through, and ends this process.
    """
    began = time.perf_counter()

    def ended(
        status: Literal["ok", "failed"], reason: str = "", error: float | None = None
    ) -> Probe:
        return Probe(status, reason[:REASON_LENGTH], error, round(time.perf_counter() - began, 4))

    try:
        verdict = _checked(session, problem, named, ours)
    except Exception as e:  # noqa: BLE001  whatever a peer raises is its own failure
        # Raises again where the device is lost.
        session.synchronize()
        return ended("failed", f"{type(e).__name__}: {' '.join(str(e).split())}")
    # JSON has no infinity; that the check failed says as much.
    finite = verdict.error if verdict.error < float("inf") else None
    if verdict.ok:
        return ended("ok", "", finite)
    return ended("failed", f"check failed: {verdict.worst}", finite)


def load(named: Named, folder: Path) -> None:
    """Imports what an entry calls, as far as it is there: `probe` says what is not.

    folder: for compiled kernels of peers that lock theirs. Of a folder that processes share, one
    would wait for another's compiler with the device in its hands, and that one for the device.
    """
    peer = peers.get(named[0])
    if peer.cache:
        os.environ[peer.cache] = str(folder)
    for function in peer.entry(named[1]).functions:
        with contextlib.suppress(GdntuneError):
            function.load()


def _checked(session: Session, problem: Problem, named: Named, ours: Sequence[Variant]) -> Verdict:
    entry = peers.get(named[0]).entry(named[1])
    calls = session.calls(problem, "decode", ours[:1] if entry.follows_ours else [])
    case: Case = calls.case
    expected = Expected(case, entry.tolerance)
    bound = entry.bind(case)
    # What an entry leaves unwritten must not pass for what was there before.
    case.output.fill_(float("nan"))
    for call in calls.calls:
        call(0)
    returned = bound.call()
    session.synchronize()
    verdict = expected.judge(case, bound, returned)
    c = problem.contract
    # An update in place would not show in the outputs, which are compared.
    if c.mode == "frozen" and c.intermediate != "slots" and not bool(case.state.equal(calls.kept)):
        raise CheckFailed("the state is frozen in this contract, and the call wrote to it")
    return verdict


class BoundEntries(NamedTuple):
    """Entries bound to a cell's tensors: the callables that are timed, and after how many calls
    each comes again to what it did.
    """

    calls: list[Callable[[int], Any]]
    cycles: list[int]


def bind(entries: Sequence[Named], calls: Calls, recorder: Recorder | None = None) -> BoundEntries:
    """Entries on a cell's tensors, each on every case that ours are called on: as ours, on other
    slots each turn under `rotate`, in each layer under `chain`.

    Where there are several cases, each is called once, so that a graph captures none of a library's
    first calls; a cycle's steps are then spread over them, and each sample is of all of them. An
    entry that follows ours is called behind the first of `calls`. With a recorder calls of several
    kernels are replayed from CUDA graphs, as an engine would.
    """
    found: list[Callable[[int], Any]] = []
    cycles: list[int] = []
    for peer, name in entries:
        entry = peers.get(peer).entry(name)
        bound = [entry.bind(case) for case in calls.cases]
        # Under `chain` and `rotate`; behind a ring the cases are steps.
        several = len(bound) > 1 and calls.cycle == 1
        made = [b.at_layer(i) if several else b.call for i, b in enumerate(bound)]
        if several:
            for call in made:
                call()
        turn: Callable[[int], Any] = partial(_turn, made, None)
        if calls.cycle > 1:
            turn = rings.in_turns(made)
        if entry.follows_ours:
            turn = partial(_turn, made, calls.calls[0])
        if recorder is not None and (entry.follows_ours or entry.several):
            turn = _replayed(turn, len(made), recorder)
        found.append(turn)
        cycles.append(1 if several and bound[0].steps else calls.cycle * bound[0].cycle)
    return BoundEntries(found, cycles)


def _turn(calls: Sequence[Callable[[], Any]], ours: Callable[[int], Any] | None, turn: int) -> None:
    if ours is not None:
        ours(turn)
    calls[turn % len(calls)]()


def _replayed(call: Callable[[int], Any], turns: int, recorder: Recorder) -> Callable[[int], Any]:
    """A call of several kernels as one graph a turn. A graph knows addresses alone, so what the
    call was bound to stays as long as the replay does.
    """
    for i in range(turns):
        call(i)
    replays = recorder.record([partial(call, i) for i in range(turns)])
    return partial(_replay, replays, call)


def _replay(replays: Sequence[Callable[[], Any]], bound: Callable[[int], Any], turn: int) -> None:
    """bound: what was captured, which owns the tensors that the graphs read."""
    replays[turn % len(replays)]()


def packed(entries: Sequence[Named]) -> bool:
    """Whether one of some entries reads q, k and v from one tensor."""
    return any(peers.get(peer).entry(name).packed for peer, name in entries)


def several(named: Named) -> bool:
    """Whether an entry launches several kernels, or one behind ours."""
    entry = peers.get(named[0]).entry(named[1])
    return entry.several or entry.follows_ours


def role(named: Named) -> Literal["peer", "partner"]:
    """What a trial of an entry is recorded as."""
    return "partner" if peers.get(named[0]).entry(named[1]).follows_ours else "peer"


def recorded(named: Named, problem: Problem) -> Variant:
    """The variant that a trial of an entry has."""
    peer = peers.get(named[0])
    return peer.variant(peer.entry(named[1]), problem)
