"""Commands that compile and time: a sweep end to end, compile, and what may be missing there."""

import io
import json
import os
import re
import shutil
import subprocess
import sys

import pandas as pd
import pytest
import synthetic
import typer
import typer.main
import warm
from commands import ROOT, config, refused, run
from rich.console import Console

from gdntune import search
from gdntune.cli import common as cli_common
from gdntune.cli.progress import Bar, Lines
from gdntune.device import arch
from gdntune.device import cupti as cupti_records
from gdntune.device.arch import target
from gdntune.errors import ToolMissing
from gdntune.objects import build
from gdntune.report.report import report
from gdntune.results import table


def spawn(*arguments, **environment):
    """The command line in a process of its own, forked from a warm one."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    return warm.run([sys.executable, "-m", "gdntune", *map(str, arguments)], env)


def test_cuda_that_is_not_there(monkeypatch, tmp_path):
    """A config for CUDA on a machine without it says what is missing and what to do."""
    monkeypatch.setattr(arch, "cuda_fault", lambda index=0: "no CUDA device: torch finds none")
    assert refused(
        run("sweep", config(tmp_path, device="cuda"), "--out", tmp_path / "out"),
        "no CUDA device: torch finds none, or use the CPU (device: cpu in a config, --device cpu on the command line)",
    )
    assert not (tmp_path / "out").exists()
    said = "--arch names a GPU that is not here, as h200"
    assert refused(run("sweep", "card", "--device", "cuda", "--dry-run"), "torch finds none", said)


@pytest.mark.parametrize("command", ["sweep", "bench"])
def test_a_device_that_is_named_twice_or_is_none(command, tmp_path):
    """Fault: --index was ignored on a CPU, and beside --devices."""
    made, out = config(tmp_path), ("--out", tmp_path / "out")
    assert refused(run(command, made, "--index", "1", *out), "--index 1 on a CPU: expected none")
    both = ("--device", "cuda", "--index", "1", "--devices", "0,1")
    assert refused(run(command, made, *both, *out), "--index 1 with --devices 0,1: expected one of")
    assert not (tmp_path / "out").exists()


def test_a_timer_that_the_device_cannot_have(tmp_path):
    """CUPTI on a CPU is refused before anything is written."""
    result = spawn("sweep", config(tmp_path), "--timer", "cupti", "--out", tmp_path / "out")
    assert result.returncode == 2, result.stderr
    assert "expected one of auto, cpu" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out" / "journal.jsonl").exists()


def test_missing_cupti_permission(monkeypatch, tmp_path):
    """Where CUPTI refuses, `--timer cupti` is one message with the remedy; `auto` times by events
    and says so.
    """
    fault = "CUPTI cannot be used (INSUFFICIENT_PRIVILEGES); load the driver with NVreg_RestrictProfilingToAdminUsers=0"
    device = target("sm_90a")
    monkeypatch.setattr(arch, "detect", lambda kind="auto", index=0: device)
    monkeypatch.setattr(cupti_records, "fault", lambda: fault)
    header = synthetic.run(policy={"timer": "events", "l2": "cold-clean"})

    def sweep(config, folder, *, device, policy, **_):
        _, note = policy.resolve(device)
        found = synthetic.records(header)
        synthetic.write(folder, header, found)
        return search.Outcome(table.load(folder / "table.json"), header, found, [note])

    monkeypatch.setattr(search, "sweep", sweep)
    assert refused(
        run("sweep", "quickstart", "--timer", "cupti", "--out", tmp_path / "a"),
        "NVreg_Restrict",
        "--timer events",
    )
    assert not (tmp_path / "a").exists()
    result = run("sweep", "quickstart", "--out", tmp_path / "b")
    assert result.exit_code == 0, result.output
    assert "timed by CUDA events" in result.stdout
    assert "NVreg_RestrictProfilingToAdminUsers=0" in result.stdout


def test_a_tool_that_is_missing(monkeypatch, tmp_path):
    """What a sweep finds missing on its way is one message too."""

    def sweep(*_, **__):
        raise ToolMissing("no g++: apt install g++")

    monkeypatch.setattr(search, "sweep", sweep)
    assert refused(
        run("sweep", "quickstart", "--device", "cpu", "--out", tmp_path), "apt install g++"
    )


def test_interrupted(monkeypatch, tmp_path):
    """Ctrl-C is no traceback, and says that the sweep can go on."""

    def sweep(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(search, "sweep", sweep)
    result = run("sweep", "quickstart", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 130
    # Fault: it stood behind the ^C and the bar
    assert "\ngdntune: interrupted; what was journalled stays" in result.stderr


def test_progress_without_a_terminal(capsys):
    """A stage is one line when it has ended, an empty one none."""
    lines = Lines()
    lines.start("compile", 2)
    lines.step()
    lines.step()
    lines.end()
    lines.start("check", 0)
    lines.end()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("compile: 2 of 2 in ")
    assert captured.err.count("\n") == 1


def test_a_bar_from_the_first_second():
    """Faults: nothing moved until the objects were planned; the time left took a cell of 256
    requests for one of a single request.
    """
    out = io.StringIO()
    bar = Bar(Console(file=out, force_terminal=True, width=100))
    bar.begin()
    assert "start" in out.getvalue()
    bar.start("time", 2, work=10.0)
    bar.step(work=1.0)
    bar._bar.refresh()
    bar.stop()
    assert "1/2" in out.getvalue()
    (task,) = bar._bar.tasks
    assert (task.completed, task.total, task.description) == (1.0, 10.0, "time")


def test_sweep_end_to_end(tmp_path):
    """A tiny sweep on this CPU's real kernels, by `python -m gdntune`, unactivated and with nothing
    but the system's compiler on PATH.
    """
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("g++", "gcc", "as", "ld", "cc1plus", "collect2", "cp"):
        if found := shutil.which(name):
            (tools / name).symlink_to(found)
    out = tmp_path / "out"
    result = subprocess.run(
        [sys.executable, "-m", "gdntune", "sweep", config(tmp_path), "--out", out, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PATH": str(tools)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout)
    assert (said["chosen"], said["cells"]) == (2, 2)
    assert sorted(p.name for p in out.iterdir() if p.suffix in (".json", ".jsonl", ".md", ".csv", ".html")) == [
        "journal.jsonl", "report.csv", "report.html", "report.md", "table.json",
    ]  # fmt: skip
    assert "compile: " in result.stderr
    frame = pd.read_csv(out / "report.csv")
    assert set(frame[frame["chosen"]]["verified"]) == {"ok"}
    assert "2 of 2 cells" in " ".join((out / "report.md").read_text().split())
    validated = run("table", "validate", out / "table.json").stdout
    assert validated.startswith(f"{out / 'table.json'}: valid")
    # Again: nothing is left to do, once no cell is marked by what else this machine did.
    journal = out / "journal.jsonl"
    quiet = re.sub(rb'"reason":"noisy: [^"]*"', b'"reason":""', journal.read_bytes())
    journal.write_bytes(quiet)
    again = spawn("sweep", config(tmp_path), "--out", out)
    assert again.returncode == 0
    # What comes next, after a sweep with believable times too.
    assert "report.md explains the tables" in again.stdout
    assert "To use the table, run `gdntune table install" in again.stdout
    assert journal.read_bytes() == quiet
    assert run("replay", out, "-o", tmp_path / "again.json").exit_code == 0
    assert (tmp_path / "again.json").read_bytes() == (out / "table.json").read_bytes()
    made = report([out])
    assert (out / "report.md").read_text() == made.markdown()
    assert (out / "report.csv").read_text() == made.csv()


PARTS = {
    "kernels": {"cpu_recurrent": {"tile_v": [32], "ilp": [2], "vec": [8]}},
    "parts": [
        {"name": "one", "batch": [1]},
        {"name": "two", "contracts": [{"state_dtype": "bf16"}]},
    ],
}


def test_a_file_where_a_folder_is_wanted(folder, tmp_path, monkeypatch):
    """Fault: a bundle's place that is a file was found after compiling, and called `File exists`."""
    monkeypatch.setattr(build, "compile_objects", lambda *_, **__: pytest.fail("compiled"))
    path = tmp_path / "file"
    path.write_text("x")
    words = ("compile", config(tmp_path), "--arch", "cpu", "--bundle")
    assert refused(run(*words, path), f"--bundle {path}: it is a file, and a folder is wanted")
    assert refused(
        run(*words, path / "below"),
        f"--bundle {path / 'below'}: {path} is a file, and a folder is wanted",
    )
    said = run("report", folder, "--format", "kernel-tuner", "--out", path)
    assert refused(said, f"--out {path}: cannot be written: it is a file, and a folder is wanted")


