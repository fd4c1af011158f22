"""Drop-ins with the signatures of FlashInfer 0.7.4's GDN decode: what calls its functions can call
these. What ours does not serve raises UnsupportedProblem.

    from gdntune.engines.flashinfer import gated_delta_rule_mtp

Padding is a negative index: nothing is read or written, and the output is zero.
"""

from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.runtime import ops


def gated_delta_rule_decode_pretranspose(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor | None,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    output_state_indices: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Decode of q, k [B, T, H, K], v [B, T, HV, V] from states [B, HV, V, K], or from a pool
    [slots, HV, V, K] by indices [B]; returns the output and the states, updated in place. Serves
    every dtype of states; as there, a buffer of states and frozen states are for T > 1.
    """
    _check_backend(backend)
    if q.shape[1] == 1 and (intermediate_states_buffer is not None or disable_state_update):
        raise UnsupportedProblem(
            "intermediate_states_buffer or disable_state_update at T=1: expected T > 1"
        )
    if (initial_state is None) != (initial_state_indices is None):
        raise UnsupportedProblem(
            "initial_state and initial_state_indices: expected both (a pool) or neither"
        )
    states = state if initial_state is None else initial_state
    if states is None or states.dim() != 4:
        raise UnsupportedProblem(
            "states: expected state [B, HV, V, K], or initial_state [slots, HV, V, K] with"
            " initial_state_indices"
        )
    result = _output(q, v, output)
    ops.gated_delta_rule_decode(
        q, k, v, A_log=A_log, a=a, dt_bias=dt_bias, b=b, scale=scale, output=result,
        use_qk_l2norm=use_qk_l2norm, initial_state=states,
        initial_state_indices=initial_state_indices,
        output_state_indices=None if disable_state_update else output_state_indices,
        intermediate_states_buffer=intermediate_states_buffer,
        disable_state_update=disable_state_update,
    )  # fmt: skip
    return _returned(result, output), states


def gated_delta_rule_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    use_qk_l2norm: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """A token of each request from states [B, HV, K, V], updated in place."""
    _check_backend(backend)
    if q.shape[1] != 1:
        raise UnsupportedProblem(f"T={q.shape[1]}: expected 1; gated_delta_rule_mtp takes more")
    result = _output(q, v, output)
    ops.gated_delta_rule_decode(
        q, k, v, A_log=A_log, a=a, dt_bias=dt_bias, b=b, scale=scale, output=result,
        use_qk_l2norm=use_qk_l2norm, initial_state=state, state_layout="v_last",
    )  # fmt: skip
    return _returned(result, output), state


def gated_delta_rule_mtp(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    initial_state: Tensor,
    initial_state_indices: Tensor,
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    b: Tensor,
    scale: float | None = None,
    output: Tensor | None = None,
    intermediate_states_buffer: Tensor | None = None,
    ssm_state_indices: Tensor | None = None,
    disable_state_update: bool | None = None,
    use_qk_l2norm: bool = True,
    output_state_indices: Tensor | None = None,
    cache_replayssm: bool = False,
    replayssm_rawv: Tensor | None = None,
    replayssm_rawk: Tensor | None = None,
    replayssm_g: Tensor | None = None,
    replayssm_beta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """T drafts of each request from a pool [slots, HV, V, K]: states to a buffer
    [B, S, HV, V, K], to a slot a token, ssm_state_indices [B, T], or the last one alone.
    disable_state_update is True unless it is given, as there until 0.8. Rings (ReplaySSM) are not
    served.
    """
    if cache_replayssm or any(
        x is not None for x in (replayssm_rawv, replayssm_rawk, replayssm_g, replayssm_beta)
    ):
        raise UnsupportedProblem("cache_replayssm and its buffers: a ring of drafts is not served")
    frozen = True if disable_state_update is None else disable_state_update
    result = _output(q, v, output)
    rows: dict[str, Any] = {
        "A_log": A_log, "a": a, "dt_bias": dt_bias, "b": b, "initial_state": initial_state,
    }  # fmt: skip
    if ssm_state_indices is None:
        ops.gated_delta_rule_decode(
            q, k, v, **rows, scale=scale, output=result, use_qk_l2norm=use_qk_l2norm,
            initial_state_indices=initial_state_indices,
            output_state_indices=None if frozen else output_state_indices,
            intermediate_states_buffer=intermediate_states_buffer, disable_state_update=frozen,
        )  # fmt: skip
        return _returned(result, output), initial_state
    if intermediate_states_buffer is not None or frozen:
        raise UnsupportedProblem(
            "ssm_state_indices with intermediate_states_buffer or disable_state_update: a state a"
            " token goes to its slot; leave them out"
        )
    # the state to start from is a column too: the one behind those that are written
    T = q.shape[1]
    slots = torch.cat(
        [ssm_state_indices, initial_state_indices.to(ssm_state_indices.dtype).unsqueeze(1)], dim=1
    )
    ops.gated_delta_rule_decode(
        q, k, v, **rows, scale=scale, output=result, use_qk_l2norm=use_qk_l2norm,
        ssm_state_indices=slots, num_accepted_tokens=slots.new_full((slots.shape[0],), T + 1),
    )  # fmt: skip
    return _returned(result, output), initial_state


def _check_backend(backend: str) -> None:
    if backend not in ("auto", "flashinfer"):
        raise UnsupportedProblem(
            f"backend={backend!r}: expected 'auto' or 'flashinfer', which mean gdntune here"
        )


def _output(q: Tensor, v: Tensor, given: Tensor | None) -> Tensor:
    """Where a kernel writes: in q's dtype, which a given output need not have."""
    if given is not None and given.dtype == q.dtype:
        return given
    return torch.empty_like(v, memory_format=torch.contiguous_format)


def _returned(result: Tensor, given: Tensor | None) -> Tensor:
    if given is None or given is result:
        return result
    return given.copy_(result)
