"""tests/gpu/engines_gpu.py on the CPU: what a GPU machine runs once runs here each time."""

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[1] / "gpu" / "engines_gpu.py"


def test_plug_ins_against_fp64(tmp_path):
    """Every call of both engines is served, and right; the exit status says so."""
    out = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, SCRIPT, "run", "vllm", "sglang", "--device", "cpu", "--out", out],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads(out.read_text())
    assert len(results) >= 19
    assert all(r["ok"] and r["served"] for r in results)
