"""The public functions, on torch tensors: what an engine calls.

Everything that decides the compiled object is read off the tensors (dtypes, T, K, V, layout, which
optional tensors are there); B, H, HV, the pool's size, strides, scale and thresholds are run-time
values of one compiled object. Nothing is copied and nothing synchronises.
"""

import os
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from gdntune.device import arch
from gdntune.errors import ToolMissing, UnsupportedProblem, listed, shown
from gdntune.problem import MAX_TOKENS, Contract, Op, Problem, check_contract, problem_fault
from gdntune.runtime.arguments import (
    check_numbers,
    check_static,
    check_values,
    check_width,
    explain,
    rank_fault,
    refusal,
    tensor_fault,
)
from gdntune.runtime.dispatch import Bound, Runtime, runtime

# CUDA's limit of a grid's third dimension; the same on the CPU, so that a program that runs there
# runs on a GPU.
MAX_REQUESTS = 65535
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
# What wrong arguments raise where they are used: they are looked at when that has happened, which
# costs right calls nothing.
_INSIDE = (AttributeError, IndexError, RuntimeError, TypeError, ValueError)
_BOUND: dict[tuple[Any, ...], Bound] = {}


@lru_cache(maxsize=1)
def _checking() -> bool:
    return os.environ.get("GDNTUNE_CHECK", "") not in ("", "0")


