"""Output that fails: full disks and narrow encodings give one message and exit code 2."""

import os
import subprocess
import sys

import pytest
import synthetic


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
