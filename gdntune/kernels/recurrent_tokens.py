"""The tokens of a call, as `recurrent` reads them: one token to registers, or several to shared memory,
and their gates.

Of one token each thread reads its own share of q and k. Of several a warp reads a whole token,
normalises it once for the block and leaves it in shared memory. Loads are issued apart from what
uses them: the state's go out between the two.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, const_expr

from gdntune.kernels import shuffles
from gdntune.kernels.recurrent_parts import Gate, Read, Stage
from gdntune.kernels.recurrent_rows import RecurrentRows, widen

F32 = Float32


class RecurrentTokens(RecurrentRows):
    """Reads tokens and gates, and makes of them what `advance` takes."""

    @cute.jit
    def gate_of(self, x, A_shared, dt_shared, hq, hv, tid):
        """Issues the loads of what a head's gate hangs on beside the token."""
        A, bias, dh = self.head_gate(x.A_log, x.dt_bias, A_shared, dt_shared, hq, hv)
        rbias = None
        if const_expr(self.per_k and x.dt_bias is not None and not self.loop):
            rbias = cute.make_rmem_tensor((self.K // 32,), x.dt_bias.element_type)
            self.read_lane(x.dt_bias[dh, None], rbias, tid % 32)
        return Gate(A, bias, dh, rbias)

    @cute.jit
    def read(self, x, block, thread):
        """Issues the loads of what the tokens bring."""
        return (
            self.read_stage(x, block, thread)
            if const_expr(self.loop)
            else self.read_token(x, block, thread)
        )

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
        self.read_values(
            x.v[block.ni, block.t0, block.hv, None], rv, self.unit(block.vt, 0, thread)
        )
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
    def read_stage(self, x, block, thread):
        """Issues this thread's loads of what `write_stage` puts into shared memory: a warp a token, and a share of v."""
        tid = thread.tid
        # a warp's tokens lie side by side
        per_token = cute.make_layout((self.stage_tokens, self.K // 32), stride=(self.K // 32, 1))
        rq = cute.make_rmem_tensor(per_token, x.q.element_type)
        rk = cute.make_rmem_tensor(per_token, x.k.element_type)
        rg = cute.make_rmem_tensor(per_token, x.a.element_type)
        rs = cute.make_rmem_tensor(cute.make_layout((self.stage_tokens, 2), stride=(2, 1)), F32)
        ga, gb = rs[None, 0], rs[None, 1]
        if const_expr(self.fence):
            # as they come: a conversion would be waited for ahead of the state's loads
            ga = cute.make_rmem_tensor((self.stage_tokens,), x.a.element_type)
            gb = cute.make_rmem_tensor((self.stage_tokens,), x.b.element_type)
        rv = cute.make_rmem_tensor(
            cute.make_layout((self.stage_values, self.VW), stride=(self.VW, 1)), x.v.element_type
        )
        # Behind a fence a token that is missing is the last one: in a branch the arithmetic that needs a
        # load is made next to it, and one token's is waited for ahead of the next one's load.
        last = block.length - 1
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if const_expr(self.fence and not self.ragged):
                t = cutlass.min(t, last)
            if const_expr(self.fence and not self.ragged) or t < block.length:
                self.read_lane(x.q[block.ni, block.t0 + t, block.hq, None], rq[r, None], tid % 32)
                self.read_lane(x.k[block.ni, block.t0 + t, block.hq, None], rk[r, None], tid % 32)
                if const_expr(self.per_k):
                    self.read_lane(
                        x.a[block.ni, block.t0 + t, block.hv, None], rg[r, None], tid % 32
                    )
                else:
                    ga[r] = x.a[block.ni, block.t0 + t, block.hv].to(ga.element_type)
                gb[r] = x.b[block.ni, block.t0 + t, block.hv].to(gb.element_type)
        for r in cutlass.range_constexpr(self.stage_values):
            e = r * self.threads + tid
            t = e // (self.tile_v // self.VW)
            if const_expr(self.fence and not self.ragged):
                t = cutlass.min(t, last)
            if const_expr(self.fence and not self.ragged) or t < block.length:
                at = block.v0 // self.VW + e % (self.tile_v // self.VW)
                row = x.v[block.ni, block.t0 + t, block.hv, None]
                cute.autovec_copy(cute.local_tile(row, (self.VW,), (at,)), rv[r, None])
        return Read(rq, rk, rg, rv, ga, gb)

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
                sq, sk, kq = shuffles.sums((sq, sk, kq))
                iq, ik = self.norms(sq, sk, options.scale, options.use_qk_l2norm)
                for j in cutlass.range_constexpr(W):
                    stage.q[t, wl * W + j] = read.q[r, j].to(F32) * iq
                    stage.k[t, wl * W + j] = read.k[r, j].to(F32) * ik
                decay = F32(1.0)
                if const_expr(self.per_k):
                    for j in cutlass.range_constexpr(W):
                        bk = (
                            F32(0.0)
                            if const_expr(dt_bias is None)
                            else dt_bias[gate.dh, wl * W + j].to(F32)
                        )
                        stage.g[t, wl * W + j] = self.decay_of(
                            read.g[r, j].to(F32), gate.A, bk, options
                        )
                else:
                    decay = self.decay_of(read.a[r].to(F32), gate.A, gate.bias, options)
                if wl == 0:
                    stage.scalars[t, 0] = decay
                    stage.scalars[t, 1] = self.beta_of(read.b[r].to(F32), options.beta_scale)
                    stage.scalars[t, 2] = kq * iq * ik
        for r in cutlass.range_constexpr(self.stage_values):
            e = r * self.threads + tid
            t = e // (self.tile_v // self.VW)
            if t < length:
                at = e % (self.tile_v // self.VW)
                cute.autovec_copy(
                    read.v[r, None], cute.local_tile(stage.v[t, None], (self.VW,), (at,))
                )

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
        sV = smem.allocate_tensor(
            dtype, cute.make_layout((T, self.tile_v), stride=(self.tile_v, 1)), 16
        )
        return Stage(sQ, sK, sG, sV, sS)
