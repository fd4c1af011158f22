"""gdntune/compare.py: two journals, cell by cell."""

import random
import statistics

import msgspec
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from gdntune.device.arch import target
from gdntune.errors import JournalError, UnknownName, UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.report.comparisons import comparison_document
from gdntune.results import compare
from gdntune.results.bootstrap import RatioInterval, ratio_of_means, verdict
from gdntune.results.records import Cell, Check, Trial

HEADER = synthetic.run()


def samples(mean, noise=0.02, n=200, seed=0):
    """Noisy samples whose mean is the one given."""
    chance = random.Random(seed)
    found = [mean * (1 + chance.gauss(0, noise)) for _ in range(n)]
    return [x * mean / statistics.fmean(found) for x in found]


def folder(path, cells, header=HEADER):
    """A journal: by work units, each variant's final samples."""
    found = [
        Check(contract=Contract(), variant=name, status="ok") for name in sorted({"a", "b"}.union(*cells.values()))
    ]
    for work_units, times in cells.items():
        p = Problem(Contract(), work_units, 1, 1)
        for name, us in times.items():
            v = Variant("recurrent", name, {})
            found.append(Trial(problem=p, variant=v, stage="final", status="ok", samples_us=us))
        found.append(Cell(problem=p, status="ok"))
    return synthetic.write(path, header, found, with_table=False)


def verdicts(found):
    """By work units."""
    return {c.work_units: c.verdict for c in found.cells}


def test_verdicts(tmp_path):
    """Faster and slower beyond a tie, the same within it, unclear where noise does not let it be
    said.
    """
    a = folder(tmp_path / "a", {w: {"a": samples(100, seed=w)} for w in (8, 16, 32, 64)})
    b = folder(
        tmp_path / "b",
        {
            8: {"a": samples(90, seed=1)},
            16: {"a": samples(110, seed=2)},
            32: {"a": samples(100.3, seed=3)},
            64: {"a": samples(101, noise=0.2, seed=4)},
            128: {"a": samples(100)},
        },
    )
    found = compare.compare(a, b)
    assert verdicts(found) == {8: "FASTER", 16: "SLOWER", 32: "TIE", 64: "UNCLEAR"}
    assert found.counts == {"FASTER": 1, "SLOWER": 1, "TIE": 1, "UNCLEAR": 1}
    assert (found.only_a, found.only_b) == (0, 1)
    assert all(c.low < c.ratio < c.high for c in found.cells)
    assert compare.compare(a, b) == found


def test_a_journal_is_the_same_as_itself(tmp_path):
    """Fault: noisy cells of a journal were UNCLEAR against themselves, at a ratio of 1.000, as if
    drawn twice.
    """
    a = folder(tmp_path / "a", {w: {"a": samples(30 + w, 0.15, seed=w)} for w in range(1, 20)})
    found = compare.compare(a, a)
    assert {c.verdict for c in found.cells} == {"TIE"}
    assert {(c.ratio, c.low, c.high) for c in found.cells} == {(1.0, 1.0, 1.0)}
    # as noisy samples of another run are not, whatever their means
    b = folder(tmp_path / "b", {w: {"a": samples(30 + w, 0.15, seed=99 + w)} for w in range(1, 20)})
    assert {c.verdict for c in compare.compare(a, b).cells} == {"UNCLEAR"}


def test_chosen_or_named(tmp_path):
    """By default each journal's own choice is compared; a named variant wherever both timed it."""
    a = folder(tmp_path / "a", {8: {"a": samples(100), "b": samples(120)}, 16: {"a": samples(100)}})
    b = folder(tmp_path / "b", {8: {"a": samples(130), "b": samples(100)}, 16: {"a": samples(100)}})
    chosen = compare.compare(a, b).cells[0]
    assert (chosen.a, chosen.b, chosen.verdict) == ("a", "b", "TIE")
    named = compare.compare(a, b, "b")
    assert verdicts(named) == {8: "FASTER", 16: "UNCLEAR"}
    assert named.cells[1].reason == "not timed to the end in A"
    assert (named.cells[1].ratio, named.cells[1].a_us) == (None, None)
    with pytest.raises(UnknownName, match="expected chosen or one of the 2 timed to the end: a, b$"):
        compare.compare(a, b, "c")


def test_of_many_variants_the_like_are_listed(tmp_path, monkeypatch):
    """Fault: a wrong --variant was refused without any of those that are right. Of many, those are
    listed that are most like it.
    """
    monkeypatch.setattr(compare, "LISTED", 2)
    a = folder(tmp_path, {8: {name: samples(100) for name in ("r.tv8", "r.tv16", "r.tv32")}})
    with pytest.raises(
        UnknownName, match=r"\(did you mean `r.tv16`\?\): .* of the 3 .*: r.tv16, r.tv\d+ and others less like it$"
    ):
        compare.compare(a, a, "r.tv15")


