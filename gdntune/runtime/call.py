"""The one path of every decode call: from tensors and settings to a compiled function.

A call is looked at whole on its first sight, in words (`arguments`, `contracts`). What was found is
kept as a record: a guard that compares tensors' types, dispatch keys, dtypes, devices and sizes
in one call, the function and its numbers. Later calls that pass the guard need no other check: what
is left, strides, addresses and the memory behind them, the compiled function looks at itself.
"""

import operator
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards

from gdntune.errors import UnsupportedProblem, listed
from gdntune.problem import Contract
from gdntune.runtime import arguments, contracts, environment, parts, traced
from gdntune.runtime.contracts import Settings, Tensors, name_of
from gdntune.runtime.dispatch import Bound, Function, runtime, warn_once

# Sets of sizes and settings that are kept; then all are dropped, and each is looked at once more.
MOST_KEYS = 4096
# Kinds of tensors that share a key: dtypes, strides, grad modes.
MOST_RECORDS = 16

_RECORDS: dict[Any, tuple["Record", ...]] = {}
_LOCK = threading.RLock()
_V, _READ, _WRITE = map(Tensors._fields.index, ("v", "read_index", "write_index"))
# What every compiled function ties to q and v by itself.
_TIED = tuple(map(Tensors._fields.index, ("k", "a", "b", "output")))
_INDICES = tuple(
    Tensors._fields.index(n)
    for n in ("read_index", "write_index", "slot_index", "accepted", "cu_seqlens")
)
_PARAMETERS = tuple(Tensors._fields.index(n) for n in ("A_log", "dt_bias"))
_nested = Tensor.is_nested.__get__  # type: ignore[attr-defined]
_modes = torch._C._len_torch_dispatch_stack


class Record(NamedTuple):
    """What is known of calls like one that was looked at.

    guard: whether tensors are like those; pick: the tensors that are given, of a call's;
    function, numbers: what runs; adapt: what changes the tensors first, or None.
    settings, same, absent, nothing: by what a call is like this one: its settings, whether one
    index is read and written, and the tensors that are not given, which are `nothing`.
    """

    guard: Callable[..., bool]
    pick: Callable[[Any], Any]
    function: Callable[..., Any]
    numbers: tuple[float | int, ...]
    adapt: Callable[[Any], Any] | None
    contract: Contract
    settings: tuple[Any, ...]
    same: bool
    absent: Callable[[Any], Any]
    nothing: Any


_recent: Record | None = None


def forget() -> None:
    """Drops all records, so that each call is looked at anew."""
    global _recent
    with _LOCK:
        _RECORDS.clear()
        _recent = None


def run(tensors: tuple[Any, ...], settings: tuple[Any, ...], *, route: bool = True) -> Tensor:
    """Runs a call given as plain tuples in the order of `Tensors` and `Settings`; returns its
    output.

    route: whether tensors that are no memory may go by the operators of `traced`.
    """
    record = _recent
    # most calls are like the one before them: that record is tried without a key
    if (
        record is not None
        and settings == record.settings
        and (tensors[_WRITE] is tensors[_READ]) is record.same
        and record.absent(tensors) == record.nothing
        and _fits(record.guard, record.pick(tensors))
    ):
        return _call(record, tensors)
    return _search(tensors, settings, route)


def _fits(guard: Callable[..., bool], given: Any) -> bool:
    try:
        # a nested tensor would end the process in the guard
        return True not in map(_nested, given) and guard(*given) and not _modes()
    except TypeError:  # what is no tensor
        return False


def _call(record: Record, tensors: tuple[Any, ...]) -> Tensor:
    """Runs a call that fits a record."""
    output = tensors[-1]
    if output is None:
        output = torch.empty_like(tensors[_V], memory_format=torch.contiguous_format)
        tensors = (*tensors[:-1], output)
    if record.adapt is not None:
        tensors = record.adapt(tensors)
    try:
        record.function(*tensors, *record.numbers)
    except (TypeError, ValueError, RuntimeError) as e:
        raise arguments.refusal(record.contract, (*tensors, *record.numbers), e) from e
    return output


def _search(tensors: tuple[Any, ...], settings: tuple[Any, ...], route: bool) -> Tensor:
    """A call unlike the one before it: by a record of its key, or looked at whole."""
    global _recent
    key = (
        tensors[1].shape,
        tensors[_WRITE] is tensors[_READ],
        *(x is None for x in tensors),
        settings,
    )
    try:
        records = _RECORDS.get(key, ())
    except TypeError:  # a setting that is no value, or a size that is a symbol
        records = ()
    for record in records:
        if _fits(record.guard, record.pick(tensors)):
            _recent = record
            return _call(record, tensors)
    return _first(key, Tensors._make(tensors), Settings._make(settings), route)


