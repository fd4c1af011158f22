"""gdntune/tuning/bench.py: cells of equal work units, and what they are shared by."""

import csv
import io
import json

import msgspec
import pytest
from benches import TINY, rows, run
from fakes import compiling
from typer.testing import CliRunner

from gdntune.cli.app import app
from gdntune.report.report import report
from gdntune.report.words import ratio
from gdntune.results.derive import derive
from gdntune.results.journal import read
from gdntune.results.records import Cell, Trial
from gdntune.tuning import config

# Four work units in three ways, eight in one.
HEADS = """
name: heads
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [2, 4]
contracts: [{state_dtype: fp32}]
policy: {timer: auto, l2: warm}
search: {final_rounds: 6, max_cell_seconds: 5}
parts:
  - {name: two}
  - {name: two-of-two, model: {H: 2, HV: 2, K: 64, V: 64}, batch: [2]}
  - {name: one, model: {H: 1, HV: 1, K: 64, V: 64}, batch: [4]}
"""
SIZES = [(2, 1, 2), (2, 2, 2), (4, 1, 1), (4, 1, 2)]


@pytest.fixture(scope="module")
def heads(tmp_path_factory, store):
    """A bench with cells of equal work units and other heads."""
    folder = tmp_path_factory.mktemp("heads")
    return folder, run(folder, store, "fakes.library", text=HEADS)


def test_equal_work_units_of_other_heads_are_cells_apart(heads):
    """Fault: of several cells with equal B*HV, of different parts, one was timed. The table has one
    of them, that with the most heads.
    """
    folder, outcome = heads
    cells = [r.problem for r in outcome.records if isinstance(r, Cell) and r.status == "ok"]
    assert [(p.B, p.H, p.HV) for p in cells] == SIZES and outcome.timed == 4
    for problem in cells:
        assert rows(outcome.records, problem)["right"].status == "ok"
    (interval,) = outcome.table.rules[0].intervals
    assert [e.work_units for e in interval.evidence] == [4, 8] and outcome.table.evidence.cells == 2
    (wide,) = (
        r.samples_us
        for r in outcome.records
        if isinstance(r, Trial)
        and r.role == "decode"
        and (r.problem.B, r.problem.H, r.problem.HV) == (2, 2, 2)
    )
    assert interval.evidence[0].mean_us == pytest.approx(sum(wide) / len(wide), abs=2e-3)
    # in whatever order they were timed
    header, records = read(folder)
    turned = [r for p in reversed(cells) for r in records if getattr(r, "problem", None) == p]
    turned = [r for r in records if not hasattr(r, "problem")] + turned
    assert derive(turned, header).rules == derive(records, header).rules == outcome.table.rules


def test_the_report_has_a_row_for_each_of_equal_work_units(heads):
    """Tables, the peers' summary, CSV and page have all four cells, each under its own B, HV and,
    where that does not tell, H.
    """
    folder, _ = heads
    made = report([folder])
    names = ["2 x 2, H=1", "2 x 2, H=2", "4 x 1", "4 x 2"]
    grids = {
        block.caption: block
        for s in made.document.sections
        for block in s.blocks
        if hasattr(block, "rows")
    }
    for caption in ("Time, us (median of the chosen variant)", "Speed-up over library"):
        by_size = {row[0]: row[1:] for row in grids[caption].rows}
        assert sorted(by_size) == names and [by_size[n][0] for n in names] == ["4", "4", "4", "8"]
        assert all(row[1] != "-" for row in by_size.values())
    [found] = made.peers()
    assert found["cells"] == 4 and "geometric mean of 4 cells" in " ".join(made.markdown().split())
    speedups = made.frame[made.frame["variant"].str.endswith(".right")].sort_values(
        ["HV", "B", "H"]
    )["chosen_speedup"]
    shown = {row[0]: row[2] for row in grids["Speed-up over library"].rows}
    by_size = dict(zip(["4 x 1", "2 x 2, H=1", "2 x 2, H=2", "4 x 2"], speedups, strict=True))
    assert shown == {name: ratio(value) for name, value in by_size.items()}
    table_of = csv.DictReader(io.StringIO(made.csv()))
    chosen = [(int(r["B"]), int(r["H"]), int(r["HV"])) for r in table_of if r["chosen"] == "True"]
    assert sorted(chosen) == SIZES
    page = made.html()
    for B, H, HV in SIZES:
        # times, shares, over the default, over the peer
        assert page.count(f'data-key="1:{B}:{HV}:{H}"') == 4
    assert "4 (2 x 2, H=1)" in page and "4 (4 x 1)" in page


