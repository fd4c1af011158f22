"""Inputs for kernels: tensors like a model's, for checking and for timing, awkward where asked.

Every number comes from a torch.Generator of the device that the tensors live on, so a seed gives
the same case again on the same kind of device. What a call writes is poisoned with NaN, and so is
what it must not read.
"""

import dataclasses
import math
import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from gdntune.checking import heads, ring
from gdntune.checking.draw import (
    Draw,
    draw_beta,
    draw_conv,
    draw_gate,
    draw_norm,
    draw_qkv,
    draw_ring,
    window_rows,
)
from gdntune.checking.options import Options
from gdntune.checking.places import Given, places
from gdntune.checking.reference import DTYPES, convolution
from gdntune.checking.slots import Slots, assign_slots, some
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.spec import arguments_of
from gdntune.problem import Contract, Problem, check_contract, problem_fault
from gdntune.sol import FloorForm

STATE_SPREAD = 0.5


def whole(x: Tensor) -> Tensor:
    """The whole storage of x as a flat tensor that shares it, gaps between rows and slots too."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage())


@dataclasses.dataclass
class Case:
    """The arguments of one call, in the order and by the names of `spec.arguments_of`; a tensor
    that the contract lacks is None.

    mixed [B*T, 2*H*K + HV*V]: q, k and v packed in rows besides, where a producer writes them so
    too, for calls that take them so.
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
    mixed: Tensor | None = None

    @property
    def contract(self) -> Contract:
        """The problem's contract."""
        return self.problem.contract

    def tensors(self) -> dict[str, Any]:
        """Tensors and scalars by name, as `reference.decode` takes them."""
        return {name: getattr(self, name) for name in arguments_of(self.contract)}

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

    def with_inputs(self, **flowing: Any) -> "Case":
        """The case with other inputs and output of the same shapes; of `mixed_qkv` q, k and v are
        made views. Of heads side by side a and b are given as the whole rows of `beside`.
        """
        mixed = flowing.get("mixed_qkv")
        if self.contract.conv_input == "interleaved":
            rows, beside = flowing["mixed_qkv"], flowing.pop("beside")
            flowing |= heads.views(self.problem, rows, beside, self.output_gate is not None)
        elif mixed is not None:
            like = {name: getattr(self, name) for name in "qkv"}
            parts = mixed.split([x.shape[2] * x.shape[3] for x in like.values()], -1)
            for (name, x), part in zip(like.items(), parts, strict=True):
                flowing[name] = part.unflatten(-1, x.shape[2:])
        return dataclasses.replace(self, **flowing)

    def restore(self, before: "Case") -> None:
        """Copies what a call writes (state, intermediate, output, windows) back from a clone made
        earlier; no address changes.
        """
        for name in ("state", "intermediate", "output", "conv_state", *ring.TENSORS):
            mine, kept = getattr(self, name), getattr(before, name)
            if mine is not None:
                whole(mine).copy_(whole(kept))


def make_case(
    problem: Problem, device: str | torch.device = "cpu", seed: int = 0, **options: Any
) -> Case:
    """A case of a problem. options: the fields of `Options`; without any, a plain call.

    Raises UnsupportedProblem for an illegal problem, and where slots or padding cannot be had.
    """
    if fault := problem_fault(problem):
        raise UnsupportedProblem(fault)
    if problem.contract.conv_input == "interleaved":
        return _side_by_side(problem, device, seed, options)
    o, c, B = Options(**options), problem.contract, problem.B
    place = torch.device(device)
    # Indices come from Python's generator, numbers from torch's: what a seed gives is the order in
    # which both are asked, so a new draw goes last, or behind an option that is off.
    draw, pick = Draw(place, seed), random.Random(seed)
    columns = c.tokens + o.extra_steps if c.intermediate == "slots" else 0
    accepted = [pick.randint(0, columns + 1) for _ in range(B)] if c.accepted else []
    plan = assign_slots(problem, o, columns, accepted, pick)

    named = plan.columns if columns else _buffer_rows(problem, o, pick)
    bounds = _bounds(problem, o)
    rows = (1, bounds[-1] + o.tail_rows) if c.ragged else (B, c.tokens)
    q, k, v = draw_qkv(draw, problem, rows, o)
    a, A_log, dt_bias = draw_gate(draw, problem, rows, o)
    b = draw_beta(draw, problem, rows, o)
    state = _state(draw, problem, plan.slots, o.slot_stride_pad)
    output_gate, norm_weight = draw_norm(draw, problem, rows, o)
    at: list[int] = []
    if c.conv != "none" and c.conv_window == "ring":
        at = [pick.randrange(window_rows(c, o)) for _ in range(B)]

    def index(values: Sequence[Any]) -> Tensor:
        return _index(values, o, place)

    case = Case(
        problem=problem,
        q=q,
        k=k,
        v=v,
        a=a,
        A_log=A_log,
        dt_bias=dt_bias,
        b=b,
        state=state,
        read_index=index(plan.start) if c.reads_index else None,
        write_index=index(plan.final) if c.writes_index else None,
        slot_index=index(named) if named else None,
        accepted=index(accepted) if c.accepted else None,
        cu_seqlens=index(bounds) if c.ragged else None,
        intermediate=_buffer(problem, o, place),
        output=_poison((*rows, problem.HV, c.V), c.input_dtype, place),
        scale=c.K**-0.5 if o.scale is None else o.scale,
        softplus_beta=o.softplus_beta,
        softplus_threshold=o.softplus_threshold,
        lower_bound=o.lower_bound,
        beta_scale=2.0 if o.neg_eigval else 1.0,
        null_index=o.null_index,
        use_qk_l2norm=int(o.use_qk_l2norm),
        output_gate=output_gate,
        norm_weight=norm_weight,
        norm_eps=o.norm_eps,
        **draw_conv(draw, problem, o, plan.slots, q),
        conv_position=index(at) if at else None,
    )
    if c.ring:
        rings = draw_ring(draw, problem, o, plan.slots)
        base, count = _windows(problem, o, pick)
        case = dataclasses.replace(case, **rings, ring_base=index(base), ring_count=index(count))
        _poison_rings(case, plan)
    if c.conv != "none":
        if o.settled:
            _settle(draw, case)
        _poison_windows(case, plan)
    _poison_padding(case, plan, bounds)
    return case


