"""cp.async: copies that a thread starts, and later waits for; in bulk from shared to global memory, and
from global to shared memory, where an mbarrier counts the bytes in (clusters.py).

What a copy brings is written when its thread waits for it: a read before that shows what was there
before, and another thread's read without a barrier after it is a race. What a bulk copy takes is
read then too: a write before that is taken in its place.
"""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .faults import Fault, Unmodelled
from .operands import Step, address, reader
from .program import Instruction, Program
from .threads import Threads
from .values import Array

if TYPE_CHECKING:
    from .grid import Grid


class _Copy(NamedTuple):
    """Some threads' [n, width] bytes on their way to shared memory, and the group of each."""

    to: Array
    values: Array
    lanes: Array
    group: Array


class Copies:
    """A grid's copies that are under way."""

    def __init__(self, threads: int):
        self._closed = np.zeros(threads, np.int64)  # groups that each thread has closed
        self._pending: list[_Copy] = []

    def start(self, to: Array, values: Array, lanes: Array) -> None:
        """Threads `lanes` [n] bring [n, width] bytes to n addresses."""
        self._pending.append(_Copy(to, values, lanes, self._closed[lanes]))

    def close(self, threads: Threads) -> None:
        """What these threads started since makes a group."""
        self._closed[threads.lanes] += 1

    def finish(self, grid: "Grid", i: Instruction, threads: Threads, left: int) -> None:
        """Writes what these threads' groups bring, but for the last `left`."""
        pending, self._pending = self._pending, []
        for c in pending:
            done = threads.mask[c.lanes] & (c.group < self._closed[c.lanes] - left)
            if done.any():
                where = grid.where(i, Threads.of_lanes(c.lanes[done], grid.size))
                grid.shared.store(c.to[done], c.values[done], c.lanes[done], where)
            if not done.all():
                self._pending.append(_Copy(*(x[~done] for x in c)))

    def require_none(self, grid: "Grid", i: Instruction, threads: Threads) -> None:
        """A fault where one of these threads, which end, did not wait for its copies."""
        for c in self._pending:
            left = c.lanes[threads.mask[c.lanes]]
            if len(left):
                who = grid.where(i, Threads.of_lanes(left, grid.size))(0)
                raise Fault(f"an end before copies that were started, {who}")


class _Leaving(NamedTuple):
    """A thread's bulk copy from shared memory: the bytes, their addresses, and its group."""

    lane: int
    source: Array
    to: Array
    group: int


class Stores:
    """A grid's bulk copies to global memory that are under way."""

    def __init__(self, threads: int):
        self._closed = np.zeros(threads, np.int64)  # groups that each thread has closed
        self._pending: list[_Leaving] = []

    def start(self, lane: int, source: Array, to: Array) -> None:
        """Thread `lane` sends what is at addresses of shared memory, 16 bytes at each."""
        self._pending.append(_Leaving(lane, source, to, int(self._closed[lane])))

    def close(self, threads: Threads) -> None:
        """What these threads started since makes a group."""
        self._closed[threads.lanes] += 1

    def finish(self, grid: "Grid", i: Instruction, threads: Threads, left: int) -> None:
        """Moves what these threads' groups send, but for the last `left`."""
        pending, self._pending = self._pending, []
        for s in pending:
            if threads.mask[s.lane] and s.group < self._closed[s.lane] - left:
                one = grid.where(i, Threads.of_lanes(np.array([s.lane]), grid.size))
                lanes = np.full(len(s.source), s.lane)
                where = lambda _, one=one: one(0)  # noqa: E731
                grid.memory.store(s.to, grid.shared.load(s.source, 16, lanes, where), lanes, where)
            else:
                self._pending.append(s)

    def require_none(self, grid: "Grid", i: Instruction, threads: Threads) -> None:
        """A fault where one of these threads, which end, did not wait until its bytes had left."""
        for s in self._pending:
            if threads.mask[s.lane]:
                who = grid.where(i, Threads.of_lanes(np.array([s.lane]), grid.size))(0)
                raise Fault(f"an end before bulk copies have left shared memory, {who}")


def _bulk(i: Instruction, program: Program) -> Step:
    """cp.async.bulk between shared and global memory, and the waits for what leaves shared memory."""
    if "commit_group" in i.parts:
        return Step(lambda grid, threads: grid.stores.close(threads))
    if "wait_group" in i.parts:
        left = int(i.operands[0])
        return Step(lambda grid, threads: grid.stores.finish(grid, i, threads, left))
    if i.parts[3:6] == ("shared_cta", "global", "mbarrier_complete_tx_bytes"):
        return _bring(i, program)
    if i.parts[3:6] != ("global", "shared_cta", "bulk_group"):
        raise Unmodelled(i.text)
    to, source = address(i.operands[0], program), address(i.operands[1], program)
    count = reader(i.operands[2], "u32", program)

    def run(grid: "Grid", threads: Threads) -> None:
        grid.ahead.require(i, grid, threads, "a store")
        at, wide = threads.of(to(grid)), threads.of(count(grid))
        here = grid.in_shared(source(grid), threads)
        if (wide % 16).any() or (at % 16).any() or (here % 16).any():
            raise Fault(f"{i.text}: expected multiples of 16 bytes")
        for n, lane in enumerate(threads.lanes):
            steps = np.arange(0, int(wide[n]), 16)
            grid.stores.start(int(lane), here[n] + steps, at[n] + steps)

    return Step(run)


