"""A request's window of the ring, as `ring` reads it: keys, corrections and decays of the entries that the state lacks, what the call's
keys and queries have in common with those keys, and what a later request's block will want of its own window.
"""

import dataclasses
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr

from gdntune.kernels import decode, l2, shuffles
from gdntune.kernels import fragments as fr
from gdntune.kernels.ring_call import Live
from gdntune.kernels.wy_block import WYBlock
from gdntune.kernels.wy_block_gdn import CHUNK

F32, BF = Float32, BFloat16
# of bf16, that hold a correction as it is kept
TERMS_KEPT = {"bf16": 1, "fp32": 2}
# and what is worked out in fp32; of two such factors the product of both second terms is below fp32's roundoff
TERMS = 2
# bytes that L2 fetches at once
LINE = 128


@dataclasses.dataclass(frozen=True)
class Corrected:
    """What the state lacks of the ring: its keys, a thread's corrections as they came, F of a lane's entry, and R."""

    keys: Any
    u: Any
    after: Any
    total: Any


class RingWindow(WYBlock):
    """The facts of a ring, and what a block does with its entries."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, {**knobs, "pdl": "none", "matrices": False})
        self.ring, self.u_dtype = facts["ring"], decode.DTYPES[facts["ring_dtype"]]
        self.u_terms = TERMS_KEPT[facts["ring_dtype"]]
        s = self.shape
        # of 16 entries, which one product adds up
        self.slices = self.ring // 16
        # eight entries that a warp has and products of its part of K; keys of a load of them
        halves = 2 * self.slices
        self.own_halves, self.key_parts = max(1, halves // s.warps), max(1, s.warps // halves)
        self.steps = s.products // self.key_parts
        self.run = 8 if s.vec == 8 and self.steps % 2 == 0 else 4
        # eight columns of tokens: a tile's k and its q, or both where tokens are few
        self.token_columns = 1 if s.packed else 2 * s.tiles

    def row_of(self, octet, g):
        """Rows side by side: a thread's corrections of an entry are one load."""
        return self.octets * g + octet

    def window(self, base, count, ring_rows) -> Live:
        """A request's window, clamped to what a ring has."""
        return Live.clamped(base, count, ring_rows, self.ring)

    @cute.jit
    def load_decay(self, decay, live, lane):
        """Lane i: the decay of entry i; one where there is none."""
        x = F32(1.0)
        if lane < live.count:
            x = decay[live.place(lane)]
        return x

    def behind(self, decay, lane):
        """Lane i of the first `ring`: the product of the decays behind entry i; and that of all, in every lane."""
        _, after, total = shuffles.products(decay, self.ring, lane, upto=False)
        return after, shuffles.at_lane(total, 0)

    @cute.jit
    def load_keys(self, k, live, th):
        """Issues the loads of a warp's part of the ring's keys, as B has them: of each eight entries the steps' words side by side."""
        x = cute.make_rmem_tensor((self.own_halves * self.steps * 4,), k.element_type)
        x.fill(0)
        for n in cutlass.range_constexpr(self.own_halves):
            i = 8 * self.half_of(th, n) + th.g
            if i < live.count:
                row = k[live.place(i), None]
                for step in cutlass.range_constexpr(0, self.steps, self.run // 4):
                    at = self.step_of(th, step)
                    # in units of a load
                    if const_expr(self.run < self.shape.vec):
                        at = (4 * (at // 2) + th.c) * 2 + at % 2
                    else:
                        at = 4 * (at // (self.run // 4)) + th.c
                    to = cute.local_tile(x, (self.run,), ((n * self.steps + step) * 4 // self.run,))
                    cute.autovec_copy(cute.local_tile(row, (self.run,), (at,)), to)
        return x

    def half_of(self, th, i: int):
        """The i-th eight entries of a warp's."""
        return i * self.shape.warps + th.warp % (2 * self.slices)

    def step_of(self, th, step: int):
        """A product of the warp's part of K, among all."""
        return th.warp // (2 * self.slices) * self.steps + step

    def key_words(self, x):
        """The same in bf16, a term each."""
        if self.shape.terms == 1:
            return [x]
        count = self.own_halves * self.steps * 4
        found = [fr.registers(count, BF) for _ in range(self.shape.terms)]
        for at in range(0, count, 2):
            both = fr.wide(fr.pair(x, at), 2)
            for term in found:
                cute.autovec_copy(fr.split(both), fr.pair(term, at))
        return found

    @cute.jit
    def keep_keys(self, words: cutlass.Constexpr, keys, th):
        """A warp's part of the ring's keys to shared memory, for a fold."""
        for term in cutlass.range_constexpr(self.shape.terms):
            for n in cutlass.range_constexpr(self.own_halves):
                row = keys[term * self.ring + 8 * self.half_of(th, n) + th.g, None]
                for i in cutlass.range_constexpr(2 * self.steps):
                    word = fr.pair(words[term], (n * self.steps * 2 + i) * 2)
                    at = 4 * (2 * self.step_of(th, 0) + i) + th.c
                    cute.autovec_copy(word, cute.local_tile(row, (2,), (at,)))

    def correlate(self, o, words, parts, th) -> None:
        """A warp's part of G to `parts` [key_parts, halves, pieces, 32, .]: sums over its part of K."""
        s = self.shape
        sums = fr.registers(self.own_halves * s.tiles * 4, F32, 0.0)
        for step in range(self.steps):
            for a in range(s.fragments):
                A = fr.registers(8, BF)
                fr.read_matrices(o.x, s.place_a(th, a) + 16 * self.step_of(th, step), A)
                for n in range(self.own_halves):
                    acc = fr.accumulator(sums, (n * s.tiles + s.tile(a)) * 4)
                    for term in words:
                        b = fr.operand_b(term, (n * self.steps + step) * 4)
                        fr.mma(acc, fr.operand_a(A), b)
        part = th.warp // (2 * self.slices)
        for n in range(self.own_halves):
            for tile in range(s.tiles):
                own = cute.make_tensor(
                    sums.iterator + (n * s.tiles + tile) * 4, cute.make_layout((4,))
                )
                if s.packed:
                    # rows g + 8 are the second term's, or zeros
                    both = fr.registers(2)
                    for e in range(2):
                        both[e] = own[e] + own[2 + e]
                    own = both
                cute.autovec_copy(own, parts[part, self.half_of(th, n), tile, th.lane, None])

    def parts_layout(self):
        """Of the warps' parts of G."""
        s = self.shape
        sizes = (self.key_parts, 2 * self.slices, s.tiles, 32, 2 if s.packed else 4)
        return cute.make_ordered_layout(sizes, (4, 3, 2, 1, 0))

    def correlations(self, parts, after, th):
        """F G as B's registers of each column of tokens, of what the warps added up."""
        s = self.shape
        found = [fr.registers(2 * self.slices * TERMS * 2, BF) for _ in range(self.token_columns)]
        for half in range(2 * self.slices):
            factors = [shuffles.at_lane(after, 8 * half + 2 * th.c + e) for e in range(2)]
            for tile in range(s.tiles):
                sums = fr.registers(2 if s.packed else 4)
                cute.autovec_copy(parts[0, half, tile, th.lane, None], sums)
                for part in range(1, self.key_parts):
                    more = fr.registers(2 if s.packed else 4)
                    cute.autovec_copy(parts[part, half, tile, th.lane, None], more)
                    sums.store(sums.load() + more.load())
                for which in range(1 if s.packed else 2):
                    both = fr.registers(2)
                    for e in range(2):
                        both[e] = sums[2 * which + e] * factors[e]
                    for term in range(TERMS):
                        to = ((half // 2 * TERMS + term) * 2 + half % 2) * 2
                        cute.autovec_copy(fr.split(both), fr.pair(found[2 * tile + which], to))
        return found

    @cute.jit
    def load_corrections(self, u, live, row0, th):
        """Issues the loads of a thread's corrections: of entries 2c, 2c + 1, 2c + 8, 2c + 9 of each 16, its rows side by side."""
        x = cute.make_rmem_tensor((4 * self.slices * self.octets,), self.u_dtype)
        x.fill(0)
        for n in cutlass.range_constexpr(4 * self.slices):
            i = n // 2 * 8 + 2 * th.c + n % 2
            if i < live.count:
                source = u[live.place(i), None]
                cute.autovec_copy(
                    cute.local_tile(source, (self.octets,), (row0 // self.octets + th.g,)),
                    cute.local_tile(x, (self.octets,), (n,)),
                )
        return x

    def operands_of(self, x: "Corrected", terms: int, factors=None):
        """x, or F x, in bf16 terms: of each 16 entries and two octets of rows A's registers of one product, which are B's of two."""
        u = fr.registers(terms * self.slices * self.octets * 4, BF)
        for n in range(2 * self.slices):
            for j in range(self.octets):
                both = fr.registers(2)
                for e in range(2):
                    both[e] = x.u[(2 * n + e) * self.octets + j].to(F32)
                    if factors is not None:
                        both[e] = both[e] * factors[2 * n + e]
                for term in range(terms):
                    at = self.u_place(term, n // 2, j) + n % 2 * 4
                    cute.autovec_copy(fr.split(both), fr.pair(u, at))
        return u

    def factors_of(self, x: "Corrected", th):
        """F of entries 2c and 2c + 1 of each eight."""
        return [
            shuffles.at_lane(x.after, n // 2 * 8 + 2 * th.c + n % 2) for n in range(4 * self.slices)
        ]

    def u_place(self, term: int, piece: int, octet: int) -> int:
        """Where an octet's registers begin: their halves along the entries are four elements apart."""
        return ((term * self.slices + piece) * (self.octets // 2) + octet // 2) * 8 + octet % 2 * 2

    @cute.jit
    def append_keys(self, loaded, ring_k, live, length: Int32, tid):
        """A block's keys to the ring, as they came."""
        for m in cutlass.range_constexpr(self.stage.pieces):
            which, t, chunk = self.stage.place(m, tid)
            if which == 0 and t < length:
                cute.autovec_copy(
                    cute.local_tile(loaded, (CHUNK,), (m,)),
                    cute.local_tile(ring_k[live.place(live.count + t), None], (CHUNK,), (chunk,)),
                )

    @cute.jit
    def fetch_later(self, ring, window, inputs, n, hq, hv, first, tokens, lane):
        """Has L2 fetch what a later request's block will load beside its state. ring: its u, keys and decays; inputs: v, k, q and gates of
        all requests. What the heads of a group share, its first one asks for; rows behind a ring's end are left to the block itself.

        With the state in it too, which comes late enough by itself, this loses what it wins: L2 then passes those bytes twice.
        """
        rows = cutlass.min(window.count, window.rows - window.base)
        at, row = Int64(0), Int32(0)
        for which, x in enumerate(ring[:2]):
            width = const_expr(x.shape[1] * x.element_type.width // 8)
            place = x.iterator.toint() + Int64(window.base * width)
            at = cutlass.select_(lane == which, place, at)
            row = cutlass.select_(lane == which, Int32(width), row)
        if rows > 0 and (lane == 0 or (lane == 1 and first)):
            l2.prefetch_run(at, rows * row)
        # a lane a line: rows of v, k and q, then gates, then the ring's decays
        width = const_expr(LINE // (inputs[0].element_type.width // 8))
        lines = [-(-self.V // width), -(-self.K // width), -(-self.K // width), 1, 1]
        starts = [self.tokens * sum(lines[:i]) for i in range(6)]
        for m in cutlass.range_constexpr(starts[5] // 32 + 1):
            p = 32 * m + lane
            at = ring[2].iterator.toint()
            wanted = p == starts[5]
            for i, x in enumerate(inputs):
                if const_expr(starts[i] < 32 * (m + 1) and starts[i + 1] > 32 * m):
                    t = cutlass.min(cutlass.max(p - starts[i], 0) // lines[i], tokens - 1)
                    if const_expr(i < 3):
                        head = hv if const_expr(i == 0) else hq
                        part = (p - starts[i]) % lines[i] * width
                        source = x[n, t, head, None].iterator + part
                    else:
                        source = x[n, t, None].iterator + hv
                    mine = p >= starts[i] and p < starts[i + 1]
                    at = cutlass.select_(mine, source.toint(), at)
                    wanted = wanted or (mine and (first or i == 0))
            if wanted:
                l2.prefetch_line(at)
