"""gdntune/peers/: which problems each entry serves, how a case becomes its arguments, how its
results are compared. No peer is needed.
"""

import dataclasses
import inspect
import sys
from pathlib import Path

import pytest
import torch
from fakes import library
from fakes.signatures import SIGNATURES

from gdntune import peers
from gdntune.checking.cases import make_case
from gdntune.errors import ToolMissing, UnknownName, UnsupportedProblem
from gdntune.peers import compare, spec
from gdntune.problem import Contract, Problem
from gdntune.tuning import config

BF16, FP32 = Contract(), Contract(state_dtype="fp32")
MTP = FP32.replace(tokens=4)
KDA = Contract(op="kda_decode", gate="softplus")
SLOTS = {"mode": "frozen", "intermediate": "slots"}
TRITON = ("fused_sigmoid_gating_delta_rule_update",)
PACKED, GIVEN = (
    "fused_recurrent_gated_delta_rule_packed_decode",
    ("fused_recurrent_gated_delta_rule",),
)
PACKED_KDA = "fused_recurrent_kda_packed_decode"
OP, BEHIND = "fused_gdn_decode_post_conv_mtp", "ours_then_rms_norm_gated"
KDA_RAW, KDA_GIVEN = ("fused_recurrent_kda",), ("fused_recurrent_kda_fwd",)
OUTPUTS_KDA = ("kda_wy_output_only", "kda_recoverssm_verify")
GDN, KDA_IN_PLACE = ("fused_recurrent_gated_delta_rule",), ("fused_recurrent_kda",)
PRETRANSPOSE, WY = "gated_delta_rule_decode_pretranspose", "gated_delta_rule_mtp_wy_output_only"
RING = "gated_delta_rule_mtp_ucache_flush"


@pytest.mark.parametrize(
    ("contract", "flashinfer", "sglang"),
    [
        (BF16, (PRETRANSPOSE,), (PACKED,)),
        (BF16.replace(pool=False), (PRETRANSPOSE,), (PACKED,)),
        (FP32, (PRETRANSPOSE,), (PACKED,)),
        (BF16.replace(tokens=4), (PRETRANSPOSE,), TRITON),
        (MTP, ("gated_delta_rule_mtp",), TRITON),
        (MTP.replace(intermediate="dense"), ("gated_delta_rule_mtp",), TRITON),
        (MTP.replace(intermediate="dense", mode="frozen"), ("gated_delta_rule_mtp",), TRITON),
        (BF16.replace(tokens=4, intermediate="dense", mode="frozen"), (PRETRANSPOSE,), TRITON),
        (BF16.replace(tokens=4, intermediate="dense"), (), TRITON),
        (BF16.replace(tokens=4, mode="frozen"), (PRETRANSPOSE, WY, RING), TRITON),
        (BF16.replace(tokens=5, mode="frozen"), (PRETRANSPOSE, WY), TRITON),
        (BF16.replace(tokens=4, intermediate="indexed", mode="frozen"), (), TRITON),
        (FP32.replace(layout="v_last", pool=False), ("gated_delta_rule_decode",), ()),
        (FP32.replace(layout="v_last"), (), ()),
        (MTP.replace(layout="v_last"), (), ()),
        (KDA, ("recurrent_kda",), (PACKED_KDA,)),
        (KDA.replace(state_dtype="fp32"), (), (PACKED_KDA,)),
        (KDA.replace(tokens=4, mode="frozen"), OUTPUTS_KDA, TRITON),
        (KDA.replace(tokens=4), (), TRITON),
        (KDA.replace(tokens=4, **SLOTS), ("recurrent_kda",), ()),
        (KDA.replace(tokens=4, accepted=True, **SLOTS), ("recurrent_kda",), ()),
        (KDA.replace(gate="lower_bound"), ("recurrent_kda",), (PACKED_KDA,)),
        (FP32.replace(gate="log", beta="given"), (), ()),
        (FP32.replace(ragged=True, tokens=4), (), TRITON),
        (FP32.replace(K=256), (), (PACKED,)),
        (FP32.replace(ragged=True), (), TRITON),
    ],
    ids=lambda x: x.key() if isinstance(x, Contract) else None,
)
def test_what_each_serves(contract, flashinfer, sglang):
    """The entries that serve a contract, by reading their code; where none does, the reason names
    what is expected.
    """
    for name, wanted in (("flashinfer", flashinfer), ("sglang", sglang)):
        found, reason = peers.get(name).serving(Problem(contract, 2, 4, 4))
        assert tuple(e.name for e in found) == wanted, name
        assert found or "expected" in reason or "writes" in reason


