"""A grid of thread blocks that runs a program: registers, branches, barriers.

All threads of all blocks go together, an instruction at a time. Where they part, those that stand
lowest in the program go first, and stop where others wait, so that they meet again behind a branch
or a loop. What a whole warp must take together waits until the warp is there.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from . import instructions
from .clusters import Clusters
from .copies import Copies, Stores
from .dependent import Ahead
from .faults import Fault, Unmodelled
from .memory import Global, Shared
from .program import SHARED_BASE, Instruction, Program
from .races import WARP, Clock, Races
from .threads import Threads
from .values import Array, poison

# A loop that is far beyond any kernel's.
LIMIT = 200_000


@dataclass(frozen=True)
class Launch:
    """What a kernel is launched with: blocks and threads along x, y and z, bytes of dynamic shared
    memory, each parameter's bytes, the blocks of a cluster, and whether it may start before the
    kernel ahead ends.
    """

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared_bytes: int
    parameters: tuple[bytes, ...]
    cluster: int = 1
    dependent: bool = False


class Grid:
    """One launch. registers: name to array, [threads of all blocks] or [1] where all are equal."""

    def __init__(self, program: Program, launch: Launch, memory: Global):
        self.program, self.memory = program, memory
        self.blocks, self.threads = int(np.prod(launch.grid)), int(np.prod(launch.block))
        if self.threads % WARP:
            raise Unmodelled(f"{self.threads} threads a block: expected a multiple of {WARP}")
        self.parameters = {
            p.name: raw for p, raw in zip(program.parameters, launch.parameters, strict=True)
        }
        self.registers: dict[str, Array] = {}
        self.special = _special(launch, self.blocks, self.threads)
        self.size = self.blocks * self.threads
        self.clock = Clock(self.blocks, self.threads, launch.cluster)
        shared = program.static_shared + launch.shared_bytes
        self.shared = Shared(SHARED_BASE, shared, self.blocks)
        self.shared.races = Races(self.clock, self.shared.bytes.size)
        self._shared_of = np.arange(self.size) // self.threads * self.shared.block_bytes
        memory.races = Races(self.clock, memory.bytes.size - memory.watched)
        self.copies = Copies(self.size)
        self.stores = Stores(self.size)
        self.clusters = Clusters(launch.cluster, self.blocks, self.threads)
        self.ahead = Ahead(self.size, launch.dependent)
        self._steps = [instructions.step(i, program) for i in program.instructions]
        self._ready: dict[int, Array] = {}
        self._torn: dict[int, Array] = {}
        self._waiting: dict[int, Array] = {}
        # of barriers but 0, by number: threads of each block that came, and those that wait
        self._came: dict[int, Array] = {}
        self._named: dict[tuple[int, int], Array] = {}
        self.executed = 0

    def read(self, name: str) -> Array:
        """A register."""
        if name not in self.registers:
            self.registers[name] = poison(self.program.register_type(name))
        return self.registers[name]

    def write(self, name: str, value: Array, threads: Threads) -> None:
        """Sets a register of some threads; value [threads of all blocks] or [1]."""
        if not threads.everyone:
            value = np.where(threads.mask, value, self.read(name))
        self.registers[name] = value

    def in_shared(self, at: Array, threads: Threads) -> Array:
        """Some threads' addresses in their blocks' shared memory, as addresses in all of it."""
        at = threads.of(at)
        inside = (at >= SHARED_BASE) & (at < SHARED_BASE + self.shared.size)
        # an address that is in no block's must not reach the next one's
        return np.where(inside, at + threads.of(self._shared_of), 0)

    def where(self, i: Instruction, threads: Threads) -> Callable[[int], str]:
        """Names the n-th of these threads, and the instruction that it is at."""

        def named(n: int) -> str:
            lane = int(threads.lanes[n])
            x, y, z = (int(self.special[f"%ctaid.{d}"][lane]) for d in "xyz")
            return f"by block ({x}, {y}, {z}), thread {lane % self.threads}, at line {i.line}: {i.text}"

        return named

    def run(self) -> None:
        """Runs it to its end."""
        everyone = np.ones(self.size, np.bool_)
        self._ready = {0: everyone}
        with np.errstate(all="ignore"):
            while self._ready or self._release():
                start = min(self._ready)
                self._straight(start, self._ready.pop(start))
        self.clusters.require_empty()

    def _straight(self, at: int, mask: Array) -> None:
        """Runs some threads from an instruction on, until they part, wait, end or meet others."""
        threads = Threads(mask)
        stop = min(self._ready, default=len(self._steps))
        while at < stop:
            i, step = self.program.instructions[at], self._steps[at]
            self.executed += 1
            if self.executed > LIMIT:
                raise Fault(f"no end after {LIMIT} instructions, at line {i.line}: {i.text}")
            if at in self._torn:
                threads = Threads(threads.mask | self._torn.pop(at))
            taking = threads
            if i.guard is not None:
                taking = threads.where(self.read(i.guard), i.negated)
            if i.parts[0] in _CONTROL and i.parts[1:2] != ("cluster",):
                _CONTROL[i.parts[0]](self, at, i, threads, taking)
                return
            if step.whole_warps and taking.torn.any():
                self._torn[at] = taking.torn
                threads = Threads(threads.mask & ~taking.torn)
                taking = Threads(taking.mask & ~self._torn[at])
                if not threads.any():
                    return
            if taking.any():
                step.run(self, taking)
            at += 1
        if at < len(self._steps):
            self.go(at, threads.mask)

    def go(self, at: int, mask: Array) -> None:
        """Lets threads go on from an instruction, with those that are there."""
        if mask.any():
            self._ready[at] = self._ready[at] | mask if at in self._ready else mask

    def wait(self, at: int, mask: Array) -> None:
        """Lets threads wait at a barrier; they go on from an instruction."""
        self._waiting[at] = self._waiting[at] | mask if at in self._waiting else mask

    def meet(self, number: int, count: int, at: int, mask: Array, i: Instruction) -> None:
        """Threads come to a barrier of `count` threads of their block, and wait there to go on from
        an instruction; at < 0: they do not wait. It puts nothing in order: a kernel that needs more
        than that others have come is told so by the races.
        """
        came = self._came.setdefault(number, np.zeros(self.blocks, np.int64))
        came += mask.reshape(self.blocks, -1).sum(1)
        if (came > count).any():
            raise Fault(
                f"more than {count} threads of a block come to barrier {number}, line {i.line}"
            )
        if at >= 0:
            key = (at, number)
            self._named[key] = self._named[key] | mask if key in self._named else mask
        whole = np.repeat(came == count, self.threads)
        came[came == count] = 0
        for key, waiting in list(self._named.items()):
            if key[1] == number:
                self.go(key[0], waiting & whole)
                self._named[key] = waiting & ~whole

    def _release(self) -> bool:
        """Lets the blocks go on that are whole at a barrier; whether any does. A fault where threads
        wait and none can.
        """
        if not self._waiting and not self._torn:
            for (_, number), mask in self._named.items():
                if mask.any():
                    raise Fault(f"threads wait at barrier {number}, and no others come")
            return False
        nobody = np.zeros(self.size, np.bool_)
        torn = np.logical_or.reduce([nobody, *self._torn.values()])
        blocks = torn.reshape(self.blocks, -1).any(1)
        waiting, self._waiting = self._waiting, {}
        for at, mask in waiting.items():
            free = mask & ~np.repeat(blocks, self.threads)
            # the threads of a block must wait at one and the same barrier
            others = [m for a, m in waiting.items() if a != at]
            elsewhere = np.logical_or.reduce([nobody, *others]).reshape(self.blocks, -1).any(1)
            if (elsewhere & free.reshape(self.blocks, -1).any(1)).any():
                where = ", ".join(str(self.program.instructions[a - 1].line) for a in waiting)
                raise Fault(f"threads of one block wait at different barriers, lines {where}")
            if free.any():
                self.clock.barrier(np.flatnonzero(free))
                self.go(at, free)
            if (mask & ~free).any():
                self._waiting[at] = mask & ~free
        if self._ready:
            return True
        at, mask = next(iter(self._torn.items()))
        i = self.program.instructions[at]
        raise Fault(f"a part of a warp alone, {self.where(i, Threads(mask))(0)}")


def _special(launch: Launch, blocks: int, threads: int) -> dict[str, Array]:
    """The registers that say where a thread is."""
    lane = np.arange(blocks * threads, dtype=np.uint32)
    found = {"%laneid": lane % np.uint32(WARP)}
    for name, count, start in (
        ("tid", launch.block, lane % np.uint32(threads)),
        ("ctaid", launch.grid, lane // np.uint32(threads)),
    ):
        sizes = "ntid" if name == "tid" else "nctaid"
        for d, n in zip("xyz", count, strict=True):
            found[f"%{name}.{d}"] = start % np.uint32(n)
            found[f"%{sizes}.{d}"] = np.full(1, n, np.uint32)
            start = start // np.uint32(n)
    return found


def _branch(grid: Grid, at: int, i: Instruction, threads: Threads, taking: Threads) -> None:
    grid.go(grid.program.labels[i.operands[-1]], taking.mask)
    grid.go(at + 1, threads.mask & ~taking.mask)


def _end(grid: Grid, at: int, i: Instruction, threads: Threads, taking: Threads) -> None:
    grid.copies.require_none(grid, i, taking)
    grid.stores.require_none(grid, i, taking)
    grid.ahead.require(i, grid, taking, "an end")
    grid.go(at + 1, threads.mask & ~taking.mask)


def _barrier(grid: Grid, at: int, i: Instruction, threads: Threads, taking: Threads) -> None:
    kind = [p for p in i.parts[1:] if p not in ("cta", "aligned")]
    if i.parts[1] == "warp":
        _warp_barrier(grid, at, i, threads, taking)
        return
    if len(i.operands) == 2 and i.operands[0] != "0" and kind in (["sync"], ["arrive"]):
        number, count = map(int, i.operands)
        grid.go(at + 1, threads.mask & ~taking.mask)
        if kind == ["arrive"]:
            grid.go(at + 1, taking.mask)
        grid.meet(number, count, at + 1 if kind == ["sync"] else -1, taking.mask, i)
        return
    if kind != ["sync"] or i.operands not in (("0",), ()):
        raise Unmodelled(f"{i.text}: expected barrier 0 of the whole block, or one of some threads")
    grid.go(at + 1, threads.mask & ~taking.mask)
    if taking.any():
        grid.wait(at + 1, taking.mask)


def _warp_barrier(grid: Grid, at: int, i: Instruction, threads: Threads, taking: Threads) -> None:
    torn = taking.torn
    if torn.any():
        grid._torn[at] = torn
    whole = Threads(taking.mask & ~torn)
    if whole.any():
        grid.clock.warp_barrier(whole.lanes)
    grid.go(at + 1, threads.mask & ~torn)


_CONTROL: dict[str, Callable[[Grid, int, Instruction, Threads, Threads], None]] = {
    "bra": _branch,
    "ret": _end,
    "exit": _end,
    "bar": _barrier,
    "barrier": _barrier,
}


def run(program: Program, launch: Launch, memory: Global) -> Grid:
    """Runs a launch on memory; gives the grid as it was at the end."""
    grid = Grid(program, launch, memory)
    grid.run()
    return grid
