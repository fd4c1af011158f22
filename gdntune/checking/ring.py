"""Rings of corrections: the state that a call behind one starts from, and what the call appends."""

import dataclasses

import torch
from torch import Tensor

from gdntune.checking.places import Given, Places
from gdntune.problem import Contract

# What a call appends to, of `spec.RING_ARGUMENTS`.
TENSORS = ("ring_k", "ring_u", "ring_decay")


@dataclasses.dataclass(frozen=True)
class Window:
    """Which rows of its ring are a request's own: count [B] from base [B] on, cyclically, clamped
    as `spec.py` says. folds [B]: whether they are folded into the state.
    """

    base: Tensor
    count: Tensor
    folds: Tensor

    def of(self, requests: Tensor) -> "Window":
        """The windows of these requests alone."""
        return Window(*(getattr(self, f.name)[requests] for f in dataclasses.fields(self)))


def window(contract: Contract, given: Given, tokens: int) -> Window:
    """The windows of a call of so many tokens."""
    rows = given.tensor("ring_u").shape[2]
    base = given.tensor("ring_base").to(torch.int64).clamp(0, rows - 1)
    count = given.tensor("ring_count").to(torch.int64).clamp(0, min(contract.ring, rows))
    return Window(base, count, count >= min(given.flush_min, contract.ring + 1 - tokens))


def _live(x: Tensor, slots: Tensor, at: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, heads, entries, ...] of a ring's tensor: the rows `at` [B, entries] of slots [B]."""
    return torch.stack([x[s][:, rows] for s, rows in zip(slots.tolist(), at, strict=True)]).to(
        dtype
    )


def folded(
    contract: Contract, given: Given, where: Places, window: Window, start: Tensor
) -> Tensor:
    """The states [B, HV, V, K] that requests start from: the pool's, `start`, with the live entries
    folded in.
    """
    dtype = start.dtype
    rows = given.tensor("ring_u").shape[2]
    entry = torch.arange(contract.ring, device=start.device)
    real = (entry < window.count[:, None]) & (where.start >= 0)[:, None]
    at = torch.where(real, (window.base[:, None] + entry) % rows, 0)
    slots = where.start.clamp(min=0)
    k, u, decay = (_live(given.tensor(name), slots, at, dtype) for name in TENSORS)
    real = real[:, None, :, None]
    k, u = torch.where(real, k, 0), torch.where(real, u, 0)
    # [B, HV, entries, K], or of one decay a head [..., 1]
    decay = torch.where(real, decay.view(*u.shape[:3], -1), 1)
    behind = decay.flip(2).cumprod(2).flip(2)
    each = torch.cat((behind[:, :, 1:], torch.ones_like(behind[:, :, :1])), 2)
    k = each * k.repeat_interleave(u.shape[1] // k.shape[1], 1)
    return behind[:, :, :1] * start + torch.einsum("bhiv,bhik->bhvk", u, k)


@dataclasses.dataclass(frozen=True)
class Kept:
    """What a ring gets: of each token k [n, H, K], u [n, HV, V], decay [n, HV, 1] (KDA: [n, HV, K])
    in the compute dtype, and which token each of [slots * rows] has in the end, -1 for those that
    are left alone. tokens [n]: how many u has seen; reach [n, HV]: the norm of what u is a
    difference of.
    """

    k: Tensor
    u: Tensor
    decay: Tensor
    held: Tensor
    tokens: Tensor
    reach: Tensor


def kept(
    contract: Contract,
    given: Given,
    where: Places,
    window: Window,
    states: Tensor,
    inputs: tuple[Tensor, ...],
) -> Kept:
    """What is appended. states [B, T, HV, V, K]: before each token; inputs: tokens of k and v
    [B, T, heads, size], k's norm's inverse [B, T, H], decay [B, T, HV, 1 or K] and beta [B, T, HV].
    """
    key, value, inverse, decay, beta = inputs
    group = value.shape[2] // key.shape[2]
    per_head = inverse.repeat_interleave(group, 2)
    k = key.repeat_interleave(group, 2) * per_head[..., None]
    met = (decay[..., None, :] * states * k[..., None, :]).sum(-1)
    factor = (beta * per_head)[..., None]
    B, T = where.rows.shape
    shape = given.tensor("ring_u").shape
    token = torch.arange(T, device=k.device)
    place = (window.base + window.count)[:, None] + token
    cells = where.start[:, None] * shape[2] + place % shape[2]
    cells = torch.where(where.real & bool(given.append), cells, -1).flatten()
    held = torch.full((shape[0] * shape[2],), -1, dtype=torch.int64, device=k.device)
    held[cells[cells >= 0]] = torch.arange(B * T, device=k.device)[cells >= 0]
    return Kept(
        k=key.flatten(0, 1),
        u=(factor * (value - met)).flatten(0, 1),
        decay=decay.flatten(0, 1),
        held=held,
        tokens=(window.count[:, None] + token + 1).flatten(),
        reach=(factor[..., 0] * value.norm(dim=-1)).flatten(0, 1),
    )
