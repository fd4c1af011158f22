"""The one path of every decode call: from tensors and settings to a compiled function.

A call is looked at whole on its first sight, in words (`arguments`, `contracts`). What it came to
is kept (`records`) with a guard of its tensors (`guard`). Later calls that pass the guard need no
other check: what is left, strides, addresses and the memory behind them, the compiled function
looks at itself.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem, listed
from gdntune.runtime import arguments, contracts, environment, parts, traced
from gdntune.runtime.contracts import NO_LAYER, Layer, Settings, Tensors, name_of
from gdntune.runtime.dispatch import Bound, Function, runtime
from gdntune.runtime.guard import pattern
from gdntune.runtime.memory import view
from gdntune.runtime.records import LOCK, Found, Records, forget
from gdntune.runtime.ring_arguments import Rings

__all__ = ["first", "forget", "run"]
_CALLS = Records()
_V, _READ, _WRITE, _OUTPUT = map(
    Tensors._fields.index, ("v", "read_index", "write_index", "output")
)
# What every compiled function ties to q and v by itself.
_TIED = tuple(map(Tensors._fields.index, ("k", "a", "b", "output")))
_INDICES = tuple(
    Tensors._fields.index(n)
    for n in ("read_index", "write_index", "slot_index", "accepted", "cu_seqlens")
)
_PARAMETERS = tuple(Tensors._fields.index(n) for n in ("A_log", "dt_bias"))
_modes = torch._C._len_torch_dispatch_stack
_contiguous = torch.contiguous_format


def run(tensors: tuple[Any, ...], settings: tuple[Any, ...], *, route: bool = True) -> Tensor:
    """Runs a call given as plain tuples in the order of `Tensors` and `Settings`; returns its
    output.

    route: whether tensors that are no memory may go by the operators of `traced`.
    """
    wanted, same, fits, adapt, function, numbers, contract = _CALLS.recent
    # Every step here is paid at each call: 25 ns for a Python call alone.
    if (
        settings != wanted
        or (tensors[_WRITE] is tensors[_READ]) is not same
        or _modes()
        or not fits(tensors)
    ):
        key = (tensors[1].shape, tensors[_WRITE] is tensors[_READ], settings)
        record = None if _modes() else _CALLS.find(key, tensors)
        if record is None:
            return _first(key, tensors, settings, route)
        _, _, _, adapt, function, numbers, contract = record
    output = tensors[_OUTPUT]
    if output is None:
        output = torch.empty_like(tensors[_V], memory_format=_contiguous)
        tensors = (*tensors[:_OUTPUT], output)
    if adapt is not None:
        tensors = adapt(tensors)
    try:
        # One tuple: two that are unpacked take 0.2 us longer.
        function(*(tensors + numbers))
    except (TypeError, ValueError, RuntimeError) as e:
        raise arguments.refusal(contract, (*tensors, *numbers), e) from e
    return output


def _first(key: Any, tensors: tuple[Any, ...], settings: tuple[Any, ...], route: bool) -> Tensor:
    """A call that no record fits: looked at whole, run, and kept."""
    output, found = first(Tensors._make(tensors), Settings._make(settings), route)
    if found is not None:
        same = tensors[_WRITE] is tensors[_READ]
        patterns = {
            i: pattern(x, sizes=i not in _TIED)
            for i, x in enumerate(tensors)
            if i != _WRITE or not same
        }
        _CALLS.keep(key, tensors, patterns, settings, same, found)
    return output


def first(
    t: Tensors, s: Settings, route: bool, layer: Layer | Rings = NO_LAYER
) -> tuple[Tensor, Found | None]:
    """Looks at a call whole and runs it. Returns its output and what it came to, None where each
    such call is to be looked at.

    layer: what it does beside gates and delta rule; its arguments are none of `Found`'s.
    """
    faults = [
        fault
        for field, x in zip(t._fields, t, strict=True)
        if (x is not None or field in ("state", "q", "k", "v", "a", "b"))
        and (fault := arguments.tensor_fault(name_of(field, s), x))
    ]
    faults += [
        fault
        for name, x in layer.tensors.items()
        if x is not None and (fault := arguments.tensor_fault(name, x))
    ]
    if faults:
        raise UnsupportedProblem("; ".join(faults))
    if special := traced.special(t) or traced.wrapped(layer.tensors):
        if route:
            return traced.run(t, s), None
        raise UnsupportedProblem(f"{special}: expected are dense tensors with memory")
    B = contracts.requests(t, s)
    with LOCK:
        bound = _bind(t, s, layer)
        _check_gradients(t, s, layer)
        if t.output is None:
            t = t._replace(output=torch.empty_like(t.v, memory_format=_contiguous))
        # No request: there is nothing to launch, and a grid of 0 is an error on CUDA.
        if B * t.v.shape[2] < 1:
            return t.output, None
        contracts.check_sizes(bound.contract, t, s, B)
        adapt = _adapter(t, s)
        numbers = contracts.numbers(s, bound.contract.K)
        values = (*(adapt(t) if adapt else t), *numbers, *layer.values)
        if faults := list(arguments.faults(bound.contract, values)):
            raise UnsupportedProblem("; ".join(faults))
        checking = environment.checking()
        if checking:
            arguments.check_width(**{name_of(f, s): getattr(t, f) for f in Tensors._fields[8:13]})
            arguments.check_values(bound.contract, values)
        function: Function = bound.at(B * t.v.shape[2])
        if B > parts.MAX_REQUESTS:
            parts.check_ring(bound.contract, B)
            function = parts.in_parts(function, bound.contract)
    try:
        function(*values)
    except (TypeError, ValueError, RuntimeError) as e:
        raise arguments.refusal(bound.contract, values, e) from e
    # A guard does not see whether gradients are on.
    judged = (t.q, t.k, t.v, t.state, t.a, t.b, layer.output_gate, layer.conv_state)
    if checking or any(x is not None and x.requires_grad for x in judged):
        return t.output, None
    return t.output, Found(function, numbers, adapt, bound.contract)


def _bind(t: Tensors, s: Settings, layer: Layer | Rings) -> Bound:
    arguments.check_static(
        s.state_layout, s.batch_invariant, s.dependent_launch, s.frozen, s.max_tokens
    )
    contract = layer.contract(contracts.contract_of(t, s))
    device = t.q.device
    return runtime(device.type, device.index or 0).bind(
        contract,
        batch_invariant=bool(s.batch_invariant),
        dependent_launch=bool(s.dependent_launch),
    )


def _check_gradients(t: Tensors, s: Settings, layer: Layer | Rings) -> None:
    """Refuses tensors that a gradient is asked of."""
    fields = ("q", "k", "v", "state", "a", "b")
    names = [name_of(f, s) for f in fields if getattr(t, f).requires_grad]
    layers = {n: getattr(layer, n) for n in ("output_gate", "conv_state")}
    names += [n for n, x in layers.items() if x is not None and x.requires_grad]
    if names and torch.is_grad_enabled():
        raise UnsupportedProblem(
            f"{listed(names)}: requires_grad is set and gradients are on, and decode has none;"
            " call under torch.inference_mode() or torch.no_grad(), or give tensors without it, by"
            " .detach()"
        )


def _adapter(t: Tensors, s: Settings) -> Callable[[Any], Any] | None:
    """What a call's tensors need before a compiled function takes them: None is nothing."""
    wide = []
    for i in _INDICES:
        if t[i] is None or t[i].dtype is torch.int32:
            continue
        if t[i].dtype is not torch.int64:
            raise UnsupportedProblem(
                f"{name_of(Tensors._fields[i], s)} has dtype {t[i].dtype}: expected torch.int32 or"
                " torch.int64"
            )
        wide.append(i)
    parameters = [i for i in _PARAMETERS if t[i] is not None and t[i].requires_grad]
    return partial(_adapted, tuple(wide), tuple(parameters)) if wide or parameters else None


def _adapted(
    wide: tuple[int, ...], parameters: tuple[int, ...], tensors: tuple[Any, ...]
) -> tuple[Any, ...]:
    changed = list(tensors)
    for i in wide:
        # An index that is read and written stays one tensor.
        same = i == _WRITE and tensors[_WRITE] is tensors[_READ]
        changed[i] = changed[_READ] if same else low_words(tensors[i])
    for i in parameters:
        changed[i] = tensors[i].detach()
    return tuple(changed)


def low_words(x: Tensor) -> Tensor:
    """An int64 tensor as int32 without a copy, by its low words: values stay below 2^31."""
    if x.is_contiguous() and x.dim():
        # Little-endian: the low word of each comes first.
        words = x.view(torch.int32)
        if x.dim() == 1:
            return view(words, x.shape, (2,), 0)
        return words[..., ::2]
    return x.unsqueeze(-1).view(torch.int32)[..., 0]
