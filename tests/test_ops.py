"""The public functions on CPU tensors: what they compute, what they accept, what they refuse; on CUDA tensors where there are any."""

import msgspec
import pytest
import torch

import gdntune
from gdntune import ops, problem
from gdntune.cases import make_case
from gdntune.check import Truth
from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract, Problem

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONTRACTS = {
    "T=1 pool": Contract(state_dtype="fp32"),
    "T=3 bf16": Contract(tokens=3),
    "rows": Contract(pool=False, tokens=2, state_dtype="fp32"),
    "dense frozen": Contract(tokens=3, intermediate="dense", mode="frozen", state_dtype="fp32"),
    "indexed update": Contract(tokens=2, intermediate="indexed", state_dtype="fp32"),
    "slots accepted": Contract(tokens=3, intermediate="slots", accepted=True, mode="frozen", state_dtype="fp32"),
    "slots update": Contract(tokens=2, intermediate="slots", mode="update", state_dtype="fp32"),
    "ragged": Contract(tokens=4, ragged=True, state_dtype="fp32"),
    "v_last log": Contract(
        layout="v_last", gate="log", beta="given", state_dtype="fp32", gate_dtype="fp32", beta_dtype="fp32"
    ),
    "kda log": Contract(op="kda_decode", gate="log", beta="given", tokens=2, state_dtype="fp32"),
    "kda softplus": Contract(op="kda_decode", gate="softplus", state_dtype="fp32"),
    "kda lower_bound": Contract(op="kda_decode", gate="lower_bound", tokens=2, state_dtype="fp32"),
}


def call(case, **changes):
    """The public call that asks for a case's contract."""
    c = case.contract
    arguments = {
        "initial_state": case.state,
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "b" if c.beta == "logit" else "beta": case.b,
        "initial_state_indices": case.read_index,
        "output_state_indices": case.write_index,
        "intermediate_states_buffer": case.intermediate,
        "ssm_state_indices" if c.intermediate == "slots" else "intermediate_state_indices": case.slot_index,
        "num_accepted_tokens": case.accepted,
        "cu_seqlens": case.cu_seqlens,
        "disable_state_update": c.mode == "frozen" and c.intermediate != "slots",
        "state_layout": c.layout,
        "scale": case.scale,
        "use_qk_l2norm": bool(case.use_qk_l2norm),
        "allow_neg_eigval": case.beta_scale == 2.0,
        "softplus_beta": case.softplus_beta,
        "softplus_threshold": case.softplus_threshold,
        "null_index": case.null_index,
        "output": case.output,
    }
    if c.ragged:
        arguments["max_tokens"] = c.tokens
    if c.op == "kda_decode":
        if c.gate == "lower_bound":
            arguments["lower_bound"] = case.lower_bound
        return gdntune.kda_decode(case.q, case.k, case.v, case.a, **{**arguments, **changes})
    arguments["a" if c.gate == "raw" else "g"] = case.a
    return gdntune.gated_delta_rule_decode(case.q, case.k, case.v, **{**arguments, **changes})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONTRACTS)
def test_public_call_agrees_with_the_reference(name, device):
    """Each kind of call reaches a kernel that serves it, and every place it writes holds what the fp64 reference says."""
    contract = CONTRACTS[name]
    options = {"split": True, "padding": 0.3} if contract.pool else {}
    truth = Truth(make_case(Problem(contract, 4, 2, 4), device, seed=3, **options))
    case = truth.before.clone()
    returned = call(case)
    assert returned is case.output
    truth.judge(case).require()


@pytest.mark.parametrize("device", DEVICES)
def test_int64_indices_and_parameters_that_require_grad(device):
    """Fault: int64 indices were a type error or wrong slots, parameters that require grad were refused; both are taken as they are."""
    truth = Truth(
        make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), device, seed=1, index_dtype=torch.int64, split=True)
    )
    case = truth.before.clone()
    call(case, A_log=torch.nn.Parameter(case.A_log), dt_bias=torch.nn.Parameter(case.dt_bias))
    truth.judge(case).require()


