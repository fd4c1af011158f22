"""gdntune/tuning/program.py: a timing process as a user's sweep starts it, from nothing."""

import sys

import pytest
from sweeps import TINY

from gdntune.device import arch
from gdntune.objects import build
from gdntune.timing import Policy
from gdntune.tuning import config, worker
from gdntune.tuning.executors import Child
from gdntune.tuning.plan import sweep_plan

pytestmark = pytest.mark.cold


def modules(start):
    """What a process has imported; runs in it."""
    return sorted(sys.modules)


def test_a_check_imports_little(store):
    """Fault: a process that checked imported sympy, for the index of an element, which took longer
    than the checks.
    """
    device = arch.detect("cpu")
    plan = sweep_plan(config.parse(TINY), device)
    (contract,) = plan.tried
    build.compile_objects(plan.objects(), store)
    start = worker.Start(device, 0, str(store.root), (), Policy(l2="warm"))
    with Child(start, "cpu:0", worker.begin_task) as child:
        found = child.run(worker.check_task, contract, plan.variants(contract), timeout=600)
        assert found and all(ok for ok, *_ in found)
        loaded = child.run(modules, timeout=600)
    assert "torch" in loaded and "sympy" not in loaded