def _index(x: Tensor | None, name: str) -> Tensor | None:
    """An index tensor as int32 without a copy: int64 by its low words, so values stay below 2^31."""
    if x is None:
        return None
    dtype = x.dtype
    if dtype is torch.int32:
        return x
    if dtype is torch.int64:
        return x.unsqueeze(-1).view(torch.int32)[..., 0]
    if not isinstance(x, Tensor):
        raise TypeError(name)  # `explain` says the rest
    raise UnsupportedProblem(
        f"{name} has dtype {x.dtype}: accepted are torch.int32 and torch.int64"
    )


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
    output: Tensor | None = None,
) -> Tensor:
    """Gated DeltaNet decode of T tokens for each of B requests; updates the state in place and
    returns the output [B, T, HV, V].

    Static, so part of a compiled object: every dtype, T (1; 2 to 8; 9 to 16), K, V, state_layout,
        which optional tensors are given,
    disable_state_update. Dynamic: B, H, HV, sizes and strides, scale, softplus_beta,
    softplus_threshold, null_index, use_qk_l2norm,
    allow_neg_eigval.

    q, k: [B, T, H, K]; v: [B, T, HV, V], HV a multiple of H; bf16 or fp16 (fp32 too); slices of one
        packed tensor will do.
    initial_state: [slots, HV, V, K] (`k_last`) or [slots, HV, K, V] (`v_last`), fp32, bf16 or fp16,
        any slot stride. The caller's; updated
        in place. Without indices slots is B and row n belongs to request n.
    A_log, dt_bias [HV], a [B, T, HV], b [B, T, HV]: raw gates, decay = exp(-exp(A_log) softplus(a +
    dt_bias)), beta = sigmoid(b).
        No NaN arises as long as a + dt_bias is an fp32 number and, on CUDA, A_log is at most 88,
        beyond which exp leaves fp32.
        Or g [B, T, HV], the log decay, instead of A_log, a and dt_bias; beta [B, T, HV] instead of
        b.
    initial_state_indices, output_state_indices: [B] int32 or int64: the slot to read, and the slot
        to write (default: the one read).
        A negative index, one equal to null_index or one outside the pool is padding: no slot is
            read or written and the output row is
        zero; as a write index it skips the write alone.
    intermediate_states_buffer: [rows, steps, HV, V, K] (v_last: [..., K, V]): receives the state
        after each token, at row n or
        intermediate_state_indices[n]. Whether the final state is written too depends on
        disable_state_update alone.
    ssm_state_indices: [B, 1+S]: the state after token t goes to slot [n, t], and the state to start
        from is in column
        clamp(num_accepted_tokens[n], 1, 1+S) - 1 (0 without num_accepted_tokens). Nothing else is
        written unless
        output_state_indices is given.
    cu_seqlens: [B+1]: ragged batches; q, k, v, gates and output are packed rows [1, total, ...],
        lengths 0 to max_tokens (at most 16, the
        default); rows beyond cu_seqlens[-1] are untouched. A longer length is cut where the
        compiled object ends (max_tokens on the
        CPU, 8 or 16 on CUDA), so that nothing outside the tensors is touched.
    scale: of q, default K**-0.5; finite, as every number here. use_qk_l2norm: q, k <- x rsqrt(sum
        x^2 + 1e-6). allow_neg_eigval doubles
        beta.
    batch_invariant: one variant for all batch sizes, so that a token does not depend on the batch
        it is decoded in. A variant gives the
        same bits at any B and place in it; two variants need not, even where they sum in the same
        order: compilers fuse differently.
    output: [B, T, HV, V] of q's dtype to write to; None allocates a fresh tensor each call.

    Decode has no gradient: where gradients are on, inputs and states that require one are refused.
        A_log and dt_bias may require one.
    Raises UnsupportedProblem (a ValueError) naming the argument, what was given and what is
    accepted. Values on the device are not checked
    (that would synchronise); GDNTUNE_CHECK=1 in the environment checks indices, counts and
    duplicates on the host.
    Formula: Gated Delta Networks (arXiv 2412.06464), eq. 10, in the recurrent form.
    """
    raw = g is None
    if raw and (A_log is None or a is None or dt_bias is None):
        raise UnsupportedProblem(
            "the gate: accepted are A_log, a and dt_bias together (raw), or g (log decay); give one"
            " of the two"
        )
    if not raw and not (A_log is None and a is None and dt_bias is None):
        raise UnsupportedProblem(
            "g and A_log/a/dt_bias are both given: accepted is one of the two forms of the gate"
        )
    try:
        return _decode(
            "gdn_decode", "raw" if raw else "log", q, k, v, a if raw else g, b, beta, A_log, dt_bias, initial_state,
            initial_state_indices, output_state_indices, intermediate_states_buffer, intermediate_state_indices, ssm_state_indices,
            num_accepted_tokens, cu_seqlens, max_tokens, disable_state_update, state_layout, scale, use_qk_l2norm, allow_neg_eigval,
            softplus_beta, softplus_threshold, 0.0, null_index, batch_invariant, output,
        )  # fmt: skip
    except _INSIDE as e:
        explain(e, locals(), needed="q k v initial_state")
        raise


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
    output: Tensor | None = None,
) -> Tensor:
    """One token for each of B requests, q, k and v side by side in one tensor: the call that vLLM
    and SGLang make for plain decode.

    mixed_qkv: [B, 2 H K + HV V], rows at any stride; a, b: [B, HV]; A_log, dt_bias: [HV];
        initial_state: a pool [slots, HV, V, K]
    (v_last: [slots, HV, K, V]), updated in place at initial_state_indices [B]. Slot 0 is padding
    unless null_index says otherwise, and so
    is every negative index. Returns [B, 1, HV, V]. The rest, static and dynamic arguments and
    errors are as in `gated_delta_rule_decode`.
    """
    try:
        if A_log is None or dt_bias is None or initial_state_indices is None:
            raise TypeError  # `explain` says which
        if mixed_qkv.dim() != 2 or b.dim() != 2 or a.dim() != 2 or initial_state.dim() != 4:
            raise UnsupportedProblem(
                f"mixed_qkv has shape {tuple(mixed_qkv.shape)}, a {tuple(a.shape)}, b"
                f" {tuple(b.shape)}, initial_state {tuple(initial_state.shape)}: accepted are [B,"
                " 2*H*K + HV*V], [B, HV], [B, HV] and [slots, HV, V, K]"
            )
        width = mixed_qkv.shape[1]
        HV = b.shape[1]
        V, K = (
            initial_state.shape[2:]
            if state_layout == "k_last"
            else (initial_state.shape[3], initial_state.shape[2])
        )
        keys = width - HV * V
        if K < 1 or keys <= 0 or keys % (2 * K):
            raise UnsupportedProblem(
                f"mixed_qkv has {width} columns with HV={HV}, K={K}, V={V}: accepted are 2*H*K +"
                " HV*V, with H a divisor of HV"
            )
        keys //= 2
        q = mixed_qkv[:, :keys].unflatten(-1, (-1, K)).unsqueeze(1)
        k = mixed_qkv[:, keys : 2 * keys].unflatten(-1, (-1, K)).unsqueeze(1)
        v = mixed_qkv[:, 2 * keys :].unflatten(-1, (HV, V)).unsqueeze(1)
        return _decode(
            "gdn_decode", "raw", q, k, v, a.unsqueeze(1), b.unsqueeze(1), None, A_log, dt_bias, initial_state, initial_state_indices,
            None, None, None, None, None, None, None, False, state_layout, scale, use_qk_l2norm, allow_neg_eigval, softplus_beta,
            softplus_threshold, 0.0, null_index, batch_invariant, output,
        )  # fmt: skip
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
    output: Tensor | None = None,
) -> Tensor:
    """Kimi Delta Attention decode: as `gated_delta_rule_decode`, with one decay for each key
    dimension; returns [B, T, HV, V].

    g: [B, T, HV, K]. Without A_log it is the log decay; with A_log and dt_bias the gate is
        -exp(A_log) softplus(g + dt_bias), and with
    lower_bound (static: its presence; dynamic: its value) lower_bound * sigmoid(exp(A_log) (g +
    dt_bias)).
    No NaN arises, also where exp(A_log) leaves fp32, as long as g + dt_bias is an fp32 number.
    A_log: one a value head [HV] or one a q/k head [H]. dt_bias: one a value head and k, [HV, K], or
        one a q/k head and k, [H, K]; flat
    [HV*K] and [H*K] are viewed so.
    beta: [B, T, HV], or its logit b. Every other argument, what is static, ownership and errors are
        as in `gated_delta_rule_decode`.
    Formula: Kimi Linear (arXiv 2510.26692), eq. 1, in the recurrent form.
    """
    if (A_log is None) != (dt_bias is None):
        raise UnsupportedProblem(
            "A_log and dt_bias: accepted are both (softplus or lower_bound gate) or neither (g is"
            " the log decay)"
        )
    if A_log is None and lower_bound is not None:
        raise UnsupportedProblem(
            "lower_bound without A_log and dt_bias: accepted is lower_bound with both"
        )
    gate = "log" if A_log is None else "softplus" if lower_bound is None else "lower_bound"
    try:
        if dt_bias is not None and dt_bias.dim() == 1:
            K = q.shape[-1]
            if K < 1 or dt_bias.shape[0] % K:
                raise UnsupportedProblem(
                    f"dt_bias has shape {tuple(dt_bias.shape)}: accepted are [HV, K], [H, K] and"
                    f" these flat, K={K}"
                )
            dt_bias = dt_bias.unflatten(0, (-1, K))
        return _decode(
            "kda_decode", gate, q, k, v, g, b, beta, A_log, dt_bias, initial_state,
            initial_state_indices, output_state_indices, intermediate_states_buffer, intermediate_state_indices, ssm_state_indices,
            num_accepted_tokens, cu_seqlens, max_tokens, disable_state_update, state_layout, scale, use_qk_l2norm, allow_neg_eigval,
            softplus_beta, softplus_threshold, 0.0 if lower_bound is None else lower_bound, null_index, batch_invariant, output,
        )  # fmt: skip
    except _INSIDE as e:
        explain(e, locals(), needed="q k v g initial_state")
        raise


