"""Gated delta rule decode, GDN and KDA, one pass over the state for each token.

    S <- decay S;   u <- beta (v - S k);   o <- S q + u (k.q);   S <- S + u k^T        (S is [V, K], q and k normalised, q scaled)

A thread holds RV rows of V by RK key positions of one head's state in fp32; `lanes` threads of a warp share RV rows and sum S k and
S q by butterflies. With `spread` each step of these halves the rows too, so that a thread ends with the sums of `own` rows, computes
their u and output alone, and hands u round: half the instructions of the sums, and one wait more. k_last reads vectors along K, v_last
along V; the arithmetic between is the same. T = 1 is straight-line code, T >= 2 a loop at run time over a state that stays in registers.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, gates

F32 = Float32
# A state is held as S / scaled; below this, 1 / scaled would soon cost exponent range.
SMALLEST_SCALE = 2.0**-40


class Operands(NamedTuple):
    """A call's tensors, by the calling convention of kernels; None what the contract lacks."""

    state: Any
    q: Any
    k: Any
    v: Any
    a: Any
    b: Any
    A_log: Any
    dt_bias: Any
    read_index: Any
    write_index: Any
    slot_index: Any
    accepted: Any
    cu_seqlens: Any
    intermediate: Any
    output: Any


class Options(NamedTuple):
    """A call's scalars."""

    scale: Any
    softplus_beta: Any
    threshold: Any
    lower_bound: Any
    beta_scale: Any
    null_index: Any
    use_qk_l2norm: Any


class Thread(NamedTuple):
    """Where a thread stands: in its block, among those of a row, and its row's among the block's.

    part: which `own` of its RV rows it will have the sums of. home: where in its warp the row's threads begin.
    """

    tid: Any
    lane: Any
    group: Any
    part: Any
    home: Any


class Block(NamedTuple):
    """What a block works on: tile vt of V, from row v0, of head hv of request n, which reads q/k head hq.

    ni, t0, length: where the request's tokens lie, row of q and first token there, and how many there are.
    """

    vt: Any
    v0: Any
    hv: Any
    hq: Any
    n: Any
    ni: Any
    t0: Any
    length: Any


class Gate(NamedTuple):
    """A head's A and bias; of KDA, whose bias is one a key, its row `dh` of dt_bias, and, at T = 1, a lane's share of it."""

    A: Any
    bias: Any
    dh: Any
    rbias: Any


class Read(NamedTuple):
    """Registers for what was asked for of q, k, v and the gates: one token's, or those that a warp stages."""

    q: Any
    k: Any
    g: Any
    v: Any
    a: Any
    b: Any


class Token(NamedTuple):
    """One token as `advance` takes it: a thread's shares of q, k and KDA's decays in fp32, decay, beta and k.q."""

    fq: Any
    fk: Any
    fg: Any
    decay: Any
    beta: Any
    kq: Any


class Stage(NamedTuple):
    """Several tokens in shared memory: q and k normalised, KDA's decays, v, and (decay, beta, k.q)."""

    q: Any
    k: Any
    g: Any
    v: Any
    scalars: Any


