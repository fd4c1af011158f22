"""How a long command shows its progress: bars with the time left in a terminal, one line a
finished stage elsewhere.
"""

import contextlib
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from gdntune.tuning.progress import Progress


class Bar(Progress):
    """A bar a stage, on stderr, with the time left."""

    def __init__(self, console: Console | None = None) -> None:
        # A long memory: cells come in any order of size, and the times left shall not jump.
        self._bar = RichProgress(
            SpinnerColumn(),
            TextColumn("{task.description:8}"),
            BarColumn(),
            TextColumn("{task.fields[count]}", justify="right"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console or Console(stderr=True),
            speed_estimate_period=3600,
        )
        self._task: TaskID | None = None
        self._total, self._done, self._weighs = 0, 0, False

    def begin(self) -> None:
        # Without a total it pulses.
        self._task = self._bar.add_task("start", total=None, count="")
        self._bar.start()

    def start(self, label: str, total: int, work: float = 0.0) -> None:
        if self._task is not None and not self._total:
            self._bar.remove_task(self._task)
        self._total, self._done, self._weighs = total, 0, work > 0
        self._task = None
        # An empty stage has no bar: it would stand at 0 of 0.
        if total:
            whole = work if self._weighs else total
            self._task = self._bar.add_task(label, total=whole, count=f"0/{total}")
            self._bar.start()

    def step(self, n: int = 1, work: float = 0.0) -> None:
        self._done += n
        if self._task is not None:
            count = f"{self._done}/{self._total}"
            self._bar.update(self._task, advance=work if self._weighs else n, count=count)

    def end(self) -> None:
        """Leaves the stage's bar as it stands."""

    def stop(self) -> None:
        # Else the terminal's cursor stays hidden.
        self._bar.stop()


class Lines(Progress):
    """A line on stderr when a stage has ended: for logs."""

    def __init__(self) -> None:
        self._label, self._total, self._done, self._began = "", 0, 0, 0.0

    def start(self, label: str, total: int, work: float = 0.0) -> None:
        self._label, self._total, self._done, self._began = label, total, 0, time.monotonic()

    def step(self, n: int = 1, work: float = 0.0) -> None:
        self._done += n

    def end(self) -> None:
        if self._total:
            seconds = time.monotonic() - self._began
            # A log whose disk is full is no reason to end hours of timing.
            with contextlib.suppress(OSError):
                sys.stderr.write(
                    f"{self._label}: {self._done} of {self._total} in {seconds:.1f} s\n"
                )
                sys.stderr.flush()
        self.stop()

    def stop(self) -> None:
        self._total = 0


def progress() -> Progress:
    """Bars where stderr is a terminal, else lines."""
    return Bar() if sys.stderr.isatty() else Lines()


@contextlib.contextmanager
def shown() -> Iterator[Progress]:
    """The progress of a command of several stages, seen from now on; taken away after an error."""
    found = progress()
    found.begin()
    try:
        yield found
    finally:
        found.stop()


@contextlib.contextmanager
def stage(label: str, total: int) -> Iterator[Progress]:
    """The progress of a command that has one stage."""
    found = progress()
    found.start(label, total)
    try:
        yield found
        found.end()
    finally:
        found.stop()