@pytest.mark.parametrize(
    ("contract", "entries"),
    [
        (FP32, GDN),
        (BF16, ()),
        (MTP, GDN),
        (MTP.replace(mode="frozen"), GDN),
        (MTP.replace(intermediate="dense"), ()),
        (MTP.replace(layout="v_last"), GDN),
        (FP32.replace(gate="log", beta="given"), GDN),
        (FP32.replace(ragged=True, tokens=4), GDN),
        (FP32.replace(K=256), GDN),
        (KDA, KDA_IN_PLACE),
        (KDA.replace(state_dtype="fp32"), KDA_IN_PLACE),
        (KDA.replace(layout="v_last"), KDA_IN_PLACE),
        (KDA.replace(tokens=4), KDA_IN_PLACE),
        (KDA.replace(tokens=4, ragged=True, mode="frozen"), KDA_IN_PLACE),
        (KDA.replace(tokens=4, intermediate="indexed", mode="frozen"), ()),
        (KDA.replace(gate="lower_bound"), KDA_IN_PLACE),
    ],
    ids=lambda x: x.key() if isinstance(x, Contract) else None,
)
def test_what_fla_serves(contract, entries):
    """States in order; with a pool only KDA, by slots at T=1: on states gathered beforehand it
    would do another job.
    """
    fla = peers.get("fla")
    found, reason = fla.serving(Problem(contract.replace(pool=False), 2, 4, 4))
    assert tuple(e.name for e in found) == entries
    assert found or "expected" in reason
    found, reason = fla.serving(Problem(contract, 2, 4, 4))
    by_slots = entries == KDA_IN_PLACE and contract.tokens == 1
    assert tuple(e.name for e in found) == (entries if by_slots else ())
    assert found or "pool=True, expected False" in reason or not entries


def test_flas_slots_of_each_token():
    """KDA takes a slot for each token; with the final state beside them, or ragged, it does not."""
    slots = KDA.replace(tokens=4, accepted=True, **SLOTS)
    found, _ = peers.get("fla").serving(Problem(slots, 2, 4, 4))
    assert tuple(e.name for e in found) == KDA_IN_PLACE
    for other in (slots.replace(mode="update"), slots.replace(ragged=True)):
        found, reason = peers.get("fla").serving(Problem(other, 2, 4, 4))
        assert not found and "each token's state and no other" in reason


@pytest.mark.parametrize(
    ("contract", "entries"),
    [
        (BF16, (PACKED,)),
        (FP32.replace(state_dtype="fp16", pool=False), (PACKED,)),
        (BF16.replace(ragged=True), TRITON),
        (BF16.replace(layout="v_last"), ()),
        (BF16.replace(mode="frozen"), ()),
        (MTP, ()),
        (MTP.replace(mode="frozen", intermediate="dense"), ()),
        (MTP.replace(**SLOTS), (OP, BEHIND, *TRITON)),
        (MTP.replace(ragged=True, accepted=True, **SLOTS), (OP, BEHIND, *TRITON)),
        (MTP.replace(tokens=9, **SLOTS), TRITON),
        (MTP.replace(intermediate="slots"), ()),
        (FP32.replace(gate="log", beta="given"), GIVEN),
        (MTP.replace(gate="log", beta="given", **SLOTS), GIVEN),
        (KDA, (PACKED_KDA,)),
        (KDA.replace(ragged=True), KDA_RAW),
        (KDA.replace(tokens=4, **SLOTS), KDA_RAW),
        (KDA.replace(tokens=4), ()),
        (KDA.replace(V=64), ()),
        (KDA.replace(gate="log", beta="given"), KDA_GIVEN),
        (KDA.replace(gate="log", beta="given", tokens=4, accepted=True, **SLOTS), KDA_GIVEN),
        (KDA.replace(gate="log", beta="given", V=64), ()),
        (KDA.replace(gate="lower_bound"), (PACKED_KDA,)),
    ],
    ids=lambda x: x.key() if isinstance(x, Contract) else None,
)
def test_what_vllm_serves(contract, entries):
    """T=1 with the final state, and each token's state in a slot of its own; KDA from raw gates by
    what its Kimi models call.
    """
    found, reason = peers.get("vllm").serving(Problem(contract, 2, 4, 4))
    assert tuple(e.name for e in found) == entries
    assert found or "expected" in reason


