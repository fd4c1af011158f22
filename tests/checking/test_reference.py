"""The reference against truths that others wrote, and the convention around the formula."""

import importlib.metadata
import importlib.util
import inspect
import math
import random
import sys

import numpy as np
import pytest
import torch

from gdntune.checking import reference
from gdntune.checking.cases import Case, make_case
from gdntune.checking.reference import decode
from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract, Problem

# Others' functions compute in fp32: 8 tokens of sums over 256 lose up to 5e-7 of the largest value
# here.
FP32 = 3e-6
SEEDS = range(200)
FP32_CONTRACT = Contract(
    input_dtype="fp32",
    state_dtype="fp32",
    gate_dtype="fp32",
    beta_dtype="fp32",
    gate="log",
    beta="given",
    layout="v_last",
    pool=False,
)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Tensors are small: where cores are shared, a second thread makes an operation wait for it, a
    hundred times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def load_naive(op):
    """flash-linear-attention's naive module of an op by its file: importing the package asks for
    triton.
    """
    path = importlib.metadata.distribution("fla-core").locate_file(f"fla/ops/{op}/naive.py")
    spec = importlib.util.spec_from_file_location(f"naive_{op}", str(path))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def transformers_rules():
    """Qwen3-Next's and Kimi-Linear's own functions; `fla` is hidden, since its kernels would be
    bound where it is installed.
    """
    hidden = {
        n: sys.modules.pop(n) for n in list(sys.modules) if n == "fla" or n.startswith("fla.")
    }
    sys.modules["fla"] = None
    try:
        from transformers.models.kimi_linear.modeling_kimi_linear import (
            recurrent_kimi_delta_attention,
        )
        from transformers.models.qwen3_next.modeling_qwen3_next import (
            torch_recurrent_gated_delta_rule,
        )
    finally:
        del sys.modules["fla"]
        sys.modules.update(hidden)
    return {
        "gdn_decode": torch_recurrent_gated_delta_rule,
        "kda_decode": inspect.unwrap(recurrent_kimi_delta_attention),
    }


def random_case(seed, **changes):
    """A case of random sizes and gates in fp32, with a V-last state row for each request, as the
    others take it.
    """
    pick = random.Random(seed)
    contract = FP32_CONTRACT.replace(
        tokens=pick.randint(1, 8),
        K=pick.choice((64, 96, 128, 256)),
        V=32 * pick.randint(1, 3),
        **changes,
    )
    H = pick.randint(1, 2)
    problem = Problem(contract, pick.randint(1, 3), H, H * pick.randint(1, 3))
    options = {"use_qk_l2norm": pick.random() < 0.5, "neg_eigval": pick.random() < 0.3}
    return make_case(problem, seed=seed, parameters_by_head=pick.choice(("HV", "H")), **options)


