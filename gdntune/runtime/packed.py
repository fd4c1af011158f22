"""Calls whose q, k and v lie in one packed tensor: they become views, and the call is any other."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.runtime import arguments, call
from gdntune.runtime.contracts import Settings, Tensors
from gdntune.runtime.guard import pattern
from gdntune.runtime.headers import header
from gdntune.runtime.memory import view
from gdntune.runtime.parts import MAX_REQUESTS
from gdntune.runtime.records import Found, Records

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
    assert isinstance(adapt, Unpack)
    if adapt.aims:
        return _aimed(given, adapt, function, numbers, contract)
    return _viewed(given, adapt, function, numbers, contract)


def _aimed(
    given: tuple[Any, ...], unpack: "Unpack", function: Any, numbers: Any, contract: Any
) -> Tensor:
    """A call by headers: none of its views is made."""
    mixed, a, b, state, A_log, dt_bias, index, output = given
    if output is None:
        output = mixed.new_empty(unpack.shape)
    # Each call that is under way has headers of its own: the compiled function runs without the
    # interpreter's lock.
    try:
        headers = unpack.idle.pop()
    except IndexError:
        made = unpack.headers(mixed, a, b)
        # once they could be made
        assert made is not None
        headers = made
    q, dl_q, k, dl_k, v, dl_v, gate, dl_a, beta, dl_b, _ = headers
    at = mixed.data_ptr()
    dl_q.data, dl_k.data, dl_v.data = at, at + unpack.k_bytes, at + unpack.v_bytes
    dl_a.data, dl_b.data = a.data_ptr(), b.data_ptr()
    try:
        function(
            state, q, k, v, gate, beta, A_log, dt_bias, index, index, None, None, None, None,
            output, *numbers,
        )  # fmt: skip
    except (TypeError, ValueError):
        # It refuses before it writes: as views the call says which argument, or it is a function
        # that takes no headers.
        given = (*given[:-1], output)
        returned = _viewed(given, unpack, function, numbers, contract)
        unpack.aims = False
        return returned
    except RuntimeError as e:
        values = (*unpack(given), *numbers)
        raise arguments.refusal(contract, values, e) from e
    unpack.idle.append(headers)
    return output


def _viewed(
    given: tuple[Any, ...], unpack: "Unpack", function: Any, numbers: Any, contract: Any
) -> Tensor:
    """A call by views."""
    tensors = unpack(given)
    try:
        function(*(tensors + numbers))
    except (TypeError, ValueError, RuntimeError) as e:
        raise arguments.refusal(contract, (*tensors, *numbers), e) from e
    return tensors[-1]


def _settings(
    layout: str, scale: float | None, l2norm: bool, neg: bool, softplus_beta: float,
    threshold: float, null_index: int, batch_invariant: bool, dependent_launch: bool,
) -> Settings:  # fmt: skip
    """A packed call's settings as any call's."""
    return Settings(
        op="gdn_decode", gate="raw", logit=True, indexed=False, state_layout=layout, frozen=False,
        batch_invariant=batch_invariant, dependent_launch=dependent_launch, max_tokens=None,
        scale=scale, softplus_beta=softplus_beta, softplus_threshold=threshold, lower_bound=0.0,
        allow_neg_eigval=neg, null_index=null_index, use_qk_l2norm=l2norm,
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
        unpack = Unpack(p, t, output.shape, found)
        _CALLS.keep(key, tuple(p), patterns, settings, True, found._replace(adapt=unpack))
    return output


class Unpack:
    """Makes a packed call's tensors those of any call, by sizes and strides that are known.

    aims: whether headers do instead of views; idle: those that no call uses now. k_bytes, v_bytes:
    where k and v begin behind q. shape: the output's.
    """

    def __init__(self, p: Packed, t: Tensors, shape: Any, found: Found):
        start = p.mixed_qkv.storage_offset()
        self.shape = shape
        self._adapt = found.adapt
        self._qk, self._row = tuple(t.q.shape), t.q.stride()
        self._v, self._v_row = tuple(t.v.shape), t.v.stride()
        self._gate, self._a_row, self._b_row = tuple(t.a.shape), t.a.stride(), t.b.stride()
        self._at_k, self._at_v = (x.storage_offset() - start for x in (t.k, t.v))
        self.k_bytes, self.v_bytes = (n * t.q.element_size() for n in (self._at_k, self._at_v))
        self.idle: list[tuple[Any, ...]] = []
        # what is adapted, or called in parts, is changed as torch's tensors are
        headers = None
        if found.adapt is None and t.q.shape[0] <= MAX_REQUESTS:
            headers = self.headers(p.mixed_qkv, p.a, p.b)
        self.aims = headers is not None
        if headers is not None:
            self.idle.append(headers)

    def headers(self, mixed: Tensor, a: Tensor, b: Tensor) -> tuple[Any, ...] | None:
        """Headers of q, k, v, gate and beta, each a tensor and where it is aimed; then what they
        need kept.
        """
        made = [
            header(x, shape, strides)
            for x, shape, strides in (
                (mixed, self._qk, self._row),
                (mixed, self._qk, self._row),
                (mixed, self._v, self._v_row),
                (a, self._gate, self._a_row),
                (b, self._gate, self._b_row),
            )
        ]
        if None in made:
            return None
        aimed = [x for h in made if h for x in (h.tensor, h.dl)]
        return (*aimed, [h.kept for h in made if h])

    def __call__(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """The tensors of any call, as views."""
        mixed, a, b, state, A_log, dt_bias, index, output = given
        if output is None:
            output = mixed.new_empty(self.shape)
        tensors = (
            state, view(mixed, self._qk, self._row, 0),
            view(mixed, self._qk, self._row, self._at_k),
            view(mixed, self._v, self._v_row, self._at_v), view(a, self._gate, self._a_row, 0),
            view(b, self._gate, self._b_row, 0), A_log, dt_bias, index, index, None, None, None,
            None, output,
        )  # fmt: skip
        return tensors if self._adapt is None else self._adapt(tensors)


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
