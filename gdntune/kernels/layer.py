"""A layer's step in one launch: gated delta rule and the gated RMSNorm behind it, by `recurrent` with V unsplit.

A norm needs all of a head's V. So a block has a whole head, in chunks of rows, and its outputs go to shared memory in fp32. Behind
one barrier each warp takes a token: o rsqrt(mean(o^2) + eps) weight gate(z), rounded once. The barrier stands behind the state's
stores, which nobody waits for: what the norm adds is what a warp needs for V values in shared memory.
"""

import cutlass
import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32, Int64, const_expr
from cutlass.cute.runtime import make_fake_stream, make_fake_tensor
from cutlass.memory import SmemAllocator

from gdntune.kernels import decode, gates, recurrent
from gdntune.kernels.recurrent import Block, Kept, Operands, Options, Thread

F32 = Float32


class Layer(recurrent.Recurrent):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, knobs)
        self.norm = facts["norm"]
        # of a token's row, what a lane normalises
        self.VL = self.V // 32

    @cute.jit
    def gated_delta_rule_layer_decode(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, output_gate, norm_weight, norm_eps: Float32, stream: CUstream,
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
        self.kernel(
            self.view(state, 1, None), self.view(q, 2), self.view(k, 2), self.view(v, 2), self.view(a, 2), self.view(b, 2), A_log, dt_bias,
            self.view(read_index, 1), self.view(write_index, 1), self.view(slot_index, 2, None), self.view(accepted, 1),
            self.view(cu_seqlens, 1), self.view(intermediate, 2), self.view(output, 2),
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            self.view(output_gate, 2), norm_weight, norm_eps, heads, state.shape[0], tokens, columns, rows, steps, A_shared, dt_shared,
        ).launch(
            grid=(1, HV, B), block=(self.threads, 1, 1), stream=stream,
            min_blocks_per_mp=self.resident, preferred_smem_carveout=100 if self.resident else None,
            use_pdl=self.pdl != "none",
        )  # fmt: skip

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

    @cute.kernel
    def kernel(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, output_gate, norm_weight, norm_eps: Float32, heads: cute.FastDivmodDivisorV2,
        slots: Int32, tokens: Int32, columns, rows, steps, A_shared, dt_shared,
    ):  # fmt: skip
        # Outputs of the delta rule: a row of shared memory a token, whatever request and head they are of.
        smem = SmemAllocator()
        sO = smem.allocate_tensor(F32, cute.make_layout((self.tokens, self.V), stride=(self.V, 1)), 16)
        rows_of_block = cute.make_layout((1, self.tokens, 1, self.V), stride=(0, self.V, 0, 1))
        x = Operands(
            state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate,
            cute.make_tensor(sO.iterator, rows_of_block),
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
        # from here on in the order of `recurrent`, which says why
        cute.arch.sync_warp()
        ni, t0, length = self.span_of(n, cu_seqlens, tokens)
        block = Block(vt, Int32(0), hv, hq, n, ni, t0, length)
        # what shared memory has, from its first row on
        within = Block(vt, Int32(0), hv, hq, n, ni, Int32(0), length)
        gate = self.gate_of(x, A_shared, dt_shared, hq, hv, tid)
        rw = cute.make_rmem_tensor((self.VL,), norm_weight.element_type)
        self.read_row(norm_weight, rw, tid % 32)
        early = const_expr(self.pdl != "state")
        read = self.read(x, block, thread) if early else None
        rz = self.read_gate(output_gate, block, tid) if early else None
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
                self.copy_rows(source, raw, group * self.RV, lane, False)
                if const_expr(self.per_k and not self.loop and not self.fence):
                    cute.arch.sync_warp()
            body = self.many_tokens if const_expr(self.loop) else self.one_token
            if const_expr(self.pdl == "state"):
                self.await_producer("state")
                late = self.read(x, block, thread)
                late_gate = self.read_gate(output_gate, block, tid)
                cute.arch.sync_warp()
                body(x, options, within, thread, gate, late, kept, source, raw, write_slot, writes)
                cute.arch.sync_threads()
                self.write_outputs(sO, late_gate, rw, output, norm_eps, block, tid)
            else:
                body(x, options, within, thread, gate, read, kept, source, raw, write_slot, writes)
                cute.arch.sync_threads()
                self.write_outputs(sO, rz, rw, output, norm_eps, block, tid)
        else:
            self.await_producer("state")
            self.zero_rows(output, ni, t0, length, hv, Int32(0), tid)


def fakes(facts: dict, output) -> list:
    """Stand-ins for the gate and the weight; output: that of a decode kernel's, which says the sizes."""
    x16 = 16 // (output.element_type.width // 8)
    strides = (cute.sym_int64(divisibility=x16), cute.sym_int64(divisibility=x16), facts["V"], 1)
    gate = make_fake_tensor(output.element_type, output.shape, strides, assumed_align=16)
    weight = make_fake_tensor(decode.DTYPES[facts["norm_weight_dtype"]], (facts["V"],), (1,), assumed_align=16)
    return [gate, weight]


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    layer = Layer(facts, knobs)
    layer.kernel.set_name_prefix(prefix, remove_cutlass_symbol=True, keep_mangled_name=False)
    tensors = decode.fakes(facts)
    behind = fakes(facts, tensors[-1])
    scalars = [F32(1.0)] * 5 + [Int32(-1), Int32(1)]
    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        layer.gated_delta_rule_layer_decode, *tensors, *scalars, *behind, F32(1.0), stream,
        options=f"--enable-tvm-ffi {options}",
    )  # fmt: skip