def _decode(
    op: Op, gate: str, q: Tensor, k: Tensor, v: Tensor, a: Any, b: Any, beta: Any, A_log: Any, dt_bias: Any, state: Tensor,
    read_index: Any, write_index: Any, buffer: Any, buffer_index: Any, slot_index: Any, accepted: Any, cu_seqlens: Any,
    max_tokens: int | None, frozen: bool, layout: str, scale: float | None, use_qk_l2norm: bool, neg_eigval: bool, softplus_beta: float,
    threshold: float, lower_bound: float, null_index: int, batch_invariant: bool, output: Any,
) -> Tensor:  # fmt: skip
    """One path for every decode: binds the contract on first sight of these dtypes and shapes, then
    calls the chosen function.
    """
    if (b is None) == (beta is None):
        raise UnsupportedProblem("beta: accepted is b (a logit) or beta (a value), one of the two")
    N, T, H, K = q.shape
    _, _, HV, V = v.shape
    B = (
        N
        if cu_seqlens is None
        else _ragged_requests(cu_seqlens, q, read_index, buffer_index, slot_index)
    )
    beta_or_logit = beta if b is None else b
    signature = (
        op, gate, b is None, q.dtype, k.dtype, v.dtype, state.dtype, a.dtype, beta_or_logit.dtype,
        None if A_log is None else A_log.dtype, None if dt_bias is None else dt_bias.dtype,
        T if cu_seqlens is None else 0, max_tokens, K, V, layout, frozen, read_index is None, write_index is None, buffer is None,
        buffer_index is None, slot_index is None, accepted is None, cu_seqlens is None, batch_invariant, q.device,
    )  # fmt: skip
    bound = _BOUND.get(signature)
    if bound is None:
        check_static(layout, batch_invariant, frozen, max_tokens)
        contract = _contract(
            op, gate, q, k, v, a, b, beta, A_log, dt_bias, state, read_index, write_index, buffer, buffer_index, slot_index, accepted,
            cu_seqlens, max_tokens, frozen, layout,
        )  # fmt: skip
        index = q.device.index or 0
        bound = _BOUND[signature] = runtime(q.device.type, index).bind(
            contract, batch_invariant=bool(batch_invariant)
        )
    if torch.is_grad_enabled() and (
        q.requires_grad or k.requires_grad or v.requires_grad or a.requires_grad or beta_or_logit.requires_grad or state.requires_grad
    ):  # fmt: skip
        gates = {"a" if gate == "raw" else "g": a, "beta" if b is None else "b": beta_or_logit}
        raise _no_gradient(q=q, k=k, v=v, initial_state=state, **gates)
    if output is None:
        output = v.new_empty(v.shape)
    elif output.dtype != q.dtype:
        raise UnsupportedProblem(f"output has dtype {output.dtype}: accepted is q's, {q.dtype}")
    work_units = B * HV
    if work_units < 1:
        return output
    if B > MAX_REQUESTS:
        raise UnsupportedProblem(
            f"{B} requests: accepted are at most {MAX_REQUESTS} a call, a launch's grid has no more"
            " rows"
        )
    if H < 1 or HV % H:
        raise UnsupportedProblem(f"v has HV={HV} heads and q H={H}: HV must be a multiple of H")
    if A_log is not None:
        # a compiled call of KDA ties neither to the heads and would read beyond them
        heads = (HV,) if op == "gdn_decode" else (HV, H)
        A_shape, dt_shape = A_log.shape, dt_bias.shape
        if not (A_shape and A_shape[0] in heads and dt_shape and dt_shape[0] in heads):
            raise _parameter_fault(op, A_log, dt_bias, H, HV, K)
        A_log = A_log.detach() if A_log.requires_grad else A_log
        dt_bias = dt_bias.detach() if dt_bias.requires_grad else dt_bias
    if slot_index is not None:
        if slot_index.dim() != 2 or (cu_seqlens is None and slot_index.shape[1] < T):
            raise UnsupportedProblem(
                f"ssm_state_indices has shape {tuple(slot_index.shape)} for T={T}: accepted is [B,"
                " 1+S] with a column a token; a plain [B] goes to initial_state_indices"
            )
    else:
        if read_index is not None and write_index is None and not frozen:
            write_index = read_index
        elif read_index is None and state.shape[0] != B:
            raise UnsupportedProblem(
                f"initial_state has {state.shape[0]} rows for {B} requests: accepted is one a"
                " request, or a pool with initial_state_indices"
            )
    if buffer is not None:
        _check_buffer(buffer, buffer_index, B, T if cu_seqlens is None else bound.contract.tokens)
    read = _index(read_index, "initial_state_indices")
    if not bound.contract.writes_index:
        write = None
    else:
        write = read if write_index is read_index else _index(write_index, "output_state_indices")
    arguments = (
        state, q, k, v, a, beta_or_logit, A_log, dt_bias, read, write,
        _index(buffer_index, "intermediate_state_indices") if slot_index is None else _index(slot_index, "ssm_state_indices"),
        _index(accepted, "num_accepted_tokens"), _index(cu_seqlens, "cu_seqlens"), buffer, output,
        *_numbers(K, scale, softplus_beta, threshold, lower_bound, neg_eigval, null_index, use_qk_l2norm),
    )  # fmt: skip
    if _checking():
        check_width(
            initial_state_indices=read_index, output_state_indices=write_index, intermediate_state_indices=buffer_index,
            ssm_state_indices=slot_index, num_accepted_tokens=accepted, cu_seqlens=cu_seqlens,
        )  # fmt: skip
        check_values(bound.contract, arguments)
    function = bound.at(work_units)
    try:
        function(*arguments)
    except (TypeError, ValueError, RuntimeError) as e:
        raise refusal(bound.contract, arguments, e) from e
    return output


