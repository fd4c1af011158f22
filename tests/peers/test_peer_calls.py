"""gdntune/peers/: how a case becomes the arguments of FlashInfer, fla and SGLang. No peer is needed."""

import dataclasses

import pytest
import torch
from peer_entries import (
    BF16,
    FP32,
    GDN,
    KDA,
    KDA_IN_PLACE,
    MTP,
    OUTPUTS_KDA,
    PACKED,
    PACKED_KDA,
    PRETRANSPOSE,
    RING,
    SLOTS,
    TRITON,
    WY,
    compare_with_reference,
)

from gdntune import peers
from gdntune.checking.cases import make_case
from gdntune.errors import UnsupportedProblem
from gdntune.peers import compare
from gdntune.problem import Contract, Problem


@pytest.mark.parametrize(
    ("peer", "entry", "contract", "state"),
    [
        ("flashinfer", PRETRANSPOSE, BF16, "initial_state"),
        ("flashinfer", PRETRANSPOSE, FP32, "initial_state"),
        ("flashinfer", PRETRANSPOSE, FP32.replace(pool=False), "state"),
        ("flashinfer", "gated_delta_rule_mtp", MTP, "initial_state"),
        ("flashinfer", WY, BF16.replace(tokens=4, mode="frozen"), "initial_state_source"),
        ("flashinfer", RING, BF16.replace(tokens=8, mode="frozen"), "initial_state_source"),
        ("flashinfer", "recurrent_kda", KDA, "initial_state"),
        ("fla", *GDN, MTP.replace(pool=False), "initial_state"),
        ("fla", *KDA_IN_PLACE, KDA.replace(pool=False), "initial_state"),
        ("fla", *KDA_IN_PLACE, KDA.replace(tokens=4, mode="frozen", pool=False), "initial_state"),
        (
            "flashinfer",
            OUTPUTS_KDA[0],
            KDA.replace(tokens=4, mode="frozen"),
            "initial_state_source",
        ),
        ("flashinfer", OUTPUTS_KDA[1], KDA.replace(tokens=4, mode="frozen"), "checkpoint_state"),
        ("sglang", *TRITON, MTP, "initial_state_source"),
        ("sglang", *TRITON, MTP.replace(intermediate="dense"), "initial_state_source"),
    ],
    ids=lambda x: x.key() if isinstance(x, Contract) else x,
)
def test_tensors_are_views(called, peer, entry, contract, state):
    """The case's own memory is handed over: state, inputs and outputs are not copied, and slots are
    its index tensor.
    """
    case = make_case(Problem(contract, 3, 2, 2))
    recorder, bound = called(peer, entry, case)
    assert recorder.same(case.state) == {state}
    for name in ("q", "k", "v", "a", "b"):
        assert recorder.same(getattr(case, name)), name
    if case.intermediate is not None:
        assert recorder.same(case.intermediate) == {"intermediate_states_buffer"}
    if contract.pool:
        assert recorder.same(case.read_index)
    if bound.state is not None and peer != "fla":
        assert bound.state(None) is case.state


def test_what_is_said_of_the_state(called):
    """Whether the final state is written is said outright, and each token's state goes where the
    contract has it.
    """
    frozen = MTP.replace(mode="frozen", intermediate="dense")
    for contract, disabled in ((MTP, False), (frozen, True)):
        case = make_case(Problem(contract, 3, 2, 2))
        for peer, entry in (("flashinfer", "gated_delta_rule_mtp"), ("sglang", *TRITON)):
            recorder, bound = called(peer, entry, case)
            assert recorder.arguments["disable_state_update"] is disabled
            assert (bound.state is None) is disabled
    recorder, _ = called(
        "sglang", *TRITON, make_case(Problem(MTP.replace(intermediate="dense"), 3, 2, 2))
    )
    assert recorder.arguments["cache_steps"] == 4
    assert recorder.arguments["intermediate_state_indices"].tolist() == [0, 1, 2]
    assert recorder.arguments["cu_seqlens"].tolist() == [0, 4, 8, 12]
    assert recorder.arguments["q"].shape == (1, 12, 2, 128)


