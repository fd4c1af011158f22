"""Clusters: blocks that send words into one another's shared memory, and mbarriers that count them in,
as they do the bytes of bulk copies from global memory (copies.py).

What is sent is written when a thread of the block that it is for waits for it, so that a read before
that shows what was there before. Not seen: a warp that reads without waiting where another one has
waited.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .faults import Fault, Unmodelled
from .operands import Step, address, reader, writer
from .program import Instruction, Program
from .threads import Threads
from .values import Array

if TYPE_CHECKING:
    from .grid import Grid

# An address in another block's shared memory: its rank + 1 above these bits.
RANK = 24


@dataclass
class _Mailbox:
    """An mbarrier in its first phase. born: how often its cluster had met then. words: what came, as
    addresses [n], bytes [n, width] and a thread of the block that they are for.
    """

    arrivals: int
    born: int
    expected: int = 0
    came: int = 0
    words: list[tuple[Array, Array, int]] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.arrivals == 0 and self.came == self.expected


class Clusters:
    """The clusters of a grid, `size` neighbouring blocks each."""

    def __init__(self, size: int, blocks: int, threads: int):
        self.size, self.threads = size, threads
        self._arrived = np.zeros(blocks * threads, np.int64)
        self._met = np.zeros(blocks * threads, np.int64)
        self.mailboxes: dict[int, _Mailbox] = {}

    def arrive(self, grid: "Grid", threads: Threads, orders: bool) -> None:
        """These threads arrive at their cluster's barrier; orders: with all that they did before."""
        self._arrived[threads.lanes] += 1
        if orders:
            grid.clock.arrived[threads.lanes] += 1

    def wait(self, grid: "Grid", i: Instruction, threads: Threads) -> None:
        """These threads wait until all of their cluster have arrived."""
        self._met[threads.lanes] += 1
        arrived = self._arrived.reshape(-1, self.size * self.threads)
        behind = np.repeat(arrived.min(1), self.size * self.threads) < self._met
        late = np.flatnonzero(behind & threads.mask)
        if len(late):
            who = grid.where(i, Threads.of_lanes(late, grid.size))(0)
            raise Fault(f"not all of a cluster have arrived where they are waited for, {who}")
        grid.clock.met[threads.lanes] = grid.clock.arrived[threads.lanes]

    def times_met(self, lane: int) -> int:
        """How often a thread has waited for its cluster."""
        return int(self._met[lane])

    def block_of(self, lane: int, rank: int) -> int:
        """The rank-th block of a thread's cluster."""
        if not 0 <= rank < self.size:
            raise Fault(f"block {rank} of a cluster of {self.size}")
        return lane // self.threads // self.size * self.size + rank

    def require_empty(self) -> None:
        """A fault where what was sent was not waited for: its block may have ended before."""
        left = sum(len(box.words) for box in self.mailboxes.values())
        if left:
            raise Fault(f"an end before {left} words that were sent were waited for")


def barrier(i: Instruction, program: Program) -> Step:
    """barrier.cluster.arrive and barrier.cluster.wait."""
    if i.parts[2] == "arrive":
        orders = "relaxed" not in i.parts
        return Step(lambda grid, threads: grid.clusters.arrive(grid, threads, orders))
    return Step(lambda grid, threads: grid.clusters.wait(grid, i, threads))


def map_address(i: Instruction, program: Program) -> Step:
    """mapa: a place of shared memory in a block of the cluster."""
    put = writer(i.operands[0], program)
    at, rank = reader(i.operands[1], "u32", program), reader(i.operands[2], "u32", program)
    return Step(
        lambda grid, threads: put(grid, at(grid) + ((rank(grid) + np.uint32(1)) << RANK), threads)
    )


def send(i: Instruction, program: Program) -> Step:
    """st.async of a word, whose bytes an mbarrier of the same block counts."""
    if i.parts[-1] != "b32":
        raise Unmodelled(i.text)
    to, box = address(i.operands[0], program), address(i.operands[2], program)
    value = reader(i.operands[1], "b32", program)

    def run(grid: "Grid", threads: Threads) -> None:
        columns = (threads.of(x) for x in (to(grid), box(grid), value(grid)))
        for lane, there, counted, word in zip(threads.lanes, *columns, strict=True):
            one = Threads.of_lanes(np.array([lane]), grid.size)
            places = []
            for x in (int(there), int(counted)):
                block = grid.clusters.block_of(int(lane), (x >> RANK) - 1)
                owner = Threads.of_lanes(np.array([block * grid.threads]), grid.size)
                inside = np.full(1, x & ((1 << RANK) - 1), np.int64)
                places.append(int(grid.in_shared(np.repeat(inside, grid.size), owner)[0]))
            mailbox = grid.clusters.mailboxes.get(places[1])
            if mailbox is None or mailbox.born >= grid.clusters.times_met(int(lane)):
                raise Fault(f"a word is sent before its mbarrier is known, {grid.where(i, one)(0)}")
            mailbox.came += 4
            raw = np.array([[word]], np.uint32).view(np.uint8)
            mailbox.words.append((np.array(places[:1]), raw, block * grid.threads))

    return Step(run)


def mbarrier(i: Instruction, program: Program) -> Step:
    """mbarrier.init, .arrive.expect_tx and .try_wait.parity, of the first phase."""
    kind = i.parts[1]
    if kind == "init":
        where, count = address(i.operands[0], program), reader(i.operands[1], "u32", program)

        def init(grid: "Grid", threads: Threads) -> None:
            places = grid.in_shared(where(grid), threads)
            for lane, at, n in zip(threads.lanes, places, threads.of(count(grid)), strict=True):
                grid.clusters.mailboxes[int(at)] = _Mailbox(
                    int(n), grid.clusters.times_met(int(lane))
                )

        return Step(init)
    if kind == "arrive" and "expect_tx" in i.parts:
        place, size = address(i.operands[1], program), reader(i.operands[2], "u32", program)

        def arrive(grid: "Grid", threads: Threads) -> None:
            places = grid.in_shared(place(grid), threads)
            for at, n in zip(places, threads.of(size(grid)), strict=True):
                box = grid.clusters.mailboxes[int(at)]
                box.arrivals -= 1
                box.expected += int(n)

        return Step(arrive)
    if kind != "try_wait" or "parity" not in i.parts or i.operands[2] != "0":
        raise Unmodelled(i.text)
    put, there = writer(i.operands[0], program), address(i.operands[1], program)

    def wait(grid: "Grid", threads: Threads) -> None:
        places = grid.in_shared(there(grid), threads)
        for n, at in enumerate(places):
            box = grid.clusters.mailboxes.get(int(at))
            if box is None or not box.complete:
                raise Fault(f"a wait for words that nobody sends, {grid.where(i, threads)(n)}")
            words, box.words = box.words, []
            races, grid.shared.races = grid.shared.races, None
            for addresses, raw, owner in words:
                lanes = np.full(len(addresses), owner)
                grid.shared.store(addresses, raw, lanes, lambda _, n=n: grid.where(i, threads)(n))
            grid.shared.races = races
        put(grid, np.ones(grid.size, np.bool_), threads)

    return Step(wait)
