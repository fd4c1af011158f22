"""gdntune/published.py and render/against.py: others' figures, and how they stand beside ours."""

import re
from pathlib import Path

import msgspec
import pytest
import synthetic

from gdntune.errors import UnknownName
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Problem
from gdntune.report.report import report
from gdntune.results.records import Check, Trial
from gdntune.results.published import NAMES, published
from gdntune.tuning import config

ROOT = Path(__file__).parents[2]
PR = "published:flashinfer-pr-3127"


@pytest.fixture(scope="module")
def theirs():
    """The publication."""
    return published(PR)


def run_of(folder, contracts, batches=(1, 8, 512), **changes):
    """The report of a made-up run of some contracts, beside the publication."""
    header = synthetic.run(**changes)
    checks = [Check(contract=c, variant=v.id, status="ok") for c in contracts for v in synthetic.VARIANTS]
    cells = [r for c in contracts for B in batches for r in synthetic.cell(Problem(c, B, 16, 64), header)]
    return report([synthetic.write(folder, header, [*checks, *cells])], [published(PR)])


def test_what_was_printed(theirs):
    """80 cells, 4 of them errors; what each stands for is a problem of ours."""
    assert (theirs.gpu, theirs.l2, theirs.peak_gb_s) == ("NVIDIA B200", "cold-dirty", 8000.0)
    assert len(theirs.cells) == 80
    lost = [c.problem for c in theirs.cells if c.sol is None]
    assert [(p.contract.tokens, p.B) for p in lost] == [(5, 512), (6, 512), (7, 512), (8, 512)]
    by_problem = {c.problem: c for c in theirs.cells}
    first = by_problem[Problem(Contract(), 1, 16, 64)]
    assert (first.time_us, first.sol) == (3.49, 0.152)
    assert Problem(Contract(tokens=2, mode="frozen", intermediate="dense"), 1, 16, 64) in by_problem


def test_unknown_name():
    """A wrong name lists the right ones, and the nearest."""
    with pytest.raises(UnknownName, match=f"expected one of {PR}; did you mean {PR}"):
        published("published:flashinfer-pr-3217")
    assert PR in NAMES


def test_beside_ours(tmp_path):
    """Where contracts agree, shares stand side by side; each GPU and L2 policy is named, and that
    policies differ is said.
    """
    contracts = [Contract(), Contract(tokens=2, mode="frozen", intermediate="dense")]
    made = run_of(tmp_path, contracts)
    text = made.markdown()
    flat = " ".join(text.split())
    assert "SOL %: theirs NVIDIA B200, cold-dirty; ours NVIDIA H100 80GB HBM3, cold-clean" in text
    assert "The L2 policies differ: theirs is cold-dirty, ours cold-clean." in flat
    assert "T=1: over 3 shared cells" in flat and "T=2: over 3 shared cells" in flat
    assert "no cell to stand beside theirs at T=3, 4, 5, 6, 7, 8" in flat
    chosen = made.frame[made.frame["chosen"] & (made.frame["B"] == 8) & (made.frame["tokens"] == 1)].iloc[0]
    assert re.search(rf"^\| 8 x 64 +\| +46\.1 \| +{100 * chosen['sol']:.1f} [lc ] \|", text, re.M)
    assert "ERROR" in text


def test_equal_work_units_of_fewer_heads(tmp_path):
    """Beside their 64 heads stand ours of 64, also where a run has other heads at the same work
    units.
    """
    header = synthetic.run()
    records = [Check(contract=Contract(), variant=v.id, status="ok") for v in synthetic.VARIANTS]
    for problem, slow in ((Problem(Contract(), 8, 16, 64), 1.0), (Problem(Contract(), 64, 2, 8), 3.0)):
        records += synthetic.cell(problem, header, slow=slow)
    made = report([synthetic.write(tmp_path, header, records)], [published(PR)])
    chosen = made.frame[made.frame["chosen"]].set_index("HV")["sol"]
    assert re.search(rf"^\| 8 x 64 +\| +46\.1 \| +{100 * chosen[64]:.1f} [lc ] \|", made.markdown(), re.M)


def test_same_policy(tmp_path):
    """Under their policy nothing is said to differ."""
    text = run_of(tmp_path, [Contract()], policy={"timer": "cupti", "l2": "cold-dirty"}).markdown()
    assert "policies differ" not in text
    assert "ours NVIDIA H100 80GB HBM3, cold-dirty" in text


def test_other_contracts_are_said_to_be(tmp_path):
    """Cells that keep the final state alone stand in tables of their own, which say so."""
    text = run_of(tmp_path, [Contract(tokens=t) for t in (1, 2, 8)]).markdown()
    flat = " ".join(text.split())
    assert "At T=2, 8 theirs writes the state after each token" in flat
    assert "cold-clean, final state alone" in flat
    assert "T=2: over" not in flat


def test_nothing_shared(tmp_path):
    """A run that shares no cell is said to; theirs are shown."""
    flat = " ".join(run_of(tmp_path, [Contract(state_dtype="fp32")]).markdown().split())
    assert "This run has no cell to stand beside theirs at T=1, 2, 3, 4, 5, 6, 7, 8." in flat


def test_lines_are_narrow(tmp_path):
    """Tables and their captions have at most 100 columns."""
    text = run_of(tmp_path, [Contract(tokens=t) for t in range(1, 9)]).markdown()
    lines = [line for line in text.splitlines() if line.startswith(("|", "**"))]
    assert max(map(len, lines)) <= 100


