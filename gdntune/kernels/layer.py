"""A layer's step in one launch: convolution, gated delta rule and gated RMSNorm, each end where the contract has it.

The delta rule is `recurrent`'s, which finds its inputs and leaves its outputs in shared memory; the convolution ahead of it is
`layer_conv`'s, the norm behind it `layer_norm`'s, and the state's rows on their way `layer_rows`'.

Large batches want bytes in flight: `ahead` chunks of rows are asked for before the first is used, and of a q/k head's value heads
`share` go through one block, as one tile of so many times V: they convolve q and k once, and one head's first rows are on their way
while the last one's are worked on.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, layer_norm, recurrent
from gdntune.kernels.decode import Operands, Options
from gdntune.kernels.layer_conv import Conv
from gdntune.kernels.layer_norm import Norm
from gdntune.kernels.recurrent_parts import Block, Gate, Kept, Read

F32 = Float32
# More elements than any row has: a view's last dimension is no bound.
MANY = 1 << 24


class Shared(NamedTuple):
    """Of value heads that share a block: how many it has, and each token's (decay, beta) of each in shared memory.

    decays: KDA's of all keys in shared memory, where they are computed `once` a block; with `roles` GDN's one too, and beta behind them.
    """

    heads: Any
    scalars: Any
    decays: Any


class Brought(NamedTuple):
    """Registers for what the launch ahead wrote: the tokens' inputs, the output's gate, the new rows of the window."""

    read: Any
    gate: Any
    rows: Any


class Layer(layer_norm.Normed):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, knobs)
        self.moves = self.update or self.intermediate == "slots"
        # Loads come back in order, so that the window's, which are few, go first and are convolved while the state's are on their way:
        # 2 us of 54 at T=4 and B=16. At T=1 and B=64 rows that are copied lost 0.9 us of 75 by it.
        self.state_first = (self.copied and not self.loop and not knobs["window_first"]) or (self.sent and not knobs["apart"])
        self.once, self.apart = knobs["once"], knobs["apart"]
        # Decays that some threads compute for all: a key each of KDA, by the last ones where warps have roles.
        self.decays = self.K if self.per_k else 1
        self.handed = self.once or self.roles

    @cute.jit
    def gated_delta_rule_layer_decode(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, output_gate, norm_weight, norm_eps: Float32,
        mixed_qkv, conv_state, conv_weight, conv_bias, conv_position, stream: CUstream,
    ):  # fmt: skip
        B = output.shape[0]
        if const_expr(self.ragged):
            B = cu_seqlens.shape[0] - 1
        HV = v.shape[2]
        heads = cute.FastDivmodDivisorV2(HV // q.shape[2])
        A_shared = A_log.shape[0] != HV if const_expr(A_log is not None and self.per_k) else None
        dt_shared = dt_bias.shape[0] != HV if const_expr(dt_bias is not None and self.per_k) else None
        tokens = q.shape[1] if const_expr(self.loop) else Int32(1)
        columns = slot_index.shape[1] if const_expr(self.intermediate == "slots") else None
        rows = intermediate.shape[0] if const_expr(intermediate is not None) else None
        steps = intermediate.shape[1] if const_expr(intermediate is not None) else None
        window = conv_state.shape[1] if const_expr(self.convolves) else None
        tiles = self.V // self.tile
        places = HV
        if const_expr(self.shifted):
            places = q.shape[2] * self.group
        elif const_expr(self.share > 1):
            # a q/k head's value heads, the last block's fewer where `share` does not divide them
            places = q.shape[2] * ((HV // q.shape[2] + self.share - 1) // self.share)
        grid = (tiles, places, B)
        if const_expr(self.heads_first):
            grid = (places, tiles, B)
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(slot_index, 2, None), self.view(accepted, 1),
            self.view(cu_seqlens, 1), self.view(intermediate, 2), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            self.rows_of(output_gate, 2) if const_expr(self.interleaved) else self.view(output_gate, 2),
            norm_weight, norm_eps, self.rows_of(mixed_qkv, 2), self.windows_of(conv_state),
            self.rows_of(conv_weight, 0), self.rows_of(conv_bias, 0), self.view(conv_position, 1), q.shape[2], window, HV // q.shape[2],
            heads, state.shape[0], tokens, columns, rows, steps, A_shared, dt_shared,
        ).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.resident or self.copied else None,
            use_pdl=self.pdl != "none", cluster=(self.cluster, self.group, 1) if self.cluster * self.group > 1 else None,
        )  # fmt: skip

    def rows_of(self, x, leading):
        """The same memory by its `leading` dimensions and the elements behind, side by side: a launch carries no more."""
        if x is None:
            return None
        stride = (*(x.stride[d] for d in range(leading)), 1)
        return cute.make_tensor(x.iterator, cute.make_layout((1,) * leading + (MANY,), stride=stride))

    def windows_of(self, x):
        """The windows' memory, as `rows_of` has it, or with a channel's rows side by side."""
        if const_expr(not self.dims_first):
            return self.rows_of(x, 2)
        return cute.make_tensor(x.iterator, cute.make_layout((1, 1, MANY), stride=(x.stride[0], 1, x.stride[2])))

    @cute.jit
    def read_constants(self, x, conv, norm_weight, mine, block, hl, A_shared, dt_shared, tid):
        """Issues the loads of the model's constants: a head's gate, the norm's weight, the convolution's taps."""
        if const_expr(self.roles):
            gate = self.own_gate(x, A_shared, dt_shared, block.hq, hl, tid)
        elif const_expr(self.once):
            gate = self.gate_of_key(x, A_shared, dt_shared, block.hq, hl, tid)
        else:
            gate = self.gate_of(x, A_shared, dt_shared, block.hq, hl, tid)
        rw, taps = None, None
        if const_expr(self.normed):
            rw = cute.make_rmem_tensor((self.VL,), norm_weight.element_type)
            first_row, _ = self.row_of(0, tid)
            if const_expr(not self.lean) or first_row < self.tokens:
                self.read_row(norm_weight, rw, block, tid % 32)
        if const_expr(self.convolves):
            taps = self.read_taps(conv, mine, block, tid)
        return gate, rw, taps

    @cute.jit
    def read_convolved(self, sX, gates_read, block, thread):
        """The tokens' inputs as `read` gives them: q, k and v of shared memory, gates as they were read."""
        if const_expr(self.loop):
            per_token = cute.make_layout((self.stage_tokens, self.K // 32), stride=(self.K // 32, 1))
            rq = cute.make_rmem_tensor(per_token, sX.element_type)
            rk = cute.make_rmem_tensor(per_token, sX.element_type)
            for r in cutlass.range_constexpr(self.stage_tokens):
                t = thread.tid // 32 + r * self.warps
                if t < block.length:
                    self.read_lane(cute.local_tile(sX[t, None], (self.K,), (0,)), rq[r, None], thread.tid % 32)
                    self.read_lane(cute.local_tile(sX[t, None], (self.K,), (1,)), rk[r, None], thread.tid % 32)
            rv = cute.make_rmem_tensor(cute.make_layout((self.stage_values, self.VW), stride=(self.VW, 1)), sX.element_type)
            for r in cutlass.range_constexpr(self.stage_values):
                e = r * self.threads + thread.tid
                t = e // (self.tile_v // self.VW)
                if t < block.length:
                    at = block.v0 // self.VW + e % (self.tile_v // self.VW)
                    cute.autovec_copy(cute.local_tile(self.values_of(sX)[0, t, 0, None], (self.VW,), (at,)), rv[r, None])
        else:
            rq = cute.make_rmem_tensor((self.RK,), sX.element_type)
            rk = cute.make_rmem_tensor((self.RK,), sX.element_type)
            # a chunk's values are read where they are used
            rv = None
            self.read_key(cute.local_tile(sX[0, None], (self.K,), (0,)), rq, thread.lane)
            self.read_key(cute.local_tile(sX[0, None], (self.K,), (1,)), rk, thread.lane)
        return Read(rq, rk, gates_read.g, rv, gates_read.a, gates_read.b)

    @cute.jit
    def read_gates(self, x, ratio, block, thread):
        """Issues the loads of the tokens' gates alone, as `read` does."""
        hv = block.hv
        if const_expr(self.interleaved):
            # a q/k head's b stand beside its a
            hv += block.hq * ratio
        if const_expr(self.loop):
            rg = cute.make_rmem_tensor(
                cute.make_layout((self.stage_tokens, self.K // 32), stride=(self.K // 32, 1)), x.a.element_type
            )
            rs = cute.make_rmem_tensor(cute.make_layout((self.stage_tokens, 2), stride=(2, 1)), F32)
            for r in cutlass.range_constexpr(self.stage_tokens):
                t = thread.tid // 32 + r * self.warps
                if t < block.length:
                    if const_expr(self.per_k):
                        self.read_lane(x.a[block.ni, block.t0 + t, hv, None], rg[r, None], thread.tid % 32)
                    else:
                        rs[r, 0] = x.a[block.ni, block.t0 + t, hv].to(F32)
                    rs[r, 1] = x.b[block.ni, block.t0 + t, hv].to(F32)
            ga, gb = rs[None, 0], rs[None, 1]
        else:
            rg = cute.make_rmem_tensor((1 if self.once else self.K // 32,), x.a.element_type)
            ga = F32(0.0)
            if const_expr(self.once):
                rg[0] = x.a[block.ni, block.t0, hv, thread.tid % self.K]
            elif const_expr(self.per_k):
                self.read_lane(x.a[block.ni, block.t0, hv, None], rg, thread.tid % 32)
            else:
                ga = x.a[block.ni, block.t0, hv].to(F32)
            gb = x.b[block.ni, block.t0, hv].to(F32)
        return Read(None, None, rg, None, ga, gb)

    @cute.jit
    def read_own_gates(self, x, ratio, block, tid):
        """`read_gates` of one token, by the last threads alone, which compute its decays. What they read stays as it is: a conversion
        would be made, and waited for, ahead of the next load.
        """
        hv = block.hv
        if const_expr(self.interleaved):
            hv += block.hq * ratio
        rg, rb = cute.make_rmem_tensor((1,), x.a.element_type), cute.make_rmem_tensor((1,), x.b.element_type)
        # the addresses by all, so that the loads are predicated: behind a branch they stood behind the wait for the slot's index
        key = (tid % self.K,) if const_expr(self.per_k) else ()
        of_gate = cute.domain_offset((block.ni, block.t0, hv, *key), x.a)
        of_beta = cute.domain_offset((block.ni, block.t0, hv), x.b)
        if self.has_gates(tid):
            rg[0] = of_gate[0]
            rb[0] = of_beta[0]
        return Read(None, None, rg, None, None, rb)

    @cute.jit
    def own_gate(self, x, A_shared, dt_shared, hq, hv, tid):
        """`gate_of`, by the threads of `read_own_gates`: of KDA a key's bias each."""
        ah, dh = self.parameters(x.A_log, A_shared, dt_shared, hq, hv)
        rA, rbias = None, None
        if const_expr(x.A_log is not None):
            rA = cute.make_rmem_tensor((1,), x.A_log.element_type)
        if const_expr(x.dt_bias is not None):
            rbias = cute.make_rmem_tensor((1,), x.dt_bias.element_type)
        if self.has_gates(tid):
            if const_expr(x.A_log is not None):
                rA[0] = x.A_log[ah]
            if const_expr(x.dt_bias is not None):
                rbias[0] = x.dt_bias[dh, tid % self.K] if const_expr(self.per_k) else x.dt_bias[dh]
        return Gate(rA, F32(0.0), dh, rbias)

    def has_gates(self, tid):
        """Whether a thread computes a decay for all, or is in a warp that does."""
        return tid >= self.threads - (self.K if self.per_k else 32)

    @cute.jit
    def hand_gates(self, handed, read, gate, options, tid):
        """A token's decays, of KDA one a key, and behind them beta, to shared memory, ahead of the convolution's barrier."""
        A = F32(0.0) if const_expr(gate.A is None) else gate.A[0].to(F32)
        bias = F32(0.0) if const_expr(gate.rbias is None) else gate.rbias[0].to(F32)
        if tid >= self.threads - self.decays:
            handed[tid % self.decays] = self.decay_of(read.g[0].to(F32), A, bias, options)
        if tid == self.threads - 1:
            handed[self.decays] = self.beta_of(read.b[0].to(F32), options.beta_scale)

    @cute.jit
    def gate_of_key(self, x, A_shared, dt_shared, hq, hv, tid):
        """`gate_of` where a thread computes the decay of one key."""
        ah, dh = self.parameters(x.A_log, A_shared, dt_shared, hq, hv)
        A = F32(0.0) if const_expr(x.A_log is None) else x.A_log[ah].to(F32)
        rbias = None
        if const_expr(x.dt_bias is not None):
            rbias = cute.make_rmem_tensor((1,), x.dt_bias.element_type)
            rbias[0] = x.dt_bias[dh, tid % self.K]
        return Gate(A, F32(0.0), dh, rbias)

    @cute.jit
    def hand_decays(self, decays, read, gate, options, tid):
        """KDA's decay of a key a thread to shared memory, ahead of the convolution's barrier: a quarter of a warp's work for all keys,
        and while the state is on its way.
        """
        bias = F32(0.0) if const_expr(gate.rbias is None) else gate.rbias[0].to(F32)
        if const_expr(self.apart):
            # other warps than those that convolve, where there are others
            if tid >= self.threads - self.K:
                decays[tid % self.K] = self.decay_of(read.g[0].to(F32), gate.A, bias, options)
        else:
            if tid < self.K:
                decays[tid] = self.decay_of(read.g[0].to(F32), gate.A, bias, options)

    @cute.jit
    def hand_scalars(self, sD, read, gate, options, block, tid):
        """Of heads that share a block, each token's decay and beta to shared memory, a head a lane."""
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < block.length and tid % 32 < self.share:
                a = read.a[r] if const_expr(self.loop) else read.a
                b = read.b[r] if const_expr(self.loop) else read.b
                sD[t, tid % 32, 0] = self.decay_of(a, gate.A, gate.bias, options)
                sD[t, tid % 32, 1] = self.beta_of(b, options.beta_scale)

    @cute.jit
    def bring(self, x, output_gate, conv, taps, block, heads, of_lane, thread):
        """Issues the loads of what the launch ahead wrote."""
        rx = None
        if const_expr(self.convolves):
            rx = self.per_row(self.tokens, conv.mixed.element_type)
            for r in cutlass.range_constexpr(self.rounds):
                for t in cutlass.range_constexpr(self.tokens):
                    if t < block.length and (const_expr(not self.lean) or self.has_channels(thread.tid)):
                        self.read_channels(conv.mixed[block.ni, block.t0 + t, None], taps.places[r], rx[r, t, None])
        if const_expr(self.roles):
            read = self.read_own_gates(x, conv.ratio, of_lane, thread.tid)
        elif const_expr(self.convolves):
            read = self.read_gates(x, conv.ratio, of_lane, thread)
        else:
            read = self.read(x, block, thread)
        rz = self.read_gate(output_gate, conv.ratio, block, heads, thread.tid) if const_expr(self.normed) else None
        return Brought(read, rz, rx)

    @cute.jit
    def zero_heads(self, output, heads, block, tid):
        """Padding's output rows are zero: `zero_rows` of the block's heads."""
        for e in cutlass.range(tid, block.length * self.tile_v, self.threads, unroll=1):
            column = e % self.tile_v
            if column < heads * self.V:
                output[block.ni, block.t0 + e // self.tile_v, block.hv, block.v0 + column] = F32(0.0).to(output.element_type)

    @cute.jit
    def one_token(self, x, options, block, thread, gate, read, kept, source, coming, write_slot, writes, shared, norm):
        """T = 1 as `recurrent` has it, of one head or several. What the norm has to do stands before the last state's stores, which
        need not wait for it: one warp has it, and the others store.
        """
        fq = cute.make_rmem_tensor((self.RK,), F32)
        fk = cute.make_rmem_tensor((self.RK,), F32)
        fg = cute.make_rmem_tensor((self.RK,), F32)
        smem = SmemAllocator()
        sR = self.shared_sums(smem)
        sG = None
        if const_expr(self.per_k and not self.once):
            shape, stride = (self.warps, self.K), (self.K, 1)
            sG = smem.allocate_tensor(F32, cute.make_layout(shape, stride=stride), 16)[thread.tid // 32, None]
        decay, beta = F32(1.0), F32(1.0)
        if const_expr(self.handed):
            recurrent.widen(read.q, fq, self.spread)
            recurrent.widen(read.k, fk, self.spread)
            if const_expr(self.per_k):
                self.read_key(shared.decays, fg, thread.lane)
            else:
                decay = shared.decays[0]
            beta = shared.decays[self.decays] if const_expr(self.roles) else self.beta_of(read.b, options.beta_scale)
        else:
            decay, beta = self.use_token(read, gate, options, sG, fq, fk, fg, thread)
        kq = F32(0.0)
        if const_expr(self.fence):
            # while the state is on its way: no sum that waits for it moves ahead of these
            kq = self.normalise(fq, fk, options, thread, sR)
            cute.arch.sync_warp()
        v = x.v[block.ni, block.t0, block.hv, None]
        chunks = shared.heads * self.head_chunks if const_expr(self.share > 1) else Int32(self.chunks)
        for first in cutlass.range(0, chunks, self.turn, unroll=1):
            for j in cutlass.range_constexpr(self.turn):
                it = first + j
                row0 = block.v0 + it * self.chunk + thread.group * self.RV
                unit = self.unit(block.vt, it, thread)
                fh = self.next_rows(source, coming, j, row0, it, chunks, thread)
                rw = cute.make_rmem_tensor((self.own,), x.v.element_type)
                if const_expr(self.convolves or not self.early):
                    self.read_values(v, rw, unit)
                else:
                    for i in cutlass.range_constexpr(self.own):
                        rw[i] = read.v[i]
                    if const_expr(self.chunks > 1):
                        if it + 1 < chunks:
                            self.read_values(v, read.v, self.unit(block.vt, it + 1, thread))
                if const_expr(self.share > 1):
                    decay = shared.scalars[0, it // self.head_chunks, 0]
                    beta = shared.scalars[0, it // self.head_chunks, 1]
                token = recurrent.Token(fq, fk, fg, decay, beta, kq)
                o = x.output[block.ni, block.t0, block.hv, None]
                scaled = self.advance(fh, rw, token, F32(1.0), options, row0, unit, thread, sR, 0, o)
                if const_expr(self.sends_early):
                    self.meet(norm, block, thread.tid)
                elif const_expr(self.ends_early and j + 1 == self.turn):
                    if it + 1 == chunks:
                        self.meet(norm, block, thread.tid)
                        self.write_outputs(norm, shared.heads, norm.block, thread.tid)
                self.keep_state(x, kept, options.null_index, block, 0, fh, scaled, row0, thread.lane)
                if const_expr(self.update):
                    if writes:
                        self.store_rows(x.state[Int64(write_slot), block.hv, None, None], fh, scaled, row0, thread.lane)

    @cute.jit
    def many_tokens(self, x, options, block, thread, gate, read, kept, source, coming, write_slot, writes, shared, norm):
        """T >= 2 as `recurrent` has it, of one head or several."""
        fq = cute.make_rmem_tensor((self.RK,), F32)
        fk = cute.make_rmem_tensor((self.RK,), F32)
        fg = cute.make_rmem_tensor((self.RK,), F32)
        smem = SmemAllocator()
        sR = self.shared_sums(smem)
        stage = self.shared_stage(smem, x.v.element_type)
        if const_expr(self.fence):
            # as `recurrent` has it: always true, so that no arithmetic is made ahead of the state's loads
            if options.beta_scale != F32(0.0):
                self.write_stage(stage, read, x.dt_bias, gate, options, block.length, thread.tid)
        else:
            self.write_stage(stage, read, x.dt_bias, gate, options, block.length, thread.tid)
        cute.arch.sync_threads()
        chunks = shared.heads * self.head_chunks if const_expr(self.share > 1) else Int32(self.chunks)
        for first in cutlass.range(0, chunks, self.turn, unroll=1):
            for j in cutlass.range_constexpr(self.turn):
                it = first + j
                row0 = block.v0 + it * self.chunk + thread.group * self.RV
                unit = self.unit(block.vt, it, thread)
                fh = self.next_rows(source, coming, j, row0, it, chunks, thread)
                rw = cute.make_rmem_tensor((self.own,), x.v.element_type)
                scaled = F32(1.0)
                for t in cutlass.range(block.length, unroll=1):
                    self.read_key(stage.q[t, None], fq, thread.lane)
                    self.read_key(stage.k[t, None], fk, thread.lane)
                    if const_expr(self.per_k):
                        self.read_key(stage.g[t, None], fg, thread.lane)
                    decay, beta = stage.scalars[t, 0], stage.scalars[t, 1]
                    if const_expr(self.share > 1):
                        decay = shared.scalars[t, it // self.head_chunks, 0]
                        beta = shared.scalars[t, it // self.head_chunks, 1]
                    token = recurrent.Token(fq, fk, fg, decay, beta, stage.scalars[t, 2])
                    self.read_values(stage.v[t, None], rw, self.unit(0, it, thread))
                    o = x.output[block.ni, block.t0 + t, block.hv, None]
                    scaled = self.advance(fh, rw, token, scaled, options, row0, unit, thread, sR, t % 2, o)
                    self.keep_state(x, kept, options.null_index, block, t, fh, scaled, row0, thread.lane)
                if const_expr(self.update):
                    if writes:
                        self.store_rows(x.state[Int64(write_slot), block.hv, None, None], fh, scaled, row0, thread.lane)

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, output_gate, norm_weight, norm_eps: Float32,
        mixed_qkv, conv_state, conv_weight, conv_bias, conv_position, H, window_rows, ratio, heads: cute.FastDivmodDivisorV2,
        slots: Int32, tokens: Int32, columns, rows, steps, A_shared, dt_shared,
    ):  # fmt: skip
        smem = SmemAllocator()
        outputs, values = output, v
        sO = None
        if const_expr(self.normed):
            # A row a token, whatever request and head they are of.
            sO = smem.allocate_tensor(F32, cute.make_layout((self.tokens, self.wide), stride=(self.wide, 1)), 16)
            of_block = cute.make_layout((1, self.tokens, 1, self.wide), stride=(0, self.wide, 0, 1))
            outputs = cute.make_tensor(sO.iterator, of_block)
        sX = None
        if const_expr(self.convolves):
            wide = const_expr(2 * self.K + self.wide)
            sX = smem.allocate_tensor(v.element_type, cute.make_layout((self.tokens, wide), stride=(wide, 1)), 16)
            values = self.values_of(sX)
        x = Operands(
            state, q, k, values, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, outputs
        )  # fmt: skip
        options = Options(scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm)
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        lane, group = self.thread(tid)
        mine, own_heads, scalars, hl = Int32(self.channels), Int32(1), None, hv
        if const_expr(self.share > 1 or self.group > 1):
            if const_expr(self.shifted):
                # as many heads to each block of a group: the last ones may have none, and name the first one's
                most = (ratio + self.group - 1) // self.group
                hq = hv // self.group
                shares = hv % self.group * most
                own_heads = cutlass.min(cutlass.max(ratio - shares, 0), most)
                hv = hq * ratio + cutlass.select_(own_heads > 0, shares, Int32(0))
            else:
                blocks = (ratio + self.share - 1) // self.share
                hq = hv // blocks
                shares = hv % blocks * self.share
                hv = hq * ratio + shares
                own_heads = cutlass.min(ratio - shares, self.share)
            hl = hv
            if const_expr(self.share > 1):
                layout = cute.make_layout((self.tokens, self.share, 2), stride=(2 * self.share, 2, 1))
                scalars = smem.allocate_tensor(F32, layout, 16)
                mine = 2 * self.K + own_heads * self.V
                # the head whose gate a lane asks for
                last = cutlass.max(own_heads - 1, 0) if const_expr(self.shifted) else own_heads - 1
                hl = hv + cutlass.min(tid % 32, last)
        else:
            hq, shares = divmod(hv, heads)
        decays = None
        if const_expr(self.handed):
            decays = smem.allocate_tensor(F32, cute.make_layout((self.decays + 4 * self.roles,)), 16)
        thread = self.stand(tid, lane, group)

        conv = Conv(mixed_qkv, conv_state, conv_weight, conv_bias, conv_position, H, window_rows, ratio)
        own = Block(vt, vt * self.tile_v, hv, hq, n, n, Int32(0), Int32(0))
        gate, rw, taps = None, None, None
        if const_expr(self.pdl == "first"):
            # nobody writes a model's constants: they are there when the kernel ahead ends
            gate, rw, taps = self.read_constants(x, conv, norm_weight, mine, own, hl, A_shared, dt_shared, tid)
        self.await_producer("first")
        asked = self.ask_slots(n, tid % 32, x, columns)
        if const_expr(self.beyond):
            # with `row` no slot that hangs on `accepted` is waited for here, ahead of the own state
            later, there = self.further(n)
            asked_later = self.ask_slots(later, tid % 32, x, columns)
        at = Int32(0)
        if const_expr(self.convolves):
            # no position reaches memory that is not the slot's
            if const_expr(self.shifted):
                at = Int32(self.width - 1)
                if const_expr(self.accepted):
                    # of drafts the window begins behind as many rows as were accepted beside the first
                    ahead = asked.first if const_expr(self.row) else accepted[n]
                    at += cutlass.min(cutlass.max(ahead - 1, 0), window_rows - at)
            else:
                at = cutlass.min(cutlass.max(conv_position[n], 0), window_rows - 1)
        # from here on in the order of `recurrent`, which says why
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, cu_seqlens, tokens)
        block = Block(vt, own.v0, hv, hq, n, ni, t0, length)
        # What the delta rule leaves is in shared memory from its first row on.
        within = Block(vt, block.v0, hv, hq, n, ni, Int32(0) if const_expr(self.normed) else t0, length)
        of_lane = Block(vt, block.v0, hl, hq, n, ni, t0, length)
        if const_expr(self.pdl != "first"):
            gate, rw, taps = self.read_constants(x, conv, norm_weight, mine, own, hl, A_shared, dt_shared, tid)
        sums, arrived, early = None, None, None
        if const_expr(self.pdl != "state"):
            early = self.bring(x, output_gate, conv, taps, block, own_heads, of_lane, thread)
        cute.arch.sync_warp()
        if const_expr(self.cluster > 1):
            sums, arrived = self.open_mailbox(smem, block, tid)
        places = None
        if const_expr(self.sent and self.roles):
            places = self.open_places(smem, tid)

        slot, write_slot = self.start_of(asked, n, slot_index, columns), asked.write_slot
        live, writes = self.named(slot, write_slot, slots, null_index)
        if const_expr(self.group > 1):
            live = live and own_heads > 0
        window_slot, held = slot, live
        if const_expr(self.convolves and self.intermediate == "slots"):
            # of drafts, the slot of column 0, whichever they start from
            window_slot = self.of_row(asked.row, Int32(0)) if const_expr(self.row) else slot_index[n, 0]
            held = window_slot >= 0 and window_slot < slots and window_slot != null_index
        row, keeps = self.kept_row(n, live, slot_index, rows, null_index)
        kept = Kept(slots, columns, steps, row, keeps, asked.row)

        # where the window moves on, if it does
        moves_to, moved = (window_slot, held) if const_expr(self.intermediate == "slots") else (write_slot, writes)
        if const_expr(self.joined):
            # those that read nothing: the others wait for these too
            if not live:
                cute.arch.cluster_arrive()

        if live:
            source = state[Int64(slot), hv, None, None]
            window, factors = None, None
            if const_expr(self.apart):
                # A warp waits for all its loads at once: those that convolve ask for their rows behind it, the others do not wait.
                first_of_head = shares == 0 and vt == 0
                if const_expr(self.roles):
                    window = self.ask_window(conv, window_slot, held, at, taps, tid)
                    if const_expr(self.sent):
                        # all warps' rows, those of the ones that convolve too: nobody waits for a copy before its rows are used
                        self.send_for(source, places, block.v0, thread)
                    self.hand_gates(decays, early.read, gate, options, tid)
                elif const_expr(self.once):
                    self.hand_decays(decays, early.read, gate, options, tid)
                if self.has_channels(tid):
                    apart = window if const_expr(self.roles) else self.read_window(conv, window_slot, held, at, taps)
                    self.convolve(taps, apart, early.rows, sX, mine, block, tid)
                    if const_expr(self.moves):
                        if moved:
                            self.store_window(conv, moves_to, at, taps, apart, early.rows, mine, block, first_of_head, tid)
                if const_expr(self.roles and self.normed):
                    factors = self.weighed(early.gate, rw, block, own_heads, tid)
            if const_expr(self.convolves and not self.state_first and not self.apart):
                window = self.read_window(conv, window_slot, held, at, taps)
                cute.arch.sync_warp()
            coming = places if const_expr(self.sent and self.roles) else self.first_rows(source, smem, block.v0, thread)
            if const_expr(self.bulk):
                self.open_stores(smem)
            if const_expr(self.convolves and self.state_first):
                window = self.read_window(conv, window_slot, held, at, taps)
            if const_expr(self.early and self.per_k and not self.loop):
                cute.arch.sync_warp()
            self.await_producer("state")
            late = early
            if const_expr(self.pdl == "state"):
                late = self.bring(x, output_gate, conv, taps, block, own_heads, of_lane, thread)
                cute.arch.sync_warp()
            if const_expr(self.share > 1):
                self.hand_scalars(scalars, late.read, gate, options, block, tid)
            if const_expr(self.once and not self.apart):
                self.hand_decays(decays, late.read, gate, options, tid)
            if const_expr(self.apart):
                cute.arch.sync_threads()
            elif const_expr(self.convolves):
                self.convolve(taps, window, late.rows, sX, mine, block, tid)
                first_of_head = shares == 0 and vt == 0
                if const_expr(self.joined):
                    # what this thread has read of the window is in its registers
                    cute.arch.cluster_arrive()
                cute.arch.sync_threads()
                # Behind the barrier, where no other warp waits for these stores; and threads beyond the last channel have read the last ones.
                if const_expr(self.moves and not self.joined):
                    if moved:
                        self.store_window(conv, moves_to, at, taps, window, late.rows, mine, block, first_of_head, tid)
            read = self.read_convolved(sX, late.read, block, thread) if const_expr(self.convolves) else late.read
            norm = None
            if const_expr(self.normed):
                of_warp, squares = self.rows_in_registers(F32), cute.make_rmem_tensor((self.norm_rows,), F32)
                if const_expr(not self.roles):
                    factors = self.weighed(late.gate, rw, block, own_heads, tid)
                norm = Norm(sO, factors, output, norm_eps, of_warp, squares, sums, arrived, block)
            if const_expr(self.beyond):
                slot_there = self.start_of(asked_later, later, slot_index, columns)
                if there:
                    rows_there = own_heads * self.V if const_expr(self.share > 1) else self.tile
                    self.fetch(state, slot_there, slots, block.hv, block.v0, rows_there, tid)
            body = self.many_tokens if const_expr(self.loop) else self.one_token
            body(x, options, within, thread, gate, read, kept, source, coming, write_slot, writes, Shared(own_heads, scalars, decays), norm)
            if const_expr(self.normed and not self.ends_early):
                if const_expr(not self.sends_early):
                    self.meet(norm, block, tid)
                self.write_outputs(norm, own_heads, block, tid)
            if const_expr(self.joined):
                if const_expr(self.cluster == 1):
                    cute.arch.cluster_wait()
                if const_expr(self.moves):
                    if moved:
                        self.store_window(conv, moves_to, at, taps, window, late.rows, mine, block, first_of_head, tid)
            if const_expr(self.bulk):
                self.end_stores(tid)
        else:
            self.await_producer("state")
            if const_expr(self.cluster > 1 and not self.joined):
                cute.arch.cluster_wait()
            self.zero_heads(output, own_heads, block, tid)


def fakes(facts: dict, tensors: list) -> list:
    """Stand-ins for what a layer adds to the tensors of a decode kernel, which say the sizes: the gate, the weight, what a convolution has."""
    output = tensors[-1]
    x, V = output.element_type, facts["V"]
    x16 = 16 // (x.width // 8)
    B, T = output.shape[:2]

    def wide():
        return cute.sym_int64(divisibility=x16)

    def tensor(dtype, shape, strides):
        return make_fake_tensor(dtype, shape, strides, assumed_align=16)

    gate = weight = None
    if facts["norm"] != "none":
        gate = tensor(x, output.shape, (wide(), wide(), V, 1))
        weight = tensor(decode.DTYPES[facts["norm_weight_dtype"]], (V,), (1,))
    if facts["conv"] == "none":
        return [gate, weight, [None] * 5]
    D, W = cute.sym_int(symbol="D"), facts["conv_width"]
    # whose rows are the requests: read_index, or that of slots
    index = tensors[8] if tensors[8] is not None else tensors[10]
    windows = (cute.sym_int(), cute.sym_int(), D)
    if facts.get("dims_first"):
        strides = (cute.sym_int64(), 1, cute.sym_int())
        state = make_fake_tensor(x, windows, strides, assumed_align=x.width // 8)
    else:
        state = tensor(x, windows, (wide(), wide(), 1))
    conv = [
        # of heads side by side the gates are in it too
        tensor(x, (B, T, cute.sym_int(symbol="W") if facts.get("interleaved") else D), (wide(), wide(), 1)),
        state,
        tensor(x, (D, W), (W, 1)),
        tensor(x, (D,), (1,)) if facts["conv_bias"] else None,
        None if facts.get("shifted") else make_fake_tensor(Int32, index.shape[:1], (cute.sym_int(),), assumed_align=4),
    ]
    return [gate, weight, conv]


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    layer = Layer(facts, knobs)
    tensors = decode.fakes(facts)
    gate, weight, conv = fakes(facts, tensors)
    arguments = [*tensors, *decode.SCALARS, gate, weight, F32(1.0), *conv]
    return decode.made(layer, layer.gated_delta_rule_layer_decode, arguments, options, prefix)
