"""A thread's share of a state, as `recurrent` has it in registers, and what one token does to it.

A thread has RV rows of V by RK key positions in fp32. The `lanes` threads of a row lie in one warp,
or, `split` times as many, in `split` warps. `advance` takes a token's q, k, decay and beta, sums
S k and S q over a row's threads, writes the rows' outputs and leaves the next state.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, const_expr

from gdntune.kernels import decode, shuffles
from gdntune.kernels.recurrent_parts import Thread

F32 = Float32
# A state is held as S / scaled; below this, 1 / scaled would soon cost exponent range.
SMALLEST_SCALE = 2.0**-40


@cute.jit
def widen(narrow, wide, by_word: cutlass.Constexpr):
    """Elements to fp32, of two register tensors with one layout. by_word: with `spread` alone, since without it the compiler then
    moves what waits for q before the state's loads (docs/measured.md).
    """
    n = const_expr(cute.size(narrow.shape))
    flat = cute.make_layout((n,))
    x = cute.make_tensor(narrow.iterator, flat)
    y = cute.make_tensor(wide.iterator, flat)
    if const_expr(by_word and narrow.element_type is BFloat16 and n % 2 == 0):
        # two of a word by one instruction each; the compiler takes three
        words = cute.recast_tensor(x, Int32)
        bits = cute.recast_tensor(y, Int32)
        for i in cutlass.range_constexpr(n // 2):
            bits[2 * i] = words[i] << 16
            bits[2 * i + 1] = words[i] & -65536
    else:
        for i in cutlass.range_constexpr(n):
            y[i] = x[i].to(F32)


class RecurrentRows(decode.Decode):
    """Knobs as compile-time facts, moves between memory and registers, sums over a row's threads, and one token."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(
            facts,
            knobs["tile_v"],
            knobs["threads"],
            knobs["registers"],
            knobs["heads"],
            knobs["pdl"],
        )
        self.vec, self.lanes = knobs["vec"], knobs["lanes"]
        self.early, self.fence = knobs["early"], knobs["fence"]
        # whether q and k are normalised before the state is waited for; of several tokens they are, once a block, in shared memory
        self.normalised = self.loop or self.fence
        self.split, self.spread, self.row = knobs["split"], knobs["spread"], knobs["row"]
        self.shares = self.lanes * self.split
        self.RK = self.K // self.shares
        self.RV = knobs["ilp"] if self.k_last else self.vec
        # a thread's key positions: KC runs of KV neighbours, a run of each of a row's threads beside the next one's
        self.KV = self.vec if self.k_last else min(self.RK, knobs["run"] or self.RK)
        self.KC = self.RK // self.KV
        # in a warp, v_last puts the threads of a row apart so that neighbours read along V
        self.step = 1 if self.k_last else 32 // self.lanes
        # rows whose sums a thread ends with, and threads that end with the same ones
        self.own = max(1, self.RV // self.lanes) if self.spread else self.RV
        self.alike = max(1, self.lanes // self.RV) if self.spread else self.lanes
        self.groups = self.threads // self.shares
        self.chunk = self.groups * self.RV
        self.chunks = self.tile_v // self.chunk
        # staging: tokens a warp normalises, and loads of VW elements of v a thread makes
        self.warps = self.threads // 32
        self.VW = min(8, self.tile_v)
        self.stage_tokens = -(-self.tokens // self.warps)
        self.stage_values = -(-self.tokens * self.tile_v // (self.VW * self.threads))

    def thread(self, tid):
        """A thread's place among those of a row, and its row's among the block's."""
        if self.k_last:
            return tid % self.lanes, tid // self.lanes
        warp = tid // 32
        lane = warp % self.split * self.lanes + tid % 32 // self.step
        return lane, warp // self.split * self.step + tid % self.step

    def stand(self, tid, lane, group):
        """Where a thread stands: what `thread` gave, and which of its rows it will have the sums of."""
        part = lane % self.lanes // self.alike
        home = tid % 32 - lane if self.k_last else tid % self.step
        return Thread(tid, lane, group, part, home)

    def fragment(self, dtype):
        """Registers for RV by RK elements; what a load moves lies side by side."""
        stride = (self.RK, 1) if self.k_last else (1, self.RV)
        return cute.make_rmem_tensor(cute.make_layout((self.RV, self.RK), stride=stride), dtype)

    @cute.jit
    def read_key(self, source, target, lane):
        """A thread's RK key positions of a [K] vector."""
        for c in cutlass.range_constexpr(self.KC):
            run = cute.local_tile(source, (self.KV,), (c * self.shares + lane,))
            cute.autovec_copy(run, cute.local_tile(target, (self.KV,), (c,)))

    @cute.jit
    def read_values(self, source, target, unit):
        """The unit-th `own` rows of a [V] vector."""
        cute.autovec_copy(cute.local_tile(source, (self.own,), (unit,)), target)

    def unit(self, vt, it, thread):
        """Where a thread's `own` rows are, in units of them, in chunk `it` of tile vt."""
        row = vt * self.tile_v + it * self.chunk + thread.group * self.RV
        return (row + thread.part * self.own if self.spread else row) // self.own

    @cute.jit
    def copy_rows(self, tile, raw, row0, lane, store: cutlass.Constexpr):
        """Moves a thread's RV by RK elements between the head's state `tile` in memory and registers."""
        if const_expr(self.k_last):
            for i in cutlass.range_constexpr(self.RV):
                for c in cutlass.range_constexpr(self.KC):
                    m = cute.local_tile(
                        tile[row0 + i, None], (self.vec,), (c * self.shares + lane,)
                    )
                    r = cute.local_tile(raw[i, None], (self.vec,), (c,))
                    if const_expr(store):
                        cute.autovec_copy(r, m)
                    else:
                        cute.autovec_copy(m, r)
        else:
            for j in cutlass.range_constexpr(self.RK):
                key = (j // self.KV * self.shares + lane) * self.KV + j % self.KV
                m = cute.local_tile(tile[key, None], (self.vec,), (row0 // self.vec,))
                r = raw[None, j]
                if const_expr(store):
                    cute.autovec_copy(r, m)
                else:
                    cute.autovec_copy(m, r)

    @cute.jit
    def store_rows(self, tile, fh, scaled: Float32, row0, lane):
        """Rounds a thread's fp32 state, scaled * fh, and writes it to the head's state `tile`."""
        raw = self.fragment(self.state_dtype)
        for i in cutlass.range_constexpr(self.RV):
            for j in cutlass.range_constexpr(self.RK):
                x = fh[i, j]
                if const_expr(self.loop and not self.per_k):
                    x = x * scaled
                raw[i, j] = x.to(self.state_dtype)
        self.copy_rows(tile, raw, row0, lane, True)

    @cute.jit
    def reduce(self, sums, rows: cutlass.Constexpr, n: cutlass.Constexpr, sR, turn, thread):
        """Sums n values over the threads of a row, step by step, so that shuffles overlap, then over the row's warps.

        The leading 2 `rows` values are two a row. At each step a thread gives away the sums of half of its rows and gets the other
        half's of the rows that it keeps, until it has those of the part-th `own` rows; they end in front. The others are summed in
        every thread, where they are.
        sR: shared memory of two turns, so that one barrier a token is enough; None where a row is one warp's.
        """
        lane, group, part = thread.lane, thread.group, thread.part
        for s in cutlass.range_constexpr(self.lanes.bit_length() - 1):
            distance = self.lanes >> (s + 1)
            half = const_expr((rows >> s) // 2)
            if const_expr(half):
                upper = (lane & distance) != 0
                for i in cutlass.range_constexpr(2 * half):
                    low = sums[i]
                    high = sums[2 * half + i]
                    given = cutlass.select_(upper, low, high)
                    sums[i] = cutlass.select_(upper, high, low) + self.exchanged(given, distance)
            elif const_expr(rows):
                for i in cutlass.range_constexpr(2):
                    sums[i] = sums[i] + self.exchanged(sums[i], distance)
            for i in cutlass.range_constexpr(2 * rows, n):
                sums[i] = sums[i] + self.exchanged(sums[i], distance)
        kept = const_expr(2 * self.own if rows else 0)
        if const_expr(self.split > 1):
            if lane % self.alike == 0:
                for i in cutlass.range_constexpr(kept):
                    sR[turn, lane // self.lanes, group, kept * part + i] = sums[i]
            if lane % self.lanes == 0:
                for i in cutlass.range_constexpr(2 * rows, n):
                    sR[turn, lane // self.lanes, group, i] = sums[i]
            cute.arch.sync_threads()
            for i in cutlass.range_constexpr(kept):
                sums[i] = self.over_warps(sR, turn, group, kept * part + i)
            for i in cutlass.range_constexpr(2 * rows, n):
                sums[i] = self.over_warps(sR, turn, group, i)

    @cute.jit
    def exchanged(self, x, distance: cutlass.Constexpr):
        """x of the thread of the same row that is `distance` further, or as much before."""
        return shuffles.bfly(x, distance * self.step)

    @cute.jit
    def over_warps(self, sR, turn, group, i):
        x = F32(0.0)
        for w in cutlass.range_constexpr(self.split):
            x += sR[turn, w, group, i]
        return x

    @cute.jit
    def hand_round(self, own, rows, home):
        """All RV rows' values from the threads that have them; home: the first of a row's threads in its warp."""
        for i in cutlass.range_constexpr(self.RV):
            if const_expr(self.own == self.RV):
                rows[i] = own[i]
            else:
                owner = home + i // self.own * self.alike * self.step
                rows[i] = shuffles.at_lane(own[i % self.own], owner)

    @cute.jit
    def decay_keys(self, fh, fg):
        """Each key position's elements times its own decay (KDA)."""
        for i in cutlass.range_constexpr(self.RV):
            for j in cutlass.range_constexpr(self.RK):
                fh[i, j] = fh[i, j] * fg[j]

    @cute.jit
    def add_outer(self, fh, x, fk):
        """fh + x fk^T, of a thread's rows and key positions, in place."""
        for i in cutlass.range_constexpr(self.RV):
            for j in cutlass.range_constexpr(self.RK):
                fh[i, j] = fh[i, j] + x[i] * fk[j]

    @cute.jit
    def both_sums(self, fh, fq, fk, sums):
        """A thread's parts of S k and S q of its rows, two a row, to the front of `sums`."""
        for i in cutlass.range_constexpr(self.RV):
            x = F32(0.0)
            y = F32(0.0)
            for j in cutlass.range_constexpr(self.RK):
                x += fh[i, j] * fk[j]
                y += fh[i, j] * fq[j]
            sums[2 * i] = x
            sums[2 * i + 1] = y

    @cute.jit
    def advance(self, fh, rv, token, scaled: Float32, options, row0, unit, thread, sR, turn, o):
        """One token on the RV by RK elements in fh: both sums, the update and the output rows. Gives the new `scaled`.

        rv: v of the rows whose sums the thread will have, the part-th `own` ones of its RV.

        Of several tokens, or fenced, q and k come normalised. Else a thread's own come as they are: their norms are summed in the same
        butterflies as S k and S q and multiplied in afterwards, so that no sum stands before the state's arrival.

        With one decay a head fh holds S / scaled, so that a token of a loop costs three operations an element, not four, and T = 1
        sums while the gate is still being computed. KDA's decays are applied to the elements, and scaled stays 1.
        """
        fq, fk, fg, decay, beta, kq = token
        lane = thread.lane
        if const_expr(self.per_k):
            self.decay_keys(fh, fg)
        else:
            scaled = scaled * decay
            if const_expr(self.loop):
                # before the division below could overflow
                if scaled < F32(SMALLEST_SCALE):
                    for i in cutlass.range_constexpr(self.RV):
                        for j in cutlass.range_constexpr(self.RK):
                            fh[i, j] = fh[i, j] * scaled
                    scaled = F32(1.0)
        n = const_expr(2 * self.RV + (0 if self.normalised else 3))
        rows = const_expr(self.RV if self.spread else 0)
        sums = cute.make_rmem_tensor((n,), F32)
        self.both_sums(fh, fq, fk, sums)
        iq = F32(1.0)
        ik = F32(1.0)
        if const_expr(self.normalised):
            self.reduce(sums, rows, n, sR, turn, thread)
        else:
            sq = F32(0.0)
            sk = F32(0.0)
            kq = F32(0.0)
            for j in cutlass.range_constexpr(self.RK):
                sq += fq[j] * fq[j]
                sk += fk[j] * fk[j]
                kq += fq[j] * fk[j]
            sums[n - 3] = sq
            sums[n - 2] = sk
            sums[n - 1] = kq
            self.reduce(sums, rows, n, sR, turn, thread)
            iq, ik = self.norms(sums[n - 3], sums[n - 2], options.scale, options.use_qk_l2norm)
            kq = sums[n - 1] * iq * ik
        unscale = ik
        if const_expr(self.loop and not self.per_k):
            unscale = cute.arch.rcp_approx(scaled) * ik
        ro = cute.make_rmem_tensor((self.own,), o.element_type)
        wo = cute.make_rmem_tensor((self.own,), F32)
        for i in cutlass.range_constexpr(self.own):
            u = (rv[i].to(F32) - sums[2 * i] * (scaled * ik)) * beta
            ro[i] = (sums[2 * i + 1] * (scaled * iq) + u * kq).to(o.element_type)
            wo[i] = u * unscale
        w = cute.make_rmem_tensor((self.RV,), F32)
        self.hand_round(wo, w, thread.home)
        if const_expr(self.per_k or self.loop):
            self.add_outer(fh, w, fk)
        else:
            for i in cutlass.range_constexpr(self.RV):
                for j in cutlass.range_constexpr(self.RK):
                    fh[i, j] = fh[i, j] * scaled + w[i] * fk[j]
        if const_expr(not self.loop):
            scaled = F32(1.0)
        if const_expr(self.spread):
            if lane % self.alike == 0 and lane < self.lanes:
                cute.autovec_copy(ro, cute.local_tile(o, (self.own,), (unit,)))
        else:
            # lane i writes row i: one store for all rows of a group
            for r in cutlass.range_constexpr((self.RV + self.lanes - 1) // self.lanes):
                rows = const_expr(min(self.lanes, self.RV - r * self.lanes))
                x = ro[r * self.lanes]
                for i in cutlass.range_constexpr(1, rows):
                    if lane == i:
                        x = ro[r * self.lanes + i]
                if lane < rows:
                    o[row0 + r * self.lanes + lane] = x
        return scaled
