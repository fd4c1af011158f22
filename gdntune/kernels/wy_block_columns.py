"""States of 16 bits in v_last memory, where rows of V lie side by side, as `wy_block` reads and writes them 16 bytes at a time.

A thread (g, c) has of each eight keys key g, and of the warp's rows of V the `2 octets` neighbours that begin at 2 octets c: word j of
them is its part of an 8 x 8 matrix of keys and rows. Turned round within the warp that matrix is half of an operand of the projection.
The final state is computed the other way round, keys along an accumulator's rows, so that it needs no turning at all:

    S_T^T = D_T S0^T + sum_i k_i (F[T, i] u_i)^T

Keys are in their own order, in shared memory too.
"""

import cutlass.cute as cute
from cutlass import BFloat16

from gdntune.kernels import fragments as fr
from gdntune.kernels import transpose

BF = BFloat16


class Columns:
    """What `wy_block` does otherwise with such states."""

    def __init__(self, decode):
        self.d = decode
        # neighbours of a key that a thread has
        self.run = 2 * decode.octets
        self.eights = decode.K // 8

    def row_of(self, octet, g):
        """The row of V, of a warp's, that lanes g of a turned matrix have."""
        return g // 2 * self.run + 2 * octet + g % 2

    def runs(self, tile, row0, th):
        """Memory and the place of its first element in registers, key by key."""
        for i in range(self.eights):
            key = tile[8 * i + th.g, None]
            yield cute.local_tile(key, (self.run,), (row0 // self.run + th.c,)), i * self.run

    def load(self, tile, row0, th):
        """Issues the loads of a warp's rows."""
        x = cute.make_rmem_tensor((self.eights * self.run,), self.d.state_dtype)
        for source, at in self.runs(tile, row0, th):
            cute.autovec_copy(source, fr.view(x, at, (self.run,), (1,)))
        return x

    def store(self, x, tile, row0, th) -> None:
        """Writes them."""
        for goal, at in self.runs(tile, row0, th):
            cute.autovec_copy(fr.view(x, at, (self.run,), (1,)), goal)

    def turned(self, raw, j: int, x: int):
        """Of an octet the 16 keys of product x, in the order of its operand."""
        out = fr.registers(4, self.d.state_dtype)
        for half in range(2):
            word = transpose.pair(raw, (2 * x + half) * self.run + 2 * j)
            cute.autovec_copy(word, fr.pair(out, 2 * half))
        return out

    def advance(self, raw, o, th, sm) -> None:
        """The final state, rounded, in place of S0."""
        d, s = self.d, self.d.shape
        w = d.read_u(sm.u, th)
        third = d.read_third(sm.u, th)
        # columns of eight keys that four matrices are
        step = s.step
        places = [d.key_place(o, th, group) for group in range(s.groups)]
        total = None if d.per_k else o.decay[0]
        for first in range(0, self.eights, step):
            words = d.read_key_columns(o, places, first)
            for i in range(0, step, 2):
                decays = [total, total]
                if d.per_k:
                    decays = [o.decay[8 * (first + i + half) + th.g] for half in range(2)]
                for j in range(d.octets):
                    self.advance_one(raw, w, third, words, decays, first + i, i, j)

    def advance_one(self, raw, w, third, words, decays, eight: int, i: int, j: int) -> None:
        """An octet of rows, 16 keys."""
        d, s = self.d, self.d.shape
        x = fr.registers(4)
        places = [(eight + half) * self.run + 2 * j for half in range(2)]
        for half in range(2):
            wide = fr.wide(fr.pair(raw, places[half]), 2)
            for e in range(2):
                x[2 * half + e] = wide[e] * decays[half]
        acc = fr.accumulator(x)
        m, other = j // 2, j % 2
        if s.packed:
            terms = min(s.key_terms, 2)
            a, b = fr.registers(4 * terms, BF), fr.registers(2 * terms, BF)
            for term in range(terms):
                for half in range(2):
                    word = fr.pair(words, 2 * ((i + half) * terms + term))
                    cute.autovec_copy(word, fr.pair(a, 4 * term + 2 * half))
                # both terms of k meet the same u
                cute.autovec_copy(fr.pair(w, 4 * m + 2 * other), fr.pair(b, 2 * term))
            fr.mma(acc, fr.operand_a(a, 0, 8 * terms), fr.operand_b(b, 0, 8 * terms), 8 * terms)
            if third is not None:
                a = fr.registers(4, BF)
                for half in range(2):
                    cute.autovec_copy(fr.pair(words, 8 + 2 * (i + half)), fr.pair(a, 2 * half))
                b = fr.operand_b(third, 4 * m + 2 * other, 8)
                fr.mma(acc, fr.operand_a(a, 0, 8), b, 8)
        else:
            for group in range(min(s.key_terms, 2) * s.tiles):
                a, b = fr.registers(8, BF), fr.registers(4, BF)
                for term in range(2):
                    # both terms of u meet the same keys
                    for half in range(2):
                        word = fr.pair(words, 8 * group + 2 * (i + half))
                        cute.autovec_copy(word, fr.pair(a, 4 * term + 2 * half))
                    at = (m * s.tiles + group % s.tiles) * 8 + 4 * term + 2 * other
                    cute.autovec_copy(fr.pair(w, at), fr.pair(b, 2 * term))
                fr.mma(acc, fr.operand_a(a), fr.operand_b(b))
            for n in range(s.tiles if d.paired else 0):
                # u's first terms with the keys' third, u's third with the keys' first
                a, b = fr.registers(8, BF), fr.registers(4, BF)
                for f, group in enumerate((2 * s.tiles + n, n)):
                    for half in range(2):
                        word = fr.pair(words, 8 * group + 2 * (i + half))
                        cute.autovec_copy(word, fr.pair(a, 4 * f + 2 * half))
                at = m * s.tiles + n
                cute.autovec_copy(fr.pair(w, 8 * at + 2 * other), fr.pair(b, 0))
                cute.autovec_copy(fr.pair(third, 4 * at + 2 * other), fr.pair(b, 2))
                fr.mma(acc, fr.operand_a(a), fr.operand_b(b))
            for n in range(s.tiles if third is not None and not d.paired else 0):
                # with the keys' first terms
                a = fr.registers(4, BF)
                for half in range(2):
                    word = fr.pair(words, 8 * n + 2 * (i + half))
                    cute.autovec_copy(word, fr.pair(a, 2 * half))
                at = (m * s.tiles + n) * 4 + 2 * other
                fr.mma(acc, fr.operand_a(a, 0, 8), fr.operand_b(third, at, 8), 8)
        for half in range(2):
            fr.pair(raw, places[half]).store(fr.pair(x, 2 * half).load().to(d.state_dtype))
