"""A layer's step in one launch: convolution, gated delta rule and gated RMSNorm, each end where the contract has it.

The delta rule is `recurrent`'s, which finds its inputs and leaves its outputs in shared memory.

A norm needs all of a head's V. So a block has a whole head, in chunks of rows, and its outputs go to shared memory in fp32. Behind
one barrier each warp takes a token: o rsqrt(mean(o^2) + eps) weight gate(z), rounded once. The barrier stands behind the state's
stores, which nobody waits for: what the norm adds is what a warp needs for V values in shared memory.

Windows are rings: new rows go where no block reads, so the blocks of a q/k head need not wait for one another, and drafts that were
not accepted are taken back by the position alone. Each block convolves the head's 2 K channels anew, beside its own rows of V; one of
them stores the new rows.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, gates, recurrent
from gdntune.kernels.recurrent import Block, Kept, Operands, Options, Read, Thread

F32 = Float32
# Channels that a load moves, and more of them than any row has: a view's last dimension is no bound.
CHANNELS, MANY = 4, 1 << 24


class Conv(NamedTuple):
    """A call's convolution: its tensors, the q/k heads, and the rows of a ring."""

    mixed: Any
    state: Any
    weight: Any
    bias: Any
    position: Any
    H: Any
    rows: Any


class Taps(NamedTuple):
    """Of a thread's channels: their numbers, weights and biases."""

    channels: Any
    weight: Any
    bias: Any


class Brought(NamedTuple):
    """Registers for what the launch ahead wrote: the tokens' inputs, the output's gate, the new rows of the window."""

    read: Any
    gate: Any
    rows: Any


