"""The public functions, on torch tensors: what an engine calls.

Everything that decides the compiled object is read off the tensors (dtypes, T, K, V, layout, which
optional tensors are there); B, H, HV, the pool's size, strides, scale and thresholds are run-time
values of one compiled object. Nothing is copied and nothing synchronises.
"""

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.runtime import operators, packed, traced
from gdntune.runtime.arguments import explain
from gdntune.runtime.call import run

# torch.compile sees operators, which are defined when their module is imported.
assert operators
_compiling = torch.compiler.is_dynamo_compiling
# What wrong arguments raise where they are used: they are looked at when that has happened, which
# costs right calls nothing.
_INSIDE = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    initial_state: Tensor,
    A_log: Tensor | None = None,
    a: Tensor | None = None,
    dt_bias: Tensor | None = None,
    b: Tensor | None = None,
    g: Tensor | None = None,
    beta: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    disable_state_update: bool = False,
    state_layout: str = "k_last",
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    null_index: int = -1,
    batch_invariant: bool = False,
    dependent_launch: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """Gated DeltaNet decode of T tokens for each of B requests: updates the state in place and
    returns the output [B, T, HV, V].

    A compiled object is chosen by what is static: every dtype, T (1; 2 to 8; 9 to 16), K, V,
    state_layout, disable_state_update, and which optional tensors are given. All else may change
    from call to call: B, H, HV, sizes and strides, scale, softplus_beta, softplus_threshold,
    null_index, use_qk_l2norm, allow_neg_eigval.

    q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H; bf16, fp16 or fp32. Views of packed
        QKV are fine.
    initial_state: [slots, HV, V, K] (`k_last`) or [slots, HV, K, V] (`v_last`) in fp32, bf16 or
        fp16, slots at any stride. The caller owns it; it is updated in place. Without indices there
        are B slots, and row n belongs to request n.
    A_log, dt_bias: [HV]; a, b: [B, T, HV]: raw gates, with decay = exp(-exp(A_log) softplus(a +
        dt_bias)) and beta = sigmoid(b). The result is a number as long as a + dt_bias is an fp32
        number and, on CUDA, A_log is at most 88, beyond which exp leaves fp32.
    g: [B, T, HV], the log decay, instead of A_log, a and dt_bias.
    beta: [B, T, HV], instead of its logit b.
    initial_state_indices, output_state_indices: [B], int32 or int64: the slot to read, and the slot
        to write (by default the one read). A negative index, one equal to null_index and one
        outside the pool are padding: no slot is read or written, and the output row is zero. As a
        write index alone, it skips the write.
    intermediate_states_buffer: [rows, steps, HV, V, K] (v_last: [..., K, V]): receives the state
        after each token, at row n, or at row intermediate_state_indices[n]. Whether the final state
        is written too depends on disable_state_update alone.
    ssm_state_indices: [B, 1+S]: the state after token t goes to slot [n, t]. The state to start
        from is in column clamp(num_accepted_tokens[n], 1, 1+S) - 1, without num_accepted_tokens in
        column 0. Nothing else is written, unless output_state_indices is given.
    cu_seqlens: [B+1], for ragged batches: q, k, v, gates and output are packed rows [1, total, ...]
        of requests with 0 to max_tokens tokens (at most 16, the default). Rows beyond
        cu_seqlens[-1] are left alone. A longer request is cut where the compiled object ends
        (max_tokens on the CPU, 8 or 16 on CUDA), so that nothing outside the tensors is touched.
    scale: of q, by default K**-0.5; finite, as every number here.
    use_qk_l2norm: q and k are normalised, x <- x rsqrt(sum x^2 + 1e-6).
    allow_neg_eigval: doubles beta.
    batch_invariant: one variant for all batch sizes, so that a token does not depend on the batch
        it is decoded in. A variant gives the same bits at any B and any place in it; two variants
        need not, even where they sum in the same order, since compilers fuse differently.
    dependent_launch: on CUDA the kernel may start before the one ahead of it in the stream ends
        (programmatic dependent launch), and waits for that one's end before it reads anything.
        Where a table chose `pdl=state` it reads indices and states before: the kernel ahead must
        then write neither, so it is no decode of the same pool. Kernels without the form ignore it,
        as does a table's choice that a sweep under `chain` made among such forms too.
    output: [B, T, HV, V] of q's dtype, to write to; None allocates a fresh tensor in each call.

    Decode has no gradient: where gradients are on, inputs and states that require one are refused.
    A_log and dt_bias may require one.
    Raises UnsupportedProblem (a ValueError) that names the argument, what was given and what is
    expected. Values on the device are not looked at, which would synchronise; GDNTUNE_CHECK=1 in
    the environment checks indices, counts and duplicates on the host.
    Formula: Gated Delta Networks (arXiv 2412.06464), eq. 10, in the recurrent form.
    """
    raw = g is None
    if raw and (A_log is None or a is None or dt_bias is None):
        raise UnsupportedProblem(
            "the gate: expected A_log, a and dt_bias together (raw), or g (log decay); give one of"
            " the two"
        )
    if not raw and not (A_log is None and a is None and dt_bias is None):
        raise UnsupportedProblem(
            "g and A_log/a/dt_bias are both given: expected one of the two forms of the gate"
        )
    if (b is None) == (beta is None):
        raise UnsupportedProblem("beta: expected b (a logit) or beta (a value), one of the two")
    if ssm_state_indices is None:
        slot_index = intermediate_state_indices
    else:
        slot_index = ssm_state_indices
        if intermediate_state_indices is not None:
            raise _two_slot_indices()
    try:
        tensors = (
            initial_state, q, k, v, a if raw else g, beta if b is None else b, A_log, dt_bias,
            initial_state_indices,
            initial_state_indices
            if output_state_indices is None and not disable_state_update
            else output_state_indices,
            slot_index, num_accepted_tokens, cu_seqlens, intermediate_states_buffer, output,
        )  # fmt: skip
        settings = (
            "gdn_decode", "raw" if raw else "log", b is not None,
            intermediate_state_indices is not None, state_layout, disable_state_update,
            batch_invariant, dependent_launch, max_tokens, scale, softplus_beta,
            softplus_threshold, 0.0, allow_neg_eigval, null_index, use_qk_l2norm,
        )  # fmt: skip
        return traced.record(tensors, settings) if _compiling() else run(tensors, settings)
    except _INSIDE as e:
        explain(e, locals(), needed="q k v initial_state")
        raise


