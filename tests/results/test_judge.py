"""gdntune/results/judge.py: tables derived anew, and judged on samples that they were not derived from."""

import functools
from pathlib import Path

import msgspec
import pytest
import synthetic
from hypothesis import given
from hypothesis import strategies as st

from gdntune import kernels
from gdntune.device.arch import target
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.report import judgements
from gdntune.results import derive, halving, judge, merge, table
from gdntune.results.journal import Journal, read
from gdntune.results.records import Cell, Check, Trial

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
HEADER = synthetic.run()
CONTRACT = Contract()


def problem(work_units, contract=CONTRACT):
    """A cell of one head."""
    return Problem(contract, work_units, 1, 1)


def cell(work_units, screens=None, contract=CONTRACT, **finals):
    """A closed cell: final samples with the means given, screened as `screens` says, by default
    alike.
    """
    screens = {**finals, **(screens or {})}

    def trials(stage, means):
        return [
            Trial(
                problem=problem(work_units, contract),
                variant=Variant("recurrent", name, {}),
                stage=stage,
                status="ok",
                samples_us=[us - 0.001, us, us, us + 0.001],
            )
            for name, us in means.items()
        ]

    return [
        *trials("screen", screens),
        *trials("final", finals),
        Cell(problem=problem(work_units, contract), status="ok"),
    ]


def checks(names="abcd", contract=CONTRACT):
    """A passed check of each variant."""
    return [Check(contract=contract, variant=name, status="ok") for name in names]


@pytest.fixture
def default_is(monkeypatch):
    """Sets the default rule to one variant."""

    def use(name):
        monkeypatch.setattr(kernels, "default", lambda c, w, d: Variant("recurrent", name, {}))

    return use


# What tables/README.md leaves out, by journal.
LEFT_OUT = {
    "nvidia-h200/ring-kda.jsonl.xz": {"without_contracts": ("*.mode=frozen*",)},
    "nvidia-h200/layer.kda-step-fp32.kda-kimi-k3.jsonl.xz": {"without": ("*.sn.on.ap.ro",)},
}


# -- replay


def test_replay_is_the_sweeps_table(tmp_path):
    """A small sweep's folder gives its table again, byte for byte; so does its journal's file."""
    folder = tmp_path / "sweep"
    with Journal.open(folder, HEADER) as journal:
        journal.extend(synthetic.records(HEADER))
        table.save(derive.derive(journal.records, journal.run), folder / "table.json")
    for i, source in enumerate((folder, folder / "journal.jsonl")):
        found = judge.replay(source)
        table.save(found.table, tmp_path / f"{i}.json")
        assert (tmp_path / f"{i}.json").read_bytes() == (folder / "table.json").read_bytes()
        assert found.notes == []


@pytest.mark.parametrize("path", sorted(ROOT.glob("tables/*/*.json")), ids=lambda p: f"{p.parent.name}-{p.stem}")
def test_replay_of_the_published_sweeps(path, tmp_path):
    """The published journals give the shipped tables, byte for byte, as tables/README.md says; of
    several, merged in their order. So each journal that a table names by its hash is published.
    """
    evidence = table.load(path).evidence
    journals = [RESULTS / path.parent.name / f"{s.config}.jsonl.xz" for s in evidence.sources or (evidence,)]
    made = [
        judge.replay(p, regret=0.005, **LEFT_OUT.get(f"{p.parent.name}/{p.name}", {})).table
        for p in journals
    ]
    table.save(functools.reduce(lambda a, b: merge.merge(a, b, "first"), made), tmp_path / "t.json")
    assert (tmp_path / "t.json").read_bytes() == path.read_bytes()


def test_replay_with_other_settings(tmp_path):
    """A wider budget, variants left out, the default kept: each another table, and notes say what
    was left out.
    """
    folder = synthetic.write(tmp_path, HEADER, synthetic.records(HEADER))
    assert {len(r.intervals) for r in judge.replay(folder).table.rules} == {2}
    wider = judge.replay(folder, regret=0.2).table
    assert wider.evidence.regret_max <= 0.2
    assert sum(len(r.intervals) for r in wider.rules) <= sum(len(r.intervals) for r in judge.replay(folder).table.rules)
    found = judge.replay(folder, without=["*.tv16.*"])
    assert set(found.table.variants) <= {v.id for v in synthetic.VARIANTS[2:]}
    assert found.notes[0] == "2 of 4 variants were left out"
    assert "12 cells have no choice" in found.notes[1]


