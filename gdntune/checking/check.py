"""The gate that every variant passes before it is timed: its results against the fp64 reference,
place by place.

What a right kernel may lose. It computes in fp32 and rounds once, where it stores. So a stored
value differs from the truth by

    half the spacing of the stored dtype at the truth     the rounding itself, granted in full,
    value by value
    + some fp32 roundings of the row it belongs to        what is judged

and not by a share of the stored dtype's epsilon: a bf16 state whose decay is off by 0.001 lies
within bf16's epsilon everywhere, yet values near the middle between two bf16 numbers fall to the
wrong side, by more than fp32 explains. Hence the excess, the error beyond half a spacing, and two
bounds on it; t counts the tokens that the place has seen, u = 2^-24 is fp32's roundoff:

    value   excess <= ARITHMETIC t u (|truth| + 2 rms of its row)
    row     norm of the excesses <= ARITHMETIC t u (norm of its row)

A row is K values of one v (states) or V values of one head (outputs; its norm counts as at least
`Trace.reach`).

ARITHMETIC = 64 is about four times what fp32 loses at worst. Softplus as log(1 + exp(x)) is off by
u, which exp(A_log) = 16 makes 16 u of the decay; a sum over K = 256 in one chain loses up to 10 u
of the row; fast exp, rsqrt and division 2 to 4 u each. Measured on random cases: 3 u for PyTorch's
fp32; 17 u for fused sums in one chain with approximate gates; 19 u for `recurrent` on an H100 80GB
HBM3 over 16 contracts (2026-11-28). What is refused is far off: a decay, beta or normalised k
rounded to bf16 is off by 2^-9, 32768 u; a sigmoid by tanh.approx by 2^-11.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from gdntune.checking import ring
from gdntune.checking.cases import Case, make_case, whole
from gdntune.checking.reference import trace
from gdntune.errors import CheckFailed
from gdntune.kernels.spec import arguments_of
from gdntune.problem import Contract, Problem, check_contract

UNIT = 2.0**-24
ARITHMETIC = 64
TOLERANCE = ARITHMETIC * UNIT
# A row whose norm is below this may be flushed to zero: fp32's smallest normal number.
TINY = 2.0**-126

# significand bits, leading one included, and the smallest number above zero
STORED = {
    torch.bfloat16: (8, 2.0**-133),
    torch.float16: (11, 2.0**-24),
    torch.float32: (24, 2.0**-149),
}
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What a check found.

    error: the worst excess over its row's scale and tokens, inf where a place was touched, is NaN
        or should be zero.
    tolerance: what `error` may be. worst: where, with the value found and the value wanted.
    """

    ok: bool
    error: float
    worst: str
    tolerance: float = TOLERANCE

    def require(self) -> "Verdict":
        """The verdict itself, or CheckFailed with what it says."""
        if not self.ok:
            raise CheckFailed(
                f"{self.worst}: error {self.error:.3g}, expected at most {self.tolerance:.3g}"
            )
        return self


