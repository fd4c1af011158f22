"""The tasks of a timing process: what its parent asks it for. It holds the only CUDA context of a
run.

The process may be killed at any time by its parent (an illegal access, a hang); it writes nothing
to disk.
"""

import contextlib
import os
import time
import traceback
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

from gdntune.device import graphs, turns
from gdntune.device.arch import Device, detect
from gdntune.kernels.spec import Variant
from gdntune.objects.processes import limit_memory
from gdntune.objects.store import Store
from gdntune.problem import Contract, Problem
from gdntune.timing import Policy
from gdntune.tuning import measure, probe, program
from gdntune.tuning.config import Search
from gdntune.tuning.header import identity
from gdntune.tuning.measure import CellResult
from gdntune.tuning.probe import Named, Probe
from gdntune.tuning.session import Session

# One session a process, made before its first task.
_SESSION: list[Session] = []


class Start(msgspec.Struct, frozen=True):
    """What a timing process is started with. turn: the file that locks the device for one of the
    processes that share it; empty: it has the device to itself.
    """

    device: Device
    index: int
    root: str
    bundles: tuple[str, ...]
    policy: Policy
    turn: str = ""


def current(start: Start) -> Session:
    """This process's session, made at the first task: an initializer that fails would be retried
    for ever.
    """
    if not _SESSION:
        if start.device.kind == "cpu":
            # On a GPU what leaks is the device's memory, and CUDA itself maps far more than it
            # uses.
            limit_memory()
        store = Store(Path(start.root), [Path(b) for b in start.bundles])
        _SESSION.append(Session(start.device, start.index, store, start.policy))
    return _SESSION[0]


def _turn(start: Start, whole: bool = False) -> AbstractContextManager[None]:
    """The device's turn for a task; whole: not given back while something compiles."""
    if not start.turn:
        return contextlib.nullcontext()
    leave = _leave if start.device.kind == "cuda" else _nothing
    return turns.held(start.turn, waiting=program.waiting, leave=leave, whole=whole)


def _leave() -> None:
    """Nothing of this process runs on the device, and what it does not use is others' to have."""
    import torch

    torch.cuda.synchronize()
    if graphs.memory_can_be_emptied():
        torch.cuda.empty_cache()


def _nothing() -> None:
    """A CPU is left as it is."""


def begin_task(start: Start) -> None:
    """Makes this process's session, before its first task."""
    with _turn(start):
        current(start)


def resolve_task(start: Start, measure: bool) -> tuple[Policy, str | None, dict[str, float]]:
    """The policy as it is in force, its note, and, where asked for, the measured peaks."""
    with _turn(start):
        session = current(start)
        return session.timer.policy, session.timer.note, session.peaks() if measure else {}


def identity_task(start: Start) -> dict[str, str]:
    """The identity of this process."""
    return identity(detect(start.device.kind, start.index))


def check_task(
    start: Start, contract: Contract, variants: list[Variant]
) -> list[tuple[bool, str, float | None, float]]:
    """Checks variants one after the other: ok, worst coordinate, error, seconds."""
    with _turn(start):
        session = current(start)
        # All at once: they are linked into one library, where each alone would be linked by itself.
        session.load(contract, variants)
        results = []
        for v in variants:
            began = time.perf_counter()
            results.append((*session.check(contract, v), time.perf_counter() - began))
        return results


def probe_task(start: Start, problem: Problem, named: Named, ours: Sequence[Variant] = ()) -> Probe:
    """One call of a peer's entry at a cell, see `probe.probe`. Where the device is shared, it is
    given back while the peer compiles.
    """
    if start.turn:
        # Imports take seconds, and no device.
        probe.load(named, Path(f"{start.turn}.{os.getpid()}"))
        turns.compile_aside()
    with _turn(start):
        return probe.probe(current(start), problem, named, ours)


def time_task(
    start: Start,
    problem: Problem,
    decode: Sequence[Variant],
    floors: Sequence[Variant],
    search: Search,
    always_final: Collection[str] = (),
    entries: Sequence[Named] = (),
    seed: int = 0,
    narrow: bool = False,
) -> CellResult:
    """Times one cell, see `measure.time_cell`: all of it within one turn on the device."""
    try:
        with _turn(start, whole=True):
            return measure.time_cell(
                current(start), problem, decode, floors, search, always_final, entries, seed, narrow
            )
    except Exception as e:
        # Whoever sends the error on holds its traceback, and with it this cell's tensors, while the
        # next cell makes its own.
        traceback.clear_frames(e.__traceback__)
        raise
