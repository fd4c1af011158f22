"""The truth: the gated delta rule in plain PyTorch, in fp64 or fp32, and the calling convention of
`spec.py` around it.

`recurrence` is the formula. `gates` makes its decay and beta, `places` says where each request
reads and writes, `trace` joins them, and `decode` lays the result out as a kernel would. No input
is ever written to. Everything runs on CPU and CUDA tensors.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
NORM_EPSILON = 1e-6
# exp of it is an fp32 number, and its product with a softplus of exp(-40) still ends every decay
LARGE_LOG = 88.0


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The formula, token by token: S <- decay S; u <- beta (v - S k); S <- S + u k^T; o <- S q.

    q, k [B, T, HV, K], normalised and q scaled; v [B, T, HV, V]; decay [B, T, HV, K], or [B, T, HV,
    1] for one a head; beta [B, T, HV]; state S [B, HV, V, K]. All of one dtype, which is the dtype
    of the arithmetic. Returns the outputs [B, T, HV, V] and the states after each token [B, T, HV,
    V, K].
    """
    outputs, states = [], []
    for t in range(q.shape[1]):
        key, query = k[:, t, :, None, :], q[:, t, :, None, :]
        state = decay[:, t, :, None, :] * state
        u = beta[:, t, :, None] * (v[:, t] - (state * key).sum(-1))
        state = state + u[..., None] * key
        outputs.append((state * query).sum(-1))
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def _present(x: Tensor | None, name: str) -> Tensor:
    """x, or UnsupportedProblem where it is None."""
    if x is None:
        raise UnsupportedProblem(f"{name}=None: this contract has {name}, pass the tensor")
    return x


