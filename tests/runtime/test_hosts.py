"""Processes as engines make them: a call after a fork, a store that cannot be written, a user
without an entry in passwd. Each works, or one error says what to do.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PRELUDE = f"""
import os, sys
sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]
import torch, gdntune
from test_tensors import gdn, packed
def call():
    one, two = gdn(), packed()
    gdntune.gated_delta_rule_decode(**one)
    gdntune.gated_delta_rule_packed_decode(**two)
    return [float(x.float().sum()) for x in (one["output"], one["initial_state"], two["output"])]
"""
# A child of a process that has called: it inherits records, headers and loaded functions, and
# OpenMP's threads are gone.
FORK = """
torch.set_num_threads(2)
wanted = [call(), call()][1]
pid = os.fork()
if pid == 0:
    os._exit(0 if call() == wanted and call() == wanted else 3)
print("child", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), "parent", call() == wanted)
"""
# A worker that never called, of a parent that has.
SPAWN = """
import multiprocessing
call()
def work(right, wanted): right.value = call() == wanted
if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    right = context.Value("b", False)
    worker = context.Process(target=work, args=(right, call()), daemon=True)
    worker.start(); worker.join()
    print("child", worker.exitcode, "parent", bool(right.value))
"""
NO_PASSWD = """
import pwd
def none(*_): raise KeyError("getpwuid(): uid not found: 12345")
pwd.getpwuid = none
print("called", len(call()))
"""


def run(code, **env):
    """What a process prints; it is not waited for longer than five minutes."""
    kept = {n: x for n, x in os.environ.items() if n not in ("HOME", "XDG_DATA_HOME")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code], env={**kept, "PYTHONPATH": os.pathsep.join(sys.path), **env},
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@pytest.mark.parametrize("code", [FORK, SPAWN], ids=["fork", "daemonic worker"])
def test_a_call_after_a_fork(code):
    """The child's calls are right, as are the parent's afterwards."""
    assert run(code, HOME="/tmp") == "child 0 parent True"


def test_no_home_and_no_passwd_entry():
    """A container's user has neither; objects are in GDNTUNE_CACHE_DIR."""
    assert run(NO_PASSWD) == "called 3"


def test_a_store_that_is_complete_and_read_only(tmp_path):
    """All objects are there and none can be written, as in an image's layer: calls are served."""
    import shutil

    root = tmp_path / "store"
    assert run("print(len(call()))", HOME="/tmp", GDNTUNE_CACHE_DIR=str(root)) == "3"
    shutil.rmtree(root / "objects" / "linked")
    places = [root, *(p for p in root.rglob("*") if p.is_dir())]
    for place in places:
        place.chmod(0o555)
    try:
        # root writes anywhere: what would be written is refused by other means
        code = "import pathlib, gdntune.objects.store as s\n" + (
            "def refuse(*_, **__): raise OSError(30, 'Read-only file system')\n"
            "s.atomic_write = refuse\n"
            "link = s.link\n"
            f"s.link = lambda o, library, d: refuse() if str(library).startswith({str(root)!r}) else link(o, library, d)\n"
        )
        assert run(code + "print(len(call()))", HOME="/tmp", GDNTUNE_CACHE_DIR=str(root)) == "3"
    finally:
        for place in places:
            place.chmod(0o755)