@pytest.mark.parametrize("tokens", [4, 8])
def test_a_ring_step_by_step(called, tokens):
    """An empty ring first; then T rows more each call until the window of 16 is folded, after which
    the ring goes on behind it.
    """
    case = make_case(Problem(BF16.replace(tokens=tokens, mode="frozen"), 3, 2, 4), slots=5)
    recorder, bound = called("flashinfer", RING, case)
    ring = {
        name: tuple(recorder.arguments[name].shape) for name in ("k_cache", "u_cache", "g_cache")
    }
    assert ring == {"k_cache": (5, 2, 32, 128), "u_cache": (5, 4, 32, 128), "g_cache": (5, 4, 32)}
    assert recorder.arguments["restart_hist_on_flush"] is False
    cycle, seen = 16 // tokens, []
    for _ in range(2 * cycle + 2):
        rows, begin = (recorder.arguments[name] for name in ("hist_len", "cache_base"))
        assert rows.shape == begin.shape == (3,) and rows.dtype == begin.dtype == torch.int32
        seen.append((int(rows.unique()), int(begin.unique())))
        bound.call()
    filled = range(tokens, 17, tokens)
    assert seen == [(0, 0), *((n, 0) for n in filled), *((n, 16) for n in filled), (tokens, 0)]
    assert bound.cycle == cycle
    # a row of the ring: k of two heads, u of four, four log decays; of the state, written and read
    # again once a cycle
    row, state = 3 * ((2 * 128 + 4 * 128) * 2 + 4 * 4), 3 * 4 * 128 * 128 * 2
    peer = peers.get("flashinfer")
    extra = peer.variant(peer.entry(RING), case.problem).knobs["extra_bytes"]
    assert extra == row * (sum(filled) / cycle + tokens) + 2 * state / cycle


def test_a_ring_beside_a_pool_with_gaps(called):
    """Fault: under chain, whose pools have gaps between slots, the ring raised at B=4, 16 and 64
    (block-strided state pools). It has a copy without gaps there, else the case's own pool.
    """
    problem = Problem(BF16.replace(tokens=4, mode="frozen"), 3, 2, 4)
    for gap, own in ((0, True), (64, False)):
        case = make_case(problem, slot_stride_pad=gap)
        recorder, _ = called("flashinfer", RING, case)
        states = recorder.arguments["initial_state_source"]
        assert states.is_contiguous() and states.equal(case.state)
        assert (states.data_ptr() == case.state.data_ptr()) is own


def test_what_the_ring_does_not_take(called):
    """Its softplus has no parameters, and it always normalises."""
    contract = BF16.replace(tokens=4, mode="frozen")
    for change, said in (
        ({"softplus_beta": 2.0}, "softplus_beta=2.0"),
        ({"use_qk_l2norm": False}, "always normalises"),
    ):
        with pytest.raises(UnsupportedProblem, match=said):
            called("flashinfer", RING, make_case(Problem(contract, 3, 2, 2), **change))


def test_v_last_states_are_the_cases_own(called):
    """FlashInfer's V-last kernel updates the states in place: no copy is made of them."""
    case = make_case(Problem(FP32.replace(layout="v_last", pool=False), 3, 2, 2))
    recorder, _ = called("flashinfer", "gated_delta_rule_decode", case)
    assert recorder.same(case.state)


@pytest.mark.parametrize(("mode", "writes"), [("update", True), ("frozen", False)])
def test_fla_writes_the_final_state_where_it_is_kept(called, mode, writes):
    """GDN returns it, KDA writes it in place; a frozen state is neither asked for nor compared."""
    for contract, entry, said in (
        (FP32, GDN, "output_final_state"),
        (KDA, KDA_IN_PLACE, "inplace_final_state"),
    ):
        case = make_case(Problem(contract.replace(mode=mode, pool=False), 3, 2, 2))
        recorder, bound = called("fla", *entry, case)
        assert recorder.arguments[said] is writes
        assert (bound.state is not None) is writes and bound.rows is None


@pytest.mark.parametrize(("layout", "v_first"), [("k_last", True), ("v_last", False)])
def test_flas_layouts(called, layout, v_first):
    """Its V-first state [V, K] is K-last in memory."""
    for contract, entry in ((FP32, GDN), (KDA, KDA_IN_PLACE)):
        case = make_case(Problem(contract.replace(layout=layout, pool=False), 3, 2, 2))
        recorder, _ = called("fla", *entry, case)
        assert recorder.arguments["state_v_first"] is v_first


def test_accepted_counts_start_at_one(called):
    """A count of 0 names the first column here and would be column -1 there."""
    case = make_case(Problem(KDA.replace(tokens=3, accepted=True, **SLOTS), 9, 2, 2))
    case.accepted[0] = 0
    recorder, bound = called("flashinfer", "recurrent_kda", case)
    counts = recorder.arguments["num_accepted_tokens"]
    assert int(counts.min()) == 1 and int(counts.max()) <= 3
    assert recorder.arguments["ssm_state_indices"] is case.slot_index
    assert bound.state is None


@pytest.mark.parametrize("entry", [PACKED, PACKED_KDA])
def test_sglangs_packed_decode(called, entry):
    """Rows of q, k and v in one tensor, the case's own where a producer writes one; the gate of KDA
    with a row of K for each head.
    """
    kda = entry == PACKED_KDA
    case = make_case(Problem(KDA.replace(gate="lower_bound") if kda else FP32, 3, 2, 2))
    recorder, bound = called("sglang", entry, case)
    given = recorder.arguments
    assert given["mixed_qkv"].shape == (3, 6 * 128)
    assert given["a"].shape == ((3, 256) if kda else (3, 2)) and recorder.same(case.a)
    assert given["dt_bias"].shape == ((256,) if kda else (2,)) and given["b"].shape == (3, 2)
    assert given["ssm_state_indices"] is case.read_index and recorder.same(case.output) == {"out"}
    assert recorder.same(case.state) == {"initial_state"} and bound.state(None) is case.state
    if kda:
        assert given["lower_bound"] == case.lower_bound
    mixed = torch.empty(3, 6 * 128, dtype=torch.bfloat16)
    recorder, _ = called("sglang", entry, dataclasses.replace(case, mixed=mixed))
    assert recorder.arguments["mixed_qkv"] is mixed


def test_a_buffer_or_a_pool_with_gaps(called):
    """Fault: FlashInfer and SGLang take steps that follow one another, and a frozen pool with gaps
    would be copied at each call: each has one of its own then, and what it writes is compared.
    """
    dense = MTP.replace(intermediate="dense", mode="frozen")
    for peer, entry in (("flashinfer", "gated_delta_rule_mtp"), ("sglang", *TRITON)):
        case = make_case(Problem(dense, 3, 2, 2), slot_stride_pad=64)
        recorder, bound = called(peer, entry, case)
        buffer = recorder.arguments["intermediate_states_buffer"]
        assert buffer.is_contiguous() and bound.intermediate(None) is buffer
        right = compare_with_reference(case).output
        bound = dataclasses.replace(bound, output=lambda _, rows=right: rows)
        assert "intermediate" in compare.Expected(case).judge(case, bound, None).worst
    for entry, contract, name in (
        (WY, BF16.replace(tokens=4, mode="frozen"), "initial_state_source"),
        (OUTPUTS_KDA[0], KDA.replace(tokens=4, mode="frozen"), "initial_state_source"),
    ):
        case = make_case(Problem(contract, 3, 2, 2), slot_stride_pad=64)
        recorder, _ = called("flashinfer", entry, case)
        pool = recorder.arguments[name]
        assert pool.is_contiguous() and torch.equal(pool, case.state)


def test_what_recoverssm_keeps(called):
    """Corrections in fp32 and rows of k and gate, by slots; slot 0 is a request's own."""
    case = make_case(Problem(KDA.replace(tokens=4, mode="frozen"), 3, 2, 2), slots=5)
    recorder, _ = called("flashinfer", OUTPUTS_KDA[1], case)
    given = recorder.arguments
    assert given["correction_cache"].shape == (5, 2, 4, 128)
    assert given["correction_cache"].dtype == torch.float32
    assert given["kg_cache"].shape == (5, 2, 4, 256) and given["kg_cache"].dtype == torch.bfloat16
    assert given["null_min"] == 0 and given["query_start_loc"].tolist() == [0, 4, 8, 12]
    assert given["q"].shape == (1, 12, 2, 128) and recorder.same(case.output) == {"out"}
    found, reason = peers.get("flashinfer").serving(
        Problem(case.contract.replace(gate="log", beta="given"), 2, 4, 8)
    )
    assert [e.name for e in found] == [OUTPUTS_KDA[0]] and "H=HV" in reason


def test_a_rings_steps_in_layers(called):
    """Where several layers are timed as one, each makes a step of its own of the cycle, again and
    again.
    """
    case = make_case(Problem(BF16.replace(tokens=4, mode="frozen"), 3, 2, 4))
    recorder, bound = called("flashinfer", RING, case)
    rows = []
    for layer in range(8):
        for _ in range(2):
            bound.at_layer(layer)()
            rows.append(int(recorder.arguments["hist_len"].unique()))
    assert rows == [4, 4, 8, 8, 12, 12, 16, 16] * 2


def test_split_slots_are_refused(called):
    """A case that reads one slot and writes another is no case for a call that knows one slot a
    request.
    """
    case = make_case(Problem(FP32, 3, 2, 2), split=True)
    with pytest.raises(UnsupportedProblem, match="read_index differs"):
        called("sglang", *TRITON, case)
