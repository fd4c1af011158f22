"""Calls of more requests than a launch has blocks for."""

import pytest
import torch
from public import call

import gdntune
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.problem import Contract, Problem
from gdntune.runtime import call as calls
from gdntune.runtime import parts

FP32 = {"state_dtype": "fp32", "K": 64, "V": 64}
CONTRACTS = {
    "pool": Contract(**FP32),
    "in order": Contract(**FP32, pool=False, tokens=2),
    "dense": Contract(**FP32, tokens=3, intermediate="dense", mode="frozen"),
    "indexed": Contract(**FP32, tokens=2, intermediate="indexed"),
    "slots": Contract(**FP32, tokens=3, intermediate="slots", accepted=True, mode="frozen"),
    "ragged": Contract(**FP32, tokens=4, ragged=True),
    "kda": Contract(**FP32, op="kda_decode", gate="softplus", tokens=2),
}


@pytest.fixture(autouse=True)
def two_a_launch(monkeypatch):
    """Two requests a launch; what was bound before is looked at anew."""
    monkeypatch.setattr(parts, "MAX_REQUESTS", 2)
    calls.forget()
    yield
    calls.forget()


@pytest.fixture
def launches(monkeypatch):
    """The requests of each launch of a call."""
    made, whole = [], parts.in_parts

    def counting(function, contract):
        def counted(*arguments):
            made.append(_requests(contract, arguments))
            function(*arguments)

        return whole(counted, contract)

    monkeypatch.setattr(parts, "in_parts", counting)
    return made


def _requests(contract, arguments):
    t = calls.Tensors._make(arguments[: parts.TENSORS])
    return len(t.cu_seqlens) - 1 if contract.ragged else len(t.q)


@pytest.mark.parametrize("name", CONTRACTS)
def test_each_request_is_decoded_once(name, launches):
    """Five requests by launches of two, on the first call and on one that is known: every place
    that is written holds what the reference says. Before, more than 65535 were refused.
    """
    contract = CONTRACTS[name]
    options = {"split": True, "padding": 0.3} if contract.pool else {}
    truth = Truth(make_case(Problem(contract, 5, 1, 2), "cpu", seed=3, **options))
    for _ in range(2):
        case = truth.before.clone()
        call(case)
        truth.judge(case).require()
    assert launches == [2, 2, 1] * 2


@pytest.mark.parametrize("name", ["pool", "ragged"])
def test_a_plan_takes_as_many(name, launches):
    """A plan's calls are parts above the limit alone."""
    contract = CONTRACTS[name]
    case = make_case(Problem(contract, 5, 1, 2), "cpu", seed=3)
    want = call(case, output=None, output_state_indices=None)
    case = make_case(Problem(contract, 5, 1, 2), "cpu", seed=3)
    launches.clear()
    plan = gdntune.plan(Problem(contract, 5, 1, 2), "cpu")
    out = torch.empty_like(case.output)
    given = {f: getattr(case, f) for f in ("A_log", "dt_bias", "cu_seqlens")}
    plan(
        case.q, case.k, case.v, case.a, case.b, initial_state=case.state, output=out,
        initial_state_indices=case.read_index, output_state_indices=case.read_index, **given,
    )  # fmt: skip
    assert torch.equal(out, want)
    assert launches == [2, 2, 1]
