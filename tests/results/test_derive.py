"""gdntune/derive.py: the table that a journal's records give."""

import functools
import itertools
import math
import random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gdntune import sol
from gdntune.device.arch import target
from gdntune.errors import JournalError, MeasurementError
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.results import table
from gdntune.results.derive import choose, derive
from gdntune.results.journal import digest
from gdntune.results.records import Build, Cell, Check, Run, Trial
from gdntune.timing import CUPTI_STEP_US, TIE_SHARE

RUN = Run(
    config="small",
    config_sha256="c0ffee",
    device=target("sm_90a"),
    software={"torch": "2"},
    policy={"timer": "cupti", "l2": "cold-clean"},
    kernels={"recurrent": "f1", "other": "f2"},
    started="2026-11-28T00:00:00+00:00",
)
CONTRACT = Contract()
NAMES = "abcdef"


def problem(work_units, contract=CONTRACT):
    """A cell of one head."""
    return Problem(contract, work_units, 1, 1)


def trial(work_units, name, mean_us, contract=CONTRACT, stage="final", role="decode", status="ok"):
    """A trial whose samples have a mean."""
    samples = [mean_us - 0.125, mean_us, mean_us + 0.125] if status == "ok" else []
    variant = Variant("recurrent", name, {"tile_v": ord(name[0])})
    return Trial(
        problem=problem(work_units, contract),
        variant=variant,
        role=role,
        stage=stage,
        status=status,
        samples_us=samples,
    )


def checks(names=NAMES, contract=CONTRACT):
    """A passed check of each variant."""
    return [Check(contract=contract, variant=name, status="ok") for name in names]


def cell(work_units, contract=CONTRACT, status="ok", floor_us=None, **means):
    """A closed cell with a final trial of each variant, screened in the order given."""
    found = [trial(work_units, name, us, contract, "screen") for name, us in means.items()]
    found += [trial(work_units, name, us, contract) for name, us in means.items()]
    if floor_us is not None:
        found.append(trial(work_units, "stream", floor_us, contract, "final", "floor"))
    return [*found, Cell(problem=problem(work_units, contract), status=status)]


def chosen(records, **options):
    """(from, to, variant) of the first rule's intervals."""
    return [(i.first, i.last, i.variant) for i in derive(records, RUN, **options).rules[0].intervals]


def boundary(low, high, run=RUN):
    """The last work unit of the lower of two cells that differ."""
    records = [*checks(), *cell(low, a=3, b=4), *cell(high, a=5, b=4)]
    first, second = derive(records, run).rules[0].intervals
    assert (first.first, second.first, second.last) == (1, first.last + 1, None)
    return first.last


@pytest.mark.parametrize(
    ("low", "high", "last"),
    [
        (128, 160, 132),  # a block a head on each of 132 SMs
        (224, 264, 231),  # tiles of 32 rows: 7 * 132 / 4
        (32, 40, 33),
        (136, 152, 148),  # tiles of 16 rows: 9 * 132 / 8, cut to whole work units
        (200, 1000, 396),  # of 264, 396, ... 924 the nearest to the geometric mean, 447
        (8, 16, 11),  # no wave ends there
        (32, 33, 32),
    ],
)
def test_boundaries_are_ends_of_waves(low, high, last):
    """Two cells that differ meet where a wave of blocks is full; the first interval starts at 1,
    the last has no end.
    """
    assert RUN.device.sm_count == 132
    assert boundary(low, high) == last


