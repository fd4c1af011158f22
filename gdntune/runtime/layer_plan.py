"""A plan of a layer's calls: one contract's compiled functions behind a call that checks nothing
twice.
"""

from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.runtime import arguments, contracts, layer_call, planned
from gdntune.runtime.contracts import Tensors
from gdntune.runtime.dispatch import Bound
from gdntune.runtime.layer_call import Given
from gdntune.runtime.memory import view

_modes = torch._C._len_torch_dispatch_stack


class _Views:
    """What a call's packed rows become, by the sizes and strides of the first one, but for B."""

    def __init__(self, g: Given, t: Tensors, gate: Any, mixed: Any):
        self._flat, self._ragged = g.mixed_qkv.dim() == 2, g.cu_seqlens is not None
        start = g.mixed_qkv.storage_offset()
        # strides of a dimension that only views have are never walked along
        self._packed = [
            (x.shape[2:], x.stride(), x.storage_offset() - start) for x in (t.q, t.k, t.v)
        ]
        self._rows = [
            None if x is None else (x.shape[2:], x.stride(), 0) for x in (t.a, t.b, t.output, mixed)
        ]
        found = layer_call.gate_in(gate, g)
        self._rows.insert(3, found and (found[0][2:], *found[1:]))

    def __call__(self, g: Given) -> tuple[Any, ...]:
        """q, k, v, a, b, output, output gate and packed rows of any call."""
        lead = tuple(g.mixed_qkv.shape[: 1 if self._flat else 2])
        if self._flat:
            lead = (1, *lead) if self._ragged else (*lead, 1)
        gate = g.mixed_qkv if g.output_gate is None else g.output_gate
        rows = (g.mixed_qkv,) * 3 + (g.a, g.b, g.output, gate, g.mixed_qkv)
        return tuple(
            None if like is None else view(x, (*lead, *like[0]), like[1], like[2])
            for x, like in zip(rows, (*self._packed, *self._rows), strict=True)
        )


def make_layer_plan(bound: Bound, batches: int, HV: int, given: dict[str, Any]) -> Any:
    """The plan of a layer's contract for up to `batches` requests, as `planned.Plan` says it.

    given: a plan's settings, and norm_eps. Its call takes mixed_qkv, gate (a or g) and beta (b or
    beta), and by name what `gated_delta_rule_layer_decode` takes: slot_indices are its
    ssm_state_indices, and output is given, [B, T, HV, V] or in the form of mixed_qkv's rows.
    """
    c = bound.contract
    layer = (c.norm, float(given.pop("norm_eps", 1e-6)), c.conv, c.conv_input)
    settings = planned.settings_of(c, given)
    numbers = contracts.numbers(settings, c.K)
    functions, only = planned.choices(bound, batches, HV)
    views: _Views | None = None

    def plan(
        mixed_qkv: Tensor,
        gate: Tensor,
        beta: Tensor,
        *,
        initial_state: Tensor,
        output: Tensor,
        A_log: Tensor | None = None,
        dt_bias: Tensor | None = None,
        initial_state_indices: Tensor | None = None,
        output_state_indices: Tensor | None = None,
        slot_indices: Tensor | None = None,
        num_accepted_tokens: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        output_gate: Tensor | None = None,
        norm_weight: Tensor | None = None,
        conv_state: Tensor | None = None,
        conv_weight: Tensor | None = None,
        conv_bias: Tensor | None = None,
        conv_position: Tensor | None = None,
    ) -> Tensor:
        nonlocal views
        g = Given(
            mixed_qkv, gate, beta, initial_state, A_log, dt_bias, initial_state_indices,
            output_state_indices, slot_indices, num_accepted_tokens, cu_seqlens, output,
            output_gate, norm_weight, conv_state, conv_weight, conv_bias, conv_position,
        )  # fmt: skip
        if views is None or _modes():
            t, asked = layer_call.looked_at(g, settings, layer)
            planned.look(t, settings, numbers, c, batches, HV, asked)
            mixed = None if c.conv == "none" else asked.mixed_qkv
            views = _Views(g, t, asked.output_gate, mixed)
        q, k, v, a, b, o, z, rows = views(g)
        weight, taps, bias = (
            x.detach() if x is not None and x.requires_grad else x
            for x in (norm_weight, conv_weight, conv_bias)
        )
        values = (
            initial_state, q, k, v, a, b, A_log, dt_bias, initial_state_indices,
            output_state_indices, slot_indices, num_accepted_tokens, cu_seqlens, None, o, *numbers,
            z, weight, layer[1], rows, conv_state, taps, bias, conv_position,
        )  # fmt: skip
        try:
            (functions[q.shape[0]] if only is None else only)(*values)
        except IndexError:
            raise UnsupportedProblem(
                f"{q.shape[0]} requests: expected at most {batches}, this plan's B"
            ) from None
        except (TypeError, ValueError, RuntimeError) as e:
            raise arguments.refusal(c, values, e) from e
        return output

    plan.__name__ = plan.__qualname__ = f"Plan({c.key()}, B=1..{batches}, HV={HV})"
    plan.__doc__ = make_layer_plan.__doc__
    for name, value in (("bound", bound), ("contract", c), ("batches", batches), ("HV", HV)):
        setattr(plan, name, value)
    return plan
