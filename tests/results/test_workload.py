"""gdntune/workload.py and what a report says of it: a serving engine's steps, the cells' shares of
them, the time saved.
"""

import msgspec
import pytest
import synthetic
import yaml
from hypothesis import given
from hypothesis import strategies as st

from gdntune.errors import ConfigError
from gdntune.problem import Problem
from gdntune.report.report import report
from gdntune.results import workload
from gdntune.results.records import Check
from gdntune.results.workload import Load
from gdntune.tuning import cells, config

BASE = {"name": "w", "model": {"H": 2, "HV": 8}, "batch": [1, 4, 16, 64], "shards": [1, 2], "contracts": [{}]}


def read(**search):
    """A small config with effort of its own."""
    return config.parse(yaml.safe_dump({**BASE, "search": search}))


def test_a_trace_is_counted(tmp_path):
    """A CSV of steps, in any order and with other columns, is a histogram; a config names it by a
    path from its own folder.
    """
    path = tmp_path / "steps.csv"
    path.write_text("time,batch,tokens\n0.1,4,1\n0.2,2,4\n0.3, 4 ,1\n")
    loads = workload.read_trace(path)
    assert loads == (Load(2, 4, 1.0), Load(4, 1, 2.0))
    (tmp_path / "w.yaml").write_text(yaml.safe_dump({**BASE, "search": {"workload": "steps.csv"}}))
    loaded = config.load(tmp_path / "w.yaml")
    assert loaded.search.workload == loads
    written = [{"batch": 2, "tokens": 4}, {"batch": 4, "weight": 2.0}]
    assert loaded.sha256 == read(workload=written).sha256, "the steps count, not where they came from"
    assert loaded.sha256 != read().sha256


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch\n1\n", r"no column 'tokens' in \['batch'\]: expected a CSV with the columns batch,tokens"),
        ("", "no column 'batch'"),
        ("batch,tokens\n", "holds no step"),
        ("batch,tokens\n1,1\n0,1\n", r"line 3: batch='0': expected a whole number from 1"),
        ("batch,tokens\n1,17\n", r"line 2: tokens='17': expected a whole number from 1 to 16"),
        ("batch,tokens\n1\n", r"line 2: tokens=''"),
        ("batch,tokens\n1.5,1\n", r"batch='1.5'"),
    ],
)
def test_a_wrong_trace_is_refused(text, message, tmp_path):
    """What is no step says its file, line, value and what is expected."""
    path = tmp_path / "steps.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        workload.read_trace(path)
    with pytest.raises(ConfigError, match="nowhere.csv: cannot be read"):
        workload.read_trace(tmp_path / "nowhere.csv")


@pytest.mark.parametrize("wrong", [[], [{"batch": 0}], [{"batch": 1, "weight": 0}], [{"tokens": 1}], 3])
def test_a_wrong_histogram_is_refused(wrong):
    """An inline histogram has at least one step, and each a batch."""
    with pytest.raises(ConfigError, match="workload"):
        read(workload=wrong)


def test_an_old_config_has_its_hash():
    """The key is left out of the hash where it is not given."""
    assert read().sha256 == read(workload=None).sha256


@given(
    st.lists(st.builds(Load, st.integers(1, 600), st.integers(1, 3), st.floats(0.01, 100)), min_size=1, max_size=20),
    st.lists(st.integers(1, 5000), min_size=1, max_size=12, unique=True),
)
def test_shares_sum_to_one(loads, units):
    """Each step of a contract's T is some cell's; of other T none is."""
    for tokens in (1, 2, 3, 4):
        found = workload.shares(loads, tokens, [8, 16], units)
        assert found.keys() == set(units)
        wanted = 1.0 if any(load.tokens == tokens for load in loads) else 0.0
        assert sum(found.values()) == pytest.approx(wanted)


def test_effort_follows_the_steps():
    """Cells near to many steps get more final rounds and time for them, within four times; those
    near to none 20.
    """
    plain = read(final_rounds=100)
    assert {cells.effort(plain, p) for p in plain.problems()} == {plain.search}
    c = read(
        final_rounds=100,
        max_cell_seconds=10,
        workload=[{"batch": 16, "weight": 3}, {"batch": 15}, {"batch": 1, "tokens": 4}],
    )
    effort = {p.work_units: cells.effort(c, p) for p in c.problems()}
    # half of the steps at each of the two shards' work units
    assert {w: e.final_rounds for w, e in effort.items()} == {
        4: 20,
        8: 20,
        16: 20,
        32: 20,
        64: 400,
        128: 400,
        256: 20,
        512: 20,
    }
    assert effort[64].max_cell_seconds == 40 and effort[4].max_cell_seconds == 10
    assert workload.rounds(0.0, 8, 6) == 6, "no more than the config asks for"