@pytest.mark.parametrize(
    ("a_at_high", "b_at_low", "last"),
    [
        (1.012, 1.056, 255),  # a loses less at b's cell than b at a's, and little
        (1.056, 1.012, 224),
        (1.0199, 1.0199, 255),
        (1.0201, 1.0301, 231),  # both lose more than twice the 1% that counts as nothing
        (1.0201, None, 231),
        (1.012, None, 255),
        (None, None, 231),
    ],
)
def test_a_variant_that_loses_little_at_both_cells_has_what_lies_between(a_at_high, b_at_low, last):
    """Fault: 5.6% lost at 232 work units, where the variant of 224 was best and lost 1.2% at 256.
    """
    low = {"a": 100.0} | ({} if b_at_low is None else {"b": 100 * b_at_low})
    high = {"b": 100.0} | ({} if a_at_high is None else {"a": 100 * a_at_high})
    found = derive([*checks(), *cell(224, **low), *cell(256, **high)], RUN, regret=0.01).rules[0].intervals
    assert [i.variant for i in found] == ["a", "b"]
    assert found[0].last == last


def test_boundaries_of_a_cpu_are_geometric_means():
    """Threads have no waves."""
    cpu = msgspec.structs.replace(RUN, device=msgspec.structs.replace(RUN.device, kind="cpu", sm_count=4))
    assert boundary(8, 32, cpu) == 16
    assert boundary(128, 160, cpu) == 143


def test_one_cell_is_one_interval():
    """A single cell speaks for all work units."""
    assert chosen([*checks(), *cell(64, a=3, b=2)]) == [(1, None, "b")]


def test_ties_take_the_neighbours_variant():
    """A variant within 1% of the best keeps its interval going; one beyond does not."""
    close = [*checks(), *cell(8, a=100, b=110), *cell(16, a=100.9, b=100), *cell(32, a=100, b=110)]
    assert chosen(close) == [(1, None, "a")]
    apart = [*checks(), *cell(8, a=100, b=110), *cell(16, a=101.1, b=100), *cell(32, a=100, b=110)]
    assert [v for _, _, v in chosen(apart)] == ["a", "b", "a"]
    assert chosen(apart, regret=0.02) == [(1, None, "a")]


def test_ties_know_the_clocks_step():
    """At 1 us, 32 ns are a tie though they are 3%."""
    assert chosen([*checks(), *cell(8, a=1, b=2), *cell(16, a=1.031, b=1)]) == [(1, None, "a")]
    assert len(chosen([*checks(), *cell(8, a=1, b=2), *cell(16, a=1.034, b=1)])) == 2


def test_order_of_preferences():
    """Fewest intervals, then fewest variants, then least regret, then the variant that trials name
    first.
    """
    fewest_variants = [*checks(), *cell(8, a=100), *cell(16, b=100, c=101, d=100.5), *cell(32, a=100), *cell(64, c=100)]
    assert [v for _, _, v in chosen(fewest_variants)] == ["a", "c", "a", "c"]
    least_regret = [*checks(), *cell(8, a=100.5, b=100), *cell(16, a=100.2, b=100.4)]
    assert chosen(least_regret) == [(1, None, "b")]
    simplest = [*checks(), *cell(8, c=100, b=100), *cell(16, c=100, b=100)]
    assert chosen(simplest) == [(1, None, "c")]


def test_a_failed_check_excludes_a_variant():
    """A variant that is wrong, or was never checked at this contract, is chosen nowhere, however
    fast.
    """
    records = [*cell(8, a=1, b=2, c=3), *cell(16, a=1, b=2, c=3)]
    other = checks("a", CONTRACT.replace(tokens=2))
    assert chosen([*checks("bc"), *other, *records]) == [(1, None, "b")]
    failed = Check(contract=CONTRACT, variant="a", status="failed", reason="wrong")
    assert chosen([*checks(), *records, failed]) == [(1, None, "b")]
    assert "a" not in derive([*checks(), failed, *records], RUN).variants


@pytest.mark.parametrize("status", ["crashed", "timeout"])
def test_a_crash_excludes_a_variant(status):
    """A variant that crashed or hung at one cell is chosen at none of the contract; one that
    failed, only not there.
    """
    records = [*checks(), *cell(8, a=1, b=2), *cell(16, a=1, b=2)]
    assert chosen([*records, trial(32, "a", 1, status=status)]) == [(1, None, "b")]
    assert chosen([*records, *cell(32, b=2), trial(32, "a", 1, status="failed")]) == [(1, 16, "a"), (17, None, "b")]


