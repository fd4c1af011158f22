"""Compiling processes of our own, fed side by side: one that crashes or hangs costs its own task.

Plain programs, never the caller's multiprocessing: a daemonic process may have no such children,
and to keep workers from importing the caller's main module again, that had to be hidden from the
caller's other threads too.
"""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

import msgspec

from gdntune.errors import GdntuneError
from gdntune.objects.processes import interpreter
from gdntune.objects.store import ObjectSpec, scratch_folder
from gdntune.objects.worker import Answer, Task

# The caller's path of modules, by arguments: a kernel may be registered from anywhere on it.
PROGRAM = "import sys; sys.path[:] = sys.argv[1:]; from gdntune.objects.worker import main; main()"
# How much of what a crashed compiler printed goes into the reason.
TAIL_BYTES = 500


class Process:
    """One compiling process and the task it is at."""

    def __init__(self, scratch: Path, arch: str | None):
        # A compiler must not hold a context on the device that is being timed.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        if arch:
            environment["CUTE_DSL_ARCH"] = arch
        self.task = -1
        self.deadline = 0.0
        self.dead = False
        self._received = bytearray()
        # A file, not a pipe: nobody reads a pipe while the compiler works, and a full one would
        # stop it.
        self._printed: IO[bytes] = tempfile.TemporaryFile(dir=scratch)  # noqa: SIM115
        self._popen = subprocess.Popen(
            [interpreter(), "-c", PROGRAM, *map(str, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._printed,
            env=environment,
            # A session of its own, so that its compiler's processes end with it.
            start_new_session=True,
        )

    def fileno(self) -> int:
        """Where answers come from; readable too once the process died."""
        assert self._popen.stdout is not None
        return self._popen.stdout.fileno()

    def send(self, number: int, task: Task, deadline: float) -> None:
        """Gives the process a task; whether it died is seen when its answer is read."""
        self.task, self.deadline = number, deadline
        assert self._popen.stdin is not None
        with contextlib.suppress(OSError):
            # A process that died between two tasks breaks the pipe here; its end is read as its
            # answer.
            self._popen.stdin.write(msgspec.json.encode(task) + b"\n")
            self._popen.stdin.flush()

    def receive(self) -> Answer | None:
        """The answer, or None where it is not whole yet; the end of a process that died."""
        data = os.read(self.fileno(), 1 << 16)
        self._received += data
        # End of file: an answer always comes before it, so the task in hand is lost.
        if not data:
            self.dead = True
            return Answer(reason=self._end())
        if not self._received.endswith(b"\n"):
            return None
        # A process has one task at a time, so what was received is one answer.
        answer = msgspec.json.decode(self._received, type=Answer)
        self._received.clear()
        return answer

    def _end(self) -> str:
        code = self._popen.wait()
        size = self._printed.seek(0, os.SEEK_END)
        self._printed.seek(max(0, size - TAIL_BYTES))
        printed = self._printed.read().decode(errors="replace").strip()
        said = f": {printed}" if printed else ""
        return f"the compiler's process died (exit code {code}){said}"

    def close(self) -> None:
        """Ends the process, and what it started."""
        # Only while it runs: afterwards its number may be another's.
        if self._popen.poll() is None:
            os.killpg(self._popen.pid, signal.SIGKILL)
            self._popen.wait()
        for stream in (self._popen.stdin, self._popen.stdout, self._printed):
            # A task that was never read may still be in the buffer.
            with contextlib.suppress(OSError):
                if stream:
                    stream.close()


class Farm:
    """Compiles objects in up to `jobs` processes. Used by one thread at a time; several farms may
    run at once.
    """

    def __init__(self, root: Path, jobs: int, timeout: float):
        self._root, self._jobs, self._timeout = root, jobs, timeout
        self._at_work: list[Process] = []
        self._idle: list[Process] = []
        self._scratch = scratch_folder(root)

    def __enter__(self) -> "Farm":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in (*self._at_work, *self._idle):
            process.close()
        self._scratch.cleanup()

    def compile(self, todo: Sequence[tuple[ObjectSpec, str]]) -> Iterator[tuple[int, Answer]]:
        """The place in `todo` and the answer of each object, as they come; all are compiled for one
        architecture.
        """
        archs = {spec.arch for spec, _ in todo if spec.device == "cuda"}
        if len(archs) > 1:
            raise GdntuneError(f"one call compiles for one architecture, these are {sorted(archs)}")
        arch = next(iter(archs), None)
        # Reversed, so that pop() takes tasks in the order given: the caller puts first what it
        # needs first.
        left = list(enumerate(todo))[::-1]
        while left or self._at_work:
            while left and len(self._at_work) < self._jobs:
                number, (spec, compiler) = left.pop()
                self._start(number, spec, compiler, arch)
            yield from self._answers()

    def _start(self, number: int, spec: ObjectSpec, compiler: str, arch: str | None) -> None:
        process = self._idle.pop() if self._idle else Process(Path(self._scratch.name), arch)
        self._at_work.append(process)
        task = Task(spec, compiler, str(self._root), self._scratch.name)
        process.send(number, task, time.monotonic() + self._timeout)

    def _answers(self) -> Iterator[tuple[int, Answer]]:
        # Made anew each time: the set of processes changes with each answer, and there are few of
        # them.
        with selectors.DefaultSelector() as selector:
            for process in self._at_work:
                selector.register(process, selectors.EVENT_READ, process)
            first = min(process.deadline for process in self._at_work)
            ready = [key.data for key, _ in selector.select(max(0.0, first - time.monotonic()))]
        now = time.monotonic()
        # An answer that came by now counts, also past the deadline.
        for process in list(self._at_work):
            late = process.deadline <= now
            answer = process.receive() if process in ready else None
            if answer is None and late:
                process.dead = True
                answer = Answer(reason=f"compiling took more than {self._timeout:.0f} s")
            if answer is None:
                continue
            self._at_work.remove(process)
            if process.dead:
                process.close()
            else:
                self._idle.append(process)
            yield process.task, answer
