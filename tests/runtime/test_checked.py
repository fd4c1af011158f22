"""GDNTUNE_CHECK=1: what lies on the device is read, and refused by place."""

import pytest
import torch
from public import call, refused
from public_calls import CONTRACTS, ONE, RAGGED, SLOTS, int32

from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.problem import Contract, Problem
from gdntune.runtime import arguments
from gdntune.runtime import call as calls


@pytest.fixture
def checked(monkeypatch):
    """GDNTUNE_CHECK=1 for one test."""
    monkeypatch.setenv("GDNTUNE_CHECK", "1")
    calls.forget()
    yield
    monkeypatch.undo()
    calls.forget()


# each of the contract's case with B=3 and distinct slots in order
VALUES = {
    "slot outside": (ONE, {"initial_state_indices": [0, 1, 99]}, r"initial_state_indices\[2\] is 99: expected 0 to 2"),
    "written slot outside": (ONE, {"output_state_indices": [0, 1, 3]}, r"output_state_indices\[2\] is 3: expected 0 to 2"),
    "slot written twice": (ONE, {"output_state_indices": [0, 1, 1]}, r"output_state_indices\[2\] is 1, as is .*two requests would write one slot"),
    "slot read and written": (ONE, {"output_state_indices": [1, 0, 2]}, r"output_state_indices\[1\] is 0, the slot that request 0 starts from"),
    "column outside": (SLOTS, {"ssm_state_indices": [[0, 1, 2], [3, 4, 5], [6, 7, 9]]}, r"ssm_state_indices\[2\] is 9: expected 0 to 8 .*row 2"),
    "column written twice": (SLOTS, {"ssm_state_indices": [[0, 1, 2], [3, 4, 5], [6, 7, 4]]}, r"ssm_state_indices\[2, 2\] is 4, as is ssm_state_indices\[1, 1\]"),
    "accepted too many": (SLOTS, {"num_accepted_tokens": [1, 2, 4]}, r"num_accepted_tokens\[2\] is 4: expected 0 to 3"),
    "accepted negative": (SLOTS, {"num_accepted_tokens": [1, -1, 3]}, r"num_accepted_tokens\[1\] is -1: expected 0 to 3"),
    "row outside": ("indexed update", {"intermediate_state_indices": [0, 1, 3]}, r"intermediate_state_indices\[2\] is 3: expected 0 to 2"),
    "row written twice": ("indexed update", {"intermediate_state_indices": [0, 1, 1]}, "intermediate_state_indices names a row twice"),
    "bounds from elsewhere": (RAGGED, {"cu_seqlens": [1, 4, 8, 12]}, "cu_seqlens runs from 1 to 12: expected from 0"),
    "bounds beyond": (RAGGED, {"cu_seqlens": [0, 4, 8, 13]}, "cu_seqlens runs from 0 to 13: expected .*12 rows"),
    "bounds backwards": (RAGGED, {"cu_seqlens": [0, 4, 3, 7]}, "cu_seqlens gives request 1 -1 tokens: expected 0 to max_tokens=4"),
    "too many tokens": (RAGGED, {"cu_seqlens": [0, 5, 8, 12]}, "cu_seqlens gives request 0 5 tokens: expected 0 to max_tokens=4"),
    "64 bits": (ONE, {"initial_state_indices": [0, 1, 2**32 + 2]}, "initial_state_indices has values from 0 to 4294967298: expected those of int32"),
}  # fmt: skip


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", VALUES)
def test_checked_mode_reads_what_lies_on_the_device(name):
    """GDNTUNE_CHECK=1 raises for what a kernel clamps, or leaves to chance."""
    kind, changes, match = VALUES[name]
    case = make_case(Problem(CONTRACTS[kind], 3, 2, 4), "cpu", permute=False)
    tensors = {field: torch.tensor(x) for field, x in changes.items()}
    assert "found by GDNTUNE_CHECK=1" in refused(match, call, case, **tensors)


def test_checked_mode_refuses_a_decay_rate_that_overflows():
    """Fault: exp(A_log) was inf above 88; times a softplus of 0 it gave NaN, which stays in the pool.
    KDA's gates clamp it, and the CPU computes it.
    """
    large = torch.tensor([1.0, 89.0])
    (fault,) = arguments.rate_faults(Contract(), large, "cuda")
    assert fault == "A_log is 89 at most: expected up to 88 on CUDA"
    kda = Contract(op="kda_decode", gate="softplus")
    for contract, A_log, device in (
        (Contract(), large - 1, "cuda"),
        (Contract(), large, "cpu"),
        (Contract(gate="log"), None, "cuda"),
        (kda, large, "cuda"),
    ):
        assert not list(arguments.rate_faults(contract, A_log, device))


@pytest.mark.usefixtures("checked")
def test_checked_mode_names_what_was_passed():
    """Fault: a slot that initial_state_indices names twice was called one of output_state_indices,
    which the caller had not passed.
    """
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cpu", permute=False)
    case.write_index = None
    match = r"^initial_state_indices\[2\] is 1, as is initial_state_indices\[1\]: two requests would write one slot"
    refused(match, call, case, initial_state_indices=torch.tensor([0, 1, 1]))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", ["initial_state", "output"])
def test_checked_mode_refuses_rows_of_one_memory(name):
    """A tensor made by expand() would be written by all requests at once."""
    case = make_case(Problem(CONTRACTS["rows"], 3, 2, 4), "cpu")
    whole = case.state if name == "initial_state" else case.output
    refused(
        f"{name} has stride 0 at dimension 0, of size 3.*clone",
        call,
        case,
        **{name: whole[:1].expand(whole.shape)},
    )


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", CONTRACTS)
def test_checked_mode_lets_right_calls_pass(name):
    """A right call, padding and lengths of 0 among its requests, gives with GDNTUNE_CHECK=1 what it
    gives without.
    """
    contract = CONTRACTS[name]
    options = (
        {"split": True, "padding": 0.3, "null_index": 0, "index_dtype": torch.int64}
        if contract.pool
        else {}
    )
    if contract.ragged:
        options["lengths"] = [0, 4, 1, 2]
    truth = Truth(make_case(Problem(contract, 4, 2, 4), "cpu", seed=4, **options))
    case = truth.before.clone()
    call(case)
    truth.judge(case).require()


@pytest.mark.usefixtures("checked")
def test_checked_mode_refuses_shapes_in_the_same_words():
    """What a compiled call would refuse is found before it is called."""
    case = make_case(Problem(CONTRACTS[ONE], 3, 2, 4), "cpu")
    refused(
        r"initial_state_indices has shape \(2,\).*\[3\]", call, case, initial_state_indices=int32(2)
    )
