"""What tensor-core kernels share: mma operands as views of registers, matrices from shared memory, bf16 terms.

Lanes of a warp, in mma's terms: g = lane / 4 is a row of an operand, c = lane % 4 a place along it.
"""

import dataclasses
from typing import Any

import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32
from cutlass.cute.nvgpu import warp

F32, BF = Float32, BFloat16
LANES = 32


@dataclasses.dataclass(frozen=True)
class Thread:
    """A thread's place: in its block, in its warp, in an operand."""

    tid: Any
    warp: Any
    lane: Any
    g: Any
    c: Any

    @classmethod
    def here(cls) -> "Thread":
        tid, _, _ = cute.arch.thread_idx()
        lane = tid % LANES
        return cls(tid, tid // LANES, lane, lane // 4, lane % 4)


def mma(acc, a, b, depth: int = 16) -> None:
    """acc += a b: 16 rows, 8 columns, `depth` products of bf16 a place."""
    atom = cute.make_mma_atom(warp.MmaF16BF16Op(BF, F32, (16, 8, depth)))
    cute.mma_atom_call(atom, acc, a, b, acc)


def view(x, offset, shape, stride):
    """Registers from `offset` on under a layout of their own."""
    return cute.make_tensor(x.iterator + offset, cute.make_layout(shape, stride=stride))


def operand_a(x, offset=0, depth: int = 16):
    """A's registers of one product: two along the contraction for row g, then for row g + 8, then the next two of each."""
    if depth == 8:
        return view(x, offset, ((2, 2),), ((1, 2),))
    return view(x, offset, ((2, 2, 2),), ((1, 2, 4),))


def operand_b(x, offset=0, depth: int = 16):
    """B's registers of one product, for column g."""
    if depth == 8:
        return view(x, offset, ((2,),), ((1,),))
    return view(x, offset, ((2, 2),), ((1, 2),))


def accumulator(x, offset=0):
    """Rows g and g + 8, columns 2c and 2c + 1."""
    return view(x, offset, ((2, 2),), ((1, 2),))


def pair(x, offset=0):
    """Two neighbours in registers: as one word they stay one register, taken singly they become two."""
    return cute.make_tensor(x.iterator + offset, cute.make_layout((2,)))


def registers(n: int, dtype=F32, value=None):
    """n registers' worth of elements."""
    x = cute.make_rmem_tensor((n,), dtype)
    if value is not None:
        x.fill(value)
    return x


def read_matrices(
    source, place, x, offset: int = 0, count: int = 4, transpose: bool = False
) -> None:
    """`count` 8 x 8 matrices of bf16 into x[offset:]; lane 8 i + j names row j of matrix i by its place in `source`."""
    atom = cute.make_copy_atom(warp.LdMatrix8x8x16bOp(transpose, count), BF)
    rows = cute.make_tensor(source.iterator + cute.assume(place, divby=8), cute.make_layout((8,)))
    cute.copy_atom_call(atom, rows, view(x, offset, (2 * count,), (1,)))


def wide(narrow, n: int):
    """n elements of 16 or 32 bits as fp32; of bf16 one instruction each."""
    out = registers(n)
    if narrow.element_type is not BF:
        out.store(cute.make_tensor(narrow.iterator, cute.make_layout((n,))).load().to(F32))
        return out
    words = cute.recast_tensor(cute.make_tensor(narrow.iterator, cute.make_layout((n,))), Int32)
    bits = cute.recast_tensor(out, Int32)
    for i in range(n // 2):
        bits[2 * i] = words[i] << 16
        bits[2 * i + 1] = words[i] & -65536
    return out


def split(both):
    """Two fp32 rounded to a word of bf16; what is left stays in `both`."""
    word = registers(2, BF)
    word.store(both.load().to(BF))
    y = wide(word, 2)
    both[0] = both[0] - y[0]
    both[1] = both[1] - y[1]
    return word


def terms_of(pairs: list, count: int) -> list:
    """Pairs of fp32 as `count` operands of bf16 that add up to them, side by side in registers; what is left stays in the pairs."""
    found = []
    for _ in range(count):
        x = registers(2 * len(pairs), BF)
        for n, both in enumerate(pairs):
            cute.autovec_copy(split(both), pair(x, 2 * n))
        found.append(x)
    return found