def test_replay_without_contracts(tmp_path):
    """A contract that is left out has no rule; patterns that fit none, or all, are refused."""
    folder = synthetic.write(tmp_path, HEADER, synthetic.records(HEADER))
    keys = [r.when.key() for r in judge.replay(folder).table.rules]
    found = judge.replay(folder, without_contracts=[keys[0]])
    assert [r.when.key() for r in found.table.rules] == keys[1:]
    assert found.notes[0].startswith(f"1 of {len(keys)} contracts were left out")
    with pytest.raises(UnsupportedProblem, match=r"'tokens=4' fits none of .*whole names"):
        judge.replay(folder, without_contracts=["tokens=4"])
    with pytest.raises(UnsupportedProblem, match="these leave none of"):
        judge.replay(folder, without_contracts=["*"])


def test_contracts_are_named_once(monkeypatch):
    """Fault: each of a sweep's 180,000 records named its contract anew, a minute of a replay."""
    named, key = [], Contract.key
    monkeypatch.setattr(Contract, "key", lambda self: named.append(self) or key(self))
    records = [*cell(1, a=1.0, b=2.0), *cell(1, a=1.0, contract=CONTRACT.replace(tokens=2))]
    kept, note = judge._of_other_contracts(records, ["*.tokens=2"])
    assert kept == records[:5] and note.startswith("1 of 2 contracts were left out")
    assert len(named) == 2


def test_a_contracts_name_reads_no_annotations(monkeypatch):
    """Fault: a name took 0.4 ms, since msgspec's `fields` resolves all annotations at each call."""
    monkeypatch.setattr(msgspec.structs, "fields", None)
    assert CONTRACT.replace(tokens=2, pool=False).key() == "gdn_decode.tokens=2.pool=false"


@pytest.mark.parametrize(
    "pattern, said",
    [
        ("tv16", r"a pattern fits whole ids: '\*tv16\*' fits 2"),
        ("tv61", r"'tv61' fits none of the 4 variants timed: give .*'\*\.tv16\*'.* of ids such as recurrent\.tv16"),
        ("recurent*", r"fits none of the 4 variants timed: give 'recurrent\*'"),
        ("zz", r"give one such as '\*\.tv8\.\*', of ids such as recurrent\.tv16"),
        ("recurrent.*", "these leave none of 4 variants to choose from; leave fewer out"),
    ],
)
def test_patterns_that_cannot_be_meant(tmp_path, pattern, said):
    """Fault: a pattern of part of an id was refused without the one that fits, and one that fits
    all ids with words about failed checks.
    """
    folder = synthetic.write(tmp_path, HEADER, synthetic.records(HEADER))
    with pytest.raises(UnsupportedProblem, match=said):
        judge.replay(folder, without=[pattern])


def test_replay_keeps_the_default(tmp_path, default_is):
    """--keep-default: a tie leaves the default rule's variant, without it the best's is taken."""
    synthetic.write(tmp_path, HEADER, [*checks(), *cell(8, a=10, b=10.05)])
    default_is("b")
    assert set(judge.replay(tmp_path).table.variants) == {"a"}
    assert set(judge.replay(tmp_path, keep_default=True).table.variants) == {"b"}


def test_replay_has_the_headers_settings(tmp_path, default_is):
    """A journal that says how its table was derived gives it without being told; the default rule
    is that of the sweep's day.
    """
    header = synthetic.run(regret=0.2, keeps_default=True)
    noted = [
        msgspec.structs.replace(r, default_variant="b") if isinstance(r, Cell) else r
        for r in cell(8, a=10, b=10.05, c=11.5)
    ]
    synthetic.write(tmp_path, header, [*checks(), *noted, *cell(64, a=13, b=13, c=11.5)])
    default_is("c")
    assert set(judge.replay(tmp_path).table.variants) == {"b"}
    assert set(judge.replay(tmp_path, keep_default=True).table.variants) == {"c"}
    assert set(judge.replay(tmp_path, regret=0.01).table.variants) == {"b", "c"}


