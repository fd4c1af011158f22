"""The public functions of a layer's step: gated delta rule and the gated norm behind it in one
launch.
"""

from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem, listed, shown
from gdntune.runtime import layer_call
from gdntune.runtime.arguments import explain

_compiling = torch.compiler.is_dynamo_compiling
_INSIDE = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
NORM_GATES = ("silu", "sigmoid")


def gated_delta_rule_layer_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    norm_gate: str = "silu",
    norm_eps: float = 1e-6,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    state_layout: str = "k_last",
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    null_index: int = -1,
    batch_invariant: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """A Gated DeltaNet layer's decode behind its convolution, in one launch: gates, delta rule and
    the gated RMSNorm. Returns the output [B, T, HV, V], or in the form of mixed_qkv's rows.

    mixed_qkv: [B, T, 2 H K + HV V], q, k and v side by side, rows at any stride, as the convolution
        left them; [B, 2 H K + HV V] is one token, and with cu_seqlens [total, 2 H K + HV V].
    a, b: [B, T, HV]; A_log, dt_bias: [HV]: raw gates. a, b, output_gate and output have the leading
        dimensions that mixed_qkv has.
    output_gate: [B, T, HV, V] of mixed_qkv's dtype, z; norm_weight: [V]. The output is
        o rsqrt(mean(o^2) + norm_eps) norm_weight silu(z), or sigmoid(z) with norm_gate="sigmoid".
        It is computed in fp32 from the delta rule's fp32 outputs and rounded once, where the
        unfused path rounds o to mixed_qkv's dtype before the norm.
    norm_gate: `silu` or `sigmoid`: static, as are the weight's dtype and what is static elsewhere.

    The other arguments, what is static, ownership and errors are as in `gated_delta_rule_decode`.
    Not served, and refused by name: torch.compile and other transforms, more than 65,535 requests,
    a convolution.
    """
    return _call(locals(), "gdn_decode", "raw", b, None, a, 0.0, "mixed_qkv a b A_log dt_bias")


def kda_layer_decode(
    mixed_qkv: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor,
    output_gate: Tensor,
    norm_weight: Tensor,
    beta: Tensor | None = None,
    b: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    norm_gate: str = "sigmoid",
    norm_eps: float = 1e-6,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    num_accepted_tokens: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    max_tokens: int | None = None,
    state_layout: str = "k_last",
    scale: float | None = None,
    use_qk_l2norm: bool = True,
    allow_neg_eigval: bool = False,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    null_index: int = -1,
    batch_invariant: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """A Kimi Delta Attention layer's decode behind its convolutions, in one launch: as
    `gated_delta_rule_layer_decode`, with the gates of `kda_decode`.

    g: [B, T, HV, K]; beta: [B, T, HV], or its logit b; A_log, dt_bias, lower_bound: as in
        `kda_decode`, but dt_bias is [HV, K] or [H, K].
    norm_gate: by default `sigmoid`, as Kimi Linear has it.

    The other arguments, what is static, ownership and errors are as in
    `gated_delta_rule_layer_decode`.
    """
    if (A_log is None) != (dt_bias is None) or (A_log is None and lower_bound is not None):
        raise UnsupportedProblem(
            "A_log and dt_bias: expected both (softplus or lower_bound gate) or neither (g is the"
            " log decay, without lower_bound)"
        )
    kind = "log" if A_log is None else "softplus" if lower_bound is None else "lower_bound"
    return _call(locals(), "kda_decode", kind, b, beta, g, lower_bound or 0.0, "mixed_qkv g")


def _call(
    called: dict[str, Any], op: str, gate: str, b: Any, beta: Any, a: Any, lower_bound: float,
    needed: str,
) -> Tensor:  # fmt: skip
    """Either function's call. called: its arguments by name."""
    if _compiling():
        raise UnsupportedProblem(
            f"a layer's {op} under torch.compile: it has no operator yet; call it under"
            " torch.compiler.disable, or call the delta rule and the norm apart"
        )
    if (b is None) == (beta is None):
        raise UnsupportedProblem("beta: expected b (a logit) or beta (a value), one of the two")
    _check_norm(called["norm_gate"], called["norm_eps"])
    slots = called["ssm_state_indices"]
    read, write = called["initial_state_indices"], called["output_state_indices"]
    given = (
        called["mixed_qkv"], a, beta if b is None else b, called["initial_state"],
        called["A_log"], called["dt_bias"], read, read if write is None else write, slots,
        called["num_accepted_tokens"], called["cu_seqlens"], called["output"],
        called["output_gate"], called["norm_weight"],
    )  # fmt: skip
    settings = (
        op, gate, b is not None, False, called["state_layout"], False, called["batch_invariant"],
        called["max_tokens"], called["scale"], called["softplus_beta"],
        called["softplus_threshold"], lower_bound, called["allow_neg_eigval"],
        called["null_index"], called["use_qk_l2norm"],
    )  # fmt: skip
    try:
        if called["output_gate"] is None or called["norm_weight"] is None:
            # `explain` says which
            raise TypeError
        return layer_call.run(given, settings, (called["norm_gate"], called["norm_eps"]))
    except _INSIDE as e:
        explain(e, called, needed=f"{needed} initial_state output_gate norm_weight")
        raise


def _check_norm(gate: Any, epsilon: Any) -> None:
    if not isinstance(gate, str) or gate not in NORM_GATES:
        raise UnsupportedProblem(
            f"{shown('norm_gate', gate)}: expected one of {listed(NORM_GATES)}"
        )
    if isinstance(epsilon, Tensor) or not 0 <= float(epsilon) < 1e30:
        raise UnsupportedProblem(f"{shown('norm_eps', epsilon)}: expected a finite number from 0")