def test_a_variant_without_final_samples_is_not_acceptable():
    """Screened alone, or timed at the neighbours alone, a variant is not chosen at a cell."""
    screened = [*cell(8, a=1, b=2), trial(16, "a", 1, stage="screen"), *cell(16, b=2), *cell(32, a=1, b=2)]
    # its screen says that it loses nothing there: what lies between is its own
    assert chosen([*checks(), *screened]) == [(1, 15, "a"), (16, 16, "b"), (17, None, "a")]


def test_a_repeated_cell_replaces_the_first():
    """Of several passes over a cell the last that closed as ok counts; an open or failed one does
    not.
    """
    first, second = cell(8, a=1, b=2), cell(8, a=2, b=1)
    assert chosen([*checks(), *first, *second]) == [(1, None, "b")]
    assert chosen([*checks(), *first, *cell(8, status="failed", a=2, b=1)]) == [(1, None, "a")]
    assert chosen([*checks(), *first, *second[:-1]]) == [(1, None, "a")]
    assert chosen([*checks(), *first[:-1]]) == [(1, None, "a")]


def test_a_later_attempt_replaces_an_earlier_one():
    """Within a pass the last trial of a variant counts, also where it failed."""
    assert chosen([*checks(), trial(8, "a", 1), trial(8, "b", 2), trial(8, "a", 3)]) == [(1, None, "b")]
    assert chosen([*checks(), trial(8, "a", 1), trial(8, "b", 2), trial(8, "a", 1, status="failed")]) == [
        (1, None, "b")
    ]


def test_equal_work_units_take_the_most_heads():
    """Two problems with equal work units are one cell, whose times come from that with more heads,
    in any order.
    """
    wide = [
        msgspec.structs.replace(r, problem=Problem(CONTRACT, 1, 1, 8))
        for r in cell(8, a=2, b=1)
        if hasattr(r, "problem")
    ]
    for records in (cell(8, a=1, b=2) + wide, wide + cell(8, a=1, b=2)):
        assert chosen([*checks(), *records]) == [(1, None, "b")]


def test_evidence():
    """Each interval carries what was measured inside it, with floor, speed of light and runner-up.
    """
    records = [*checks(), *cell(64, a=4, b=5, floor_us=3.5), *cell(128, a=4.004, b=4), *cell(4096, c=100, a=120)]
    t = derive(records, RUN)
    one, two = t.rules[0].intervals
    assert [e.work_units for e in (*one.evidence, *two.evidence)] == [64, 128, 4096]
    e = one.evidence[0]
    share = sol.sol(sol.bytes_moved(problem(64)), 4, RUN.device.peak_gb_s)
    assert (e.time_us, e.mean_us, e.q1_us, e.q3_us, e.samples, e.regret) == (4, 4, 3.938, 4.062, 3, 0)
    assert (e.floor_us, e.sol, e.runner_up, e.runner_up_us, e.status) == (3.5, round(share, 4), "b", 5, "latency-bound")
    assert (one.evidence[1].regret, one.evidence[1].runner_up, one.evidence[1].floor_us) == (0.001, "b", None)
    assert two.evidence[0].status == sol.classify(problem(4096), 100, RUN.device, "cold-clean")
    assert (t.evidence.regret_max, t.evidence.regret_mean, t.evidence.cells) == (0.001, round(0.001 / 3, 6), 3)


def test_floor_falls_back_to_its_screen():
    """Without a final floor trial the best screened one counts; a failed one never."""
    floors = [
        trial(8, "stream.a", 2, stage="screen", role="floor"),
        trial(8, "stream.b", 1.5, stage="screen", role="floor"),
        trial(8, "stream.c", 1, role="floor", status="failed"),
    ]
    final = trial(8, "stream.a", 1.9, role="floor")
    for extra, floor_us in (([], 1.5), ([final], 1.9)):
        t = derive([*checks(), *floors, *extra, *cell(8, a=3)], RUN)
        assert t.rules[0].intervals[0].evidence[0].floor_us == floor_us


