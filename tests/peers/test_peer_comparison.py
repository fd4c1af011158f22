"""gdntune/peers/compare.py: how a peer's results are compared with the reference. No peer is needed."""

import dataclasses

import pytest
from fakes import library
from peer_entries import BF16, FP32, MTP, compare_with_reference

from gdntune.checking.cases import make_case
from gdntune.peers import compare, spec
from gdntune.problem import Problem


@pytest.mark.parametrize("B", [1, 2, 3, 4, 5, 512])
def test_requests_looked_at(B):
    """The first, the last and some between, each once."""
    found = compare.looked_at(B)
    assert found[0] == 0 and found[-1] == B - 1 and len(found) == len(set(found)) == min(B, 4)


@pytest.mark.parametrize(
    "contract",
    [
        FP32,
        BF16,
        FP32.replace(layout="v_last"),
        FP32.replace(pool=False),
        BF16.replace(mode="frozen"),
        MTP,
    ],
    ids=lambda c: c.key(),
)
def test_a_right_call_passes(contract):
    """fp32 arithmetic and one rounding are well within the tolerance, in both layouts and with
    shuffled slots.
    """
    case = make_case(Problem(contract, 9, 2, 4))
    expected, bound = compare.Expected(case), library.right(case)
    verdict = expected.judge(case, bound, bound.call())
    assert verdict.ok and verdict.error < verdict.tolerance / 2, verdict.worst


@pytest.mark.parametrize("contract", [FP32, BF16], ids=lambda c: c.key())
def test_a_wrong_call_fails(contract):
    """A state that was never written, one in other slots, an output with a NaN or of another head:
    each is found and named.
    """
    case = make_case(Problem(contract, 9, 2, 4))
    expected, bound = compare.Expected(case), library.right(case)
    before = case.state.clone()
    output = bound.call()
    after = case.state.clone()

    def judged(**changes):
        return expected.judge(case, dataclasses.replace(bound, **changes), output)

    assert judged().ok
    case.state.copy_(before)
    assert "state of request" in judged().worst and not judged().ok
    case.state.copy_(after)
    assert not judged(rows=bound.rows.roll(1)).ok
    assert not judged(output=lambda o: o.roll(1, 2)).ok
    output[8, 0, 3, 5] = float("nan")
    assert judged().error == float("inf") and "output of request 8 of 9" in judged().worst


def test_intermediate_states_are_compared():
    """The state after each token is looked at where the contract has it: a buffer by row or index,
    or slots of the pool.
    """
    for kind in ("dense", "indexed", "slots"):
        contract = FP32.replace(tokens=3, mode="frozen", intermediate=kind)
        case = make_case(Problem(contract, 5, 2, 4))
        expected = compare.Expected(case)
        found = compare_with_reference(case)
        bound = spec.Bound(lambda: None, lambda _, o=found.output: o)
        assert expected.judge(case, bound, None).ok
        held = case.state if kind == "slots" else case.intermediate
        held.mul_(1.1)
        verdict = expected.judge(case, bound, None)
        assert not verdict.ok and verdict.worst.startswith("intermediate of request")
