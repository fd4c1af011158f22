"""Gated delta rule decode of two to four tokens, GDN, in one pass over the state on CUDA cores.

With S0 the state before the call, D_t the product of the decays up to token t and F_(t,i) that of
tokens i+1..t,

    u_t = beta_t (v_t - D_t S0 k_t - sum_(i<t) F_(t,i) (k_i.k_t) u_i)
    o_t = D_t S0 q_t + sum_(i<=t) F_(t,i) (k_i.q_t) u_i
    S_t = decay_t S_(t-1) + u_t k_t^T

which is `wy`'s form, with the states between tokens. `lanes` threads of a warp share `ilp` rows of
V, and each has its keys of all tokens and of the state in registers. `recurrent` waits for a
butterfly once a token; here the sums S0 k_t and S0 q_t of all tokens are one butterfly. So it wins
where few blocks run and waiting is what counts: on an H200 up to 16 to 130 work units, by tokens.

All that is read is asked for first: the slot's index, then gates, q, k and v while it is on its way,
then the state; the sums over q and k alone are taken while the state is on its way.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, shuffles

F32 = Float32


class WYLanes(decode.Decode):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        self.lanes, self.RV, threads = knobs["lanes"], knobs["ilp"], knobs["threads"]
        self.groups = threads // self.lanes
        super().__init__(facts, self.groups * self.RV, threads, pdl=knobs["pdl"])
        self.shared, self.row = knobs["shared"], self.intermediate == "slots"
        self.warps = threads // 32
        self.T = self.tokens
        self.RK = self.K // self.lanes
        # a load of the state, and of q and k
        self.vec = min(16 // (self.state_dtype.width // 8), self.RK)
        T = self.T
        # sums over q and k alone, a line a token: |k_t|^2, |q_t|^2, k_i.k_t of i < t, k_i.q_t of i <= t
        self.line = 2 + (T - 1) + T
        # the same, as (token of the one, token of the other or None for its own, whether the other is q)
        self.pairs = [
            x
            for t in range(T)
            for x in [
                (t * self.line, "k", t, "k", t),
                (t * self.line + 1, "q", t, "q", t),
                *((t * self.line + 2 + i, "k", i, "k", t) for i in range(t)),
                *((t * self.line + 1 + T + i, "k", i, "q", t) for i in range(t + 1)),
            ]
        ]

    @property
    def each(self) -> int:
        """Sums over q and k that a warp takes where they are shared out, rounded up to a power of two."""
        return 1 << (-(-len(self.pairs) // self.warps) - 1).bit_length()

    @cute.jit
    def read_keys(self, source, target, length, hq, lane):
        """Issues the loads of a thread's key positions of every token; what is no token is zero."""
        for t in cutlass.range_constexpr(self.T):
            if const_expr(self.ragged):
                target[t, None].fill(0)
                if t < length:
                    self.read_row(source[0, t, hq, None], target[t, None], lane)
            else:
                self.read_row(source[0, t, hq, None], target[t, None], lane)

    @cute.jit
    def read_row(self, source, target, lane):
        for c in cutlass.range_constexpr(self.RK // self.vec):
            run = cute.local_tile(source, (self.vec,), (c * self.lanes + lane,))
            cute.autovec_copy(run, cute.local_tile(target, (self.vec,), (c,)))

    @cute.jit
    def copy_rows(self, tile, raw, row0, lane, store: cutlass.Constexpr):
        """Moves a thread's RV by RK elements between the head's state `tile` in memory and registers."""
        for i in cutlass.range_constexpr(self.RV):
            for c in cutlass.range_constexpr(self.RK // self.vec):
                m = cute.local_tile(tile[row0 + i, None], (self.vec,), (c * self.lanes + lane,))
                r = cute.local_tile(raw[i, None], (self.vec,), (c,))
                if const_expr(store):
                    cute.autovec_copy(r, m)
                else:
                    cute.autovec_copy(m, r)

    @cute.jit
    def store_rows(self, tile, fh, row0, lane):
        """Rounds a thread's state and writes it to the head's state `tile`."""
        raw = cute.make_rmem_tensor(fh.layout, self.state_dtype)
        for i in cutlass.range_constexpr(self.RV):
            for j in cutlass.range_constexpr(self.RK):
                raw[i, j] = fh[i, j].to(self.state_dtype)
        self.copy_rows(tile, raw, row0, lane, True)

    @cute.jit
    def over_lanes(self, sums, n: cutlass.Constexpr):
        """Sums n values over the threads of a row; they end in each of them."""
        found = shuffles.sums([sums[i] for i in range(n)], self.lanes)
        for i in cutlass.range_constexpr(n):
            sums[i] = found[i]

    @cute.jit
    def dots(self, fk, fq, chosen: cutlass.Constexpr, sums):
        """A thread's part of the chosen sums over q and k, each at its place among the chosen."""
        for p in cutlass.range_constexpr(len(chosen)):
            _, x, tx, y, ty = const_expr(chosen[p])
            total = F32(0.0)
            for j in cutlass.range_constexpr(self.RK):
                a = fk[tx, j] if const_expr(x == "k") else fq[tx, j]
                b = fk[ty, j] if const_expr(y == "k") else fq[ty, j]
                total += a * b
            sums[p] = total

    @cute.jit
    def gram(self, fk, fq, sG, tid):
        """All sums over q and k: by each group of lanes for itself, or a part of them by each warp."""
        g = cute.make_rmem_tensor((self.T * self.line,), F32)
        if const_expr(self.shared):
            n, lane = const_expr(self.each), tid % self.lanes
            own = const_expr(max(1, n // self.lanes))
            # alike in a warp, and known to be: else each shuffle below is compiled for a warp that is divided, too
            warp = cute.arch.make_warp_uniform(tid // 32)
            sums = cute.make_rmem_tensor((n,), F32)
            sums.fill(0.0)
            for w in cutlass.range_constexpr(self.warps):
                if warp == w:
                    self.dots(fk, fq, self.pairs[w :: self.warps], sums)
            shuffles.sums_shared_out(sums, n, lane, self.lanes)
            if tid % 32 < self.lanes and lane % (self.lanes * own // n) == 0:
                for e in cutlass.range_constexpr(own):
                    sG[warp * n + lane * n // self.lanes + e] = sums[e]
            cute.arch.sync_threads()
            for p in cutlass.range_constexpr(len(self.pairs)):
                g[self.pairs[p][0]] = sG[p % self.warps * n + p // self.warps]
        else:
            sums = cute.make_rmem_tensor((len(self.pairs),), F32)
            self.dots(fk, fq, self.pairs, sums)
            self.over_lanes(sums, len(self.pairs))
            for p in cutlass.range_constexpr(len(self.pairs)):
                g[self.pairs[p][0]] = sums[p]
        return g

    @cute.jit
    def work(self, call, options, sizes):
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        T, RV, RK = const_expr(self.T), const_expr(self.RV), const_expr(self.RK)
        wl = tid % 32
        lane = tid % self.lanes
        row0 = vt * self.tile_v + tid // self.lanes * RV
        hq, _ = divmod(hv, sizes.heads)
        self.await_producer("first")
        asked = self.ask_slots(n, wl, call, sizes.columns)
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, call.cu_seqlens, sizes.tokens)
        # Once for all tokens: where a ragged request begins is known late, how far apart its tokens are is not.
        q, k, v, output = (
            cute.domain_offset((ni, t0, 0, 0), x) for x in (call.q, call.k, call.v, call.output)
        )
        a, b = (cute.domain_offset((ni, t0, 0), x) for x in (call.a, call.b))
        A, bias, _ = self.head_gate(
            call.A_log, call.dt_bias, sizes.A_shared, sizes.dt_shared, hq, hv
        )
        keys = cute.make_layout((T, RK), stride=(RK, 1))
        rk = cute.make_rmem_tensor(keys, k.element_type)
        rq = cute.make_rmem_tensor(keys, q.element_type)
        rv = cute.make_rmem_tensor(cute.make_layout((T, RV), stride=(RV, 1)), v.element_type)
        # lane t of each four has token t's gates
        ga = F32(0.0)
        gb = F32(0.0)
        # of ragged requests these wait for memory as long as the state does, which is one load: it goes first
        late = const_expr(self.ragged or self.pdl == "state")
        if const_expr(not late):
            ga, gb = self.read_inputs(q, k, v, a, b, length, hq, hv, row0, wl, lane, rk, rq, rv)
        # Loads do not move across this; without it the compiler sinks them below the branch.
        cute.arch.sync_warp()
        slot = self.start_of(asked, n, call.slot_index, sizes.columns)
        live, writes = self.named(slot, asked.write_slot, sizes.slots, options.null_index)
        row, keeps = self.kept_row(n, live, call.slot_index, sizes.rows, options.null_index)
        if live:
            tile = cute.make_layout((RV, RK), stride=(RK, 1))
            raw = cute.make_rmem_tensor(tile, self.state_dtype)
            self.copy_rows(call.state[Int64(slot), hv, None, None], raw, row0, lane, False)
            if const_expr(late):
                cute.arch.sync_warp()
                self.await_producer("state")
                ga, gb = self.read_inputs(q, k, v, a, b, length, hq, hv, row0, wl, lane, rk, rq, rv)
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            sG = None
            if const_expr(self.shared):
                sG = SmemAllocator().allocate_tensor(
                    F32, cute.make_layout((self.warps * self.each,), stride=(1,)), 16
                )
            fk = cute.make_rmem_tensor(keys, F32)
            fq = cute.make_rmem_tensor(keys, F32)
            for t in cutlass.range_constexpr(T):
                for j in cutlass.range_constexpr(RK):
                    fk[t, j] = rk[t, j].to(F32)
                    fq[t, j] = rq[t, j].to(F32)
            g = self.gram(fk, fq, sG, tid)
            decay = self.decay_of(ga, A, bias, options)
            beta = self.beta_of(gb, options.beta_scale)
            if wl % 4 >= length:
                decay = F32(1.0)
                beta = F32(0.0)
            rd = cute.make_rmem_tensor((T,), F32)
            rb = cute.make_rmem_tensor((T,), F32)
            ik = cute.make_rmem_tensor((T,), F32)
            iq = cute.make_rmem_tensor((T,), F32)
            for t in cutlass.range_constexpr(T):
                rd[t] = shuffles.at_lane(decay, Int32(t))
                rb[t] = shuffles.at_lane(beta, Int32(t))
                x, y = self.norms(
                    g[t * self.line + 1], g[t * self.line], options.scale, options.use_qk_l2norm
                )
                iq[t] = x
                ik[t] = y

            fh = cute.make_rmem_tensor(tile, F32)
            sums = cute.make_rmem_tensor((2 * T * RV,), F32)
            for i in cutlass.range_constexpr(RV):
                for j in cutlass.range_constexpr(RK):
                    fh[i, j] = raw[i, j].to(F32)
                for t in cutlass.range_constexpr(T):
                    x = F32(0.0)
                    y = F32(0.0)
                    for j in cutlass.range_constexpr(RK):
                        x += fh[i, j] * fk[t, j]
                        y += fh[i, j] * fq[t, j]
                    sums[2 * (t * RV + i)] = x
                    sums[2 * (t * RV + i) + 1] = y
            self.over_lanes(sums, 2 * T * RV)
            # w: u_t over the norm of k_t, which its key is then taken with as it came; x: what of it is left, and its own norm
            w = cute.make_rmem_tensor((T * RV,), F32)
            ro = cute.make_rmem_tensor((T * RV,), F32)
            for i in cutlass.range_constexpr(RV):
                x = cute.make_rmem_tensor((T,), F32)
                total = F32(1.0)
                for t in cutlass.range_constexpr(T):
                    total = total * rd[t]
                    u = sums[2 * (t * RV + i)] * total
                    y = sums[2 * (t * RV + i) + 1] * total
                    for s in cutlass.range_constexpr(t):
                        x[s] = x[s] * rd[t]
                        u += x[s] * g[t * self.line + 2 + s]
                        y += x[s] * g[t * self.line + 1 + T + s]
                    u = (rv[t, i].to(F32) - u * ik[t]) * rb[t]
                    x[t] = u * ik[t]
                    w[t * RV + i] = x[t]
                    ro[t * RV + i] = (y + x[t] * g[t * self.line + 1 + T + t]) * iq[t]
            self.write_outputs(ro, output, length, hv, row0, lane)
            for t in cutlass.range_constexpr(T):
                for i in cutlass.range_constexpr(RV):
                    for j in cutlass.range_constexpr(RK):
                        fh[i, j] = fh[i, j] * rd[t] + w[t * RV + i] * fk[t, j]
                if const_expr(self.intermediate != "none"):
                    to, ok = self.kept_at(t, asked, row, keeps, length, sizes, options.null_index)
                    if ok:
                        self.store_rows(
                            self.kept_head(call.state, call.intermediate, to, t, hv), fh, row0, lane
                        )
            if const_expr(self.update):
                if writes:
                    self.store_rows(
                        call.state[Int64(asked.write_slot), hv, None, None], fh, row0, lane
                    )
        else:
            self.await_producer("state")
            self.zero_rows(output, Int32(0), Int32(0), length, hv, vt * self.tile_v, tid)

    @cute.jit
    def read_inputs(self, q, k, v, a, b, length, hq, hv, row0, wl, lane, rk, rq, rv):
        """Issues the loads of this thread's share of q, k and v; gives the gates of token wl % 4."""
        mine = (0, wl % 4, hv)
        a, b = cute.domain_offset(mine, a), cute.domain_offset(mine, b)
        ra = F32(0.0).to(a.element_type)
        rb = F32(0.0).to(b.element_type)
        if wl % 4 < length:
            ra = a[0, 0, 0]
        if wl % 4 < length:
            rb = b[0, 0, 0]
        self.read_keys(k, rk, length, hq, lane)
        self.read_keys(q, rq, length, hq, lane)
        for t in cutlass.range_constexpr(self.T):
            if const_expr(self.ragged):
                rv[t, None].fill(0)
                if t < length:
                    self.read_values(v, rv, t, hv, row0)
            else:
                self.read_values(v, rv, t, hv, row0)
        return ra.to(F32), rb.to(F32)

    @cute.jit
    def read_values(self, v, rv, t: cutlass.Constexpr, hv, row0):
        values = cute.local_tile(v[0, t, hv, None], (self.RV,), (row0 // self.RV,))
        cute.autovec_copy(values, rv[t, None])

    @cute.jit
    def write_outputs(self, ro, output, length, hv, row0, lane):
        """Lane l of a row's threads writes the l-th of the group's outputs: one store for as many as there are lanes."""
        n = const_expr(self.T * self.RV)
        for r in cutlass.range_constexpr(-(-n // self.lanes)):
            here = const_expr(min(self.lanes, n - r * self.lanes))
            x = ro[r * self.lanes]
            for i in cutlass.range_constexpr(1, here):
                if lane == i:
                    x = ro[r * self.lanes + i]
            at = r * self.lanes + lane
            t = at // self.RV
            if lane < here and t < length:
                output[0, t, hv, row0 + at % self.RV] = x.to(output.element_type)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return decode.compiled(WYLanes(facts, knobs), facts, options, prefix)