def test_a_device_without_a_known_peak():
    """Of a CPU the measured peak serves; without one there is no share, and the label comes from
    time and sizes.
    """
    cpu = msgspec.structs.replace(RUN.device, kind="cpu", peak_gb_s=None, peak_source="unknown")
    records = [*checks(), *cell(8, a=100)]
    for peaks, expected in (({}, None), ({"measured": 50.0}, round(sol.sol(sol.bytes_moved(problem(8)), 100, 50), 4))):
        t = derive(records, msgspec.structs.replace(RUN, device=cpu, peaks=peaks))
        assert t.rules[0].intervals[0].evidence[0].sol == expected


def test_impossible_times_are_refused():
    """A time below bytes over peak under cold-dirty, or of a clock that stands still, gives no
    table.
    """
    dirty = msgspec.structs.replace(RUN, policy={"timer": "cupti", "l2": "cold-dirty"})
    with pytest.raises(MeasurementError, match="cold-dirty"):
        derive([*checks(), *cell(4096, a=1)], dirty)
    stopped = msgspec.structs.replace(trial(8, "a", 1), samples_us=[0.0, 0.0])
    with pytest.raises(MeasurementError, match="all samples are 0 us"):
        derive([*checks(), stopped], RUN)


def test_origin():
    """A table tells its journal, run and failures; `kernels` are the fingerprints of the kernels
    that it names.
    """
    records = [
        Build(kernel="recurrent", variant="z", object_key="", status="failed", reason="spills"),
        *checks("a"),
        *cell(8, a=3, b=4),
        trial(8, "b", 1, status="crashed"),
    ]
    t = derive(records, RUN)
    assert (t.kernels, t.device, t.policy, t.software) == ({"recurrent": "f1"}, RUN.device, RUN.policy, RUN.software)
    o = t.evidence
    assert (o.journal_sha256, o.started, o.config, o.trials) == (digest(RUN, records), RUN.started, "small", 5)
    assert o.failures == {"build": 1, "check": 0, "trial": 1, "cell": 0}
    assert (o.held_out_cells, o.held_out_regret_max) == (0, None)
    assert t.variants["a"] == table.TableVariant("recurrent", {"tile_v": 97})


def test_held_out_cells_judge():
    """Cells held out have no part in the choice; their regret is in the evidence, where the choice
    was timed.
    """
    records = [*checks(), *cell(8, a=1, b=2), *cell(16, a=2.5, b=2), *cell(20, b=2), *cell(32, a=1, b=2)]
    t = derive(records, RUN, held_out={problem(16), problem(20)})
    assert [(i.first, i.last, i.variant) for i in t.rules[0].intervals] == [(1, None, "a")]
    assert (t.evidence.cells, t.evidence.held_out_cells, t.evidence.held_out_regret_max) == (2, 1, 0.25)


def test_held_out_cells_are_judged_by_the_screen_too():
    """A choice that was no leader at a held-out cell counts, by the rounds that it shares with the
    best; that is where tables fail.
    """
    held = [trial(16, n, us, stage="screen") for n, us in (("a", 3), ("b", 2))]
    records = [*checks(), *cell(8, a=1, b=2), *held, *cell(16, b=2), *cell(32, a=1, b=2)]
    t = derive(records, RUN, held_out={problem(16)})
    assert (t.evidence.held_out_cells, t.evidence.held_out_regret_max) == (1, 0.5)


