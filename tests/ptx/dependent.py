"""Programmatic dependent launch: a kernel that may start before the one ahead of it ends, until it
waits.

Before a thread's `griddepcontrol.wait` what the kernel ahead writes may not be there yet, and that
kernel may still read what this one is to write. Let-go of the kernels behind comes after the wait,
and no thread ends without one: a kernel that is seen running or ended has then itself waited for
all that lie ahead.
"""

from typing import TYPE_CHECKING

import numpy as np

from .faults import Fault, Unmodelled
from .memory import Memory
from .operands import Step
from .program import Instruction, Program
from .threads import Threads
from .values import Array

if TYPE_CHECKING:
    from .grid import Grid


class Ahead:
    """Which threads of a dependent launch have waited; all have, in any other launch."""

    def __init__(self, threads: int, dependent: bool):
        self.waited = np.full(threads, not dependent, np.bool_)
        self.all = not dependent

    def wait(self, threads: Threads) -> None:
        """These threads wait for the kernels ahead."""
        self.waited |= threads.mask
        self.all = bool(self.waited.all())

    def _require(self, i: Instruction, grid: "Grid", early: Array, deed: str) -> None:
        if early.any():
            who = grid.where(i, Threads.of_lanes(early.nonzero()[0], grid.size))(0)
            raise Fault(f"{deed} before the wait for the kernel ahead, {who}")

    def require(self, i: Instruction, grid: "Grid", threads: Threads, deed: str) -> None:
        """A fault where one of these threads has not waited."""
        if not self.all:
            self._require(i, grid, threads.mask & ~self.waited, deed)

    def require_load(
        self, i: Instruction, grid: "Grid", threads: Threads, memory: Memory, at: Array
    ) -> None:
        """A fault where one of these threads has not waited, and loads what is written ahead."""
        if not self.all:
            early = np.zeros(grid.size, np.bool_)
            early[threads.lanes] = memory.written_ahead(at)
            self._require(i, grid, early & ~self.waited, "a load of what the kernel ahead writes")


def control(i: Instruction, program: Program) -> Step:
    """griddepcontrol.wait and .launch_dependents."""
    if i.parts[1] == "wait":
        return Step(lambda grid, threads: grid.ahead.wait(threads))
    if i.parts[1] != "launch_dependents":
        raise Unmodelled(i.text)
    deed = "dependents let go"
    return Step(lambda grid, threads: grid.ahead.require(i, grid, threads, deed))