class Layer(recurrent.Recurrent):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, knobs)
        self.norm, self.conv, self.width = facts["norm"], facts["conv"], facts["conv_width"]
        self.normed, self.convolves = self.norm != "none", self.conv != "none"
        # of a token's row, what a lane normalises
        self.VL = self.V // 32
        # channels that a block convolves, and loads of them that a thread makes
        self.channels = 2 * self.K + self.tile_v
        self.rounds = -(-self.channels // (CHANNELS * self.threads))

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
        tiles = self.V // self.tile_v
        grid = (tiles, HV, B)
        if const_expr(self.heads_first):
            grid = (HV, tiles, B)
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(slot_index, 2, None), self.view(accepted, 1),
            self.view(cu_seqlens, 1), self.view(intermediate, 2), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            self.view(output_gate, 2), norm_weight, norm_eps, self.rows_of(mixed_qkv, 2), self.rows_of(conv_state, 2),
            self.rows_of(conv_weight, 0), self.rows_of(conv_bias, 0), self.view(conv_position, 1), q.shape[2], window,
            heads, state.shape[0], tokens, columns, rows, steps, A_shared, dt_shared,
        ).launch(
            grid=grid, block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.resident else None,
            use_pdl=self.pdl != "none",
        )  # fmt: skip

    def rows_of(self, x, leading):
        """The same memory by its `leading` dimensions and the elements behind, side by side: a launch carries no more."""
        if x is None:
            return None
        stride = (*(x.stride[d] for d in range(leading)), 1)
        return cute.make_tensor(x.iterator, cute.make_layout((1,) * leading + (MANY,), stride=stride))

    @cute.jit
    def read_gate(self, output_gate, block, tid):
        """Issues the loads of the output's gate, by the warp that normalises a token."""
        per_token = cute.make_layout((self.stage_tokens, self.VL), stride=(self.VL, 1))
        rz = cute.make_rmem_tensor(per_token, output_gate.element_type)
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < block.length:
                self.read_row(output_gate[block.ni, block.t0 + t, block.hv, None], rz[r, None], tid % 32)
        return rz

    @cute.jit
    def read_row(self, source, target, wl):
        cute.autovec_copy(cute.local_tile(source, (self.VL,), (wl,)), target)

    @cute.jit
    def write_outputs(self, sO, rz, rw, output, eps: Float32, block, tid):
        """A token's row of shared memory normalised, times weight and gate, to the output: a warp a token."""
        wl = tid % 32
        for r in cutlass.range_constexpr(self.stage_tokens):
            t = tid // 32 + r * self.warps
            if t < block.length:
                ro = cute.make_rmem_tensor((self.VL,), F32)
                self.read_row(sO[t, None], ro, wl)
                squares = F32(0.0)
                for i in cutlass.range_constexpr(self.VL):
                    squares += ro[i] * ro[i]
                for s in cutlass.range_constexpr(5):
                    squares += cute.arch.shuffle_sync_bfly(squares, offset=16 >> s, mask=-1, mask_and_clamp=31)
                rstd = cute.math.rsqrt(squares * F32(1.0 / self.V) + eps, fastmath=True)
                y = cute.make_rmem_tensor((self.VL,), output.element_type)
                for i in cutlass.range_constexpr(self.VL):
                    z = rz[r, i].to(F32)
                    gate = gates.sigmoid(z)
                    if const_expr(self.norm == "silu"):
                        gate = gate * z
                    y[i] = (ro[i] * rstd * (rw[i].to(F32) * gate)).to(output.element_type)
                row = output[block.ni, block.t0 + t, block.hv, None]
                cute.autovec_copy(y, cute.local_tile(row, (self.VL,), (wl,)))

    @cute.jit
    def channel(self, e, block, H):
        """The packed row's channel that is the block's e-th: K of q, K of k, tile_v of v."""
        c = block.hq * self.K + e
        c = cutlass.select_(e >= self.K, H * self.K + c - self.K, c)
        of_v = 2 * H * self.K + block.hv * self.V + block.v0 + e - 2 * self.K
        return cutlass.select_(e >= 2 * self.K, of_v, c)

    @cute.jit
    def read_taps(self, conv, block, tid):
        """Issues the loads of a thread's weights and biases. Threads beyond the last channel have the last ones' too."""
        channels = cute.make_rmem_tensor((self.rounds,), Int32)
        W = const_expr(CHANNELS * self.width)
        rw = cute.make_rmem_tensor(cute.make_layout((self.rounds, W), stride=(W, 1)), conv.weight.element_type)
        rb = None
        if const_expr(conv.bias is not None):
            rb = self.per_channel(conv.bias.element_type)
        for r in cutlass.range_constexpr(self.rounds):
            e = cutlass.min((r * self.threads + tid) * CHANNELS, self.channels - CHANNELS)
            channels[r] = self.channel(e, block, conv.H)
            cute.autovec_copy(cute.local_tile(conv.weight, (W,), (channels[r] // CHANNELS,)), rw[r, None])
            if const_expr(conv.bias is not None):
                self.read_channels(conv.bias, channels[r], rb[r, None])
        return Taps(channels, rw, rb)

    def per_channel(self, dtype):
        """Registers for a value of each of a thread's channels."""
        return cute.make_rmem_tensor(cute.make_layout((self.rounds, CHANNELS), stride=(CHANNELS, 1)), dtype)

    @cute.jit
    def read_channels(self, source, c, target):
        cute.autovec_copy(cute.local_tile(source, (CHANNELS,), (c // CHANNELS,)), target)

    @cute.jit
    def read_window(self, conv, slot, held, at, taps):
        """Issues the loads of the rows before row `at` of a slot's ring, the oldest first; zeros where no slot is `held`."""
        rr = self.per_row(self.width - 1, conv.state.element_type)
        if const_expr(self.intermediate == "slots"):
            rr.fill(0.0)
            if held:
                self.read_rows_before(conv, slot, at, taps, rr)
        else:
            self.read_rows_before(conv, slot, at, taps, rr)
        return rr

    @cute.jit
    def read_rows_before(self, conv, slot, at, taps, rr):
        for r in cutlass.range_constexpr(self.rounds):
            for j in cutlass.range_constexpr(self.width - 1):
                row = at + (j + 1 - self.width)
                row = cutlass.select_(row < 0, row + conv.rows, row)
                self.read_channels(conv.state[Int64(slot), row, None], taps.channels[r], rr[r, j, None])

    def per_row(self, rows, dtype):
        """Registers for so many rows of a thread's channels."""
        stride = (rows * CHANNELS, CHANNELS, 1)
        return cute.make_rmem_tensor(cute.make_layout((self.rounds, rows, CHANNELS), stride=stride), dtype)

    @cute.jit
    def convolve(self, taps, window, new, sX, block, tid):
        """A thread's channels of all tokens convolved, to shared memory as the unfused path rounds them."""
        old = const_expr(self.width - 1)
        for r in cutlass.range_constexpr(self.rounds):
            e = (r * self.threads + tid) * CHANNELS
            # v stands where its rows are among all of V
            place = cutlass.select_(e >= 2 * self.K, e + block.v0, e)
            for t in cutlass.range_constexpr(self.tokens):
                if e < self.channels and t < block.length:
                    y = cute.make_rmem_tensor((CHANNELS,), sX.element_type)
                    for i in cutlass.range_constexpr(CHANNELS):
                        x = new[r, t, i].to(F32) * taps.weight[r, self.width * i + old].to(F32)
                        for j in cutlass.range_constexpr(old):
                            before = window[r, t + j, i] if const_expr(t + j < old) else new[r, t + j - old, i]
                            x += before.to(F32) * taps.weight[r, self.width * i + j].to(F32)
                        if const_expr(taps.bias is not None):
                            x += taps.bias[r, i].to(F32)
                        if const_expr(self.conv == "silu"):
                            x = x * gates.sigmoid(x)
                        y[i] = x.to(sX.element_type)
                    cute.autovec_copy(y, cute.local_tile(sX[t, None], (CHANNELS,), (place // CHANNELS,)))

    @cute.jit
    def store_new(self, conv, slot, at, taps, new, block, first, tid):
        """The window's new rows: v's channels by their own block, q's and k's by the `first` of those that share the head."""
        for r in cutlass.range_constexpr(self.rounds):
            e = (r * self.threads + tid) * CHANNELS
            for t in cutlass.range_constexpr(self.tokens):
                if t < block.length and e < self.channels and (e >= 2 * self.K or first):
                    # a remainder: a ragged request may be longer than its call said, and must stay in its slot
                    row = (at + t) % conv.rows if const_expr(t > 0) else at
                    ring = conv.state[Int64(slot), row, None]
                    cute.autovec_copy(new[r, t, None], cute.local_tile(ring, (CHANNELS,), (taps.channels[r] // CHANNELS,)))

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
            rv = cute.make_rmem_tensor((self.own,), sX.element_type)
            self.read_key(cute.local_tile(sX[0, None], (self.K,), (0,)), rq, thread.lane)
            self.read_key(cute.local_tile(sX[0, None], (self.K,), (1,)), rk, thread.lane)
            self.read_values(self.values_of(sX)[0, 0, 0, None], rv, self.unit(block.vt, 0, thread))
        return Read(rq, rk, gates_read.g, rv, gates_read.a, gates_read.b)

    def values_of(self, sX):
        """v of shared memory under the indices of a tensor [B, T, HV, V]: it has the block's tokens and head alone."""
        layout = cute.make_layout((1, self.tokens, 1, self.V), stride=(0, 2 * self.K + self.V, 0, 1))
        return cute.make_tensor(sX.iterator + 2 * self.K, layout)

    @cute.jit
    def read_gates(self, x, block, thread):
        """Issues the loads of the tokens' gates alone, as `read` does."""
        if const_expr(self.loop):
            rg = cute.make_rmem_tensor(
                cute.make_layout((self.stage_tokens, self.K // 32), stride=(self.K // 32, 1)), x.a.element_type
            )
            rs = cute.make_rmem_tensor(cute.make_layout((self.stage_tokens, 2), stride=(2, 1)), F32)
            for r in cutlass.range_constexpr(self.stage_tokens):
                t = thread.tid // 32 + r * self.warps
                if t < block.length:
                    if const_expr(self.per_k):
                        self.read_lane(x.a[block.ni, block.t0 + t, block.hv, None], rg[r, None], thread.tid % 32)
                    else:
                        rs[r, 0] = x.a[block.ni, block.t0 + t, block.hv].to(F32)
                    rs[r, 1] = x.b[block.ni, block.t0 + t, block.hv].to(F32)
            ga, gb = rs[None, 0], rs[None, 1]
        else:
            rg = cute.make_rmem_tensor((self.K // 32,), x.a.element_type)
            ga = F32(0.0)
            if const_expr(self.per_k):
                self.read_lane(x.a[block.ni, block.t0, block.hv, None], rg, thread.tid % 32)
            else:
                ga = x.a[block.ni, block.t0, block.hv].to(F32)
            gb = x.b[block.ni, block.t0, block.hv].to(F32)
        return Read(None, None, rg, None, ga, gb)

    @cute.jit
    def bring(self, x, output_gate, conv, taps, block, thread):
        """Issues the loads of what the launch ahead wrote."""
        rx = None
        if const_expr(self.convolves):
            rx = self.per_row(self.tokens, conv.mixed.element_type)
            for r in cutlass.range_constexpr(self.rounds):
                for t in cutlass.range_constexpr(self.tokens):
                    if t < block.length:
                        self.read_channels(conv.mixed[block.ni, block.t0 + t, None], taps.channels[r], rx[r, t, None])
        read = self.read_gates(x, block, thread) if const_expr(self.convolves) else self.read(x, block, thread)
        rz = self.read_gate(output_gate, block, thread.tid) if const_expr(self.normed) else None
        return Brought(read, rz, rx)

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, output_gate, norm_weight, norm_eps: Float32,
        mixed_qkv, conv_state, conv_weight, conv_bias, conv_position, H, window_rows, heads: cute.FastDivmodDivisorV2,
        slots: Int32, tokens: Int32, columns, rows, steps, A_shared, dt_shared,
    ):  # fmt: skip
        smem = SmemAllocator()
        outputs, values = output, v
        sO = None
        if const_expr(self.normed):
            # A row a token, whatever request and head they are of.
            sO = smem.allocate_tensor(F32, cute.make_layout((self.tokens, self.V), stride=(self.V, 1)), 16)
            of_block = cute.make_layout((1, self.tokens, 1, self.V), stride=(0, self.V, 0, 1))
            outputs = cute.make_tensor(sO.iterator, of_block)
        sX = None
        if const_expr(self.convolves):
            wide = const_expr(2 * self.K + self.V)
            sX = smem.allocate_tensor(v.element_type, cute.make_layout((self.tokens, wide), stride=(wide, 1)), 16)
            values = self.values_of(sX)
        x = Operands(
            state, q, k, values, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, outputs
        )  # fmt: skip
        options = Options(scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm)
        tid, _, _ = cute.arch.thread_idx()
        vt, hv, n = self.place()
        lane, group = self.thread(tid)
        hq, shares = divmod(hv, heads)
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
        conv = Conv(mixed_qkv, conv_state, conv_weight, conv_bias, conv_position, H, window_rows)
        at = Int32(0)
        if const_expr(self.convolves):
            # no position reaches memory that is not the slot's
            at = cutlass.min(cutlass.max(conv_position[n], 0), window_rows - 1)
        # from here on in the order of `recurrent`, which says why
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, cu_seqlens, tokens)
        block = Block(vt, vt * self.tile_v, hv, hq, n, ni, t0, length)
        # What the delta rule leaves is in shared memory from its first row on.
        within = Block(vt, block.v0, hv, hq, n, ni, Int32(0) if const_expr(self.normed) else t0, length)
        gate = self.gate_of(x, A_shared, dt_shared, hq, hv, tid)
        rw = None
        if const_expr(self.normed):
            rw = cute.make_rmem_tensor((self.VL,), norm_weight.element_type)
            self.read_row(norm_weight, rw, tid % 32)
        taps = self.read_taps(conv, block, tid) if const_expr(self.convolves) else None
        early = self.bring(x, output_gate, conv, taps, block, thread) if const_expr(self.pdl != "state") else None
        cute.arch.sync_warp()

        if const_expr(self.row):
            slot = self.start_of_row(row_slots, first, n, slot_index, columns)
        live, writes = self.named(slot, write_slot, slots, null_index)
        window_slot, held = slot, live
        if const_expr(self.convolves and self.intermediate == "slots"):
            # of drafts, the slot of column 0, whichever they start from
            window_slot = self.of_row(row_slots, Int32(0)) if const_expr(self.row) else slot_index[n, 0]
            held = window_slot >= 0 and window_slot < slots and window_slot != null_index
        row = Int64(n)
        keeps = live
        if const_expr(self.intermediate == "indexed"):
            place = slot_index[n]
            keeps = place >= 0 and place < rows and place != null_index
            row = Int64(place)
        kept = Kept(slots, columns, steps, row, keeps, row_slots)

        if live:
            source = state[Int64(slot), hv, None, None]
            raw = self.fragment(self.state_dtype)
            if const_expr(self.early):
                self.copy_rows(source, raw, block.v0 + group * self.RV, lane, False)
            window = self.read_window(conv, window_slot, held, at, taps) if const_expr(self.convolves) else None
            if const_expr(self.early and self.per_k and not self.loop):
                cute.arch.sync_warp()
            self.await_producer("state")
            late = self.bring(x, output_gate, conv, taps, block, thread) if const_expr(self.pdl == "state") else early
            if const_expr(self.pdl == "state"):
                cute.arch.sync_warp()
            if const_expr(self.convolves):
                self.convolve(taps, window, late.rows, sX, block, tid)
                first_of_head = shares == 0 and vt == 0
                if const_expr(self.intermediate == "slots"):
                    if held:
                        self.store_new(conv, window_slot, at, taps, late.rows, block, first_of_head, tid)
                elif const_expr(self.update):
                    if writes:
                        self.store_new(conv, write_slot, at, taps, late.rows, block, first_of_head, tid)
                cute.arch.sync_threads()
            read = self.read_convolved(sX, late.read, block, thread) if const_expr(self.convolves) else late.read
            body = self.many_tokens if const_expr(self.loop) else self.one_token
            body(x, options, within, thread, gate, read, kept, source, raw, write_slot, writes)
            if const_expr(self.normed):
                cute.arch.sync_threads()
                self.write_outputs(sO, late.gate, rw, output, norm_eps, block, tid)
        else:
            self.await_producer("state")
            self.zero_rows(output, ni, t0, length, hv, block.v0, tid)


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
    slots = cute.sym_int()
    conv = [
        tensor(x, (B, T, D), (wide(), wide(), 1)),
        tensor(x, (slots, cute.sym_int(), D), (wide(), wide(), 1)),
        tensor(x, (D, W), (W, 1)),
        tensor(x, (D,), (1,)) if facts["conv_bias"] else None,
        make_fake_tensor(Int32, index.shape[:1], (cute.sym_int(),), assumed_align=4),
    ]
    return [gate, weight, conv]


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    layer = Layer(facts, knobs)
    layer.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True, keep_mangled_name=False)
    tensors = decode.fakes(facts)
    gate, weight, conv = fakes(facts, tensors)
    scalars = [F32(1.0)] * 5 + [Int32(-1), Int32(1)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        layer.gated_delta_rule_layer_decode, *tensors, *scalars, gate, weight, F32(1.0), *conv, stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip
