"""examples/walks: four people's commands, run as they stand with a small config."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import synthetic
import warm

ROOT = Path(__file__).parent.parent
WALKS = ROOT / "examples" / "walks"
# One cell, one variant beside the floors.
SMALL = """\
name: small
device: cpu
model: {H: 4, HV: 8}
batch: [1]
contracts: [{state_dtype: fp32}]
kernels: {cpu_recurrent: {tile_v: [16], ilp: [8], ahead: [false]}}
policy: {timer: auto, l2: warm}
search: {screen_rounds: 2, keep: 2, final_rounds: 5, max_cell_seconds: 1}
"""


@pytest.fixture
def walk(tmp_path, request):
    """Runs a walk in a folder of its own, with a home of its own; gives what it printed."""
    (tmp_path / "bin").mkdir()
    # A kernel from outside is registered when gdntune is imported, which a warm process has done.
    cold = "kernel_engineer" in request.node.name
    python = sys.executable if cold else f"{sys.executable} {Path(warm.__file__)}"
    for name, words in (("gdntune", "-m gdntune"), ("python", "")):
        command = tmp_path / "bin" / name
        command.write_text(f'#!/bin/sh\nexec {python} {words} "$@"\n')
        command.chmod(0o755)
    paths = {"HOME": tmp_path, "XDG_DATA_HOME": tmp_path / "data", "PYTHONPATH": ROOT}
    env = os.environ | {name: str(path) for name, path in paths.items()}
    env |= {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}

    def run(*command):
        done = subprocess.run(
            [str(c) for c in command],
            capture_output=True, text=True, cwd=tmp_path, env=env, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_new_user(walk, tmp_path):
    """A CPU's table is made, valid, installed, and the one that the runtime then names."""
    (tmp_path / "small.yaml").write_text(SMALL)
    said = walk(WALKS / "new_user.sh", "small.yaml", "run")
    assert "small on" in said and "run/table.json: valid" in said
    assert "in use for gdn_decode" in said and "the user's" in said


def test_operator(walk):
    """An H20 is told which table it gets, why that may be slow, and what its own sweep takes."""
    said = walk(WALKS / "operator.sh", "h20", "quickstart")
    assert "NVIDIA H20: sm_90a, 78 SMs" in said
    assert "WARNING: an SM has 2.0 times the DRAM bandwidth" in said
    assert "quickstart on NVIDIA H20: 12 cells of 4 contracts" in said
    assert "gdntune sweep quickstart --out results/mine" in said


def test_kernel_engineer(walk):
    """Two values of an outside kernel's knob are timed, and a table of them is used. Fault: in a
    fresh checkout the walk's own folder had no parent.
    """
    said = walk(WALKS / "kernel_engineer.sh")
    assert all(f"own_kernel,own_kernel.rw{rows},decode" in said for rows in (4, 8))
    # Fault: columns were cut by their numbers, so that a new one took the times out of sight.
    assert "kernel,variant,role,verified,median_us,over_floor\n" in said
    assert "own_kernel.rw16" not in said and "variant: own_kernel.rw" in said


def test_researcher(walk, tmp_path):
    """A report's CSV becomes a plot."""
    header = synthetic.run()
    folder = synthetic.write(tmp_path / "run", header, synthetic.records(header, batches=(1, 64)))
    walk("gdntune", "report", folder, "--out", "rows.csv")
    assert walk("python", WALKS / "researcher.py", "rows.csv", "plot.svg").endswith("plot.svg\n")
    assert "<svg" in (tmp_path / "plot.svg").read_text()


def test_make_keeps_bytecode():
    """Fault: packages are installed without bytecode, and where PYTHONDONTWRITEBYTECODE was set nobody
    wrote any: each process of `make test` compiled torch's sources anew, 3 s of CPU time.
    """
    said = subprocess.run(
        ["make", "-s", "-C", str(ROOT), "--eval=shown: ; @env", "shown"],
        capture_output=True, text=True, check=True,
        env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1", "SEEN": "yes"},
    ).stdout.splitlines()  # fmt: skip
    assert "SEEN=yes" in said and not any(x.startswith("PYTHONDONTWRITEBYTECODE=") for x in said)