def test_sizes_beyond_32_bit_offsets_are_refused():
    """B=512, T=8, HV=64 with intermediate states: an illegal access in FlashInfer and SGLang, so a
    row with the reason instead.
    """
    contract = BF16.replace(tokens=8, intermediate="dense", mode="frozen")
    for name in ("flashinfer", "sglang"):
        assert peers.get(name).serving(Problem(contract, 128, 16, 64))[0]
        found, reason = peers.get(name).serving(Problem(contract, 512, 16, 64))
        assert not found and "32-bit offsets" in reason


def test_parameters_by_query_head():
    """FlashInfer's KDA has A_log and dt_bias by q/k head: with HV > H it would read those of other
    heads.
    """
    found, reason = peers.get("flashinfer").serving(Problem(KDA, 2, 2, 4))
    assert not found and "H=2, HV=4" in reason


def test_the_registry():
    """A wrong name lists the right ones; a module with a PEER of one's own is taken."""
    with pytest.raises(UnknownName, match="flashinfer, fla, sglang, vllm"):
        peers.get("flash")
    with pytest.raises(UnknownName, match="cannot be imported"):
        peers.get("no.such.module")
    with pytest.raises(UnknownName, match="it has .*recurrent_kda"):
        peers.get("flashinfer").entry("kda")
    assert peers.get("fakes.library") is library.PEER
    assert {peers.get(name).name for name in peers.PEERS} == set(peers.PEERS)


def test_what_is_not_installed(monkeypatch):
    """An absent package is said with what to do, without importing anything; a broken one when it
    is imported.
    """
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    said = peers.get("flashinfer").absent()
    assert said.startswith("not installed: pip install 'gdntune[peers]'") and "flashinfer" in said
    assert library.PEER.absent() is None
    assert library.PEER.version() == torch.__version__
    with pytest.raises(ToolMissing, match="ModuleNotFoundError"):
        spec.imported("flashinfer.gdn_decode", "gated_delta_rule_mtp")
    with pytest.raises(ToolMissing, match="has no no_such_name"):
        spec.imported("gdntune.errors", "no_such_name")


def test_a_variant_says_version_and_form():
    """What a trial is recorded as: the peer, the entry, its version, how it is called and what more
    it moves.
    """
    peer = peers.get("flashinfer")
    problem = Problem(BF16.replace(tokens=2, mode="frozen"), 3, 2, 4)
    v = peer.variant(peer.entry(WY), problem)
    assert (v.kernel, v.id) == ("peer:flashinfer", f"peer:flashinfer.{WY}")
    assert set(v.knobs) == {"version", "form", "extra_bytes"}
    # inputs of 2 tokens written to 16 rows, those read, and 14 rows of output too many
    inputs = 3 * (2 * 2 * 128 + 4 * 128 + 2 * 4) * 2
    assert v.knobs["extra_bytes"] == inputs * (2 + 16) + 3 * 4 * 128 * 2 * 14
    native = Problem(problem.contract.replace(tokens=4), 3, 2, 4)
    assert "extra_bytes" not in peer.variant(peer.entry(WY), native).knobs


class Recorder:
    """Stands in for a library's function, with its signature: keeps its arguments, returns what it
    is told to.
    """

    def __init__(self, parameters):
        self.signature = signature(parameters)
        self.arguments = {}

    def __call__(self, *positional, **arguments):
        self.arguments = dict(self.signature.bind(*positional, **arguments).arguments)
        return torch.zeros(1), torch.zeros(1)

    def same(self, x):
        """The names of the arguments that share x's memory, so that a call writes to x itself."""
        return {
            name
            for name, y in self.arguments.items()
            if isinstance(y, torch.Tensor)
            and y.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        }