def prepared(case):
    """q, k normalised where asked, log decay and beta by formulas of this file's own, H expanded to
    HV.
    """
    group, op = case.problem.HV // case.problem.H, case.contract.op
    q, k = (x.double() for x in (case.q, case.k))
    if case.use_qk_l2norm:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g, beta = case.a.double(), case.b.double()
    if case.contract.gate != "log":
        A, bias = (
            torch.repeat_interleave(x.double(), case.problem.HV // x.shape[0], dim=0)
            for x in (case.A_log, case.dt_bias)
        )
        A = A.exp()[:, None] if op == "kda_decode" else A.exp()
        if case.contract.gate == "lower_bound":
            g = case.lower_bound / (1 + torch.exp(-A * (g + bias)))
        else:
            g = -A * torch.logaddexp(g + bias, torch.zeros(()).double())
    if case.contract.beta == "logit":
        beta = 1 / (1 + torch.exp(-beta))
    q, k = (torch.repeat_interleave(x, group, dim=2) for x in (q, k))
    return [x.float() for x in (q, k, case.v, g, beta * case.beta_scale)]


def assert_close(got, want, what):
    """Within fp32's rounding of the largest value."""
    error = (got.double() - want.double()).abs().max() / want.double().abs().max()
    assert error < FP32, f"{what}: {error:.3g}"


def assert_same(got, want):
    """Equal but for the order of fp64 sums."""
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("gate", ["log", "raw"])
def test_agrees_with_naive_gated_delta_rule(gate):
    """flash-linear-attention's GDN loop, 200 random problems over both gates with GVA, both norms
    and both signs of eigenvalues.
    """
    naive = load_naive("gated_delta_rule")
    for seed in SEEDS[: len(SEEDS) // 2]:
        case = random_case(seed, gate=gate, beta="given" if gate == "log" else "logit")
        q, k, v, g, beta = prepared(case)
        o, state = naive.naive_recurrent_gated_delta_rule(
            q, k, v, beta, g, initial_state=case.state, output_final_state=True
        )
        result = decode(case.contract, **case.tensors())
        assert_close(o, result.output, f"seed {seed}, output")
        assert_close(state, result.state, f"seed {seed}, state")


@pytest.mark.parametrize("gate", ["log", "softplus", "lower_bound"])
def test_agrees_with_naive_kda(gate):
    """flash-linear-attention's KDA loop, 201 random problems over the three gates."""
    naive = load_naive("kda")
    for seed in SEEDS[: -(-len(SEEDS) // 3)]:
        case = random_case(seed, op="kda_decode", gate=gate, beta=("given", "logit")[seed % 2])
        q, k, v, g, beta = prepared(case)
        o, state = naive.naive_recurrent_kda(
            q, k, v, g, beta, initial_state=case.state, output_final_state=True
        )
        result = decode(case.contract, **case.tensors())
        assert_close(o, result.output, f"seed {seed}, output")
        assert_close(state, result.state, f"seed {seed}, state")


@pytest.mark.parametrize("op", ["gdn_decode", "kda_decode"])
def test_agrees_with_transformers(op, transformers_rules):
    """Qwen3-Next's loop and Kimi-Linear's, which normalise by themselves and take pre-computed
    gates, 200 random problems each.
    """
    for seed in SEEDS:
        case = random_case(seed, op=op)
        group = case.problem.HV // case.problem.H
        o, state = transformers_rules[op](
            case.q.repeat_interleave(group, 2),
            case.k.repeat_interleave(group, 2),
            case.v,
            case.a,
            case.b * case.beta_scale,
            initial_state=case.state,
            output_final_state=True,
            use_qk_l2norm_in_kernel=bool(case.use_qk_l2norm),
        )
        result = decode(case.contract, **case.tensors())
        assert_close(o, result.output, f"seed {seed}, output")
        assert_close(state, result.state, f"seed {seed}, state")


def test_agrees_with_scalar_loops():
    """Every sum and gate written out in Python floats for one small call."""
    contract = Contract(tokens=2, K=64, V=32, input_dtype="fp32", state_dtype="fp32")
    case = make_case(Problem(contract, 2, 1, 2), seed=3)
    result = decode(contract, **case.tensors())
    q, k, v, a, b, A_log, dt_bias = (
        x.double().numpy()
        for x in (case.q, case.k, case.v, case.a, case.b, case.A_log, case.dt_bias)
    )
    for n in range(2):
        for j in range(2):
            S = case.state[int(case.read_index[n]), j].double().numpy().copy()
            for t in range(2):
                kn = k[n, t, 0] / math.sqrt(sum(x * x for x in k[n, t, 0]) + 1e-6)
                qn = q[n, t, 0] / math.sqrt(sum(x * x for x in q[n, t, 0]) + 1e-6) / 8
                decay = math.exp(
                    -math.exp(A_log[j]) * math.log1p(math.exp(a[n, t, j] + dt_bias[j]))
                )
                beta = 1 / (1 + math.exp(-b[n, t, j]))
                for i in range(32):
                    row = [decay * x for x in S[i]]
                    u = beta * (v[n, t, j, i] - sum(x * y for x, y in zip(row, kn, strict=True)))
                    S[i] = [x + u * y for x, y in zip(row, kn, strict=True)]
                    o = sum(x * y for x, y in zip(S[i], qn, strict=True))
                    assert abs(o - float(result.output[n, t, j, i])) < 1e-12
            np.testing.assert_allclose(
                result.state[int(case.write_index[n]), j].numpy(), S, rtol=0, atol=1e-12
            )


def test_recurrence_alone():
    """The bare formula on dense tensors is what decode computes."""
    case = random_case(5)
    q, k, v, g, beta = (x.double() for x in prepared(case))
    state = case.state.double().transpose(-1, -2)
    o, states = reference.recurrence(q * case.scale, k, v, g.exp()[..., None], beta, state)
    result = decode(case.contract, **case.tensors())
    assert_close(o, result.output, "output")
    assert_close(states[:, -1].transpose(-1, -2), result.state, "state")


def test_layouts_agree():
    """A V-last state is the transpose of a K-last one, in the pool and in the buffer."""
    contract = Contract(tokens=3, K=64, V=96, intermediate="dense", state_dtype="fp32")
    case = make_case(Problem(contract, 2, 1, 2))
    other = case.clone()
    other.state, other.intermediate = (
        x.transpose(-1, -2).contiguous() for x in (case.state, case.intermediate)
    )
    first = decode(contract, **case.tensors())
    second = decode(contract.replace(layout="v_last"), **other.tensors())
    assert_same(first.state, second.state.transpose(-1, -2))
    assert_same(first.intermediate, second.intermediate.transpose(-1, -2))
    assert_same(first.output, second.output)


@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_tokens_in_one_call_or_one_by_one(state_dtype):
    """Between the tokens of a call the state is not rounded: with a bf16 state, calls of one token
    each lose more.
    """
    contract = Contract(tokens=4, K=64, V=32, state_dtype=state_dtype, intermediate="dense")
    case = make_case(Problem(contract, 2, 1, 1), permute=False)
    whole = decode(contract, **case.tensors())
    one, step = contract.replace(tokens=1, intermediate="none"), case.clone()
    outputs = []
    for t in range(4):
        tensors = {
            n: x[:, t : t + 1] if n in ("q", "k", "v", "a", "b", "output") else x
            for n, x in step.tensors().items()
        }
        result = decode(one, **tensors)
        outputs.append(result.output)
        step.state = result.stored(one).state
    error = (torch.cat(outputs, 1) - whole.output).abs().max() / whole.output.abs().max()
    assert error < 1e-6 if state_dtype == "fp32" else 1e-4 < error < 1e-1
    assert_same(whole.intermediate[:, 3], whole.state)


@pytest.mark.parametrize(
    "contract",
    [
        Contract(K=64, V=32),
        Contract(K=64, V=32, tokens=3, intermediate="slots", accepted=True, mode="frozen"),
        Contract(
            K=64,
            V=32,
            tokens=3,
            intermediate="indexed",
            ragged=True,
            op="kda_decode",
            gate="softplus",
        ),
    ],
    ids=lambda c: c.key(),
)
def test_touches_no_input(contract):
    """Functional: inputs stay, and results are fresh memory."""
    case = make_case(Problem(contract, 3, 1, 2), extra_steps=1, packed_qkv=True, slot_stride_pad=8)
    before = case.clone()
    result = decode(contract, **case.tensors())
    for name, x in case.tensors().items():
        if isinstance(x, torch.Tensor):
            torch.testing.assert_close(x, getattr(before, name), rtol=0, atol=0, equal_nan=True)
    assert result.state.data_ptr() != case.state.data_ptr()
    assert result.output.dtype == torch.float64
    assert result.stored(contract).state.dtype == torch.bfloat16


def plain(**changes) -> Case:
    """Three requests with slots 0, 1, 2 of a pool of five."""
    contract = Contract(K=64, V=32, state_dtype="fp32", **changes)
    return make_case(
        Problem(contract, 3, 1, 2),
        slots=15 if contract.intermediate == "slots" else 5,
        permute=False,
    )


@pytest.mark.parametrize(
    "index",
    [-1, -9, 4, 5, 2**20],
    ids=["minus one", "negative", "null", "one beyond", "far beyond"],
)
def test_padding_index(index):
    """A read index that is negative, null or outside the pool: zeros come out, and no slot changes,
    named for writing or not.
    """
    case = plain()
    case.null_index = 4
    case.read_index[1], case.write_index[1] = index, 3
    case.q[1] = math.nan
    result = decode(case.contract, **case.tensors())
    assert (result.output[1] == 0).all()
    assert torch.equal(result.state[[1, 3, 4]], case.state[[1, 3, 4]].double())
    assert not torch.equal(result.state[2], case.state[2].double())
    case.read_index[1], case.write_index[1] = 3, index
    case.q[1] = 1.0
    result = decode(case.contract, **case.tensors())
    assert (result.output[1] != 0).all()
    assert torch.equal(result.state[[1, 3, 4]], case.state[[1, 3, 4]].double())


def test_reads_before_writes():
    """Requests that trade slots in one call each start from the state that was there before."""
    case = plain()
    apart = decode(case.contract, **case.tensors())
    case.write_index.copy_(torch.tensor([1, 2, 0]))
    traded = decode(case.contract, **case.tensors())
    assert_same(traded.state[[1, 2, 0]], apart.state[[0, 1, 2]])
    assert_same(traded.output, apart.output)


def test_frozen_writes_no_state():
    """mode=frozen leaves the pool, and the outputs are the same."""
    case = plain(mode="frozen", tokens=2)
    result = decode(case.contract, **case.tensors())
    assert torch.equal(result.state, case.state.double())
    updated = decode(
        case.contract.replace(mode="update"), **{**case.tensors(), "write_index": case.read_index}
    )
    assert_same(result.output, updated.output)


def test_accepted_is_clamped():
    """Counts of 0 and less start from the first column, counts beyond the columns from the last."""
    case = plain(tokens=3, intermediate="slots", accepted=True, mode="frozen")
    results = {}
    for count in (-5, 0, 1, 2, 3, 4, 2**30):
        case.accepted.fill_(count)
        results[count] = decode(case.contract, **case.tensors()).output
    assert_same(results[-5], results[1])
    assert_same(results[0], results[1])
    assert_same(results[4], results[3])
    assert_same(results[2**30], results[3])
    assert not torch.equal(results[1], results[2])


def test_slots_write_each_column():
    """Token t's state goes to column t's slot; a column that is padding is skipped alone; nothing
    else changes.
    """
    case = plain(tokens=3, intermediate="slots", accepted=True)
    case.accepted.fill_(2)
    case.slot_index[0, 2] = -1
    dense = case.contract.replace(intermediate="dense", accepted=False, mode="frozen")
    tensors = {
        **case.tensors(),
        "read_index": case.slot_index[:, 1],
        "intermediate": torch.zeros(3, 3, *case.state.shape[1:]),
    }
    want = decode(dense, **tensors).intermediate
    result = decode(case.contract, **case.tensors())
    for n in range(3):
        for t in range(3):
            if (n, t) != (0, 2):
                assert_same(result.state[int(case.slot_index[n, t])], want[n, t])
        assert_same(result.state[int(case.write_index[n])], want[n, 2])
    left = [
        s
        for s in range(15)
        if s not in [*case.slot_index.flatten().tolist(), *case.write_index.tolist()]
    ]
    assert torch.equal(result.state[left], case.state[left].double())


def test_padding_by_the_start_column():
    """The start column decides: padded there, a request reads and writes nothing, whatever its
    other columns say.
    """
    case = plain(tokens=2, intermediate="slots", accepted=True)
    case.accepted.copy_(torch.tensor([1, 2, 1]))
    case.slot_index[1, 1] = -1
    result = decode(case.contract, **case.tensors())
    assert (result.output[1] == 0).all()
    mine = [int(case.slot_index[1, 0]), int(case.write_index[1])]
    assert torch.equal(result.state[mine], case.state[mine].double())


@pytest.mark.parametrize("row", [-1, 4, 5], ids=["negative", "null", "beyond"])
def test_indexed_rows(row):
    """A buffer's row by index; a row that is padding is skipped, the final state is written all the
    same.
    """
    contract = Contract(K=64, V=32, tokens=2, intermediate="indexed", state_dtype="fp32")
    case = make_case(
        Problem(contract, 3, 1, 2), extra_rows=2, extra_steps=2, slots=5, permute=False
    )
    case.null_index = 4
    case.slot_index.copy_(torch.tensor([3, row, 0]))
    result = decode(contract, **case.tensors())
    assert_same(result.intermediate[[3, 0], 1], result.state[[0, 2]])
    assert result.intermediate[[1, 2, 4]].isnan().all()
    assert result.intermediate[:, 2:].isnan().all()
    assert not torch.equal(result.state[1], case.state[1].double())


def test_ragged():
    """Packed requests equal the same requests alone; rows beyond the last are untouched; length 0
    keeps the start state.
    """
    contract = Contract(K=64, V=32, tokens=4, ragged=True, intermediate="dense", state_dtype="fp32")
    lengths = [2, 0, 4, 1]
    case = make_case(Problem(contract, 4, 1, 2), lengths=lengths, tail_rows=3, split=True, seed=2)
    result = decode(contract, **case.tensors())
    first = 0
    for n, length in enumerate(lengths):
        rows = slice(first, first + length)
        first += length
        final = result.state[int(case.write_index[n])]
        if not length:
            assert torch.equal(final, case.state[int(case.read_index[n])].double())
            continue
        tensors = {
            m: x[:, rows] if m in ("q", "k", "v", "a", "b", "output") else x
            for m, x in case.tensors().items()
        }
        tensors |= {
            m: case.tensors()[m][n : n + 1] for m in ("read_index", "write_index", "intermediate")
        }
        alone = decode(contract.replace(ragged=False), **tensors)
        assert_same(result.output[:, rows], alone.output)
        assert_same(final, alone.state[int(case.write_index[n])])
        assert_same(result.intermediate[n, :length], alone.intermediate[0, :length])
        assert result.intermediate[n, length:].isnan().all()
    assert result.output[:, first:].isnan().all()


def test_ragged_bounds_are_clamped():
    """Bounds that run backwards, exceed tokens or leave the rows stay inside their tensors."""
    contract = Contract(K=64, V=32, tokens=2, ragged=True)
    case = make_case(Problem(contract, 3, 1, 1), lengths=[2, 2, 2])
    case.cu_seqlens.copy_(torch.tensor([0, 5, 4, 100]))
    result = decode(contract, **case.tensors())
    written = ~result.output[0].isnan().flatten(1).any(1)
    # request 0 is cut to two tokens, request 1 has none, request 2 ends with the rows
    assert written.tolist() == [True, True, False, False, True, True]


def test_gates_do_not_overflow():
    """a + dt_bias above 88.7: exp overflows in fp32, and 0 * inf is NaN."""
    contract = Contract(K=64, V=32)
    case = make_case(Problem(contract, 2, 1, 2))
    case.a.fill_(200.0)
    for dtype in (torch.float32, torch.float64):
        result = decode(contract, **case.tensors(), dtype=dtype)
        assert result.output.isfinite().all() and result.state.isfinite().all()


@pytest.mark.parametrize("gate", ["softplus", "lower_bound"])
def test_rates_beyond_exp(gate):
    """exp(A_log) overflows and what it multiplies vanishes: inf * 0 was NaN. The limit stands
    instead, in fp64 and fp32 alike.
    """
    A_log = torch.tensor([88.8, 104.0, 800.0, 3e38]).double()[:, None]
    x = torch.tensor([0.0, -1.0, 1e-30, -1e-30, -200.0, -2e38, 3e38]).double()
    contract = Contract(op="kda_decode", gate=gate, K=64, V=32)
    for dtype in (torch.float64, torch.float32):
        a = x.to(dtype).expand(1, 1, 4, 7)
        given = (
            torch.zeros(1, 1, 4, dtype=dtype),
            A_log[:, 0].to(dtype),
            torch.zeros(4, 7, dtype=dtype),
        )
        decay = reference.gates(contract, a, *given, 1.0, 20.0, -5.0, 1.0)[0][0, 0].double()
        if gate == "softplus":
            wanted = (A_log + x < -20).double()
        else:
            far = A_log + x.abs().log()
            wanted = (-2.5 * (x.sign() + 1)).exp().expand(4, 7).clone()
            # exp(A_log) x is what counts where it is neither
            middle = (far < 40) & (x != 0)
            wanted[middle] = (-5 * (x.sign() * far.exp()).sigmoid()).exp()[middle]
        torch.testing.assert_close(decay, wanted, rtol=1e-4, atol=1e-5)


def test_requests_alone():
    """A trace of some requests is the same as theirs in the whole, and counts no other place as
    touched.
    """
    contract = Contract(K=64, V=32, tokens=2, intermediate="dense")
    case = make_case(Problem(contract, 4, 1, 2))
    some = reference.trace(contract, **case.tensors(), requests=torch.tensor([2, 0]))
    whole = reference.trace(contract, **case.tensors())
    assert sorted(some.output_from.tolist()) == [-1] * 4 + [0, 1, 2, 3]
    for n in (2, 0):
        assert_same(some.output[some.output_from[2 * n]], whole.output[whole.output_from[2 * n]])
    assert (some.state_from >= 0).sum() == 2


def test_parameters_of_a_model():
    """A_log and dt_bias may be parameters that require grad, in bf16 or fp16."""
    contract = Contract(K=64, V=32, A_log_dtype="bf16", dt_bias_dtype="fp16")
    case = make_case(Problem(contract, 1, 1, 2))
    case.A_log, case.dt_bias = torch.nn.Parameter(case.A_log), torch.nn.Parameter(case.dt_bias)
    assert not decode(contract, **case.tensors()).output.requires_grad


def test_a_missing_tensor_is_named():
    """A contract with a pool, called without an index."""
    case = plain()
    with pytest.raises(UnsupportedProblem, match="read_index=None"):
        decode(case.contract, **{**case.tensors(), "read_index": None})