def test_compile_parts(tmp_path):
    """`--part` compiles what those parts need; each part's cells and objects, and the bundle's
    size, are told.
    """
    path = config(tmp_path, **PARTS)
    bundle = tmp_path / "bundle"
    said = json.loads(
        run("compile", path, "--arch", "cpu", "--part", "t*", "--bundle", bundle, "--json").stdout
    )
    assert said["config"] == "tiny.t"
    assert said["parts"] == [
        {"name": "two", "contracts": 1, "cells": 2, "objects": said["objects"]}
    ]
    assert said["bundle_bytes"] == sum(p.stat().st_size for p in bundle.iterdir())
    assert {m["spec"]["facts"]["state_dtype"] for m in said["manifests"]} == {"bf16"}
    text = run("compile", path, "--arch", "cpu", "--part", "two", "--bundle", bundle).stdout
    assert f"part two: 1 contract, 2 cells, {said['objects']} objects\n" in text
    assert text.endswith(f"bundle: {bundle}, {said['bundle_bytes']:,} bytes\n")


@pytest.mark.parametrize("command", ["sweep", "bench", "compile"])
def test_no_such_part(tmp_path, monkeypatch, command):
    """A part that is not there is refused with those that are, before anything is written."""
    monkeypatch.chdir(tmp_path)
    extra = ("--arch", "cpu") if command == "compile" else ()
    path = config(tmp_path, **PARTS)
    assert refused(
        run(command, path, "--part", "tow", *extra),
        "tiny has no part 'tow' (did you mean `two`?)",
        "one, two",
    )
    assert refused(
        run(command, config(tmp_path), "--part", "two", *extra),
        "tiny has no part 'two': it has no parts",
    )
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.yaml"]


def test_no_compiler(tmp_path):
    """Without g++ a sweep says so in one message that names the package, with exit code 2."""
    empty = tmp_path / "empty"
    empty.mkdir()
    out = tmp_path / "out"
    result = spawn(
        "sweep",
        config(tmp_path),
        "--out",
        out,
        PATH=str(empty),
        GDNTUNE_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert result.returncode == 2, result.stderr
    assert "g++" in result.stderr
    assert "Traceback" not in result.stderr
    assert not (out / "table.json").exists()


def test_a_place_that_cannot_be_written(tmp_path, capsys):
    """Fault: a bundle or page in a place that cannot be written ended in a traceback; a closed pipe
    is no such place.
    """
    (tmp_path / "file").write_text("x")
    command = cli_common.refusing(lambda path: (path / "page.md").write_text("x"))
    with pytest.raises(typer.Exit) as ended:
        command(tmp_path / "file")
    assert ended.value.exit_code == 2
    assert (
        str(tmp_path / "file" / "page.md") in (said := capsys.readouterr().err)
        and "name a place" in said
    )

    def closed():
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        cli_common.refusing(closed)()
