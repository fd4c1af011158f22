"""Calls behind a ring: as `call`, with the ring's tensors behind a call's numbers."""

from typing import Any

import torch
from torch import Tensor

from gdntune.runtime import arguments, call
from gdntune.runtime.contracts import Settings, Tensors
from gdntune.runtime.guard import pattern
from gdntune.runtime.records import Records
from gdntune.runtime.ring_arguments import Rings, numbers, plain

_CALLS = Records()
_TENSORS = len(Tensors._fields)
# behind the ring's tensors: its seed, the output's gate and the norm's weight
_SEED = _TENSORS + 5
_V, _OUTPUT = map(Tensors._fields.index, ("v", "output"))
_modes = torch._C._len_torch_dispatch_stack


def run(given: tuple[Any, ...], settings: tuple[Any, ...], ring: tuple[Any, ...]) -> Tensor:
    """Runs a call given as plain tuples: the fields of `Tensors` and of `Rings` up to norm_weight;
    of `Settings`; the rest of `Rings`. Returns its output.
    """
    asked = (settings, ring)
    wanted, _, fits, adapt, function, found, contract = _CALLS.recent
    if asked != wanted or _modes() or not fits(given):
        key = (given[1].shape, asked)
        record = None if _modes() else _CALLS.find(key, given)
        if record is None:
            return _first(key, given, settings, ring)
        _, _, _, adapt, function, found, contract = record
    tensors, rings, (seed, gate, weight) = given[:_TENSORS], given[_TENSORS:_SEED], given[_SEED:]
    output = tensors[_OUTPUT]
    if output is None:
        output = torch.empty_like(tensors[_V], memory_format=torch.contiguous_format)
        tensors = (*tensors[:_OUTPUT], output)
    if adapt is not None:
        tensors = adapt(tensors)
    values = (*tensors, *found, *rings, *numbers(*ring[:3]), seed)
    if gate is not None:
        values = (*values, gate, plain(weight), float(ring[4]))
    try:
        function(*values)
    except (TypeError, ValueError, RuntimeError) as e:
        raise arguments.refusal(contract, values, e) from e
    return output


def _first(
    key: Any, given: tuple[Any, ...], settings: tuple[Any, ...], ring: tuple[Any, ...]
) -> Tensor:
    """A call that no record fits: looked at whole, run, and kept."""
    t = Tensors._make(given[:_TENSORS])
    rings = Rings(*given[_TENSORS:], *ring)
    output, found = call.first(t, Settings._make(settings), False, rings)
    if found is not None:
        patterns = {i: pattern(x, sizes=True) for i, x in enumerate(given)}
        _CALLS.keep(key, given, patterns, (settings, ring), False, found)
    return output