def _first(key: Any, t: Tensors, s: Settings, route: bool) -> Tensor:
    """A call that no record fits: looked at whole, run, and kept."""
    faults = [
        fault
        for field, x in zip(t._fields, t, strict=True)
        if (x is not None or field in ("state", "q", "k", "v", "a", "b"))
        and (fault := arguments.tensor_fault(name_of(field, s), x))
    ]
    if faults:
        raise UnsupportedProblem("; ".join(faults))
    if special := traced.special(t):
        if route:
            return traced.run(t, s)
        raise UnsupportedProblem(f"{special}: expected are dense tensors with memory")
    B = contracts.requests(t, s)
    with _LOCK:
        bound = _bind(t, s)
        _check_gradients(t, s)
        given_output = t.output
        if t.output is None:
            t = t._replace(output=torch.empty_like(t.v, memory_format=torch.contiguous_format))
        if B * t.v.shape[2] < 1:
            return t.output
        contracts.check_sizes(bound.contract, t, s, B)
        adapt = _adapter(t, s)
        numbers = contracts.numbers(s, bound.contract.K)
        values = (*(adapt(t) if adapt else t), *numbers)
        if faults := list(arguments.faults(bound.contract, values)):
            raise UnsupportedProblem("; ".join(faults))
        checking = environment.checking()
        if checking:
            arguments.check_width(**{name_of(f, s): getattr(t, f) for f in Tensors._fields[8:13]})
            arguments.check_values(bound.contract, values)
        function: Function = bound.at(B * t.v.shape[2])
        if B > parts.MAX_REQUESTS:
            function = parts.in_parts(function, bound.contract)
    try:
        function(*values)
    except (TypeError, ValueError, RuntimeError) as e:
        raise arguments.refusal(bound.contract, values, e) from e
    if not checking:
        _keep(key, t._replace(output=given_output), function, numbers, adapt, bound.contract)
    return t.output


def _bind(t: Tensors, s: Settings) -> Bound:
    arguments.check_static(s.state_layout, s.batch_invariant, s.frozen, s.max_tokens)
    contract = contracts.contract_of(t, s)
    device = t.q.device
    return runtime(device.type, device.index or 0).bind(
        contract, batch_invariant=bool(s.batch_invariant)
    )


def _check_gradients(t: Tensors, s: Settings) -> None:
    """Refuses tensors that a gradient is asked of."""
    fields = ("q", "k", "v", "state", "a", "b")
    names = [name_of(f, s) for f in fields if getattr(t, f).requires_grad]
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
        # an index that is read and written stays one tensor
        same = i == _WRITE and tensors[_WRITE] is tensors[_READ]
        changed[i] = changed[_READ] if same else low_words(tensors[i])
    for i in parameters:
        changed[i] = tensors[i].detach()
    return tuple(changed)


def low_words(x: Tensor) -> Tensor:
    """An int64 tensor as int32 without a copy, by its low words: values stay below 2^31."""
    if x.is_contiguous() and x.dim():
        return x.view(torch.int32)[..., ::2]
    return x.unsqueeze(-1).view(torch.int32)[..., 0]


def _keep(
    key: Any,
    t: Tensors,
    function: Callable[..., Any],
    numbers: tuple[float | int, ...],
    adapt: Callable[[Any], Any] | None,
    contract: Contract,
) -> None:
    """Keeps a call's record. Tensors that are asked a gradient of are looked at each time: a guard
    does not see whether gradients are on.
    """
    if any(getattr(t, f).requires_grad for f in ("q", "k", "v", "state", "a", "b")):
        return
    # a guard knows no tensor twice; whether one index is read and written is part of the key
    once = t._replace(write_index=None) if t.write_index is t.read_index else t
    places = [i for i, x in enumerate(once) if x is not None]
    pick = operator.itemgetter(*places)
    given = pick(t)
    guard = TensorGuards(
        *given,
        # its annotation asks for SymInt, its C++ takes plain sizes
        dynamic_dims_sizes=cast(
            Any,
            [
                [None] * x.dim() if i in _TIED else list(x.shape)
                for i, x in zip(places, given, strict=True)
            ],
        ),
        dynamic_dims_strides=cast(Any, [[None] * x.dim() for x in given]),
    ).check
    if not guard(*given):
        if len({id(x) for x in given}) < len(given):
            return
        warn_once("torch's TensorGuards knows no call again: each call takes some 100 us longer")
        return
    if len(_RECORDS) >= MOST_KEYS:
        _RECORDS.clear()
    missing = [i for i, x in enumerate(t) if x is None]
    absent = operator.itemgetter(*missing) if missing else bool
    nothing = True if not missing else None if len(missing) == 1 else (None,) * len(missing)
    record = Record(
        guard, pick, function, numbers, adapt, contract, key[-1],
        t.write_index is t.read_index, absent, nothing,
    )  # fmt: skip
    _RECORDS[key] = (record, *_RECORDS.get(key, ())[: MOST_RECORDS - 1])
