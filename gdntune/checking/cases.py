"""Inputs for kernels: tensors like a model's, for checking and for timing, awkward where asked.

Every number comes from a torch.Generator of the device that the tensors live on, so a seed gives
the same case again on the same kind of device. What a call writes is poisoned with NaN, and so is
what it must not read.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from gdntune.checking.reference import DTYPES
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.spec import DECODE_ARGUMENTS
from gdntune.problem import Contract, Problem, check_contract, problem_fault
from gdntune.sol import FloorForm

STATE_SPREAD = 0.5
# Beyond this many elements a tensor is a repeated block: normal_ makes 50 to 100 million elements a
# second on a CPU core, and a
# table's largest states have billions. An odd length, so that neighbouring slots differ.
BLOCK = {"cpu": (1 << 20) + 1237, "cuda": (1 << 26) + 1237}


def whole(x: Tensor) -> Tensor:
    """The whole storage of x as a flat tensor that shares it: gaps between rows and slots included."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


@dataclasses.dataclass
class Case:
    """The arguments of one call, in the order and by the names of DECODE_ARGUMENTS; a tensor that
    the contract lacks is None.
    """

    problem: Problem
    state: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor | None
    dt_bias: Tensor | None
    read_index: Tensor | None
    write_index: Tensor | None
    slot_index: Tensor | None
    accepted: Tensor | None
    cu_seqlens: Tensor | None
    intermediate: Tensor | None
    output: Tensor
    scale: float
    softplus_beta: float = 1.0
    softplus_threshold: float = 20.0
    lower_bound: float = -5.0
    beta_scale: float = 1.0
    null_index: int = -1
    use_qk_l2norm: int = 1

    @property
    def contract(self) -> Contract:
        """The problem's contract."""
        return self.problem.contract

    def tensors(self) -> dict[str, Any]:
        """Tensors and scalars by name, as `reference.decode` takes them."""
        return {name: getattr(self, name) for name in DECODE_ARGUMENTS}

    def arguments(self) -> tuple[Any, ...]:
        """What a kernel is called with. int64 indices go as the int32 view of their low words: no
        copy, twice the stride.
        """
        return tuple(
            (
                x.unsqueeze(-1).view(torch.int32)[..., 0]
                if isinstance(x, Tensor) and x.dtype == torch.int64
                else x
            )
            for x in self.tensors().values()
        )

    def clone(self) -> "Case":
        """A case of its own: whole storages are copied, so strides, gaps and tensors that share a
        storage stay as they are.
        """
        storages: dict[int, Tensor] = {}

        def copy(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            key = x.untyped_storage().data_ptr()
            if key not in storages or storages[key].dtype != x.dtype:
                storages[key] = whole(x).clone()
            return storages[key].as_strided(x.shape, x.stride(), x.storage_offset())

        return dataclasses.replace(self, **{name: copy(x) for name, x in self.tensors().items()})

    def restore(self, before: "Case") -> None:
        """Copies what a call writes (state, intermediate, output) back from a clone made earlier;
        no address changes.
        """
        for name in ("state", "intermediate", "output"):
            mine, kept = getattr(self, name), getattr(before, name)
            if mine is not None:
                whole(mine).copy_(whole(kept))


class _Draw:
    """Random tensors of one device and one seed."""

    def __init__(self, device: torch.device, seed: int):
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def fill(self, x: Tensor, spread: float = 1.0) -> Tensor:
        """x, contiguous, filled in place with N(0, spread^2)."""
        flat, block = x.view(-1), BLOCK[self.device.type]
        done = min(flat.numel(), block)
        flat[:done].normal_(0, spread, generator=self.generator)
        while done < flat.numel():
            more = min(done, flat.numel() - done)
            flat[done : done + more].copy_(flat[:more])
            done += more
        return x

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """N(0, 1), made in the dtype it is for."""
        return self.fill(torch.empty(shape, dtype=dtype, device=self.device))

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """U(low, high) in fp32."""
        return torch.empty(shape, device=self.device).uniform_(low, high, generator=self.generator)


@dataclasses.dataclass
class _Slots:
    """Index tensors as lists, and what they need. guard: a slot that a padding request names but
    must not write.
    """

    start: list[int]
    final: list[int]
    columns: list[list[int]]
    slots: int
    padding: set[int]


def _assign_slots(
    problem: Problem,
    columns: int,
    pick: random.Random,
    accepted: list[int],
    *,
    slots: int | None,
    padding: float,
    skipped: float,
    out_of_range: bool,
    permute: bool,
    split: bool,
    null_index: int,
) -> _Slots:
    """Which slots each request reads and writes: distinct ones, so no request's result hangs on the
    order of others.
    """
    c, B = problem.contract, problem.B
    requests = range(B)
    padded = set(pick.sample(requests, min(B, max(1, round(padding * B))))) if padding else set()
    if padded and not c.pool:
        raise UnsupportedProblem(
            f"padding={padding} without a pool: only an index marks padding; pass padding=0 or"
            " pool=True"
        )
    own_final = c.writes_index and (split or c.intermediate == "slots")
    each = (columns if c.intermediate == "slots" else 1) + own_final
    needed = B * each + (1 if padded else 0)
    given = slots if slots is not None else needed + (1 if null_index >= 0 and c.pool else 0)
    free = [s for s in range(given) if s != null_index or not c.pool]
    if len(free) < needed:
        raise UnsupportedProblem(
            f"slots={given}: {B} requests of {each} slots each need {needed}, without"
            f" null_index={null_index}; pass more slots"
        )
    if permute and c.pool:
        pick.shuffle(free)
    names = iter(free)
    guard = next(names) if padded else -1
    nowhere = (
        ([null_index] if null_index >= 0 else [])
        + [-1]
        + ([given, given + 2**20] if out_of_range else [])
        + [-7]
    )

    def lost() -> int:
        """An index that is padding, each kind in its turn."""
        nowhere.append(nowhere.pop(0))
        return nowhere[-1]

    def first_column(n: int) -> int:
        """The column that names the start slot of request n."""
        return min(max(accepted[n], 1), columns) - 1 if c.accepted else 0

    plan = _Slots([], [], [], given, padded)
    whole_ones = [n for n in requests if n not in padded]
    skipping = (
        set(pick.sample(whole_ones, min(len(whole_ones), max(1, round(skipped * B)))))
        if skipped
        else set()
    )
    for n in requests:
        row = [next(names) for _ in range(columns)] if c.intermediate == "slots" else []
        start = row[first_column(n)] if row else next(names)
        final = next(names) if own_final else start
        if n in padded:
            # every other one names a slot that it would be free to write, if it were not padding
            start, final = lost(), guard if n % 2 else lost()
            if row:
                row = [guard if n % 2 else lost() for _ in row]
                row[first_column(n)] = start
        elif n in skipping:
            final = lost()
            spare = [t for t in range(len(row)) if t != first_column(n)]
            if spare:
                row[pick.choice(spare)] = lost()
        plan.start.append(start)
        plan.final.append(final)
        plan.columns.append(row)
    return plan


def make_case(
    problem: Problem,
    device: str | torch.device = "cpu",
    seed: int = 0,
    *,
    slots: int | None = None,
    padding: float = 0.0,
    skipped: float = 0.0,
    out_of_range: bool = False,
    permute: bool = True,
    split: bool = False,
    index_dtype: torch.dtype = torch.int32,
    strided_indices: bool = False,
    slot_stride_pad: int = 0,
    packed_qkv: bool = False,
    strided_gates: bool = False,
    extra_steps: int = 0,
    extra_rows: int = 0,
    lengths: Sequence[int] | None = None,
    tail_rows: int = 0,
    null_index: int = -1,
    use_qk_l2norm: bool = True,
    neg_eigval: bool = False,
    parameters_by_head: Literal["HV", "H"] = "HV",
    scale: float | None = None,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    lower_bound: float = -5.0,
    gate_shift: float = 0.0,
    extreme_gates: bool = False,
) -> Case:
    """A case of a problem; the defaults are a plain call whose pool has just the slots it needs, in
    shuffled order.

    slots: size of the pool (or rows of the state). padding: share of requests that are padding, at
        least one where above 0;
    their inputs are NaN. skipped: share of requests that lack a place to write (final slot, buffer
    row or one column).
    out_of_range: indices beyond their tensor are among those that mean padding. permute: shuffled
        slots. split: the final state
    goes to another slot than it came from. strided_indices: indices are columns of wider tensors.
    slot_stride_pad: extra elements
    between slots, rows and steps (a multiple of 16 bytes, which kernels load at once). packed_qkv:
    q, k, v are slices of one
    tensor. strided_gates: a and b lie in wider tensors. extra_steps, extra_rows: of the buffer
    beyond tokens and B (`slots`: extra
    columns). lengths: tokens of each ragged request (default: all of them, full); tail_rows: packed
    rows beyond the last request.
    parameters_by_head: whether A_log and dt_bias are [HV] or [H]. gate_shift: added to a, 2 makes
        decays of e^-0.4 to e^-4, which
    show errors of the gate best. extreme_gates: some gates at which exp overflows or vanishes.
    Raises UnsupportedProblem for an illegal problem, and where slots or padding cannot be had.
    """
    if fault := problem_fault(problem):
        raise UnsupportedProblem(fault)
    c, B, H, HV = problem.contract, problem.B, problem.H, problem.HV
    T, K, V, device = c.tokens, c.K, c.V, torch.device(device)
    draw, pick = _Draw(device, seed), random.Random(seed)
    inputs, kept = DTYPES[c.input_dtype], DTYPES[c.state_dtype]
    head = (V, K) if c.layout == "k_last" else (K, V)

    # who reads and writes what
    columns = T + extra_steps if c.intermediate == "slots" else 0
    accepted = [pick.randint(0, columns + 1) for _ in range(B)] if c.accepted else []
    plan = _assign_slots(
        problem,
        columns,
        pick,
        accepted,
        slots=slots,
        padding=padding,
        skipped=skipped,
        out_of_range=out_of_range,
        permute=permute,
        split=split,
        null_index=null_index,
    )

    def index(values: Sequence[Any]) -> Tensor:
        x = torch.tensor(values, dtype=index_dtype, device=device)
        # a column of a wider tensor, whose other columns hold what must not be taken for it
        return (
            torch.stack((torch.full_like(x, 2**20), x, torch.zeros_like(x)), -1)[..., 1]
            if strided_indices
            else x
        )

    slot_index = intermediate = None
    if c.intermediate == "slots":
        slot_index = index(plan.columns)
    elif c.intermediate != "none":
        rows, steps = B + extra_rows, T + extra_steps
        if c.intermediate == "indexed":
            order = pick.sample(range(rows), B) if permute else list(range(B))
            if null_index >= 0:
                order = [-1 if r == null_index else r for r in order]
            for n in pick.sample(range(B), max(1, round(skipped * B))) if skipped else ():
                order[n] = rows if out_of_range else -1
            slot_index = index(order)
        size = HV * K * V
        padded = torch.full(
            (rows, steps, size + slot_stride_pad), math.nan, dtype=kept, device=device
        )
        intermediate = padded[..., :size].unflatten(-1, (HV, *head))
    if lengths is None:
        lengths = [T] * B
    if len(lengths) != B or not all(0 <= n <= T for n in lengths):
        raise UnsupportedProblem(
            f"lengths={list(lengths)}: expected B={B} integers from 0 to tokens={T}"
        )
    ends = [0]
    for n in lengths:
        ends.append(ends[-1] + n)
    rows_of = (1, ends[-1] + tail_rows) if c.ragged else (B, T)

    # what flows
    if packed_qkv:
        qkv = draw.normal(*rows_of, 2 * H * K + HV * V, dtype=inputs)
        q, k, v = qkv.split((H * K, H * K, HV * V), -1)
        q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    else:
        q, k, v = (
            draw.normal(*rows_of, n, size, dtype=inputs) for n, size in ((H, K), (H, K), (HV, V))
        )
    if not use_qk_l2norm:
        # keys near unit length, as a model would hand over, yet far enough from it that normalising
        # again shows
        norm = k.float().norm(dim=-1, keepdim=True).clamp(min=1e-3)
        k.copy_(k.float() / norm * draw.uniform(*rows_of, H, 1, low=0.6, high=1.0))
    a, A_log, dt_bias = _gate(
        draw, problem, rows_of, parameters_by_head, strided_gates, gate_shift, extreme_gates
    )
    b = draw.normal(*rows_of, HV)
    if c.beta == "given":
        b = b.sigmoid()
    b = _spread(b.to(DTYPES[c.beta_dtype]), strided_gates)
    stored = draw.fill(
        torch.empty(plan.slots, HV * K * V + slot_stride_pad, dtype=kept, device=device),
        STATE_SPREAD,
    )
    case = Case(
        problem=problem,
        state=stored[:, : HV * K * V].unflatten(-1, (HV, *head)),
        q=q,
        k=k,
        v=v,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias,
        read_index=index(plan.start) if c.reads_index else None,
        write_index=index(plan.final) if c.writes_index else None,
        slot_index=slot_index,
        accepted=index(accepted) if c.accepted else None,
        cu_seqlens=index(ends) if c.ragged else None,
        intermediate=intermediate,
        output=torch.full((*rows_of, HV, V), math.nan, dtype=inputs, device=device),
        scale=K**-0.5 if scale is None else scale,
        softplus_beta=softplus_beta,
        softplus_threshold=softplus_threshold,
        lower_bound=lower_bound,
        beta_scale=2.0 if neg_eigval else 1.0,
        null_index=null_index,
        use_qk_l2norm=int(use_qk_l2norm),
    )
    for x in (q, k, v, a, b):
        for n in plan.padding:
            (x[0, ends[n] : ends[n + 1]] if c.ragged else x[n]).fill_(math.nan)
        if c.ragged:
            x[0, ends[-1] :].fill_(math.nan)
    return case


def _spread(x: Tensor, strided: bool) -> Tensor:
    """x [..., HV], or the same values two elements apart in a tensor whose other half is NaN."""
    return torch.stack((x, torch.full_like(x, math.nan)), -1)[..., 0] if strided else x


def _gate(
    draw: _Draw,
    problem: Problem,
    rows_of: tuple[int, int],
    by: str,
    strided: bool,
    shift: float,
    extreme: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """a or g, A_log and dt_bias. As models initialise them: exp(A_log) in 1..16, softplus(dt_bias)
    in 0.001..0.1, a in N(0, 1).
    """
    c, per_k = problem.contract, problem.contract.op == "kda_decode"
    heads = problem.H if by == "H" else problem.HV
    width = (c.K,) if per_k else ()
    A_log = draw.uniform(heads, low=1.0, high=16.0).log()
    dt = draw.uniform(heads, *width, low=math.log(1e-3), high=math.log(0.1)).exp()
    dt_bias = dt.expm1().log()
    dtype = DTYPES[c.gate_dtype]
    a = draw.normal(*rows_of, problem.HV, *width, dtype=torch.float32 if c.gate == "log" else dtype)
    if shift:
        a += shift
    if c.gate == "lower_bound":
        # the sigmoid's slope is what tells gates apart: keep exp(A_log) * (a + dt_bias) within a
        # few units of it
        A_log, dt_bias = A_log / 4, draw.normal(heads, *width) / 4
    if extreme:
        # of every six gates in memory order two stay, two lie just above softplus' turn, one each
        # at +-100, beyond exp's fp32 range
        bias = dt_bias.repeat_interleave(problem.HV // heads, 0)
        sixth = torch.arange(a.numel(), device=draw.device).view(a.shape) % 6
        turn = (draw.uniform(*a.shape, low=0.4, high=0.6) - bias).to(a.dtype)
        a = torch.where(
            sixth % 3 == 1, turn, torch.where(sixth == 2, 100.0, torch.where(sixth == 5, -100.0, a))
        )
    if c.gate == "log":
        group = problem.HV // heads
        shape = (-1, *[1] * len(width))
        A, bias = A_log.exp().repeat_interleave(group, 0), dt_bias.repeat_interleave(group, 0)
        a = (-A.view(shape) * torch.nn.functional.softplus(a + bias)).to(dtype)
    if strided and per_k:
        gap = torch.full((*rows_of, 16), math.nan, dtype=dtype, device=draw.device)
        a = torch.cat((a.flatten(-2), gap), -1)[..., : problem.HV * c.K].unflatten(
            -1, (problem.HV, c.K)
        )
    elif strided:
        a = _spread(a, True)
    if not c.has_parameters:
        return a, None, None
    return a, A_log.to(DTYPES[c.A_log_dtype]), dt_bias.to(DTYPES[c.dt_bias_dtype])


def floor_case(
    problem: Problem, form: FloorForm, device: str | torch.device = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor, Tensor | None, float, Tensor]:
    """A floor kernel's arguments: state [B, HV*V*K], its slots [B] int32 in shuffled order, a
    buffer [B, steps, HV*V*K] or None, the factor 1.0 and a sink [1] fp32.

    `form` says how often the state is written in all: once in place where the mode is `update`, the
        rest into the buffer.
    """
    c, device = check_contract(problem.contract), torch.device(device)
    size, kept = problem.HV * c.K * c.V, DTYPES[c.state_dtype]
    state = _Draw(device, seed).fill(
        torch.empty(problem.B, size, dtype=kept, device=device), STATE_SPREAD
    )
    steps = form.writes - (c.mode == "update")
    buffer = (
        torch.full((problem.B, steps, size), math.nan, dtype=kept, device=device) if steps else None
    )
    slots = list(range(problem.B))
    random.Random(seed).shuffle(slots)
    named = torch.tensor(slots, dtype=torch.int32, device=device)
    return state, named, buffer, 1.0, torch.zeros(1, device=device)