@lru_cache(maxsize=1024)
def _numbers(
    K: int, scale: float | None, softplus_beta: float, threshold: float, lower_bound: float, neg_eigval: bool, null_index: int,
    use_qk_l2norm: bool,
) -> tuple[float | int, ...]:  # fmt: skip
    """The numbers of a call as a compiled function takes them. Checked once for a set of values, so
    that it costs a call nothing.
    """
    check_numbers(
        scale, softplus_beta, threshold, null_index, use_qk_l2norm, neg_eigval, lower_bound
    )
    return (
        K**-0.5 if scale is None else float(scale), float(softplus_beta), float(threshold), float(lower_bound), 2.0 if neg_eigval else 1.0,
        int(null_index), 1 if use_qk_l2norm else 0,
    )  # fmt: skip


def _no_gradient(**tensors: Tensor) -> UnsupportedProblem:
    """The refusal of tensors that a gradient is asked of."""
    names = [name for name, x in tensors.items() if x.requires_grad]
    return UnsupportedProblem(
        f"{listed(names)}: requires_grad is set and gradients are on, and decode has none; accepted"
        " are calls under torch.inference_mode() or torch.no_grad(), or tensors without it, by"
        " .detach()"
    )


def _ragged_requests(
    cu_seqlens: Tensor, q: Tensor, read_index: Any, buffer_index: Any, slot_index: Any
) -> int:
    """B of a ragged call. A compiled call ties the indices to each other, and neither to cu_seqlens
    nor q to one row.
    """
    shape = cu_seqlens.shape
    if len(shape) != 1 or shape[0] < 1:
        raise UnsupportedProblem(
            f"cu_seqlens has shape {tuple(shape)}: accepted is [B+1], from 0 to the last"
            " request's end"
        )
    if q.shape[0] != 1:
        raise UnsupportedProblem(
            f"q has shape {tuple(q.shape)} with cu_seqlens: accepted are packed rows [1, total,"
            " H, K]"
        )
    B = shape[0] - 1
    for x in (read_index, buffer_index, slot_index):
        if x is not None and (not x.dim() or x.shape[0] != B):
            given = {
                "initial_state_indices": read_index,
                "intermediate_state_indices": buffer_index,
                "ssm_state_indices": slot_index,
            }
            name = next(name for name, y in given.items() if y is x)
            raise UnsupportedProblem(
                f"{name} has shape {tuple(x.shape)} for cu_seqlens of {B} requests: accepted is one"
                " row a request"
            )
    return B


