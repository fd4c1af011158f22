"""A process's first call: from a bundle or a package it compiles nothing and loads little; from
nothing it says what to do.
"""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_tensors import gdn

import gdntune
from gdntune.device import arch
from gdntune.errors import ToolMissing
from gdntune.objects.store import Store, kernel_package, write_bundle
from gdntune.problem import Contract
from gdntune.runtime import compiling, dispatch

CONTRACT = Contract(K=64, V=32, state_dtype="fp32")
# A call of a process of its own, and what it had to do for that, as JSON.
CALL = """
import sys
sys.path[:0] = {paths!r}
import torch
from test_tensors import gdn
before = set(sys.modules)
from gdntune.kernels import fingerprint
fingerprint._computed = None
import gdntune, json, time
from gdntune.results import table
loaded = []
load = table.load
table.load = lambda path: loaded.append(str(path)) or load(path)
output = gdntune.gated_delta_rule_decode(**gdn())
print(json.dumps({{"sum": float(output.float().sum()), "new": sorted(set(sys.modules) - before),
                  "tables": loaded}}))
"""
# What only compiling, sweeping or reporting needs.
UNNEEDED = (
    "gdntune.objects.build filelock pandas typer rich yaml elftools cutlass cupti pynvml"
    " multiprocessing.pool torch._dynamo"
).split()


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle of what CONTRACT can choose on this CPU."""
    device = arch.detect("cpu")
    runtime = dispatch.Runtime(device, Store())
    runtime.bind(CONTRACT).load_all()
    specs = [runtime.spec(CONTRACT, c.variant) for c in runtime.choices(CONTRACT)]
    folder = tmp_path_factory.mktemp("made") / "bundle"
    write_bundle(runtime.store, specs, folder)
    return folder


def call(tmp_path, paths=(), **env):
    """The call in a fresh process without any compiler, home or store."""
    code = CALL.format(paths=[str(Path(__file__).parent), str(Path(__file__).parents[1]), *paths])
    env = {
        "PATH": "/nowhere", "HOME": "/nowhere", "GDNTUNE_CACHE_DIR": str(tmp_path / "no-store"),
        "PYTHONPATH": os.pathsep.join(sys.path), **env,
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_from_a_bundle(bundle, tmp_path):
    """Fault: the first call decoded both CUDA tables on a CPU and stripped every kernel's source
    for its fingerprint: 0.4 s. It needs no compiler, and no library of those that compile.
    """
    found = call(tmp_path, GDNTUNE_BUNDLE=str(bundle))
    assert found["sum"] == float(gdntune.gated_delta_rule_decode(**gdn()).float().sum())
    assert not set(UNNEEDED) & set(found["new"])
    assert not any("nvidia" in path for path in found["tables"])


def test_from_nothing_without_a_compiler(tmp_path, monkeypatch):
    """One error, which names the extra that compiles and what does without."""
    monkeypatch.setenv("PATH", "/nowhere")
    runtime = dispatch.Runtime(arch.detect("cpu"), Store(tmp_path / "store"))
    with pytest.raises(ToolMissing) as e:
        runtime.bind(CONTRACT).at(1)
    for part in (
        f"{CONTRACT.key()} has no compiled object here", "g++", "GDNTUNE_BUNDLE=DIR",
        f"the package {kernel_package(runtime.device.arch).replace('_', '-')}",
    ):  # fmt: skip
        assert part in str(e.value)


def test_compiling_is_said_once(tmp_path, monkeypatch, caplog):
    """At INFO, with what would avoid it; of further contracts at DEBUG."""
    monkeypatch.setattr(compiling, "_SAID", set())
    monkeypatch.setattr("gdntune.objects.build.compile_objects", lambda missing, store: [])
    runtime = dispatch.Runtime(arch.detect("cpu"))
    spec = runtime.spec(CONTRACT, runtime.choices(CONTRACT)[0].variant)
    with caplog.at_level(logging.INFO, "gdntune"):
        for _ in range(2):
            compiling.compile_missing([(spec, "")], Store(tmp_path), CONTRACT)
    said = [r.getMessage() for r in caplog.records if "compiling" in r.getMessage()]
    assert len(said) == 1 and "gdntune compile" in said[0] and "gdntune.prepare" in said[0]
