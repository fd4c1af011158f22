"""gdntune/merge.py: where two tables differ, and one table of both."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
import synthetic

from gdntune.device.arch import target
from gdntune.errors import TableError
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.report.comparisons import diff_document
from gdntune.report.tables import table_document
from gdntune.results import merge, table
from gdntune.results.derive import derive
from gdntune.results.records import Cell, Check, Trial

SCHEMA = Path(__file__).parents[2] / "docs" / "table.schema.json"
ONE, TWO, FOUR = (Contract(tokens=t) for t in (1, 2, 4))
replace = msgspec.structs.replace


def made(*cells, knob=1, knobs=(), **header):
    """A table derived from (contract, work units, best variant) a cell."""
    found = []
    for contract, work_units, best in cells:
        p = Problem(contract, work_units, 1, 1)
        for name in "abc":
            us = 10.0 if name == best else 20.0
            v = Variant("recurrent", name, {"tile_v": ord(name), "k": knob, **dict(knobs)})
            found += [
                Check(contract=contract, variant=name, status="ok"),
                Trial(problem=p, variant=v, stage="final", status="ok", samples_us=[us] * 3),
            ]
        found.append(Cell(problem=p, status="ok"))
    return derive(found, synthetic.run(**header))


A = made((ONE, 8, "a"), (ONE, 32, "b"), (TWO, 8, "a"))


def spans(a, b):
    """What a diff says of choices, without the contracts' names."""
    return [(d.first, d.last, d.a, d.b) for d in merge.diff(a, b).choices]


# -- diff


def test_a_table_equals_itself():
    """No difference, and none after it was written and read."""
    assert merge.diff(A, A) == merge.Differences((), ())
    assert merge.diff(A, table.validate(msgspec.json.encode(A))) == merge.Differences((), ())


def test_spans_that_differ():
    """Boundaries of both are looked at; neighbouring spans with the same pair are one; equal ones
    are left out.
    """
    b = made((ONE, 8, "a"), (ONE, 128, "b"), (TWO, 8, "a"))
    assert spans(A, b) == [(17, 66, "b", "a")]
    assert spans(A, made((ONE, 8, "c"), (TWO, 8, "a"))) == [(1, 16, "a", "c"), (17, None, "b", "c")]


def test_a_contract_of_one_alone():
    """The choices differ at its work units: the other has no rule there."""
    assert spans(A, made((ONE, 8, "a"), (ONE, 32, "b"))) == [(1, None, "a", None)]
    assert spans(made((TWO, 8, "a")), A) == [(1, 16, None, "a"), (17, None, None, "b")]


def test_names_do_not_matter():
    """The same kernel and knobs by another name are no difference; other knobs by the same name are
    one.
    """
    renamed = json.loads(msgspec.json.encode(A).replace(b'"a"', b'"z"'))
    assert spans(A, table.validate(json.dumps(renamed).encode())) == []
    other = made((ONE, 8, "a"), (ONE, 32, "b"), (TWO, 8, "a"), knob=2)
    assert [s[2:] for s in spans(A, other)] == [("a", "a"), ("b", "b"), ("a", "a")]


def test_what_else_differs():
    """Device, policy, versions, code and journals are named."""
    b = made(
        (ONE, 8, "a"), device=target("sm_100a"), policy={"timer": "cupti", "l2": "warm"}, kernels={"recurrent": "f9"}
    )
    about = " / ".join(merge.diff(A, b).about)
    for part in (
        "device: NVIDIA H100", "policy of 1 contract: l2 cold-clean, timer cupti; l2 warm, timer cupti",
        "kernels recurrent: f1, f9", "journals:",
    ):  # fmt: skip
        assert part in about


def test_the_policies_that_differ_are_the_rules():
    """A table's own says nothing where its rules have others: those of one contract are compared."""
    chain = {"timer": "graph", "l2": "chain"}
    two = made((ONE, 8, "a"), (TWO, 8, "a"))

    def under(t, whole, *own):
        rules = (msgspec.structs.replace(r, policy=p) for r, p in zip(t.rules, own, strict=True))
        return msgspec.structs.replace(t, policy=whole, rules=tuple(rules))

    cold = two.policy
    swapped = under(two, chain, cold, cold)
    assert not any("policy" in a for a in merge.diff(two, swapped).about)
    mixed = under(two, cold, msgspec.UNSET, chain)
    (said,) = (a for a in merge.diff(two, mixed).about if "policy" in a)
    assert said == "policy of 1 contract: l2 cold-clean, timer cupti; l2 chain, timer graph"


