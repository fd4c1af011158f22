"""Accesses of two threads to one place, at least one of them a write, with nothing between them.

Within a block a barrier orders what was before it with what is after; within a warp
`bar.warp.sync` does too. A shuffle or an mma does not: it hands on registers, not memory. Blocks of
a cluster are ordered by barrier.cluster.arrive, unless it is relaxed, and .wait: what was before
the one with what is after the other. Nothing orders the other blocks of a grid. Writes of the same value by several threads are let pass, as
compute-sanitizer's racecheck lets them.
"""

from collections.abc import Callable

import numpy as np

from .faults import Fault
from .values import Array

WARP = 32
# How many threads read a place since the last order between them: more than one of a warp, more
# than one warp of a block, more than one block of a cluster, more than one cluster.
LANES, WARPS, BLOCKS, CLUSTERS = 1, 2, 3, 4


class Clock:
    """How often each block and each warp of a grid was ordered; races are told by it.

    arrived, met: how often a thread arrived at its cluster's barrier, and waited there.
    """

    def __init__(self, blocks: int, threads: int, cluster: int = 1):
        self.threads, self.together = threads, threads * cluster
        self.arrived = np.zeros(blocks * threads, np.int64)
        self.met = np.zeros(blocks * threads, np.int64)
        self.block = np.zeros(blocks, np.int64)
        self.warp = np.zeros(blocks * threads // WARP, np.int64)

    def now(self, lanes: Array) -> tuple[Array, Array]:
        """The block's and the warp's count of threads."""
        return self.block[lanes // self.threads], self.warp[lanes // WARP]

    def barrier(self, lanes: Array) -> None:
        """The blocks of these threads meet."""
        self.block[np.unique(lanes // self.threads)] += 1

    def warp_barrier(self, lanes: Array) -> None:
        """The warps of these threads meet."""
        self.warp[np.unique(lanes // WARP)] += 1


class _Log:
    """Of each place the last access: thread + 1, the counts then, and how many threads."""

    def __init__(self, places: int):
        self.thread = np.zeros(places, np.int32)
        self.block_count = np.zeros(places, np.int32)
        self.warp_count = np.zeros(places, np.int32)
        self.arrived = np.zeros(places, np.int32)
        self.several = np.zeros(places, np.int8)


class Races:
    """Watches a memory. unit: the bytes of the smallest access that is told apart."""

    def __init__(self, clock: Clock, bytes_watched: int, unit: int = 2):
        self.clock, self.unit = clock, unit
        self._written, self._read = _Log(bytes_watched // unit + 8), _Log(bytes_watched // unit + 8)

    def _unordered(self, log: _Log, at: Array, lanes: Array) -> Array:
        """Whether the logged access to a place and one now by `lanes` [n, 1] may happen at once."""
        block_now, warp_now = self.clock.now(lanes)
        before = log.thread[at].astype(np.int64) - 1
        several = log.several[at]
        same_block = before // self.clock.threads == lanes // self.clock.threads
        same_warp = before // WARP == lanes // WARP
        ordered = same_block & (several < BLOCKS) & (log.block_count[at] < block_now)
        ordered |= same_warp & (several < WARPS) & (log.warp_count[at] < warp_now)
        same_cluster = before // self.clock.together == lanes // self.clock.together
        met = log.arrived[at] < self.clock.met[lanes]
        ordered |= same_cluster & (several < CLUSTERS) & met
        ordered |= (before == lanes) & (several == 0)
        return (before >= 0) & ~ordered

    def read(self, at: Array, lanes: Array, where: Callable[[int], str]) -> None:
        """Threads `lanes` [n] read places `at` [n, k]; a negative place is not watched."""
        lanes = np.broadcast_to(lanes[:, None], at.shape)
        bad = self._unordered(self._written, at, lanes) & (at >= 0)
        if bad.any():
            row, column = np.unravel_index(int(bad.argmax()), bad.shape)
            writer = int(self._written.thread[at[row, column]]) - 1
            raise Fault(f"load {where(int(row))}: races with the store of {self._who(writer)}")
        if (at < 0).any():
            at, lanes = at[at >= 0], lanes[at >= 0]
        self._log_read(at, lanes)

    def _log_read(self, at: Array, lanes: Array) -> None:
        log = self._read
        # who read it before, unless something orders that read with this one
        before = np.where(self._unordered(log, at, lanes), log.thread[at].astype(np.int64) - 1, -1)
        several = np.where(before >= 0, log.several[at], 0)
        several = np.maximum(several, self._apart(before, lanes))
        log.thread[at] = lanes + 1
        # and who reads it now besides
        several = np.maximum(several, self._apart(log.thread[at].astype(np.int64) - 1, lanes))
        log.block_count[at], log.warp_count[at] = self.clock.now(lanes)
        log.arrived[at] = self.clock.arrived[lanes]
        log.several[at] = 0
        for much in (LANES, WARPS, BLOCKS, CLUSTERS):
            log.several[at[several == much]] = much

    def _apart(self, one: Array, other: Array) -> Array:
        """How far two threads are apart, where there are two."""
        far = np.where(one // WARP == other // WARP, LANES, WARPS)
        far = np.where(one // self.clock.threads == other // self.clock.threads, far, BLOCKS)
        far = np.where(one // self.clock.together == other // self.clock.together, far, CLUSTERS)
        return np.where((one < 0) | (one == other), 0, far)

    def write(self, at: Array, lanes: Array, changed: Array, where: Callable[[int], str]) -> None:
        """Threads `lanes` [n] write places `at` [n, k]; changed: where the bytes were others."""
        lanes = np.broadcast_to(lanes[:, None], at.shape)
        bad = self._unordered(self._written, at, lanes) & changed[:, None] & (at >= 0)
        if bad.any():
            row, column = np.unravel_index(int(bad.argmax()), bad.shape)
            other = int(self._written.thread[at[row, column]]) - 1
            raise Fault(f"store {where(int(row))}: races with the store of {self._who(other)}")
        bad = self._unordered(self._read, at, lanes) & changed[:, None] & (at >= 0)
        if bad.any():
            row, column = np.unravel_index(int(bad.argmax()), bad.shape)
            other = int(self._read.thread[at[row, column]]) - 1
            raise Fault(f"store {where(int(row))}: races with the load of {self._who(other)}")
        if (at < 0).any():
            at, lanes = at[at >= 0], lanes[at >= 0]
        log = self._written
        log.thread[at] = lanes + 1
        log.block_count[at], log.warp_count[at] = self.clock.now(lanes)
        log.arrived[at] = self.clock.arrived[lanes]

    def _who(self, lane: int) -> str:
        return f"block {lane // self.clock.threads}, thread {lane % self.clock.threads}"