def signature(parameters):
    """The signature that a line of `fakes.signatures` says."""
    found, kind = [], inspect.Parameter.POSITIONAL_OR_KEYWORD
    for word in parameters.split():
        if word == "*":
            kind = inspect.Parameter.KEYWORD_ONLY
        elif word.startswith("**"):
            found.append(inspect.Parameter(word[2:], inspect.Parameter.VAR_KEYWORD))
        else:
            default = None if word.endswith("=") else inspect.Parameter.empty
            found.append(inspect.Parameter(word.removesuffix("="), kind, default=default))
    return inspect.Signature(found)


@pytest.fixture
def called(monkeypatch):
    """Binds an entry to a case and calls stand-ins in the library's place."""

    def call(peer, entry, case):
        recorders = []

        def imported(module, name):
            recorders.append(Recorder(SIGNATURES[peer][1][f"{module}:{name}"]))
            return recorders[-1]

        monkeypatch.setattr(spec, "imported", imported)
        bound = peers.get(peer).entry(entry).bind(case)
        bound.call()
        return recorders[-1], bound

    return call


@pytest.mark.parametrize("name", SIGNATURES)
def test_the_version_that_an_adapter_was_written_for(name):
    """What an adapter says that it calls is in the signatures of its version, by name."""
    peer, (version, signatures) = peers.get(name), SIGNATURES[name]
    assert peer.written_for == version
    functions = {f for entry in peer.entries for f in entry.functions}
    assert {f"{f.module}:{f.name}" for f in functions} == set(signatures)
    for f in functions:
        parameters = signature(signatures[f"{f.module}:{f.name}"]).parameters
        assert set(f.arguments) <= set(parameters), f.name


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Writes the sources of a package that is then installed, and makes a peer of one function."""

    def write(sources, module, arguments=("q", "out")):
        for path, text in sources.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))
        spec._parsed.cache_clear()
        function = spec.Function(module, "decode", arguments)
        entry = dataclasses.replace(library.PEER.entries[0], functions=(function,))
        packages = (module.split(".")[0],)
        return dataclasses.replace(
            library.PEER, packages=packages, entries=(entry,), written_for="0.5.23"
        )

    return write


def test_another_version_is_said():
    """An adapter of one version beside another: said, since what it calls may have moved."""
    peer = dataclasses.replace(library.PEER, written_for="0.1")
    assert peer.differs() == [f"written for 0.1, {torch.__version__} is installed"]
    same = dataclasses.replace(library.PEER, written_for=torch.__version__)
    assert same.differs() == []
    absent = dataclasses.replace(peer, packages=("no_such_package",))
    assert absent.differs() == []


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ({"moving/ops/new.py": "def decode(q, out): ..."}, "there is no moving.ops.old"),
        ({"moving/ops/old.py": "def verify(q, out): ..."}, "moving.ops.old has no decode"),
        ({"moving/ops/old.py": "def decode(q, *, output): ..."}, "has no argument out"),
        ({"moving/ops/old.py": "try:\n    from .a import decode\nexcept ImportError:\n    decode = None",
          "moving/ops/a.py": "def decode(q): ..."}, "moving.ops.old.decode has no argument out"),
    ],
    ids=["module", "name", "argument", "re-exported"],
)  # fmt: skip
def test_a_name_that_has_moved_is_said(installed, sources, said):
    """Fault: SGLang's adapter named a module that its library had moved, and only a bench on a GPU
    told. It is read from the installed sources, which are not imported.
    """
    peer = installed({**sources, "moving/__init__.py": "raise SystemExit"}, "moving.ops.old")
    assert any(said in line for line in peer.differs()), peer.differs()


@pytest.mark.parametrize(
    "text",
    ["def decode(q, out): ...", "if True:\n    def decode(q, *, out=None): ...",
     "def decode(q, **rest): ...", "decode = make(decode_kernel)"],
)  # fmt: skip
def test_a_name_that_is_there_is_not_said(installed, text):
    """Defined, defined under a condition, with arguments of any name, or made by a call."""
    peer = installed({"staying/__init__.py": text}, "staying")
    assert not any("decode" in line for line in peer.differs())


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


def test_the_bench_config_has_a_peer_for_each_part():
    """configs/bench-peers.yaml: each part is served by FlashInfer or flash-linear-attention at most
    of its cells, vLLM's drafts by vLLM; crashes known are rows.
    """
    whole = config.load(Path(__file__).parents[2] / "configs" / "bench-peers.yaml")
    entries = set()
    for part in whole.parts:
        problems = whole.only([part.name]).problems()
        names = ("vllm", "sglang") if part.name == "slots" else ("flashinfer", "fla")
        served = [peers.get(name).serving(p)[0] for p in problems for name in names]
        entries |= {e.name for found in served for e in found}
        assert sum(map(bool, served)) * 2 >= len(problems), part.name
    assert entries >= {
        e.name
        for name in ("flashinfer", "fla")
        for e in peers.get(name).entries
        if e.kind == "rule"
    }
    # what vLLM and SGLang call by default has its cells too
    engines = {
        e.name
        for p in whole.all_problems()
        for name in ("sglang", "vllm")
        for e in peers.get(name).serving(p)[0]
    }
    assert engines >= {PACKED, PACKED_KDA, OP, BEHIND, *TRITON}
    in_order = [
        p
        for part in whole.parts
        if part.name.endswith("-in-order")
        for p in whole.only([part.name]).problems()
    ]
    assert in_order and {p for p in whole.all_problems() if not p.contract.pool} == set(in_order)
    # of GDN it has fp32 states in order alone, of KDA both, and slots
    served = {p for p in whole.all_problems() if peers.get("fla").serving(p)[0]}
    gdn = {p for p in served if p.contract.op == "gdn_decode"}
    assert gdn == {
        p for p in in_order if p.contract.op == "gdn_decode" and p.contract.state_dtype == "fp32"
    }
    assert {(p.contract.layout, p.contract.tokens) for p in gdn} == {
        *(("k_last", t) for t in (1, 2, 4, 8)),
        ("v_last", 1),
    }
    kda = {p for p in whole.all_problems() if p.contract.op == "kda_decode"}
    assert served - gdn == {p for p in kda if p.contract.mode == "update" or p.contract.accepted}
    lost = Problem(BF16.replace(tokens=8, mode="frozen", intermediate="dense"), 512, 16, 64)
    assert lost in whole.problems() and "32-bit" in peers.get("flashinfer").serving(lost)[1]


def test_split_slots_are_refused(called):
    """A case that reads one slot and writes another is no case for a call that knows one slot a
    request.
    """
    case = make_case(Problem(FP32, 3, 2, 2), split=True)
    with pytest.raises(UnsupportedProblem, match="read_index differs"):
        called("sglang", *TRITON, case)


# -- comparing


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


def compare_with_reference(case):
    """The reference's result, written into the case."""
    found = library.decode(case.contract, dtype=torch.float32, **case.tensors()).stored(
        case.contract
    )
    case.state.copy_(found.state)
    if case.intermediate is not None:
        case.intermediate.copy_(found.intermediate)
    return found


def test_the_chain_config_has_peers_at_each_cell():
    """configs/bench-chain.yaml: T=1 and T=4 up to B=64, each cell with FlashInfer, SGLang or vLLM."""
    whole = config.load(Path(__file__).parents[2] / "configs" / "bench-chain.yaml")
    problems = whole.all_problems()
    assert whole.policy.l2 == "chain" and {p.contract.tokens for p in problems} == {1, 4}
    assert {p.B for p in problems} == {1, 4, 16, 64}
    names = ("flashinfer", "sglang", "vllm", "fla")
    served = {p: {e.name for n in names for e in peers.get(n).serving(p)[0]} for p in problems}
    assert all(served.values())
    assert {RING, OP, BEHIND, PACKED, PACKED_KDA, *OUTPUTS_KDA} <= set().union(*served.values())
