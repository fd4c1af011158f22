"""Every command where its output is full or closed, and several files of which one is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from gdntune.cli.common import io_fault

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tables" / "nvidia-h200" / "kda_decode.json"


def spawn(*arguments, stdout=subprocess.PIPE, **environment):
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "gdntune", *map(str, arguments)],
        stdout=stdout, stderr=subprocess.PIPE, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
    )  # fmt: skip


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize(
    "command", [("table", "show", TABLE), ("table", "show", TABLE, "--json"), ("--help",)]
)
def test_full_output(command):
    """Fault: a traceback, where standard output was full."""
    with open("/dev/full", "wb") as full:
        done = spawn(*command, stdout=full)
    assert done.returncode == 2
    said = done.stderr.decode()
    assert said.startswith("gdntune: standard output") and "No space left" in said
    assert "Traceback" not in said and "Exception ignored" not in said


def test_closed_pipe():
    """What reads our output may have enough of it."""
    command = f"{sys.executable} -m gdntune table show {TABLE} | head -1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], capture_output=True, env=env, check=False)
    assert done.stderr == b"" and done.stdout.count(b"\n") == 1


def test_full_disk_in_words():
    """A fault without a place, as a write gives it, says what to do."""
    said = io_fault(OSError(28, "No space left on device"))
    assert said == ("standard output: No space left on device; write to another disk")
    assert io_fault(OSError(13, "Permission denied", "/x")).startswith(
        "/x: Permission denied; name"
    )


def test_validate_with_one_missing(tmp_path):
    """Fault: one path that was not there hid what the others are."""
    from typer.testing import CliRunner

    from gdntune.cli.app import app

    result = CliRunner().invoke(app, ["table", "validate", str(tmp_path / "no.json"), str(TABLE)])
    assert result.exit_code == 2
    first, second = result.stdout.splitlines()
    assert "No such file" in first and second.startswith(f"{TABLE}: valid")
