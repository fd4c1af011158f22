"""From an instruction to what it does to a grid: a table of names, looked up once a program.

Branches, barriers and ends are the grid's own; arithmetic has tables of its own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from . import accesses, clusters, copies, dependent, warps
from .arithmetic import comparison, computation
from .faults import Unmodelled
from .operands import Step, names, reader, writer
from .program import Instruction, Program
from .threads import Threads
from .values import TYPES, UNSIGNED, size

if TYPE_CHECKING:
    from .grid import Grid


def _store(i: Instruction, program: Program) -> Step:
    return clusters.send(i, program) if "async" in i.parts else accesses.store(i, program)


def _barrier(i: Instruction, program: Program) -> Step:
    return clusters.barrier(i, program) if "cluster" in i.parts else _control(i, program)


def _nothing(i: Instruction, program: Program) -> Step:
    """What changes no value here: hints and fences."""
    return Step(lambda grid, threads: None)


def _control(i: Instruction, program: Program) -> Step:
    def misplaced(grid: "Grid", threads: Threads) -> None:
        raise Unmodelled(i.text)

    return Step(misplaced)


def move(i: Instruction, program: Program) -> Step:
    """mov and cvta; of two halves to a register, and of a register to two halves."""
    into, source = i.operands
    kind = i.parts[-1]
    if source.startswith("{"):
        return _pack(kind, names(source), into, program)
    if into.startswith("{"):
        return _unpack(kind, source, names(into), program)
    put, get = writer(into, program), reader(source, kind, program)
    return Step(lambda grid, threads: put(grid, get(grid), threads))


def _pack(kind: str, parts: list[str], into: str, program: Program) -> Step:
    half = f"b{8 * size(kind) // len(parts)}"
    sources, put = [reader(x, half, program) for x in parts], writer(into, program)

    def run(grid: "Grid", threads: Threads) -> None:
        x = [get(grid) for get in sources]
        out = np.stack(np.broadcast_arrays(*x), -1)
        put(grid, out.view(UNSIGNED[size(kind)])[..., 0], threads)

    return Step(run)


def _unpack(kind: str, source: str, parts: list[str], program: Program) -> Step:
    bytes_each = size(kind) // len(parts)
    get, into = reader(source, kind, program), [writer(x, program) for x in parts]

    def run(grid: "Grid", threads: Threads) -> None:
        x = np.ascontiguousarray(get(grid)).view(UNSIGNED[bytes_each]).reshape(-1, len(parts))
        for n, put in enumerate(into):
            put(grid, np.ascontiguousarray(x[:, n]), threads)

    return Step(run)


def compare(i: Instruction, program: Program) -> Step:
    """setp, with or without a predicate that its result meets."""
    kind, f, join = comparison(i)
    into, _, other = i.operands[0].partition("|")
    if other:
        raise Unmodelled(i.text)
    put = writer(into, program)
    a, b = (reader(x, kind, program) for x in i.operands[1:3])
    if join is None:
        return Step(lambda grid, threads: put(grid, f(a(grid), b(grid)), threads))
    c = reader(i.operands[3], "pred", program)
    return Step(lambda grid, threads: put(grid, join(f(a(grid), b(grid)), c(grid)), threads))


def select(i: Instruction, program: Program) -> Step:
    """selp."""
    kind = i.parts[-1]
    put, p = writer(i.operands[0], program), reader(i.operands[3], "pred", program)
    a, b = (reader(x, kind, program) for x in i.operands[1:3])
    return Step(lambda grid, threads: put(grid, np.where(p(grid), a(grid), b(grid)), threads))


def compute(i: Instruction, program: Program) -> Step:
    """What `arithmetic` has."""
    found = computation(i)
    if found is None:
        raise Unmodelled(f"line {i.line}: {i.text}")
    result, kinds, f = found
    put = writer(i.operands[0], program)
    sources = [reader(x, k, program) for x, k in zip(i.operands[1:], kinds, strict=True)]

    def run(grid: "Grid", threads: Threads) -> None:
        value = f(*(get(grid) for get in sources))
        put(grid, value.astype(TYPES[result], copy=False), threads)

    return Step(run)


Build = Callable[[Instruction, Program], Step]
TABLE: dict[str, Build] = {
    "bra": _control,
    "ret": _control,
    "exit": _control,
    "bar": _control,
    "barrier": _barrier,
    "mov": move,
    "cvta": move,
    "setp": compare,
    "selp": select,
    "ld": accesses.load,
    "st": _store,
    "mapa": clusters.map_address,
    "mbarrier": clusters.mbarrier,
    "cp": copies.copy,
    "shfl": warps.shuffle,
    "vote": warps.vote,
    "mma": warps.multiply,
    "movmatrix": warps.turn,
    "ldmatrix": warps.load_matrices,
    "stmatrix": warps.store_matrices,
    "prefetch": copies.prefetch,
    "griddepcontrol": dependent.control,
    "membar": _nothing,
    "fence": _nothing,
    "nanosleep": _nothing,
}


def step(i: Instruction, program: Program) -> Step:
    """What an instruction does; Unmodelled where nothing here knows it."""
    build = TABLE.get(i.parts[0], compute)
    if i.parts[0] == "mov" and i.parts[-1] == "pred":
        build = compute
    return build(i, program)
