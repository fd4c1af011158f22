"""A timing process, and its parent's end of it: calls go there pickled, one at a time, and each has
one answer.

A plain program, as the compiling processes are (`objects/farm.py`), never the caller's
multiprocessing: a daemonic process may have no such children, and to keep them from importing the
caller's main module again, that had to be hidden from the caller's other threads too.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from gdntune.errors import GdntuneError
from gdntune.objects.processes import interpreter

# The caller's path of modules, by arguments: a task may be of any module on it.
PROGRAM = (
    "import sys; place, *sys.path[:] = sys.argv[1:];"
    " from gdntune.tuning.program import main; main(int(place))"
)


class Ended(Exception):
    """A process that is of no use any more: it died, was late, or a task's fault may have left it
    broken. status: as a journal has it.
    """

    def __init__(self, status: str, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class _Waits(NamedTuple):
    """A task waits for its turn from now on, or has it: that time is no task's own."""

    waits: bool


class _Answer(NamedTuple):
    """What a call gave: its value, what gdntune refused, or any other fault in words."""

    value: Any = None
    refused: GdntuneError | None = None
    fault: str = ""


class Program:
    """A process that is at work from here on. Used by one thread at a time, but for `kill`."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._popen = subprocess.Popen(
                [interpreter(), "-c", PROGRAM, str(theirs.fileno()), *map(str, sys.path)],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                # A session of its own, so that what a task started ends with it.
                start_new_session=True,
            )

    def call(self, function: Callable[..., Any], *args: Any, timeout: float) -> Any:
        """`function(*args)` there. What gdntune raises is raised here; Ended otherwise, and where
        there is no answer within `timeout` seconds, those under `waiting` not counted.
        """
        try:
            self._connection.send((function, args))
            answer = self._answered(timeout)
        except (EOFError, OSError):
            # Killed by another thread, it is gone as well.
            code = self._popen.wait()
            raise Ended("crashed", f"the process died (exit code {code})") from None
        if answer.refused is not None:
            raise answer.refused
        if answer.fault:
            # After an illegal access every later call of the process fails too.
            raise Ended("crashed", answer.fault)
        return answer.value

    def _answered(self, timeout: float) -> "_Answer":
        left, waits = timeout, False
        while True:
            began = time.monotonic()
            if not self._connection.poll(None if waits else max(left, 0.0)):
                raise Ended("timeout", f"no answer within {timeout:.0f} s")
            said: _Answer | _Waits = self._connection.recv()
            if isinstance(said, _Answer):
                return said
            if not waits:
                left -= time.monotonic() - began
            waits = said.waits

    def kill(self) -> None:
        """Ends the process, and what it started; a call that waits for it is answered by Ended."""
        if self._popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()

    def close(self) -> None:
        """Ends the process and the connection to it."""
        self.kill()
        self._connection.close()


# Of this process, once it serves.
_PARENT: list[Connection] = []


@contextlib.contextmanager
def waiting() -> Iterator[None]:
    """In a task: seconds that its time limit does not count, as it waits for another process."""
    _say(_Waits(True))
    try:
        yield
    finally:
        _say(_Waits(False))


def _say(what: _Waits) -> None:
    for connection in _PARENT:
        connection.send(what)


def _answer(call: bytes) -> _Answer:
    from multiprocessing.reduction import ForkingPickler

    try:
        function, args = ForkingPickler.loads(call)
        return _Answer(function(*args))
    except GdntuneError as e:
        return _Answer(refused=e)
    except BaseException as e:  # noqa: BLE001  whatever a variant brings about is its own failure
        return _Answer(fault=f"{type(e).__name__}: {str(e)[-500:]}")


def serve(connection: Connection) -> None:
    """Answers calls until the parent has no more, or is gone."""
    _PARENT[:] = [connection]
    while True:
        try:
            call = connection.recv_bytes()
        except (EOFError, OSError):
            return
        answer = _answer(call)
        try:
            connection.send(answer)
        except OSError:
            return
        except Exception as e:  # noqa: BLE001  an answer that cannot be pickled
            connection.send(_Answer(fault=f"{type(e).__name__}: {str(e)[-500:]}"))
        # It may hold a cell's tensors, and the next cell makes its own.
        del answer, call


def main(place: int) -> None:
    """Serves on the connection of that descriptor; what a task prints goes to standard error."""
    # The parent decides, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.dup2(2, 1)
    with Connection(place) as connection:
        serve(connection)
