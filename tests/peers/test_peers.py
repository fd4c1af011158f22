"""gdntune/peers/: which problems each entry serves, and what is installed of it. No peer is needed."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from fakes import library
from fakes.library_function import signature
from fakes.signatures import SIGNATURES
from peer_entries import (
    BEHIND,
    BF16,
    FP32,
    GDN,
    GIVEN,
    KDA,
    KDA_GIVEN,
    KDA_IN_PLACE,
    KDA_RAW,
    MTP,
    OP,
    OUTPUTS_KDA,
    PACKED,
    PACKED_KDA,
    PRETRANSPOSE,
    RING,
    SLOTS,
    TRITON,
    WY,
)

from gdntune import peers
from gdntune.errors import ToolMissing, UnknownName
from gdntune.peers import spec
from gdntune.problem import Contract, Problem
from gdntune.tuning import config


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
