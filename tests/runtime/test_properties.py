"""What must hold of every decode call, whatever its sizes: on random ones, for GDN and KDA, through
the public functions.

Examples are the same in each run. Bits are compared where an order of sums is promised, fp32
rounding where it is not.
"""

import dataclasses

import pytest
import torch
from public import DEVICES, call

from gdntune.checking.cases import make_case
from gdntune.checking.check import TOLERANCE, Truth
from gdntune.problem import Contract, Problem

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

GDN = Contract(state_dtype="fp32")
KDA = Contract(op="kda_decode", gate="softplus", state_dtype="fp32")
BASES = {"gdn": GDN, "kda": KDA}
TOKENS = (2, 3, 5)


def kinds(base):
    """One of each kind of call: one token, several, into slots, into a buffer's rows, ragged."""
    return [
        base,
        base.replace(tokens=4),
        base.replace(tokens=3, intermediate="slots", accepted=True, mode="frozen"),
        base.replace(tokens=2, intermediate="indexed"),
        base.replace(tokens=4, ragged=True),
    ]


# what a machine without a compiler needs
CONTRACTS = [
    contract
    for base in BASES.values()
    for contract in (
        *kinds(base),
        *(
            base.replace(tokens=T, state_dtype=dtype)
            for T in (1, *TOKENS)
            for dtype in ("fp32", "bf16")
        ),
        *(base.replace(tokens=T, layout="v_last") for T in (1, 4)),
    )
]

by_device = pytest.mark.parametrize("device", DEVICES)
by_op = pytest.mark.parametrize("op", BASES)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are small: where cores are shared, a second thread makes an operation wait for it, a
    hundred times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def examples(n, **strategies):
    """n random examples of a property, always the same ones."""

    def decorate(function):
        settings = hypothesis.settings(
            max_examples=n,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        return settings(hypothesis.given(**strategies)(function))

    return decorate


@dataclasses.dataclass
class Sizes:
    """B, H and HV of a problem, the case's seed, and which kind of call."""

    B: int
    H: int
    HV: int
    seed: int
    kind: int

    def case(self, contract, device, **options):
        """A case of these sizes, ragged lengths at random."""
        if contract.ragged:
            options["lengths"] = [(self.seed >> n) % (contract.tokens + 1) for n in range(self.B)]
        return make_case(Problem(contract, self.B, self.H, self.HV), device, self.seed, **options)


sizes = st.builds(
    lambda B, H, group, seed, kind: Sizes(B, H, H * group, seed, kind),
    st.integers(1, 6),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 2**16),
    st.integers(0, 4),
)


def bits(x):
    """The same memory as bytes, so that NaNs compare."""
    return x.contiguous().view(torch.uint8)


def assert_same(x, y):
    """Bit for bit."""
    assert torch.equal(bits(x), bits(y))


def assert_close(x, y, tokens):
    """Two cases' results are the same but for rounding: states row by row as two right kernels may
    differ, outputs by a bf16 step.
    """

    def near(a, b):
        apart, size = (a.double() - b.double()).norm(dim=-1), b.double().norm(dim=-1)
        assert bool((apart <= 2 * TOLERANCE * tokens * size).all())

    near(x.state, y.state)
    rms = y.output.float().pow(2).mean(-1, keepdim=True).sqrt()
    assert bool(
        (
            (x.output.float() - y.output.float()).abs()
            <= 2**-7 * y.output.float().abs() + 2**-12 * rms
        ).all()
    )


def rows_of(case, n):
    """Request n's rows of the output."""
    if not case.contract.ragged:
        return case.output[n]
    return case.output[0, case.cu_seqlens[n] : case.cu_seqlens[n + 1]]