def test_document():
    """The printed form says how much differs and where."""
    text = repr(diff_document(merge.diff(A, made((ONE, 8, "c"), (TWO, 8, "a"))), "A, B"))
    assert "2 spans of work units in 1 contract:" in text
    assert "'17 on'" in text
    assert "The choices are equal." in repr(diff_document(merge.diff(A, A), "A, A"))


# -- merge


def test_rules_of_both(tmp_path):
    """Rules are joined and sorted, variants those they name, evidence kept a source; what is saved
    satisfies schema and loader.
    """
    b = made((FOUR, 8, "c"), config="other", started="2026-11-29T00:00:00+00:00")
    t = merge.merge(A, b)
    assert [r.when for r in t.rules] == [ONE, TWO, FOUR]
    assert (t.rules[:2], t.rules[2:]) == (A.rules, b.rules)
    assert set(t.variants) == {"a", "b", "c"}
    assert (t.kernels, t.device, t.policy) == (A.kernels, A.device, A.policy)
    e = t.evidence
    assert e.sources == (A.evidence, b.evidence)
    assert (e.config, e.started, e.cells, e.trials) == ("synthetic, other", b.evidence.started, 4, 12)
    assert (e.regret_max, e.failures) == (0, A.evidence.failures)
    table.save(t, tmp_path / "t.json")
    assert table.load(tmp_path / "t.json") == t
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(
        json.loads((tmp_path / "t.json").read_text())
    )


def test_a_sweeps_table_has_no_sources():
    """What a sweep writes is what it was before tables were merged."""
    assert b"sources" not in msgspec.json.encode(A)


def test_merging_again_changes_nothing():
    """A table with itself is itself; a merged one takes no source twice; three in either order have
    the same sources.
    """
    assert merge.merge(A, A) == A
    b, c = made((FOUR, 8, "c")), made((ONE.replace(mode="frozen"), 8, "c"))
    t = merge.merge(A, b)
    assert merge.merge(t, b) == t
    left, right = merge.merge(t, c), merge.merge(A, merge.merge(b, c))
    assert left == right


def test_conflicts_need_a_preference():
    """Where both have a rule and their choices differ it is refused by name, unless one is preferred;
    rules that agree are no conflict.
    """
    b = made((ONE, 8, "c"), (TWO, 8, "a"), (FOUR, 8, "c"))
    with pytest.raises(TableError, match=r"choices differ for gdn_decode.tokens=1; say whose.*--prefer first"):
        merge.merge(A, b)
    first, second = merge.merge(A, b, "first"), merge.merge(A, b, "second")
    assert (first.rules[0], second.rules[0]) == (A.rules[0], b.rules[0])
    assert len(first.rules) == len(second.rules) == 3
    assert set(second.variants) == {"a", "c"}
    assert (first.evidence.cells, second.evidence.cells) == (4, 3)


@pytest.mark.parametrize(
    "change, part",
    [
        ({"device": target("sm_100a")}, "the other of NVIDIA B200"),
        ({"policy": {"timer": "cupti", "l2": "cold-dirty"}}, "the other under l2 cold-dirty"),
        ({"kernels": {"recurrent": "f9"}}, "the code of recurrent is not the same (f1, f9)"),
        ({"knob": 2}, "a is not the same variant in both"),
    ],
    ids=["device", "policy", "code", "knobs"],
)
def test_what_does_not_stand_side_by_side(change, part):
    """Another device, policy, code, or other knobs under one name: refused, whatever is preferred.
    """
    with pytest.raises(TableError) as e:
        merge.merge(A, made((FOUR, 8, "a"), **change), "first")
    assert part in str(e.value)


