"""Turns on a device that several timing processes share: one of them uses it at a time, the others
wait or compile.

A process holds the device's file lock for whatever it launches. While a compiler is at work it
gives the turn back: a peer that compiles for ten seconds at its first call keeps no other process
from timing. What is timed is timed within one turn, which is never given back in between.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import filelock

# filelock asks again so often: a cell takes a hundred times as long.
POLL_S = 0.005

Waiting = Callable[[], AbstractContextManager[Any]]


class _Turn(NamedTuple):
    lock: filelock.BaseFileLock
    waiting: Waiting
    leave: Callable[[], None]


# The turn of this process that may be given back, last the one in force.
_GIVEN: list[_Turn] = []
_WRAPPED: set[str] = set()


@contextlib.contextmanager
def held(
    path: str, *, waiting: Waiting, leave: Callable[[], None], whole: bool = False
) -> Iterator[None]:
    """The device's turn, until the end of the block. A process that dies gives it back.

    path: of the lock's file, one for each device. waiting: entered while another process has the
        turn. leave: waits for what was launched, before the turn is given back. whole: `aside`
        does not give it back meanwhile.
    """
    turn = _Turn(filelock.FileLock(path, thread_local=False), waiting, leave)
    _take(turn)
    if not whole:
        _GIVEN.append(turn)
    try:
        yield
    finally:
        # Not there where a device was lost as it was set aside.
        with contextlib.suppress(ValueError):
            _GIVEN.remove(turn)
        if turn.lock.is_locked:
            _give_back(turn)


@contextlib.contextmanager
def aside() -> Iterator[None]:
    """What uses no device: another process may have the turn meanwhile. Nothing where no turn is
    held, and where it is held whole.
    """
    turn = _GIVEN.pop() if _GIVEN else None
    if turn is None:
        yield
        return
    _give_back(turn)
    try:
        yield
    finally:
        _take(turn)
        _GIVEN.append(turn)


def _take(turn: _Turn) -> None:
    with contextlib.suppress(filelock.Timeout):
        turn.lock.acquire(timeout=0)
        return
    with turn.waiting():
        turn.lock.acquire(poll_interval=POLL_S)


def _give_back(turn: _Turn) -> None:
    try:
        turn.leave()
    finally:
        turn.lock.release()


# Compilers that libraries call at their first call of a shape, and where they have them: classes by
# method, modules by function. Those that are imported are wrapped; none is imported for it.
COMPILERS = (
    ("cutlass.base_dsl.compiler", "CompileCallable", "_compile"),
    ("triton.compiler.compiler", None, "compile"),
    ("triton.compiler", None, "compile"),
)


def compile_aside() -> None:
    """From here on this process compiles CuTe DSL and Triton kernels `aside`, those of the modules
    that are imported by now. May be called again.
    """
    for module, owner, name in COMPILERS:
        where = sys.modules.get(module)
        if where is None or f"{module}.{name}" in _WRAPPED:
            continue
        place = where if owner is None else getattr(where, owner, None)
        compiler = getattr(place, name, None)
        if compiler is not None:
            _WRAPPED.add(f"{module}.{name}")
            setattr(place, name, _aside(compiler))


def _aside(compiler: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(compiler)
    def compiled(*args: Any, **options: Any) -> Any:
        with aside():
            return compiler(*args, **options)

    return compiled
