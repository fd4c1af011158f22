"""A call's arguments, and where each request reads and writes: the calling convention of `spec.py`,
with every clamp that it states.
"""

import dataclasses

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract


def present(x: Tensor | None, name: str) -> Tensor:
    """x, or UnsupportedProblem where it is None."""
    if x is None:
        raise UnsupportedProblem(f"{name}=None: this contract has {name}, pass the tensor")
    return x


@dataclasses.dataclass(frozen=True, kw_only=True)
class Given:
    """A call's arguments by the names of `spec.arguments_of`; a tensor that the contract lacks is
    None, and so is a scale of K**-0.5.
    """

    state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor | None = None
    dt_bias: Tensor | None = None
    read_index: Tensor | None = None
    write_index: Tensor | None = None
    slot_index: Tensor | None = None
    accepted: Tensor | None = None
    cu_seqlens: Tensor | None = None
    intermediate: Tensor | None = None
    output: Tensor | None = None
    scale: float | None = None
    softplus_beta: float = 1.0
    softplus_threshold: float = 20.0
    lower_bound: float = -5.0
    beta_scale: float = 1.0
    null_index: int = -1
    use_qk_l2norm: bool | int = True
    output_gate: Tensor | None = None
    norm_weight: Tensor | None = None
    norm_eps: float = 1e-6
    mixed_qkv: Tensor | None = None
    conv_state: Tensor | None = None
    conv_weight: Tensor | None = None
    conv_bias: Tensor | None = None
    conv_position: Tensor | None = None
    ring_k: Tensor | None = None
    ring_u: Tensor | None = None
    ring_decay: Tensor | None = None
    ring_base: Tensor | None = None
    ring_count: Tensor | None = None
    ring_seed: Tensor | None = None
    flush_min: int = 0
    append: int = 1

    def tensor(self, name: str) -> Tensor:
        """An argument that the contract asks for; UnsupportedProblem where it is None."""
        return present(getattr(self, name), name)

    def index(self, name: str, size: int) -> Tensor:
        """An index tensor as int64, -1 where it is negative, `null_index` or beyond `size`."""
        return self._inside(self.tensor(name), size)

    def _inside(self, index: Tensor, size: int) -> Tensor:
        index = index.to(torch.int64)
        real = (index >= 0) & (index < size) & (index != self.null_index)
        return torch.where(real, index, -1)

    def start_slots(self, contract: Contract, requests: int) -> Tensor:
        """[B]: the slot that each request starts from."""
        slots = self.state.shape[0]
        if contract.intermediate == "slots":
            names = self.tensor("slot_index")
            column = torch.zeros(requests, dtype=torch.int64, device=names.device)
            if contract.accepted:
                column = self.tensor("accepted").to(torch.int64).clamp(1, names.shape[1]) - 1
            return self._inside(names.gather(1, column[:, None])[:, 0], slots)
        if contract.pool:
            return self.index("read_index", slots)
        return torch.arange(requests, device=self.q.device)


@dataclasses.dataclass(frozen=True)
class Places:
    """Where each request reads and writes; int64, -1 is nowhere.

    start [B]: slot of the state to start from; -1 makes the request padding: nothing is written but
    zeros to its output rows. rows [B, T]: row of q, k, v, a, b and output, both leading dimensions
    taken as one. final [B]: slot of the final state. cells [B, T]: slot (`slots`) or row*steps +
    step of the intermediate buffer. window [B]: slot of the convolution's window to start from;
    oldest [B]: its row of the oldest token, where windows are shifted.
    """

    start: Tensor
    rows: Tensor
    final: Tensor
    cells: Tensor
    window: Tensor
    oldest: Tensor

    def of(self, requests: Tensor) -> "Places":
        """The places of these requests alone."""
        return Places(*(getattr(self, f.name)[requests] for f in dataclasses.fields(self)))

    @property
    def real(self) -> Tensor:
        """[B, T]: where there is a token of a request that is no padding."""
        return (self.rows >= 0) & (self.start >= 0)[:, None]


def places(contract: Contract, given: Given) -> Places:
    """The places of a call.

    An index that is negative, `null_index` or outside its tensor is padding. Ragged lengths are
    clamped to 0..tokens and to the rows there are; a request of length 0 has its start state as
    final state. accepted is clamped to 1..columns. A token beyond the columns of slot_index, or
    beyond the buffer's steps, writes no intermediate state.
    """
    rows = _rows(contract, given)
    start = given.start_slots(contract, rows.shape[0])
    live = start >= 0
    final = torch.full_like(start, -1)
    if contract.mode == "update":
        # A padding request writes nothing, whatever slot its write_index names.
        wanted = given.index("write_index", given.state.shape[0]) if contract.pool else start
        final = torch.where(live, wanted, -1)
    cells = torch.where((rows >= 0) & live[:, None], _cells(contract, given, rows), -1)
    window = start
    if contract.conv != "none" and contract.intermediate == "slots":
        window = torch.where(live, given.index("slot_index", given.state.shape[0])[:, 0], -1)
    return Places(start, rows, final, cells, window, _oldest(contract, given, start))


def _oldest(contract: Contract, given: Given, start: Tensor) -> Tensor:
    """[B]: where shifted windows begin: of drafts behind as many rows as were accepted beside the
    first, clamped to the window's.
    """
    if contract.conv == "none" or contract.conv_window == "ring" or not contract.accepted:
        return torch.zeros_like(start)
    most = given.tensor("conv_state").shape[1] - contract.conv_width + 1
    return (given.tensor("accepted").to(torch.int64) - 1).clamp(0, most)


def _rows(contract: Contract, given: Given) -> Tensor:
    """[B, T]: the row of each token among q's rows, -1 where a ragged request has no such token."""
    device = given.q.device
    if contract.ragged:
        bounds, total = given.tensor("cu_seqlens").to(torch.int64), given.q.shape[1]
        B, T = bounds.numel() - 1, contract.tokens
        first = bounds[:-1].clamp(0, total)
        length = (bounds[1:].clamp(max=total) - first).clamp(0, T)
    else:
        B, T = given.q.shape[:2]
        first = torch.arange(B, device=device) * T
        length = torch.full((B,), T, device=device)
    token = torch.arange(T, device=device)
    return torch.where(token < length[:, None], first[:, None] + token, -1)


def _cells(contract: Contract, given: Given, rows: Tensor) -> Tensor:
    """[B, T]: where the state after each token goes, were every token real."""
    B, T = rows.shape
    cells = torch.full_like(rows, -1)
    if contract.intermediate == "none":
        return cells
    if contract.intermediate == "slots":
        named = given.index("slot_index", given.state.shape[0])[:, :T]
        cells[:, : named.shape[1]] = named
        return cells
    buffer = given.tensor("intermediate")
    steps = buffer.shape[1]
    row = torch.arange(B, device=rows.device)
    if contract.intermediate == "indexed":
        row = given.index("slot_index", buffer.shape[0])
    token = torch.arange(T, device=rows.device)
    return torch.where((row[:, None] >= 0) & (token < steps), row[:, None] * steps + token, -1)
