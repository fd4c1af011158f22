"""Workers, one a device: each runs one task after another in a process that is replaced when a task
crashes it or hangs. Knows no tasks.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeVar

from gdntune.errors import GdntuneError
from gdntune.tuning.program import Ended, Program

# What a process may take to start: imports, a CUDA context, a timer. A machine that does other work
# takes minutes, and a task's own time limit must not pay for it.
START_TIMEOUT_S = 600.0
START_TRIES = 3

T = TypeVar("T")
W = TypeVar("W", bound="Worker")


class Crashed(NamedTuple):
    """A task that took its process with it, or its time."""

    status: str
    reason: str


class NotStarted(GdntuneError, RuntimeError):
    """A timing process that does not start, however often: no variant is to blame, and the next
    cells would fare no better.
    """


class Worker(Protocol):
    """One device's process. name: of the device, as a journal says where a cell was timed."""

    name: str

    def run(self, function: Callable[..., T], *args: Any, timeout: float) -> "T | Crashed":
        """`function(start, *args)` in the process, within `timeout` seconds.

        A crash, a hang or what a variant raised is a value, and the next task has a fresh process,
        whose start has START_TIMEOUT_S of its own. What gdntune itself raises is raised, and
        NotStarted where the process does not start.
        """

    def close(self) -> None:
        """Ends the process; a task that still runs is lost. May be called from another thread, and
        twice.
        """


def started(start: Any) -> None:
    """The task of a fresh process with nothing to prepare: its imports are done once it runs."""


class Begun:
    """What workers share: a fresh process runs `begin` before its first task, with a time limit of
    its own.
    """

    def __init__(self, name: str, begin: Callable[[Any], Any]):
        self.name = name
        self._begin, self._begun, self._closed = begin, False, False

    def run(self, function: Callable[..., T], *args: Any, timeout: float) -> "T | Crashed":
        """See `Worker`."""
        # A start may fail of what passes, such as memory that another process still holds.
        tries = START_TRIES
        while not (self._begun or self._closed):
            begun = self._call(self._begin, timeout=START_TIMEOUT_S)
            self._begun, tries = not isinstance(begun, Crashed), tries - 1
            if isinstance(begun, Crashed) and not (tries or self._closed):
                raise NotStarted(
                    f"the timing process of {self.name or 'this host'} does not start:"
                    f" {begun.reason}; see that the device works (`gdntune doctor`), and give the"
                    " same command again: what is journalled stays"
                )
        return self._call(function, *args, timeout=timeout)

    def _call(self, function: Callable[..., T], *args: Any, timeout: float) -> "T | Crashed":
        """As `run`, in the process as it is; a crash leaves `_begun` False."""
        raise NotImplementedError


class Child(Begun):
    """A process on this host. start: what every task is called with first."""

    def __init__(self, start: Any, name: str = "", begin: Callable[[Any], Any] = started):
        super().__init__(name, begin)
        self._start = start
        self._closing = Lock()
        self._program: Program | None = None

    def _call(self, function: Callable[..., T], *args: Any, timeout: float) -> "T | Crashed":
        try:
            with self._closing:
                if self._closed:
                    return Crashed("crashed", "the worker was closed")
                program = self._program = self._program or Program()
            found: T = program.call(function, self._start, *args, timeout=timeout)
            return found
        except Ended as e:
            self._drop()
            return Crashed(e.status, e.reason)
        except OSError as e:
            return Crashed("crashed", f"no process could be started: {e.strerror or e}")

    def _drop(self) -> None:
        """The next task has a fresh process."""
        self._begun = False
        with self._closing:
            program, self._program = self._program, None
        if program:
            program.close()

    def close(self) -> None:
        """See `Worker`."""
        with self._closing:
            self._closed = True
            if self._program:
                # Not its connection, which another thread may wait for.
                self._program.kill()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def share_out(
    workers: Sequence[W],
    jobs: Iterator[Callable[[W], T]],
    fit: Callable[[W], bool] = lambda _: True,
) -> Iterator[T]:
    """The jobs' results as they come, each job on the first worker that is free.

    fit: whether a worker that is free gets another job; where none does, the jobs that are left
        stay untaken.

    A job is taken from the iterator when a worker is free for it, and after all earlier results
    were taken: what the consumer learned from them holds for it. A job's exception is raised here;
    then, and when the consumer stops early, the workers that were at work are closed, and their
    jobs are lost.
    """
    free, running = list(workers), dict[Future[T], W]()
    with ThreadPoolExecutor(len(workers)) as threads:
        try:
            while True:
                free = [worker for worker in free if fit(worker)]
                # Taken as late as can be: a job that is made now knows what took a process down
                # before.
                while free and (job := next(jobs, None)) is not None:
                    worker = free.pop(0)
                    running[threads.submit(job, worker)] = worker
                if not running:
                    return
                done, _ = wait(running, return_when=FIRST_COMPLETED)
                free += [running.pop(future) for future in done]
                for future in done:
                    yield future.result()
        finally:
            for worker in running.values():
                worker.close()


def on_each(workers: Sequence[W], job: Callable[[W], T]) -> list[T]:
    """A job's result on every worker, at the same time, in their order."""
    with ThreadPoolExecutor(max(len(workers), 1)) as threads:
        return list(threads.map(job, workers))