def normalised(x: Tensor) -> Tensor:
    """x over its Euclidean norm along the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def softplus(x: Tensor, beta: float, threshold: float) -> Tensor:
    """log(1 + exp(beta x)) / beta, and x itself where beta x > threshold, so nothing overflows."""
    return torch.nn.functional.softplus(x, beta, threshold)


def rated_softplus(A_log: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """exp(A_log) softplus(x), also where the first overflows and the second vanishes: there
    softplus is exp, and one exp serves both.
    """
    scaled = beta * x
    vanishing = (A_log + scaled).exp() / beta
    return torch.where(
        (A_log > LARGE_LOG) & (scaled < -40), vanishing, A_log.exp() * softplus(x, beta, threshold)
    )


def rated(A_log: Tensor, x: Tensor) -> Tensor:
    """exp(A_log) x, also where the first overflows: in two factors, which reach as far as any x
    above zero needs.
    """
    half = (A_log.clamp(max=2 * LARGE_LOG) / 2).exp()
    return torch.where(A_log > LARGE_LOG, x * half * half, A_log.exp() * x)


def gates(
    contract: Contract,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None,
    dt_bias: Tensor | None,
    softplus_beta: float,
    softplus_threshold: float,
    lower_bound: float,
    beta_scale: float,
) -> tuple[Tensor, Tensor]:
    """The decay [..., HV, 1] (GDN) or [..., HV, K] (KDA) and beta [..., HV], of tensors in one
    compute dtype.

    a [..., HV] (GDN) or [..., HV, K] (KDA); b [..., HV]; A_log [HV] or [H]; dt_bias [HV] or [H],
    KDA: [HV, K] or [H, K].
    """
    HV = b.shape[-1]
    x = a if contract.op == "kda_decode" else a[..., None]
    if contract.gate == "log":
        log_decay = x
    else:
        A_log, dt_bias = _present(A_log, "A_log"), _present(dt_bias, "dt_bias")
        A_log = A_log.repeat_interleave(HV // A_log.shape[0], 0)[:, None]
        bias = dt_bias.repeat_interleave(HV // dt_bias.shape[0], 0)
        x = x + (bias if contract.op == "kda_decode" else bias[:, None])
        if contract.gate == "lower_bound":
            log_decay = lower_bound * torch.sigmoid(rated(A_log, x))
        else:
            log_decay = -rated_softplus(A_log, x, softplus_beta, softplus_threshold)
    beta = torch.sigmoid(b) if contract.beta == "logit" else b
    return log_decay.exp(), beta * beta_scale


@dataclasses.dataclass(frozen=True)
class Places:
    """Where each request reads and writes; int64, -1 is nowhere.

    start [B]: slot of the state to start from; -1 makes the request padding: nothing is written but
    zeros to its output rows. rows [B, T]: row of q, k, v, a, b and output, both leading dimensions
    taken as one. final [B]: slot of the final state. cells [B, T]: slot (`slots`) or row*steps +
    step of the intermediate buffer.
    """

    start: Tensor
    rows: Tensor
    final: Tensor
    cells: Tensor


def places(
    contract: Contract,
    *,
    state: Tensor,
    q: Tensor,
    read_index: Tensor | None = None,
    write_index: Tensor | None = None,
    slot_index: Tensor | None = None,
    accepted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    intermediate: Tensor | None = None,
    null_index: int = -1,
) -> Places:
    """The places of a call, with every clamp that the convention states.

    An index that is negative, `null_index` or outside its tensor is padding. Ragged lengths are
    clamped to 0..tokens and to the rows there are; a request of length 0 has its start state as
    final state. accepted is clamped to 1..columns. A token beyond the columns of slot_index, or
    beyond the buffer's steps, writes no intermediate state.
    """
    device, slots = q.device, state.shape[0]

    def inside(index: Tensor, size: int) -> Tensor:
        index = index.to(torch.int64)
        return torch.where((index >= 0) & (index < size) & (index != null_index), index, -1)

    if contract.ragged:
        bounds, total = _present(cu_seqlens, "cu_seqlens").to(torch.int64), q.shape[1]
        B, T = bounds.numel() - 1, contract.tokens
        first = bounds[:-1].clamp(0, total)
        length = (bounds[1:].clamp(max=total) - first).clamp(0, T)
    else:
        B, T = q.shape[:2]
        first = torch.arange(B, device=device) * T
        length = torch.full((B,), T, device=device)
    request, token = torch.arange(B, device=device), torch.arange(T, device=device)
    real = token < length[:, None]
    rows = torch.where(real, first[:, None] + token, -1)

    if contract.intermediate == "slots":
        slot_index = _present(slot_index, "slot_index")
        column = torch.zeros_like(request)
        if contract.accepted:
            column = (
                _present(accepted, "accepted").to(torch.int64).clamp(1, slot_index.shape[1]) - 1
            )
        start = inside(slot_index.gather(1, column[:, None])[:, 0], slots)
    elif contract.pool:
        start = inside(_present(read_index, "read_index"), slots)
    else:
        start = request
    live = start >= 0

    final = torch.full_like(start, -1)
    if contract.mode == "update":
        final = start
        if contract.pool:
            final = torch.where(live, inside(_present(write_index, "write_index"), slots), -1)

    cells = torch.full_like(rows, -1)
    if contract.intermediate == "slots":
        slot_index = _present(slot_index, "slot_index")
        columns = min(T, slot_index.shape[1])
        cells[:, :columns] = inside(slot_index[:, :columns], slots)
    elif contract.intermediate != "none":
        intermediate = _present(intermediate, "intermediate")
        steps = intermediate.shape[1]
        row = request
        if contract.intermediate == "indexed":
            row = inside(_present(slot_index, "slot_index"), intermediate.shape[0])
        cells = torch.where((row[:, None] >= 0) & (token < steps), row[:, None] * steps + token, -1)
    cells = torch.where(real & live[:, None], cells, -1)
    return Places(start, rows, final, cells)


@dataclasses.dataclass(frozen=True)
class Trace:
    """What was computed, and which of it each place holds in the end; -1 is a place that the call
    does not touch.

    output [n, HV, V] and states [m, HV, V, K], always K-last, in the compute dtype and unrounded.
    output_from [rows], state_from [slots], intermediate_from [rows*steps]: index into output or
    states, int64. output_tokens [n], state_tokens [m]: how many tokens of its request each has
    seen. zero [n]: outputs of padding, exactly zero. reach [n, HV]: the norm that an output row has
    where q meets the state at a random angle, norm(S) norm(q) / sqrt(K). The row itself can be as
    small as chance has it (a state of one token is u k^T, its outputs u (k.q)), what rounding loses
    cannot.
    """

    output: Tensor
    states: Tensor
    output_from: Tensor
    state_from: Tensor
    intermediate_from: Tensor | None
    output_tokens: Tensor
    state_tokens: Tensor
    zero: Tensor
    reach: Tensor


def _held(size: int, *writes: tuple[Tensor, Tensor]) -> Tensor:
    """What each of `size` places holds after writes of (place, id) in this order."""
    held = torch.full((size,), -1, dtype=torch.int64, device=writes[0][0].device)
    for place, identity in writes:
        written = place >= 0
        held[place[written]] = identity[written]
    return held


def trace(
    contract: Contract,
    *,
    state: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    read_index: Tensor | None = None,
    write_index: Tensor | None = None,
    slot_index: Tensor | None = None,
    accepted: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    intermediate: Tensor | None = None,
    output: Tensor | None = None,
    scale: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    lower_bound: float = -5.0,
    beta_scale: float = 1.0,
    null_index: int = -1,
    use_qk_l2norm: bool | int = True,
    dtype: torch.dtype = torch.float64,
    requests: Tensor | None = None,
) -> Trace:
    """A call's results request by request, without a copy of the pool: what `decode` lays out.

    Arguments are those of the calling convention; scale None is K**-0.5. requests [n] int64:
    compute these alone, the rest counts as untouched (so that a few requests of a large call can be
    judged).
    """
    where = places(
        contract,
        state=state,
        q=q,
        read_index=read_index,
        write_index=write_index,
        slot_index=slot_index,
        accepted=accepted,
        cu_seqlens=cu_seqlens,
        intermediate=intermediate,
        null_index=null_index,
    )
    if requests is not None:
        where = Places(
            where.start[requests],
            where.rows[requests],
            where.final[requests],
            where.cells[requests],
        )
    B, T = where.rows.shape
    HV = v.shape[2]
    real = (where.rows >= 0) & (where.start >= 0)[:, None]

    def tokens_of(x: Tensor) -> Tensor:
        """[B, T, ...] in the compute dtype, zero where there is no token: what lies there may be
        NaN.
        """
        if x.shape[0] * x.shape[1] == 0:
            return torch.zeros((B, T, *x.shape[2:]), dtype=dtype, device=x.device)
        row = where.rows.clamp(min=0)
        x = x[row // x.shape[1], row % x.shape[1]].to(dtype)
        return torch.where(real.view(B, T, *[1] * (x.ndim - 2)), x, 0)

    query, key = tokens_of(q), tokens_of(k)
    if use_qk_l2norm:
        query, key = normalised(query), normalised(key)
    query = query * (q.shape[-1] ** -0.5 if scale is None else scale)
    query, key = (x.repeat_interleave(HV // x.shape[2], 2) for x in (query, key))
    decay, beta = gates(
        contract,
        tokens_of(a),
        tokens_of(b),
        None if A_log is None else A_log.detach().to(dtype),
        None if dt_bias is None else dt_bias.detach().to(dtype),
        softplus_beta,
        softplus_threshold,
        lower_bound,
        beta_scale,
    )
    # where there is no token the state passes unchanged, so the last state of every request is its
    # final one
    decay = torch.where(real[..., None, None], decay, 1)
    beta = torch.where(real[..., None], beta, 0)
    start = state[where.start.clamp(min=0)].to(dtype)
    if contract.layout == "v_last":
        start = start.transpose(-1, -2)
    every = contract.intermediate != "none"
    value = tokens_of(v)
    outputs, states, reaches = [], [], []
    for t in range(T):
        one = slice(t, t + 1)
        o, after = recurrence(
            query[:, one], key[:, one], value[:, one], decay[:, one], beta[:, one], start
        )
        start = after[:, 0]
        # 0 * NaN: a padding request may have met a NaN in the slot that stood in for none
        outputs.append(torch.where(real[:, t, None, None], o[:, 0], 0))
        reaches.append(
            start.flatten(-2).norm(dim=-1) * query[:, t].norm(dim=-1) * q.shape[-1] ** -0.5
        )
        if every or t == T - 1:
            states.append(start)

    rows = _held(
        v.shape[0] * v.shape[1], (where.rows, torch.arange(B * T, device=q.device).view(B, T))
    )
    kept = len(states)
    last = torch.arange(B, device=q.device) * kept + kept - 1
    each = [
        (where.cells[:, t], torch.arange(B, device=q.device) * kept + t)
        for t in range(T if every else 0)
    ]
    in_pool = each if contract.intermediate == "slots" else []
    buffer = None
    if contract.intermediate in ("dense", "indexed"):
        intermediate = _present(intermediate, "intermediate")
        buffer = _held(intermediate.shape[0] * intermediate.shape[1], *each)
    length = real.sum(1, keepdim=True)
    seen = torch.minimum(torch.arange(1, T + 1, device=q.device), length)
    return Trace(
        torch.stack(outputs, 1).flatten(0, 1),
        torch.stack(states, 1).flatten(0, 1),
        rows,
        _held(state.shape[0], *in_pool, (where.final, last)),
        buffer,
        seen.flatten(),
        seen[:, T - kept :].flatten(),
        ~real.flatten(),
        torch.stack(reaches, 1).flatten(0, 1),
    )


@dataclasses.dataclass(frozen=True)
class Result:
    """Fresh tensors of the shapes that a kernel was given, in the compute dtype; what a call leaves
    alone is as it was.
    """

    output: Tensor
    state: Tensor
    intermediate: Tensor | None

    def stored(self, contract: Contract) -> "Result":
        """The same, rounded to the dtypes that a kernel stores."""
        kept = DTYPES[contract.state_dtype]
        buffer = None if self.intermediate is None else self.intermediate.to(kept)
        return Result(self.output.to(DTYPES[contract.input_dtype]), self.state.to(kept), buffer)


def decode(contract: Contract, *, dtype: torch.dtype = torch.float64, **tensors: Any) -> Result:
    """What a kernel leaves behind, computed in `dtype`; arguments by the names of DECODE_ARGUMENTS,
    those of `trace`.

    The state stays in `dtype` between the tokens of a call and is returned unrounded: `stored`
        rounds it. All states are read
    before any is written. Rows of the output that belong to no request keep what `output` held,
    zeros without one.
    """
    t = trace(contract, dtype=dtype, **tensors)
    given, buffer = tensors.get("output"), tensors.get("intermediate")

    def laid(base: Tensor, leading: int, source: Tensor, values: Tensor) -> Tensor:
        laid_out = base.to(dtype, copy=True, memory_format=torch.contiguous_format)
        flat = laid_out.flatten(0, leading - 1)
        flat[source >= 0] = values[source[source >= 0]]
        return laid_out

    states = t.states if contract.layout == "k_last" else t.states.transpose(-1, -2)
    return Result(
        laid(
            torch.zeros_like(tensors["v"]) if given is None else given, 2, t.output_from, t.output
        ),
        laid(tensors["state"], 1, t.state_from, states),
        (
            None
            if buffer is None or t.intermediate_from is None
            else laid(buffer, 2, t.intermediate_from, states)
        ),
    )
