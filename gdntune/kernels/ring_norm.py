"""Drafts behind a ring of corrections with a layer's gated RMSNorm behind them, in one launch.

The delta rule is `ring`'s, whose block here has all of a head's V. It leaves its outputs in shared
memory, in fp32; behind one barrier, after the state's stores, each warp normalises tokens as
`layer_norm` does for a layer's step. It saves the norm's launch and its pass over the outputs.
"""

from typing import Any, NamedTuple

import cutlass.cute as cute
from cuda.bindings.driver import CUstream
from cutlass import Float32, Int32

from gdntune.kernels import decode, layer, layer_norm, ring_call
from gdntune.kernels.layer_norm import Norm
from gdntune.kernels.ring import Ring

F32 = Float32


class Head(NamedTuple):
    """Where a block's outputs are, in the words of `recurrent.Block`: all of V of one head."""

    ni: Any
    t0: Any
    hv: Any
    v0: Any
    length: Any


class Rest(NamedTuple):
    """What the norm waits for: a warp's rows of the output's gate, the weight, epsilon."""

    gate: Any
    weight: Any
    eps: Any
    head: Any


class HeadNorm(layer_norm.Normed):
    """The norm alone of a layer's step, for a block that has one whole head: no cluster, no convolution and no state, so that none of the
    step's other facts are there.
    """

    def __init__(self, norm: str, V: int, tokens: int, warps: int):
        self.norm, self.V, self.warps = norm, V, warps
        self.share, self.cluster, self.interleaved, self.lean = 1, 1, False, False
        self.VL = V // 32
        self.norm_rows = -(-tokens // warps)


class RingNorm(Ring):
    """The compile-time facts of one object."""

    def __init__(self, facts: dict, knobs: dict):
        super().__init__(facts, knobs)
        self.normed = HeadNorm(facts["norm"], self.V, self.tokens, self.threads // 32)

    @cute.jit
    def gated_delta_rule_ring_norm(
        self, state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, slot_index, accepted, cu_seqlens, intermediate, output,
        scale: Float32, softplus_beta: Float32, softplus_threshold: Float32, lower_bound: Float32, beta_scale: Float32,
        null_index: Int32, use_qk_l2norm: Int32, ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min: Int32, append: Int32,
        ring_seed, output_gate, norm_weight, norm_eps: Float32, stream: CUstream,
    ):  # fmt: skip
        self.launch(
            state, q, k, v, a, b, A_log, dt_bias, read_index, write_index, output,
            scale, softplus_beta, softplus_threshold, lower_bound, beta_scale, null_index, use_qk_l2norm,
            ring_k, ring_u, ring_decay, ring_base, ring_count, flush_min, append, ring_seed, output_gate, norm_weight, norm_eps, stream,
        )  # fmt: skip

    def ask_rest(self, output_gate, norm_weight, norm_eps, n, hv, tokens, th):
        """Issues the loads of the output's gate and the norm's weight, by the warps that normalise their rows."""
        head = Head(n, Int32(0), hv, Int32(0), tokens)
        weight = cute.make_rmem_tensor((self.normed.VL,), norm_weight.element_type)
        self.normed.read_row(norm_weight, weight, head, th.lane)
        gate = self.normed.read_gate(output_gate, None, head, Int32(1), th.tid)
        return Rest(gate, weight, norm_eps, head)

    def outputs_of(self, smem, output, n, hv):
        """A head's outputs [T, V] in shared memory, in fp32."""
        layout = cute.make_layout((self.tokens, self.V), stride=(self.V, 1))
        return smem.allocate_tensor(F32, layout, 16)

    @cute.jit
    def finish(self, rest, rows, output, th):
        """The head's tokens normalised, a warp a token at a time."""
        normed, one = self.normed, Int32(1)
        # weighed while other warps are at work: as raw registers the gate takes half as many until then
        factors = normed.weighed(rest.gate, rest.weight, rest.head, one, th.tid)
        own = normed.rows_in_registers(F32)
        squares = cute.make_rmem_tensor((normed.norm_rows,), F32)
        norm = Norm(rows, factors, output, rest.eps, own, squares, None, None, rest.head)
        normed.meet(norm, rest.head, th.tid)
        normed.write_outputs(norm, one, rest.head, th.tid)


def compile(facts: dict, knobs: dict, options: str, prefix: str):
    """The compiled function of one setting, for the architecture that CUTE_DSL_ARCH names; profilers show `prefix`."""
    ring = RingNorm(facts, knobs)
    tensors = decode.fakes(facts)
    gate, weight, _ = layer.fakes({**facts, "conv": "none"}, tensors)
    given = [*ring_call.arguments(facts, tensors), gate, weight, F32(1.0)]
    return decode.made(ring, ring.gated_delta_rule_ring_norm, given, options, prefix)
