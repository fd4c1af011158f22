"""Expected costs of verifying drafts, of the tables that ship."""

from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from gdntune.cli.app import app
from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract
from gdntune.results import drafts, table

TABLES = Path(__file__).parents[2] / "tables" / "nvidia-h200"
SHIPPED = table.load(TABLES / "gdn_decode.json")
# whatever it has of rings
H200 = msgspec.structs.replace(SHIPPED, rules=[r for r in SHIPPED.rules if not r.when.ring])
FOUR = Contract(tokens=4)


def cells(contract):
    """Work units and times of the rule that serves a contract, and of no other."""
    rule, _ = H200.find(contract, 1)
    return sorted((e.work_units, e.time_us) for i in rule.intervals for e in i.evidence)


def test_measured_cells_are_given_back():
    """At a measured cell its median; beside it in proportion; beyond the last by its rate."""
    measured = cells(FOUR)
    (first, first_us), (second, second_us) = measured[:2]
    last, last_us = measured[-1]
    for units, time_us in measured:
        found = drafts.estimate(H200, FOUR, units)
        assert found.time_us == time_us and found.how == f"measured at {units}"
    between = drafts.estimate(H200, FOUR, (first + second) // 2).time_us
    assert min(first_us, second_us) < between < max(first_us, second_us)
    assert drafts.estimate(H200, FOUR, 3 * last).time_us == pytest.approx(3 * last_us)
    assert drafts.estimate(H200, FOUR, 1).time_us == first_us


def test_the_window_reads_once_and_writes_once():
    """T=4 with a slot per token writes four states; the window's step writes one for all layers."""
    for units in (64, 1024, 4096, 16384):
        first, second = drafts.ways(H200, FOUR, units, 0.7, 36)
        assert (first.name, second.name) == ("raw window", "a state per token")
        assert 1.2 < second.step_us / first.step_us < 2
        alone, commit = first.calls
        assert first.step_us == pytest.approx(alone.time_us + commit.time_us)
        assert alone.contract.count("frozen") and "1 of 36 layers" in commit.how


def test_a_ring_is_a_rule_of_its_own():
    """Where a table has cells of a ring, it is a way; no rule without one stands in its place."""
    assert not any("ring" in w.name for w in drafts.ways(H200, FOUR, 64, 0.7, 36))
    rule, _ = H200.find(FOUR, 1)
    ringed = msgspec.structs.replace(rule, when=rule.when.replace(ring=16))
    with_ring = msgspec.structs.replace(H200, rules=[*H200.rules, ringed])
    (way,) = [w for w in drafts.ways(with_ring, FOUR, 64, 0.7, 36) if w.name == "a ring of 16"]
    assert way.step_us == drafts.estimate(H200, FOUR, 64).time_us
    assert "folds included" in way.calls[0].how
    found, _ = with_ring.find(FOUR, 1)
    assert found.when.ring == 0
    # of another T nothing was measured
    eight = drafts.ways(with_ring, FOUR.replace(tokens=8), 64, 0.7, 36)
    assert not any("ring" in w.name for w in eight)


def test_ways_of_two_policies_say_so(tmp_path):
    """Each call has its rule's policy, and `explain --op verify` names it where not all are one."""
    cold = {"timer": "cupti", "l2": "cold-clean"}
    rule, _ = H200.find(FOUR, 1)
    ringed = msgspec.structs.replace(rule, when=rule.when.replace(ring=16), policy={"timer": "graph", "l2": "chain"})
    with_ring = msgspec.structs.replace(SHIPPED, rules=(*H200.rules, ringed))
    for found, alike in ((H200, True), (with_ring, False)):
        path = tmp_path / f"{alike}.json"
        table.save(msgspec.structs.replace(found, rules=tuple(found.rules)), path)
        calls = [call for way in drafts.ways(found, FOUR, 64, 0.7, 36) for call in way.calls]
        assert [c.policy for c in calls if "ring=16" not in c.contract] == [cold] * 3
        options = ["--tokens", "4", "--work-units", "64", "--table", str(path)]
        said = CliRunner().invoke(app, ["explain", "--op", "verify", *options]).stdout
        assert ("under one policy" in said) is not alike
        assert said.count(", under l2 cold-clean, timer cupti\n") == (0 if alike else 3)
        assert said.count(", under l2 chain, timer graph\n") == (0 if alike else 1)


def test_outputs_alone_do_not_stand_for_a_state_per_token():
    """Where no rule writes each token's state, that way has no estimate: of KDA it once had the time of outputs alone."""
    few = msgspec.structs.replace(H200, rules=[r for r in H200.rules if r.when.intermediate == "none"])
    assert few.find(FOUR.replace(mode="frozen", intermediate="slots"), 64)
    assert [w.name for w in drafts.ways(few, FOUR, 64, 0.7, 36)] == ["raw window"]


def test_tokens_that_are_kept():
    """1 + p + p^2 + p^3 of four."""
    for rate, kept in ((0.0, 1), (0.5, 1.875), (1.0, 4)):
        way = drafts.ways(H200, FOUR, 1024, rate, 36)[0]
        assert way.accepted_us == pytest.approx(way.step_us / kept)


def test_a_table_without_the_contract_says_nothing():
    """No figure that was not measured."""
    empty = table.load(TABLES / "kda_decode.json")
    assert drafts.ways(empty, FOUR, 64, 0.7, 36) == []


def test_a_rule_of_another_mode_stands_for_none():
    """Fault: outputs alone of KDA were said to take what a call takes that writes its state, the
    nearest rule there is.
    """
    kda = table.load(TABLES / "kda_decode.json")
    rules = [r for r in kda.rules if r.when.mode == "update" and not r.when.ring]
    contract = FOUR.replace(op="kda_decode", gate="softplus")
    found = drafts.ways(msgspec.structs.replace(kda, rules=rules), contract, 64, 0.7, 36)
    assert found == []


def test_what_is_missing_says_what_to_sweep():
    """Of each way without cells the config that measures it."""
    found = drafts.ways(H200, FOUR, 64, 0.7, 36)
    assert drafts.missing("gdn_decode", found) == [("a ring", "configs/ring.yaml")]
    assert ("raw window", "configs/ring-kda.yaml") in drafts.missing("kda_decode", [])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accept_rate": 1.1}, "accept_rate=1.1: expected 0 to 1"),
        ({"contract": Contract()}, "tokens=1: expected 2 or more"),
        ({"layers": 0}, "layers=0: expected 1 or more"),
    ],
)
def test_refused(change, words):
    """By name."""
    given = {"contract": FOUR, "work_units": 64, "accept_rate": 0.7, "layers": 36, **change}
    with pytest.raises(UnsupportedProblem, match=words):
        drafts.ways(H200, **given)
