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

from gdntune.checking import heads, ring
from gdntune.checking.places import Given, Places, places, present
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


def normalised(x: Tensor) -> Tensor:
    """x over its Euclidean norm along the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + NORM_EPSILON)


def gated_norm(x: Tensor, weight: Tensor, gate: Tensor, epsilon: float, kind: str) -> Tensor:
    """x [..., V] over its root mean square, times weight [V] and silu(gate) or sigmoid(gate)."""
    factor = torch.sigmoid(gate) if kind == "sigmoid" else gate * torch.sigmoid(gate)
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + epsilon) * weight * factor


def convolution(contract: Contract, given: Given, where: Places, dtype: torch.dtype) -> Tensor:
    """The convolution of each token's channels [B, T, D], in a compute dtype and not rounded."""
    state, width = given.tensor("conv_state"), contract.conv_width
    weight = given.tensor("conv_weight").detach().to(dtype)
    window = state[where.window.clamp(min=0)]
    if contract.conv_window == "ring":
        at = given.tensor("conv_position").to(torch.int64)[:, None]
        rows = (at + torch.arange(1 - width, 0, device=state.device)) % state.shape[1]
    else:
        rows = where.oldest[:, None] + torch.arange(width - 1, device=state.device)
    window = window.gather(1, rows[..., None].expand(-1, -1, state.shape[2]))
    window = torch.where((where.window >= 0)[:, None, None], window.to(dtype), 0)
    taps = torch.cat((window, _tokens(given.tensor("mixed_qkv"), where, dtype)), 1)
    T = where.rows.shape[1]
    y = sum(
        (taps[:, j : j + T] * weight[:, j] for j in range(1, width)), taps[:, :T] * weight[:, 0]
    )
    if contract.conv_bias:
        y = y + given.tensor("conv_bias").detach().to(dtype)
    return y * torch.sigmoid(y) if contract.conv == "silu" else y


