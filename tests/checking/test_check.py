"""The correctness gate: right kernels pass, each kind of wrong one is refused, with the place
named.
"""

import random

import pytest
import torch

from gdntune.checking import reference
from gdntune.checking.cases import make_case, whole
from gdntune.checking.check import TOLERANCE, Checker, check_variant, compare, half_spacing, recipes
from gdntune.errors import CheckFailed, UnsupportedProblem
from gdntune.kernels.spec import DECODE_ARGUMENTS
from gdntune.problem import Contract, Problem

RIGHT_GATES, RIGHT_RECURRENCE = reference.gates, reference.recurrence
SMALL = {"K": 64, "V": 32}
CONTRACTS = {
    c.key(): c
    for c in (
        Contract(**SMALL),
        Contract(**SMALL, state_dtype="fp32"),
        Contract(
            **SMALL, state_dtype="fp16", input_dtype="fp16", gate_dtype="fp32", layout="v_last"
        ),
        Contract(**SMALL, tokens=4, intermediate="dense", mode="frozen"),
        Contract(**SMALL, tokens=4, intermediate="indexed", state_dtype="fp32"),
        Contract(**SMALL, tokens=3, intermediate="slots", accepted=True, ragged=True),
        Contract(**SMALL, tokens=2, op="kda_decode", gate="softplus", intermediate="dense"),
        Contract(
            **SMALL,
            op="kda_decode",
            gate="lower_bound",
            state_dtype="fp32",
            beta="given",
            layout="v_last",
        ),
        Contract(
            **SMALL, gate="log", beta="given", pool=False, gate_dtype="fp32", beta_dtype="fp32"
        ),
    )
}
every_contract = pytest.mark.parametrize("contract", CONTRACTS.values(), ids=CONTRACTS.keys())


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are small: where cores are shared, a second thread makes an operation wait for it, a
    hundred times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def kernel(
    contract,
    *,
    gates=RIGHT_GATES,
    recurrence=RIGHT_RECURRENCE,
    given=None,
    leave=None,
    dtype=torch.float32,
):
    """A kernel made of the fp32 reference. given changes what it reads, leave what it writes, gates
    and recurrence its arithmetic.
    """

    def run(*arguments):
        tensors = dict(zip(DECODE_ARGUMENTS, arguments, strict=True))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference, "gates", gates)
            patch.setattr(reference, "recurrence", recurrence)
            read = given(dict(tensors)) if given else tensors
            result = reference.decode(contract, **read, dtype=dtype)
        unrounded, result = result, result.stored(contract)
        if leave:
            leave(tensors, result, unrounded)
        for name in ("state", "intermediate", "output"):
            if tensors[name] is not None:
                # a NaN is a place not written; going through fp32 may have changed its bits
                now = getattr(result, name)
                tensors[name].copy_(torch.where(now.isnan(), tensors[name], now))

    return run


@every_contract
def test_fp32_is_accepted(contract):
    """The fp32 reference, rounded where a kernel stores, passes every recipe with room to spare."""
    verdict = check_variant(kernel(contract), contract, seeds=(0, 1, 2), thorough=True)
    assert verdict.ok and verdict.error < TOLERANCE / 4, verdict


def test_fp32_is_accepted_on_200_seeds():
    """Random contracts and options, one seed each."""
    for seed in range(200):
        pick = random.Random(seed)
        contract = pick.choice(list(CONTRACTS.values())).replace(tokens=pick.randint(1, 4))
        options = {
            "neg_eigval": pick.random() < 0.5,
            "use_qk_l2norm": pick.random() < 0.5,
            "extreme_gates": pick.random() < 0.5,
        }
        before = make_case(Problem(contract, 2, 1, 2), seed=seed, **options)
        after = before.clone()
        kernel(contract)(*after.arguments())
        verdict = compare(before, after, contract)
        assert verdict.ok, (seed, verdict)


