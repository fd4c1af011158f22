"""The public functions of a layer's step: convolution, gated delta rule and gated norm in one
launch, either end where it is given.
"""

from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.runtime import layer_call, operators, traced
from gdntune.runtime.arguments import explain
from gdntune.runtime.norm_arguments import NORM_GATES, check_epsilon, check_kind, together

# torch.compile sees operators, which are defined when their module is imported.
assert operators
_compiling = torch.compiler.is_dynamo_compiling
_INSIDE = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
ACTIVATIONS = ("silu", "identity")
CONV_INPUTS = ("packed", "interleaved")


def gated_delta_rule_layer_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    *,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    norm_gate: str = "silu",
    norm_eps: float = 1e-6,
    conv_state: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_position: Tensor | None = None,
    conv_activation: str = "silu",
    conv_input: str = "packed",
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
    dependent_launch: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """A Gated DeltaNet layer's decode in one launch: convolution, gates, delta rule and gated
    RMSNorm, the first and the last where their arguments are given. Returns the output
    [B, T, HV, V], or in the form of mixed_qkv's rows.

    mixed_qkv: [B, T, D], D = 2 H K + HV V: q, k and v side by side, rows at any stride, as in_proj
        or the convolution left them; [B, D] is one token, and with cu_seqlens [total, D].
    a, b: [B, T, HV]; A_log, dt_bias: [HV]: raw gates. a, b, output_gate and output have the leading
        dimensions that mixed_qkv has.
    output_gate: [B, T, HV, V] of mixed_qkv's dtype, z; norm_weight: [V]. The output is
        o rsqrt(mean(o^2) + norm_eps) norm_weight silu(z), or sigmoid(z) with norm_gate="sigmoid".
        It is computed in fp32 from the delta rule's fp32 outputs and rounded once, where the
        unfused path rounds o to mixed_qkv's dtype before the norm.
    conv_weight: [D, width], width 2 to 4, the newest token's tap last; conv_bias: [D]. Each channel
        is convolved over its last tokens in fp32, then conv_activation (`silu` or `identity`), then
        rounded to mixed_qkv's dtype, which weight, bias and windows have too, as the unfused path
        does. States are in a pool: initial_state_indices or ssm_state_indices are given, without
        output_state_indices.
    conv_state: [slots, rows, D], updated in place; the caller owns it. A request's window is in the
        slot of its state, with ssm_state_indices in that of column 0.
    conv_position: [B] int32: windows are rings of width - 1 + T rows or more (ragged: max_tokens);
        the first token goes to this row, the next to those behind, and the rows before it,
        cyclically, hold the tokens before: a caller's count of accepted tokens modulo rows, so that
        drafts that were rejected are written over. Without it a window is width - 1 rows, the
        oldest first, shifted in place as engines do. With ssm_state_indices it is width - 2 + T
        rows or more, as vLLM has them: it begins behind num_accepted_tokens - 1 of them, moves on
        by one row, and the drafts' rows stand behind it. On CUDA for HV of at most 8 H (KDA: H),
        since one block or cluster has all readers of a q/k head's window, and for as many tokens as
        a block's shared memory holds: 8 where K and V are 128. A channel's rows may be side by
        side, as vLLM's dim-first pools have them: conv_state is [slots, D, rows].transpose(1, 2)
        then.
    conv_input: "interleaved" takes rows as Qwen3-Next's projections leave them, q/k heads side by
        side, without a copy: mixed_qkv is in_proj_qkvz's [B, T, 2 H K + 2 HV V], of each q/k
        head [q | k | v | z] of its HV/H value heads, z being the output's gate (output_gate is
        None then; norm_weight alone asks for the norm). b and a are views [B, T, H, HV/H] of
        in_proj_ba's rows, of each q/k head [b | a]. conv_weight, conv_bias and conv_state stay
        [q | k | v].
    norm_gate, conv_activation, conv_input, the weights' dtypes, width, and whether bias and
        position are given are static, beside what is static elsewhere.

    dependent_launch: as of `gated_delta_rule_decode`, but that the weights, A_log and dt_bias may
        be read before the kernel ahead ends.

    The other arguments, what is static, ownership and errors are as in `gated_delta_rule_decode`.
    torch.compile takes it whole. Not served, and refused by name: other transforms.
    """
    return _call(locals(), "gdn_decode", "raw", b, None, a, 0.0, "mixed_qkv a b A_log dt_bias")


