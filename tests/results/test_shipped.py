"""What ships: tables that fit the installed kernels, and configs that load. That published journals
give the tables is in test_judge.
"""

from pathlib import Path

import pytest

from gdntune import kernels
from gdntune.results import table
from gdntune.tuning import config

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "tables").glob("*/*.json"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def name(path):
    """A readable test id."""
    return path.relative_to(ROOT).as_posix()


def test_there_are_tables():
    """The glob below finds something: no table would pass every test."""
    assert {"gdn_decode.json", "kda_decode.json"} <= {p.name for p in TABLES}
    assert len(CONFIGS) >= 4


@pytest.mark.parametrize("path", TABLES, ids=name)
def test_shipped_tables_are_not_stale(path):
    """A kernel that changed makes its table stale: sweep again before it ships."""
    loaded = table.load(path)
    assert table.stale(loaded, kernels.fingerprints(loaded.device.kind)) == []
    assert {rule.when.op for rule in loaded.rules} == {path.stem}
    assert path.parent.name == loaded.device.slug


@pytest.mark.parametrize("path", TABLES, ids=name)
def test_every_choice_of_a_shipped_table_is_legal(path):
    """Each variant that a rule names serves the rule's contract."""
    loaded = table.load(path)
    for rule in loaded.rules:
        for interval in rule.intervals:
            assert kernels.refuse(rule.when, loaded.variant(interval.variant)) is None


@pytest.mark.parametrize("path", CONFIGS, ids=name)
def test_shipped_configs_load(path):
    """Every shipped config has cells, under its own name."""
    loaded = config.load(path)
    assert loaded.name == path.stem
    assert loaded.problems()
