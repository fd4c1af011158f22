"""Loads and stores: parameters, global and shared memory."""

from typing import TYPE_CHECKING

import numpy as np

from .faults import Unmodelled
from .memory import Memory
from .operands import Step, address, names, reader, writer
from .program import Instruction, Program
from .threads import Threads
from .values import TYPES, UNSIGNED, Array, size

if TYPE_CHECKING:
    from .grid import Grid

# Where it is, how many there are, how a cache may treat it: nothing else is modelled.
_HINTS = {
    *("global", "shared", "shared_cta", "v2", "v4", "v8", "nc", "volatile", "relaxed", "weak"),
    *("cta", "gpu", "sys", "ca", "cg", "cs", "lu", "cv", "wb", "wt"),
    *("L1_no_allocate", "L1_evict_first", "L1_evict_last", "L1_evict_normal", "L2_evict_first"),
    *("L1_evict_unchanged", "L2_64B", "L2_128B", "L2_256B", "L2_evict_last", "L2_evict_normal"),
    *("L2_cache_hint",),
}


def _check_hints(i: Instruction) -> None:
    if unknown := set(i.parts[1:-1]) - _HINTS:
        raise Unmodelled(f"{i.text}: {sorted(unknown)}")


def _place(i: Instruction, grid: "Grid", threads: Threads, at: Array) -> tuple[Memory, Array]:
    """The memory that an instruction names, and its threads' addresses there."""
    if any(p.startswith("shared") for p in i.parts):
        return grid.shared, grid.in_shared(at, threads)
    return grid.memory, threads.of(at)


def load(i: Instruction, program: Program) -> Step:
    """ld.param, ld.global, ld.shared."""
    if i.parts[1] == "param":
        return _parameter(i, program)
    _check_hints(i)
    kind = i.parts[-1]
    into = [writer(x, program) for x in names(i.operands[0])]
    where = address(i.operands[1], program)
    width = size(kind) * len(into)

    def run(grid: "Grid", threads: Threads) -> None:
        memory, at = _place(i, grid, threads, where(grid))
        grid.ahead.require_load(i, grid, threads, memory, at)
        raw = memory.load(at, width, threads.lanes, grid.where(i, threads))
        values = raw.view(TYPES[kind])
        for n, put in enumerate(into):
            put(grid, threads.over_all(values[:, n]), threads)

    return Step(run)


def _parameter(i: Instruction, program: Program) -> Step:
    """The same for all threads."""
    kind = i.parts[-1]
    name, _, offset = i.operands[1].strip("[]").partition("+")
    into = [writer(x, program) for x in names(i.operands[0])]

    def run(grid: "Grid", threads: Threads) -> None:
        first = int(offset or "0")
        for n, put in enumerate(into):
            at = first + n * size(kind)
            put(grid, np.frombuffer(grid.parameters[name], TYPES[kind], 1, at), threads)

    return Step(run)


def store(i: Instruction, program: Program) -> Step:
    """st.global, st.shared."""
    _check_hints(i)
    kind = i.parts[-1]
    sources = [reader(x, kind, program) for x in names(i.operands[1])]
    where = address(i.operands[0], program)

    def run(grid: "Grid", threads: Threads) -> None:
        memory, at = _place(i, grid, threads, where(grid))
        if memory is grid.memory:
            grid.ahead.require(i, grid, threads, "a store")
        columns = [threads.of(get(grid)).view(UNSIGNED[size(kind)]) for get in sources]
        values = np.stack(columns, 1).view(np.uint8)
        memory.store(at, values, threads.lanes, grid.where(i, threads))

    return Step(run)