# -- judge


def test_the_published_sweeps_repeat():
    """Three sweeps of one config on an H100: each one's table, judged on each other's final
    samples, is within a tie at every cell.
    """
    journals = {n: RESULTS / "nvidia-h100-80gb-hbm3" / f"t1-cold-clean.{n}.jsonl.xz" for n in "hij"}
    tables = {n: judge.replay(path).table for n, path in journals.items()}
    for judging, path in journals.items():
        run, records = read(path)
        for of in tables.keys() - {judging}:
            found = judge.judge(tables[of], records, run)
            assert len(found.cells) == found.table.cells == 40
            assert found.table.screened == found.table.beyond_tie == 0, (of, judging)
            assert found.table.regret_mean < 0.001 and found.table.regret_max < 0.01, (of, judging)


def test_regret_on_other_samples(default_is):
    """Each choice is judged by the other journal's means: the best loses nothing, the others what
    they are slower.
    """
    default_is("b")
    t = derive.derive([*checks(), *cell(8, a=10, b=11), *cell(64, a=10, b=11)], HEADER)
    found = judge.judge(t, [*checks(), *cell(8, a=10, b=11), *cell(64, a=12, b=10)], HEADER)
    assert [(c.work_units, c.best, c.table.regret, c.default.regret) for c in found.cells] == [
        (8, "a", 0, 0.1),
        (64, "b", 0.2, 0),
    ]
    assert found.table == judge.Total(2, 2, 0, 1, 0.1, 0.2)
    assert found.default == judge.Total(2, 2, 0, 1, 0.05, 0.1)
    assert [c.work_units for c in found.above(0.03)] == [64]
    assert found.notes == ()


def test_a_choice_that_was_no_leader(default_is):
    """It is judged by the screen's medians against the best's; one that was never timed is not
    judged, and counts as above.
    """
    default_is("z")
    t = derive.derive([*checks(), *cell(8, c=1)], HEADER)
    found = judge.judge(t, [*checks(), *cell(8, screens={"c": 15}, a=10, b=11)], HEADER)
    assert (found.cells[0].table, found.cells[0].default) == (
        judge.Choice("c", 0.5, "screen"),
        judge.Choice("z", None, "none"),
    )
    assert (found.table.screened, found.default.judged, found.default.regret_mean) == (1, 0, None)
    untimed = judge.judge(t, [*checks(), *cell(8, a=10)], HEADER)
    assert untimed.above(9.0) == list(untimed.cells)


def test_a_wrong_variant_is_no_choice(default_is):
    """What failed its check in the other journal is not judged there, nor is it the best."""
    default_is("b")
    t = derive.derive([*checks(), *cell(8, a=1, b=2)], HEADER)
    found = judge.judge(t, [*checks("b"), *cell(8, a=1, b=2)], HEADER)
    assert (found.cells[0].best, found.cells[0].table.basis, found.cells[0].default.regret) == ("b", "none", 0)


def test_only_what_a_table_has_rules_for_is_judged(default_is):
    """Fault: at contracts without a rule the default rule's regret was shown as the table's."""
    default_is("b")
    t = derive.derive([*checks(), *cell(8, a=1, b=2)], HEADER)
    kda = Contract(op="kda_decode", gate="log")
    others = [*checks(contract=kda), *cell(8, contract=kda, a=1, b=2), *cell(64, contract=kda, a=1, b=2)]
    found = judge.judge(t, [*checks(), *cell(8, a=1, b=2), *others], HEADER)
    assert [c.contract for c in found.cells] == [CONTRACT.key()]
    assert (found.table.cells, found.default.cells, found.without_rule) == (1, 1, 2)
    assert found.notes == (
        f"the table has no rule for 2 of the journal's 3 cells ({kda.key()}): the default rule serves them, and they are not judged here",
    )
    assert found.notes[0] in judgements.judgement_document(found, "a journal").sections[0].blocks[2].items
    with pytest.raises(
        UnsupportedProblem,
        match=r"t\.json has no rule for any of the journal's 2 cells \(kda_decode.*the default rule serves",
    ):
        judge.judge(t, others, HEADER, about="t.json")
    cpu = synthetic.run(synthetic.cpu())
    with pytest.raises(
        UnsupportedProblem, match="of kind cuda, the journal on AMD EPYC.*expected a table of kind cpu"
    ):
        judge.judge(t, [*checks(), *cell(8, a=1)], cpu)