def half_spacing(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance between the neighbours of x (fp64) in a stored dtype: what rounding to
    nearest loses at most.
    """
    bits, smallest = STORED[dtype]
    # the exponent's bits alone are the power of two at or below |x|
    power = (x.contiguous().view(torch.int64) & 0x7FF0000000000000).view(torch.float64)
    return (power * 2.0**-bits).clamp_(min=smallest / 2)


def _bits(x: Tensor) -> Tensor:
    """The same bytes as integers, so that NaNs compare."""
    return x.view(BITS[x.element_size()])


@dataclasses.dataclass
class _Part:
    """The places of one tensor that a call must have written, and what they must hold.

    places [n] int64 into the tensor's leading dimensions taken as one; want [n, rows, values] fp64;
    half: half its spacing; per_value [n, rows, values] and per_row [n, rows]: one over what the
    excess may be; zero [n]: must be exactly zero.
    """

    name: str
    places: Tensor
    want: Tensor
    half: Tensor
    per_value: Tensor
    per_row: Tensor
    zero: Tensor

    @classmethod
    def of(
        cls,
        name: str,
        held: Tensor,
        values: Tensor,
        tokens: Tensor,
        dtype: torch.dtype,
        zero: Tensor | None = None,
        reach: Tensor | None = None,
    ) -> "_Part":
        """held: what each place holds, an index into values, or -1. tokens, zero and reach are of
        values.
        """
        places = (held >= 0).nonzero()[:, 0]
        source = held[places]
        want = values[source].double()
        norm = want.norm(dim=-1)
        # An output row can be near zero by chance, where S q cancels; rounding is lost at the scale
        # of what was summed.
        if reach is not None:
            norm = torch.maximum(norm, reach[source].double())
        row = TOLERANCE * tokens[source].clamp(min=1).double().view(-1, *[1] * (norm.ndim - 1))
        value = row[..., None] * (want.abs() + norm[..., None] * 2 * want.shape[-1] ** -0.5)
        return cls(
            name,
            places,
            want,
            half_spacing(want, dtype),
            # Of a row of zeros the excess may be fp32's smallest number, which kernels may flush.
            1 / (value + TINY),
            1 / (row * norm + TINY),
            torch.zeros_like(source, dtype=torch.bool) if zero is None else zero[source],
        )

    def excesses(self, got: Tensor) -> Tensor:
        """How far got is off beyond the rounding, as a share of the tolerance; NaN stays NaN."""
        excess = (got.double() - self.want).abs_().sub_(self.half).clamp_(min=0)
        shares = excess * self.per_value
        rows = excess.norm(dim=-1) * self.per_row
        # the row's share is laid on its largest value, which is the one to look at
        return torch.maximum(
            shares, torch.where(excess == excess.amax(-1, keepdim=True), rows[..., None], 0)
        )


def _by_places(name: str, x: Tensor) -> Tensor:
    """A tensor with the dimensions in front that a part's places are of."""
    return x.transpose(1, 2) if name in ring.TENSORS else x


def _index(at: int, shape: Sequence[int]) -> list[int]:
    """The indices of an element by its number; torch.unravel_index imports sympy for it, which
    takes a checking process longer than its checks of a small contract.
    """
    found = []
    for size in reversed(shape):
        at, here = divmod(at, size)
        found.append(here)
    return found[::-1]


def _coordinates(case: Case, name: str, leading: int, rest: Sequence[int]) -> str:
    """`state[slot=3, head=1, v=7, k=0]` of a place and the indices below it, whatever the layout in
    memory.
    """
    tensor: Tensor = getattr(case, name)
    if name == "state":
        first = f"slot={leading}"
    elif name in ring.TENSORS:
        first = f"slot={leading // tensor.shape[2]}, row={leading % tensor.shape[2]}"
        last = "v" if name == "ring_u" else "k"
        return f"{name}[{first}, head={rest[0]}, {last}={rest[1]}]"
    elif name == "conv_state":
        first = f"slot={leading // tensor.shape[1]}, row={leading % tensor.shape[1]}"
        return f"{name}[{first}, channel={rest[-1]}]"
    elif name == "intermediate":
        first = f"row={leading // tensor.shape[1]}, step={leading % tensor.shape[1]}"
    elif case.contract.ragged:
        first = f"packed row={leading}"
    else:
        first = f"request={leading // tensor.shape[1]}, token={leading % tensor.shape[1]}"
    return (
        f"{name}[{first}, "
        + ", ".join(f"{n}={i}" for n, i in zip(("head", "v", "k"), rest, strict=False))
        + "]"
    )


class Truth:
    """The right result of one case, computed once and compared with any number of kernels' results.

    before: the case as it was before the call; it is kept and must not be written to.
    requests: judge these alone, and not whether anything else was touched (for cases too large to
        compute whole).
    """

    def __init__(self, before: Case, requests: Sequence[int] | None = None):
        self.before, self.whole = before, requests is None
        c = before.contract
        picked = (
            None
            if requests is None
            else torch.tensor(requests, dtype=torch.int64, device=before.q.device)
        )
        t = trace(c, **before.tensors(), requests=picked)
        self.parts = [
            _Part.of(
                "output",
                t.output_from,
                t.output,
                t.output_tokens,
                before.output.dtype,
                t.zero,
                t.reach,
            ),
            _Part.of("state", t.state_from, t.states, t.state_tokens, before.state.dtype),
        ]
        if c.ring_rounding == "stochastic":
            # either neighbour is right
            self.parts[-1].half *= 2
        if t.intermediate_from is not None and before.intermediate is not None:
            kept = before.intermediate.dtype
            self.parts.append(
                _Part.of("intermediate", t.intermediate_from, t.states, t.state_tokens, kept)
            )

        if t.windows is not None and t.windows_from is not None:
            rows = t.windows[:, None]
            seen = torch.ones(rows.shape[0], dtype=torch.int64, device=rows.device)
            assert before.conv_state is not None
            kept = before.conv_state.dtype
            self.parts.append(_Part.of("conv_state", t.windows_from, rows, seen, kept))
        if t.appended is not None:
            self._expect_ring(t.appended)

    def _expect_ring(self, kept: ring.Kept) -> None:
        """The parts of what a ring gets."""
        values = {"ring_k": kept.k, "ring_u": kept.u, "ring_decay": kept.decay}
        # of a decay that vanishes its share of the state counts, not what is left of itself
        reaches = {"ring_u": kept.reach, "ring_decay": torch.ones_like(kept.decay[..., 0])}
        for name, x in values.items():
            reach = reaches.get(name)
            dtype = getattr(self.before, name).dtype
            # k and the decay are of one token
            tokens = kept.tokens if name == "ring_u" else torch.ones_like(kept.tokens)
            self.parts.append(_Part.of(name, kept.held, x, tokens, dtype, reach=reach))

    def judge(self, after: Case) -> Verdict:
        """The verdict on a clone of `before` that a kernel was called with."""
        # A fault of the kernel under test comes up here, under its own name, and not in the next
        # variant's check.
        if after.q.is_cuda:
            torch.cuda.synchronize(after.q.device)
        worst = Verdict(True, 0.0, "nothing was to be written")
        for part in self.parts:
            verdict = self._judge_part(after, part)
            if not verdict.ok:
                return verdict
            worst = max(worst, verdict, key=lambda v: v.error)
        return (self._touched(after) if self.whole else None) or worst

    def _written(self, case: Case, part: _Part) -> Tensor:
        """The places of a part in a case, [n, heads, (v,) values], K-last."""
        tensor = _by_places(part.name, getattr(case, part.name))
        if part.name == "state":
            x = tensor[part.places]
        else:
            x = tensor[part.places // tensor.shape[1], part.places % tensor.shape[1]]
        if part.name == "conv_state":
            return x[:, None]
        if part.name in ring.TENSORS:
            return x if x.ndim == 3 else x[..., None]
        return (
            x if part.name == "output" or case.contract.layout == "k_last" else x.transpose(-1, -2)
        )

    def _judge_part(self, after: Case, part: _Part) -> Verdict:
        got = self._written(after, part)
        if got.numel() == 0:
            return Verdict(True, 0.0, f"{part.name}: nothing was to be written")
        shares = part.excesses(got)
        if part.name == "output":
            shares = torch.where(part.zero.view(-1, 1, 1) & (got != 0), torch.inf, shares)
        # a NaN is worse than any number
        shares = torch.where(shares.isnan(), torch.inf, shares)
        at = int(shares.argmax())
        share = float(shares.reshape(-1)[at])
        index = _index(at, shares.shape)
        where = _coordinates(after, part.name, int(part.places[index[0]]), index[1:])
        worst = (
            f"{where}: got {float(got[tuple(index)]):.9g}, want"
            f" {float(part.want[tuple(index)]):.9g}"
        )
        return Verdict(share <= 1, share * TOLERANCE, worst)

    def _touched(self, after: Case) -> Verdict | None:
        """A verdict where anything changed that no request was to write: other slots, gaps between
        slots, inputs.
        """
        for name in arguments_of(self.before.contract):
            old, new = getattr(self.before, name), getattr(after, name)
            if not isinstance(old, Tensor):
                continue
            now = whole(new)
            for part in self.parts:
                if part.name == name:
                    # what was to be written is put back, so all that is left to differ is what was
                    # not
                    now = now.clone()
                    view = now.as_strided(new.shape, new.stride(), new.storage_offset())
                    view, kept = _by_places(name, view), _by_places(name, old)
                    if name == "state":
                        view[part.places] = kept[part.places]
                    else:
                        at = (part.places // kept.shape[1], part.places % kept.shape[1])
                        view[at] = kept[at]
            was = whole(old)
            # As integers: the poison is NaN, which equals nothing, and -0.0 is not 0.0.
            if torch.equal(_bits(was), _bits(now)):
                continue
            at_storage = int((_bits(was) != _bits(now)).nonzero()[0, 0])
            place = f"{name}, element {at_storage} of its storage" + _place_of(old, at_storage)
            text = (
                f"{place}, which this call must leave alone: got {float(now[at_storage]):.9g}, was"
                f" {float(was[at_storage]):.9g}"
            )
            return Verdict(False, float("inf"), text)
        return None


def _place_of(x: Tensor, element: int) -> str:
    """` ([3, 0, 1, 7])`: the index that a storage's element has in x, or that it lies in a gap."""
    rest, strides = int(element - x.storage_offset()), [int(n) for n in x.stride()]
    found = [0] * x.ndim
    for d in sorted(range(x.ndim), key=lambda d: -strides[d]):
        if strides[d]:
            found[d], rest = divmod(rest, strides[d])
    inside = rest == 0 and all(0 <= i < n for i, n in zip(found, x.shape, strict=True))
    return f" ({found})" if inside else " (a gap between its rows)"


def compare(
    before: Case,
    after: Case,
    contract: Contract | None = None,
    requests: Sequence[int] | None = None,
) -> Verdict:
    """The verdict on `after`, a clone of `before` that a kernel was called with.

    Written places must be within the tolerance of the fp64 reference (see the module's head),
    padding's output rows zero, all else bit for bit as it was, inputs included. requests: judge
    these requests alone, and not what else was touched.
    """
    if contract is not None and contract != before.contract:
        problem = Problem(contract, before.problem.B, before.problem.H, before.problem.HV)
        before = dataclasses.replace(before, problem=problem)
    return Truth(before, requests).judge(after)


def recipes(contract: Contract, thorough: bool = False) -> Iterator[tuple[Problem, dict[str, Any]]]:
    """The problems that a variant is checked on, each with make_case's options: small, and awkward
    in every way at least once.
    """
    c = contract
    # Fewer requests where their states are large: the reference holds them in fp64.
    heads = c.K * c.V * (c.tokens if c.intermediate != "none" else 1)
    B = 5 if heads <= 2**16 else 4

    def lengths(B: int) -> dict[str, Any]:
        # The first request is full, the second empty: both ends, whatever B is.
        return (
            {"lengths": [(c.tokens, 0, 1, c.tokens)[n % 4] for n in range(B)], "tail_rows": 2}
            if c.ragged
            else {}
        )

    # The gates at decays of e^-0.4 to e^-4, where an error of theirs shows best; HV = 3 is no power
    # of two.
    yield Problem(c, 2, 1, 3), {**lengths(2), "gate_shift": 0.0 if c.gate == "lower_bound" else 2.0}
    pool: dict[str, Any] = (
        {"padding": 0.4, "skipped": 0.2, "out_of_range": True, "split": True} if c.pool else {}
    )
    # All that is odd in memory at once: what a kernel gets wrong there is an address, which no
    # other option hides.
    awkward = {
        "index_dtype": torch.int64,
        "slot_stride_pad": 64,
        "packed_qkv": True,
        "strided_gates": True,
        "extra_steps": 1,
        "extra_rows": 2,
        "parameters_by_head": "H" if c.op == "kda_decode" else "HV",
        "null_index": 0 if c.pool else -1,
        "neg_eigval": True,
    }
    yield Problem(c, B, 2, 4), {**awkward, **pool, **lengths(B)}
    if c.ring:
        awkward["flush_min"] = c.ring // 2
    # What is odd in the formula, on plain memory.
    plain = {"use_qk_l2norm": False, "scale": 0.3, "extreme_gates": True, "strided_indices": True}
    yield (
        Problem(c, 3, 2, 2),
        {
            **plain,
            "softplus_beta": 1.5,
            "softplus_threshold": 0.5,
            "lower_bound": -3.0,
            "norm_eps": 0.1,
        },
    )
    if c.ragged:
        # not a token, nor a row of one: a state is carried to its slot all the same
        yield Problem(c, 3, 1, 2), {**pool, "lengths": [0] * 3}
    if c.ring:
        # as a fold without tokens is asked for
        yield Problem(c, 3, 1, 2), {"flush_min": 0, "append": False, "split": True}
    if thorough:
        # More requests than a warp has lanes.
        yield Problem(c, 33, 1, 1), {**pool, **lengths(33)}
        yield Problem(c, 2, 4, 12), {**lengths(2), "extra_steps": 3}
        if c.pool:
            yield Problem(c, 3, 1, 2), {"padding": 1.0, **lengths(3)}


class Checker:
    """Checks any number of variants of one contract: cases and truths are made once.

    device: where the variants run, `cpu` or a CUDA device; the truth is computed there too.
    """

    def __init__(
        self,
        contract: Contract,
        device: str | torch.device = "cpu",
        *,
        seeds: Sequence[int] = (0, 1),
        thorough: bool = False,
    ):
        self.contract = check_contract(contract)
        self.cases: list[tuple[str, Truth]] = []
        for problem, options in recipes(contract, thorough):
            for seed in seeds:
                case = make_case(problem, device, seed, **options)
                facts = {"B": problem.B, "H": problem.H, "HV": problem.HV, "seed": seed, **options}
                self.cases.append((" ".join(f"{k}={v}" for k, v in facts.items()), Truth(case)))

    def check(self, function: Callable[..., Any]) -> Verdict:
        """The first verdict that is not ok, or the worst of those that are. An exception of the
        function passes through.
        """
        worst = Verdict(True, 0.0, "nothing was checked")
        for name, truth in self.cases:
            # A clone a variant: the truth's own tensors are what is compared with later.
            case = truth.before.clone()
            function(*case.arguments())
            verdict = truth.judge(case)
            if not verdict.ok:
                return dataclasses.replace(verdict, worst=f"{verdict.worst} (case {name})")
            worst = max(worst, verdict, key=lambda v: v.error)
        return worst


@functools.lru_cache(maxsize=4)
def _checker(contract: Contract, device: str, seeds: tuple[int, ...], thorough: bool) -> Checker:
    return Checker(contract, device, seeds=seeds, thorough=thorough)


def check_variant(
    function: Callable[..., Any],
    contract: Contract,
    device: str | torch.device = "cpu",
    *,
    seeds: Sequence[int] = (0, 1),
    thorough: bool = False,
) -> Verdict:
    """Whether a compiled kernel is right: calls it on small cases of its contract and compares (see
    `compare`).

    The last few contracts' truths are kept, so checking a contract's variants one after the other
    computes them once.
    """
    return _checker(contract, str(device), tuple(seeds), thorough).check(function)
