"""Output that fails: full disks and narrow encodings give one message and exit code 2."""

import io
import json
import os
import shutil
import subprocess
import sys

import pytest
import synthetic
from rich.console import Console
from typer.testing import CliRunner

from gdntune.cli.app import app
from gdntune.cli.progress import Lines
from gdntune.report import comparisons, judgements, tables
from gdntune.report.terminal import print_document
from gdntune.results import journal, judge, merge, table


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """A made-up sweep's folder with an accent in its name."""
    header = synthetic.run()
    folder = tmp_path_factory.mktemp("sweeps") / "café"
    return synthetic.write(folder, header, synthetic.records(header, batches=(1,)))


def gdntune(*arguments, stdout=subprocess.PIPE, **environment):
    """A run of the command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "gdntune", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | environment,
        timeout=300,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize("form", ["csv", "terminal"])
def test_full_disk_at_standard_output(sweep, form):
    """Fault: a full disk behind standard output was a traceback, and exit code 120."""
    with open("/dev/full", "wb") as full:
        done = gdntune("report", sweep, "--format", form, stdout=full)
    assert done.returncode == 2
    assert done.stderr.decode().splitlines() == [
        "gdntune: standard output: No space left on device; write to another disk"
    ]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
def test_full_disk_at_a_file(sweep, tmp_path):
    """A report that does not fit is one message; what --out names is left as it was."""
    link = tmp_path / "r.csv"
    link.symlink_to("/dev/full")
    done = gdntune("report", sweep, "--out", link)
    assert done.returncode == 2 and link.is_symlink()
    assert b"cannot be written: No space left on device" in done.stderr


def test_an_accent_where_the_terminal_has_ascii(sweep, tmp_path):
    """Fault: a path with an accent was a UnicodeEncodeError where the terminal's encoding is
    ASCII.
    """
    out = tmp_path / "é.json"
    ascii_only = {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = gdntune("replay", sweep, "-o", out, **ascii_only)
    assert (done.returncode, done.stderr, out.exists()) == (0, b"", True)
    done = gdntune("table", "show", out, **ascii_only)
    assert (done.returncode, done.stderr) == (0, b"") and rb"\xe9.json" in done.stdout


SMALL = """
name: small
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [1, 2, 3, 4]
contracts: [{state_dtype: fp32}]
kernels: {cpu_recurrent: {vec: [8], tile_v: [16, 32], ilp: [2]}}
policy: {l2: warm}
search: {screen_rounds: 2, keep: 2, final_rounds: 4, max_cell_seconds: 2}
"""


@pytest.mark.parametrize("when", ["compile", "check", "time", "the end"])
def test_a_folder_deleted_in_mid_sweep(when, tmp_path, monkeypatch):
    """Fault: a folder that was deleted under a sweep was noticed at its end alone, and came back with
    a table of no journal. The command says so at its next step, in one message, and stops.
    """
    config, folder = tmp_path / "small.yaml", tmp_path / "out"
    config.write_text(SMALL)
    steps: list[str] = []

    class Deletes(Lines):
        def step(self, n=1, work=0.0):
            super().step(n, work)
            steps.append(self._label)
            if self._label == when:
                shutil.rmtree(folder, ignore_errors=True)

        def end(self):
            super().end()
            if when == "the end" and steps[-1] == "time":
                shutil.rmtree(folder, ignore_errors=True)

    monkeypatch.setattr("gdntune.cli.progress.progress", Deletes)
    done = CliRunner().invoke(app, ["sweep", str(config), "--out", str(folder)])
    assert done.exit_code == 2
    said = [line for line in done.stderr.splitlines() if line.startswith("gdntune: ")]
    assert len(said) == 1 and "deleted or moved while" in said[0] and "same command" in said[0]
    assert not folder.exists()
    # one check is two variants' records at once
    assert steps.count(when) == {"compile": 1, "check": 1, "time": 1, "the end": 0}[when]


def test_json_of_reports_and_merges(sweep, tmp_path):
    """report, table merge and expect print one JSON document with --json."""
    made = json.loads(gdntune("report", sweep, "--json").stdout)
    assert {"runs", "chosen", "peers"} == made.keys()
    assert made["runs"][0]["device"]["arch"] == "sm_90a"
    assert len(made["chosen"]) == made["runs"][0]["cells"] and made["chosen"][0]["median_us"] > 0
    both = gdntune("report", sweep, "--json", "--format", "md")
    assert both.returncode == 2 and b"one document on standard output" in both.stderr
    table = sweep / "table.json"
    said = gdntune("table", "merge", table, table, "-o", tmp_path / "t.json", "--json")
    assert json.loads(said.stdout)["rules"] > 0


def printed(document, width):
    """The lines of a document in a terminal of a width."""
    out = io.StringIO()
    print_document(document, Console(file=out, width=width), details=True)
    return out.getvalue().splitlines()


def test_nothing_wraps_at_80_columns(sweep):
    """Fault: the tables of judge and `table diff` needed 85 to 100 columns, so that a terminal of
    80 broke each line.
    """
    run, records = journal.read(sweep)
    judged = judge.judge(table.load(sweep / "table.json"), records, run, about="t")
    other = synthetic.write(
        sweep.parent / "swapped", run, synthetic.records(run, batches=(1, 64), swap=1)
    )
    found = table.load(sweep / "table.json")
    apart = merge.diff(found, table.load(other / "table.json"))
    assert apart.choices
    documents = [
        judgements.judgement_document(judged, "t"),
        comparisons.diff_document(apart, "a, b"),
        tables.table_document(found, "t"),
    ]
    for document in documents:
        lines = printed(document, 80)
        assert [line for line in lines if len(line.rstrip()) > 80] == []
