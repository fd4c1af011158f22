"""What the threads of a warp do together: shuffles, votes, and the tensor cores' products.

A product of mma is exact and its sum is rounded once; a tensor core keeps fewer bits of the terms
that it adds, and in an order of its own.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from .faults import Unmodelled
from .operands import Step, address, names, reader, writer
from .program import Instruction, Program
from .races import WARP
from .threads import Threads
from .values import Array, from_bf16, from_fp16, halves, joined

if TYPE_CHECKING:
    from .grid import Grid

EVERYONE = ("-1", "0xffffffff", "0xFFFFFFFF", "4294967295")


def _require_everyone(i: Instruction, mask: str) -> None:
    if mask not in EVERYONE:
        raise Unmodelled(f"{i.text}: expected the mask of a whole warp, -1")


def _by_warp(x: Array, grid: "Grid", threads: Threads) -> Array:
    """[warps, 32] of a register, for the warps that are here."""
    return np.broadcast_to(x, (grid.size,)).reshape(-1, WARP)[threads.warps]


def _over_all(x: Array, grid: "Grid", threads: Threads) -> Array:
    """[warps, 32] of the warps that are here, as an array over all threads."""
    if threads.everyone:
        return np.ascontiguousarray(x).reshape(-1)
    out = np.zeros((grid.size // WARP, WARP), x.dtype)
    out[threads.warps] = x
    return out.reshape(-1)


def _source_lane(mode: str, lane: Array, b: Array, c: Array) -> tuple[Array, Array]:
    """The lane that a shuffle reads, and whether it lies within the thread's segment."""
    clamp, segment = c & 31, (c >> 8) & 31
    last, first = (lane & segment) | (clamp & ~segment), lane & segment
    if mode == "up":
        source = lane - b
        return source, source >= last
    source = {"down": lane + b, "bfly": lane ^ b, "idx": first | (b & ~segment & 31)}[mode]
    return source, source <= last


def shuffle(i: Instruction, program: Program) -> Step:
    """shfl.sync."""
    if i.parts[1] != "sync":
        raise Unmodelled(i.text)
    _require_everyone(i, i.operands[4])
    into, _, inside_into = i.operands[0].partition("|")
    put = writer(into, program)
    put_inside = writer(inside_into, program) if inside_into else None
    value, by, limits = (reader(i.operands[n], "b32", program) for n in (1, 2, 3))
    lane = np.arange(WARP, dtype=np.int64)

    def run(grid: "Grid", threads: Threads) -> None:
        x = _by_warp(value(grid), grid, threads)
        b = _by_warp(by(grid), grid, threads).astype(np.int64) & 31
        c = _by_warp(limits(grid), grid, threads).astype(np.int64)
        source, inside = _source_lane(i.parts[2], lane, b, c)
        got = np.take_along_axis(x, np.where(inside, source, lane), 1)
        put(grid, _over_all(got, grid, threads), threads)
        if put_inside is not None:
            put_inside(grid, _over_all(inside, grid, threads), threads)

    return Step(run, whole_warps=True)


def vote(i: Instruction, program: Program) -> Step:
    """vote.sync."""
    _require_everyone(i, i.operands[2])
    put, said = writer(i.operands[0], program), reader(i.operands[1], "pred", program)
    how = i.parts[2]
    bit = np.uint32(1) << np.arange(WARP, dtype=np.uint32)

    def run(grid: "Grid", threads: Threads) -> None:
        x = _by_warp(said(grid), grid, threads)
        if how == "ballot":
            one = (x * bit).sum(1, dtype=np.uint32)
        else:
            one = {"any": x.any(1), "all": x.all(1), "uni": x.all(1) | ~x.any(1)}[how]
        put(grid, _over_all(np.repeat(one[:, None], WARP, 1), grid, threads), threads)

    return Step(run, whole_warps=True)


