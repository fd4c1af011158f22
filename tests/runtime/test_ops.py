"""The public functions on CPU tensors: what they compute, what they accept, what they refuse; on
CUDA tensors where there are any.
"""

import dataclasses

import msgspec
import numpy
import pytest
import torch
from public import DEVICES, call
from public_calls import CONTRACTS, ONE

import gdntune
from gdntune import problem
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.problem import Contract, Problem
from gdntune.runtime import dispatch


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CONTRACTS)
def test_public_call_agrees_with_the_reference(name, device):
    """Each kind of call reaches a kernel that serves it, and every place it writes holds what the
    fp64 reference says.
    """
    contract = CONTRACTS[name]
    options = {"split": True, "padding": 0.3} if contract.pool else {}
    truth = Truth(make_case(Problem(contract, 4, 2, 4), device, seed=3, **options))
    case = truth.before.clone()
    returned = call(case)
    assert returned is case.output
    truth.judge(case).require()


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
    """The call that vLLM and SGLang make: q, k, v in one tensor, 2-D gates, slot 0 as padding; the
    same bits as the plain call.
    """
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


def test_numbers_of_numpy_and_flags_of_numbers():
    """What is as good as a Python number is accepted: numpy's scalars, 0 and 1 as flags."""
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cpu")
    alike, state = call(case.clone(), output=None), numpy.float32(case.scale)
    assert torch.equal(
        call(case, output=None, scale=state, null_index=numpy.int64(-1), use_qk_l2norm=numpy.True_),
        alike,
    )


def test_no_heads_are_no_work(monkeypatch):
    """Fault: HV=0 was launched, by the last interval's function, and a launch of no blocks is an
    error on CUDA.
    """
    monkeypatch.setattr(dispatch.Bound, "at", None)
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cpu")
    none = {n: getattr(case, n)[:, :, :0] for n in "vab"}
    changes = {
        "initial_state": case.state[:, :0],
        "A_log": case.A_log[:0],
        "dt_bias": case.dt_bias[:0],
        "output": None,
    }
    assert call(dataclasses.replace(case, **none), **changes).shape == (3, 1, 0, 128)


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
    """Each argument of the public functions stands in the docstring, which says what is compiled in
    and what is not.
    """
    for function in (
        gdntune.gated_delta_rule_decode,
        gdntune.kda_decode,
        gdntune.gated_delta_rule_packed_decode,
    ):
        text = function.__doc__ + gdntune.gated_delta_rule_decode.__doc__
        names = function.__code__.co_varnames[
            : function.__code__.co_argcount + function.__code__.co_kwonlyargcount
        ]
        assert [n for n in names if n not in text] == []
        assert "tatic" in text


def test_contract_fields_are_documented():
    """Every field of Contract is explained in its docstring."""
    assert [
        f.name
        for f in msgspec.structs.fields(problem.Contract)
        if f.name not in problem.Contract.__doc__
    ] == []
