"""A layer's calls: q, k and v lie in one packed tensor, which become views, and what the call does
beside gates and delta rule is handed on behind its numbers.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.kernels.layer_config import SHIFTED_HEADS
from gdntune.runtime import arguments, call
from gdntune.runtime.contracts import Layer, Settings, Tensors
from gdntune.runtime.guard import pattern
from gdntune.runtime.memory import view
from gdntune.runtime.records import Found, Records

_CALLS = Records()
_modes = torch._C._len_torch_dispatch_stack


class Given(NamedTuple):
    """A layer's call's tensors, as they are given; None what it lacks."""

    mixed_qkv: Any
    a: Any
    b: Any
    state: Any
    A_log: Any
    dt_bias: Any
    read_index: Any
    write_index: Any
    slot_index: Any
    accepted: Any
    cu_seqlens: Any
    output: Any
    output_gate: Any
    norm_weight: Any
    conv_state: Any
    conv_weight: Any
    conv_bias: Any
    conv_position: Any


def run(given: tuple[Any, ...], settings: tuple[Any, ...], layer: tuple[Any, ...]) -> Tensor:
    """Runs a call given as plain tuples in the order of `Given` and `Settings`; returns its output.

    layer: the norm's kind and epsilon, the convolution's kind, and how its rows lie.
    """
    wanted, _, fits, adapt, function, _, contract = _CALLS.recent
    asked = (settings, layer)
    if asked != wanted or _modes() or not fits(given):
        key = (given[0].shape, asked)
        record = None if _modes() else _CALLS.find(key, given)
        if record is None:
            return _first(key, Given._make(given), settings, layer)
        _, _, _, adapt, function, _, contract = record
    assert isinstance(adapt, Unpack)
    values = adapt(given)
    try:
        function(*values)
    except (TypeError, ValueError, RuntimeError) as e:
        raise arguments.refusal(contract, values, e) from e
    return adapt.returned(values)


def _first(key: Any, g: Given, settings: tuple[Any, ...], layer: tuple[Any, ...]) -> Tensor:
    """A call that no record fits: looked at whole, run, and kept."""
    s = Settings._make(settings)
    t, asked = looked_at(g, s, layer)
    output, found = call.first(t, s, False, asked)
    if found is not None and not (g.mixed_qkv.requires_grad or g.b.requires_grad):
        unpack = Unpack(g, t, asked, found, output)
        # Views have the sizes and strides of this call.
        patterns = {i: pattern(x, sizes=True, strides=True) for i, x in enumerate(g)}
        kept = found._replace(adapt=unpack)
        _CALLS.keep(key, tuple(g), patterns, (settings, layer), False, kept)
    return unpacked(output, g)


def looked_at(g: Given, s: Settings, layer: tuple[Any, ...]) -> tuple[Tensors, Layer]:
    """A call's tensors as any call's, and what it does beside gates and delta rule."""
    norm, epsilon, conv, rows = layer
    t, gate, mixed = views(g, s) if rows == "packed" else side_by_side(g, s, norm != "none")
    asked = Layer(norm, gate, g.norm_weight, epsilon, conv, conv_input=rows)
    if conv != "none":
        asked = asked._replace(
            mixed_qkv=mixed, conv_state=g.conv_state, conv_weight=g.conv_weight,
            conv_bias=g.conv_bias, conv_position=g.conv_position,
        )  # fmt: skip
        if g.conv_position is None and g.mixed_qkv.is_cuda:
            check_readers(s.op, t.q.shape[2], t.v.shape[2])
    return t, asked


def check_readers(op: str, H: int, HV: int) -> None:
    """UnsupportedProblem for more value heads a q/k head than read one shifted window on CUDA."""
    most = 1 if op == "kda_decode" else SHIFTED_HEADS
    if H and most * H < HV:
        raise UnsupportedProblem(
            f"HV={HV}, H={H} without conv_position: a window that is shifted in place is read by"
            f" one block or cluster, on CUDA of at most {most} value heads a q/k head; give"
            " conv_position, a ring"
        )


def unpacked(output: Tensor, g: Given) -> Tensor:
    """The output [B, T, HV, V] as the call's rows were given: of [B, W] it is [B, HV, V]."""
    if g.mixed_qkv.dim() == 3:
        return output
    return output[0] if g.cu_seqlens is not None else output[:, 0]


