"""gdntune/published.py and render/against.py: others' figures, and how they stand beside ours."""

import re
from pathlib import Path

import pytest
import synthetic

from gdntune.errors import UnknownName
from gdntune.journal import Check
from gdntune.problem import Contract, Problem
from gdntune.published import NAMES, published
from gdntune.report import report

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
    with pytest.raises(UnknownName, match=f"accepted are {PR}; did you mean {PR}"):
        published("published:flashinfer-pr-3217")
    assert PR in NAMES


def test_beside_ours(tmp_path):
    """Where contracts agree, shares stand side by side; each GPU and L2 policy is named, and that policies differ is said."""
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