def _parameter_fault(
    op: Op, A_log: Tensor, dt_bias: Tensor, H: int, HV: int, K: int
) -> UnsupportedProblem:
    given = f"A_log has shape {tuple(A_log.shape)}, dt_bias {tuple(dt_bias.shape)}: "
    if op == "gdn_decode":
        return UnsupportedProblem(f"{given}accepted is one a value head, [{HV}] each")
    return UnsupportedProblem(
        f"{given}accepted are A_log [{HV}] (one a value head) or [{H}] (one a q/k head) and dt_bias"
        f" [{HV}, {K}] or [{H}, {K}]"
    )


def _check_buffer(buffer: Tensor, buffer_index: Tensor | None, B: int, T: int) -> None:
    if buffer.dim() != 5 or buffer.shape[1] < T or (buffer_index is None and buffer.shape[0] < B):
        rows = "any rows" if buffer_index is not None else f"at least {B} rows"
        raise UnsupportedProblem(
            f"intermediate_states_buffer has shape {tuple(buffer.shape)}: accepted is [rows, steps,"
            f" HV, V, K] with {rows} and at least {T} steps"
        )


def _contract(
    op: Op, gate: str, q: Tensor, k: Tensor, v: Tensor, a: Any, b: Any, beta: Any, A_log: Any, dt_bias: Any, state: Tensor,
    read_index: Any, write_index: Any, buffer: Any, buffer_index: Any, slot_index: Any, accepted: Any, cu_seqlens: Any,
    max_tokens: int | None, frozen: bool, layout: str,
) -> Contract:  # fmt: skip
    """The contract that a call's tensors ask for."""

    def dtype(x: Tensor, name: str) -> str:
        if fault := tensor_fault(name, x):
            raise UnsupportedProblem(fault)
        if x.dtype not in _DTYPES:
            raise UnsupportedProblem(f"{name} has dtype {x.dtype}: accepted are {listed(_DTYPES)}")
        return _DTYPES[x.dtype]

    if slot_index is not None:
        for name, other in (
            ("initial_state_indices", read_index),
            ("intermediate_states_buffer", buffer),
            ("intermediate_state_indices", buffer_index),
        ):
            if other is not None:
                raise UnsupportedProblem(
                    f"{name} with ssm_state_indices: accepted is one of them; ssm_state_indices"
                    " names every slot"
                )
        intermediate = "slots"
    elif buffer is not None:
        intermediate = "dense" if buffer_index is None else "indexed"
    else:
        intermediate = "none"
        if buffer_index is not None:
            raise UnsupportedProblem(
                "intermediate_state_indices without intermediate_states_buffer: give both or"
                " neither"
            )
    if accepted is not None and slot_index is None:
        raise UnsupportedProblem(
            "num_accepted_tokens without ssm_state_indices: it names a column of ssm_state_indices"
        )
    if write_index is not None and read_index is None and slot_index is None:
        raise UnsupportedProblem(
            "output_state_indices without initial_state_indices: give both, or neither"
        )
    if write_index is not None and frozen:
        raise UnsupportedProblem(
            "output_state_indices with disable_state_update=True: nothing would be written there;"
            " give one of them"
        )
    update = write_index is not None if slot_index is not None else not frozen
    if max_tokens is not None and cu_seqlens is None:
        raise UnsupportedProblem("max_tokens without cu_seqlens: T is q.shape[1]; leave it out")
    input_dtype = dtype(q, "q")
    for name, x in (("k", k), ("v", v)):
        if dtype(x, name) != input_dtype:
            raise UnsupportedProblem(f"{name} has dtype {x.dtype}: accepted is q's, {q.dtype}")
    state_dtype = dtype(state, "initial_state")
    if fault := rank_fault(q, v, state):
        raise UnsupportedProblem(fault)
    return check_contract(
        Contract(
            op=op,
            tokens=(
                q.shape[1]
                if cu_seqlens is None
                else MAX_TOKENS
                if max_tokens is None
                else int(max_tokens)
            ),
            K=q.shape[3],
            V=v.shape[3],
            layout=layout,  # type: ignore[arg-type]
            input_dtype=input_dtype,  # type: ignore[arg-type]
            state_dtype=state_dtype,  # type: ignore[arg-type]
            gate_dtype=dtype(a, "a" if gate == "raw" else "g"),  # type: ignore[arg-type]
            beta_dtype=dtype(beta, "beta") if b is None else dtype(b, "b"),  # type: ignore[arg-type]
            A_log_dtype="fp32" if A_log is None else dtype(A_log, "A_log"),  # type: ignore[arg-type]
            dt_bias_dtype="fp32" if dt_bias is None else dtype(dt_bias, "dt_bias"),  # type: ignore[arg-type]
            gate=gate,  # type: ignore[arg-type]
            beta="given" if b is None else "logit",
            mode="update" if update else "frozen",
            intermediate=intermediate,  # type: ignore[arg-type]
            accepted=accepted is not None,
            pool=read_index is not None or slot_index is not None,
            ragged=cu_seqlens is not None,
        )
    )


