"""Calls whose q, k and v lie in one packed tensor: they become views, and the call is any other."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.runtime import arguments, call
from gdntune.runtime.contracts import Settings, Tensors
from gdntune.runtime.guard import pattern
from gdntune.runtime.memory import view
from gdntune.runtime.records import Records

_CALLS = Records()
_modes = torch._C._len_torch_dispatch_stack


class Packed(NamedTuple):
    """A packed call's tensors."""

    mixed_qkv: Any
    a: Any
    b: Any
    state: Any
    A_log: Any
    dt_bias: Any
    index: Any
    output: Any


def run(given: tuple[Any, ...], settings: tuple[Any, ...], *, route: bool = True) -> Tensor:
    """Runs a call given as plain tuples in the order of `Packed` and of `_settings`; returns its
    output.
    """
    wanted, _, fits, adapt, function, numbers, contract = _CALLS.recent
    if settings != wanted or _modes() or not fits(given):
        key = (given[0].shape, settings)
        record = None if _modes() else _CALLS.find(key, given)
        if record is None:
            return _first(key, Packed._make(given), settings, route)
        _, _, _, adapt, function, numbers, contract = record
    assert adapt is not None
    tensors = adapt(given)
    try:
        function(*(tensors + numbers))
    except (TypeError, ValueError, RuntimeError) as e:
        raise arguments.refusal(contract, (*tensors, *numbers), e) from e
    return tensors[-1]


def _settings(
    layout: str, scale: float | None, l2norm: bool, neg: bool, softplus_beta: float,
    threshold: float, null_index: int, batch_invariant: bool,
) -> Settings:  # fmt: skip
    """A packed call's settings as any call's."""
    return Settings(
        op="gdn_decode", gate="raw", logit=True, indexed=False, state_layout=layout, frozen=False,
        batch_invariant=batch_invariant, max_tokens=None, scale=scale, softplus_beta=softplus_beta,
        softplus_threshold=threshold, lower_bound=0.0, allow_neg_eigval=neg, null_index=null_index,
        use_qk_l2norm=l2norm,
    )  # fmt: skip


def _first(key: Any, p: Packed, settings: tuple[Any, ...], route: bool) -> Tensor:
    """A call that no record fits: looked at whole, run, and kept."""
    q, k, v = views(p.mixed_qkv, p.a, p.b, p.state, settings[0])
    t = Tensors(
        p.state, q, k, v, p.a.unsqueeze(1), p.b.unsqueeze(1), p.A_log, p.dt_bias, p.index, p.index,
        None, None, None, None, p.output,
    )  # fmt: skip
    output, found = call.first(t, _settings(*settings), route)
    if found is not None and not any(x.requires_grad for x in (p.mixed_qkv, p.a, p.b)):
        # The views' sizes and strides are those of this call.
        patterns = {
            i: pattern(x, sizes=True, strides=i < Packed._fields.index("state"))
            for i, x in enumerate(p)
        }
        unpack = _unpacker(t, p.mixed_qkv.storage_offset(), output.shape, found.adapt)
        _CALLS.keep(key, tuple(p), patterns, settings, True, found._replace(adapt=unpack))
    return output


def _unpacker(
    t: Tensors, start: int, shape: Any, adapt: Callable[[Any], Any] | None
) -> Callable[[Any], Any]:
    """What makes a packed call's tensors those of any call, by sizes and strides that are known.

    start: where mixed_qkv begins in its storage; shape: the output's; adapt: what else is done.
    """
    qk, row, at_k = tuple(t.q.shape), t.q.stride(), t.k.storage_offset() - start
    vs, v_row, at_v = tuple(t.v.shape), t.v.stride(), t.v.storage_offset() - start
    gate, a_row, b_row = tuple(t.a.shape), t.a.stride(), t.b.stride()
    nothing = (None, None, None, None)

    def unpack(given: tuple[Any, ...]) -> tuple[Any, ...]:
        mixed, a, b, state, A_log, dt_bias, index, output = given
        if output is None:
            output = mixed.new_empty(shape)
        return (
            state, view(mixed, qk, row, 0), view(mixed, qk, row, at_k),
            view(mixed, vs, v_row, at_v), view(a, gate, a_row, 0), view(b, gate, b_row, 0),
            A_log, dt_bias, index, index, *nothing, output,
        )  # fmt: skip

    if adapt is None:
        return unpack
    return lambda given: adapt(unpack(given))


def views(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, state: Tensor, layout: str
) -> tuple[Tensor, Tensor, Tensor]:
    """q [B, 1, H, K], k and v [B, 1, HV, V] of mixed_qkv [B, 2 H K + HV V]."""
    shape, state_shape = mixed_qkv.shape, state.shape
    if len(shape) != 2 or b.dim() != 2 or a.dim() != 2 or len(state_shape) != 4:
        raise UnsupportedProblem(
            f"mixed_qkv has shape {tuple(shape)}, a {tuple(a.shape)}, b {tuple(b.shape)},"
            f" initial_state {tuple(state_shape)}: expected [B, 2*H*K + HV*V], [B, HV], [B, HV] and"
            " [slots, HV, V, K]"
        )
    B, width = shape
    HV = b.shape[1]
    _, _, V, K = state_shape
    if layout == "v_last":
        V, K = K, V
    keys = width - HV * V
    if K < 1 or keys <= 0 or keys % (2 * K):
        raise UnsupportedProblem(
            f"mixed_qkv has {width} columns with HV={HV}, K={K}, V={V}: expected 2*H*K + HV*V, with"
            " H a divisor of HV"
        )
    # as_strided makes each view at once: slice, unflatten and unsqueeze take three times as long
    row, column = mixed_qkv.stride()
    at, H = mixed_qkv.storage_offset(), keys // (2 * K)
    strides, half = (row, row, K * column, column), keys // 2 * column
    sizes = (B, 1, H, K)
    return (
        mixed_qkv.as_strided(sizes, strides, at),
        mixed_qkv.as_strided(sizes, strides, at + half),
        mixed_qkv.as_strided((B, 1, HV, V), (row, row, V * column, column), at + 2 * half),
    )
