"""Drop-ins with the signatures of flash-linear-attention 0.6: what calls its fused recurrent
functions can call these. What ours does not serve raises UnsupportedProblem.

    from gdntune.engines.fla import fused_recurrent_gated_delta_rule, fused_recurrent_kda

States are [N, HV, K, V], or [N, HV, V, K] with state_v_first, fp32; they are copied, as there.
"""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.problem import MAX_TOKENS
from gdntune.runtime import ops


def fused_recurrent_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None = None,
    gk: Tensor | None = None,
    gv: Tensor | None = None,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """GDN over q, k [B, T, H, K], v [B, T, HV, V], log decay g and beta [B, T, HV]; returns the
    output [B, T, HV, V] and the final state, where it is asked for. Any T: 16 tokens a call. With
    cu_seqlens [N+1] rows are packed [1, total, ...], and it is read on the host.
    """
    state_v_first = _renamed(state_v_first, kwargs)
    _refuse(gk=gk, gv=gv, **kwargs)
    g = v.new_zeros(v.shape[:3], dtype=torch.float32) if g is None else g
    gate: dict[str, Tensor] = {"a" if use_gate_in_kernel else "g": g}
    if use_gate_in_kernel:
        if A_log is None:
            raise UnsupportedProblem("use_gate_in_kernel=True without A_log: give A_log [HV]")
        gate |= {"A_log": A_log, "dt_bias": _or_zeros(dt_bias, A_log, v.shape[2])}
    return _run(
        ops.gated_delta_rule_decode, q, k, v, gate, _beta(beta, v), use_beta_sigmoid_in_kernel,
        initial_state, output_final_state, state_v_first, cu_seqlens,
        {
            "scale": scale, "use_qk_l2norm": use_qk_l2norm_in_kernel,
            "allow_neg_eigval": _doubled(allow_neg_eigval, use_beta_sigmoid_in_kernel),
        },
    )  # fmt: skip


fused_recurrent_gdn = fused_recurrent_gated_delta_rule


def fused_recurrent_kda(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    lower_bound: float | None = None,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """KDA: as `fused_recurrent_gated_delta_rule`, with g [B, T, HV, K], A_log [HV] and dt_bias
    [HV K].
    """
    state_v_first = _renamed(state_v_first, kwargs)
    _refuse(**kwargs)
    gate: dict[str, Any] = {"g": g}
    if use_gate_in_kernel:
        HV, K = v.shape[2], q.shape[3]
        if A_log is None:
            if lower_bound is None:
                raise UnsupportedProblem("use_gate_in_kernel=True without A_log: give A_log [HV]")
            # the gate is lower_bound sigmoid(g + bias)
            A_log = g.new_zeros(HV, dtype=torch.float32)
        bias = _or_zeros(dt_bias, A_log, HV * K)
        gate |= {"A_log": A_log, "dt_bias": bias.reshape(-1), "lower_bound": lower_bound}
    return _run(
        ops.kda_decode, q, k, v, gate, _beta(beta, v), use_beta_sigmoid_in_kernel, initial_state,
        output_final_state, state_v_first, cu_seqlens,
        {
            "scale": scale, "use_qk_l2norm": use_qk_l2norm_in_kernel,
            "allow_neg_eigval": _doubled(allow_neg_eigval, use_beta_sigmoid_in_kernel),
        },
    )  # fmt: skip


def _renamed(state_v_first: bool, kwargs: dict[str, Any]) -> bool:
    """The layout by its name of today, or by the older one, which fla 0.6 warns of."""
    if "transpose_state_layout" not in kwargs:
        return state_v_first
    if state_v_first:
        raise UnsupportedProblem(
            "state_v_first and transpose_state_layout: expected one of them, the first"
        )
    text = "transpose_state_layout is now called state_v_first"
    warnings.warn(text, DeprecationWarning, stacklevel=3)
    return bool(kwargs.pop("transpose_state_layout"))


def _refuse(**given: Any) -> None:
    if named := [name for name, x in given.items() if x is not None]:
        raise UnsupportedProblem(f"{', '.join(named)}: expected none, no kernel here takes it")


def _or_zeros(x: Tensor | None, like: Tensor, size: int) -> Tensor:
    return like.new_zeros(size) if x is None else x


def _beta(beta: Tensor | None, v: Tensor) -> Tensor:
    if beta is None:
        return v.new_ones(v.shape[:3])
    if beta.dim() == v.dim():
        raise UnsupportedProblem(
            f"beta has shape {tuple(beta.shape)}: expected one a head, {tuple(v.shape[:3])}"
        )
    return beta


def _doubled(allow_neg_eigval: bool, sigmoid: bool) -> bool:
    if allow_neg_eigval and not sigmoid:
        raise UnsupportedProblem(
            "allow_neg_eigval=True without use_beta_sigmoid_in_kernel=True: give both, or beta"
            " doubled"
        )
    return allow_neg_eigval


def _run(
    decode: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, gate: dict[str, Any],
    beta: Tensor, logit: bool, initial_state: Tensor | None, keep: bool, v_first: bool,
    cu_seqlens: Tensor | None, settings: dict[str, Any],
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Decodes in windows of at most MAX_TOKENS, since a kernel's tokens are few."""
    HV, K, V = v.shape[2], q.shape[3], v.shape[3]
    bounds = None if cu_seqlens is None else cu_seqlens.tolist()
    if bounds is not None and q.shape[0] != 1:
        raise UnsupportedProblem(
            f"q has shape {tuple(q.shape)} with cu_seqlens: expected packed rows [1, total, H, K]"
        )
    N = q.shape[0] if bounds is None else len(bounds) - 1
    tile = (V, K) if v_first else (K, V)
    if initial_state is None:
        state = q.new_zeros((N, HV, *tile), dtype=torch.float32)
    else:
        if initial_state.shape[0] != N:
            raise UnsupportedProblem(
                f"initial_state has {initial_state.shape[0]} states for {N} sequences: expected one"
                " a sequence"
            )
        state = initial_state.detach().to(torch.float32, copy=True)
    settings |= {"state_layout": "k_last" if v_first else "v_last"}
    # one dtype for a kernel: where they differ the widest of the three, as there in registers
    wide = torch.promote_types(torch.promote_types(q.dtype, k.dtype), v.dtype)
    output = torch.empty(v.shape, dtype=wide, device=v.device)
    rows = {"q": q.to(wide), "k": k.to(wide), "v": v.to(wide), "b" if logit else "beta": beta}
    rows |= {name: gate.pop(name) for name in ("a", "g") if name in gate}
    # no gradient, as there: backward() raises
    with torch.no_grad():
        for n, start, end in _windows(q.shape[1], bounds):
            part = {name: x[:, start:end] for name, x in rows.items()}
            of = state if n is None else state[n : n + 1]
            decode(**part, **gate, **settings, initial_state=of, output=output[:, start:end])
    return output.to(v.dtype), state if keep else None


def _windows(tokens: int, bounds: list[int] | None) -> list[tuple[int | None, int, int]]:
    """Which sequence, from which row to which: None is all sequences at once."""
    spans: list[tuple[int | None, int, int]] = [(None, 0, tokens)]
    if bounds is not None:
        spans = [(n, bounds[n], bounds[n + 1]) for n in range(len(bounds) - 1)]
    return [
        (n, i, min(i + MAX_TOKENS, end))
        for n, start, end in spans
        for i in range(start, end, MAX_TOKENS)
    ]
