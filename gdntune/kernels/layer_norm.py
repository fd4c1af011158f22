"""A layer's gated RMSNorm, of outputs that the delta rule leaves in shared memory in fp32.

A norm needs all of a head's V. So a block has a whole head, in chunks of rows. Behind one barrier each warp takes a token:
o rsqrt(mean(o^2) + eps) weight gate(z), rounded once. The barrier stands behind the state's stores, which nobody waits for: what the
norm adds is what a warp needs for V values in shared memory. Where a batch has fewer heads than the GPU has SMs, V is split over a
cluster's blocks, which send one another their sums of squares by st.async.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr

from gdntune.kernels import gates, layer_conv

F32 = Float32


class Norm(NamedTuple):
    """What a block's norm has: rows of outputs in shared memory, weight times gate in registers, the output, epsilon.

    own, squares: registers for a warp's rows and their sums of squares. sums, arrived: of a cluster, each block's sums of each token,
    and the mbarrier that counts their bytes. block: where the output's rows are.
    """

    rows: Any
    gate: Any
    output: Any
    eps: Any
    own: Any
    squares: Any
    sums: Any
    arrived: Any
    block: Any


class Normed(layer_conv.Convolved):
    """The compile-time facts of a norm behind the delta rule, where the contract has one."""

    def __init__(self, facts: dict, knobs: dict[str, Any]):
        super().__init__(facts, knobs)
        self.norm = facts["norm"]
        self.normed = self.norm != "none"
        # blocks that add up a norm's squares
        self.cluster = self.V // self.tile if self.normed else 1
        # of a token's row, what a lane normalises, and rows that a warp does
        self.VL = self.tile // 32
        self.norm_rows = -(-self.tokens * self.share // self.warps)
        # A cluster's sums are on their way before the state's stores; without one the outputs are.
        self.sends_early = self.cluster > 1 and self.chunks == 1 and not self.loop
        self.ends_early = self.normed and self.cluster == 1 and not self.loop
        if knobs["apart"] and self.chunks == 1:
            # all warps' stores are one burst at the end: they do not wait for the slowest warp
            self.ends_early = False
        # Blocks of a q/k head that have its value heads among them, and whether they wait for one another because of its window.
        self.group = knobs["group"]
        self.joined = self.shifted and self.cluster * self.group > 1

    def row_of(self, r, tid):
        """Token and head of the r-th row that a warp normalises."""
        # the last warp has the first row where the first warps convolve ahead of all else
        warp = self.warps - 1 - tid // 32 if self.lean else tid // 32
        i = warp + r * self.warps
        return i // self.share, i % self.share

    @cute.jit
    def read_gate(self, output_gate, ratio, block, heads, tid):
        """Issues the loads of the output's gate, by the warp that normalises a row."""
        rz = self.rows_in_registers(output_gate.element_type)
        for r in cutlass.range_constexpr(self.norm_rows):
            t, g = self.row_of(r, tid)
            if t < block.length and g < heads:
                if const_expr(self.interleaved):
                    # behind the first head's: the q/k heads before have their q, k and v beside their gates
                    ahead = (block.hv + g) * self.V + block.hq * (2 * self.K + ratio * self.V)
                    row = output_gate[block.ni, block.t0 + t, None]
                    at = ahead // self.VL + self.in_row(block, tid % 32)
                    cute.autovec_copy(cute.local_tile(row, (self.VL,), (at,)), rz[r, None])
                else:
                    self.read_row(output_gate[block.ni, block.t0 + t, block.hv + g, None], rz[r, None], block, tid % 32)
        return rz

    @cute.jit
    def read_row(self, source, target, block, wl):
        """A lane's share of the block's part of a [V] vector."""
        cute.autovec_copy(cute.local_tile(source, (self.VL,), (self.in_row(block, wl),)), target)

    def in_row(self, block, wl):
        return block.v0 // self.VL + wl if self.cluster > 1 else wl

    @cute.jit
    def share_squares(self, norm, block, tid):
        """Behind a barrier: a warp's rows of shared memory to registers, with their sums of squares, which a cluster's other blocks get."""
        wl = tid % 32
        ro, squares = norm.own, norm.squares
        for r in cutlass.range_constexpr(self.norm_rows):
            t, g = self.row_of(r, tid)
            if t < block.length:
                row = cute.local_tile(norm.rows[t, None], (self.V,), (g,))
                self.read_row(row, ro[r, None], block, wl)
                x = F32(0.0)
                for i in cutlass.range_constexpr(self.VL):
                    x += ro[r, i] * ro[r, i]
                for s in cutlass.range_constexpr(5):
                    x += cute.arch.shuffle_sync_bfly(x, offset=16 >> s, mask=-1, mask_and_clamp=31)
                squares[r] = x
                if const_expr(self.cluster > 1):
                    if wl < self.cluster:
                        place = norm.sums.iterator + (t * self.cluster + block.vt)
                        cute.arch.store_async_dsmem(place, cute.recast_tensor(squares, Int32)[r], norm.arrived, wl)

    def rows_in_registers(self, dtype):
        """Registers for a lane's share of the rows that a warp normalises."""
        return cute.make_rmem_tensor(cute.make_layout((self.norm_rows, self.VL), stride=(self.VL, 1)), dtype)

    @cute.jit
    def weighed(self, gate, weight, block, heads, tid):
        """The norm's weight times the output's gate, of a warp's rows, while the state is on its way."""
        # arithmetic that waits for the gate does not move ahead of the state's loads
        cute.arch.sync_warp()
        factors = self.rows_in_registers(F32)
        for r in cutlass.range_constexpr(self.norm_rows):
            t, g = self.row_of(r, tid)
            if t < block.length and g < heads:
                for i in cutlass.range_constexpr(self.VL):
                    z = gate[r, i].to(F32)
                    x = gates.sigmoid(z)
                    if const_expr(self.norm == "silu"):
                        x = x * z
                    factors[r, i] = weight[i].to(F32) * x
        return factors

    @cute.jit
    def write_outputs(self, norm, heads, block, tid):
        """A warp's rows normalised, times weight and gate, to the output."""
        wl = tid % 32
        if const_expr(self.cluster > 1):
            first, _ = self.row_of(0, tid)
            if first < block.length:
                cute.arch.mbarrier_wait(norm.arrived, 0)
        for r in cutlass.range_constexpr(self.norm_rows):
            t, g = self.row_of(r, tid)
            if t < block.length and g < heads:
                total = norm.squares[r]
                if const_expr(self.cluster > 1):
                    total = F32(0.0)
                    for c in cutlass.range_constexpr(self.cluster):
                        total += norm.sums[t, c]
                rstd = cute.math.rsqrt(total * F32(1.0 / self.V) + norm.eps, fastmath=True)
                y = cute.make_rmem_tensor((self.VL,), norm.output.element_type)
                for i in cutlass.range_constexpr(self.VL):
                    y[i] = (norm.own[r, i] * rstd * norm.gate[r, i]).to(norm.output.element_type)
                row = norm.output[block.ni, block.t0 + t, block.hv + g, None]
                cute.autovec_copy(y, cute.local_tile(row, (self.VL,), (self.in_row(block, wl),)))

    @cute.jit
    def meet(self, norm, block, tid):
        """All rows of a block's outputs are in shared memory: their squares."""
        if const_expr(self.cluster > 1):
            # the other blocks run, and may be sent to
            cute.arch.cluster_wait()
        cute.arch.sync_threads()
        self.share_squares(norm, block, tid)

    @cute.jit
    def open_mailbox(self, smem, block, tid):
        """A cluster's place for the sums of squares of all its blocks, and the mbarrier that counts them in."""
        sums = smem.allocate_tensor(F32, cute.make_layout((self.tokens, self.cluster), stride=(self.cluster, 1)), 16)
        arrived = smem.allocate_array(Int64, 1)
        if tid == 0:
            cute.arch.mbarrier_init(arrived, 1)
            cute.arch.mbarrier_arrive_and_expect_tx(arrived, 4 * self.cluster * block.length)
        cute.arch.mbarrier_init_fence()
        # waited for where the first sums are sent
        if const_expr(not self.joined):
            cute.arch.cluster_arrive_relaxed()
        return sums, arrived