class Unpack:
    """Makes a call's tensors those of a compiled function, by sizes and strides that are known."""

    def __init__(self, g: Given, t: Tensors, layer: Layer, found: Found, output: Tensor):
        self._adapt, self._numbers = found.adapt, found.numbers
        self._shape = tuple(output.shape)
        self._epsilon = float(layer.norm_eps)
        self._outer = g.mixed_qkv.dim() == 2, g.cu_seqlens is not None
        start = g.mixed_qkv.storage_offset()
        self._views = [(x.shape, x.stride(), x.storage_offset() - start) for x in (t.q, t.k, t.v)]
        self._same = [
            None if x is None else (x.shape, x.stride(), 0) for x in (t.a, t.b, layer.mixed_qkv)
        ]
        self._gate = gate_in(layer.output_gate, g)

    def __call__(self, given: tuple[Any, ...]) -> tuple[Any, ...]:
        """All arguments, the last call's tensors among them."""
        (
            mixed, a, b, state, A_log, dt_bias, read, write, slot, accepted, bounds, output, gate,
            weight, window, taps, bias, position,
        ) = given  # fmt: skip
        if output is None:
            output = mixed.new_empty(self._shape)
        else:
            output = output.view(self._shape)
        q, k, v = (view(mixed, *as_view) for as_view in self._views)
        a, b, rows = (
            None if same is None else view(x, *same)
            for x, same in zip((a, b, mixed), self._same, strict=True)
        )
        if self._gate is not None:
            gate = view(mixed if gate is None else gate, *self._gate)
        tensors: tuple[Any, ...] = (
            state, q, k, v, a, b, A_log, dt_bias, read, write, slot, accepted, bounds, None, output,
        )  # fmt: skip
        if self._adapt is not None:
            tensors = self._adapt(tensors)
        weight, taps, bias = (
            x.detach() if x is not None and x.requires_grad else x for x in (weight, taps, bias)
        )
        behind = (gate, weight, self._epsilon, rows, window, taps, bias, position)
        return (*tensors, *self._numbers, *behind)

    def returned(self, values: tuple[Any, ...]) -> Tensor:
        """The output among all arguments, as the call's rows were given."""
        output: Tensor = values[len(Tensors._fields) - 1]
        flat, ragged = self._outer
        return (output[0] if ragged else output[:, 0]) if flat else output


def gate_in(gate: Any, g: Given) -> Any:
    """Shape, strides and start of the output's gate in what was given: its own tensor, or
    mixed_qkv, where q/k heads lie side by side.
    """
    if gate is None:
        return None
    start = 0 if g.output_gate is not None else gate.storage_offset() - g.mixed_qkv.storage_offset()
    return gate.shape, gate.stride(), start


def _rows(x: Any, flat: bool, ragged: bool) -> Any:
    """A tensor of rows as [B, T, ...]: rows [B, ...] are of one token, packed ones of one batch."""
    if x is None or not flat:
        return x
    return x.unsqueeze(0 if ragged else 1)