class Kept(NamedTuple):
    """Where states between tokens go: slots of the pool, or a row of `intermediate`, if it `keeps` any.

    row_slots: a request's slots, one a lane, where they were read at once.
    """

    slots: Any
    columns: Any
    steps: Any
    row: Any
    keeps: Any
    row_slots: Any


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
        super().__init__(facts, knobs["tile_v"], knobs["threads"], knobs["registers"], knobs["heads"], knobs["pdl"])
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
    def normalise(self, fq, fk, options, thread, sR):
        """A thread's shares of q and k normalised and scaled; gives k.q."""
        sums = cute.make_rmem_tensor((3,), F32)
        sums.fill(0.0)
        for j in cutlass.range_constexpr(self.RK):
            sums[0] = sums[0] + fq[j] * fq[j]
            sums[1] = sums[1] + fk[j] * fk[j]
            sums[2] = sums[2] + fq[j] * fk[j]
        self.reduce(sums, 0, 3, sR, 0, thread)
        iq, ik = self.norms(sums[0], sums[1], options.scale, options.use_qk_l2norm)
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
    def read_token(self, x, block, thread):
        """Issues the loads of one token: this thread's share of its q, k and v, of KDA its warp's share of g, and the scalars."""
        rq = cute.make_rmem_tensor((self.RK,), x.q.element_type)
        rk = cute.make_rmem_tensor((self.RK,), x.k.element_type)
        rg = cute.make_rmem_tensor((self.K // 32,), x.a.element_type)
        rv = cute.make_rmem_tensor((self.own,), x.v.element_type)
        ga = F32(0.0)
        self.read_key(x.q[block.ni, block.t0, block.hq, None], rq, thread.lane)
        self.read_key(x.k[block.ni, block.t0, block.hq, None], rk, thread.lane)
        if const_expr(self.per_k):
            self.read_lane(x.a[block.ni, block.t0, block.hv, None], rg, thread.tid % 32)
        else:
            ga = x.a[block.ni, block.t0, block.hv].to(F32)
        gb = x.b[block.ni, block.t0, block.hv].to(F32)
        self.read_values(x.v[block.ni, block.t0, block.hv, None], rv, self.unit(block.vt, 0, thread))
        return Read(rq, rk, rg, rv, ga, gb)

    @cute.jit
    def use_token(self, read, gate, options, sD, fq, fk, fg, thread):
        """Widens what `read_token` brought into fq, fk and fg; gives decay and beta.

        KDA's decays are computed once a warp, K/32 by each thread, and handed round in shared memory, sD: each by itself, the threads
        of a warp would compute them 32/lanes times over.
        """
        widen(read.q, fq, self.spread)
        widen(read.k, fk, self.spread)
        decay = F32(1.0)
        if const_expr(self.per_k):
            W = const_expr(self.K // 32)
            own = cute.make_rmem_tensor((W,), F32)
            for j in cutlass.range_constexpr(W):
                b = F32(0.0) if const_expr(gate.rbias is None) else gate.rbias[j].to(F32)
                own[j] = self.decay_of(read.g[j].to(F32), gate.A, b, options)
            cute.autovec_copy(own, cute.local_tile(sD, (W,), (thread.tid % 32,)))
            cute.arch.sync_warp()
            self.read_key(sD, fg, thread.lane)
        else:
            decay = self.decay_of(read.a, gate.A, gate.bias, options)
        return decay, self.beta_of(read.b, options.beta_scale)

    @cute.jit
    def decay_of(self, x, A, bias, options):
        return gates.decay(self.gate, x, A, bias, options.softplus_beta, options.threshold, options.lower_bound)

    @cute.jit
    def read_stage(self, x, block, thread):
        """Issues this thread's loads of what `write_stage` puts into shared memory: a warp a token, and a share of v."""
        tid = thread.tid
        # a warp's tokens lie side by side
        per_token = cute.make_layout((self.stage_tokens, self.K // 32), stride=(self.K // 32, 1))
        rq = cute.make_rmem_tensor(per_token, x.q.element_type)
        rk = cute.make_rmem_tensor(per_token, x.k.element_type)
        rg = cute.make_rmem_tensor(per_token, x.a.element_type)
        rs = cute.make_rmem_tensor(cute.make_layout((self.stage_tokens, 2), stride=(2, 1)), F32)
        rv = cute.make_rmem_tensor(cute.make_layout((self.stage_values, self.VW), stride=(self.VW, 1)), x.v.element_type)
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < block.length:
                self.read_lane(x.q[block.ni, block.t0 + t, block.hq, None], rq[r, None], tid % 32)
                self.read_lane(x.k[block.ni, block.t0 + t, block.hq, None], rk[r, None], tid % 32)
                if const_expr(self.per_k):
                    self.read_lane(x.a[block.ni, block.t0 + t, block.hv, None], rg[r, None], tid % 32)
                else:
                    rs[r, 0] = x.a[block.ni, block.t0 + t, block.hv].to(F32)
                rs[r, 1] = x.b[block.ni, block.t0 + t, block.hv].to(F32)
        for r in cutlass.range_constexpr(self.stage_values):
            e = r * self.threads + tid
            t = e // (self.tile_v // self.VW)
            if t < block.length:
                at = block.v0 // self.VW + e % (self.tile_v // self.VW)
                row = x.v[block.ni, block.t0 + t, block.hv, None]
                cute.autovec_copy(cute.local_tile(row, (self.VW,), (at,)), rv[r, None])
        return Read(rq, rk, rg, rv, rs[None, 0], rs[None, 1])

    @cute.jit
    def read_lane(self, source, target, wl):
        cute.autovec_copy(cute.local_tile(source, (self.K // 32,), (wl,)), target)

    @cute.jit
    def write_stage(self, stage, read, dt_bias, gate, options, length, tid):
        """What `read_stage` asked for to shared memory, q and k normalised."""
        wl = tid % 32
        W = const_expr(self.K // 32)
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < length:
                sq = F32(0.0)
                sk = F32(0.0)
                kq = F32(0.0)
                for j in cutlass.range_constexpr(W):
                    sq += read.q[r, j].to(F32) * read.q[r, j].to(F32)
                    sk += read.k[r, j].to(F32) * read.k[r, j].to(F32)
                    kq += read.q[r, j].to(F32) * read.k[r, j].to(F32)
                for s in cutlass.range_constexpr(5):
                    sq += cute.arch.shuffle_sync_bfly(sq, offset=16 >> s, mask=-1, mask_and_clamp=31)
                    sk += cute.arch.shuffle_sync_bfly(sk, offset=16 >> s, mask=-1, mask_and_clamp=31)
                    kq += cute.arch.shuffle_sync_bfly(kq, offset=16 >> s, mask=-1, mask_and_clamp=31)
                iq, ik = self.norms(sq, sk, options.scale, options.use_qk_l2norm)
                for j in cutlass.range_constexpr(W):
                    stage.q[t, wl * W + j] = read.q[r, j].to(F32) * iq
                    stage.k[t, wl * W + j] = read.k[r, j].to(F32) * ik
                decay = F32(1.0)
                if const_expr(self.per_k):
                    for j in cutlass.range_constexpr(W):
                        bk = F32(0.0) if const_expr(dt_bias is None) else dt_bias[gate.dh, wl * W + j].to(F32)
                        stage.g[t, wl * W + j] = self.decay_of(read.g[r, j].to(F32), gate.A, bk, options)
                else:
                    decay = self.decay_of(read.a[r], gate.A, gate.bias, options)
                if wl == 0:
                    stage.scalars[t, 0] = decay
                    stage.scalars[t, 1] = self.beta_of(read.b[r], options.beta_scale)
                    stage.scalars[t, 2] = kq * iq * ik
        for r in cutlass.range_constexpr(self.stage_values):
            e = r * self.threads + tid
            t = e // (self.tile_v // self.VW)
            if t < length:
                at = e % (self.tile_v // self.VW)
                cute.autovec_copy(read.v[r, None], cute.local_tile(stage.v[t, None], (self.VW,), (at,)))

    @cute.jit
    def shared_sums(self, smem):
        """Shared memory for a row's sums, padded to whole vectors; None where a row is one warp's."""
        sR = None
        if const_expr(self.split > 1):
            n4 = const_expr((2 * self.RV + 6) // 4 * 4)
            shape = (2, self.split, self.groups, n4)
            stride = (self.split * self.groups * n4, self.groups * n4, n4, 1)
            sR = smem.allocate_tensor(F32, cute.make_layout(shape, stride=stride), 16)
        return sR

    @cute.jit
    def shared_stage(self, smem, dtype):
        """Shared memory for several tokens; dtype: of v."""
        T = const_expr(self.tokens)
        wide = cute.make_layout((T, self.K), stride=(self.K, 1))
        sQ = smem.allocate_tensor(F32, wide, 16)
        sK = smem.allocate_tensor(F32, wide, 16)
        sG = smem.allocate_tensor(F32, wide, 16) if const_expr(self.per_k) else None
        sS = smem.allocate_tensor(F32, cute.make_layout((T, 4), stride=(4, 1)), 16)
        sV = smem.allocate_tensor(dtype, cute.make_layout((T, self.tile_v), stride=(self.tile_v, 1)), 16)
        return Stage(sQ, sK, sG, sV, sS)

    @cute.jit
    def one_token(self, x, options, block, thread, gate, read, kept, source, raw, write_slot, writes):
        """T = 1, straight-line but for the chunks of rows."""
        fq = cute.make_rmem_tensor((self.RK,), F32)
        fk = cute.make_rmem_tensor((self.RK,), F32)
        fg = cute.make_rmem_tensor((self.RK,), F32)
        decay = F32(1.0)
        beta = F32(1.0)
        kq = F32(0.0)
        smem = SmemAllocator()
        sR = self.shared_sums(smem)
        sD = None
        if const_expr(self.per_k):
            shape, stride = (self.warps, self.K), (self.K, 1)
            sD = smem.allocate_tensor(F32, cute.make_layout(shape, stride=stride), 16)[thread.tid // 32, None]
        if const_expr(self.fence):
            # Always true, which the compiler cannot know: arithmetic does not move across a branch.
            if options.beta_scale != F32(0.0):
                decay, beta = self.use_token(read, gate, options, sD, fq, fk, fg, thread)
                kq = self.normalise(fq, fk, options, thread, sR)
        else:
            decay, beta = self.use_token(read, gate, options, sD, fq, fk, fg, thread)
        v = x.v[block.ni, block.t0, block.hv, None]
        # rolled: unrolled over four chunks of a large tile one variant took 2.1 s to compile instead of 0.5
        for it in cutlass.range(self.chunks, unroll=1):
            row0 = block.v0 + it * self.chunk + thread.group * self.RV
            unit = self.unit(block.vt, it, thread)
            if const_expr(not self.early):
                self.copy_rows(source, raw, row0, thread.lane, False)
                if const_expr(self.chunks > 1):
                    self.read_values(v, read.v, unit)
            fh = self.fragment(F32)
            rw = cute.make_rmem_tensor((self.own,), x.v.element_type)
            for i in cutlass.range_constexpr(self.own):
                rw[i] = read.v[i]
            widen(raw, fh, self.spread)
            if const_expr(self.early and self.chunks > 1):
                if it + 1 < self.chunks:
                    self.copy_rows(source, raw, row0 + self.chunk, thread.lane, False)
                    self.read_values(v, read.v, self.unit(block.vt, it + 1, thread))
            token = Token(fq, fk, fg, decay, beta, kq)
            o = x.output[block.ni, block.t0, block.hv, None]
            scaled = self.advance(fh, rw, token, F32(1.0), options, row0, unit, thread, sR, 0, o)
            self.keep_state(x, kept, options.null_index, block, 0, fh, scaled, row0, thread.lane)
            if const_expr(self.update):
                if writes:
                    self.store_rows(x.state[Int64(write_slot), block.hv, None, None], fh, scaled, row0, thread.lane)

    @cute.jit
    def many_tokens(self, x, options, block, thread, gate, read, kept, source, raw, write_slot, writes):
        """T >= 2: the block's tokens go to shared memory once, and the state of a chunk of rows over them in a loop."""
        fq = cute.make_rmem_tensor((self.RK,), F32)
        fk = cute.make_rmem_tensor((self.RK,), F32)
        fg = cute.make_rmem_tensor((self.RK,), F32)
        smem = SmemAllocator()
        sR = self.shared_sums(smem)
        stage = self.shared_stage(smem, x.v.element_type)
        self.write_stage(stage, read, x.dt_bias, gate, options, block.length, thread.tid)
        cute.arch.sync_threads()
        # rolled, as for one token
        for it in cutlass.range(self.chunks, unroll=1):
            row0 = block.v0 + it * self.chunk + thread.group * self.RV
            unit = self.unit(block.vt, it, thread)
            if const_expr(not self.early):
                self.copy_rows(source, raw, row0, thread.lane, False)
            fh = self.fragment(F32)
            rw = cute.make_rmem_tensor((self.own,), x.v.element_type)
            widen(raw, fh, self.spread)
            if const_expr(self.early and self.chunks > 1):
                if it + 1 < self.chunks:
                    self.copy_rows(source, raw, row0 + self.chunk, thread.lane, False)
            scaled = F32(1.0)
            for t in cutlass.range(block.length, unroll=1):
                self.read_key(stage.q[t, None], fq, thread.lane)
                self.read_key(stage.k[t, None], fk, thread.lane)
                if const_expr(self.per_k):
                    self.read_key(stage.g[t, None], fg, thread.lane)
                token = Token(fq, fk, fg, stage.scalars[t, 0], stage.scalars[t, 1], stage.scalars[t, 2])
                self.read_values(stage.v[t, None], rw, self.unit(0, it, thread))
                o = x.output[block.ni, block.t0 + t, block.hv, None]
                scaled = self.advance(fh, rw, token, scaled, options, row0, unit, thread, sR, t % 2, o)
                self.keep_state(x, kept, options.null_index, block, t, fh, scaled, row0, thread.lane)
            if const_expr(self.update):
                if writes:
                    self.store_rows(x.state[Int64(write_slot), block.hv, None, None], fh, scaled, row0, thread.lane)

    def thread(self, tid):
        """A thread's place among those of a row, and its row's among the block's."""
        if self.k_last:
            return tid % self.lanes, tid // self.lanes
        warp = tid // 32
        lane = warp % self.split * self.lanes + tid % 32 // self.step
        return lane, warp // self.split * self.step + tid % self.step

    @cute.jit
    def gate_of(self, x, A_shared, dt_shared, hq, hv, tid):
        """Issues the loads of what a head's gate hangs on beside the token."""
        ah, dh = self.parameters(x.A_log, A_shared, dt_shared, hq, hv)
        A = F32(0.0) if const_expr(x.A_log is None) else x.A_log[ah].to(F32)
        bias = F32(0.0) if const_expr(x.dt_bias is None or self.per_k) else x.dt_bias[dh].to(F32)
        rbias = None
        if const_expr(self.per_k and x.dt_bias is not None and not self.loop):
            rbias = cute.make_rmem_tensor((self.K // 32,), x.dt_bias.element_type)
            self.read_lane(x.dt_bias[dh, None], rbias, tid % 32)
        return Gate(A, bias, dh, rbias)

    @cute.jit
    def read(self, x, block, thread):
        """Issues the loads of what the tokens bring."""
        return self.read_stage(x, block, thread) if const_expr(self.loop) else self.read_token(x, block, thread)

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, heads: cute.FastDivmodDivisorV2,
        slots: Int32, tokens: Int32, columns, rows, steps, A_shared, dt_shared,
    ):  # fmt: skip
        x = Operands(
            state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output
        )  # fmt: skip
        options = Options(scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm)
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        lane, group = self.thread(tid)
        hq, _ = divmod(hv, heads)
        part = lane % self.lanes // self.alike
        home = tid % 32 - lane if const_expr(self.k_last) else tid % self.step
        thread = Thread(tid, lane, group, part, home)

        self.await_producer("first")
        row_slots = None
        if const_expr(self.row):
            row_slots, first = self.ask_row(n, tid % 32, slot_index, accepted, columns)
            slot = Int32(0)
            write_slot = write_index[n] if const_expr(self.pool and self.update) else slot
        else:
            slot, write_slot = self.slots_of(n, read_index, write_index, slot_index, accepted, columns)
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, cu_seqlens, tokens)

        # What does not hang on the slot is loaded while the slot's index is on its way: at small batches each is a wait for memory.
        block = Block(vt, vt * self.tile_v, hv, hq, n, ni, t0, length)
        gate = self.gate_of(x, A_shared, dt_shared, hq, hv, tid)
        read = self.read(x, block, thread) if const_expr(self.pdl != "state") else None
        # Loads do not move across this; without it the compiler sinks them below the branch (0.08 us at B=1 on an H100).
        cute.arch.sync_warp()

        if const_expr(self.row):
            slot = self.start_of_row(row_slots, first, n, slot_index, columns)
        live, writes = self.named(slot, write_slot, slots, null_index)
        row = Int64(n)
        keeps = live
        if const_expr(self.intermediate == "indexed"):
            at = slot_index[n]
            keeps = at >= 0 and at < rows and at != null_index
            row = Int64(at)
        kept = Kept(slots, columns, steps, row, keeps, row_slots)

        if live:
            source = state[Int64(slot), hv, None, None]
            raw = self.fragment(self.state_dtype)
            if const_expr(self.early):
                self.copy_rows(source, raw, block.v0 + group * self.RV, lane, False)
                if const_expr(self.per_k and not self.loop and not self.fence):
                    # the gates' arithmetic does not move across this: it would wait for g before the state is asked for
                    cute.arch.sync_warp()
            body = self.many_tokens if const_expr(self.loop) else self.one_token
            if const_expr(self.pdl == "state"):
                self.await_producer("state")
                late = self.read(x, block, thread)
                # as above
                cute.arch.sync_warp()
                body(x, options, block, thread, gate, late, kept, source, raw, write_slot, writes)
            else:
                body(x, options, block, thread, gate, read, kept, source, raw, write_slot, writes)
        else:
            self.await_producer("state")
            self.zero_rows(output, ni, t0, length, hv, block.v0, tid)

    @cute.jit
    def keep_state(self, x, kept, null_index: Int32, block, t, fh, scaled: Float32, row0, lane):
        """Writes the state after token t to its place among the intermediate states, where the contract has them."""
        if const_expr(self.intermediate == "slots"):
            # a ragged request may have more tokens than there are columns
            if t < kept.columns:
                if const_expr(self.row):
                    slot = self.of_row(kept.row_slots, Int32(t))
                else:
                    slot = x.slot_index[block.n, t]
                if slot >= 0 and slot < kept.slots and slot != null_index:
                    self.store_rows(x.state[Int64(slot), block.hv, None, None], fh, scaled, row0, lane)
        elif const_expr(self.intermediate != "none"):
            if kept.keeps and t < kept.steps:
                self.store_rows(x.intermediate[kept.row, Int64(t), block.hv, None, None], fh, scaled, row0, lane)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return decode.compiled(Recurrent(facts, knobs), facts, options, prefix)