def convolved(
    contract: Contract, given: Given, where: Places, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [B, T, H, K] and v [B, T, HV, V] behind the convolution, rounded as the unfused path
    rounds them. fp32 is left as it is: a kernel's own sum is off by more than that rounding.
    """
    y = convolution(contract, given, where, dtype)
    if contract.input_dtype != "fp32":
        y = y.to(DTYPES[contract.input_dtype]).to(dtype)
    sizes = [x.shape[2] * x.shape[3] for x in (given.q, given.k, given.v)]
    q, k, v = y.split(sizes, -1)
    return tuple(
        x.unflatten(-1, like.shape[2:])
        for x, like in zip((q, k, v), (given.q, given.k, given.v), strict=True)
    )


def softplus(x: Tensor, beta: float, threshold: float) -> Tensor:
    """log(1 + exp(beta x)) / beta, and x itself where beta x > threshold, so nothing overflows."""
    return torch.nn.functional.softplus(x, beta, threshold)


def rated_softplus(A_log: Tensor, x: Tensor, beta: float, threshold: float) -> Tensor:
    """exp(A_log) softplus(x), also where the first overflows and the second vanishes: there
    softplus is exp, and one exp serves both.
    """
    scaled = beta * x
    # Below -40, log(1 + exp(x)) is exp(x) to fp64's last bit but for 2e-18 of it.
    vanishing = (A_log + scaled).exp() / beta
    return torch.where(
        (A_log > LARGE_LOG) & (scaled < -40), vanishing, A_log.exp() * softplus(x, beta, threshold)
    )


def rated(A_log: Tensor, x: Tensor) -> Tensor:
    """exp(A_log) x, also where the first overflows: in two factors, which reach as far as any x
    above zero needs.
    """
    # exp(A_log / 2) twice: each factor is finite in fp32, and where their product is not, the
    # sigmoid that takes it is 0 or 1 long before.
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
        # The caller has made the log already, so A_log and dt_bias are not there.
        log_decay = x
    else:
        A_log, dt_bias = present(A_log, "A_log"), present(dt_bias, "dt_bias")
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
class Trace:
    """What was computed, and which of it each place holds in the end; -1 is a place that the call
    does not touch.

    output [n, HV, V] and states [m, HV, V, K], always K-last, in the compute dtype and unrounded.
    output_from [rows], state_from [slots], intermediate_from [rows*steps]: index into output or
    states, int64. output_tokens [n], state_tokens [m]: how many tokens of its request each has
    seen. zero [n]: outputs of padding, exactly zero. reach [n, HV]: the norm that an output row has
    where q meets the state at a random angle, norm(S) norm(q) / sqrt(K). The row itself can be as
    small as chance has it (a state of one token is u k^T, its outputs u (k.q)), what rounding loses
    cannot. With a norm it is what that norm comes to behind it. windows [w, D], windows_from
    [slots*rows]: rows of the convolution's windows. appended: what a ring gets.
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
    windows: Tensor | None = None
    windows_from: Tensor | None = None
    appended: ring.Kept | None = None


def _held(size: int, *writes: tuple[Tensor, Tensor]) -> Tensor:
    """What each of `size` places holds after writes of (place, id) in this order."""
    held = torch.full((size,), -1, dtype=torch.int64, device=writes[0][0].device)
    for place, identity in writes:
        written = place >= 0
        # Writes to one place come one after another, so the last stays, as in a kernel's order.
        held[place[written]] = identity[written]
    return held


def trace(
    contract: Contract,
    *,
    dtype: torch.dtype = torch.float64,
    requests: Tensor | None = None,
    **tensors: Any,
) -> Trace:
    """A call's results request by request, without a copy of the pool: what `decode` lays out.

    tensors: the fields of `Given`. requests [n] int64: compute these alone, the rest counts as
    untouched (so that a few requests of a large call can be judged).
    """
    contract, tensors = heads.packed(contract, tensors)
    given = Given(**tensors)
    where = places(contract, given)
    window = ring.window(contract, given, where.rows.shape[1]) if contract.ring else None
    if window is not None:
        # the state is written where the ring is folded into it, and nowhere else
        where = dataclasses.replace(where, final=torch.where(window.folds, where.final, -1))
    if requests is not None:
        where = where.of(requests)
        window = window.of(requests) if window is not None else None
        if given.conv_position is not None:
            given = dataclasses.replace(given, conv_position=given.conv_position[requests])
    if window is not None:
        return _ringed(contract, given, where, window, dtype)
    outputs, kept, reaches = _computed(contract, given, where, dtype)
    B, T = where.rows.shape
    device = given.q.device
    # Which of the kept states each place gets, as an index into all of them flattened.
    identity = torch.arange(B * kept.shape[1], device=device).view(B, -1)
    every = contract.intermediate != "none"
    each = [(where.cells[:, t], identity[:, t]) for t in range(T if every else 0)]
    # The final state is written last: its slot may be the column of a token before.
    in_pool = [*(each if contract.intermediate == "slots" else ()), (where.final, identity[:, -1])]
    buffer = None
    if contract.intermediate in ("dense", "indexed"):
        buffer = _held(given.tensor("intermediate").shape[:2].numel(), *each)
    length = where.real.sum(1, keepdim=True)
    seen = torch.minimum(torch.arange(1, T + 1, device=device), length)
    windows, windows_from = _windows(contract, given, where)
    of_rows = (where.rows, torch.arange(B * T, device=device).view(B, T))
    return Trace(
        output=outputs.flatten(0, 1),
        states=kept.flatten(0, 1),
        output_from=_held(given.v.shape[:2].numel(), of_rows),
        state_from=_held(given.state.shape[0], *in_pool),
        intermediate_from=buffer,
        output_tokens=seen.flatten(),
        state_tokens=seen[:, T - kept.shape[1] :].flatten(),
        zero=~where.real.flatten(),
        reach=reaches.flatten(0, 1),
        windows=windows,
        windows_from=windows_from,
    )


def _ringed(
    contract: Contract, given: Given, where: Places, window: ring.Window, dtype: torch.dtype
) -> Trace:
    """A call behind a ring: it starts from the state with the live entries in it, and that is what
    is written where they are folded.
    """
    start = start_states(contract, given, where, dtype)
    start = ring.folded(contract, given, where, window, start)
    outputs, after, reaches = _computed(contract, given, where, dtype, start, every=True)
    key = _tokens(given.k, where, dtype)
    inverse = torch.ones_like(key[..., 0])
    if given.use_qk_l2norm:
        inverse = torch.rsqrt((key * key).sum(-1) + NORM_EPSILON)
    inputs = (
        key, _tokens(given.v, where, dtype), inverse, *_gates_of(contract, given, where, dtype)
    )  # fmt: skip
    before = torch.cat((start[:, None], after[:, :-1]), 1)
    kept = ring.kept(contract, given, where, window, before, inputs)
    B, T = where.rows.shape
    token = torch.arange(B * T, device=start.device)
    return Trace(
        output=outputs.flatten(0, 1),
        states=start,
        output_from=_held(given.v.shape[:2].numel(), (where.rows, token.view(B, T))),
        state_from=_held(given.state.shape[0], (where.final, token[:B])),
        intermediate_from=None,
        output_tokens=kept.tokens,
        state_tokens=window.count,
        zero=~where.real.flatten(),
        reach=reaches.flatten(0, 1),
        appended=kept,
    )


def _windows(
    contract: Contract, given: Given, where: Places
) -> tuple[Tensor | None, Tensor | None]:
    """The rows that windows get, and which of them each of [slots*rows] has in the end."""
    if contract.conv == "none":
        return None, None
    state = given.tensor("conv_state")
    mixed = _tokens(given.tensor("mixed_qkv"), where, state.dtype)
    # the states of drafts and their rows are kept in the slots that were given for them
    slot = where.window if contract.intermediate == "slots" else where.final
    rows, token = state.shape[1], torch.arange(where.rows.shape[1], device=state.device)
    if contract.conv_window == "ring":
        values, real = mixed, where.real
        place = (given.tensor("conv_position").to(torch.int64)[:, None] + token) % rows
    else:
        values, real, place = _shifted(contract, where, state[where.window.clamp(min=0)], mixed)
        real &= (place >= 0) & (place < rows)
    cells = torch.where((slot[:, None] >= 0) & real, slot[:, None] * rows + place, -1).flatten()
    identity = torch.arange(cells.numel(), device=state.device)
    return values.flatten(0, 1), _held(state.shape[0] * rows, (cells, identity))


def _shifted(
    contract: Contract, where: Places, windows: Tensor, mixed: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of windows [B, rows, D] and the tokens' rows [B, T, D] behind them: all rows, which of them
    are real, and where each goes. Drafts move the window on by one row, since it is not known how
    many of them stay; other calls by their tokens.
    """
    old = contract.conv_width - 1
    length = where.real.sum(1, keepdim=True)
    taken = where.oldest[:, None] + torch.arange(old, device=mixed.device)
    before = windows.gather(1, taken[..., None].expand(-1, -1, windows.shape[2]))
    real = torch.cat(((length > 0).expand(-1, old), where.real), 1)
    step = 1 if contract.intermediate == "slots" else length
    place = torch.arange(old + mixed.shape[1], device=mixed.device) - step
    return torch.cat((before, mixed), 1), real, place.expand(real.shape)


def _computed(
    contract: Contract,
    given: Given,
    where: Places,
    dtype: torch.dtype,
    start: Tensor | None = None,
    every: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """By request, convolution and norm included: the outputs [B, T, HV, V]; the states
    [B, T, HV, V, K] after each token, or the last alone [B, 1, ...] where none between is wanted;
    the outputs' reach [B, T, HV] (see `Trace`). start [B, HV, V, K]: in place of the pool's states;
    every: each token's state, whether or not the call stores it.
    """
    every = every or contract.intermediate != "none"
    real, HV, K = where.real, given.v.shape[2], given.q.shape[-1]
    if contract.conv == "none":
        query, key, value = (_tokens(x, where, dtype) for x in (given.q, given.k, given.v))
    else:
        query, key, value = convolved(contract, given, where, dtype)
    if given.use_qk_l2norm:
        query, key = normalised(query), normalised(key)
    query = query * (K**-0.5 if given.scale is None else given.scale)
    query, key = (x.repeat_interleave(HV // x.shape[2], 2) for x in (query, key))
    decay, beta = _gates_of(contract, given, where, dtype)
    if start is None:
        start = start_states(contract, given, where, dtype)
    outputs, states, reaches = [], [], []
    T = where.rows.shape[1]
    # Token by token: T states of a large call in fp64 would not fit beside the call itself.
    for t in range(T):
        one = slice(t, t + 1)
        o, after = recurrence(
            query[:, one], key[:, one], value[:, one], decay[:, one], beta[:, one], start
        )
        start = after[:, 0]
        # 0 * NaN: a padding request may have met a NaN in the slot that stood in for none
        outputs.append(torch.where(real[:, t, None, None], o[:, 0], 0))
        reaches.append(start.flatten(-2).norm(dim=-1) * query[:, t].norm(dim=-1) * K**-0.5)
        if every or t == T - 1:
            states.append(start)
    output, reach = torch.stack(outputs, 1), torch.stack(reaches, 1)
    if contract.norm != "none":
        output, reach = _normed(contract, given, where, output, reach)
    return output, torch.stack(states, 1), reach


def start_states(contract: Contract, given: Given, where: Places, dtype: torch.dtype) -> Tensor:
    """The pool's states that requests start from, [B, HV, V, K]; any where there is none."""
    start = given.state[where.start.clamp(min=0)].to(dtype)
    return start if contract.layout == "k_last" else start.transpose(-1, -2)


def _normed(
    contract: Contract, given: Given, where: Places, output: Tensor, reach: Tensor
) -> tuple[Tensor, Tensor]:
    """The outputs behind the gated norm, and their reach: what an error of that norm becomes."""
    gate = _tokens(given.tensor("output_gate"), where, output.dtype)
    weight = given.tensor("norm_weight").detach().to(output.dtype)
    rstd = torch.rsqrt((output * output).mean(-1) + given.norm_eps)
    factors = gated_norm(torch.ones_like(output), weight, gate, 0.0, contract.norm)
    normed = gated_norm(output, weight, gate, given.norm_eps, contract.norm)
    return normed, reach * rstd * factors.norm(dim=-1) * contract.V**-0.5


def _tokens(x: Tensor, where: Places, dtype: torch.dtype) -> Tensor:
    """x [B, T, ...] in the compute dtype, zero where there is no token: what lies there may be
    NaN.
    """
    if x.shape[0] * x.shape[1] == 0:
        return torch.zeros((*where.rows.shape, *x.shape[2:]), dtype=dtype, device=x.device)
    row = where.rows.clamp(min=0)
    taken = x[row // x.shape[1], row % x.shape[1]].to(dtype)
    return torch.where(where.real.view(*row.shape, *[1] * (x.ndim - 2)), taken, 0)


def _gates_of(
    contract: Contract, given: Given, where: Places, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The decay and beta of each token. Where there is none the state passes unchanged, so the last
    state of every request is its final one.
    """
    decay, beta = gates(
        contract,
        _tokens(given.a, where, dtype),
        _tokens(given.b, where, dtype),
        None if given.A_log is None else given.A_log.detach().to(dtype),
        None if given.dt_bias is None else given.dt_bias.detach().to(dtype),
        given.softplus_beta,
        given.softplus_threshold,
        given.lower_bound,
        given.beta_scale,
    )
    real = where.real[..., None]
    return torch.where(real[..., None], decay, 1), torch.where(real, beta, 0)


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
    rounds it. All states are read before any is written. Rows of the output that belong to no
    request keep what `output` held, zeros without one.
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