def _side_by_side(
    problem: Problem, device: str | torch.device, seed: int, options: dict[str, Any]
) -> Case:
    """A case of interleaved rows: the packed one's numbers, each where its q/k head has it."""
    plain = Problem(problem.contract.replace(conv_input="packed"), problem.B, problem.H, problem.HV)
    case = make_case(plain, device, seed, **options)
    assert case.mixed_qkv is not None
    mixed, beside = heads.interleaved(case.mixed_qkv, case.a, case.b, case.output_gate, problem)
    own = heads.views(problem, mixed, beside, case.output_gate is not None)
    return dataclasses.replace(case, problem=problem, **own)


def _buffer_rows(problem: Problem, options: Options, pick: random.Random) -> list[int]:
    """The row of an indexed buffer that each request writes; empty for other buffers."""
    if problem.contract.intermediate != "indexed":
        return []
    B, rows = problem.B, problem.B + options.extra_rows
    order = pick.sample(range(rows), B) if options.permute else list(range(B))
    # The null slot is null in the buffer too: no request may own its row.
    if options.null_index >= 0:
        order = [-1 if r == options.null_index else r for r in order]
    for n in some(pick, range(B), options.skipped, B):
        order[n] = rows if options.out_of_range else -1
    return order


def _bounds(problem: Problem, options: Options) -> list[int]:
    """cu_seqlens: where each request's packed rows start, and where the last one's end."""
    B, T, lengths = problem.B, problem.contract.tokens, options.lengths
    if lengths is None:
        lengths = [T] * B
    if len(lengths) != B or not all(0 <= n <= T for n in lengths):
        raise UnsupportedProblem(
            f"lengths={list(lengths)}: expected B={B} integers from 0 to tokens={T}"
        )
    return list(accumulate(lengths, initial=0))


def _index(values: Sequence[Any], options: Options, place: torch.device) -> Tensor:
    x = torch.tensor(values, dtype=options.index_dtype, device=place)
    if not options.strided_indices:
        return x
    # A column of a wider tensor. A kernel that drops the stride takes 2**20 or 0 for some request's
    # slot: the first faults or is out of range, the second is another's.
    return torch.stack((torch.full_like(x, 2**20), x, torch.zeros_like(x)), -1)[..., 1]


def _poison(shape: tuple[int, ...], dtype: str, place: torch.device) -> Tensor:
    """NaN, so that what a call was to write and did not is seen."""
    return torch.full(shape, math.nan, dtype=DTYPES[dtype], device=place)


def _heads(x: Tensor, problem: Problem) -> Tensor:
    """[..., HV, V, K], or [..., HV, K, V], of x [..., HV*K*V and more]: a view."""
    c, HV = problem.contract, problem.HV
    head = (c.V, c.K) if c.layout == "k_last" else (c.K, c.V)
    return x[..., : HV * c.K * c.V].unflatten(-1, (HV, *head))


def _state(draw: Draw, problem: Problem, slots: int, gap: int) -> Tensor:
    """[slots, HV, V, K] or its transpose, with `gap` elements between slots."""
    c = problem.contract
    stored = torch.empty(
        slots, problem.HV * c.K * c.V + gap, dtype=DTYPES[c.state_dtype], device=draw.device
    )
    return _heads(draw.fill(stored, STATE_SPREAD), problem)


def _buffer(problem: Problem, options: Options, place: torch.device) -> Tensor | None:
    """[rows, steps, HV, V, K] or its transpose, for the states between tokens."""
    c = problem.contract
    if c.intermediate in ("none", "slots"):
        return None
    rows, steps = problem.B + options.extra_rows, c.tokens + options.extra_steps
    size = problem.HV * c.K * c.V + options.slot_stride_pad
    return _heads(_poison((rows, steps, size), c.state_dtype, place), problem)


