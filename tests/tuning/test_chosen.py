"""What tables can choose, compiled and packed: `gdntune compile --table`, and wheels of kernels."""

import json
import os
import subprocess
import sys
from pathlib import Path

import dependent
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from gdntune import kernels
from gdntune.cli.app import app
from gdntune.device import arch
from gdntune.errors import UnsupportedProblem
from gdntune.objects.store import Store, read_bundle
from gdntune.problem import Contract
from gdntune.results import table
from gdntune.results.table import Interval, Origin, Rule, Table, TableVariant
from gdntune.tuning.chosen import chosen_objects, contracts_of
from gdntune.tuning.kernel_wheel import make_wheel, shipped_for

RUNTIME_TESTS = Path(__file__).parents[1] / "runtime"
CONTRACT = Contract(K=64, V=32, state_dtype="fp32")
CONFIG = """
name: two
device: cpu
model: {H: 1, HV: 1, K: 64, V: 32}
batch: [1]
tokens: [1]
contracts: [{state_dtype: fp32}]
"""


@pytest.fixture
def given(tmp_path):
    """A table of this CPU whose one rule chooses between two variants."""
    device = arch.detect("cpu")
    variants = kernels.get("cpu_recurrent").variants(CONTRACT, device)
    first, last = variants[0], variants[-1]
    made = Table(
        schema="gdntune.table/1", device=device, software={}, policy={"timer": "cpu"},
        kernels={"cpu_recurrent": kernels.fingerprints("cpu")["cpu_recurrent"]},
        evidence=Origin("0", "t", "0", "2026-01-01T00:00:00+00:00", 2, 2, {}, 0.0, 0.0),
        variants={v.id: TableVariant(v.kernel, v.knobs) for v in (first, last)},
        rules=(Rule(CONTRACT, (Interval(1, 99, first.id), Interval(100, None, last.id))),),
    )  # fmt: skip
    table.save(made, tmp_path / "table.json")
    return tmp_path / "table.json"


def test_just_what_a_table_can_choose(given):
    """Two of a contract's variants, and an error for an op that no table speaks of."""
    device = arch.detect("cpu")
    assert contracts_of([given]) == [CONTRACT]
    labels = {spec.label for spec, _ in chosen_objects([CONTRACT], [given, given], device)}
    assert labels == set(table.load(given).variants)
    assert len(labels) < len(kernels.variants(CONTRACT, device))
    with pytest.raises(UnsupportedProblem, match="no given table has rules for kda_decode"):
        chosen_objects([Contract(op="kda_decode", gate="softplus")], [given], device)


def test_what_calls_take_without_dependent_launch_and_with_it(tmp_path):
    """By default what the table chose for calls without it; both where both are asked for."""
    made = dependent.write(tmp_path / "apart.json")

    def labels(*allowed):
        found = chosen_objects([dependent.CONTRACT], [made.path], made.device, *allowed)
        return {spec.label for spec, _ in found}

    # what `check_table` calls besides, under the table's policy
    around = {"flush", "producer"}
    assert labels() == {made.alone.id} | around
    assert labels(True) == {made.alone.id, *(v.id for v in made.early)} | around
    # chosen in a chain without dependent launch: calls that allow it take no other
    found = table.load(made.path)
    rule = Rule(dependent.CONTRACT, found.rules[0].alone)
    table.save(replace(found, rules=(rule,)), made.path)
    assert labels(True) == {made.alone.id} | around
    cold = replace(rule, policy={"timer": "graph", "l2": "cold-clean"})
    table.save(replace(found, rules=(cold,)), made.path)
    assert labels() == {made.alone.id, "flush"}


def test_the_shipped_tables_choices_need_no_gpu():
    """Those of sm_90a are known here, without CUDA."""
    device = arch.target("sm_90a")
    tables = shipped_for(device)
    assert len(tables) == 4 and not shipped_for(arch.target("sm_100a"))
    chosen = chosen_objects([Contract()], [p for p in tables if "gdn" in p.name], device)
    assert 1 <= len(chosen) <= 20 and all(spec.arch == "sm_90a" for spec, _ in chosen)


def test_compile_takes_a_table(given, tmp_path):
    """`gdntune compile --table T --bundle DIR` bundles those objects and no more."""
    (tmp_path / "config.yaml").write_text(CONFIG)
    arguments = ["compile", str(tmp_path / "config.yaml"), "--arch", "cpu", "--table", str(given)]
    done = CliRunner().invoke(app, [*arguments, "--bundle", str(tmp_path / "bundle"), "--json"])
    assert done.exit_code == 0, done.output
    said = json.loads(done.stdout)
    assert said["objects"] == 2
    found = {m.spec.label for m in read_bundle(tmp_path / "bundle").objects.values()}
    assert found == set(table.load(given).variants)


def test_a_wheel_of_kernels_is_found_without_configuration(given, tmp_path):
    """Installed in a folder on the path, a call in a fresh process is served by it: no compiler, no
    store, no GDNTUNE_BUNDLE.
    """
    device = arch.detect("cpu")
    wheel = make_wheel(device, [given], tmp_path / "dist", Store())
    again = make_wheel(device, [given], tmp_path / "again", Store())
    assert wheel.name == again.name and wheel.read_bytes() == again.read_bytes()
    installed = tmp_path / "installed"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target",
         str(installed), str(wheel)], check=True,
    )  # fmt: skip
    code = (
        f"import sys; sys.path[:0] = [{str(RUNTIME_TESTS)!r}, {str(RUNTIME_TESTS.parent)!r}]\n"
        "from test_tensors import gdn\nimport gdntune\n"
        "print(float(gdntune.gated_delta_rule_decode(**gdn()).float().sum()))"
    )
    env = {"PATH": "/nowhere", "HOME": "/nowhere", "GDNTUNE_TABLE": str(given)}
    paths = [*sys.path, str(installed)]
    for places, works in ((paths, True), (sys.path, False)):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False,
            env={**env, "PYTHONPATH": os.pathsep.join(places), "GDNTUNE_CACHE_DIR": str(tmp_path / "s")},
        )  # fmt: skip
        assert (done.returncode == 0) is works, done.stderr
    assert "the package gdntune-kernels-" in done.stderr
