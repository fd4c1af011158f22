"""gdntune/peers/: how a case becomes the arguments of vLLM's kernels. vLLM is not needed."""

import dataclasses

import pytest
import torch
from peer_entries import (
    BEHIND,
    BF16,
    FP32,
    GIVEN,
    KDA,
    KDA_GIVEN,
    KDA_RAW,
    MTP,
    OP,
    PACKED,
    PACKED_KDA,
    SLOTS,
    TRITON,
    compare_with_reference,
)

from gdntune import peers
from gdntune.checking.cases import make_case
from gdntune.errors import ToolMissing, UnsupportedProblem
from gdntune.peers import compare, spec
from gdntune.problem import Contract, Problem


@pytest.mark.parametrize("pool", [True, False], ids=["pool", "states"])
def test_vllm_never_gets_slot_0(called, pool):
    """Fault: slot 0 is vLLM's padding, and a request that owns it would be skipped: every request
    has a later slot, with its state.
    """
    case = make_case(Problem(FP32.replace(pool=pool), 3, 2, 4))
    states = case.state if case.read_index is None else case.state[case.read_index.long()]
    for entry in (PACKED, *TRITON):
        recorder, bound = called("vllm", entry, case)
        if case.read_index is not None:
            # as much out of order as in the case's own pool
            order = recorder.arguments["ssm_state_indices"].argsort()
            assert order.tolist() == case.read_index.argsort().tolist()
        given, slots = recorder.arguments["initial_state"], recorder.arguments["ssm_state_indices"]
        assert slots.dtype == torch.int32 and sorted(slots.tolist()) == [1, 2, 3]
        assert torch.equal(given[slots.long()], states) and given.is_contiguous()
        assert torch.equal(bound.state(None)[bound.rows.long()], states)
        assert not recorder.same(case.state)
    assert recorder.arguments["cu_seqlens"].tolist() == [0, 1, 2, 3]


def test_vllms_kda_takes_raw_gates(called):
    """Fault: KDA was timed by a function of another module than its Kimi models call, at T=1 by one
    that no model calls for it. Packed decode: one row a request, gates as they come.
    """
    case = make_case(Problem(KDA.replace(gate="lower_bound"), 3, 2, 2))
    recorder, bound = called("vllm", PACKED_KDA, case)
    given = recorder.arguments
    assert given["mixed_qkv"].shape == (3, 6 * 128) and given["raw_g"].shape == (1, 3, 2, 128)
    assert given["raw_beta"].shape == (1, 3, 2) and given["dt_bias"].shape == (2 * 128,)
    assert given["lower_bound"] == case.lower_bound and recorder.same(case.output) == {"out"}
    assert bound.rows.tolist() == given["state_indices"].tolist()
    with pytest.raises(UnsupportedProblem, match="use_qk_l2norm=False"):
        called("vllm", PACKED_KDA, make_case(Problem(KDA, 3, 2, 2), use_qk_l2norm=False))
    slots = KDA.replace(tokens=4, **SLOTS)
    recorder, _ = called("vllm", *KDA_RAW, make_case(Problem(slots, 3, 2, 2)))
    assert recorder.arguments["lower_bound"] is None
    assert recorder.arguments["raw_g"].shape == (1, 12, 2, 128)
    with pytest.raises(UnsupportedProblem, match="scale=0.5"):
        called("vllm", *KDA_RAW, make_case(Problem(slots, 3, 2, 2), scale=0.5))


def test_vllm_packs_q_k_v(called):
    """One row a request: q, then k, then v; a and b have two dimensions; the output is the case's."""
    case = make_case(Problem(BF16, 3, 2, 4))
    recorder, _ = called("vllm", PACKED, case)
    rows = recorder.arguments["mixed_qkv"]
    assert rows.shape == (3, (2 + 2 + 4) * 128)
    assert torch.equal(rows[:, 256:512], case.k.reshape(3, 256)) and torch.equal(
        rows[:, 512:], case.v.reshape(3, 512)
    )
    assert recorder.arguments["a"].shape == recorder.arguments["b"].shape == (3, 4)
    assert recorder.same(case.output) == {"out"}