@pytest.mark.parametrize("device", DEVICES)
def test_output_none_is_fresh_each_time(device):
    """Fault: output=None twice with the same shape, and the second call overwrote the first result."""
    case = make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), device)
    first = call(case, output=None)
    kept = first.clone()
    second = call(case, output=None)
    assert first.data_ptr() != second.data_ptr()
    assert torch.equal(first, kept)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("device", DEVICES)
def test_write_index_defaults_to_the_read_index(device):
    """Without output_state_indices the state is updated where it was read."""
    truth = Truth(make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), device, seed=5))
    case = truth.before.clone()
    call(case, output_state_indices=None)
    truth.judge(case).require()


@pytest.mark.parametrize("device", DEVICES)
def test_no_requests_is_no_work(device):
    """B=0 returns an empty output at once."""
    case = make_case(Problem(CONTRACTS["rows"], 2, 2, 4), device)
    out = gdntune.gated_delta_rule_decode(
        case.q[:0],
        case.k[:0],
        case.v[:0],
        a=case.a[:0],
        b=case.b[:0],
        A_log=case.A_log,
        dt_bias=case.dt_bias,
        initial_state=case.state[:0],
    )
    assert out.shape == (0, 2, 4, 128)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_decode_is_plain_decode(device):
    """The call that vLLM and SGLang make: q, k, v in one tensor, 2-D gates, slot 0 as padding; the same bits as the plain call."""
    contract = Contract(state_dtype="fp32")
    case = make_case(Problem(contract, 4, 2, 4), device, packed_qkv=True, slots=8, null_index=0)
    state = case.state.clone()
    plain = call(case, output=None, output_state_indices=None)
    mixed = torch.cat([x[:, 0].flatten(1) for x in (case.q, case.k, case.v)], -1)
    packed = gdntune.gated_delta_rule_packed_decode(
        mixed,
        case.a[:, 0],
        case.b[:, 0],
        A_log=case.A_log,
        dt_bias=case.dt_bias,
        initial_state=state,
        initial_state_indices=case.read_index,
    )
    assert torch.equal(packed, plain)
    assert torch.equal(state, case.state)


def refused(match, function, *args, **kwargs):
    """The message of the UnsupportedProblem that a call raises."""
    with pytest.raises(UnsupportedProblem, match=match) as caught:
        function(*args, **kwargs)
    assert isinstance(caught.value, ValueError)
    return str(caught.value)


REFUSALS = {
    "no gate": ({"A_log": None}, "A_log, a and dt_bias"),
    "both gates": ({"g": torch.zeros(3, 1, 4)}, "one of the two"),
    "no beta": ({"b": None}, "b .*logit"),
    "both betas": ({"beta": torch.zeros(3, 1, 4)}, "one of the two"),
    "index dtype": ({"initial_state_indices": torch.zeros(3)}, "initial_state_indices.*int32.*int64"),
    "index length": (
        {"initial_state_indices": torch.zeros(2, dtype=torch.int32)},
        r"initial_state_indices has shape \(2,\).*\[3\]",
    ),
    "accepted without slots": (
        {"num_accepted_tokens": torch.zeros(3, dtype=torch.int32)},
        "num_accepted_tokens without ssm_state_indices",
    ),
    "write index while frozen": ({"disable_state_update": True}, "output_state_indices with disable_state_update"),
    "buffer index alone": (
        {"intermediate_state_indices": torch.zeros(3, dtype=torch.int32)},
        "without intermediate_states_buffer",
    ),
    "max_tokens alone": ({"max_tokens": 4}, "max_tokens without cu_seqlens"),
    "layout": ({"state_layout": "k_first"}, "layout='k_first'.*k_last, v_last"),
    "state dtype": (
        {"initial_state": torch.zeros(3, 4, 128, 128, dtype=torch.float64)},
        "initial_state has dtype torch.float64",
    ),
    "state rank": ({"initial_state": torch.zeros(3, 4, 128)}, r"initial_state has shape \(3, 4, 128\)"),
    "state heads": ({"initial_state": torch.zeros(3, 5, 128, 128)}, r"initial_state has shape \(3, 5, 128, 128\)"),
    "state strided inside": ({"initial_state": torch.zeros(3, 4, 128, 256)[..., ::2]}, "contiguous inner"),
    "A_log size": ({"A_log": torch.zeros(3)}, "A_log has shape"),
    "output dtype": ({"output": torch.zeros(3, 1, 4, 128)}, "output has dtype torch.float32"),
    "buffer steps": (
        {"intermediate_states_buffer": torch.zeros(3, 0, 4, 128, 128)},
        "intermediate_states_buffer has shape .* at least 1 steps",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument(name):
    """Every refusal is an UnsupportedProblem (a ValueError) that names the argument, what was given and what is accepted."""
    changes, match = REFUSALS[name]
    case = make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), "cpu")
    refused(match, call, case, **changes)