def test_cells_that_the_journal_marks_are_held_out():
    """A sweep's own held-out cells need no one to name them; bisection's have a part in choosing.
    The mean is in the evidence.
    """

    def marked(work_units, purpose, **means):
        return [*cell(work_units, **means)[:-1], Cell(problem=problem(work_units), status="ok", purpose=purpose)]

    records = [
        *checks(),
        *cell(8, a=1, b=2),
        *marked(10, "held-out", a=1, b=2),
        *marked(16, "held-out", a=2.5, b=2),
        *cell(32, a=1, b=2),
    ]
    t = derive(records, RUN)
    assert [(i.first, i.last, i.variant) for i in t.rules[0].intervals] == [(1, None, "a")]
    e = t.evidence
    assert (e.cells, e.held_out_cells, e.held_out_regret_max, e.held_out_regret_mean) == (2, 2, 0.25, 0.125)
    t = derive([*records, *marked(20, "bisection", a=2.5, b=2)], RUN)
    assert [i.variant for i in t.rules[0].intervals] == ["a", "b", "a"]


def test_tables_without_held_out_cells_have_no_mean():
    """A table of a journal from before there were means is the same to the byte: the key is left
    out.
    """
    t = derive([*checks(), *cell(8, a=1)], RUN)
    assert "held_out_regret_mean" not in msgspec.json.encode(t).decode()


def test_the_header_says_how_a_table_is_derived():
    """A header's regret and default count where the caller gives none; a header of an older version
    has neither.
    """
    records = [*checks(), *cell(8, a=100, b=105), *cell(16, a=105, b=100)]
    wide = msgspec.structs.replace(RUN, regret=0.1)
    assert len(derive(records, RUN).rules[0].intervals) == 2
    assert len(derive(records, wide).rules[0].intervals) == 1
    assert len(derive(records, wide, regret=0.01).rules[0].intervals) == 2
    tied = [*checks(), *cell(8, a=100, b=100.5)[:-1], Cell(problem=problem(8), status="ok", default_variant="b")]
    assert set(derive(tied, RUN).variants) == {"a"}
    assert set(derive(tied, msgspec.structs.replace(RUN, keeps_default=False)).variants) == {"a"}
    kept = msgspec.structs.replace(RUN, keeps_default=True)
    assert set(derive(tied, kept).variants) == {"b"}
    assert set(derive(tied, kept, default=lambda c, w: "a").variants) == {"a"}
    assert set(derive([*tied[:-1], Cell(problem=problem(8), status="ok")], kept).variants) == {"a"}


def test_a_tie_leaves_the_default():
    """Of equally few intervals and variants that with the default rule's variant wins, though its
    mean is a little worse.
    """
    records = [*checks(), *cell(8, a=100, b=100.5), *cell(16, a=100, b=100.9)]
    assert chosen(records) == [(1, None, "a")]
    assert chosen(records, default=lambda c, w: "b") == [(1, None, "b")]
    assert chosen(records, default=lambda c, w: "z") == [(1, None, "a")]
    beyond = [*checks(), *cell(8, a=100, b=100.5), *cell(16, a=100, b=101.1)]
    assert chosen(beyond, default=lambda c, w: "b") == [(1, None, "a")]


def test_the_default_cuts_no_interval():
    """The default rule's steps do not cut an interval that one variant serves: fewest intervals
    come first.
    """
    records = [*checks(), *cell(8, a=100, b=110), *cell(16, a=100.5, b=100), *cell(32, a=100, b=110)]
    assert chosen(records, default=lambda c, w: "b") == [(1, None, "a")]
    # A wider budget makes more acceptable, but not a tie.
    loose = [*checks(), *cell(8, a=100, b=103)]
    assert chosen(loose, default=lambda c, w: "b", regret=0.05) == [(1, None, "a")]


def test_variants_that_are_not_admitted():
    """What `admits` leaves out is as if it had never been timed, also where the best is sought."""
    records = [*checks(), *cell(8, a=1, b=2, c=3), *cell(16, a=1)]
    t = derive(records, RUN, admits=lambda name: name != "a")
    assert [(i.first, i.last, i.variant) for i in t.rules[0].intervals] == [(1, None, "b")]
    assert (t.evidence.cells, t.evidence.regret_max, t.evidence.journal_sha256) == (1, 0, digest(RUN, records))