def test_too_few_samples_decide_nothing(tmp_path):
    """Below 20 samples a cell is UNCLEAR, whatever they say."""
    a = folder(tmp_path / "a", {8: {"a": samples(100)}})
    b = folder(tmp_path / "b", {8: {"a": [200.0] * 19}})
    (cell,) = compare.compare(a, b).cells
    assert (cell.verdict, cell.reason) == ("UNCLEAR", "19 samples in B: fewer than 20")


def test_what_cannot_be_compared(tmp_path):
    """Two policies are refused, and journals without a common cell; another device or code is said.
    """
    a = folder(tmp_path / "a", {8: {"a": samples(100)}})
    dirty = synthetic.run(policy={"timer": "cupti", "l2": "cold-dirty"})
    b = folder(tmp_path / "b", {8: {"a": samples(100)}}, dirty)
    with pytest.raises(JournalError, match="l2 cold-clean.*l2 cold-dirty.*two policies"):
        compare.compare(a, b)
    with pytest.raises(UnsupportedProblem, match="no cell in common"):
        compare.compare(a, folder(tmp_path / "c", {16: {"a": samples(100)}}))
    other = synthetic.run(target("sm_100a"), kernels={"recurrent": "f9"}, software={"torch": "2.14.0"})
    notes = compare.compare(a, folder(tmp_path / "d", {8: {"a": samples(100)}}, other)).notes
    assert len(notes) == 3
    assert "the code of recurrent, stream differs" in notes[1]
    assert "torch: 2.13.0, then 2.14.0" in notes[2]


@pytest.mark.parametrize(
    "a_us, low, high, expected",
    [
        (100, 0.995, 1.005, "TIE"),
        (100, 0.995, 1.02, "UNCLEAR"),
        (100, 1.005, 1.009, "TIE"),
        (100, 1.011, 1.02, "SLOWER"),
        (100, 1.009, 1.02, "UNCLEAR"),
        (100, 0.9, 0.98, "FASTER"),
        (100, 0.9, 0.995, "UNCLEAR"),
        (2, 0.985, 1.015, "TIE"),
        (2, 1.015, 1.02, "UNCLEAR"),
        (2, 0.9, 0.98, "FASTER"),
    ],
)
def test_verdict_of_an_interval(a_us, low, high, expected):
    """The whole interval must lie within the tie, or beyond it; at 2 us the tie is 32 ns."""
    assert verdict(a_us, RatioInterval((low + high) / 2, low, high)) == expected


def test_intervals_hold_the_truth():
    """Of 100 pairs with a true ratio of 1.02 about 95 intervals hold it."""
    held = 0
    for i in range(100):
        chance = random.Random(i)
        a, b = ([mean * (1 + chance.gauss(0, 0.03)) for _ in range(100)] for mean in (50, 51))
        interval = ratio_of_means(a, b, str(i))
        held += interval.low <= 1.02 <= interval.high
    assert 88 <= held <= 99


def test_drift_widens_the_interval():
    """Samples that drift slowly say less than as many independent ones, and the blocks know."""
    steady = samples(100, 0.02)
    still = ratio_of_means(steady, steady[::-1], "x")
    drifting = sorted(steady[:100]) + sorted(steady[100:])
    moved = ratio_of_means(drifting, drifting[::-1], "x")
    assert moved.high - moved.low > 1.5 * (still.high - still.low)


@settings(deadline=None, max_examples=30)
@given(st.lists(st.floats(1, 1000), min_size=20, max_size=60), st.floats(0.5, 2))
def test_the_interval_scales(times, factor):
    """Bounds are ordered and finite; equal samples have no width."""
    interval = ratio_of_means(times, [factor * x for x in times], "s")
    assert 0 < interval.low <= interval.high
    flat = ratio_of_means([times[0]] * 30, [times[0]] * 30, "s")
    assert flat == pytest.approx((1, 1, 1))


def test_document(tmp_path):
    """What is printed counts the verdicts and shows the cells that are no TIE, and as detail the
    others: each cell once.
    """
    a = folder(tmp_path / "a", {8: {"a": samples(100)}, 16: {"a": samples(100)}})
    b = folder(tmp_path / "b", {8: {"a": samples(120)}, 16: {"a": samples(100)}})
    found = compare.compare(a, b)
    document = comparison_document(found, "a, b")
    assert "2 cells: 0 FASTER, 1 SLOWER, 1 TIE, 0 UNCLEAR" in document.sections[0].blocks[1].items
    assert [[row[3] for row in s.blocks[0].rows] for s in document.sections[1:]] == [["8"], ["16"]]
    assert [s.detail for s in document.sections] == [False, False, True]
    assert msgspec.json.decode(msgspec.json.encode(found))["counts"]["SLOWER"] == 1