def _matrix(registers: list[Array], across: int) -> Array:
    """[warps, rows, columns] of 16-bit elements from mma's A or C order: registers go down the
    rows first, `across` of them along the columns.
    """
    pairs = np.stack([np.stack(halves(r), -1) for r in registers], 1)
    n, warps = len(registers), len(pairs)
    # register (column block, row block), then lane (row, place), then the half
    parts = pairs.reshape(warps, across, n // across, 8, 4, 2)
    return parts.transpose(0, 2, 3, 1, 4, 5).reshape(warps, 8 * n // across, 8 * across)


def _words(registers: list[Array], across: int) -> Array:
    """The same of 32-bit elements: one a register, and four a row of a lane's eight by four."""
    x = np.stack(registers, 1)
    n, warps = len(registers), len(x)
    parts = x.reshape(warps, across, n // across, 8, 4)
    return parts.transpose(0, 2, 3, 1, 4).reshape(warps, 8 * n // across, 4 * across)


def _as_tf32(x: Array) -> Array:
    """What a tensor core reads of a word as TF32: all but its 13 low bits, which are cut off."""
    return (x & np.uint32(0xFFFFE000)).view(np.float32)


def multiply(i: Instruction, program: Program) -> Step:
    """mma.sync with fp32 sums: of 16-bit floats m16n8k16 and m16n8k8, of TF32 m16n8k8."""
    shape, kinds = i.parts[3], i.parts[-4:]
    if kinds == ("f32", "tf32", "tf32", "f32"):
        if shape != "m16n8k8":
            raise Unmodelled(i.text)
        return _product(i, program, lambda x: _as_tf32(_words(x, 2)))
    known = shape in ("m16n8k16", "m16n8k8") and kinds[0] == kinds[3] == "f32"
    widen = {"bf16": from_bf16, "f16": from_fp16}.get(kinds[1])
    if not known or widen is None or kinds[1] != kinds[2]:
        raise Unmodelled(i.text)
    across = 2 if shape == "m16n8k16" else 1
    return _product(i, program, lambda x: widen(_matrix(x, across)))


def _product(i: Instruction, program: Program, matrix: Callable[[list[Array]], Array]) -> Step:
    """An mma whose operands' registers are such matrices."""
    into = [writer(x, program) for x in names(i.operands[0])]
    a, b = ([reader(x, "b32", program) for x in names(o)] for o in i.operands[1:3])
    c = [reader(x, "f32", program) for x in names(i.operands[3])]

    def run(grid: "Grid", threads: Threads) -> None:
        A, B = (
            matrix([_by_warp(get(grid), grid, threads) for get in x]).astype(np.float64)
            for x in (a, b)
        )
        # B is given by its columns
        product = A @ B.transpose(0, 2, 1)
        # lane (row, place) has columns 2 place and 2 place + 1 of rows g and g + 8
        blocks = product.reshape(-1, 2, 8, 4, 2).transpose(0, 1, 4, 2, 3)
        for n, put in enumerate(into):
            start = _by_warp(c[n](grid), grid, threads)
            total = start + blocks[:, n // 2, n % 2].reshape(-1, WARP)
            put(grid, _over_all(total.astype(np.float32), grid, threads), threads)

    return Step(run, whole_warps=True)


def _turned(x: Array) -> Array:
    """The registers [warps, 32] of a transposed 8 x 8 matrix of 16-bit elements."""
    rows = np.stack(halves(x), -1).reshape(-1, 8, 8).transpose(0, 2, 1).reshape(-1, WARP, 2)
    return joined(rows[..., 0], rows[..., 1])


def turn(i: Instruction, program: Program) -> Step:
    """movmatrix: an 8 x 8 matrix, transposed."""
    put, get = writer(i.operands[0], program), reader(i.operands[1], "b32", program)

    def run(grid: "Grid", threads: Threads) -> None:
        x = _turned(_by_warp(get(grid), grid, threads))
        put(grid, _over_all(x, grid, threads), threads)

    return Step(run, whole_warps=True)


def _rows_of(threads: Threads, count: int) -> Array:
    """The threads, [warps * 8 count], whose addresses say where a warp's matrices have their rows."""
    return (threads.warps[:, None] * WARP + np.arange(8 * count)).reshape(-1)


def _check_matrices(i: Instruction) -> int:
    """How many 8 x 8 matrices an ldmatrix or stmatrix moves."""
    if "m8n8" not in i.parts or i.parts[-1] != "b16":
        raise Unmodelled(i.text)
    return int(next(p for p in i.parts if p in ("x1", "x2", "x4"))[1])


def load_matrices(i: Instruction, program: Program) -> Step:
    """ldmatrix: thread 8 j + r of a warp says where row r of the j-th matrix lies."""
    count, turned = _check_matrices(i), "trans" in i.parts
    into = [writer(x, program) for x in names(i.operands[0])]
    where = address(i.operands[1], program)

    def run(grid: "Grid", threads: Threads) -> None:
        givers = Threads.of_lanes(_rows_of(threads, count), grid.size)
        at = grid.in_shared(where(grid), givers)
        raw = grid.shared.load(at, 16, givers.lanes, grid.where(i, givers))
        words = raw.view(np.uint32).reshape(-1, count, WARP)
        for n, put in enumerate(into):
            x = _turned(words[:, n]) if turned else words[:, n]
            put(grid, _over_all(x, grid, threads), threads)

    return Step(run, whole_warps=True)


def store_matrices(i: Instruction, program: Program) -> Step:
    """stmatrix, the way back."""
    count, turned = _check_matrices(i), "trans" in i.parts
    sources = [reader(x, "b32", program) for x in names(i.operands[1])]
    where = address(i.operands[0], program)

    def run(grid: "Grid", threads: Threads) -> None:
        givers = Threads.of_lanes(_rows_of(threads, count), grid.size)
        words = [_by_warp(get(grid), grid, threads) for get in sources]
        words = [_turned(w) if turned else w for w in words]
        raw = np.stack(words, 1).reshape(-1, 4).view(np.uint8)
        at = grid.in_shared(where(grid), givers)
        grid.shared.store(at, raw, givers.lanes, grid.where(i, givers))

    return Step(run, whole_warps=True)