def test_heads_that_do_not_divide_are_refused():
    """HV must be a multiple of H: the compiled call cannot check it, and would divide by zero or read beyond q."""
    case = make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), "cpu")
    case.q, case.k = (torch.cat([x, x[:, :, :1]], 2) for x in (case.q, case.k))
    refused("HV=4.*H=3.*multiple", call, case)


def test_head_sizes_that_no_kernel_serves_are_refused():
    """A head size that is not served is refused, never served in part."""
    case = make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), "cpu")
    case.q, case.k = case.q[..., :80], case.k[..., :80]
    refused("K=80: accepted are 64, 96, 128, 256", call, case, initial_state=torch.zeros(3, 4, 128, 80))


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("initial_state_indices", [0, 1, 99], "initial_state_indices.*99.*slots"),
        ("output_state_indices", [0, 1, 1], "two requests would write one slot"),
    ],
)
def test_checked_mode_reads_the_indices(field, value, match, monkeypatch):
    """GDNTUNE_CHECK=1 raises for what a kernel clamps: indices outside the pool, two requests that write one slot."""
    monkeypatch.setenv("GDNTUNE_CHECK", "1")
    ops._checking.cache_clear()
    try:
        case = make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), "cpu")
        refused(match, call, case, **{field: torch.tensor(value, dtype=torch.int32)})
    finally:
        monkeypatch.delenv("GDNTUNE_CHECK")
        ops._checking.cache_clear()


def test_batch_invariant_gives_the_same_bits_in_any_batch():
    """A token decoded alone and in a batch of many has the same bits with batch_invariant=True."""
    case = make_case(Problem(CONTRACTS["rows"], 16, 2, 4), "cpu")
    alone = case.clone()
    whole = call(case, output=None, batch_invariant=True)
    one = ("q", "k", "v", "a", "b", "state")
    for name in one:
        setattr(alone, name, getattr(alone, name)[5:6])
    assert torch.equal(call(alone, output=None, batch_invariant=True), whole[5:6])


def test_docstrings_say_what_is_static():
    """Each argument of the public functions stands in the docstring, which says what is compiled in and what is not."""
    for function in (gdntune.gated_delta_rule_decode, gdntune.kda_decode, gdntune.gated_delta_rule_packed_decode):
        text = function.__doc__ + gdntune.gated_delta_rule_decode.__doc__
        names = function.__code__.co_varnames[: function.__code__.co_argcount + function.__code__.co_kwonlyargcount]
        assert [n for n in names if n not in text] == []
        assert "tatic" in text


def test_contract_fields_are_documented():
    """Every field of Contract is explained in its docstring."""
    assert [f.name for f in msgspec.structs.fields(problem.Contract) if f.name not in problem.Contract.__doc__] == []