def test_a_near_contract_is_judged_by_the_nearest_rule(default_is):
    """As at run time, where all of the rule's variants can serve it."""
    default_is("b")
    real = kernels.variants(CONTRACT, target("sm_90a"))[0]
    records = [
        Check(contract=CONTRACT, variant=real.id, status="ok"),
        Trial(problem=problem(8), variant=real, stage="final", status="ok", samples_us=[1.0]),
    ]
    near = CONTRACT.replace(pool=False)
    others = [Check(contract=near, variant=real.id, status="ok"), *checks(contract=near)]
    timed = Trial(problem=problem(8, near), variant=real, stage="final", status="ok", samples_us=[3.0])
    found = judge.judge(derive.derive(records, HEADER), [*others, timed, *cell(16, contract=near, a=2)], HEADER)
    assert found.cells[0].table == judge.Choice(real.id, 0.0, "final")


def test_notes_say_what_differs(default_is):
    """Another device, policy or code is said beside the regret."""
    default_is("a")
    records = [*checks(), *cell(8, a=1, b=2)]
    other = synthetic.run(target("sm_100a"), policy={"timer": "cupti", "l2": "cold-dirty"}, kernels={"recurrent": "f9"})
    notes = judge.judge(derive.derive(records, HEADER), records, other).notes
    assert len(notes) == 3
    assert "cold-clean" in notes[1] and "cold-dirty" in notes[1]
    assert notes[2] == "the code of recurrent is not the same for table and samples"


def test_code_of_the_same_objects_is_the_same(default_is, monkeypatch):
    """Notes once called other code what had been seen to compile to the same objects."""
    default_is("a")
    records = [*checks(), *cell(8, a=1, b=2)]
    now = synthetic.run(kernels={"recurrent": "f9"})
    table = derive.derive(records, HEADER)
    monkeypatch.setattr(judge, "same_objects", lambda kernel, was, code, *uses: (kernel, code) == ("recurrent", "f9"))
    assert not [n for n in judge.judge(table, records, now).notes if "code" in n]


@pytest.mark.parametrize(
    "best_us, regret, is_beyond",
    [(100, 0.01, False), (100, 0.0101, True), (1, 0.032, False), (1, 0.033, True), (2, 0.015, False)],
)
def test_beyond_knows_the_clocks_step(best_us, regret, is_beyond):
    """A regret counts only beyond the larger of the limit and 32 ns."""
    assert judge.beyond(best_us, regret) is is_beyond


def test_nothing_to_judge_on():
    """A journal without a cell that has final samples is refused."""
    t = derive.derive([*checks(), *cell(8, a=1)], HEADER)
    with pytest.raises(UnsupportedProblem, match="no cell to judge on"):
        judge.judge(t, checks(), HEADER)


# -- held-out cells


def test_every_second_is_held_out(default_is):
    """Each inner cell is judged by the table of the others: here each differs from its neighbours,
    and so all lose.
    """
    default_is("a")
    odd = [*cell(8, a=10, b=12), *cell(32, a=10, b=12)]
    even = [*cell(16, a=12, b=10), *cell(64, a=12, b=10)]
    found = judge.hold_out_every_second([*checks(), *odd, *even], HEADER)
    assert [(c.work_units, c.table.variant, c.table.regret) for c in found.cells] == [(16, "a", 0.2), (32, "b", 0.2)]
    assert [c.default.regret for c in found.cells] == [0.2, 0]
    with pytest.raises(UnsupportedProblem, match="three cells or more"):
        judge.hold_out_every_second([*checks(), *cell(8, a=1), *cell(16, a=1)], HEADER)