def fused_recurrence(q, k, v, decay, beta, state):
    """One pass over the state a token, as kernels do: o = (decay S) q + u (k.q), sums in one long
    chain.
    """
    outputs, states = [], []
    for t in range(q.shape[1]):
        state = decay[:, t, :, None, :] * state
        sk, sq = torch.zeros_like(v[:, t]), torch.zeros_like(v[:, t])
        for i in range(state.shape[-1]):
            sk = sk + state[..., i] * k[:, t, :, None, i]
            sq = sq + state[..., i] * q[:, t, :, None, i]
        u = beta[:, t, :, None] * (v[:, t] - sk)
        state = state + u[..., None] * k[:, t, :, None, :]
        outputs.append(sq + u * (k[:, t] * q[:, t]).sum(-1)[..., None])
        states.append(state)
    return torch.stack(outputs, 1), torch.stack(states, 1)


def fast_gates(
    contract, a, b, A_log, dt_bias, softplus_beta, softplus_threshold, lower_bound, beta_scale
):
    """The gates by a GPU's fast functions: each exp off by up to 2^-22, log(1 + exp(x)) without
    log1p.
    """

    def exp(x):
        return x.exp() * (1 + 2**-22 * (2 * torch.rand(x.shape) - 1))

    def log1p_exp(x, beta, threshold):
        return torch.where(x * beta > threshold, x, torch.log(1 + exp(x * beta)) / beta)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "softplus", log1p_exp)
        arguments = (
            a,
            b,
            A_log,
            dt_bias,
            softplus_beta,
            softplus_threshold,
            lower_bound,
            beta_scale,
        )
        decay, beta = RIGHT_GATES(contract, *arguments)
    return decay * (1 + 2**-22 * (2 * torch.rand(decay.shape) - 1)), beta * (
        1 + 2**-22 * (2 * torch.rand(beta.shape) - 1)
    )


@every_contract
def test_another_fp32_arithmetic_is_accepted(contract):
    """Fused sums in one chain and approximate gates are fp32 too."""
    torch.manual_seed(0)
    verdict = check_variant(
        kernel(contract, recurrence=fused_recurrence, gates=fast_gates), contract, seeds=range(4)
    )
    assert verdict.ok, verdict


def gates_with(change):
    """The right gates, then a change of (decay, beta)."""
    return lambda *arguments: change(*RIGHT_GATES(*arguments))


def bf16(x):
    """x rounded to bf16 and back."""
    return x.bfloat16().to(x.dtype)


def scaled(x, at, factor):
    """x with one head's values multiplied."""
    x = x.clone()
    x[:, :, at] *= factor
    return x


def without(x, at=5):
    """x with one k element dropped."""
    x = x.clone()
    x[..., at] = 0
    return x


def recurrence_with(*, key=None, query=None, start=None):
    """One token's recurrence with S k or S q summed over a changed k or q, or from a changed state."""

    def run(q, k, v, decay, beta, state):
        k1, q1 = k[:, 0, :, None, :], q[:, 0, :, None, :]
        state = decay[:, 0, :, None, :] * (start(state) if start else state)
        u = beta[:, 0, :, None] * (v[:, 0] - (state * (key(k1) if key else k1)).sum(-1))
        state = state + u[..., None] * k1
        return (state * (query(q1) if query else q1)).sum(-1)[:, None], state[:, None]

    return run


def changed(**changes):
    """A `given` that replaces arguments by a function of what they were; None stays."""

    def given(tensors):
        return {
            **tensors,
            **{n: f(tensors[n]) for n, f in changes.items() if tensors[n] is not None},
        }

    return given


def modulo_heads(x):
    """q or k as head hv % H would read them, where hv // (HV/H) is right; case HV = 4, H = 2."""
    return x[:, :, [0, 1, 0, 1]] if x.shape[2] == 2 else x


def truncate(tensors, result, unrounded):
    """The output cut to bf16, its upper 16 bits, instead of rounded."""
    result.output.copy_((unrounded.output.view(torch.int32) & -65536).view(torch.float32))


def one_wrong_row(tensors, result, unrounded):
    """The last value row of the last head is that of its neighbour, in everything written."""
    for name in ("state", "intermediate"):
        x = getattr(result, name)
        if x is not None:
            row = x[..., -1, :] if x.shape[-1] == 64 else x[..., -1]
            row[..., -1, :].copy_(x[..., -1, -2, :] if x.shape[-1] == 64 else x[..., -1, :, -2])
    result.output[..., -1, -1] = result.output[..., -1, -2]