def _settle(draw: Draw, case: Case) -> None:
    """Draws anew the inputs whose convolution lies so near the middle between two numbers of the
    inputs' dtype that a right sum in fp32 may round to either. RuntimeError where none come off it.
    """
    c, mixed = case.contract, case.mixed_qkv
    if c.input_dtype == "fp32" or mixed is None:
        return
    given = Given(**case.tensors())
    where = places(c, given)
    rows = mixed.view(-1, mixed.shape[-1])
    real, place = where.real.flatten(), where.rows.flatten()
    identity = c.replace(conv="identity")
    for _ in range(100):
        sums = convolution(identity, given, where, torch.float64)
        y = convolution(c, given, where, torch.float64)
        terms = convolution(identity, _absolute(case), where, torch.float64)
        # Of the terms, through silu's slope, and of silu itself. 2^-19 is 32 fp32 roundings.
        lost = 2.0**-19 * (sums.sigmoid() * (1 + sums.abs()) * terms + y.abs())
        either = (y - lost).to(mixed.dtype) != (y + lost).to(mixed.dtype)
        # near zero the sum of its taps is far larger than what they come to
        either = (either & (y.abs() > lost)).flatten(0, 1)[real]
        if not either.any():
            return
        # the taps that are the tokens' own; they are others' too, so all are looked at again
        again = draw.normal(*rows.shape, dtype=mixed.dtype)[place[real]]
        rows[place[real]] = torch.where(either, again, rows[place[real]])
    raise RuntimeError(
        f"{case.problem.key()}: after 100 draws {int(either.sum())} convolutions still lie between"
        f" two numbers of {c.input_dtype}; expected none, so that the verdict is the kernel's"
    )


def _absolute(case: Case) -> Given:
    """A case's tensors, those of its convolution by their absolute values."""
    own = ("mixed_qkv", "conv_state", "conv_weight", "conv_bias")
    tensors = case.tensors()
    return Given(**tensors | {x: tensors[x].abs() for x in own if tensors.get(x) is not None})


def _poison_windows(case: Case, plan: Slots) -> None:
    """NaN for the rows that hold no token of the window."""
    state, at, before = case.conv_state, case.conv_position, case.contract.conv_width - 1
    if state is None:
        return
    rows = state.shape[1]
    slots = [row[0] for row in plan.columns] if plan.columns[0] else plan.start
    if at is None:
        at = places(case.contract, Given(**case.tensors())).oldest + before
    for slot, place in zip(slots, at.tolist(), strict=True):
        window = {(place - back) % rows for back in range(1, before + 1)}
        if 0 <= slot < state.shape[0]:
            state[slot, sorted(set(range(rows)) - window)] = math.nan


def _windows(
    problem: Problem, options: Options, pick: random.Random
) -> tuple[list[int], list[int]]:
    """Where each request's live entries begin in its ring, and how many they are."""
    c = problem.contract
    rows = c.ring + c.tokens + options.extra_rows
    base = [pick.randrange(rows) for _ in range(problem.B)]
    count = [pick.randint(0, c.ring) for _ in range(problem.B)]
    # both ends, whatever is drawn
    count[0] = c.ring
    if problem.B > 1:
        count[1] = 0
    if options.out_of_range:
        base[0], count[0] = -1, c.ring + 1
    return base, count


def _poison_rings(case: Case, plan: Slots) -> None:
    """NaN for the rows of rings that are no live entry's."""
    assert case.ring_base is not None and case.ring_count is not None
    for name in ring.TENSORS:
        x = getattr(case, name)
        rows = x.shape[2]
        dead = torch.ones(x.shape[0], rows, dtype=torch.bool)
        for slot, base, count in zip(
            plan.start, case.ring_base.tolist(), case.ring_count.tolist(), strict=True
        ):
            if 0 <= slot < x.shape[0]:
                first, n = min(max(base, 0), rows - 1), min(max(count, 0), case.contract.ring)
                dead[slot, [(first + i) % rows for i in range(n)]] = False
        x.transpose(1, 2)[dead.to(x.device)] = math.nan


def _poison_padding(case: Case, plan: Slots, bounds: Sequence[int]) -> None:
    """NaN for the inputs of padding, and of packed rows beyond the last request."""
    ragged = case.contract.ragged
    gate = () if case.output_gate is None else (case.output_gate,)
    for x in (case.q, case.k, case.v, case.a, case.b, *gate):
        for n in plan.padding:
            (x[0, bounds[n] : bounds[n + 1]] if ragged else x[n]).fill_(math.nan)
        if ragged:
            x[0, bounds[-1] :].fill_(math.nan)


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
    state = Draw(device, seed).fill(
        torch.empty(problem.B, size, dtype=kept, device=device), STATE_SPREAD
    )
    steps = form.writes - c.always_writes
    buffer = (
        torch.full((problem.B, steps, size), math.nan, dtype=kept, device=device) if steps else None
    )
    slots = list(range(problem.B))
    random.Random(seed).shuffle(slots)
    named = torch.tensor(slots, dtype=torch.int32, device=device)
    return state, named, buffer, 1.0, torch.zeros(1, device=device)
