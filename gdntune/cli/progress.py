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
    MofNCompleteColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as RichProgress

from gdntune.tuning.run import Progress


class Bar(Progress):
    """A bar a stage, on stderr, with the time left."""

    def __init__(self) -> None:
        self._bar: RichProgress | None = None
        self._task = TaskID(0)

    def start(self, label: str, total: int) -> None:
        self.end()
        # An empty stage has no bar: it would stand at 0 of 0.
        if total:
            self._bar = RichProgress(
                TextColumn("{task.description:8}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
            )
            self._task = self._bar.add_task(label, total=total)
            self._bar.start()

    def step(self, n: int = 1) -> None:
        if self._bar:
            self._bar.advance(self._task, n)

    def end(self) -> None:
        if self._bar:
            self._bar.stop()
            self._bar = None

    def stop(self) -> None:
        # Else the terminal's cursor stays hidden.
        self.end()


class Lines(Progress):
    """A line on stderr when a stage has ended: for logs."""

    def __init__(self) -> None:
        self._label, self._total, self._done, self._began = "", 0, 0, 0.0

    def start(self, label: str, total: int) -> None:
        self._label, self._total, self._done, self._began = label, total, 0, time.monotonic()

    def step(self, n: int = 1) -> None:
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
def stage(label: str, total: int) -> Iterator[Progress]:
    """The progress of a command that has one stage."""
    shown = progress()
    shown.start(label, total)
    try:
        yield shown
        shown.end()
    finally:
        shown.stop()