ARITHMETIC_FAULTS = {
    "a k element dropped from S k": {"recurrence": recurrence_with(key=without)},
    "a k element dropped from S q": {"recurrence": recurrence_with(query=without)},
    "wrong decay of one head": {
        "gates": gates_with(lambda decay, beta: (scaled(decay, -1, 1.002), beta))
    },
    "wrong beta of one head": {
        "gates": gates_with(lambda decay, beta: (decay, scaled(beta, 0, 1.002)))
    },
    "decay rounded to bf16": {"gates": gates_with(lambda decay, beta: (bf16(decay), beta))},
    "log decay rounded to bf16": {
        "gates": gates_with(lambda decay, beta: (bf16(decay.log()).exp(), beta))
    },
    "beta rounded to bf16": {"gates": gates_with(lambda decay, beta: (decay, bf16(beta)))},
    "normalised k rounded to bf16": {
        "recurrence": lambda q, k, *rest: RIGHT_RECURRENCE(q, bf16(k), *rest)
    },
    "one wrong row": {"leave": one_wrong_row},
    "use_qk_l2norm ignored": {"given": changed(use_qk_l2norm=lambda x: 1 - x)},
    "scale ignored": {"given": changed(scale=lambda x: 64**-0.5)},
    "beta_scale ignored": {"given": changed(beta_scale=lambda x: 1.0)},
}


@pytest.mark.parametrize("fault", ARITHMETIC_FAULTS)
@every_contract
def test_wrong_arithmetic_is_refused(contract, fault):
    """Each fault alone, in each contract, bf16 states and outputs included; the worst place is
    named.
    """
    if contract.gate == "log" and fault == "log decay rounded to bf16":
        contract = contract.replace(gate_dtype="fp32")
    if contract.beta == "given" and fault == "beta rounded to bf16":
        contract = contract.replace(beta_dtype="fp32")
    verdict = check_variant(kernel(contract, **ARITHMETIC_FAULTS[fault]), contract)
    assert not verdict.ok and verdict.error > TOLERANCE
    assert (
        "head=" in verdict.worst
        and "got" in verdict.worst
        and "want" in verdict.worst
        and "case B=" in verdict.worst
    )


FAULTS_OF = [
    ("swapped map of heads", {}, {"given": changed(q=modulo_heads, k=modulo_heads)}),
    ("output cut, not rounded", {}, {"leave": truncate}),
    (
        "state read transposed",
        {"K": 64, "V": 64},
        {"given": changed(state=lambda x: x.transpose(-1, -2))},
    ),
    ("A_log rounded to bf16", {}, {"given": changed(A_log=bf16)}),
    ("dt_bias rounded to bf16", {}, {"given": changed(dt_bias=bf16)}),
    ("neighbour's slot", {}, {"given": changed(read_index=lambda x: x.roll(1))}),
    ("neighbour's slot written", {}, {"given": changed(write_index=lambda x: x.roll(1))}),
    ("slot n for request n", {}, {"given": changed(read_index=lambda x: torch.arange(len(x)))}),
    ("null_index ignored", {}, {"given": changed(null_index=lambda x: -1)}),
    ("softplus_threshold ignored", {}, {"given": changed(softplus_threshold=lambda x: 20.0)}),
    ("softplus_beta ignored", {}, {"given": changed(softplus_beta=lambda x: 1.0)}),
    (
        "lower_bound ignored",
        {"op": "kda_decode", "gate": "lower_bound"},
        {"given": changed(lower_bound=lambda x: -5.0)},
    ),
    ("state rounded between tokens", {"tokens": 2}, {"recurrence": recurrence_with(start=bf16)}),
    (
        "accepted ignored",
        {"tokens": 3, "intermediate": "slots", "accepted": True},
        {"given": changed(accepted=torch.ones_like)},
    ),
    (
        "buffer by request",
        {"tokens": 2, "intermediate": "indexed"},
        {"given": changed(slot_index=lambda x: torch.arange(len(x)))},
    ),
]