def test_a_bench_goes_on_between_equal_work_units(heads, tmp_path, store):
    """A journal that ends after one of several cells with equal work units: the others are timed,
    and that one is not again.
    """
    folder, _ = heads
    lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    closing = [i for i, line in enumerate(lines) if b'"kind":"cell"' in line]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines[: closing[1] + 1]))
    again = run(tmp_path, store, "fakes.library", text=HEADS)
    cells = [(r.problem.B, r.problem.H, r.problem.HV) for r in again.records if isinstance(r, Cell)]
    assert cells == SIZES and again.timed == 4
    assert (tmp_path / "journal.jsonl").read_bytes().startswith(b"".join(lines[: closing[1] + 1]))


def test_two_devices_share_a_bench(tmp_path):
    """Fault: a bench ran on one device, whatever there were. `--devices 0,1` on a CPU: both time
    cells, each cell with all its peers by one alone, and the journal says by which.
    """
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    out = tmp_path / "out"
    command = ["bench", str(path), "--peers", "fakes.library", "--rounds", "3", "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--devices", "0,1", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    said = json.loads(result.stdout)
    assert said["timed"] == said["cells"] == 4
    assert any("2 processes timed on one CPU at once" in note for note in said["notes"])
    _, records = read(out)
    assert {r.timed_on for r in records if isinstance(r, Cell)} == {"cpu:0", "cpu:1"}
    for problem in config.parse(TINY).problems():
        found = rows([r for r in records if getattr(r, "role", "") == "peer"], problem)
        assert len(found) == (3 if problem.contract.tokens == 1 else 1)
    # another number of devices resumes the same journal
    lines = (out / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (out / "journal.jsonl").write_bytes(b"".join(lines[:-1]))
    again = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(again.stdout)["timed"] == 4
    assert [r.status for r in read(out)[1] if isinstance(r, Cell)] == ["ok"] * 4


def test_the_command_counts_cells_of_equal_work_units(tmp_path):
    """All cells were timed, so the exit code is 0: the table's cells, one for each number of work
    units, are not what is counted.
    """
    path = tmp_path / "heads.yaml"
    path.write_text(HEADS)
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["bench", str(path), "--peers", "", "--rounds", "3", "--out", str(out), "--json"]
    )
    assert result.exit_code == 0, (result.output, result.exception)
    said = json.loads(result.stdout)
    assert said["timed"] == said["cells"] == 4


SEVERAL = TINY.replace("[1, 2]", "[1]").replace(
    "contracts: [{state_dtype: fp32}]",
    "contracts: [{state_dtype: fp32}, {state_dtype: fp32, input_dtype: fp32}]",
)


def test_workers_take_turns_on_a_device(monkeypatch, store, tmp_path):
    """Fault: a peer's compiler, up to 14 s a kernel, kept the GPU idle. Of two processes that share
    a device both compile at once, and no call of one falls between the timed calls of the other.
    """
    monkeypatch.setenv(compiling.LOG, str(tmp_path / "log"))
    outcome = run(tmp_path / "bench", store, "fakes.compiling", text=SEVERAL, workers_per_device=2)
    assert outcome.timed == 4 and any("2 processes took turns" in note for note in outcome.notes)
    seen = compiling.events()
    assert len({pid for pid, _, _ in seen}) == 2
    assert "alone" not in {what for _, _, what in seen}
    # One process has all of a contract's cells; only who has ended its own takes another's last one.
    assert [what for _, _, what in seen].count("compiles") in (2, 3)
    calls = [(pid, number) for pid, number, what in seen if what == "called"]
    for mine in set(calls):
        first = calls.index(mine)
        last = len(calls) - 1 - calls[::-1].index(mine)
        assert set(calls[first : last + 1]) == {mine}
    assert {r.timed_on for r in outcome.records if isinstance(r, Cell)} == {msgspec.UNSET}
    assert outcome.run.workers_per_device == 2
