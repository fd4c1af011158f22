"""gdntune/tuning/noise.py: times that nobody could believe are taken again, then marked wherever they
are shown.
"""

import io

import msgspec
import pytest
import synthetic
from rich.console import Console
from typer.testing import CliRunner

from gdntune.cli.app import app
from gdntune.device import arch
from gdntune.device.arch import Clocks
from gdntune.errors import JournalError
from gdntune.kernels.spec import Variant
from gdntune.report.report import report
from gdntune.report.tables import table_document
from gdntune.results import table
from gdntune.results.derive import derive
from gdntune.results.journal import Journal
from gdntune.results.records import Cell, noise_notes, noisy, power_capped
from gdntune.tuning import attempts, noise
from gdntune.tuning.config import Search
from gdntune.tuning.measure import CellResult, CellTiming, TimedVariant

pytestmark = pytest.mark.noise
H100 = arch.target("sm_90a")
WELL = arch.Clocks(sm_mhz=1980)


def timed(ours, floor=(10.0,) * 8):
    """Final samples of a kernel and of a floor."""
    return [
        TimedVariant(None, "decode", [], list(ours)),
        TimedVariant(None, "floor", [], list(floor)),
    ]


@pytest.mark.parametrize(
    ("ours", "reason"),
    [
        ((10.0,) * 8, ""),
        ((9.6,) * 8, ""),
        ((9.4,) * 8, "the best kernel takes 0.94 of its floor (9.4 of 10 us)"),
        ((0.03,) * 8, "the best kernel takes 0.00 of its floor (0.03 of 10 us)"),
        ((10.0, 10.0, 10.5, 10.5, 11.0, 11.0), ""),
        (
            (10.0, 10.0, 12.0, 14.0, 16.0, 16.0),
            "the middle half of the best kernel's samples spans",
        ),
    ],
)
def test_what_nobody_could_believe(ours, reason):
    """Fault: a busy CPU's 0.003 of the floor was printed plainly."""
    found = noise.noise(H100, timed(ours))
    assert found == reason if not reason else reason in found


def test_milliseconds_have_no_exponent():
    """Fault: a slow cell's reason said 6.77e+03 of 7.83e+03 us."""
    slow = [TimedVariant(None, role, [], [us] * 8) for role, us in (("decode", 6768.4), ("floor", 7834.0))]  # fmt: skip
    assert "0.86 of its floor (6770 of 7830 us)" in noise.noise(H100, slow)


def test_a_peer_whose_samples_lie_apart():
    """Fault: a peer's time was 4 us in half of the samples and 54 in the others, and no word said
    so.
    """
    peer = Variant("peer:else", "peer:else.entry", {})
    for samples, reason in (
        ((54.0, 4.0) * 8, "the middle half of peer:else.entry's samples spans"),
        ((54.0, 60.0) * 8, ""),
    ):
        cell = [*timed((10.0,) * 8), TimedVariant(peer, "peer", [], list(samples))]
        found = noise.noise(H100, cell)
        assert found == reason if not reason else reason in found


def test_a_load_above_the_cores(monkeypatch):
    """On a CPU others' processes are noise; a GPU's times have their own clock."""
    cpu = arch.Device("cpu", "CPU", "x86_64", 2, 4 << 20, 1 << 34)
    monkeypatch.setattr(noise, "cpu_threads", lambda: 2)
    monkeypatch.setattr(noise.os, "getloadavg", lambda: (8.0, 8.0, 8.0))
    assert noise.noise(cpu, timed((10.0,) * 8)) == "the load is 8.0 on 2 cores"
    assert noise.noise(H100, timed((10.0,) * 8)) == ""
    monkeypatch.setattr(noise.os, "getloadavg", lambda: (2.2, 8.0, 8.0))
    assert noise.noise(cpu, timed((10.0,) * 8)) == ""


class Fake:
    """A worker whose first measurements are noise."""

    name = "cuda:0"

    def __init__(self, variant, bad):
        self.variant, self.bad, self.asked = variant, bad, 0

    def run(self, function, problem, *rest, timeout):
        """A cell's result."""
        self.asked += 1
        us = 1.0 if self.asked <= self.bad else 10.5
        made = [
            TimedVariant(self.variant, "decode", [], [us] * 8),
            TimedVariant(self.variant, "floor", [], [10.0] * 8),
        ]
        return CellResult(made, CellTiming("8 final rounds", 0.1, WELL, WELL))


@pytest.mark.parametrize(("bad", "reason"), [(0, ""), (1, ""), (2, "noisy: the best kernel takes")])
def test_a_noisy_cell_is_timed_again_then_marked(bad, reason):
    """Once more; where it is noise again its times are kept, with what is wrong with them."""
    trial = next(
        r for r in synthetic.records(synthetic.run()) if getattr(r, "role", "") == "decode"
    )
    worker = Fake(trial.variant, bad)
    job = attempts.CellJob(trial.problem, [trial.variant], [], Search(), device=H100)
    *_, cell = attempts.time(worker, job)
    assert worker.asked == (1 if bad == 0 else 2)
    assert (
        cell.status == "ok" and cell.reason.startswith(reason) and bool(cell.reason) == bool(reason)
    )