@pytest.mark.parametrize("state_dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("changes,fault", [f[1:] for f in FAULTS_OF], ids=[f[0] for f in FAULTS_OF])
def test_wrong_reading_is_refused(changes, fault, state_dtype):
    """Faults of indices, parameters and rounding, in a contract that has them."""
    contract = Contract(**{**SMALL, **changes}, state_dtype=state_dtype)
    assert not check_variant(kernel(contract, **fault), contract).ok


def case_and_result(contract, **options):
    """A case and a right kernel's work on its clone."""
    before = make_case(Problem(contract, 4, 2, 4), **options)
    after = before.clone()
    kernel(contract)(*after.arguments())
    assert compare(before, after, contract).ok
    return before, after


PADDED = {"slots": 9, "padding": 0.25, "slot_stride_pad": 32, "extra_steps": 1, "extra_rows": 1}


def test_a_touched_slot_is_refused():
    """A slot that no request names, down to one bit of it."""
    before, after = case_and_result(Contract(**SMALL), **PADDED)
    free = next(
        s
        for s in range(9)
        if s not in before.read_index.tolist() and s not in before.write_index.tolist()
    )
    after.state[free, 1, 3, 7] *= 1.01
    verdict = compare(before, after)
    assert (
        not verdict.ok and f"[{free}, 1, 3, 7]" in verdict.worst and "leave alone" in verdict.worst
    )


def test_a_touched_gap_is_refused():
    """Elements between two slots of a padded pool."""
    before, after = case_and_result(Contract(**SMALL), **PADDED)
    whole(after.state)[4 * 64 * 32 + 3] = 7
    verdict = compare(before, after)
    assert not verdict.ok and "gap" in verdict.worst


def test_a_frozen_state_is_refused_when_written():
    """mode=frozen with intermediate states: the final state written too."""
    contract = Contract(**SMALL, tokens=2, intermediate="dense", mode="frozen")
    before, after = case_and_result(contract)
    slot = int(before.read_index[0])
    after.state[slot] = after.intermediate[0, 1]
    verdict = compare(before, after)
    assert not verdict.ok and verdict.worst.startswith("state")


def test_a_padding_slot_is_refused_when_written():
    """The write index of a padding request names a slot; zeros in it are still a write."""
    before, after = case_and_result(Contract(**SMALL), **{**PADDED, "padding": 0.5})
    named = [
        int(w) for r, w in zip(before.read_index, before.write_index, strict=True) if r < 0 <= w
    ]
    after.state[named] = 0
    assert named and not compare(before, after).ok


@pytest.mark.parametrize("value", [1e-30, float("nan")], ids=["tiny", "nan"])
def test_padding_rows_are_exactly_zero(value):
    """No tolerance there, and a row left as it was, NaN, fails."""
    before, after = case_and_result(Contract(**SMALL), **PADDED)
    padded = int((before.read_index < 0).nonzero()[0])
    after.output[padded, 0, 2, 9] = value
    verdict = compare(before, after)
    assert not verdict.ok and f"output[request={padded}, token=0, head=2, v=9]" in verdict.worst


def test_steps_beyond_tokens_are_untouched():
    """A buffer with more steps than T: the step after the last."""
    contract = Contract(**SMALL, tokens=2, intermediate="indexed")
    before, after = case_and_result(contract, **PADDED)
    after.intermediate[int(before.slot_index[0]), 2] = 0
    verdict = compare(before, after)
    assert not verdict.ok and verdict.worst.startswith("intermediate")


def test_rows_beyond_the_last_are_untouched():
    """A ragged batch's packed rows beyond cu_seqlens[-1]."""
    contract = Contract(**SMALL, tokens=2, ragged=True)
    before = make_case(Problem(contract, 2, 1, 2), lengths=[2, 1], tail_rows=1)
    after = before.clone()
    kernel(contract)(*after.arguments())
    assert compare(before, after).ok
    after.output[0, 3] = 0
    assert not compare(before, after).ok


def test_a_written_input_is_refused():
    """A kernel that normalises q in place."""
    before, after = case_and_result(Contract(**SMALL))
    after.q[0, 0, 0, 0] = 0.25
    verdict = compare(before, after)
    assert not verdict.ok and verdict.worst.startswith("q")


@pytest.mark.parametrize("name", ["state", "intermediate", "output"])
def test_nan_never_passes(name):
    """One NaN, or one infinity, wherever something is written."""
    contract = Contract(**SMALL, tokens=2, intermediate="dense", state_dtype="fp32")
    for value in (float("nan"), float("inf"), float("-inf")):
        before, after = case_and_result(contract)
        where = {
            "state": (int(before.write_index[0]), 0, 1, 2),
            "intermediate": (0, 1, 0, 1, 2),
            "output": (1, 0, 2, 3),
        }[name]
        getattr(after, name)[where] = value
        verdict = compare(before, after)
        assert not verdict.ok and verdict.error == float("inf") and verdict.worst.startswith(name)


@every_contract
def test_nothing_written_is_refused(contract):
    """A kernel that returns at once leaves NaN."""
    assert not check_variant(lambda *arguments: None, contract).ok


def test_coordinates_do_not_depend_on_the_layout():
    """The place is given by v and k, also where K is the last but one dimension in memory."""
    for layout, where in (("k_last", (3, 7)), ("v_last", (7, 3))):
        contract = Contract(**SMALL, layout=layout)
        before, after = case_and_result(contract)
        slot = int(before.write_index[0])
        after.state[(slot, 1, *where)] += 1
        assert f"state[slot={slot}, head=1, v=3, k=7]" in compare(before, after).worst


def test_half_spacing():
    """Half the distance to the next number of each stored dtype, subnormals included."""
    generator = torch.Generator().manual_seed(0)
    for dtype, low in ((torch.bfloat16, -30), (torch.float16, -24), (torch.float32, -30)):
        exponents = torch.randint(low, 10, (10000,), generator=generator)
        x = torch.ldexp(torch.rand(10000, generator=generator) + 1, exponents).to(dtype)
        if dtype == torch.float32:
            gap = torch.nextafter(x, torch.tensor(torch.inf)).double() - x.double()
        else:
            gap = (x.view(torch.int16) + 1).view(dtype).double() - x.double()
        assert torch.equal(half_spacing(x.double(), dtype), gap / 2)
        want = (torch.rand(10000, generator=generator) * 2 - 1).double() * 2.0**exponents
        assert (
            (want.float().to(dtype).double() - want).abs()
            <= half_spacing(want, dtype) * (1 + 2**-12)
        ).all()


def test_some_requests_of_a_large_call():
    """Judging two requests sees their faults and no others."""
    contract = Contract(**SMALL, tokens=2, intermediate="dense")
    before, after = case_and_result(contract)
    after.output[3] = 0
    after.intermediate[2, 1] = 0
    assert compare(before, after, requests=[0, 1]).ok
    assert not compare(before, after, requests=[0, 3]).ok
    assert "row=2, step=1" in compare(before, after, requests=[2]).worst


def test_checker_keeps_its_cases():
    """A wrong kernel does not spoil the truth for the next one."""
    contract = Contract(**SMALL)
    checker = Checker(contract)
    assert not checker.check(lambda *arguments: arguments[0].zero_()).ok
    assert checker.check(kernel(contract)).ok


def test_an_exception_passes_through():
    """A kernel that refuses its arguments is not a wrong result."""
    with pytest.raises(TypeError, match="Mismatched"):
        check_variant(
            lambda *arguments: (_ for _ in ()).throw(TypeError("Mismatched Tensor")),
            Contract(**SMALL),
        )


def test_require():
    """A bad verdict as an exception that says what was found and accepted."""
    before, after = case_and_result(Contract(**SMALL))
    assert compare(before, after).require().ok
    after.output[0] = 1e3
    with pytest.raises(
        CheckFailed, match=r"output\[request=0.*got 1000, want .*expected at most 3.8"
    ):
        compare(before, after).require()


def test_illegal_contract():
    """Refused by the contract's own legality function."""
    with pytest.raises(UnsupportedProblem, match="K=65"):
        Checker(Contract(K=65))


@every_contract
def test_recipes_are_awkward_enough(contract):
    """Every contract meets GVA, no GVA, both norms, and whatever of padding, splits and odd strides
    it has.
    """
    found = list(recipes(contract))
    assert {p.HV // p.H for p, _ in found} == {1, 2, 3}
    assert any(p.H > 1 and p.HV > p.H for p, _ in found)
    assert {o.get("use_qk_l2norm", True) for _, o in found} == {True, False}
    assert any(o.get("slot_stride_pad") for _, o in found)
    assert any(o.get("padding") for _, o in found) == contract.pool
    problem, options = found[1]
    case = make_case(problem, **options)
    assert not case.q.is_contiguous() and not case.b.is_contiguous()
    assert case.state.stride(0) > case.state[0].numel()
