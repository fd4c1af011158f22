"""Compiling processes: from wherever a host calls, and what their faults cost."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from gdntune.objects import build
from gdntune.objects.store import ObjectSpec, Store

SPEC = ObjectSpec("made_up", "cpu", {}, {"number": 0}, "any", "f", "t")


def make(facts, knobs, name, folder):
    """A compiler that writes a file, and a line for each time it runs; slow, dead or hung by a knob."""
    if log := knobs.get("log"):
        with open(log, "a") as f:
            f.write("compiled\n")
    if knobs.get("dies"):
        print("what it printed", file=sys.stderr, flush=True)
        os.abort()
    while knobs.get("hangs"):
        time.sleep(1)
    path = folder / f"{name}.o"
    path.write_bytes(b"object")
    return path


def wanted(**knobs):
    """An object of `make` with these knobs."""
    return msgspec.structs.replace(SPEC, knobs=knobs), f"{__name__}:make"


def test_a_crash_costs_its_own_object_alone(tmp_path):
    """With one process for all: what came before and after the crash is kept, and the reason has
    what the compiler printed.
    """
    specs = [wanted(number=1), wanted(dies=True), wanted(number=2)]
    first, dead, last = build.compile_objects(specs, Store(tmp_path), jobs=1)
    assert first.ok and last.ok
    assert "process died (exit code -6)" in dead.reason and "what it printed" in dead.reason


def test_a_hung_compiler_is_ended(monkeypatch, tmp_path):
    """A compiler that never returns is given up after its time, and nothing of it is left."""
    monkeypatch.setattr(build, "COMPILE_TIMEOUT_S", 0.5)
    (hung,) = build.compile_objects([wanted(hangs=True)], Store(tmp_path))
    assert hung.reason == "compiling took more than 0 s"


def test_an_object_is_compiled_once(tmp_path):
    """Two threads that want one object, each with a process of its own, compile it once."""
    spec, compiler = wanted(log=str(tmp_path / "log"))
    threads = [
        threading.Thread(target=build.compile_objects, args=([(spec, compiler)], Store(tmp_path)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "log").read_text() == "compiled\n"
    assert Store(tmp_path).find(spec)


def test_the_hosts_main_module_is_left_alone(tmp_path):
    """Fault: while objects were compiled `__main__` had neither file nor spec, and what another
    thread spawned then failed.
    """
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")
    before = [getattr(main, name, None) for name in names]
    seen = []
    build.compile_objects(
        [wanted(number=1), wanted(number=2)],
        Store(tmp_path),
        jobs=1,
        on_done=lambda _: seen.append([getattr(main, name, None) for name in names]),
    )
    assert seen == [before, before]


HOST = """
import multiprocessing, os, sys, threading
from pathlib import Path
sys.path.insert(0, {tests!r})
import test_farm
from gdntune.objects import build
from gdntune.objects.store import Store

ROOT = Path(sys.argv[1])

def compiles(number):
    assert build.compile_objects([test_farm.wanted(number=number)], Store(ROOT))[0].ok

def nothing():
    pass

if __name__ == "__main__":
    spawn = multiprocessing.get_context("spawn")
    {body}
"""
DAEMON = """
    child = spawn.Process(target=compiles, args=(1,), daemon=True)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""
THREAD = """
    thread = threading.Thread(target=lambda: [compiles(n) for n in range(3)])
    thread.start()
    codes = []
    while thread.is_alive() or not codes:
        child = spawn.Process(target=nothing)
        child.start()
        child.join()
        codes.append(child.exitcode)
    thread.join()
    sys.exit(any(codes) or not all(Store(ROOT).find(test_farm.wanted(number=n)[0]) for n in range(3)))
"""
FORK = """
    compiles(1)
    pid = os.fork()
    if not pid:
        compiles(2)
        os._exit(0)
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


@pytest.mark.parametrize("body", [DAEMON, THREAD, FORK], ids=["daemon", "thread", "fork"])
def test_hosts_of_all_kinds_compile(body, tmp_path):
    """Fault: in a daemonic process, as engines' workers are, nothing compiled ("daemonic processes
    are not allowed to have children"), and a spawn in another thread meanwhile failed.
    """
    script = tmp_path / "host.py"
    script.write_text(HOST.format(tests=str(Path(__file__).parent), body=body.strip()))
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
