"""What calls without dependent launch take: derived, checked, compared and merged."""

import json
from pathlib import Path

import jsonschema
import msgspec
import pytest
from dependent import CONTRACT, RUN, TIMES, swept

from gdntune.errors import TableError
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.report.comparisons import diff_document
from gdntune.report.markdown import markdown
from gdntune.results import merge, table
from gdntune.results.derive import derive
from gdntune.results.journal import FILE, encode
from gdntune.results.minimax import minimax
from gdntune.results.records import Cell, Check, Trial

SCHEMA = Path(__file__).parents[2] / "docs" / "table.schema.json"
def spans(found):
    return [(i.first, i.last, i.variant) for i in found]


def test_they_have_a_choice_of_their_own():
    """Fault: of the best variant with dependent launch calls without it took the other form, 8.31
    us where the best without takes 8.12 (H200, KDA's layer step).
    """
    made = derive(swept(), RUN)
    (rule,) = made.rules
    assert [i.variant for i in rule.intervals] == ["a", "b"]
    # a tie at 64 work units keeps one interval
    assert spans(rule.alone) == [(1, None, "d")] and set(made.variants) == {"a", "b", "d"}
    first, second = rule.alone[0].evidence
    assert first.regret == 0 and first.runner_up == "c" and second.runner_up == "c"
    assert second.regret == pytest.approx(24.1 / 24.0 - 1, abs=1e-6)
    # what the table says of itself is of what it chose of all
    assert made.evidence.cells == 2 and made.evidence.regret_max == 0
    for allowed, name in ((True, "a"), (False, "d")):
        assert rule.at(8, allowed).variant == made.find(CONTRACT, 8, dependent_launch=allowed)[1].variant
        said = made.explain(CONTRACT, 8, dependent_launch=allowed)
        assert said["variant"] == name and ("without dependent launch" in said["reason"]) is not allowed
    assert made.explain(CONTRACT, 8)["variant"] == "a"


def test_an_older_journal_gives_what_it_gave():
    """Its header has no word of such a choice, and its table none, to the byte."""
    older = msgspec.structs.replace(RUN, alone=msgspec.UNSET)
    made = derive(swept(), older)
    assert made.rules[0].alone is msgspec.UNSET and b"alone" not in table._text(made)
    with_it = derive(swept(), RUN)
    assert made.rules[0].intervals == with_it.rules[0].intervals


def test_only_where_a_choice_uses_dependent_launch():
    """Where none does, one choice is of all calls; a cell without others is its neighbour's."""
    slow = {8: {**TIMES[8], "a": 9.0}, 64: {**TIMES[64], "a": 30.0, "b": 30.0}}
    assert derive(swept(slow), RUN).rules[0].alone is msgspec.UNSET
    some = {8: {"a": 7.8}, 64: TIMES[64]}
    assert spans(derive(swept(some), RUN).rules[0].alone) == [(1, None, "c")]
    assert derive(swept({8: {"a": 7.8}}), RUN).rules[0].alone is msgspec.UNSET


def test_their_evidence_is_fresh():
    """Of samples taken after both choices, against the best without dependent launch."""
    fresh = {8: {"a": 7.9, "c": 8.0, "d": 8.2}}
    (rule,) = derive(swept(fresh=fresh), RUN).rules
    (first, second) = rule.alone[0].evidence
    assert first.fresh is True and first.mean_us == 8.2 and first.runner_up == "c"
    assert first.regret == pytest.approx(0.025) and second.fresh is msgspec.UNSET
    assert rule.intervals[0].evidence[0].regret == 0


def test_written_and_read(tmp_path):
    """A line an interval, by the published schema."""
    made = derive(swept(), RUN)
    table.save(made, tmp_path / "t.json")
    assert table.load(tmp_path / "t.json") == made
    text = (tmp_path / "t.json").read_text()
    assert sum(line.startswith('    {"from"') for line in text.splitlines()) == 3
    jsonschema.validate(json.loads(text), json.loads(SCHEMA.read_text()))


@pytest.mark.parametrize(
    ("alone", "fault"),
    [
        ([{"from": 1, "to": None, "variant": "a"}], r"alone\[0\].variant is 'a', which uses dependent launch"),
        ([{"from": 2, "to": None, "variant": "d"}], r"alone\[0\].from is 2: the first interval starts at 1"),
        ([{"from": 1, "to": 9, "variant": "d"}], r"alone\[0\].to is 9: the last interval has no end"),
        ([{"from": 1, "to": None, "variant": "x"}], r"alone\[0\].variant is 'x'"),
        ([], r"alone"),
    ],
)
def test_what_is_wrong_is_refused(alone, fault):
    """As of intervals, and variants that such calls cannot take."""
    raw = msgspec.to_builtins(derive(swept(), RUN))
    raw["rules"][0]["alone"] = alone
    with pytest.raises(TableError, match=r"t\.json: \$\.rules\[0\]\." + fault):
        table.validate(json.dumps(raw).encode(), "t.json")


def test_differences():
    """A table that has none gives such calls the other form of what it names."""
    a = derive(swept(), RUN)
    assert merge.diff(a, a).choices == ()
    bare = derive(swept(), msgspec.structs.replace(RUN, alone=msgspec.UNSET))
    found = merge.diff(a, bare)
    # without dependent launch b is d, and a is c
    last = bare.rules[0].intervals[0].last
    assert [(d.first, d.last, d.a, d.b, d.alone) for d in found.choices] == [(1, last, "d", "a", True)]
    assert f"{CONTRACT.key()}, without dependent launch" in markdown(diff_document(found, "a, b"))


def test_merged():
    """Rules keep their choices for all calls, and the variants that these name; where only those
    differ, somebody says which counts.
    """
    four = Contract(tokens=4)
    a, b = derive(swept(), RUN), derive(swept(contract=four), RUN)
    both = merge.merge(a, b)
    assert [r.alone for r in both.rules] == [a.rules[0].alone, b.rules[0].alone]
    assert set(both.variants) == {"a", "b", "d"}
    others = {8: {**TIMES[8], "d": 9.0}, 64: TIMES[64]}
    c = derive(swept(others), RUN)
    assert spans(c.rules[0].intervals) == spans(a.rules[0].intervals)
    with pytest.raises(TableError, match="choices differ"):
        merge.merge(a, c)
    assert merge.merge(a, c, "second").rules == c.rules
    assert set(merge.merge(a, c, "second").variants) == {"a", "b", "c"}


def test_of_several_cards(tmp_path):
    """At each cell the least worst regret, among those without dependent launch too; a journal
    without the word for it leaves all without.
    """
    more = {8: {**TIMES[8], "c": 8.0, "d": 9.0}, 64: TIMES[64]}
    paths = []
    for name, times, header in (
        ("one", TIMES, RUN),
        ("two", more, RUN),
        ("old", TIMES, msgspec.structs.replace(RUN, alone=msgspec.UNSET)),
    ):
        folder = tmp_path / name
        folder.mkdir()
        (folder / FILE).write_bytes(b"".join(map(encode, [header, *swept(times)])))
        paths.append(folder)
    (rule,) = minimax(paths[:2]).table.rules
    assert spans(rule.alone) == [(1, None, "c")]
    assert rule.alone[0].evidence[0].regret == pytest.approx(8.4 / 8.1 - 1, abs=1e-6)
    assert minimax([paths[0], paths[2]]).table.rules[0].alone is msgspec.UNSET