@pytest.mark.parametrize(
    ("entry", "contract"),
    [
        (*TRITON, MTP.replace(accepted=True, ragged=True, **SLOTS)),
        (*GIVEN, MTP.replace(gate="log", beta="given", accepted=True, **SLOTS)),
        (*KDA_GIVEN, KDA.replace(tokens=4, gate="log", beta="given", accepted=True, **SLOTS)),
        (*KDA_RAW, KDA.replace(tokens=4, accepted=True, **SLOTS)),
    ],
    ids=lambda x: x.key() if isinstance(x, Contract) else x,
)
def test_vllm_verifies_by_slots(called, entry, contract):
    """Each token's slot moves up by one with the pool; the states that are compared are those in
    the pool that was handed over.
    """
    case = make_case(Problem(contract, 5, 2, 2))
    case.accepted[0] = 0
    recorder, bound = called("vllm", entry, case)
    index, pool = recorder.arguments["ssm_state_indices"], recorder.arguments["initial_state"]
    assert torch.equal(index, case.slot_index + 1) and int(index.min()) > 0
    assert torch.equal(pool[index.long()], case.state[case.slot_index.long()])
    assert int(recorder.arguments["num_accepted_tokens"].min()) == 1
    assert bound.state is None and bound.intermediate(None).shape[:2] == (
        5,
        case.slot_index.shape[1],
    )
    expected = compare.Expected(case)
    found = compare_with_reference(case)
    right = dataclasses.replace(bound, output=lambda _: found.output)
    assert not expected.judge(case, right, None).ok
    pool[1:] = case.state
    assert expected.judge(case, right, None).ok


@pytest.mark.parametrize("accepted", [False, True], ids=["first", "accepted"])
def test_vllms_op_for_drafts(monkeypatch, accepted):
    """Its arguments by position, in the order of its schema; a slot a token after an empty slot 0;
    the output is the case's, behind the layer's norm.
    """
    seen = []
    monkeypatch.setattr("gdntune.peers.vllm._op", lambda: lambda *given: seen.extend(given))
    contract = MTP.replace(accepted=accepted, dt_bias_dtype="bf16", **SLOTS)
    case = make_case(Problem(contract, 3, 2, 4))
    bound = peers.get("vllm").entry(OP).bind(case)
    bound.call()
    mixed, a, b, A_log, dt_bias, index, starts, counts, pool, gate, weight, out, *rest = seen
    assert mixed.shape == (12, 8 * 128) and a.shape == b.shape == (12, 4)
    assert torch.equal(mixed[:, :256], case.q.reshape(12, 256))
    assert A_log is case.A_log and dt_bias is case.dt_bias and starts.tolist() == [0, 4, 8, 12]
    assert torch.equal(index, case.slot_index + 1) and index.is_contiguous()
    assert counts.dtype == torch.int32 and int(counts.min()) >= 1
    assert accepted or counts.tolist() == [1, 1, 1]
    assert torch.equal(pool[index.long()], case.state[case.slot_index.long()])
    assert gate.shape == out.shape == (12, 4, 128) and weight.shape == (128,)
    assert out.data_ptr() == case.output.data_ptr() and rest == [case.scale, 1e-5, "silu"]


def test_a_norm_inside_is_compared_with_one():
    """What vLLM's op gives is the reference's output behind a gated RMSNorm; without it, or with
    another gate, it fails.
    """
    case = make_case(Problem(MTP.replace(**SLOTS), 3, 2, 4))
    expected, found = compare.Expected(case), compare_with_reference(case)
    entry = peers.get("vllm").entry(BEHIND)
    rows = found.output.reshape(-1, 4, 128).double()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec, "imported", lambda *_: lambda *a, **k: None)
        bound = entry.bind(case)
    gate, weight = bound.epilogue.args[:2]
    norm = torch.nn.functional.rms_norm(rows, (128,), weight.double(), 1e-5)
    right = norm * torch.nn.functional.silu(gate.double())
    assert expected.judge(case, bound, right).ok
    assert not expected.judge(case, bound, rows).ok
    assert not expected.judge(case, bound, norm * torch.sigmoid(gate.double())).ok


def test_where_vllms_op_is_looked_for():
    """Without it, the error names what was tried."""
    with pytest.raises(ToolMissing, match=r"_C_stable_libtorch.*vllm_op"):
        peers.get("vllm").entry(OP).bind(make_case(Problem(MTP.replace(**SLOTS), 3, 2, 4)))


def test_the_partner_of_an_entry():
    """vLLM's op is judged against ours with vLLM's norm behind it: its variant says so."""
    peer, problem = peers.get("vllm"), Problem(MTP.replace(**SLOTS), 3, 2, 4)
    assert peer.variant(peer.entry(OP), problem).knobs["partner"] == f"peer:vllm.{BEHIND}"
    assert peer.entry(BEHIND).follows_ours and not peer.entry(OP).follows_ours
    # a norm apart reads the gate and our output, and writes its own
    extra = [peer.variant(peer.entry(n), problem).knobs["extra_bytes"] for n in (OP, BEHIND)]
    assert extra == [12 * 4 * 128 * 2, 3 * 12 * 4 * 128 * 2]