def plan(problem: Problem, device: str = "cuda", index: int = 0) -> Bound:
    """Binds a problem's contract and loads the function of its work units, so that the first call
    compiles nothing.

    device: `cuda`, the card by its index, or `cpu`. UnsupportedProblem for sizes or a contract that
        no call can have.
    """
    if fault := problem_fault(problem):
        raise UnsupportedProblem(fault)
    bound = _runtime(device, index).bind(problem.contract)
    bound.at(problem.work_units)
    return bound


def prepare(contract: Contract, device: str = "cuda", index: int = 0) -> Bound:
    """Loads every function that a rule can choose for a contract; afterwards any batch can be
    captured in a CUDA graph.
    """
    bound = _runtime(device, index).bind(check_contract(contract))
    bound.load_all()
    return bound


def load_table(path: str | os.PathLike[str], device: str | None = None, index: int = 0) -> None:
    """Makes a table the one in use, on its own kind of device unless another is named; TableError
    where it cannot be trusted.
    """
    from gdntune.results import table

    if not isinstance(path, str | os.PathLike):
        raise UnsupportedProblem(
            f"path is of type {type(path).__name__}: accepted is a str or a pathlib.Path of a"
            " table's file"
        )
    if device is None:
        of = table.load(path).device
        given = f"{os.fspath(path)} was measured on {of.name}, of kind {of.kind}"
        found = _runtime(
            of.kind, index, given, "give a table of kind cpu; `gdntune sweep` makes one"
        )
    else:
        found = _runtime(device, index)
    found.use(path)
    _BOUND.clear()


def _runtime(
    device: str, index: int, given: str = "device='cuda'", instead: str = "give device='cpu'"
) -> Runtime:
    """A device's runtime, as callers name it. Where there is no CUDA, what asked for it is `given`,
    and they can do `instead`.
    """
    if not isinstance(device, str) or device not in ("cuda", "cpu"):
        raise UnsupportedProblem(
            f"{shown('device', device)}: accepted are 'cuda' and 'cpu'; index= names the card"
        )
    if type(index) is not int or index < 0 or (device == "cpu" and index):
        accepted = (
            "0 on the CPU" if device == "cpu" else "an int from 0, torch's number of the card"
        )
        raise UnsupportedProblem(f"{shown('index', index)}: accepted is {accepted}")
    try:
        return runtime(device, index)
    except ToolMissing as e:
        raise ToolMissing(f"{given}: {arch.cuda_fault(index) or e}, or {instead}") from None