def test_a_sweeps_own_held_out_cells(default_is):
    """A journal with marked cells is judged there alone, by its own table; one without says what
    else is accepted.
    """
    default_is("b")
    aside = [*cell(16, a=12, b=10)[:-1], Cell(problem=problem(16), status="ok", purpose="held-out")]
    records = [*checks(), *cell(8, a=10, b=12), *cell(64, a=10, b=12), *aside]
    found = judge.held_out(records, HEADER)
    assert [(c.work_units, c.table.variant, c.table.regret, c.default.regret) for c in found.cells] == [
        (16, "a", 0.2, 0)
    ]
    assert found.flashinfer.cells == 0
    with pytest.raises(
        UnsupportedProblem, match=r"held no cells out .*gdntune judge TABLE JOURNAL.*--hold-out every-second"
    ):
        judge.held_out([*checks(), *cell(8, a=1)], HEADER)
    # they have no part in the tables of every second cell either
    rest = judge.hold_out_every_second([*records, *cell(32, a=10, b=11)], HEADER)
    assert {c.work_units for c in rest.cells} == {32}


def test_flashinfers_thresholds_are_judged(h100):
    """Beside the default rule stands what FlashInfer's thresholds would take of our variants: GDN's
    cells, and no KDA.
    """
    _, run, records = h100
    found = judge.judge(derive.derive(records, run), records, run)
    assert found.flashinfer.cells == found.table.cells
    assert all(c.flashinfer.variant.startswith("recurrent.") for c in found.cells)
    assert found.flashinfer.regret_mean > found.table.regret_mean
    rows = judgements.judgement_document(found, "a journal").sections[0].blocks[1].rows
    assert [r[0] for r in rows] == ["the table", "the default rule", "FlashInfer's thresholds"]


def test_held_out_on_the_published_sweep(h100):
    """All inner cells are judged once, the total is theirs, and the tables lose less than the
    default rule.
    """
    _, run, records = h100
    found = judge.hold_out_every_second(records, run)
    aside = set(derive.marked(records))
    own = (cell for cell in derive.timed_cells(records) if cell.problem not in aside)
    inner = sum(len(cells) - 2 for cells in derive.by_work_units(own).values())
    assert inner == found.table.cells == found.table.judged == len({(c.contract, c.work_units) for c in found.cells})
    assert found.table.regret_mean == pytest.approx(sum(c.table.regret for c in found.cells) / inner, abs=1e-6)
    assert found.table.regret_mean < 0.06


# -- cost


@given(
    st.dictionaries(
        st.text("abcdefgh", min_size=1, max_size=3), st.lists(st.floats(1, 9), min_size=1, max_size=50), min_size=1
    ),
    st.integers(1, 500),
)
def test_halving_keeps_to_its_budget(samples, budget):
    """It draws from the front, at least one of each and no more than the budget beyond that;
    leaders have the most samples.
    """
    found = halving.halving(samples, budget)
    assert all(drawn == samples[name][: len(drawn)] and drawn for name, drawn in found.used.items())
    assert found.spent <= max(budget, len(samples))
    assert len(found.leaders) == min(len(samples), halving.LEADERS)
    assert set(found.leaders) <= set(samples)


