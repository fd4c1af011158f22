"""gdntune/baseline.py: speed-ups over a peer, an entry, a variant, the default rule or another run,
in tables and in the CSV.
"""

import io

import msgspec
import pandas as pd
import pytest
import synthetic
from typer.testing import CliRunner

from gdntune.cli.app import app
from gdntune.errors import UnknownName
from gdntune.kernels.spec import Variant
from gdntune.report.report import report
from gdntune.results.frame import COLUMNS
from gdntune.results.records import Cell, Trial

FAST, SLOW = (Variant("peer:other", f"peer:other.{name}", {"version": "1.2"}) for name in ("fast", "slow"))
ADDED = ["baseline", "baseline_us", "speedup_over_baseline"]


def with_peers(header, **options):
    """A made-up run in which a peer has two entries, 2 and 3 times the floor's time; none at T=4.
    """
    found = []
    for r in synthetic.records(header, **options):
        found.append(r)
        if isinstance(r, Trial) and r.role == "floor" and r.problem.contract.tokens < 4:
            for v, factor in ((FAST, 2), (SLOW, 3)):
                us = [factor * x for x in r.samples_us]
                found.append(
                    Trial(problem=r.problem, variant=v, role="peer", stage="final", status="ok", samples_us=us)
                )
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Two runs of other configs; in the second all times are of other variants."""
    root = tmp_path_factory.mktemp("runs")
    one, two = synthetic.run(config="one"), synthetic.run(config="two")
    return (
        synthetic.write(root / "one", one, with_peers(one)),
        synthetic.write(root / "two", two, synthetic.records(two, batches=(1, 64), swap=1)),
    )


def test_without_one_nothing_changes(folders):
    """The frame has its columns and no more, so that CSVs of before and after compare."""
    made = report(folders)
    assert list(made.frame.columns) == list(COLUMNS) and made.baseline is None


def test_a_peer(folders):
    """A peer's fastest entry counts; where it has no time there is no number; floors are not
    compared.
    """
    made = report(folders[:1], baseline="other")
    f = made.frame
    assert list(f.columns) == [*COLUMNS, *ADDED] and set(f["baseline"]) == {"other"}
    known = f[f["speedup_over_baseline"].notna()]
    assert set(known["tokens"]) == {1, 2} and set(known["role"]) == {"decode", "peer"}
    assert known["speedup_over_baseline"].to_numpy() == pytest.approx(
        (known["baseline_us"] / known["median_us"]).to_numpy(), abs=1e-4
    )
    chosen = known[known["chosen"]]
    twice = (2 * chosen["floor_us"] / chosen["median_us"]).to_numpy()
    assert chosen["speedup_over_baseline"].to_numpy() == pytest.approx(twice, rel=1e-3)
    assert (f[f["variant"] == FAST.id]["speedup_over_baseline"] == 1).all()


def test_one_entry_of_a_peer(folders):
    """`peer.entry` is that entry's time, with tables and a line of its own."""
    made = report(folders[:1], baseline="other.slow")
    f = made.frame[made.frame["chosen"] & made.frame["baseline_us"].notna()]
    assert f["baseline_us"].to_numpy() == pytest.approx((3 * f["floor_us"]).to_numpy(), rel=1e-3)
    text = made.markdown()
    assert "**Speed-up over other.slow**" in text and "Against other.slow:" in text


def test_a_variant(folders):
    """A variant's id: each cell where it was timed, screening samples too where it has no others.
    """
    name = synthetic.VARIANTS[3].id
    made = report(folders[:1], baseline=name)
    its = made.frame[made.frame["variant"] == name]
    assert (its["speedup_over_baseline"] == 1).all() and len(its) == 18
    assert made.frame[made.frame["chosen"]]["speedup_over_baseline"].min() > 1
    assert f"**Speed-up over {name}**" in made.markdown()


def test_another_run(folders):
    """Its choices at the same cells, across runs; a cell that it lacks has no number, and its own
    are 1.
    """
    made = report(folders, baseline="two")
    f = made.frame[made.frame["chosen"]]
    assert (f[f["run"] == "two"]["speedup_over_baseline"] == 1).all()
    one = f[f["run"] == "one"]
    assert one[one["B"] == 8]["speedup_over_baseline"].isna().all()
    assert one[one["B"] != 8]["speedup_over_baseline"].notna().all()
    assert "**Speed-up over the choices of two**" in made.markdown()


def test_the_default_rule(tmp_path):
    """`default`: the numbers of the column that is there anyway, by means."""
    header = synthetic.run()
    found = [
        msgspec.structs.replace(r, default_variant=synthetic.VARIANTS[1].id) if isinstance(r, Cell) else r
        for r in synthetic.records(header)
    ]
    made = report([synthetic.write(tmp_path, header, found)], baseline="default")
    f = made.frame
    assert f["speedup_over_default"].notna().any()
    pd.testing.assert_series_equal(f["speedup_over_baseline"], f["speedup_over_default"], check_names=False)
    assert made.markdown().count("**Speed-up over the default rule**") == 2


def test_the_csv_reads_back(folders):
    """pandas gives the added columns' dtypes back too, without an index column, and twice the same
    bytes.
    """
    made = report(folders, baseline="two")
    back = pd.read_csv(io.StringIO(made.csv()))
    assert (back.dtypes == made.frame.dtypes).all() and list(back.columns) == list(made.frame.columns)
    pd.testing.assert_frame_equal(back, made.frame, check_exact=False, rtol=1e-12)
    assert report(folders, baseline="two").csv() == made.csv()


def test_tables_stay_narrow(folders):
    """A long id in a caption or a line does not widen a table."""
    text = report(folders, baseline=synthetic.VARIANTS[0].id).markdown()
    assert max(len(line) for line in text.splitlines() if line.startswith("|")) <= 100


def test_in_the_page(folders):
    """The page has a map of it for each contract."""
    page = report(folders[:1], baseline="other.slow").html()
    assert page.count("<figcaption>Speed-up over other.slow (blue: ours is faster)") == 2


@pytest.mark.parametrize(
    ("name", "said"),
    [("othre", "did you mean other"), ("three", "the runs one, two"), ("peer:other", "expected default")],
)
def test_what_is_not_there(folders, name, said):
    """An unknown name lists what can be named, and the nearest."""
    with pytest.raises(UnknownName, match=said):
        report(folders, baseline=name)
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--baseline", name])
    assert done.exit_code == 2 and said in done.stderr


def test_the_command(folders, tmp_path):
    """--baseline goes with every form that has numbers."""
    out = tmp_path / "x.csv"
    done = CliRunner().invoke(app, ["report", *map(str, folders), "--baseline", "two", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert set(ADDED) < set(pd.read_csv(out).columns)
    shown = CliRunner().invoke(app, ["report", str(folders[0]), "--baseline", "other.fast"])
    assert shown.exit_code == 0 and "Speed-up over other.fast" in shown.stdout


def test_an_empty_run(tmp_path):
    """A run without a cell has no peers and no variants to name; `default` is always there."""
    header = synthetic.run()
    folder = synthetic.write(tmp_path, header, [], with_table=False)
    assert set(ADDED) < set(report([folder], baseline="default").frame.columns)
    assert report([folder], baseline="synthetic").csv().count("\n") == 1
    with pytest.raises(UnknownName, match="no peers, no variants"):
        report([folder], baseline="flashinfer")
