"""A layer's step as engines make it, convolution, delta rule and gated norm in launches of their
own: what the adapters share.

Engines shift a window in place, a slot's rows oldest first, and skip slot 0. So a call has windows
of its own, filled from the case's before the call, whatever form the contract's have.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.peers.spec import Function, mixed_qkv, packed, starts, unless
from gdntune.problem import ITEMSIZE, Contract, Problem

# How their kernels name the convolution's activation.
ACTIVATIONS = {"silu": "silu", "identity": None}


def alone(c: Contract) -> Contract:
    """The contract of the delta rule alone."""
    plain = Contract()
    parts = [f for f in Contract.__struct_fields__ if f.startswith(("norm", "conv"))]
    return c.replace(**{name: getattr(plain, name) for name in parts})


def refuse_step(
    c: Contract, *, norm: tuple[str, ...] = ("silu",), conv: bool | None = None
) -> str | None:
    """Why a step of several launches is not served for what it has besides the delta rule. conv:
    whether there must be one; None: either way.
    """
    kinds = {True: ("silu", "identity"), False: ("none",), None: ("none", "silu", "identity")}
    return unless(c, norm=norm, conv=kinds[conv], conv_width=(2, 3, 4), ragged=(False,))


@dataclasses.dataclass(frozen=True)
class Windows:
    """A call's windows [slots, rows, D]. wanted [B, rows, D]: those of the requests after the call,
    exactly. index [B] int32: their slots, from 1 on.
    """

    pool: Tensor
    index: Tensor
    wanted: Tensor

    @property
    def channels_first(self) -> Tensor:
        """[slots, D, rows], as the kernels take it: a view."""
        return self.pool.transpose(1, 2)

    def left(self) -> tuple[Tensor, Tensor]:
        """The requests' windows as they are, and as they must be after one call."""
        return self.pool[self.index.long()], self.wanted


def windows(case: Case) -> Windows:
    """Windows of width - 1 rows, of several tokens T - 1 more: a request's last tokens begin at the
    row of its count of accepted ones less one, as rejected drafts stand behind these.
    """
    c, B = case.contract, case.problem.B
    state, x = case.conv_state, case.mixed_qkv
    assert state is not None and x is not None
    before = c.conv_width - 1
    slots = case.read_index if case.slot_index is None else case.slot_index[:, 0]
    assert slots is not None
    first = torch.zeros(B, dtype=torch.int64, device=x.device)
    if case.accepted is not None:
        first = case.accepted.long().clamp(1, c.tokens) - 1
    row = torch.arange(before, device=x.device).expand(B, -1)
    if case.conv_position is not None:
        row = (case.conv_position.long()[:, None] - before + row) % state.shape[1]
    else:
        row = row + first[:, None]
    held = state[slots.long()[:, None], row]
    wanted = torch.cat((held[:, 1:], x), 1)
    # Of as many slots as requests and one: where they lie is looked up all the same.
    index = slots.long().argsort().argsort() + 1
    pool = state.new_zeros(B + 1, wanted.shape[1], x.shape[2])
    at = first[:, None] + torch.arange(before, device=x.device)
    pool[index[:, None], at] = held
    return Windows(pool, index.to(torch.int32), wanted)


def taps(case: Case) -> Tensor:
    """The convolution's weights [D, width]."""
    assert case.conv_weight is not None
    return case.conv_weight


def taps_by_part(case: Case) -> Tensor:
    """The weights [3, width, H*K] in fp32, of q, k and v, as the fused KDA kernels take them: a
    copy, made once as an engine makes it when it loads a model.
    """
    weight = taps(case)
    return weight.unflatten(0, (3, -1)).transpose(1, 2).float().contiguous()


def rows_of(case: Case) -> Tensor:
    """What goes into the convolution, or without one into the delta rule: [B*T, D]."""
    return mixed_qkv(case) if case.mixed_qkv is None else case.mixed_qkv.flatten(0, 1)


def gate_of(case: Case) -> tuple[Tensor, Tensor]:
    """The output's gate [B*T, HV, V] and the norm's weight [V]."""
    assert case.output_gate is not None and case.norm_weight is not None
    return packed(case, case.output_gate)[0], case.norm_weight


@dataclasses.dataclass(frozen=True)
class Convolved:
    """A convolution bound to a case. rows [B*T, D]: what it leaves; call: nothing where the
    contract has none. left: as `Bound.left`.
    """

    rows: Tensor
    call: Callable[[], Any]
    left: Callable[[], tuple[Tensor, Tensor]] | None = None


def convolved(case: Case, function: Function) -> Convolved:
    """vLLM's `causal_conv1d_update` on a case, into a tensor of its own: in place it would
    change what the others of the measurement read.
    """
    x = rows_of(case)
    if case.contract.conv == "none":
        return Convolved(x, lambda: None)
    out, held, c = torch.empty_like(x), windows(case), case.contract
    arguments: dict[str, Any] = {
        "x": x,
        "conv_state": held.channels_first,
        "weight": taps(case),
        "bias": case.conv_bias,
        "activation": ACTIVATIONS[c.conv],
        "conv_state_indices": held.index,
        "out": out,
    }
    if c.tokens > 1:
        accepted = None if case.accepted is None else case.accepted.clamp(1, c.tokens)
        arguments |= {
            "num_accepted_tokens": accepted,
            "query_start_loc": starts(case),
            "max_query_len": c.tokens,
        }
    convolve = function.load()
    return Convolved(out, lambda: convolve(**arguments), held.left)


def split(case: Case, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, K] and v [B, T, HV, V]: views of packed rows."""
    p, c = case.problem, case.contract
    x = rows.unflatten(0, (p.B, c.tokens))
    q, k, v = x.split([p.H * c.K, p.H * c.K, p.HV * c.V], -1)
    return q.unflatten(-1, (p.H, c.K)), k.unflatten(-1, (p.H, c.K)), v.unflatten(-1, (p.HV, c.V))


def between_bytes(p: Problem) -> int:
    """What launches of their own write and read again: of a convolution q, k and v, of a norm the
    delta rule's outputs.
    """
    c, row = p.contract, 0
    if c.conv != "none":
        row += 2 * p.H * c.K + p.HV * c.V
    if c.norm != "none":
        row += p.HV * c.V
    return 2 * p.B * c.tokens * row * ITEMSIZE[c.input_dtype]


def convolution_bytes(p: Problem) -> int:
    """The same where the norm is the delta rule's own."""
    return between_bytes(Problem(p.contract.replace(norm="none"), p.B, p.H, p.HV))
