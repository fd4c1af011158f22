"""The final state, as `wy_block` computes it: u as bf16 terms in a warp's shared memory, and its
products with the keys.

    S_T = D_T S0 + sum_i F[T, i] u_i k_i^T

Two octets of rows by eight keys at a time, in place of S0 in registers.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from gdntune.kernels import fragments as fr
from gdntune.kernels.wy_block_copied import each_read
from gdntune.kernels.wy_block_rows import BlockRows
from gdntune.kernels.wy_block_tf32 import WIDTH_OF_U
from gdntune.kernels.wy_operands import SPAN_DECAYS, Operands

F32, BF = Float32, BFloat16
# of four tokens in three terms, the first twice: 16 elements, and what makes an odd number of 16 bytes
PACKED_STRIDE = 24


def third_stride(N: int) -> int:
    """A row of u in three terms."""
    return 3 * N + 8 + (8 if (3 * N + 8) // 8 % 2 == 0 else 0)


@dataclasses.dataclass(frozen=True)
class Rows:
    """A warp's shared memory: v [tokens, rows * passes] as it came, then outputs; projections p [rows, 2N + 4] fp32; u [rows, .] bf16, its
    terms for the final state.
    """

    v: Any
    p: Any
    u: Any


class BlockFinal(BlockRows):
    """What a warp does with its rows once u is known."""

    def rows_memory(self, smem, o: Operands, warp, dtype) -> Rows:
        """A warp's own shared memory; warps without rows are given the last one's. p and u lie where operands were, if they have room
        there: what a block does not take is the L1 cache's, which has the state on its way.
        """
        W, R, N = self.row_warps, self.rows, self.shape.N
        w = cutlass.min(warp, W - 1)
        taken = 0

        def lines(dtype, width):
            nonlocal taken
            layout = cute.make_layout((W, R, width), stride=(R * width, width, 1))
            size = W * R * width * dtype.width // 8
            if self.passes > 1 or taken + size > o.spare:
                return smem.allocate_tensor(dtype, layout, 16)[w, None, None]
            pointer = cute.recast_ptr(o.x.iterator, dtype=dtype) + taken * 8 // dtype.width
            taken += size
            return cute.make_tensor(pointer, layout)[w, None, None]

        T, all_rows = self.tokens, R * self.passes
        v = smem.allocate_tensor(
            dtype, cute.make_layout((W, T, all_rows), stride=(T * all_rows, all_rows, 1)), 16
        )[w, None, None]
        p = lines(F32, 2 * N + 4)
        if not self.update:
            return Rows(v, p, None)
        if self.tf32:
            return Rows(v, p, lines(F32, WIDTH_OF_U))
        U = 2 * N if self.shape.packed else 2 * N + 8
        if self.paired and self.shape.packed:
            U = PACKED_STRIDE
        elif self.u_terms == 3:
            # an odd number of 16 bytes, so that eight rows lie in different banks
            U = third_stride(N)
        return Rows(v, p, lines(BF, U))

    def keep_u(self, u, o: Operands, sU, row) -> None:
        """F[T, i] u_i in two terms; of each eight tokens the first terms, then the others. Behind them third terms, if there are such.

        Packed: behind the terms of four tokens again the first and the third.
        """
        if self.tf32:
            self.tf32.keep_u(u, sU, row)
            return
        N, width = self.shape.N, min(self.shape.N, 8)
        again = self.paired and self.shape.packed
        w = fr.registers(4 * N if again else self.u_terms * N, BF)
        after = None
        if not self.per_k:
            after = fr.registers(N)
            source = cute.make_tensor(o.decay.iterator + SPAN_DECAYS, cute.make_layout((N,)))
            cute.autovec_copy(source, after)
        for t in range(0, N, 2):
            both = fr.registers(2)
            for e in range(2):
                both[e] = u[t + e] if after is None else u[t + e] * after[t + e]
            at = t // width * 2 * width + t % width
            for term in range(2):
                cute.autovec_copy(fr.split(both), fr.pair(w, at + term * width))
            if again:
                cute.autovec_copy(fr.pair(w, at), fr.pair(w, 2 * N + t))
                cute.autovec_copy(fr.split(both), fr.pair(w, 3 * N + t))
            elif self.u_terms == 3:
                cute.autovec_copy(fr.split(both), fr.pair(w, 2 * N + t))
        cute.autovec_copy(w, cute.local_tile(sU[row, None], (cute.size(w.shape),), (0,)))

    def read_u(self, sU, th):
        """u as A's registers: of each two octets and tile of tokens four registers, two where tokens are few."""
        s = self.shape
        pairs, size = self.octets // 2, 4 if s.packed else 8
        w = fr.registers(pairs * s.tiles * size, BF)
        stride = sU.stride[0]
        for m in range(pairs):
            for n in range(s.tiles):
                row = self.row_of(2 * m + th.lane // 8 % 2, th.lane % 8)
                place = row * stride + 16 * n
                if s.packed:
                    fr.read_matrices(sU, place, w, m * 4, 2)
                else:
                    fr.read_matrices(sU, place + th.lane // 16 * 8, w, (m * s.tiles + n) * 8)
        return w

    def read_third(self, sU, th):
        """u's third terms as A's registers of half a product: of each two octets and tile of tokens two.

        Packed: the first terms, then the third ones.
        """
        if self.u_terms == 2:
            return None
        s = self.shape
        pairs = self.octets // 2
        w = fr.registers(pairs * s.tiles * 4, BF)
        for m in range(pairs):
            row = self.row_of(2 * m + th.lane // 8 % 2, th.lane % 8)
            for n in range(s.tiles):
                place = row * sU.stride[0] + 2 * s.N + 8 * n
                fr.read_matrices(sU, place, w, (m * s.tiles + n) * 4, 2)
        return w

    def key_place(self, o: Operands, th, group: int):
        """Where a lane's row of the keys' operand begins, for four matrices, and how many columns of eight they are.

        Both terms of u meet the same keys. Packed: k's terms lie along the contraction too, if there are two. Packed, group 1: k's third
        terms and then its first, which meet u's first and third.
        """
        s = self.shape
        row, matrix = th.lane % 8, th.lane // 8
        if s.packed:
            t = row % 4
            if group == 1:
                term = cutlass.select_(row < 4, Int32(2), Int32(0))
                return (term * s.N + t) * s.stride + matrix * 8
            terms = min(s.key_terms, 2)
            term = matrix % 2 if terms == 2 else 0
            at = term * s.N + t if self.per_k else s.row(term, 0, t)
            return at * s.stride + matrix // terms * 8
        term, n = group // s.tiles, group % s.tiles
        at = term * s.N + 8 * n + row if self.per_k else s.row(term, 0, 8 * n) + row
        return at * s.stride + matrix * 8

    def read_key_columns(self, o: Operands, places: list, first: int):
        """The keys' columns from the first-th eight on, of each group, as B's registers; places: `key_place` of each group."""
        words = fr.registers(len(places) * 8, BF)
        keys = o.keys if self.per_k else o.x
        for group, place in enumerate(places):
            count = self.shape.matrices(group)
            fr.read_matrices(keys, place + 8 * first, words, 8 * group, count, transpose=True)
        return words

    def decays_of(self, o: Operands, th, first: int, step: int, total):
        """D_T of a thread's keys of some columns."""
        x = fr.registers(2 * step)
        if total is not None:
            x.fill(total)
            return x
        vec = self.shape.vec
        for at in range(0, 2 * step, min(vec, 2 * step)):
            n = min(vec, 2 * step)
            i = 2 * first + at
            key = (i // vec * 4 + th.c) * vec + i % vec
            source = cute.make_tensor(
                o.decay.iterator + cute.assume(key, divby=n), cute.make_layout((n,))
            )
            cute.autovec_copy(source, cute.make_tensor(x.iterator + at, cute.make_layout((n,))))
        return x

    def advance(self, raw, o: Operands, th, sm, goal=None) -> None:
        """The final state, rounded, in place of S0.

        goal: of what goes to memory as it is computed, where to: the head's state, the first row and whether to write.
        """
        if self.columns_by:
            self.columns_by.advance(raw, o, th, sm)
            return
        if self.tf32:
            self.tf32.advance(raw, o, th, sm, *goal)
            return
        w = self.read_u(sm.u, th)
        third = self.read_third(sm.u, th)
        # columns of eight keys that four matrices are
        step = self.shape.step
        places = [self.key_place(o, th, group) for group in range(self.shape.groups)]
        total = None if self.per_k else o.decay[0]

        def read(first: int):
            words = self.read_key_columns(o, places, first)
            if self.copied_by:
                self.copied_by.take(raw, 2 * first, 2 * (first + step), th)
            return words, self.decays_of(o, th, first, step, total)

        columns = range(0, self.share // 2, step)
        for first, (words, decays) in each_read(columns, read, self.early_reads):
            for i in range(step):
                for m in range(self.octets // 2):
                    self.advance_two(raw, w, third, words, fr.pair(decays, 2 * i), first + i, i, m)
            if self.lines_by:
                tile, row0, writes = goal
                self.lines_by.store(raw, tile, row0, th, writes, first, first + step)
            elif self.copied_by:
                tile, row0, writes = goal
                goals = list(self.runs(tile, row0, th))
                self.store_runs(raw, goals, 2 * first, 2 * (first + step), writes)

    def advance_two(self, raw, w, third, words, decays, column: int, i: int, m: int) -> None:
        """Two octets of rows, eight keys."""
        s = self.shape
        x = fr.registers(4)
        places = [(2 * m + half) * self.share + 2 * column for half in range(2)]
        for half in range(2):
            fr.pair(x, 2 * half).store(
                fr.wide(fr.pair(raw, places[half]), 2).load() * decays.load()
            )
        acc = fr.accumulator(x)
        if s.packed and s.key_terms == 1:
            fr.mma(acc, fr.operand_a(w, 4 * m, 8), fr.operand_b(words, 2 * i, 8), 8)
        elif s.packed:
            # both terms of k meet the same u
            a = fr.registers(8, BF)
            for f in range(2):
                for half in range(2):
                    cute.autovec_copy(fr.pair(w, 4 * m + 2 * half), fr.pair(a, 4 * f + 2 * half))
            fr.mma(acc, fr.operand_a(a), fr.operand_b(words, 4 * i))
            if third is not None:
                b = fr.operand_b(words, 8 + 2 * i, 8)
                fr.mma(acc, fr.operand_a(third, 4 * m, 8), b, 8)
        else:
            for group in range(min(s.key_terms, 2) * s.tiles):
                b = fr.registers(4, BF)
                for f in range(2):
                    cute.autovec_copy(fr.pair(words, 8 * group + 2 * i), fr.pair(b, 2 * f))
                fr.mma(acc, fr.operand_a(w, (m * s.tiles + group % s.tiles) * 8), fr.operand_b(b))
            for n in range(s.tiles if self.paired else 0):
                # u's first terms with the keys' third, u's third with the keys' first
                at = m * s.tiles + n
                a, b = fr.registers(8, BF), fr.registers(4, BF)
                for half in range(2):
                    cute.autovec_copy(fr.pair(w, 8 * at + 2 * half), fr.pair(a, 2 * half))
                    cute.autovec_copy(fr.pair(third, 4 * at + 2 * half), fr.pair(a, 4 + 2 * half))
                for f, group in enumerate((2 * s.tiles + n, n)):
                    cute.autovec_copy(fr.pair(words, 8 * group + 2 * i), fr.pair(b, 2 * f))
                fr.mma(acc, fr.operand_a(a), fr.operand_b(b))
            for n in range(s.tiles if third is not None and not self.paired else 0):
                # with the keys' first terms
                a = fr.operand_a(third, (m * s.tiles + n) * 4, 8)
                fr.mma(acc, a, fr.operand_b(words, 8 * n + 2 * i, 8), 8)
        for half in range(2):
            fr.pair(raw, places[half]).store(fr.pair(x, 2 * half).load().to(self.state_dtype))