def _bring(i: Instruction, program: Program) -> Step:
    """cp.async.bulk from global memory to the block's own shared memory."""
    to, source = address(i.operands[0], program), address(i.operands[1], program)
    count, box = reader(i.operands[2], "u32", program), address(i.operands[3], program)

    def run(grid: "Grid", threads: Threads) -> None:
        wide, at = threads.of(count(grid)), threads.of(source(grid))
        here, counted = (grid.in_shared(x(grid), threads) for x in (to, box))
        if (wide % 16).any() or (at % 16).any() or (here % 16).any():
            raise Fault(f"{i.text}: expected multiples of 16 bytes")
        for n, lane in enumerate(threads.lanes):
            steps = np.arange(0, int(wide[n]), 16)
            one = Threads.of_lanes(np.array([lane]), grid.size)
            where = grid.where(i, one)
            mailbox = grid.clusters.mailboxes.get(int(counted[n]))
            if mailbox is None:
                raise Fault(f"a copy that no mbarrier counts, {where(0)}")
            grid.ahead.require_load(i, grid, one, grid.memory, at[n : n + 1])
            lanes = np.full(len(steps), lane)
            raw = grid.memory.load(at[n] + steps, 16, lanes, lambda _, where=where: where(0))
            mailbox.came += int(wide[n])
            mailbox.words.append((here[n] + steps, raw, int(lane)))

    return Step(run)


def copy(i: Instruction, program: Program) -> Step:
    """cp.async of 4, 8 or 16 bytes by each thread, the waits for it, and copies of many bytes."""
    if i.parts[1:-1] == ("async", "bulk", "prefetch", "L2"):
        return prefetch(i, program)
    if i.parts[1:3] == ("async", "bulk"):
        return _bulk(i, program)
    if i.parts[1] != "async" or "mbarrier" in i.parts:
        raise Unmodelled(i.text)
    if "commit_group" in i.parts:
        return Step(lambda grid, threads: grid.copies.close(threads))
    if "wait_group" in i.parts:
        left = int(i.operands[0])
        return Step(lambda grid, threads: grid.copies.finish(grid, i, threads, left))
    if "wait_all" in i.parts:

        def finish(grid: "Grid", threads: Threads) -> None:
            grid.copies.close(threads)
            grid.copies.finish(grid, i, threads, 0)

        return Step(finish)
    return _start(i, program)


def prefetch(i: Instruction, program: Program) -> Step:
    """Brings nothing that a thread can see; a fault where the bytes are not the call's. Of many bytes
    address and size are multiples of 16; without a size it is the line that has this byte.
    """
    source = address(i.operands[0], program)
    many = len(i.operands) > 1
    count, unit = reader(i.operands[1] if many else "1", "u32", program), 16 if many else 1

    def run(grid: "Grid", threads: Threads) -> None:
        wide, at = threads.of(count(grid)), threads.of(source(grid))
        if (wide % unit).any() or (at % unit).any():
            raise Fault(f"{i.text}: expected multiples of 16 bytes")
        for n in range(len(threads.lanes)):
            one = Threads.of_lanes(threads.lanes[n : n + 1], grid.size)
            every = np.arange(at[n], at[n] + wide[n], unit)
            where = grid.where(i, one)
            grid.memory.require(every, unit, lambda _, where=where: where(0))

    return Step(run)


def _start(i: Instruction, program: Program) -> Step:
    width = int(i.operands[2])
    to, source = address(i.operands[0], program), address(i.operands[1], program)
    asked = i.operands[3] if len(i.operands) > 3 else str(width)
    count = reader(asked, "u32", program)

    def run(grid: "Grid", threads: Threads) -> None:
        read = threads.of(count(grid))
        if not np.isin(read, (0, width)).all():
            raise Unmodelled(f"{i.text}: a part of {width} bytes")
        values = np.zeros((len(threads.lanes), width), np.uint8)
        some = read > 0  # the others bring zeros
        if some.any():
            at, lanes = threads.of(source(grid))[some], threads.lanes[some]
            copying = Threads.of_lanes(lanes, grid.size)
            where = grid.where(i, copying)
            grid.ahead.require_load(i, grid, copying, grid.memory, at)
            values[some] = grid.memory.load(at, width, lanes, where)
        grid.copies.start(grid.in_shared(to(grid), threads), values, threads.lanes)

    return Step(run)
