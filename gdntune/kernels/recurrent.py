"""Gated delta rule decode, GDN and KDA, one pass over the state for each token.

    S <- decay S;   u <- beta (v - S k);   o <- S q + u (k.q);   S <- S + u k^T        (S is [V, K], q and k normalised, q scaled)

A thread holds RV rows of V by RK key positions of one head's state in fp32; `lanes` threads of a warp share RV rows and sum S k and
S q by butterflies. With `spread` each step of these halves the rows too, so that a thread ends with the sums of `own` rows, computes
their u and output alone, and hands u round: half the instructions of the sums, and one wait more. k_last reads vectors along K, v_last
along V; the arithmetic between is the same. T = 1 is straight-line code, T >= 2 a loop at run time over a state that stays in registers.
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, gates

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


class Recurrent(decode.Decode):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, knobs["tile_v"], knobs["threads"], knobs["registers"], heads_first=knobs["heads"])
        self.vec, self.lanes = knobs["vec"], knobs["lanes"]
        self.early, self.fence = knobs["early"], knobs["fence"]
        # whether q and k are normalised before the state is waited for; of several tokens they are, once a block, in shared memory
        self.normalised = self.loop or self.fence
        self.split, self.spread = knobs["split"], knobs["spread"]
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

    def unit(self, vt, it, group, part):
        """Where a thread's `own` rows are, in units of them, in chunk `it` of tile vt."""
        row = vt * self.tile_v + it * self.chunk + group * self.RV
        return (row + part * self.own if self.spread else row) // self.own

    @cute.jit
    def copy_rows(self, tile, raw, row0, lane, store: cutlass.Constexpr):
        """Moves a thread's RV by RK elements between the head's state `tile` in memory and registers."""
        if const_expr(self.k_last):
            for i in cutlass.range_constexpr(self.RV):
                for c in cutlass.range_constexpr(self.KC):
                    m = cute.local_tile(tile[row0 + i, None], (self.vec,), (c * self.shares + lane,))
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

    def fragment(self, dtype):
        """Registers for RV by RK elements; what a load moves lies side by side."""
        stride = (self.RK, 1) if self.k_last else (1, self.RV)
        return cute.make_rmem_tensor(cute.make_layout((self.RV, self.RK), stride=stride), dtype)

    @cute.jit
    def reduce(self, sums, rows: cutlass.Constexpr, n: cutlass.Constexpr, sR, turn, lane, group, part):
        """Sums n values over the threads of a row, step by step, so that shuffles overlap, then over the row's warps.

        The leading 2 `rows` values are two a row. At each step a thread gives away the sums of half of its rows and gets the other
        half's of the rows that it keeps, until it has those of the part-th `own` rows; they end in front. The others are summed in
        every thread, where they are.
        sR: shared memory of two turns, so that one barrier a token is enough; None where a row is one warp's.
        """
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
        return cute.arch.shuffle_sync_bfly(x, offset=distance * self.step, mask=-1, mask_and_clamp=31)

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
                rows[i] = cute.arch.shuffle_sync(own[i % self.own], offset=owner, mask=-1, mask_and_clamp=31)

    @cute.jit
    def advance(
        self, fh, rv, fq, fk, fg, decay: Float32, scaled: Float32, beta: Float32, kq: Float32, scale: Float32, use_qk_l2norm: Int32,
        row0, unit, lane, group, part, home, sR, turn, o,
    ):  # fmt: skip
        """One token on the RV by RK elements in fh: both sums, the update and the output rows. Gives the new `scaled`.

        rv: v of the rows whose sums the thread will have, the part-th `own` ones of its RV.

        Of several tokens, or fenced, q and k come normalised. Else a thread's own come as they are: their norms are summed in the same
        butterflies as S k and S q and multiplied in afterwards, so that no sum stands before the state's arrival.

        With one decay a head fh holds S / scaled, so that a token of a loop costs three operations an element, not four, and T = 1
        sums while the gate is still being computed. KDA's decays are applied to the elements, and scaled stays 1.
        """
        if const_expr(self.per_k):
            for i in cutlass.range_constexpr(self.RV):
                for j in cutlass.range_constexpr(self.RK):
                    fh[i, j] = fh[i, j] * fg[j]
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
        for i in cutlass.range_constexpr(self.RV):
            x = F32(0.0)
            y = F32(0.0)
            for j in cutlass.range_constexpr(self.RK):
                x += fh[i, j] * fk[j]
                y += fh[i, j] * fq[j]
            sums[2 * i] = x
            sums[2 * i + 1] = y
        iq = F32(1.0)
        ik = F32(1.0)
        if const_expr(self.normalised):
            self.reduce(sums, rows, n, sR, turn, lane, group, part)
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
            self.reduce(sums, rows, n, sR, turn, lane, group, part)
            iq, ik = self.norms(sums[n - 3], sums[n - 2], scale, use_qk_l2norm)
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
        self.hand_round(wo, w, home)
        for i in cutlass.range_constexpr(self.RV):
            for j in cutlass.range_constexpr(self.RK):
                if const_expr(self.per_k or self.loop):
                    fh[i, j] = fh[i, j] + w[i] * fk[j]
                else:
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

    @cute.jit
    def normalise(self, fq, fk, scale: Float32, use_qk_l2norm: Int32, lane, group, sR):
        """A thread's shares of q and k normalised and scaled; gives k.q."""
        sums = cute.make_rmem_tensor((3,), F32)
        sums.fill(0.0)
        for j in cutlass.range_constexpr(self.RK):
            sums[0] = sums[0] + fq[j] * fq[j]
            sums[1] = sums[1] + fk[j] * fk[j]
            sums[2] = sums[2] + fq[j] * fk[j]
        self.reduce(sums, 0, 3, sR, 0, lane, group, None)
        iq, ik = self.norms(sums[0], sums[1], scale, use_qk_l2norm)
        for j in cutlass.range_constexpr(self.RK):
            fq[j] = fq[j] * iq
            fk[j] = fk[j] * ik
        return sums[2] * iq * ik

    @cute.jit
    def parameters(self, A_log, A_shared, dt_shared, hq, hv):
        """The head's row of A_log and of dt_bias: one a value head or, of KDA, one a q/k head."""
        ah = hv
        dh = hv
        if const_expr(A_log is not None and self.per_k):
            if A_shared:
                ah = hq
            if dt_shared:
                dh = hq
        return ah, dh

    @cute.jit
    def read_token(self, q, k, a, ni, ti, hq, hv, lane, wl, rq, rk, rg):
        """Issues the loads of this thread's share of a token's q and k and, of KDA, of its warp's share of g."""
        self.read_key(q[ni, ti, hq, None], rq, lane)
        self.read_key(k[ni, ti, hq, None], rk, lane)
        if const_expr(self.per_k):
            self.read_lane(a[ni, ti, hv, None], rg, wl)

    @cute.jit
    def use_token(
        self, rq, rk, rg, rbias, ga, gb, A, bias, sD, lane, wl, fq, fk, fg,
        softplus_beta: Float32, threshold: Float32, lower_bound: Float32, beta_scale: Float32,
    ):  # fmt: skip
        """Widens what `read_token` brought into fq, fk and fg; gives decay and beta.

        KDA's decays are computed once a warp, K/32 by each thread, and handed round in shared memory, sD: each by itself, the threads
        of a warp would compute them 32/lanes times over.
        """
        widen(rq, fq, self.spread)
        widen(rk, fk, self.spread)
        decay = F32(1.0)
        if const_expr(self.per_k):
            W = const_expr(self.K // 32)
            own = cute.make_rmem_tensor((W,), F32)
            for j in cutlass.range_constexpr(W):
                b = F32(0.0) if const_expr(rbias is None) else rbias[j].to(F32)
                own[j] = gates.decay(self.gate, rg[j].to(F32), A, b, softplus_beta, threshold, lower_bound)
            cute.autovec_copy(own, cute.local_tile(sD, (W,), (wl,)))
            cute.arch.sync_warp()
            self.read_key(sD, fg, lane)
        else:
            decay = gates.decay(self.gate, ga, A, bias, softplus_beta, threshold, lower_bound)
        return decay, self.beta_of(gb, beta_scale)

    @cute.jit
    def read_stage(self, q, k, v, a, b, ni, t0, length, hq, hv, v0, tid, rq, rk, rg, rs, rv):
        """Issues this thread's loads of what `write_stage` puts into shared memory: a warp a token, and a share of v."""
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < length:
                self.read_lane(q[ni, t0 + t, hq, None], rq[r, None], tid % 32)
                self.read_lane(k[ni, t0 + t, hq, None], rk[r, None], tid % 32)
                if const_expr(self.per_k):
                    self.read_lane(a[ni, t0 + t, hv, None], rg[r, None], tid % 32)
                else:
                    rs[r, 0] = a[ni, t0 + t, hv].to(F32)
                rs[r, 1] = b[ni, t0 + t, hv].to(F32)
        for r in cutlass.range_constexpr(self.stage_values):
            e = r * self.threads + tid
            t = e // (self.tile_v // self.VW)
            if t < length:
                at = v0 // self.VW + e % (self.tile_v // self.VW)
                cute.autovec_copy(cute.local_tile(v[ni, t0 + t, hv, None], (self.VW,), (at,)), rv[r, None])

    @cute.jit
    def read_lane(self, source, target, wl):
        cute.autovec_copy(cute.local_tile(source, (self.K // 32,), (wl,)), target)

    @cute.jit
    def write_stage(
        self, sQ, sK, sG, sV, sS, dt_bias, dh, A, bias, length, tid, rq, rk, rg, rs, rv,
        scale: Float32, softplus_beta: Float32, threshold: Float32, lower_bound: Float32, beta_scale: Float32, use_qk_l2norm: Int32,
    ):  # fmt: skip
        """q and k normalised, KDA's decays, v, and (decay, beta, k.q) of every token, to shared memory."""
        wl = tid % 32
        W = const_expr(self.K // 32)
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < length:
                sq = F32(0.0)
                sk = F32(0.0)
                kq = F32(0.0)
                for j in cutlass.range_constexpr(W):
                    sq += rq[r, j].to(F32) * rq[r, j].to(F32)
                    sk += rk[r, j].to(F32) * rk[r, j].to(F32)
                    kq += rq[r, j].to(F32) * rk[r, j].to(F32)
                for s in cutlass.range_constexpr(5):
                    sq += cute.arch.shuffle_sync_bfly(sq, offset=16 >> s, mask=-1, mask_and_clamp=31)
                    sk += cute.arch.shuffle_sync_bfly(sk, offset=16 >> s, mask=-1, mask_and_clamp=31)
                    kq += cute.arch.shuffle_sync_bfly(kq, offset=16 >> s, mask=-1, mask_and_clamp=31)
                iq, ik = self.norms(sq, sk, scale, use_qk_l2norm)
                for j in cutlass.range_constexpr(W):
                    sQ[t, wl * W + j] = rq[r, j].to(F32) * iq
                    sK[t, wl * W + j] = rk[r, j].to(F32) * ik
                decay = F32(1.0)
                if const_expr(self.per_k):
                    for j in cutlass.range_constexpr(W):
                        bk = F32(0.0) if const_expr(dt_bias is None) else dt_bias[dh, wl * W + j].to(F32)
                        sG[t, wl * W + j] = gates.decay(
                            self.gate, rg[r, j].to(F32), A, bk, softplus_beta, threshold, lower_bound
                        )
                else:
                    decay = gates.decay(self.gate, rs[r, 0], A, bias, softplus_beta, threshold, lower_bound)
                if wl == 0:
                    sS[t, 0] = decay
                    sS[t, 1] = self.beta_of(rs[r, 1], beta_scale)
                    sS[t, 2] = kq * iq * ik
        for r in cutlass.range_constexpr(self.stage_values):
            e = r * self.threads + tid
            t = e // (self.tile_v // self.VW)
            if t < length:
                cute.autovec_copy(
                    rv[r, None], cute.local_tile(sV[t, None], (self.VW,), (e % (self.tile_v // self.VW),))
                )

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, heads: cute.FastDivmodDivisorV2,
        slots: Int32, tokens: Int32, columns, rows, steps, A_shared, dt_shared,
    ):  # fmt: skip
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        if const_expr(self.k_last):
            lane = tid % self.lanes
            group = tid // self.lanes
        else:
            warp = tid // 32
            lane = warp % self.split * self.lanes + tid % 32 // self.step
            group = warp // self.split * self.step + tid % self.step
        hq, _ = divmod(hv, heads)
        # which `own` of its RV rows a thread will have the sums of, and where in its warp the row's threads begin
        part = lane % self.lanes // self.alike
        home = tid % 32 - lane if const_expr(self.k_last) else tid % self.step

        slot, write_slot = self.slots_of(n, read_index, write_index, slot_index, accepted, columns)
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, cu_seqlens, tokens)

        # What does not hang on the slot is loaded while the slot's index is on its way: at small batches each is a wait for memory.
        v0 = vt * self.tile_v
        ah, dh = self.parameters(A_log, A_shared, dt_shared, hq, hv)
        A = F32(0.0) if const_expr(A_log is None) else A_log[ah].to(F32)
        bias = F32(0.0) if const_expr(dt_bias is None or self.per_k) else dt_bias[dh].to(F32)
        rq = cute.make_rmem_tensor((self.RK,), q.element_type)
        rk = cute.make_rmem_tensor((self.RK,), k.element_type)
        wl = tid % 32
        rg = cute.make_rmem_tensor((self.K // 32,), a.element_type)
        rbias = None
        if const_expr(self.per_k and dt_bias is not None and not self.loop):
            rbias = cute.make_rmem_tensor((self.K // 32,), dt_bias.element_type)
            self.read_lane(dt_bias[dh, None], rbias, wl)
        rv = cute.make_rmem_tensor((self.own,), v.element_type)
        ga = F32(0.0)
        gb = F32(0.0)
        if const_expr(self.loop):
            # a warp's tokens lie side by side
            per_token = cute.make_layout((self.stage_tokens, self.K // 32), stride=(self.K // 32, 1))
            wq = cute.make_rmem_tensor(per_token, q.element_type)
            wk = cute.make_rmem_tensor(per_token, k.element_type)
            wg = cute.make_rmem_tensor(per_token, a.element_type)
            ws = cute.make_rmem_tensor(cute.make_layout((self.stage_tokens, 2), stride=(2, 1)), F32)
            wv = cute.make_rmem_tensor(
                cute.make_layout((self.stage_values, self.VW), stride=(self.VW, 1)), v.element_type
            )
            self.read_stage(q, k, v, a, b, ni, t0, length, hq, hv, v0, tid, wq, wk, wg, ws, wv)
        else:
            self.read_token(q, k, a, ni, t0, hq, hv, lane, wl, rq, rk, rg)
            if const_expr(not self.per_k):
                ga = a[ni, t0, hv].to(F32)
            gb = b[ni, t0, hv].to(F32)
            self.read_values(v[ni, t0, hv, None], rv, self.unit(vt, 0, group, part))
        # Loads do not move across this; without it the compiler sinks them below the branch (0.08 us at B=1 on an H100).
        cute.arch.sync_warp()

        live, writes = self.named(slot, write_slot, slots, null_index)
        row = Int64(n)
        keeps = live
        if const_expr(self.intermediate == "indexed"):
            at = slot_index[n]
            keeps = at >= 0 and at < rows and at != null_index
            row = Int64(at)

        if live:
            source = state[Int64(slot), hv, None, None]
            raw = self.fragment(self.state_dtype)
            fq = cute.make_rmem_tensor((self.RK,), F32)
            fk = cute.make_rmem_tensor((self.RK,), F32)
            fg = cute.make_rmem_tensor((self.RK,), F32)
            decay = F32(1.0)
            beta = F32(1.0)
            kq = F32(0.0)
            if const_expr(self.early):
                self.copy_rows(source, raw, v0 + group * self.RV, lane, False)
                if const_expr(self.per_k and not self.loop and not self.fence):
                    # the gates' arithmetic does not move across this: it would wait for g before the state is asked for
                    cute.arch.sync_warp()
            smem = SmemAllocator()
            sR = None
            if const_expr(self.split > 1):
                # a row's sums, padded to whole vectors
                n4 = const_expr((2 * self.RV + 6) // 4 * 4)
                shape = (2, self.split, self.groups, n4)
                stride = (self.split * self.groups * n4, self.groups * n4, n4, 1)
                sR = smem.allocate_tensor(F32, cute.make_layout(shape, stride=stride), 16)
            sD = None
            if const_expr(self.per_k and not self.loop):
                shape, stride = (self.warps, self.K), (self.K, 1)
                sD = smem.allocate_tensor(F32, cute.make_layout(shape, stride=stride), 16)[tid // 32, None]
            if const_expr(self.loop):
                T = const_expr(self.tokens)
                wide = cute.make_layout((T, self.K), stride=(self.K, 1))
                sQ = smem.allocate_tensor(F32, wide, 16)
                sK = smem.allocate_tensor(F32, wide, 16)
                sG = smem.allocate_tensor(F32, wide, 16) if const_expr(self.per_k) else None
                sS = smem.allocate_tensor(F32, cute.make_layout((T, 4), stride=(4, 1)), 16)
                sV = smem.allocate_tensor(
                    v.element_type, cute.make_layout((T, self.tile_v), stride=(self.tile_v, 1)), 16
                )
                self.write_stage(
                    sQ, sK, sG, sV, sS, dt_bias, dh, A, bias, length, tid, wq, wk, wg, ws, wv,
                    scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, use_qk_l2norm,
                )  # fmt: skip
                cute.arch.sync_threads()
            elif const_expr(self.fence):
                # Always true, which the compiler cannot know: arithmetic does not move across a branch.
                if beta_scale != F32(0.0):
                    decay, beta = self.use_token(
                        rq, rk, rg, rbias, ga, gb, A, bias, sD, lane, wl, fq, fk, fg,
                        softplus_beta, softplus_threshold, lower_bound, beta_scale,
                    )  # fmt: skip
                    kq = self.normalise(fq, fk, scale, use_qk_l2norm, lane, group, sR)
            else:
                decay, beta = self.use_token(
                    rq, rk, rg, rbias, ga, gb, A, bias, sD, lane, wl, fq, fk, fg,
                    softplus_beta, softplus_threshold, lower_bound, beta_scale,
                )  # fmt: skip
            # rolled: unrolled over four chunks of a large tile one variant took 2.1 s to compile instead of 0.5
            for it in cutlass.range(self.chunks, unroll=1):
                row0 = v0 + it * self.chunk + group * self.RV
                unit = self.unit(vt, it, group, part)
                if const_expr(not self.early):
                    self.copy_rows(source, raw, row0, lane, False)
                    if const_expr(not self.loop and self.chunks > 1):
                        self.read_values(v[ni, t0, hv, None], rv, unit)
                fh = self.fragment(F32)
                rw = cute.make_rmem_tensor((self.own,), v.element_type)
                for i in cutlass.range_constexpr(self.own):
                    rw[i] = rv[i]
                widen(raw, fh, self.spread)
                if const_expr(self.early and self.chunks > 1):
                    if it + 1 < self.chunks:
                        self.copy_rows(source, raw, row0 + self.chunk, lane, False)
                        if const_expr(not self.loop):
                            self.read_values(v[ni, t0, hv, None], rv, self.unit(vt, it + 1, group, part))
                scaled = F32(1.0)
                if const_expr(self.loop):
                    for t in cutlass.range(length, unroll=1):
                        self.read_key(sQ[t, None], fq, lane)
                        self.read_key(sK[t, None], fk, lane)
                        if const_expr(self.per_k):
                            self.read_key(sG[t, None], fg, lane)
                        decay = sS[t, 0]
                        beta = sS[t, 1]
                        kq = sS[t, 2]
                        self.read_values(sV[t, None], rw, self.unit(0, it, group, part))
                        o = output[ni, t0 + t, hv, None]
                        scaled = self.advance(
                            fh, rw, fq, fk, fg, decay, scaled, beta, kq, scale, use_qk_l2norm, row0, unit, lane, group, part, home,
                            sR, t % 2, o,
                        )  # fmt: skip
                        self.keep_state(
                            state, slot_index, intermediate, slots, columns, steps, n, row, t, hv, fh, scaled, keeps, null_index, row0, lane,
                        )  # fmt: skip
                else:
                    o = output[ni, t0, hv, None]
                    scaled = self.advance(
                        fh, rw, fq, fk, fg, decay, scaled, beta, kq, scale, use_qk_l2norm, row0, unit, lane, group, part, home, sR, 0, o,
                    )  # fmt: skip
                    self.keep_state(
                        state, slot_index, intermediate, slots, columns, steps, n, row, 0, hv, fh, scaled, keeps, null_index, row0, lane,
                    )  # fmt: skip
                if const_expr(self.update):
                    if writes:
                        self.store_rows(state[Int64(write_slot), hv, None, None], fh, scaled, row0, lane)
        else:
            self.zero_rows(output, ni, t0, length, hv, v0, tid)

    @cute.jit
    def keep_state(
        self, state, slot_index, intermediate, slots, columns, steps, n, row, t, hv, fh, scaled: Float32, keeps, null_index: Int32,
        row0, lane,
    ):  # fmt: skip
        """Writes the state after token t to its place among the intermediate states, where the contract has them."""
        if const_expr(self.intermediate == "slots"):
            # a ragged request may have more tokens than there are columns
            if t < columns:
                slot = slot_index[n, t]
                if slot >= 0 and slot < slots and slot != null_index:
                    self.store_rows(state[Int64(slot), hv, None, None], fh, scaled, row0, lane)
        elif const_expr(self.intermediate != "none"):
            if keeps and t < steps:
                self.store_rows(intermediate[row, Int64(t), hv, None, None], fh, scaled, row0, lane)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return decode.compiled(Recurrent(facts, knobs), facts, options, prefix)