def test_halving_finds_the_fastest():
    """Among sixteen variants, apart by 1% and noisy by 2%, the first stays to the end, on most of
    the samples.
    """
    noise = [0.0, 2.0, -2.0, 1.0, -1.0, 2.0, -2.0]
    samples = {f"v{i:02}": [100 + i + noise[(j + i) % 7] for j in range(210)] for i in range(16)}
    found = halving.halving(samples, 16 * 210 // 4)
    assert found.leaders[0] == "v00"
    assert len(found.used["v00"]) > 10 * len(found.used["v15"])
    assert found.spent <= 840


def test_halving_outlives_a_cold_start():
    """Fault: a winner whose first sample met a cold GPU was halved away on that sample alone, and
    the choice lost 4.4%.
    """
    samples = {f"v{i:02}": [100.0 + 5 * i] * 60 for i in range(16)}
    samples["v00"][0] = 150.0
    assert halving.halving(samples, 16 * 60 // 4).leaders[0] == "v00"


def test_cost_judges_on_samples_apart(default_is):
    """The winner is chosen from the first half of the finals and judged on the second, where here
    the other one is faster.
    """
    default_is("a")
    records = [*checks("ab"), *cell(8, a=10, b=10)]

    def turned(r):
        if not isinstance(r, Trial) or r.stage != "final":
            return r
        early, late = ([10.0] * 50, [12.0] * 50) if r.variant.id == "a" else ([11.0] * 50, [10.0] * 50)
        return msgspec.structs.replace(r, samples_us=early + late)

    found = halving.cost([turned(r) for r in records], HEADER, 0.25)
    assert (found.samples, found.drawn) == (208, 52)
    for judged in (found.cells, found.table, found.all_samples_cells, found.all_samples_table):
        assert [(c.best, c.table.variant, c.table.regret) for c in judged.cells] == [("b", "a", 0.2)]
    assert found.behind == halving.Behind(cells=1, mean=0.0, max=0.0, beyond_tie=0)
    with pytest.raises(UnsupportedProblem, match="above 0, at most 1"):
        halving.cost(records, HEADER, 1.5)


def test_cost_says_what_was_drawn(default_is):
    """Fault: of a share below one sample of each, which are always drawn, choices were `from 0% of
    the samples`.
    """
    default_is("a")
    found = halving.cost([*checks("ab"), *cell(8, a=10, b=11)], HEADER, 0.001)
    share = f"{found.drawn / found.samples:.1%}"
    assert share != "0.0%"
    assert found.cells.about == f"each cell's winner from {share} of the samples, by successive halving"
    assert found.table.about == f"the table from {share} of the samples, by successive halving"


def test_cost_on_the_published_sweep(h100):
    """A quarter of the samples choose as well as all, within 0.1% on average: cells and table."""
    _, run, records = h100
    found = halving.cost(records, run)
    assert 0.2 < found.drawn / found.samples <= 0.25
    assert found.cells.table.judged == found.table.table.judged == found.table.table.cells
    assert found.cells.table.regret_mean < 0.002
    assert found.cells.table.regret_mean - found.all_samples_cells.table.regret_mean < 0.001
    assert found.table.table.regret_mean - found.all_samples_table.table.regret_mean < 0.001
    assert found.table.table.regret_max < 0.06
    differs = [
        (1 + a.table.regret) / (1 + b.table.regret) - 1
        for a, b in zip(found.cells.cells, found.all_samples_cells.cells, strict=True)
        if None not in (a.table.regret, b.table.regret)
    ]
    assert found.behind.cells == len(differs)
    assert found.behind.max == pytest.approx(max(differs), abs=1e-6) and found.behind.max > 0
    assert found.behind.mean == pytest.approx(sum(differs) / len(differs), abs=1e-6)


# -- what is printed


def test_documents(default_is):
    """What is printed names each contract, the totals, and what was not judged as well as the rest.
    """
    default_is("z")
    records = [*checks(), *cell(8, screens={"c": 15}, a=10)]
    t = derive.derive([*checks(), *cell(8, c=1)], HEADER)
    document = judgements.judgement_document(judge.judge(t, records, HEADER, about="t.json"), "a journal")
    text = repr(document)
    assert "t.json" in text
    assert "judged by the screen" in text
    assert "1 cell where the default rule's was not timed: not judged" in text
    assert document.sections[0].blocks[1].rows == (
        ("the table", "1", "50.00", "50.00", "1"),
        ("the default rule", "0", "-", "-", "0"),
    )
    rows = document.sections[0].blocks[3].rows
    assert [r[0] for r in rows] == ["gdn_decode.tokens=1", "all"]
    assert rows[0][1:] == ("1", "50.00", "50.00", "1", "-", "-", "0")
    assert "the table from " in repr(judgements.cost_document(halving.cost(records, HEADER), "a journal"))
