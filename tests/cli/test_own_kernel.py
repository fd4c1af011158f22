"""examples/own_kernel and `--kernels`: a kernel from outside is compiled, checked, timed, put into a
table and called.
"""

import dataclasses
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gdntune import kernels
from gdntune.cli.app import app
from gdntune.errors import UnknownName
from gdntune.kernels import cpu_recurrent_config
from gdntune.kernels.fingerprint import fingerprint
from gdntune.results.journal import read
from gdntune.results.records import Check, Trial

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
CONFIG = EXAMPLES / "own_kernel" / "own_kernel.yaml"


@pytest.fixture
def registry(monkeypatch):
    """A registry that is as before afterwards; the examples can be imported."""
    monkeypatch.setattr(kernels, "KERNELS", dict(kernels.KERNELS))
    monkeypatch.setenv("GDNTUNE_KERNELS", "")
    monkeypatch.syspath_prepend(EXAMPLES)
    return kernels.KERNELS


def spawn(*arguments):
    """The command line in a process of its own."""
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{EXAMPLES}"}
    done = subprocess.run(
        [sys.executable, "-m", "gdntune", *map(str, arguments)],
        capture_output=True, text=True, env=env, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_sweep(tmp_path):
    """The guide's command: all three settings are right and timed. That a table of them is used
    stands in tests/test_walks.py.
    """
    folder = tmp_path / "run"
    spawn("sweep", CONFIG, "--kernels", "own_kernel", "--l2", "warm", "--out", folder)
    _, records = read(folder)
    ids = {f"own_kernel.rw{rows}" for rows in (4, 8, 16)}
    checked = {r.variant: r.status for r in records if isinstance(r, Check)}
    timed = {r.variant.id for r in records if isinstance(r, Trial) and r.status == "ok"}
    assert {checked[i] for i in ids} == {"ok"} and ids <= timed


def test_use(registry):
    """A module's kernel is in the registry, once, and in the environment that workers inherit."""
    kernels.use(["own_kernel"])
    kernels.use(["own_kernel"])
    assert registry["own_kernel"].name == "own_kernel"
    assert os.environ["GDNTUNE_KERNELS"] == "own_kernel"


def test_fingerprint_is_of_the_text(registry, tmp_path):
    """A file of an outside kernel counts by its text and name, not by its place."""
    found = []
    for folder, text in (("a", "int x;"), ("b", "int x; // a comment"), ("c", "int y;")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "k.cpp").write_text(text)
        found.append(fingerprint(("own_kernel.compiler", str(tmp_path / folder / "k.cpp"))))
    assert found[0] == found[1] != found[2]


@pytest.mark.parametrize(
    "module, said",
    [
        ("nothing_there", "kernels nothing_there: it cannot be imported.*PYTHONPATH"),
        ("json", "kernels json: it has no KERNEL"),
    ],
)
def test_refused_modules(registry, module, said):
    """A module that is not there or has no kernel is one message and exit code 2."""
    with pytest.raises(UnknownName, match=said):
        kernels.use([module])
    result = CliRunner().invoke(app, ["compile", str(CONFIG), "--arch", "cpu", "--kernels", module])
    assert result.exit_code == 2 and f"kernels {module}" in result.stderr


def test_name_that_is_taken(registry, monkeypatch):
    """A kernel may not take the place of another."""
    module = types.ModuleType("taken")
    module.KERNEL = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "taken", module)
    with pytest.raises(UnknownName, match="has no KERNEL"):
        kernels.use(["taken"])
    module.KERNEL = dataclasses.replace(cpu_recurrent_config.KERNEL, facts=lambda c: {})
    with pytest.raises(UnknownName, match="'cpu_recurrent' has the name of another"):
        kernels.use(["taken"])