def side_by_side(g: Given, s: Settings, gated: bool) -> tuple[Tensors, Any, Tensor]:
    """`views` of rows that have q/k heads side by side. What a kernel is handed then says the sizes
    and where the first head's are (kernels/spec.py).
    """
    flat, ragged = g.mixed_qkv.dim() == 2, g.cu_seqlens is not None
    mixed, a, b, output = (_rows(x, flat, ragged) for x in (g.mixed_qkv, g.a, g.b, g.output))
    if g.output_gate is not None:
        raise UnsupportedProblem(
            "output_gate with conv_input='interleaved': expected None; the gate is in mixed_qkv"
        )
    K, V = g.state.shape[-1:-3:-1] if g.state.dim() == 4 else (0, 0)
    if s.state_layout == "v_last":
        V, K = K, V
    if mixed.dim() != 3 or b.dim() != 4 or a.shape != b.shape or not K:
        raise UnsupportedProblem(
            f"mixed_qkv has shape {tuple(g.mixed_qkv.shape)}, a {tuple(g.a.shape)}, b"
            f" {tuple(g.b.shape)}, initial_state {tuple(g.state.shape)} with"
            " conv_input='interleaved': expected [B, T, 2*H*K + 2*HV*V] (or [B, ...], one token),"
            " a and b [B, T, H, HV/H] (or [B, H, HV/H]), and [slots, HV, V, K]"
        )
    (B, T, H, r), width = b.shape, mixed.shape[2]
    HV, keys = H * r, H * K
    if width != 2 * (keys + HV * V):
        raise UnsupportedProblem(
            f"mixed_qkv has {width} columns with H={H}, HV={HV}, K={K}, V={V} and"
            f" conv_input='interleaved': expected 2*H*K + 2*HV*V = {2 * (keys + HV * V)}"
        )
    for name, x in (("a", a), ("b", b)):
        if (H > 1 and x.stride(2) != 2 * r) or (r > 1 and x.stride(3) != 1):
            raise UnsupportedProblem(
                f"{name} has strides {tuple(x.stride())}: expected {2 * r} between q/k heads and 1"
                " between value heads, as views of in_proj_ba's rows [H, b and a of HV/H] have"
            )
    a, b = (x.as_strided((B, T, HV), (*x.stride()[:2], 1), x.storage_offset()) for x in (a, b))
    gate = mixed[..., 2 * K + r * V :][..., : HV * V].unflatten(-1, (HV, V)) if gated else None
    q, k, v = mixed[..., : 2 * keys + HV * V].split((keys, keys, HV * V), -1)
    return _tensors(g, (q, k, v), K, (HV, V), a, b, output), gate, mixed


def _tensors(
    g: Given, qkv: tuple[Any, ...], K: int, values: tuple[int, int], a: Any, b: Any, output: Any
) -> Tensors:
    """A call's tensors of q, k and v as rows; values: HV and V."""
    q, k, v = qkv
    return Tensors(
        g.state, q.unflatten(-1, (-1, K)), k.unflatten(-1, (-1, K)), v.unflatten(-1, values), a, b,
        g.A_log, g.dt_bias, g.read_index, g.write_index, g.slot_index, g.accepted, g.cu_seqlens,
        None, output,
    )  # fmt: skip


def views(g: Given, s: Settings) -> tuple[Tensors, Any, Tensor]:
    """A call's tensors as any call's, its output gate as [B, T, HV, V], mixed_qkv as [B, T, D]."""
    flat, ragged = g.mixed_qkv.dim() == 2, g.cu_seqlens is not None
    mixed, a, b, gate, output = (
        _rows(x, flat, ragged) for x in (g.mixed_qkv, g.a, g.b, g.output_gate, g.output)
    )
    if mixed.dim() != 3 or b.dim() != 3 or g.state.dim() != 4:
        raise UnsupportedProblem(
            f"mixed_qkv has shape {tuple(g.mixed_qkv.shape)}, beta or its logit"
            f" {tuple(g.b.shape)}, initial_state {tuple(g.state.shape)}: expected [B, 2*H*K + HV*V]"
            " (one token) or [B, T, 2*H*K + HV*V], [B, HV] or [B, T, HV], and [slots, HV, V, K]"
        )
    HV, (V, K) = b.shape[2], g.state.shape[2:]
    if s.state_layout == "v_last":
        V, K = K, V
    width, keys = mixed.shape[2], mixed.shape[2] - HV * V
    if keys <= 0 or keys % (2 * K):
        raise UnsupportedProblem(
            f"mixed_qkv has {width} columns with HV={HV}, K={K}, V={V}: expected 2*H*K + HV*V, with"
            " H a divisor of HV"
        )
    rows = mixed.split((keys // 2, keys // 2, HV * V), -1)
    return _tensors(g, rows, K, (HV, V), a, b, output), gate, mixed
