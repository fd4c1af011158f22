"""Gated delta rule decode of several tokens at once, GDN, on tensor cores, by warps that share nothing.

With S0 the state before the call [V, K], F[t, i] the product of the decays of tokens i+1..t, D[t]
that of all up to t:

    P   = [k, q] S0^T                                      tensor cores, memory to operand
    u_t = beta_t (v_t - D_t P_k[t] - sum_(i<t) F[t, i] (k_i.k_t) u_i)    a thread a row of V
    o_t = D_t P_q[t] + sum_(i<=t) F[t, i] (k_i.q_t) u_i
    S_T = D_T S0 + sum_i F[T, i] u_i k_i^T                 tensor cores, if the state is kept

It is the chunked form of the delta rule (arXiv 2406.06484, 2412.06464) of one chunk, whose state
is read once for all tokens. A warp owns rows of V and all of K, `rows` at a time, and computes what
depends on q, k and the gates for itself. On an H100 it was the fastest with bf16 states from four
tokens on, or from two that only read; on an H200 `wy_block`, tried beside it, leads nearly
everywhere.

Products are exact and sums fp32: k and q enter as they came, their norms are multiplied in
afterwards; a state that is wider than they are is split into terms of their dtype; u F is split in
two. F is formed as products of decays, never as a quotient, so that no decay overflows or cancels.

Lanes of a warp, in mma's terms: g = lane / 4 is a row of an operand, c = lane % 4 a place along it.
The contraction over K is permuted, for S0, k and q alike, so that a thread reads and writes 16 bytes
of the state that lie side by side.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, shuffles, transpose
from gdntune.kernels import fragments as fr

F32 = Float32


class WY(decode.Decode):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        self.rows, self.warps, self.passes = knobs["rows"], knobs["warps"], knobs["passes"]
        super().__init__(
            facts, self.rows * self.passes * self.warps, 32 * self.warps, knobs["registers"], pdl=knobs["pdl"]
        )  # fmt: skip
        self.dtype = decode.DTYPES[facts["input_dtype"]]
        # terms of bf16, 8 bits each, that hold a state's significand
        self.terms = {"bf16": 1, "fp16": 2, "fp32": 3}[facts["state_dtype"]]
        self.tiles = -(-self.tokens // 8)  # of eight tokens
        self.N = 8 * self.tiles
        self.octets = self.rows // 8  # of rows
        # a thread's share of a row: runs of `vec` neighbours, of which `steps` products of 16 are made
        self.vec = 16 // (self.state_dtype.width // 8)
        self.runs = self.K // (4 * self.vec)
        self.steps = self.vec // 4

    def run_at(self, n, r, h=0):
        """Where run r of row or token n lies in a thread's registers, and in it product h."""
        return (n * self.runs + r) * self.vec + 4 * h

    @cute.jit
    def read_keys(self, source, ni, t0, length, hq, g, c, target):
        """Issues the loads of a thread's share of k or q: of each tile, token g. What is no token is zero."""
        target.fill(0)
        for n in cutlass.range_constexpr(self.tiles):
            t = 8 * n + g
            if t < length:
                row = source[ni, t0 + t, hq, None]
                for r in cutlass.range_constexpr(self.runs):
                    run = cute.local_tile(row, (self.vec,), (4 * r + c,))
                    cute.autovec_copy(
                        run, cute.local_tile(target, (self.vec,), (n * self.runs + r,))
                    )

    @cute.jit
    def gather(self, rk, rq, rx):
        """k and q as A's registers: rows g are k's tokens, rows g + 8 q's."""
        for n in cutlass.range_constexpr(self.tiles):
            for r in cutlass.range_constexpr(self.runs):
                for h in cutlass.range_constexpr(self.steps):
                    for f in cutlass.range_constexpr(2):
                        x = const_expr(2 * self.run_at(n, r, h) + 4 * f)
                        y = const_expr(self.run_at(n, r, h) + 2 * f)
                        cute.autovec_copy(fr.pair(rk, y), fr.pair(rx, x))
                        cute.autovec_copy(fr.pair(rq, y), fr.pair(rx, x + 2))

    @cute.jit
    def copy_state(self, tile, raw, row0, g, c, store: cutlass.Constexpr):
        """Moves a thread's share of `rows` rows of the head's state `tile` between memory and registers."""
        for j in cutlass.range_constexpr(self.octets):
            row = tile[row0 + 8 * j + g, None]
            for r in cutlass.range_constexpr(self.runs):
                x = cute.local_tile(row, (self.vec,), (4 * r + c,))
                y = cute.local_tile(raw, (self.vec,), (j * self.runs + r,))
                if const_expr(store):
                    cute.autovec_copy(y, x)
                else:
                    cute.autovec_copy(x, y)

    @cute.jit
    def read_values(self, v, ni, t0, length, hv, row, rv):
        """Issues the loads of a row of v."""
        for t in cutlass.range_constexpr(self.tokens):
            if t < length:
                rv[t] = v[ni, t0 + t, hv, row]

    @cute.jit
    def square(self, x, tile: cutlass.Constexpr):
        """The sum of squares of token 8 tile + g, in all four of its threads."""
        total = F32(0.0)
        for j in cutlass.range_constexpr(self.runs * self.vec):
            y = x[tile * self.runs * self.vec + j].to(F32)
            total += y * y
        total += shuffles.bfly(total, 1)
        total += shuffles.bfly(total, 2)
        return total

    @cute.jit
    def write_coefficients(
        self,
        rk,
        rq,
        rx,
        decay: Float32,
        beta: Float32,
        scale: Float32,
        use_qk_l2norm: Int32,
        wl,
        g,
        c,
        sL,
        sE,
        sT,
    ):
        """What the rows' solution needs, to the warp's shared memory.

        sL [N, N]: beta_t F[t, i] k_i.k_t below the diagonal, sE [N, N]: F[t, i] k_i.q_t up to it, else zero; k normalised, q too
        and scaled. sT [N, 4]: of token t, beta, beta D and k's norm, D and q's, F[T, t] and k's. Gives D_T.
        """
        upto, after, _ = shuffles.products(decay, self.N, wl)
        iqs = cute.make_rmem_tensor((self.tiles,), F32)
        iks = cute.make_rmem_tensor((self.tiles,), F32)
        for n in cutlass.range_constexpr(self.tiles):
            iqs[n], iks[n] = self.norms(
                self.square(rq, n), self.square(rk, n), scale, use_qk_l2norm
            )
        for n in cutlass.range_constexpr(self.tiles):
            # row t of this thread, and what its token has
            t = 8 * n + g
            beta_t = shuffles.at_lane(beta, t)
            upto_t = shuffles.at_lane(upto, t)
            after_t = shuffles.at_lane(after, t)
            if c == 0:
                sT[t, 0] = beta_t
                sT[t, 1] = beta_t * upto_t * iks[n]
                sT[t, 2] = upto_t * iqs[n]
                sT[t, 3] = after_t * iks[n]
            for j in cutlass.range_constexpr(self.tiles):
                both = cute.make_rmem_tensor((4,), F32)
                both.fill(0.0)
                if const_expr(j <= n):
                    acc = fr.accumulator(both, 0)
                    for r in cutlass.range_constexpr(self.runs):
                        for h in cutlass.range_constexpr(self.steps):
                            at = 2 * self.run_at(j, r, h)
                            k = cute.make_rmem_tensor((4,), self.dtype)
                            for f in cutlass.range_constexpr(2):
                                cute.autovec_copy(fr.pair(rx, at + 4 * f), fr.pair(k, 2 * f))
                            x = fr.operand_a(rx, 2 * self.run_at(n, r, h))
                            fr.mma(acc, x, fr.operand_b(k, 0))
                    for e in cutlass.range_constexpr(2):
                        i = 8 * j + 2 * c + e
                        f = shuffles.at_lane(iks[j], 4 * (2 * c + e))
                        for s in cutlass.range_constexpr(8 * j + 1, 8 * n + 8):
                            d = shuffles.at_lane(decay, s)
                            if s > i and s <= t:
                                f = f * d
                        both[e] = both[e] * f * (beta_t * iks[n])
                        both[2 + e] = both[2 + e] * f * iqs[n]
                        if i >= t:
                            both[e] = F32(0.0)
                        if i > t:
                            both[2 + e] = F32(0.0)
                cute.autovec_copy(
                    fr.pair(both, 0), cute.local_tile(sL[t, None], (2,), (4 * j + c,))
                )
                cute.autovec_copy(
                    fr.pair(both, 2), cute.local_tile(sE[t, None], (2,), (4 * j + c,))
                )
        return shuffles.at_lane(upto, self.N - 1)

    @cute.jit
    def terms_of(self, raw, j: cutlass.Constexpr, r: cutlass.Constexpr, h: cutlass.Constexpr):
        """The state's part in one product, as terms of the inputs' dtype that add up to it."""
        out = cute.make_rmem_tensor((self.terms * 4,), self.dtype)
        for i in cutlass.range_constexpr(4):
            x = raw[self.run_at(j, r, h) + i].to(F32)
            for s in cutlass.range_constexpr(self.terms):
                y = x.to(self.dtype)
                out[4 * s + i] = y
                x = x - y.to(F32)
        return out

    @cute.jit
    def project(self, raw, rx, g, c, sP):
        """P of the warp's rows, to its shared memory sP [rows, 2N]: first k's, then q's."""
        for j in cutlass.range_constexpr(self.octets):
            p = cute.make_rmem_tensor((self.tiles * 4,), F32)
            p.fill(0.0)
            for r in cutlass.range_constexpr(self.runs):
                for h in cutlass.range_constexpr(self.steps):
                    parts = None
                    if const_expr(self.terms > 1):
                        parts = self.terms_of(raw, j, r, h)
                    for s in cutlass.range_constexpr(self.terms):
                        if const_expr(self.terms > 1):
                            b = fr.operand_b(parts, 4 * s)
                        else:
                            b = fr.operand_b(raw, self.run_at(j, r, h))
                        for n in cutlass.range_constexpr(self.tiles):
                            acc = fr.accumulator(p, 4 * n)
                            fr.mma(acc, fr.operand_a(rx, 2 * self.run_at(n, r, h)), b)
            for n in cutlass.range_constexpr(self.tiles):
                for e in cutlass.range_constexpr(2):
                    sP[8 * j + 2 * c + e, 8 * n + g] = p[4 * n + e]
                    sP[8 * j + 2 * c + e, self.N + 8 * n + g] = p[4 * n + 2 + e]

    @cute.jit
    def solve(self, sL, sE, sT, sP, sW, ru, row, write, length, o):
        """u and the outputs of one row of V, ru that of v; F[T, i] u_i and k's norm to sW [rows, 2N], in two terms."""
        p = cute.make_rmem_tensor((2 * self.N,), F32)
        cute.autovec_copy(sP[row, None], p)
        u = cute.make_rmem_tensor((self.N,), F32)
        factors = cute.make_rmem_tensor((4,), F32)
        for t in cutlass.range_constexpr(self.tokens):
            cute.autovec_copy(sT[t, None], factors)
            u[t] = ru[t] * factors[0] - p[t] * factors[1]
            p[self.N + t] = p[self.N + t] * factors[2]
        line = cute.make_rmem_tensor((self.N,), F32)
        for t in cutlass.range_constexpr(self.tokens):
            cute.autovec_copy(sL[t, None], line)
            for i in cutlass.range_constexpr(t):
                u[t] = u[t] - line[i] * u[i]
            cute.autovec_copy(sE[t, None], line)
            for i in cutlass.range_constexpr(t + 1):
                p[self.N + t] = p[self.N + t] + line[i] * u[i]
        if const_expr(self.update):
            w = cute.make_rmem_tensor((2 * self.N,), self.dtype)
            w.fill(0)
            for t in cutlass.range_constexpr(self.tokens):
                x = u[t] * sT[t, 3]
                y = x.to(self.dtype)
                w[t // 8 * 16 + t % 8] = y
                w[t // 8 * 16 + 8 + t % 8] = (x - y.to(F32)).to(self.dtype)
            cute.autovec_copy(w, sW[row, None])
        # last, so that no branch stands between two tokens' arithmetic
        for t in cutlass.range_constexpr(self.tokens):
            if write and t < length:
                o[t, row] = p[self.N + t].to(o.element_type)

    @cute.jit
    def advance(self, raw, rx, total: Float32, sW, g, c):
        """The final state, rounded, in place of S0."""
        pairs = const_expr(self.octets // 2)
        w = cute.make_rmem_tensor((pairs * self.tiles * 8,), self.dtype)
        for m in cutlass.range_constexpr(pairs):
            for n in cutlass.range_constexpr(self.tiles):
                for half in cutlass.range_constexpr(2):
                    for f in cutlass.range_constexpr(2):
                        pair = cute.local_tile(
                            sW[16 * m + 8 * half + g, None], (2,), (8 * n + 4 * f + c,)
                        )
                        at = (m * self.tiles + n) * 4 + 2 * f + half
                        cute.autovec_copy(pair, cute.local_tile(w, (2,), (at,)))
        for r in cutlass.range_constexpr(self.runs):
            for i in cutlass.range_constexpr(self.vec // 2):
                # tokens along the contraction: both terms of u meet the same keys
                b = cute.make_rmem_tensor((self.tiles * 4,), self.dtype)
                for n in cutlass.range_constexpr(self.tiles):
                    turned = transpose.pair(rx, 2 * self.run_at(n, r, i // 2) + i % 2 * 4)
                    for f in cutlass.range_constexpr(2):
                        cute.autovec_copy(turned, fr.pair(b, 4 * n + 2 * f))
                for m in cutlass.range_constexpr(pairs):
                    x = cute.make_rmem_tensor((4,), F32)
                    for half in cutlass.range_constexpr(2):
                        y = fr.pair(raw, self.run_at(2 * m + half, r) + 2 * i)
                        fr.pair(x, 2 * half).store(y.load().to(F32) * total)
                    acc = fr.accumulator(x, 0)
                    for n in cutlass.range_constexpr(self.tiles):
                        a = fr.operand_a(w, (m * self.tiles + n) * 8)
                        fr.mma(acc, a, fr.operand_b(b, 4 * n))
                    for half in cutlass.range_constexpr(2):
                        y = fr.pair(raw, self.run_at(2 * m + half, r) + 2 * i)
                        y.store(fr.pair(x, 2 * half).load().to(self.state_dtype))

    @cute.jit
    def load_inputs(self, q, k, v, a, b, ni, t0, length, hq, hv, row0, row, wl, g, c):
        """Issues the loads of what the tokens bring: a thread's share of k and q, a token's gate and beta a lane, a row of v."""
        per_token = const_expr(self.tiles * self.runs * self.vec)
        rk = cute.make_rmem_tensor((per_token,), self.dtype)
        rq = cute.make_rmem_tensor((per_token,), self.dtype)
        self.read_keys(k, ni, t0, length, hq, g, c, rk)
        self.read_keys(q, ni, t0, length, hq, g, c, rq)
        ga = F32(0.0)
        gb = F32(0.0)
        if wl < length:
            ga = a[ni, t0 + wl, hv].to(F32)
            gb = b[ni, t0 + wl, hv].to(F32)
        rv = cute.make_rmem_tensor((self.tokens,), v.element_type)
        rv.fill(0)
        self.read_values(v, ni, t0, length, hv, row0 + row, rv)
        return rk, rq, ga, gb, rv

    @cute.jit
    def work(self, call, options, sizes):
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        wl = tid % 32
        w = tid // 32
        g = wl // 4
        c = wl % 4
        hq, _ = divmod(hv, sizes.heads)
        self.await_producer("first")
        slot, write_slot = self.slots_of(
            n, call.read_index, call.write_index, call.slot_index, call.accepted, sizes.columns
        )
        # the state's address waits for this: nothing may be computed before it that does not serve it
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, call.cu_seqlens, sizes.tokens)

        # what does not hang on the slot is loaded while the slot's index is on its way
        v0 = vt * self.tile_v
        row = wl % self.rows
        row0 = v0 + w * self.rows * self.passes
        A, bias, _ = self.head_gate(
            call.A_log, call.dt_bias, sizes.A_shared, sizes.dt_shared, hq, hv
        )
        early = None
        if const_expr(self.pdl != "state"):
            early = self.load_inputs(
                call.q, call.k, call.v, call.a, call.b, ni, t0, length, hq, hv, row0, row, wl, g, c
            )
        cute.arch.sync_warp()

        live, writes = self.named(slot, write_slot, sizes.slots, options.null_index)
        if live:
            source = call.state[Int64(slot), hv, None, None]
            raw = cute.make_rmem_tensor((self.octets * self.runs * self.vec,), self.state_dtype)
            self.copy_state(source, raw, row0, g, c, False)
            inputs = early
            if const_expr(self.pdl == "state"):
                self.await_producer("state")
                inputs = self.load_inputs(
                    call.q,
                    call.k,
                    call.v,
                    call.a,
                    call.b,
                    ni,
                    t0,
                    length,
                    hq,
                    hv,
                    row0,
                    row,
                    wl,
                    g,
                    c,
                )
            rk, rq, ga, gb, rv = inputs
            # what follows does not move across this: it would wait for k before the state is asked for
            cute.arch.sync_warp()
            smem = SmemAllocator()
            W, N, R = const_expr(self.warps), const_expr(self.N), const_expr(self.rows)
            square = cute.make_layout((W, N, N), stride=(N * N, N, 1))
            sL = smem.allocate_tensor(F32, square, 16)[w, None, None]
            sE = smem.allocate_tensor(F32, square, 16)[w, None, None]
            sT = smem.allocate_tensor(F32, cute.make_layout((W, N, 4), stride=(4 * N, 4, 1)), 16)[
                w, None, None
            ]
            # padded so that a row a thread is read without conflicts
            wide = cute.make_layout((W, R, 2 * N), stride=(R * (2 * N + 4), 2 * N + 4, 1))
            sP = smem.allocate_tensor(F32, wide, 16)[w, None, None]
            sW = None
            if const_expr(self.update):
                wide = cute.make_layout((W, R, 2 * N), stride=(R * (2 * N + 8), 2 * N + 8, 1))
                sW = smem.allocate_tensor(self.dtype, wide, 16)[w, None, None]
            decay = F32(1.0)
            beta = F32(0.0)
            if wl < length:
                decay = self.decay_of(ga, A, bias, options)
                beta = self.beta_of(gb, options.beta_scale)
            rx = cute.make_rmem_tensor((2 * self.tiles * self.runs * self.vec,), self.dtype)
            self.gather(rk, rq, rx)
            total = self.write_coefficients(
                rk, rq, rx, decay, beta, options.scale, options.use_qk_l2norm, wl, g, c, sL, sE, sT
            )
            for it in cutlass.range_constexpr(self.passes):
                first = row0 + it * self.rows
                ahead = None
                if const_expr(it + 1 < self.passes):
                    # the next rows are on their way while these are worked on
                    ahead = cute.make_rmem_tensor(
                        (self.octets * self.runs * self.vec,), self.state_dtype
                    )
                    self.copy_state(source, ahead, first + self.rows, g, c, False)
                    cute.arch.sync_warp()
                self.project(raw, rx, g, c, sP)
                cute.arch.sync_warp()
                ru = cute.make_rmem_tensor((self.tokens,), F32)
                for t in cutlass.range_constexpr(self.tokens):
                    ru[t] = rv[t].to(F32)
                if const_expr(it + 1 < self.passes):
                    self.read_values(call.v, ni, t0, length, hv, first + self.rows + row, rv)
                o = cute.domain_offset((t0, first), call.output[ni, None, hv, None])
                self.solve(sL, sE, sT, sP, sW, ru, row, wl < self.rows, length, o)
                cute.arch.sync_warp()
                if const_expr(self.update):
                    self.advance(raw, rx, total, sW, g, c)
                    if writes:
                        self.copy_state(
                            call.state[Int64(write_slot), hv, None, None], raw, first, g, c, True
                        )
                raw = ahead
        else:
            self.await_producer("state")
            self.zero_rows(call.output, ni, t0, length, hv, v0, tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    return decode.compiled(WY(facts, knobs), facts, options, prefix)
