"""The core alone, as an engine installs it: without what sweeps, compiles CUDA kernels or reports."""

import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec

from gdntune.objects.store import Manifest, Store, write_bundle

PYPROJECT = (Path(__file__).parent.parent / "pyproject.toml").read_text()
# The modules of the extra `sweep`, where they differ from the packages' names.
MODULES = {
    "nvidia-cutlass-dsl": "cutlass",
    "cupti-python": "cupti",
    "nvidia-ml-py": "pynvml",
    "pyyaml": "yaml",
    "pyelftools": "elftools",
}
BLOCK = """
import sys
for name in {blocked}:
    sys.modules[name] = None
"""
DECODE = """
import torch, gdntune
B, H, HV, K, V = 2, 2, 4, 64, 64
q = torch.randn(B, 1, H, K)
v = torch.randn(B, 1, HV, V)
gate = torch.randn(B, 1, HV)
state = torch.zeros(B, HV, V, K)
zeros = torch.zeros(HV)
gdntune.gated_delta_rule_decode(
    q, q, v, a=gate, b=gate, A_log=zeros, dt_bias=zeros, initial_state=state
)
assert state.abs().sum() > 0
print("decoded", sorted(m for m in {blocked} if sys.modules.get(m)))
"""


def sweep_modules():
    """What the extra `sweep` brings, by the names that are imported."""
    listed = re.search(r"^sweep = \[\n(.*?)^\]", PYPROJECT, re.MULTILINE | re.DOTALL)
    names = re.findall(r'^  "([A-Za-z0-9-]+)', listed[1], re.MULTILINE)
    assert len(names) == 8
    return [MODULES.get(name, name) for name in names]


def python(code, blocked=None, **environment):
    """A fresh interpreter in which modules, by default the extra's, cannot be imported."""
    blocked = blocked or sweep_modules()
    return subprocess.run(
        [sys.executable, "-c", (BLOCK + code).format(blocked=blocked)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_core_decodes_with_and_without_a_compiler(tmp_path):
    """Fault: a first call without the extras raised ModuleNotFoundError. What it compiled,
    as a bundle, is loaded and called where there is no g++, and nothing is written.
    """
    done = python(DECODE, GDNTUNE_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "decoded []\n"
    store = Store(tmp_path / "objects")
    manifests = [
        msgspec.json.decode(p.read_bytes(), type=Manifest)
        for p in store.root.rglob("manifest.json")
    ]
    write_bundle(store, [m.spec for m in manifests], tmp_path / "bundle")
    done = python(
        DECODE,
        GDNTUNE_CACHE_DIR=str(tmp_path / "none"),
        GDNTUNE_BUNDLE=str(tmp_path / "bundle"),
        PATH=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "decoded []\n" and not (tmp_path / "none").exists()


def test_without_the_dsl_one_error_says_what_to_do(tmp_path):
    """CUDA objects need the DSL: its absence names the extra, and a bundle as the other way."""
    code = """
from gdntune import kernels
from gdntune.device import arch
from gdntune.objects.store import object_spec
from gdntune.objects.worker import Task, answer
from gdntune.problem import Contract
device, kernel, contract = arch.target("sm_90a"), kernels.get("recurrent"), Contract()
spec = object_spec(kernel, contract, kernel.variants(contract, device)[0], device)
made = answer(Task(spec, kernel.compiler, "ROOT", "ROOT"))
print(made.fatal, made.reason)
"""
    done = python(code.replace("ROOT", str(tmp_path)))
    assert done.stdout.startswith("True cannot import cutlass"), done.stderr
    assert "pip install 'gdntune[sweep]'" in done.stdout and "GDNTUNE_BUNDLE" in done.stdout
    # Fault: beside an engine, which brings the DSL alone, each object was compiled, then lost for
    # "No module named 'elftools'".
    done = python(code.replace("ROOT", str(tmp_path)), blocked=["elftools"])
    assert done.stdout.startswith("True cannot import elftools"), done.stderr
    assert "pip install 'gdntune[sweep]'" in done.stdout and "GDNTUNE_BUNDLE" in done.stdout


def test_the_command_line_names_its_extra():
    """Fault: `gdntune` without typer was a traceback."""
    done = python("import runpy; runpy.run_module('gdntune', run_name='__main__')")
    assert done.returncode == 1
    assert re.fullmatch(
        r"gdntune: the command line needs \w+: pip install 'gdntune\[sweep\]'\n", done.stderr
    )