def take(case, requests):
    """Some of a case's requests, in this order, as a case of their own on the same states and
    buffer.
    """
    problem = Problem(case.contract, len(requests), case.problem.H, case.problem.HV)
    changes = {
        name: getattr(case, name)[requests]
        for name in ("read_index", "write_index", "slot_index", "accepted")
        if getattr(case, name) is not None
    }
    for name in ("q", "k", "v", "a", "b", "output"):
        x = getattr(case, name)
        if case.contract.ragged:
            ends = case.cu_seqlens.tolist()
            changes[name] = torch.cat(
                [x[:, :0], *(x[:, ends[n] : ends[n + 1]] for n in requests)], 1
            )
        else:
            changes[name] = x[requests]
    if case.contract.ragged:
        lengths = [int(case.cu_seqlens[n + 1] - case.cu_seqlens[n]) for n in requests]
        ends = [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        changes["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=case.q.device)
    return dataclasses.replace(case, problem=problem, **changes)


def one_token(case, t, state):
    """Token t of a case as a call of its own, on `state`."""
    flow = {name: getattr(case, name)[:, t : t + 1] for name in ("q", "k", "v", "a", "b", "output")}
    contract = case.contract.replace(tokens=1)
    problem = Problem(contract, case.problem.B, case.problem.H, case.problem.HV)
    return dataclasses.replace(case, problem=problem, state=state, **flow)


@by_op
@by_device
@examples(25, sizes=sizes, tokens=st.sampled_from(TOKENS))
def test_tokens_in_one_call_or_one_by_one(op, device, sizes, tokens):
    """With fp32 states T tokens in one call equal T calls of one token, to fp32's rounding."""
    before = sizes.case(BASES[op].replace(tokens=tokens), device)
    whole, steps = before.clone(), before.clone()
    call(whole)
    for t in range(tokens):
        call(one_token(steps, t, steps.state))
    assert_close(whole, steps, tokens)


@by_op
@by_device
@examples(12, sizes=sizes, tokens=st.sampled_from(TOKENS))
def test_bf16_states_are_rounded_between_calls_alone(op, device, sizes, tokens):
    """With bf16 states both agree with the reference, which rounds where a state is stored: after
    each call, not between its tokens.
    """
    before = sizes.case(BASES[op].replace(tokens=tokens, state_dtype="bf16"), device)
    truth, whole, steps = Truth(before), before.clone(), before.clone()
    call(whole)
    truth.judge(whole).require()
    for t in range(tokens):
        # each call starts from the state that the last one stored
        one = one_token(steps, t, steps.state)
        truth = Truth(one.clone())
        call(one)
        truth.judge(one).require()
    assert not torch.equal(steps.state, whole.state)


@by_op
@by_device
@examples(30, sizes=sizes, order=st.randoms(use_true_random=False))
def test_permuting_the_batch_permutes_the_result(op, device, sizes, order):
    """Each request's rows and slots hold the same bits wherever in the batch it stands."""
    before = sizes.case(kinds(BASES[op])[sizes.kind], device, slots=40, padding=0.2)
    requests = order.sample(range(sizes.B), sizes.B)
    straight, other = before.clone(), take(before.clone(), requests)
    call(straight)
    call(other)
    for at, n in enumerate(requests):
        assert_same(rows_of(other, at), rows_of(straight, n))
    assert_same(other.state, straight.state)
    if other.intermediate is not None:
        assert_same(other.intermediate, straight.intermediate)


@by_op
@by_device
@examples(30, sizes=sizes, at=st.integers(0, 6))
def test_splitting_a_batch_changes_nothing(op, device, sizes, at):
    """With batch_invariant=True a batch in two calls has the bits that it has in one."""
    before = sizes.case(kinds(BASES[op])[sizes.kind], device, slots=40)
    whole, split = before.clone(), before.clone()
    call(whole, batch_invariant=True)
    requests = list(range(sizes.B))
    for part in (requests[:at], requests[at:]):
        if part:
            some = take(split, part)
            call(some, batch_invariant=True)
            for i, n in enumerate(part):
                assert_same(rows_of(some, i), rows_of(whole, n))
    assert_same(split.state, whole.state)
    if split.intermediate is not None:
        assert_same(split.intermediate, whole.intermediate)


@by_op
@by_device
@examples(30, sizes=sizes)
def test_slots_not_named_are_unchanged(op, device, sizes):
    """Every slot that no index names for writing keeps its bits, and so does each gap between
    slots.
    """
    before = sizes.case(
        kinds(BASES[op])[sizes.kind], device, slots=40, split=True, slot_stride_pad=64
    )
    after = before.clone()
    call(after)
    named = before.slot_index if before.contract.intermediate == "slots" else before.write_index
    kept = [s for s in range(40) if s not in set(named.flatten().tolist())]
    assert len(kept) >= 20
    assert_same(after.state[kept], before.state[kept])
    gaps = (
        x.state.as_strided((39, 64), (x.state.stride(0), 1), x.state[0].numel())
        for x in (before, after)
    )
    assert_same(*gaps)


@by_op
@by_device
@examples(30, sizes=sizes, share=st.sampled_from([0.3, 0.6, 1.0]))
def test_padding_rows_are_zero(op, device, sizes, share):
    """Padding, whose inputs are NaN here, leaves zeros in its output rows and touches no slot or
    row of a buffer.
    """
    before = sizes.case(
        kinds(BASES[op])[sizes.kind], device, padding=share, null_index=0, out_of_range=True
    )
    truth, after = Truth(before), before.clone()
    call(after)
    start = before.read_index
    if start is None:
        columns = before.slot_index.shape[1]
        start = before.slot_index.gather(1, before.accepted.clamp(1, columns)[:, None].long() - 1)[
            :, 0
        ]
    padded = [n for n, i in enumerate(start.tolist()) if not 0 < i < before.state.shape[0]]
    assert padded
    for n in padded:
        assert bool((rows_of(after, n) == 0).all())
    truth.judge(after).require()


@by_op
@by_device
@examples(25, sizes=sizes, tokens=st.sampled_from([1, 4]))
def test_layouts_agree(op, device, sizes, tokens):
    """K-last and V-last states give the same to fp32's rounding."""
    k_last = sizes.case(BASES[op].replace(tokens=tokens), device)
    v_last = dataclasses.replace(k_last.clone(), state=k_last.state.transpose(-1, -2).contiguous())
    call(k_last)
    call(v_last, state_layout="v_last")
    assert_close(dataclasses.replace(v_last, state=v_last.state.transpose(-1, -2)), k_last, tokens)


@by_op
@by_device
@examples(30, sizes=sizes)
def test_same_inputs_same_bits(op, device, sizes):
    """A call is deterministic."""
    before = sizes.case(kinds(BASES[op])[sizes.kind], device)
    first = before.clone()
    call(first)
    for _ in range(3):
        again = before.clone()
        call(again)
        assert_same(again.output, first.output)
        assert_same(again.state, first.state)
        if again.intermediate is not None:
            assert_same(again.intermediate, first.intermediate)