PRINTED = [Contract(), *(Contract(tokens=t, mode="frozen", intermediate="dense") for t in range(2, 9))]
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def tables(text):
    """The tables after the words that introduce ours in their form: by caption, cells by (B, T)."""
    part = text.partition("Ours in the form of their tables")[2].partition("\n## ")[0]
    found = {}
    for caption, body in re.findall(r"^\*\*(.*?)\*\*\n\n((?:\|.*\n)+)", part, re.M):
        header, _, *rows = ([c.strip() for c in line.split("|")[1:-1]] for line in body.splitlines())
        assert header == ["B", *(f"T={t}" for t in range(1, 9))]
        found[caption] = {(int(row[0]), t): cell for row in rows for t, cell in enumerate(row[1:], 1)}
    return found


def test_the_printed_tables_cell_for_cell(tmp_path):
    """Time, share and speed-up of every printed cell, B=1..512 by T=1..8, each the frame's own
    number, and no ERROR.
    """
    made = run_of(tmp_path, PRINTED, BATCHES)
    found = tables(made.markdown())
    assert list(found) == ["Time, us", "DRAM SOL %, of 3352 GB/s"]
    chosen = made.frame[made.frame["chosen"]].set_index(["B", "tokens"])
    for cells in found.values():
        assert set(cells) == {(B, t) for B in BATCHES for t in range(1, 9)}
        assert "ERROR" not in cells.values() and "-" not in cells.values()
    for key, cell in found["Time, us"].items():
        assert float(cell) == pytest.approx(chosen.loc[key]["median_us"], rel=2e-3)
        assert float(found["DRAM SOL %, of 3352 GB/s"][key].split()[0]) == pytest.approx(
            100 * chosen.loc[key]["sol"], abs=0.06
        )


def test_the_printed_tables_with_speed_ups(tmp_path):
    """Over FlashInfer where it was timed in the same run, over the default rule where that is
    known, over a baseline.
    """
    header = synthetic.run()
    theirs = Variant("peer:flashinfer", "peer:flashinfer.gated_delta_rule_decode_pretranspose", {"version": "0.7.2"})
    records = [Check(contract=c, variant=v.id, status="ok") for c in PRINTED for v in synthetic.VARIANTS]
    for contract in PRINTED:
        *trials, closing = synthetic.cell(Problem(contract, 8, 16, 64), header)
        floor = next(t for t in trials if t.role == "floor")
        us = [3 * x for x in floor.samples_us]
        peer = Trial(problem=closing.problem, variant=theirs, role="peer", stage="final", status="ok", samples_us=us)
        closing = msgspec.structs.replace(closing, default_variant=synthetic.VARIANTS[1].id)
        records += [*trials, *([peer] if contract.tokens < 8 else []), closing]
    folder = synthetic.write(tmp_path, header, records)
    made = report([folder], [published(PR)], synthetic.VARIANTS[1].id)
    # Fault: the command to reproduce was the report without them.
    options = f"--against {PR} --baseline {synthetic.VARIANTS[1].id}"
    assert f"{options} --format md\n```" in made.markdown()
    found = tables(made.markdown())
    names = [
        "Speed-up over FlashInfer in this run",
        f"Speed-up over {synthetic.VARIANTS[1].id}",
        "Speed-up over the default rule",
    ]
    assert list(found)[2:] == names
    over = found[names[0]]
    assert float(over[8, 1]) > 2 and over[8, 8] == "-" and over[1, 1] == "-"
    assert all(cells[8, 4] == "1.05" for cells in (found[names[1]], found[names[2]]))


def test_a_cell_without_a_time_is_an_error(tmp_path):
    """ERROR stands only where a cell was asked for and no checked variant has a time; what was not
    asked for is a dash.
    """
    header = synthetic.run()
    checks = [Check(contract=Contract(), variant=v.id, status="ok") for v in synthetic.VARIANTS]
    lost = Problem(PRINTED[7], 512, 16, 64)
    crash = Trial(
        problem=lost, variant=synthetic.VARIANTS[0], stage="screen", status="crashed", reason="illegal access"
    )
    cells = [*synthetic.cell(Problem(Contract(), 1, 16, 64), header), crash]
    made = report([synthetic.write(tmp_path, header, [*checks, *cells])], [published(PR)])
    times = tables(made.markdown())["Time, us"]
    assert [key for key, cell in times.items() if cell == "ERROR"] == [(512, 8)]
    assert sum(cell == "-" for cell in times.values()) == 78


def test_the_config_of_the_printed_tables():
    """configs/flashinfer-pr-3127.yaml asks for the printed cells, no more and no less, under their
    L2 policy.
    """
    made, printed = config.load(ROOT / "configs" / "flashinfer-pr-3127.yaml"), published(PR)
    assert set(made.problems()) == {c.problem for c in printed.cells}
    assert made.policy.l2 == printed.l2


def test_the_csv_is_ours_alone(tmp_path):
    """The frame holds measurements, with and without a publication beside them."""
    made = run_of(tmp_path / "a", [Contract()])
    assert made.csv() == report([tmp_path / "a"]).csv()


def test_in_the_page(tmp_path):
    """The page has the same text, and curves of both."""
    page = run_of(tmp_path, [Contract(), Contract(tokens=2)]).html()
    assert "Share of each GPU&#x27;s own DRAM peak" in page
    assert "NVIDIA H100 80GB HBM3, cold-clean, final state alone" in page
    assert "NVIDIA B200, cold-dirty" in page


def test_the_source_is_noted():
    """The data file says where its figures come from."""
    import gdntune

    first = (Path(gdntune.__file__).parent / "data" / "flashinfer_pr_3127.csv").read_text().splitlines()[0]
    assert "https://github.com/flashinfer-ai/flashinfer/pull/3127" in first and "B200" in first
