"""What the public functions refuse, and in which words."""

import dataclasses
import math
import warnings
from pathlib import Path

import pytest
import torch
from public import call, refused
from public_calls import CONTRACTS, DENSE, ONE, RAGGED, SLOTS, int32, packed

import gdntune
from gdntune.checking.cases import make_case
from gdntune.device import arch
from gdntune.errors import BuildError, GdntuneError, ToolMissing, UnsupportedProblem
from gdntune.objects.build import Built
from gdntune.objects.store import Store
from gdntune.problem import Contract, Problem
from gdntune.runtime import arguments, dispatch
from gdntune.runtime import call as calls

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # a prototype, says torch
    NESTED = torch.nested.nested_tensor([torch.zeros(4), torch.zeros(3)])


REFUSALS = {
    # which arguments go together
    "no gate": (ONE, {"A_log": None}, "A_log, a and dt_bias"),
    "both gates": (ONE, {"g": torch.zeros(3, 1, 4)}, "g and A_log/a/dt_bias .* one of the two"),
    "no beta": (ONE, {"b": None}, "beta: expected b .*logit"),
    "both betas": (ONE, {"beta": torch.zeros(3, 1, 4)}, "beta: .* one of the two"),
    "accepted without slots": (ONE, {"num_accepted_tokens": int32(3)}, "num_accepted_tokens without ssm_state_indices"),
    "write index while frozen": (ONE, {"disable_state_update": True}, "output_state_indices with disable_state_update"),
    "write index alone": ("rows", {"output_state_indices": int32(3)}, "output_state_indices without initial_state_indices"),
    "buffer index alone": (ONE, {"intermediate_state_indices": int32(3)}, "intermediate_state_indices without intermediate_states_buffer"),
    "read index with slots": (SLOTS, {"initial_state_indices": int32(3)}, "initial_state_indices with ssm_state_indices"),
    "buffer with slots": (SLOTS, {"intermediate_states_buffer": torch.zeros(3, 3, 4, 128, 128)}, "intermediate_states_buffer with ssm_state_indices"),
    "buffer index with slots": (SLOTS, {"intermediate_state_indices": int32(3)}, "intermediate_state_indices with ssm_state_indices"),
    "max_tokens alone": (ONE, {"max_tokens": 4}, "max_tokens without cu_seqlens"),
    # scalars
    "max_tokens of none": (RAGGED, {"max_tokens": 0}, "max_tokens=0: expected 1 to 16"),
    "max_tokens too large": (RAGGED, {"max_tokens": 17}, "max_tokens=17: expected 1 to 16"),
    "layout": (ONE, {"state_layout": "k_first"}, "state_layout='k_first': expected one of k_last, v_last"),
    "scale": (ONE, {"scale": "large"}, "scale='large': expected a finite number"),
    "scale nan": (ONE, {"scale": math.nan}, "scale=nan: expected a finite number, or None"),
    "scale inf": (ONE, {"scale": -math.inf}, "scale=-inf: expected a finite number"),
    "scale beyond fp32": (ONE, {"scale": 1e39}, "scale=1e.39: expected .* within fp32's range"),
    "scale of 400 digits": (ONE, {"scale": 10**400}, "scale=10*: expected .* within fp32's range"),
    "scale of a tensor": (ONE, {"scale": torch.tensor(1.0)}, "scale is of type Tensor: expected a finite number"),
    "scale of a list": (ONE, {"scale": [1.0]}, "scale is of type list: expected a finite number"),
    "softplus_beta of none": (ONE, {"softplus_beta": 0.0}, "softplus_beta=0.0: expected a finite number above 0"),
    "softplus_threshold nan": (ONE, {"softplus_threshold": math.nan}, "softplus_threshold=nan: expected a finite number from 0"),
    "null_index of a half": (ONE, {"null_index": 0.5}, "null_index=0.5: expected an int"),
    "null_index of 33 bits": (ONE, {"null_index": 2**32}, "null_index=4294967296: expected an int within int32"),
    "l2norm of a word": (ONE, {"use_qk_l2norm": "false"}, "use_qk_l2norm='false': expected True or False"),
    "neg_eigval of none": (ONE, {"allow_neg_eigval": None}, "allow_neg_eigval=None: expected True or False"),
    "frozen of a list": ("rows", {"disable_state_update": [True]}, "disable_state_update is of type list: expected True or False"),
    "frozen of a tensor": ("rows", {"disable_state_update": torch.ones(2)}, "disable_state_update is of type Tensor: expected True or"),
    "batch_invariant of a number": (ONE, {"batch_invariant": 2}, "batch_invariant=2: expected True or False"),
    "max_tokens of a word": (RAGGED, {"max_tokens": "4"}, "max_tokens='4': expected 1 to 16"),
    "max_tokens of a half": (RAGGED, {"max_tokens": 1.5}, "max_tokens=1.5: expected 1 to 16"),
    "layout of a list": (ONE, {"state_layout": ["k_last"]}, "state_layout is of type list: expected one of k_last, v_last"),
    # dtypes
    "index of bools": (ONE, {"initial_state_indices": torch.ones(3, dtype=torch.bool)}, "initial_state_indices has dtype torch.bool: .*int32.*int64"),
    "index dtype": (ONE, {"initial_state_indices": torch.zeros(3)}, "initial_state_indices has dtype torch.float32: .*int32.*int64"),
    "write index dtype": (ONE, {"output_state_indices": torch.zeros(3)}, "output_state_indices has dtype torch.float32"),
    "slots dtype": (SLOTS, {"ssm_state_indices": torch.zeros(3, 3)}, "ssm_state_indices has dtype torch.float32"),
    "accepted dtype": (SLOTS, {"num_accepted_tokens": torch.zeros(3)}, "num_accepted_tokens has dtype torch.float32"),
    "cu_seqlens dtype": (RAGGED, {"cu_seqlens": torch.zeros(4)}, "cu_seqlens has dtype torch.float32"),
    "state dtype": (ONE, {"initial_state": torch.zeros(3, 4, 128, 128, dtype=torch.float64)}, "initial_state has dtype torch.float64: expected one of torch.bfloat16"),
    "output dtype": (ONE, {"output": torch.zeros(3, 1, 4, 128)}, "output has dtype torch.float32: expected q's, torch.bfloat16"),
    "buffer dtype": (DENSE, {"intermediate_states_buffer": torch.zeros(3, 3, 4, 128, 128).bfloat16()}, "intermediate_states_buffer has dtype torch.bfloat16: expected initial_state's"),
    "A_log dtype": (ONE, {"A_log": torch.zeros(4, dtype=torch.float64)}, "A_log has dtype torch.float64: expected one of"),
    "dt_bias dtype": (ONE, {"dt_bias": torch.zeros(4, dtype=torch.float64)}, "dt_bias has dtype torch.float64: expected one of"),
    "b dtype": (ONE, {"b": torch.zeros(3, 1, 4, dtype=torch.int32)}, "b has dtype torch.int32: expected one of"),
    # shapes
    "index length": (ONE, {"initial_state_indices": int32(2)}, r"initial_state_indices has shape \(2,\).*\[3\]"),
    "index rank": (ONE, {"initial_state_indices": int32(3, 1)}, r"initial_state_indices has shape \(3, 1\).*\[3\]"),
    "write index length": (ONE, {"output_state_indices": int32(4)}, r"output_state_indices has shape \(4,\).*\[3\]"),
    "slots rank": (SLOTS, {"ssm_state_indices": int32(3)}, r"ssm_state_indices has shape \(3,\) for T=3: expected \[B, 1\+S\]"),
    "slots columns": (SLOTS, {"ssm_state_indices": int32(3, 2)}, r"ssm_state_indices has shape \(3, 2\) for T=3"),
    "slots rows": (SLOTS, {"ssm_state_indices": int32(2, 3)}, r"ssm_state_indices has shape \(2, 3\).*\[3, 1\+S\]"),
    "accepted length": (SLOTS, {"num_accepted_tokens": int32(4)}, r"num_accepted_tokens has shape \(4,\).*\[3\]"),
    "state rank": (ONE, {"initial_state": torch.zeros(3, 4, 128)}, r"initial_state has shape \(3, 4, 128\)"),
    "state heads": (ONE, {"initial_state": torch.zeros(3, 5, 128, 128)}, r"initial_state has shape \(3, 5, 128, 128\).*\[slots, 4, 128, 128\]"),
    "state K": (ONE, {"initial_state": torch.zeros(3, 4, 128, 64)}, r"initial_state has shape \(3, 4, 128, 64\).*\[slots, 4, 128, 128\]"),
    "state rows": ("rows", {"initial_state": torch.zeros(5, 4, 128, 128)}, "initial_state has 5 rows for 3 requests"),
    "A_log size": (ONE, {"A_log": torch.zeros(3)}, r"A_log has shape \(3,\).*\[4\]"),
    "A_log of a q/k head": (ONE, {"A_log": torch.zeros(2)}, r"A_log has shape \(2,\).*\[4\]"),
    "A_log of no dimension": (ONE, {"A_log": torch.tensor(0.0)}, r"A_log has shape \(\).*\[4\]"),
    "dt_bias of a q/k head": (ONE, {"dt_bias": torch.zeros(2)}, r"dt_bias \(2,\).*\[4\]"),
    "b shape": (ONE, {"b": torch.zeros(3, 4)}, r"b has shape \(3, 4\).*\[3, 1, 4\]"),
    "output shape": (ONE, {"output": torch.zeros(3, 1, 5, 128).bfloat16()}, r"output has shape \(3, 1, 5, 128\).*\[3, 1, 4, 128\]"),
    "buffer rank": (DENSE, {"intermediate_states_buffer": torch.zeros(3, 3, 4, 128)}, r"intermediate_states_buffer has shape \(3, 3, 4, 128\)"),
    "buffer steps": (DENSE, {"intermediate_states_buffer": torch.zeros(3, 2, 4, 128, 128)}, "intermediate_states_buffer has shape .* at least 3 steps"),
    "buffer rows": (DENSE, {"intermediate_states_buffer": torch.zeros(2, 3, 4, 128, 128)}, "intermediate_states_buffer has shape .* at least 3 rows"),
    "buffer heads": (DENSE, {"intermediate_states_buffer": torch.zeros(3, 3, 5, 128, 128)}, r"intermediate_states_buffer has shape .*\[rows, steps, 4, 128, 128\]"),
    "cu_seqlens rank": (RAGGED, {"cu_seqlens": int32(4, 1)}, r"cu_seqlens has shape \(4, 1\): expected \[B\+1\]"),
    "cu_seqlens of no dimension": (RAGGED, {"cu_seqlens": torch.tensor(3)}, r"cu_seqlens has shape \(\): expected \[B\+1\]"),
    "cu_seqlens of none": (RAGGED, {"cu_seqlens": int32(0)}, r"cu_seqlens has shape \(0,\): expected \[B\+1\]"),
    "cu_seqlens of more requests": (RAGGED, {"cu_seqlens": int32(6)}, r"initial_state_indices has shape \(3,\) for cu_seqlens of 5 requests"),
    "buffer rows of ragged": (RAGGED, {"intermediate_states_buffer": torch.zeros(3, 4, 4, 128, 128), "intermediate_state_indices": int32(2)}, r"intermediate_state_indices has shape \(2,\) for cu_seqlens of 3 requests"),
    "slots of ragged": (RAGGED, {"initial_state_indices": None, "output_state_indices": None, "ssm_state_indices": int32(4, 4)}, r"ssm_state_indices has shape \(4, 4\) for cu_seqlens of 3 requests"),
    # no tensors
    "state of a list": (ONE, {"initial_state": [0.0]}, "initial_state is of type list: expected a torch.Tensor"),
    "no state": (ONE, {"initial_state": None}, "initial_state is of type NoneType: expected a torch.Tensor"),
    "A_log of a number": (ONE, {"A_log": 1.0}, "A_log is of type float: expected a torch.Tensor"),
    "b of a list": (ONE, {"b": [1.0]}, "b is of type list: expected a torch.Tensor"),
    "index of a list": (ONE, {"initial_state_indices": [0, 1, 2]}, "initial_state_indices is of type list: expected a torch.Tensor"),
    "write index of a list": (ONE, {"output_state_indices": [0, 1, 2]}, "output_state_indices is of type list: expected a torch.Tensor"),
    "slots of a list": (SLOTS, {"ssm_state_indices": [[0, 1, 2]] * 3}, "ssm_state_indices is of type list: expected a torch.Tensor"),
    "bounds of a list": (RAGGED, {"cu_seqlens": [0, 4, 8, 12]}, "cu_seqlens is of type list: expected a torch.Tensor"),
    "index of ragged": (RAGGED, {"initial_state_indices": [0, 1, 2]}, "initial_state_indices is of type list: expected a torch.Tensor"),
    "buffer of a list": (DENSE, {"intermediate_states_buffer": [0.0]}, "intermediate_states_buffer is of type list: expected a torch.Tensor"),
    "output of a word": (ONE, {"output": "new"}, "output is of type str: expected a torch.Tensor"),
    "state of an array": (ONE, {"initial_state": torch.zeros(3, 4, 128, 128).numpy()}, "initial_state is of type ndarray: expected a torch.Tensor"),
    "A_log of an array": (ONE, {"A_log": torch.zeros(4).numpy()}, "A_log is of type ndarray: expected a torch.Tensor"),
    "state of no dimension": ("rows", {"initial_state": torch.tensor(0.0)}, r"initial_state has shape \(\): expected \[slots, HV, V, K\]"),
    "b sparse": (ONE, {"b": torch.zeros(3, 1, 4).bfloat16().to_sparse()}, "b is a torch.sparse_coo tensor: expected dense ones"),
    "A_log nested": (ONE, {"A_log": NESTED}, "A_log is a nested tensor: expected dense ones"),
    # gradients
    "state with a gradient": (ONE, {"initial_state": torch.zeros(3, 4, 128, 128, requires_grad=True)}, "^initial_state: requires_grad is set .*inference_mode"),
    "b with a gradient": (ONE, {"b": torch.zeros(3, 1, 4, dtype=torch.bfloat16, requires_grad=True)}, "^b: requires_grad is set"),
    # strides and devices
    "state strided inside": (ONE, {"initial_state": torch.zeros(3, 4, 128, 256)[..., ::2]}, "initial_state .* contiguous inner"),
    "state with its heads apart": (ONE, {"initial_state": torch.zeros(3, 4, 128, 256)[..., :128]}, "initial_state .* contiguous inner"),
    "buffer transposed inside": (DENSE, {"intermediate_states_buffer": torch.zeros(3, 3, 4, 128, 128).transpose(-1, -2)}, "intermediate_states_buffer .* contiguous inner"),
    "output strided inside": (ONE, {"output": torch.zeros(3, 1, 4, 256).bfloat16()[..., ::2]}, "output .* contiguous inner"),
    "another device": (ONE, {"initial_state": torch.zeros(3, 4, 128, 128, device="meta")}, "initial_state .* on meta: expected a tensor on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_name_the_argument(name, when):
    """Every refusal is an UnsupportedProblem (a ValueError) that names the argument, what was given
    and what is expected.

    On the first call, and after right ones, which find their function bound and pass no check of a
    contract.
    """
    kind, changes, match = REFUSALS[name]
    calls.forget()
    if when == "later":
        call(make_case(Problem(CONTRACTS[kind], 3, 2, 4), "cpu"))
    refused(match, call, make_case(Problem(CONTRACTS[kind], 3, 2, 4), "cpu"), **changes)


FLOW = {
    "q rank": ({"q": lambda x: x[0]}, r"q has shape \(1, 2, 128\).*\[B, T, H, K\]"),
    "v rank": ({"v": lambda x: x[None]}, r"v \(1, 3, 1, 4, 128\).*\[B, T, HV, V\]"),
    "k batch": ({"k": lambda x: x[:2]}, r"k has shape \(2, 1, 2, 128\).*\[3, 1, 2, 128\]"),
    "k heads": ({"k": lambda x: x[:, :, :1]}, r"k has shape \(3, 1, 1, 128\).*\[3, 1, 2, 128\]"),
    "k dtype": ({"k": lambda x: x.float()}, "k has dtype torch.float32: expected q's, torch.bfloat16"),
    "v dtype": ({"v": lambda x: x.half()}, "v has dtype torch.float16: expected q's, torch.bfloat16"),
    "q dtype": ({"q": lambda x: x.double()}, "q has dtype torch.float64: expected one of"),
    "q strided inside": ({"q": lambda x: torch.cat((x, x), -1)[..., ::2]}, "q .* contiguous inner"),
    "q device": ({"q": lambda x: x.to("meta")}, "tensors are on meta: expected cuda or cpu"),
    "a shape": ({"a": lambda x: x[:2]}, r"a has shape \(2, 1, 4\).*\[3, 1, 4\]"),
    "a dtype": ({"a": lambda x: x.int()}, "a has dtype torch.int32: expected one of"),
    "q of a list": ({"q": lambda x: x.tolist()}, "q is of type list: expected a torch.Tensor"),
    "k of none": ({"k": lambda x: None}, "k is of type NoneType: expected a torch.Tensor"),
    "a of a list": ({"a": lambda x: x.tolist()}, "a is of type list: expected a torch.Tensor"),
    "q with a gradient": (dict.fromkeys("qk", lambda x: x.requires_grad_()), "^q, k: requires_grad is set and gradients are on"),
    "T of none": (dict.fromkeys("qkvab", lambda x: x[:, :0]), "tokens=0: expected 1 to 16"),
    "T too large": (dict.fromkeys("qkvab", lambda x: x.repeat_interleave(17, 1)), "tokens=17: expected 1 to 16"),
    "V": ({"v": lambda x: x[..., :48]}, "V=48: expected multiples of 32"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLOW)
def test_refusals_of_what_flows(name):
    """As above for q, k, v and the gates, which the public call takes by position."""
    changes, match = FLOW[name]
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cpu")
    for field, change in changes.items():
        setattr(case, field, change(getattr(case, field)))
    refused(match, call, case, output=None)


def test_refusals_hold_on_later_calls():
    """Fault: what a compiled call does not tie was refused on the first call alone: later ones find
    their function bound.
    """
    case = make_case(Problem(CONTRACTS[RAGGED], 3, 2, 4), "cpu")
    call(case)
    refused("k has dtype", call, dataclasses.replace(case, k=case.k.float()))
    twice = {name: torch.cat([getattr(case, name)] * 2) for name in "qkvab"}
    refused(
        r"q has shape \(2, .*packed rows", call, dataclasses.replace(case, **twice), output=None
    )
    refused("cu_seqlens of 2 requests", call, case, cu_seqlens=case.cu_seqlens[:3])


@pytest.mark.parametrize(
    "changes, match",
    [
        ({"mixed_qkv": torch.zeros(3, 1, 1024)}, r"mixed_qkv has shape \(3, 1, 1024\).*\[B, 2\*H\*K \+ HV\*V\]"),
        ({"a": torch.zeros(3, 1, 4)}, r"a \(3, 1, 4\).*\[B, HV\]"),
        ({"b": torch.zeros(3, 1, 4)}, r"initial_state \(5, 4, 128, 128\): expected"),
        ({"initial_state": torch.zeros(5, 4, 128)}, r"initial_state \(5, 4, 128\): expected"),
        ({"mixed_qkv": torch.zeros(3, 1000)}, r"1000 columns with HV=4, K=128, V=128: expected 2\*H\*K \+ HV\*V"),
        ({"mixed_qkv": torch.zeros(3, 512)}, "512 columns"),
        ({"mixed_qkv": torch.zeros(3, 3 * 256 + 512)}, "HV=4 heads and q H=3: HV must be a multiple of H"),
        ({"initial_state": torch.zeros(5, 4, 128, 0)}, "1024 columns with HV=4, K=0"),
        ({"initial_state": torch.zeros(5, 3, 128, 128)}, r"initial_state has shape \(5, 3, 128, 128\).*\[slots, 4, 128, 128\]"),
        ({"state_layout": "both"}, "state_layout='both': expected one of k_last, v_last"),
        ({"A_log": torch.zeros(2)}, r"A_log has shape \(2,\).*\[4\]"),
        ({"initial_state_indices": torch.zeros(3)}, "initial_state_indices has dtype torch.float32"),
        ({"mixed_qkv": [0.0]}, "mixed_qkv is of type list: expected a torch.Tensor"),
        ({"mixed_qkv": None}, "mixed_qkv is of type NoneType: expected a torch.Tensor"),
        ({"b": "b"}, "b is of type str: expected a torch.Tensor"),
        ({"dt_bias": None}, "dt_bias is of type NoneType: expected a torch.Tensor"),
        ({"initial_state_indices": None, "initial_state": torch.zeros(3, 4, 128, 128)}, "initial_state_indices is of type NoneType: expected"),
        ({"scale": math.nan}, "scale=nan: expected a finite number"),
        ({"state_layout": []}, "state_layout is of type list: expected one of k_last, v_last"),
    ],
)  # fmt: skip
def test_refusals_of_the_packed_call(changes, match):
    """As above for the call that takes q, k and v in one tensor."""
    refused(match, packed, **changes)


@pytest.mark.parametrize(
    "changes, sizes, match",
    [
        ({}, (0, 2, 4), "B=0: expected integers from 1"),
        ({}, (1, 3, 4), "HV=4, H=3: HV must be a multiple of H"),
        ({"K": 80}, (1, 2, 4), "K=80: expected one of 64, 96, 128, 256"),
        ({"V": 544}, (1, 2, 4), "V=544: expected multiples of 32 from 32 to 512"),
        ({"tokens": 17}, (1, 2, 4), "tokens=17: expected 1 to 16"),
        (
            {"gate": "softplus"},
            (1, 2, 4),
            "gate='softplus' with op=gdn_decode: expected one of raw, log",
        ),
        ({"state_dtype": "fp8"}, (1, 2, 4), "state_dtype='fp8': expected one of bf16, fp16, fp32"),
        ({"accepted": True}, (1, 2, 4), "num_accepted_tokens goes with 'slots' alone"),
        (
            {"intermediate": "slots", "pool": False},
            (1, 2, 4),
            "intermediate='slots' without a pool",
        ),
        ({}, ("1", 2, 4), "B='1': expected int"),
        ({}, (1, 2, 4.0), "HV=4.0: expected int"),
        ({"tokens": "1"}, (1, 2, 4), "tokens='1': expected int"),
        ({"V": [128]}, (1, 2, 4), "V is of type list: expected int"),
        ({"pool": "no"}, (1, 2, 4), "pool='no': expected bool"),
        ({"layout": None}, (1, 2, 4), "layout=None: expected one of k_last, v_last"),
    ],
)
def test_refusals_of_plan_and_prepare(changes, sizes, match):
    """A problem or a contract that no call can have is refused before anything is compiled."""
    contract = Contract().replace(**changes)
    refused(match, gdntune.plan, Problem(contract, *sizes), "cpu")
    if changes:
        refused(match, gdntune.prepare, contract, "cpu")


def test_a_device_that_no_kernel_knows():
    """plan and prepare say which devices there are."""
    refused(
        "device='tpu': expected 'cuda' or 'cpu'",
        gdntune.plan,
        Problem(Contract(), 1, 2, 4),
        "tpu",
    )
    refused("device='tpu': expected 'cuda' or 'cpu'", gdntune.prepare, Contract(), "tpu")


@pytest.mark.parametrize(
    "public, given, match",
    [
        (gdntune.plan, ("x", "cpu"), "the problem is of type str: expected a gdntune.Problem"),
        (gdntune.plan, (Contract(), "cpu"), "the problem is of type Contract: expected a gdntune.Problem"),
        (gdntune.plan, (Problem({}, 1, 2, 4), "cpu"), "the contract is of type dict: expected a gdntune.Contract"),
        (gdntune.plan, (Problem(Contract(), 1, 2, 4), torch.device("cpu")), "device is of type device: expected 'cuda' or 'cpu'; index="),
        (gdntune.plan, (Problem(Contract(), 1, 2, 4), "cpu", 1), "index=1: expected 0 on the CPU"),
        (gdntune.plan, (Problem(Contract(), 1, 2, 4), "cuda", "0"), "index='0': expected an int from 0"),
        (gdntune.prepare, ("x", "cpu"), "the contract is of type str: expected a gdntune.Contract"),
        (gdntune.prepare, ([], "cpu"), "the contract is of type list: expected a gdntune.Contract"),
        (gdntune.prepare, (Contract(), []), "device is of type list: expected"),
        (gdntune.load_table, (123,), "path is of type int: expected a str or a pathlib.Path"),
        (gdntune.load_table, (None,), "path is of type NoneType: expected a str or a pathlib.Path"),
        (gdntune.load_table, ("x.json", "cpu:0"), "device='cpu:0': expected 'cuda' or 'cpu'"),
    ],
)  # fmt: skip
def test_refusals_of_wrong_types(public, given, match):
    """What is no Problem, Contract, path or device at all is refused in the same way."""
    refused(match, public, *given)


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
def test_gradients_that_are_off(off):
    """Tensors of a model whose parameters require a gradient are as good as others where gradients
    are off.
    """
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cpu")
    alike = call(case.clone(), output=None)
    with off():
        assert torch.equal(
            call(dataclasses.replace(case, q=case.q.requires_grad_()), output=None), alike
        )


def test_what_is_no_fault_of_the_arguments_passes_through(monkeypatch):
    """Fault: a missing compiler, a RuntimeError too, was reported as a failed call, without its
    type and its remedy.
    """
    case = make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), "cpu")
    for error in (ToolMissing("no compiler"), BuildError("does not compile")):

        def at(self, work_units, error=error):
            raise error

        monkeypatch.setattr(dispatch.Bound, "at", at)
        calls.forget()
        with pytest.raises(type(error), match=str(error)):
            call(case)

    def fails(*arguments):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(dispatch.Bound, "at", lambda self, work_units: fails)
    calls.forget()
    with pytest.raises(
        GdntuneError, match="gdn_decode failed: RuntimeError: out of luck"
    ) as caught:
        call(case)
    assert not isinstance(caught.value, UnsupportedProblem)


def test_what_a_compiled_call_says_is_passed_on(monkeypatch):
    """A refusal that no argument explains is a refusal all the same, with the compiled call's
    words.
    """

    def odd(*arguments):
        raise ValueError("q is odd")

    monkeypatch.setattr(dispatch.Bound, "at", lambda self, work_units: odd)
    calls.forget()
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cpu")
    refused("the compiled gdn_decode refused its arguments: q is odd", call, case)


def test_faults_of_a_call_by_convention():
    """What the public functions find before they call, said of a call by the kernels' convention
    too: no tensor, dtypes, rows of KDA.
    """
    case = make_case(Problem(CONTRACTS["kda softplus"], 3, 2, 4), "cpu")

    def fault(**changes):
        return refused(
            ".",
            arguments.check_values,
            case.contract,
            dataclasses.replace(case, **changes).arguments(),
        )

    assert fault(read_index=None) == "initial_state_indices is None: expected a tensor [3]"
    assert fault(v=case.v.float()) == "v has dtype torch.float32: expected q's, torch.bfloat16"
    said = fault(A_log=torch.zeros(3))
    assert (
        "A_log has shape (3,)" in said and "one row a value head or one a q/k head, [2, 4]" in said
    )


def test_only_what_was_passed_is_named():
    """Fault: wrong initial_state_indices were refused a second time as output_state_indices, which
    the caller had not passed.
    """
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cpu")
    case.write_index = None
    said = refused("initial_state_indices has shape", call, case, initial_state_indices=int32(2))
    assert "output_state_indices" not in said and said.count("expected") == 1
    both = refused(".", call, case, initial_state_indices=int32(2), output_state_indices=int32(4))
    assert "output_state_indices has shape (4,)" in both


@pytest.mark.parametrize(
    "public", [gdntune.plan, gdntune.prepare, call], ids=["plan", "prepare", "call"]
)
def test_a_variant_that_does_not_compile(public, monkeypatch):
    """Compiling on first use fails by name and reason."""
    contract = Contract(
        K=64, V=32, state_dtype="fp16", beta="given", gate="log", layout="v_last", mode="frozen"
    )
    problem = Problem(contract, 1, 1, 1)

    def compiled(specs, store, **options):
        return [Built(spec, None, "no room") for spec, _ in specs]

    monkeypatch.setattr("gdntune.objects.build.compile_objects", compiled)
    monkeypatch.setattr(
        dispatch,
        "runtime",
        lambda *_: dispatch.Runtime(arch.detect("cpu"), Store(Path("/nowhere"))),
    )
    monkeypatch.setattr(calls, "runtime", dispatch.runtime)
    calls.forget()
    given = {gdntune.plan: (problem, "cpu"), gdntune.prepare: (contract, "cpu")}.get(public) or (
        make_case(problem, "cpu"),
    )
    with pytest.raises(BuildError, match="gdntune_cpu_recurrent_.* does not compile: no room"):
        public(*given)
    calls.forget()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "field, change, match",
    [
        ("q", lambda x: torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape), "q .* address .* is not a multiple of 16 bytes"),
        ("v", lambda x: torch.cat((x, x[..., :1, :]), -2).flatten(-2)[..., 1 : 1 + 4 * 128].unflatten(-1, (4, 128)), "v .* is not a multiple of 16 bytes"),
        ("state", lambda x: torch.cat((x.flatten(1), x.flatten(1)[:, :1]), 1)[:, :-1].unflatten(1, x.shape[1:]), "initial_state .* stride .* is not a multiple of 16 bytes"),
    ],
)  # fmt: skip
def test_refusals_of_what_cannot_be_loaded_at_once(field, change, match):
    """On a GPU: addresses and strides that are no multiple of 16 bytes are refused by name, not
    read wrongly.
    """
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cuda")
    setattr(case, field, change(getattr(case, field)))
    refused(match, call, case)


def test_heads_that_do_not_divide_are_refused():
    """HV must be a multiple of H: the compiled call cannot check it, and would divide by zero or
    read beyond q.
    """
    case = make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), "cpu")
    case.q, case.k = (torch.cat([x, x[:, :, :1]], 2) for x in (case.q, case.k))
    refused("HV=4.*H=3.*multiple", call, case)


def test_head_sizes_that_no_kernel_serves_are_refused():
    """A head size that is not served is refused, never served in part."""
    case = make_case(Problem(CONTRACTS["T=1 pool"], 3, 2, 4), "cpu")
    case.q, case.k = case.q[..., :80], case.k[..., :80]
    refused(
        "K=80: expected one of 64, 96, 128, 256",
        call,
        case,
        initial_state=torch.zeros(3, 4, 128, 80),
    )
