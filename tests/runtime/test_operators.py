"""The public functions under torch.compile and torch.export, the operators' schemas, and plans."""

import threading

import pytest
import torch
from public import refused
from test_tensors import CALLS

import gdntune
from gdntune.checking.cases import make_case
from gdntune.errors import CaptureError
from gdntune.problem import Contract, Problem
from gdntune.runtime import dispatch


def both(name, run):
    """What a call and its stand-in leave behind, tensor by tensor."""
    function, make = CALLS[name]
    left, right = make(), make()
    run(function, left)
    function(**right)
    for n in left:
        assert torch.equal(left[n], right[n]), n


@pytest.mark.parametrize("name", CALLS)
def test_compiled_whole(name):
    """torch.compile(fullgraph=True) of each public function: outputs and states as in eager."""
    torch._dynamo.reset()
    both(
        name,
        lambda function, call: torch.compile(
            lambda **xs: function(**xs), fullgraph=True, backend="aot_eager"
        )(**call),
    )


@pytest.mark.parametrize("name", CALLS)
def test_compiled_allocates_the_output(name):
    """As above without an output given, and with B a symbol."""
    torch._dynamo.reset()
    function, make = CALLS[name]
    left, right = make(), make()
    for call in (left, right):
        del call["output"]
    compiled = torch.compile(
        lambda **xs: function(**xs) * 2, fullgraph=True, backend="aot_eager", dynamic=True
    )
    assert torch.equal(compiled(**left), function(**right) * 2)


@pytest.mark.parametrize("name", ["gdn", "packed"])
def test_exported(name):
    """torch.export keeps the call; the program run on other tensors does what the call does."""

    class Layer(torch.nn.Module):
        def forward(self, xs):
            return CALLS[name][0](**xs)

    both(
        name,
        lambda function, call: torch.export.export(
            Layer(), ({n: x.clone() for n, x in call.items()},)
        ).module()(call),
    )


def test_eager_calls_pass_the_dispatcher_by(monkeypatch):
    """An eager call that is known does not go through torch.ops, which would double its time."""
    function, make = CALLS["gdn"]
    function(**make())
    monkeypatch.delattr("gdntune.runtime.traced.run")
    function(**make())


def plan_call(case):
    """A case's tensors as a plan takes them."""
    return (case.q, case.k, case.v, case.a, case.b), {
        "initial_state": case.state, "A_log": case.A_log, "dt_bias": case.dt_bias,
        "initial_state_indices": case.read_index, "output_state_indices": case.write_index,
        "output": case.output,
    }  # fmt: skip


def test_a_plan_is_the_call():
    """A plan gives the public call's bits for every B up to its own, and refuses other calls."""
    contract = Contract(state_dtype="fp32")
    plan = gdntune.plan(Problem(contract, 3, 2, 4), "cpu", scale=0.5)
    for B in (3, 1, 2):
        case = make_case(Problem(contract, B, 2, 4), "cpu", seed=B)
        other = case.clone()
        given, named = plan_call(case)
        assert plan(*given, **named) is case.output
        gdntune.gated_delta_rule_decode(
            other.q, other.k, other.v, a=other.a, b=other.b, initial_state=other.state,
            A_log=other.A_log, dt_bias=other.dt_bias, initial_state_indices=other.read_index,
            output_state_indices=other.write_index, output=other.output, scale=0.5,
        )  # fmt: skip
        assert torch.equal(case.output, other.output) and torch.equal(case.state, other.state)
    given, named = plan_call(make_case(Problem(contract, 4, 2, 4), "cpu"))
    fresh = gdntune.plan(Problem(contract, 3, 2, 4), "cpu")
    refused("B=4, HV=4: expected B up to 3", fresh, *given, **named)
    given, named = plan_call(make_case(Problem(Contract(), 3, 2, 4), "cpu"))
    refused("contract is gdn_decode.tokens=1: expected this plan's", fresh, *given, **named)
    refused("no setting scales", gdntune.plan, Problem(contract, 3, 2, 4), "cpu", scales=1)


def test_a_capture_that_would_load_is_refused(monkeypatch):
    """Under CUDA graph capture a function that is not loaded is an error that names the call, and
    `prepare` before makes it right.
    """
    bound = dispatch.Runtime(dispatch.runtime("cpu").device).bind(Contract())
    monkeypatch.setattr(dispatch, "capturing", lambda kind: True)
    with pytest.raises(CaptureError, match=r"gdn_decode.tokens=1 under CUDA graph .*prepare"):
        bound.at(1)
    bound.load_all()
    assert callable(bound.at(1))


def test_the_hash_of_tables_is_one():
    """Two runtimes of one device agree on a hash of 16 digits."""
    device = dispatch.runtime("cpu").device
    one, two = dispatch.Runtime(device), dispatch.Runtime(device)
    assert one.table_hash() == two.table_hash() and len(one.table_hash()) == 16


def test_threads_call_at_once():
    """Threads whose first calls meet get the right results."""
    from gdntune.runtime import call

    call.forget()
    function, make = CALLS["gdn"]
    right = make()
    function(**right)
    call.forget()
    wrong = []

    def work():
        for _ in range(50):
            mine = make()
            function(**mine)
            if not torch.equal(mine["output"], right["output"]):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.slow
def test_inductor():
    """The default backend too."""
    torch._dynamo.reset()
    both("gdn", lambda function, call: torch.compile(function, fullgraph=True)(**call))