@pytest.mark.parametrize(("capped", "asked"), [(0, 1), (1, 2), (5, 2)])
def test_a_cell_at_the_power_limit_is_timed_again_after_a_pause(monkeypatch, capped, asked):
    """Fault: 14 of 60 cells of a published table were timed under a power cap, and nothing said so.
    Once more after a pause; where the limit holds it down again, the cell says so.
    """
    paused = []
    monkeypatch.setattr(attempts.time_module, "sleep", paused.append)
    low = Clocks(1500, 2619, 60, 700.0, ("sw_power_cap",))
    trial = next(
        r for r in synthetic.records(synthetic.run()) if getattr(r, "role", "") == "decode"
    )
    worker = Fake(trial.variant, 0)

    def run(function, problem, *rest, timeout):
        found = Fake.run(worker, function, problem, *rest, timeout=timeout)
        seen = (low, low) if worker.asked <= capped else (WELL, WELL)
        return found._replace(timing=CellTiming("8 final rounds", 0.1, *seen))

    worker.run = run
    job = attempts.CellJob(trial.problem, [trial.variant], [], Search(), device=H100)
    *_, cell = attempts.time(worker, job)
    assert worker.asked == asked and paused == [attempts.POWER_PAUSE_S] * (asked - 1)
    assert cell.status == "ok" and cell.power_capped is (capped > 1)
    assert power_capped([cell]) == ({cell.problem} if capped > 1 else set())


def test_a_mark_is_in_notes_and_table(tmp_path):
    """Fault: a sweep on a busy machine wrote a table and offered it. The last lines, the table and its
    page say how many cells are marked; without marks the table is as before.
    """
    run = synthetic.run()
    records = synthetic.records(run)
    clean = derive(records, run)
    assert "noisy" not in clean.evidence.failures and noise_notes(records) == []
    assert table.noise_words(clean.evidence) == ""
    marked = [
        msgspec.structs.replace(r, reason="noisy: the load is 8.0 on 2 cores")
        if isinstance(r, Cell) and r.status == "ok"
        else r
        for r in records
    ]
    count = len(noisy(marked))
    [line] = noise_notes(marked)
    assert line.startswith(f"{count} cells are noisy") and "the load is 8.0" in line
    made = derive(marked, run)
    assert made.rules == clean.rules and made.evidence.failures["noisy"] == count
    path = tmp_path / "table.json"
    table.save(made, path)
    assert table.load(path) == made
    assert "cannot be believed" in table.noise_words(made.evidence)
    assert "NOISY" in str(table_document(made, "t"))


@pytest.fixture
def busy(tmp_path):
    """A sweep's folder in which the cells of B=8 are noisy, and how many they are."""
    run = synthetic.run()
    records = [
        msgspec.structs.replace(r, reason="noisy: the load is 8.0 on 2 cores")
        if isinstance(r, Cell) and r.problem.B == 8
        else r
        for r in synthetic.records(run)
    ]
    return synthetic.write(tmp_path / "busy", run, records), len(noisy(records))


def test_a_report_marks_noisy_cells(busy):
    """Fault: the reports printed such times plainly. Each form marks them, and says why."""
    folder, count = busy
    made = report([folder])
    said = f"{count} cells are noisy: their times cannot be believed"
    text = " ".join(made.markdown().split())
    assert said in text and "the load is 8.0 on 2 cores" in text
    rows = [line.split("|") for line in made.markdown().splitlines() if line.startswith("| 8 x 64")]
    assert rows and all(cell.strip().startswith("~") for row in rows for cell in row[3:-1])
    others = [line for line in made.markdown().splitlines() if line.startswith("| 1 x 64")]
    assert others and not any("~" in line for line in others)
    page = made.html()
    assert said in page and "chosen times cannot be believed" in page and '"noisy"' in page
    out = io.StringIO()
    made.terminal(Console(file=out, width=100))
    assert said in " ".join(out.getvalue().split()) and "~" in out.getvalue()
    reasons = made.frame[made.frame["B"] == 8]["reason"]
    assert set(reasons) == {"noisy: the load is 8.0 on 2 cores"}
    assert "noisy: the load" in made.csv()


def test_what_is_derived_from_noisy_cells_says_so(busy):
    """Fault: replay, judge and compare gave ratios of such times plainly."""
    folder, count = busy
    for command, whose in (
        (["replay", folder], ""),
        (["judge", folder / "table.json", folder], ""),
        (["judge", folder, "--hold-out", "every-second"], ""),
        (["compare", folder, folder], " of B"),
    ):
        done = CliRunner().invoke(app, list(map(str, command)))
        assert f"{count} cells{whose} are noisy" in " ".join(done.output.split()), command


def test_a_later_failure_leaves_the_mark():
    """A pass that failed has no times: those that count are the noisy ones before it."""
    run = synthetic.run()
    *_, cell = (r for r in synthetic.records(run) if isinstance(r, Cell))
    marked = msgspec.structs.replace(cell, reason="noisy: it was")
    failed = msgspec.structs.replace(cell, status="failed", reason="throttled")
    assert noisy([marked, failed]) == [marked]
    assert noisy([marked, failed, cell]) == []


def test_commands_about_tables_name_the_mark(busy, monkeypatch, tmp_path):
    """Fault: a noisy table was installed, and named as the one in use, without a word."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    folder, count = busy
    for command in ("validate", "install"):
        what = folder / "table.json" if command == "validate" else folder
        done = CliRunner().invoke(app, ["table", command, str(what)])
        assert done.exit_code == 0
        assert f"{count} of its 18 cells have times that cannot be" in done.output
    done = CliRunner().invoke(app, ["table", "which", "--gpu", "NVIDIA H100 80GB HBM3"])
    assert f"WARNING: noisy: {count} of its 18 cells" in done.output


def test_a_folder_deleted_in_mid_sweep(tmp_path):
    """Fault: what was written to a deleted folder's journal was lost, and said at the end alone. The
    next write says so.
    """
    run = synthetic.run()
    folder = tmp_path / "run"
    records = synthetic.records(run)
    with Journal.open(folder, run) as journal:
        journal.append(records[0])
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        for _ in range(2):
            with pytest.raises(JournalError, match="deleted or moved while .*same command"):
                journal.append(records[1])
    assert not folder.exists()