def kda_layer_decode(
    mixed_qkv: Tensor,
    g: Tensor,
    *,
    initial_state: Tensor,
    output_gate: Tensor | None = None,
    norm_weight: Tensor | None = None,
    beta: Tensor | None = None,
    b: Tensor | None = None,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    norm_gate: str = "sigmoid",
    norm_eps: float = 1e-6,
    conv_state: Tensor | None = None,
    conv_weight: Tensor | None = None,
    conv_bias: Tensor | None = None,
    conv_position: Tensor | None = None,
    conv_activation: str = "silu",
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
    dependent_launch: bool = False,
    output: Tensor | None = None,
) -> Tensor:
    """A Kimi Delta Attention layer's decode in one launch: as `gated_delta_rule_layer_decode`, with
    the gates of `kda_decode`.

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
    if (b is None) == (beta is None):
        raise UnsupportedProblem("beta: expected b (a logit) or beta (a value), one of the two")
    layer = _layer_of(called)
    slots = called["ssm_state_indices"]
    read, write = called["initial_state_indices"], called["output_state_indices"]
    given = (
        called["mixed_qkv"], a, beta if b is None else b, called["initial_state"],
        called["A_log"], called["dt_bias"], read, read if write is None else write, slots,
        called["num_accepted_tokens"], called["cu_seqlens"], called["output"],
        called["output_gate"], called["norm_weight"], called["conv_state"],
        called["conv_weight"], called["conv_bias"], called["conv_position"],
    )  # fmt: skip
    settings = (
        op, gate, b is not None, False, called["state_layout"], False, called["batch_invariant"],
        called["dependent_launch"], called["max_tokens"], called["scale"], called["softplus_beta"],
        called["softplus_threshold"], lower_bound, called["allow_neg_eigval"],
        called["null_index"], called["use_qk_l2norm"],
    )  # fmt: skip
    try:
        if _compiling():
            return traced.record_layer(given, settings, layer)
        return layer_call.run(given, settings, layer)
    except _INSIDE as e:
        explain(e, called, needed=f"{needed} initial_state")
        raise


def _layer_of(called: dict[str, Any]) -> tuple[str, Any, str, str]:
    """Of what was given: the norm's kind and epsilon, the convolution's kind, how its rows lie."""
    rows = called.get("conv_input", "packed")
    check_kind("conv_input", rows, CONV_INPUTS)
    if rows == "packed":
        norm = together(called, "output_gate", "norm_weight")
    else:
        norm = called["norm_weight"] is not None
    conv = together(called, "conv_state", "conv_weight")
    if not norm and not conv:
        raise UnsupportedProblem(
            "neither output_gate and norm_weight nor conv_state and conv_weight are given: expected"
            " one of the two pairs; without either call gdntune.gated_delta_rule_decode or"
            " kda_decode"
        )
    for name, kinds in (("norm_gate", NORM_GATES), ("conv_activation", ACTIVATIONS)):
        check_kind(name, called[name], kinds)
    epsilon = called["norm_eps"]
    check_epsilon(epsilon)
    if conv and called["output_state_indices"] is not None:
        raise UnsupportedProblem(
            "output_state_indices with a convolution: its window stays in the slot that is read;"
            " expected initial_state_indices alone"
        )
    for name in ("conv_bias", "conv_position"):
        if not conv and called[name] is not None:
            raise UnsupportedProblem(
                f"{name} without conv_state and conv_weight: expected them with it"
            )
    if rows != "packed" and not conv:
        raise UnsupportedProblem(
            f"conv_input={rows!r} without conv_state and conv_weight: expected them with it"
        )
    return (
        called["norm_gate"] if norm else "none",
        epsilon,
        called["conv_activation"] if conv else "none",
        rows,
    )