def _two_slot_indices() -> UnsupportedProblem:
    return UnsupportedProblem(
        "intermediate_state_indices with ssm_state_indices: expected one of them; ssm_state_indices"
        " names every slot"
    )


def gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    state_layout: str = "k_last",
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    null_index: int = 0,
    batch_invariant: bool = False,
    dependent_launch: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """Gated DeltaNet decode of one token for each of B requests, with q, k and v side by side in
    one tensor: the call that vLLM and SGLang make for plain decode. Returns the output
    [B, 1, HV, V].

    mixed_qkv: [B, 2 H K + HV V], rows at any stride.
    a, b: [B, HV]; A_log, dt_bias: [HV]: raw gates.
    initial_state: a pool [slots, HV, V, K] (v_last: [slots, HV, K, V]), updated in place.
    initial_state_indices: [B]: the slot to read and write. Slot 0 is padding unless null_index says
        otherwise, and so is every negative index.

    The other arguments, what is static, ownership and errors are as in `gated_delta_rule_decode`.
    """
    try:
        if A_log is None or dt_bias is None or initial_state_indices is None:
            # `explain` says which
            raise TypeError
        given = (mixed_qkv, a, b, initial_state, A_log, dt_bias, initial_state_indices, output)
        settings = (
            state_layout, scale, use_qk_l2norm, allow_neg_eigval, softplus_beta,
            softplus_threshold, null_index, batch_invariant, dependent_launch,
        )  # fmt: skip
        return (
            traced.record_packed(given, settings) if _compiling() else packed.run(given, settings)
        )
    except _INSIDE as e:
        explain(
            e, locals(), needed="mixed_qkv a b A_log dt_bias initial_state initial_state_indices"
        )
        raise


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor,
    beta: Tensor | None = None,
    b: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    disable_state_update: bool = False,
    state_layout: str = "k_last",
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    null_index: int = -1,
    batch_invariant: bool = False,
    dependent_launch: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """Kimi Delta Attention decode: as `gated_delta_rule_decode`, with one decay for each key
    dimension. Returns the output [B, T, HV, V].

    g: [B, T, HV, K]. Without A_log it is the log decay. With A_log and dt_bias the log decay is
        -exp(A_log) softplus(g + dt_bias), and with lower_bound too it is
        lower_bound * sigmoid(exp(A_log) (g + dt_bias)). The result is a number as long as
        g + dt_bias is an fp32 number, also where exp(A_log) leaves fp32.
    A_log: [HV], one a value head, or [H], one a q/k head.
    dt_bias: [HV, K] or [H, K]; flat [HV*K] and [H*K] are viewed so.
    lower_bound: that it is given is static, its value is not.
    beta: [B, T, HV], or its logit b.

    The other arguments, what is static, ownership and errors are as in `gated_delta_rule_decode`.
    Formula: Kimi Linear (arXiv 2510.26692), eq. 1, in the recurrent form.
    """
    if (A_log is None) != (dt_bias is None):
        raise UnsupportedProblem(
            "A_log and dt_bias: expected both (softplus or lower_bound gate) or neither (g is the"
            " log decay)"
        )
    if A_log is None and lower_bound is not None:
        raise UnsupportedProblem(
            "lower_bound without A_log and dt_bias: expected lower_bound with both"
        )
    if (b is None) == (beta is None):
        raise UnsupportedProblem("beta: expected b (a logit) or beta (a value), one of the two")
    if ssm_state_indices is None:
        slot_index = intermediate_state_indices
    else:
        slot_index = ssm_state_indices
        if intermediate_state_indices is not None:
            raise _two_slot_indices()
    try:
        if dt_bias is not None and dt_bias.dim() == 1:
            dt_bias = _by_head(dt_bias, q.shape[-1])
        tensors = (
            initial_state, q, k, v, g, beta if b is None else b, A_log, dt_bias,
            initial_state_indices,
            initial_state_indices
            if output_state_indices is None and not disable_state_update
            else output_state_indices,
            slot_index, num_accepted_tokens, cu_seqlens, intermediate_states_buffer, output,
        )  # fmt: skip
        settings = (
            "kda_decode",
            "log" if A_log is None else "softplus" if lower_bound is None else "lower_bound",
            b is not None, intermediate_state_indices is not None, state_layout,
            disable_state_update, batch_invariant, dependent_launch, max_tokens, scale,
            softplus_beta, softplus_threshold, 0.0 if lower_bound is None else lower_bound,
            allow_neg_eigval, null_index, use_qk_l2norm,
        )  # fmt: skip
        return traced.record(tensors, settings) if _compiling() else run(tensors, settings)
    except _INSIDE as e:
        explain(e, locals(), needed="q k v g initial_state")
        raise


def _by_head(dt_bias: Tensor, K: int) -> Tensor:
    """A flat dt_bias as one row a head."""
    if K < 1 or dt_bias.shape[0] % K:
        raise UnsupportedProblem(
            f"dt_bias has shape {tuple(dt_bias.shape)}: expected [HV, K], [H, K] and these flat,"
            f" K={K}"
        )
    return dt_bias.unflatten(0, (-1, K))