def test_nothing_to_derive_from():
    """Without a checked variant that was timed there is no table, and the failures are counted."""
    with pytest.raises(
        JournalError,
        match=r"no cell has a checked variant.*3 records, of which failed: 0 builds, 0 checks, 0 trials, 0 cells",
    ):
        derive(cell(8, a=1), RUN)


def test_the_same_records_give_the_same_bytes(tmp_path):
    """Deriving and saving twice gives equal files, and what is saved loads equal."""
    records = [*checks(), *cell(8, a=3, b=4), *cell(32, a=5, b=4)]
    for name in ("1.json", "2.json"):
        table.save(derive(records, RUN), tmp_path / name)
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()
    assert table.load(tmp_path / "1.json") == derive(records, RUN)


def test_contracts_have_rules_of_their_own():
    """Each contract has one rule, sorted; a contract without usable cells has none."""
    two, four, eight = (CONTRACT.replace(tokens=t) for t in (2, 4, 8))
    records = [*checks("a", four), *cell(8, four, a=1), *checks("b", two), *cell(8, two, b=1), *cell(8, eight, a=1)]
    assert [(r.when, r.intervals[0].variant) for r in derive(records, RUN).rules] == [(two, "b"), (four, "a")]


# A sweep: by work units, the means of some of six variants, in some order.
means = st.floats(1, 1.04).map(lambda x: round(x, 3) * 10) | st.floats(1, 1000).map(lambda x: round(x, 3))
sweeps = st.dictionaries(
    st.integers(1, 5000),
    st.dictionaries(st.sampled_from(NAMES), means, min_size=1, max_size=4),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(sweeps, st.sets(st.sampled_from(NAMES), max_size=5), st.randoms())
def test_any_sweep(sweep, wrong, chance):
    """Intervals are total and ordered, regret is within the budget, wrong variants are out, the
    cells' order is of no account.
    """
    cells = [cell(w, **times) for w, times in sweep.items()]
    proofs = [Check(contract=CONTRACT, variant=n, status="failed" if n in wrong else "ok") for n in NAMES]
    right = {w: {n: us for n, us in times.items() if n not in wrong} for w, times in sweep.items()}
    right = {w: times for w, times in right.items() if times}
    if not right:
        with pytest.raises(JournalError):
            derive([*proofs, *itertools.chain(*cells)], RUN)
        return
    t = derive([*proofs, *itertools.chain(*cells)], RUN)
    table.validate(msgspec.json.encode(t))
    intervals = t.rules[0].intervals
    assert (intervals[0].first, intervals[-1].last) == (1, None)
    assert all(a.last + 1 == b.first for a, b in itertools.pairwise(intervals))
    assert all(a.variant != b.variant for a, b in itertools.pairwise(intervals))
    assert [e.work_units for i in intervals for e in i.evidence] == sorted(right)
    for w, times in right.items():
        name, best = t.find(CONTRACT, w)[1].variant, min(times.values())
        assert times[name] - best <= max(TIE_SHARE * best, CUPTI_STEP_US) + 1e-5
    chance.shuffle(cells)
    again = derive([*itertools.chain(*cells), *proofs], RUN)
    assert (again.rules, again.variants) == (t.rules, t.variants)


def cost(cells, rank, kept, choice):
    """What `choose` minimises, counted plainly."""
    intervals = 1 + sum(a != b for a, b in itertools.pairwise(choice))
    replaced = sum(k in cell and k != name for k, cell, name in zip(kept, cells, choice, strict=True))
    regret = sum(round(cell[name] * 1e9) for cell, name in zip(cells, choice, strict=True))
    return intervals, len(set(choice)), replaced, regret, tuple(rank[name] for name in choice)


@given(
    st.lists(
        st.dictionaries(st.sampled_from(NAMES), st.sampled_from([0.0, 0.004, 0.008]), min_size=1, max_size=3),
        min_size=1,
        max_size=6,
    ),
    st.lists(st.sampled_from(NAMES), min_size=6, max_size=6) | st.just([None] * 6),
)
def test_choose_is_exact(cells, kept):
    """No other choice is better than the one taken, by trying all of them, with the default rule's
    choices and without.
    """
    rank = {name: i for i, name in enumerate(NAMES)}
    kept = kept[: len(cells)]
    best = min(itertools.product(*cells), key=functools.partial(cost, cells, rank, kept))
    assert choose(cells, rank, kept) == list(best)
    if kept[0] is None:
        assert choose(cells, rank) == list(best)


def test_choose_stays_quick_where_nothing_agrees():
    """Forty cells with ten acceptable variants each, at random: more states than are followed, and
    yet the fewest intervals.
    """
    chance = random.Random(0)
    names = [f"v{i:02}" for i in range(40)]
    cells = [{n: chance.random() / 100 for n in chance.sample(names, 10)} for _ in range(40)]
    picked = choose(cells, {n: i for i, n in enumerate(names)})
    assert all(name in cell for name, cell in zip(picked, cells, strict=True))
    greedy, standing = 0, set()
    for names_here in cells:
        standing &= set(names_here)
        if not standing:
            greedy, standing = greedy + 1, set(names_here)
    assert math.isclose(cost(cells, dict.fromkeys(names, 0), [None] * 40, picked)[0], greedy)


def test_a_smaller_regret_takes_less_of_the_clocks_step():
    """Fault: two sweeps' means differed by half a step, and a choice a step behind in one was one
    and a half behind in the other.
    """
    records = [*checks("ab"), *cell(8, a=2.0 + 0.030, b=2.0), *cell(16, a=3.0, b=3.5)]
    chosen = {r: [i.variant for i in derive(records, RUN, regret=r).rules[0].intervals] for r in (0.01, 0.005, 0.0)}
    assert chosen == {0.01: ["a"], 0.005: ["b", "a"], 0.0: ["b", "a"]}


def again(work_units, contract=CONTRACT, floor_us=None, **means):
    """What was timed of a cell once its choice was made."""
    found = [trial(work_units, name, us, contract, "evidence") for name, us in means.items()]
    if floor_us is not None:
        found.append(trial(work_units, "stream", floor_us, contract, "evidence", "floor"))
    choice = next(iter(means))
    return [*found, Cell(problem=problem(work_units, contract), status="ok", purpose="evidence", choice=choice)]


def test_evidence_has_no_part_in_the_choice():
    """Fault: a winner was shown on the samples that chose it. What is timed after the choice is the
    table's evidence, and changes no choice, whatever it says.
    """
    first = [*checks("ab"), *cell(4, a=10.0, b=12.0, floor_us=9.0), *cell(64, a=20.0, b=16.0)]
    later = [*first, *again(4, a=13.0, b=12.0, floor_us=9.5), *again(64, b=17.0)]
    assert chosen(later) == chosen(first)
    one, other = [i.evidence[0] for i in derive(later, RUN).rules[0].intervals]
    assert (one.mean_us, one.floor_us, one.fresh) == (13.0, 9.5, True)
    assert one.regret == pytest.approx(13 / 12 - 1, abs=1e-6) and one.runner_up == "b"
    assert (other.mean_us, other.regret, other.fresh) == (17.0, 0.0, True)
    before = derive(first, RUN).rules[0].intervals[0].evidence[0]
    assert before.mean_us == 10.0 and before.fresh is msgspec.UNSET


def test_evidence_of_another_choice_is_not_its_own():
    """A replay that chooses otherwise shows the samples that chose, for it has no others."""
    records = [*checks("ab"), *cell(4, a=10.0, b=10.05), *again(4, b=10.0)]
    (interval,) = derive(records, RUN).rules[0].intervals
    assert interval.variant == "a" and interval.evidence[0].fresh is msgspec.UNSET