def test_a_layers_step_is_of_a_chain(tmp_path):
    """Rules that no contract can choose between may be measured under two policies, as a layer's
    step in a chain of layers: each says which, on disk too; merged anew it is still so.
    """
    chain = {"timer": "graph", "l2": "chain"}
    step = ONE.replace(norm="silu", conv="silu")
    steps = made((step, 8, "c"), policy=chain)
    t = merge.merge(A, steps)
    assert [t.policy_of(r) for r in t.rules] == [
        chain if r.when == step else A.policy for r in t.rules
    ]
    assert t.policy == A.policy and t.find(step, 8)[0].when == step
    assert t.explain(step, 8)["policy"] == chain and t.explain(ONE, 8)["policy"] == A.policy
    table.save(t, tmp_path / "t.json")
    assert table.load(tmp_path / "t.json") == t
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(
        json.loads((tmp_path / "t.json").read_text())
    )
    shown = repr(table_document(t, "t"))
    assert "measured under l2 chain, timer graph" in shown
    assert f"; 1 of {len(t.rules)} rules by another, which their heading names." in shown
    assert "by another" not in repr(table_document(A, "t"))
    again = merge.merge(steps, A)
    assert again.policy == chain and again.policy_of(again.find(ONE, 8)[0]) == A.policy
    assert merge.merge(t, made((FOUR, 8, "a"))).policy_of(t.find(step, 8)[0]) == chain
    with pytest.raises(TableError, match="one was made under l2 cold-clean"):
        merge.merge(t, made((FOUR, 8, "a"), policy=chain))


def test_code_that_compiles_to_the_same_objects_is_the_same(monkeypatch):
    """Fault: after a kernel's text was rewritten, no table of it could be joined with one that was
    measured before, though every object is the same; one may have a knob more.
    """
    known = {("recurrent", "f1", "f2")}
    monkeypatch.setattr(merge, "same_objects", lambda *pair: pair[:3] in known)
    b = made((FOUR, 8, "a"), kernels={"recurrent": "f2"}, knobs={"pdl": "none"})
    for t in (merge.merge(A, b), merge.merge(b, A)):
        assert len(t.rules) == 3
        # what was measured with the later code alone is not said to be of the earlier
        assert t.kernels == {"recurrent": "f2"}
        assert t.variants["a"].knobs["pdl"] == "none" and "pdl" not in t.variants["b"].knobs
    with pytest.raises(TableError, match=r"the code of recurrent is not the same \(f1, f3\)"):
        merge.merge(A, made((FOUR, 8, "a"), kernels={"recurrent": "f3"}))


def test_code_of_other_objects_is_not_the_same_where_the_earlier_table_names_them(monkeypatch):
    """What was compared without a knob: the earlier table's variants count, not the later one's."""
    monkeypatch.setattr(
        merge,
        "same_objects",
        lambda kernel, was, code, ops, settings: (was, code) == ("f1", "f2")
        and not any(x.get("tf32") for x in settings),
    )
    later = made((FOUR, 8, "a"), kernels={"recurrent": "f2"}, knobs={"tf32": True})
    for t in (merge.merge(A, later), merge.merge(later, A)):
        assert t.kernels == {"recurrent": "f2"}
    earlier = made((FOUR, 8, "a"), kernels={"recurrent": "f1"}, knobs={"tf32": True})
    with pytest.raises(TableError, match="the code of recurrent is not the same"):
        merge.merge(earlier, made((TWO, 8, "c"), kernels={"recurrent": "f2"}))


def test_what_a_newer_sweep_replaces_may_be_of_other_code():
    """Fault: contracts that were swept again, by a kernel that was changed, could not replace the old
    rules, though no other rule named that kernel. Where one does, it is refused as before.
    """
    new = made((FOUR, 8, "a"), kernels={"recurrent": "f3"})
    old = made((FOUR, 8, "b"), kernels={"recurrent": "f1"})
    for t in (merge.merge(new, old, "first"), merge.merge(old, new, "second")):
        assert t.kernels == {"recurrent": "f3"} and t.find(FOUR, 8)[0].at(8).variant == "a"
    with pytest.raises(TableError, match="the code of recurrent is not the same"):
        merge.merge(new, A, "first")


def test_a_measured_peak_may_differ():
    """The peak of a CPU is measured anew in each sweep; the device is the same."""
    device = replace(A.device, peak_gb_s=3000.0, peak_source="measured")
    assert len(merge.merge(A, made((FOUR, 8, "a"), device=device)).rules) == 3


def test_versions_are_joined():
    """Where two versions were used, both are named, each once."""
    b = made((FOUR, 8, "a"), software={"torch": "2.14.0", "python": "3.11.7"})
    t = merge.merge(A, b)
    assert t.software == {"torch": "2.13.0, 2.14.0", "python": "3.11.7"}
    assert merge.merge(t, b).software == t.software