def test_between_cells_times_lie_on_a_line():
    """Beyond the measured cells there is no time."""
    times = {8: 2.0, 16: 4.0, 64: 10.0}
    assert [workload.step_us(w, times) for w in (4, 8, 12, 16, 40, 64, 65)] == [None, 2.0, 3.0, 4.0, 7.0, 10.0, None]
    assert workload.step_us(8, {}) is None


def test_saved_time_is_a_mean_over_steps():
    """Steps count by weight; those that one side has no times at are left out, and the share of the
    others is said.
    """
    loads = [Load(1, 1, 3.0), Load(2, 1, 1.0), Load(1, 4, 4.0)]
    found = workload.saved(loads, 8, {1: {8: 2.0, 16: 4.0}}, {1: {8: 3.0, 16: 8.0}, 4: {8: 1.0}})
    assert found == workload.Saved(0.5, 2.5, 4.25)
    assert found.saved_us == 1.75
    assert workload.saved(loads, 8, {}, {1: {8: 3.0}}) is None


def test_the_report_says_what_a_step_saves(tmp_path, monkeypatch):
    """A run with a workload has a section with a row for each contract; one without has none."""
    from gdntune import kernels

    monkeypatch.setattr(kernels, "default", lambda c, w, d: synthetic.VARIANTS[1])
    header = synthetic.run(workload=(Load(8, 1, 1.0), Load(16, 4, 3.0), Load(1000, 1, 4.0)))
    found = report([synthetic.write(tmp_path / "a", header, synthetic.records(header))])
    (section,) = [s for s in found.document.sections if s.title == "Workload"]
    grid = section.blocks[-1]
    assert [row[0].split()[:2] for row in grid.rows] == [["gdn", "bf16"], ["gdn", "fp32"]]
    chosen = found.frame[found.frame["chosen"] & (found.frame["state_dtype"] == "bf16")]
    at = {(r["tokens"], r["B"]): (r["mean_us"], r["default_mean_us"]) for _, r in chosen.iterrows()}
    mean, default = (
        (at[1, 8][i] + 3 * (at[4, 8][i] + (at[4, 64][i] - at[4, 8][i]) * (16 - 8) / (64 - 8))) / 4 for i in (0, 1)
    )
    _, whom, HV, steps, other_us, chosen_us, saved_us, share = grid.rows[0]
    assert (whom, HV, steps) == ("the default rule", "64", "50")
    assert float(chosen_us) == pytest.approx(mean, rel=0.01) and float(other_us) == pytest.approx(default, rel=0.01)
    assert float(saved_us) == pytest.approx(default - mean, abs=0.02)
    assert float(share) == pytest.approx(100 * (default - mean) / default, abs=0.1)
    plain = synthetic.run()
    assert "Workload" not in report([synthetic.write(tmp_path / "b", plain, synthetic.records(plain))]).markdown()


def test_a_step_has_the_times_of_its_own_heads(tmp_path, monkeypatch):
    """Of two cells with equal work units a row of 8 heads takes the one of 8 heads, and a row of 64
    that of 64.
    """
    from gdntune import kernels

    monkeypatch.setattr(kernels, "default", lambda c, w, d: synthetic.VARIANTS[1])
    header, contract = synthetic.run(workload=(Load(64), Load(8))), synthetic.contracts()[0]
    found = [Check(contract=contract, variant=v.id, status="ok") for v in synthetic.VARIANTS]
    for B, HV, slow in ((64, 8, 3.0), (8, 64, 1.0), (64, 64, 1.0), (8, 8, 3.0)):
        found += synthetic.cell(Problem(contract, B, HV // 4, HV), header, slow=slow)
    made = report([synthetic.write(tmp_path, header, found)])
    chosen = made.frame[made.frame["chosen"]].set_index(["B", "HV"])["mean_us"]
    (section,) = [s for s in made.document.sections if s.title == "Workload"]
    shown = {row[2]: float(row[5]) for row in section.blocks[-1].rows}
    assert shown == {str(HV): pytest.approx((chosen[8, HV] + chosen[64, HV]) / 2, rel=0.01) for HV in (8, 64)}


def test_a_report_of_a_workload_beyond_the_cells(tmp_path):
    """Where no step lies between measured cells, the section says so."""
    header = synthetic.run(workload=(Load(5000, 1, 1.0),))
    text = report([synthetic.write(tmp_path, header, synthetic.records(header))]).markdown()
    assert "No step of the workload is between two measured cells." in text


def test_the_header_without_a_workload_is_what_it_was():
    """Published journals read and write to the same bytes."""
    assert b"workload" not in msgspec.json.encode(synthetic.run())
