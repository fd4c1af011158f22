"""Worker processes."""

import os
import subprocess
import sys

SCRIPT = """
import gdntune
from gdntune.problem import Contract

print("the program runs", flush=True)
gdntune.prepare(Contract(state_dtype="fp32", K=64, V=64), "cpu")
print("prepared", flush=True)
"""


def test_a_program_without_a_main_guard_compiles(tmp_path):
    """Fault: a script that was not guarded by `__name__` ran again in every compiling worker, and
    its first cold call failed.
    """
    script = tmp_path / "engine.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "GDNTUNE_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, str(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["the program runs", "prepared", ""]
