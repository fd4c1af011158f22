"""Calls that torch wants to see: tracing, fake tensors, views that are no memory.

Eager calls go past torch's dispatcher, which would cost as much again as the call. What only the
dispatcher can handle goes by `torch.ops.gdntune` (defined in `operators`): a call under a dispatch
mode (make_fx, FakeTensorMode, torch.export), and tensors that are wrappers, lazily negated, or
zeros without memory.
"""

from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.runtime import memory
from gdntune.runtime.contracts import Settings, Tensors, name_of


def special(t: Tensors) -> str | None:
    """Why a compiled function must not be handed these tensors as they are; None where it may."""
    for field, x in zip(t._fields, t, strict=True):
        if x is not None and (key := memory.wrapper(x)) is not None:
            return f"{field} is {memory.WRAPPERS[key]}"
    return _active()


def wrapped(tensors: dict[str, Any]) -> str | None:
    """Why a compiled function must not be handed named tensors as they are; None where it may."""
    for name, x in tensors.items():
        if x is not None and (key := memory.wrapper(x)) is not None:
            return f"{name} is {memory.WRAPPERS[key]}"
    return None


def _active() -> str | None:
    """The mode or transform that is active."""
    if torch._C._len_torch_dispatch_stack():
        return "a dispatch mode is active"
    if torch._C._are_functorch_transforms_active():
        return "a transform of torch.func is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is active"
    return None


def _check_transform(t: Tensors, s: Settings) -> None:
    """Refuses transforms without a rule for decode, and views that a kernel would read wrongly."""
    active = torch._C._functorch.peek_interpreter_stack()
    kind = "" if active is None else active.key().name
    if kind and kind != "Functionalize":
        name = {"Vmap": "torch.vmap"}.get(kind, f"torch.func's {kind.lower()}")
        raise UnsupportedProblem(
            f"{s.op} under {name}: decode has no rule for it; call it on the whole batch, B is a"
            " dimension of every tensor"
        )
    inside = memory.FUNCTIONAL if kind else None
    for field, x in zip(t._fields, t, strict=True):
        if x is not None and (fault := memory.memory_fault(name_of(field, s), x, inside)):
            raise UnsupportedProblem(fault)


def run(t: Tensors, s: Settings) -> Tensor:
    """A call by torch's dispatcher; returns the output."""
    _check_transform(t, s)
    try:
        return record(t, s)
    except (NotImplementedError, AssertionError) as e:
        raise UnsupportedProblem(f"{s.op}: {special(t)}, and it refuses the call: {e}") from e
    except RuntimeError as e:
        # torch has no class of its own for this; all else is the kernel's, and is raised as it is.
        if "functionaliz" not in str(e):
            raise
        raise UnsupportedProblem(
            f"{s.op} under torch.func.functionalize: the state and the output are written in place,"
            " which it has no rule for; torch.export and torch.compile have one"
        ) from e


def record(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> Tensor:
    """The operator's call, as torch.compile sees it."""
    output = tensors[14]
    if output is None:
        output = torch.empty_like(tensors[3], memory_format=torch.contiguous_format)
    A_log, dt_bias = _detached(tensors[6]), _detached(tensors[7])
    ops = torch.ops.gdntune
    op = ops.gated_delta_rule_decode if settings[0] == "gdn_decode" else ops.kda_decode
    op(*tensors[:6], A_log, dt_bias, *tensors[8:14], output, *settings[1:])
    return output


def record_packed(given: tuple[Any, ...], settings: tuple[Any, ...]) -> Tensor:
    """The packed operator's call, as torch.compile sees it."""
    mixed_qkv, a, b, state, A_log, dt_bias, index, output = given
    if output is None:
        V = state.shape[3 if settings[0] == "v_last" else 2]
        output = mixed_qkv.new_empty((mixed_qkv.shape[0], 1, b.shape[1], V))
    torch.ops.gdntune.gated_delta_rule_packed_decode(
        mixed_qkv, a, b, _detached(A_log), _detached(dt_bias), state, index, output, *settings
    )
    return output


def record_layer(
    given: tuple[Any, ...], settings: tuple[Any, ...], layer: tuple[Any, ...]
) -> Tensor:
    """A layer's operator's call, as torch.compile sees it; given in the order of
    `layer_call.Given`.
    """
    mixed_qkv, a, beta, state, A_log, dt_bias = given[:6]
    output, gate, weight, window, taps, bias, position = given[11:]
    if output is None:
        V = state.shape[3 if settings[4] == "v_last" else 2]
        heads = beta.shape if layer[3] == "packed" else beta.flatten(-2).shape
        output = mixed_qkv.new_empty((*heads, V))
    ops = torch.ops.gdntune
    gdn = settings[0] == "gdn_decode"
    op = ops.gated_delta_rule_layer_decode if gdn else ops.kda_layer_decode
    op(
        mixed_qkv, a, beta, state, _detached(A_log), _detached(dt_bias), *given[6:11], output,
        gate, _detached(weight), window, _detached(taps), _detached(bias), position,
        *settings[1:], *layer,
    )  # fmt: skip
    return output


def _detached(x: Tensor | None) -> Tensor | None:
    return x.detach() if x is not None and x.requires_grad else x
