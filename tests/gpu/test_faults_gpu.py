"""What a broken variant does to a sweep on a GPU: an illegal access and a kernel that never ends
cost themselves alone.
"""

import re
import time

import pytest
from fakes import faulty

from gdntune import search
from gdntune.device.arch import detect
from gdntune.results import table
from gdntune.results.records import Cell, Check, Trial
from gdntune.runtime.dispatch import runtime
from gdntune.tuning import attempts as trials
from gdntune.tuning import config

pytestmark = pytest.mark.gpu

CONFIG = """
name: broken
device: cuda
model: {H: 1, HV: 2}
batch: [2, 7]
tokens: [1]
contracts: [{state_dtype: bf16}]
kernels:
  recurrent: {tile_v: [32], ilp: [2], vec: [8], threads: [128], early: [true]}
  faulty_cuda: {fault: FAULT, late: LATE}
search: {screen_rounds: 3, keep: 3, final_rounds: 20, max_cell_seconds: 2}
"""
# What objects.py compiles for these sweeps: the faulty kernel is Python.
HONEST = CONFIG.replace("  faulty_cuda: {fault: FAULT, late: LATE}\n", "")


@pytest.fixture
def planted(monkeypatch):
    """The faulty kernels in this process's registry, and hangs that are found soon."""
    faulty.plant(monkeypatch.setitem, monkeypatch.setattr)
    # a timing process needs some seconds for its CUDA context before its first answer
    for name, seconds in (("CHECK_TIMEOUT_S", 20.0), ("CHECK_EACH_S", 0.5), ("CELL_GRACE_S", 15.0)):
        monkeypatch.setattr(trials, name, seconds)


def sweep(folder, faults, late):
    """A sweep of the honest variants and some faulty ones."""
    text = CONFIG.replace("FAULT", f"[{', '.join(faults)}]").replace("LATE", str([late]).lower())
    store = runtime("cuda").store
    return search.sweep(
        config.parse(text), folder, device=detect("cuda"), store=store, policy=faulty.Planted()
    )


def assert_a_table(outcome, folder, victims):
    """Both cells are timed, the table is valid and names no victim."""
    assert [(r.problem.B, r.status) for r in outcome.records if isinstance(r, Cell)] == [
        (2, "ok"),
        (7, "ok"),
    ]
    assert table.load(folder / "table.json") == outcome.table
    assert not victims & set(outcome.table.variants)


def assert_the_gpu_works():
    """A call of this process is right afterwards, and the GPU is not still busy with a kernel that
    was killed.
    """
    import torch

    start = time.monotonic()
    assert float(torch.ones(1000, device="cuda").sum()) == 1000
    assert time.monotonic() - start < 30


# what the journal says of a fault that shows in the check
SHOWS = {
    "wild": ("crashed", "illegal memory access|CUDA|died"),
    "leak": ("crashed", "memory|died"),
    "wrong": ("failed", r"output\["),
    "nan": ("failed", r"output\["),
    "touches": ("failed", r"state\["),
    "hang": ("timeout", "no answer"),
}


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize(
    "faults", [["wild", "leak", "wrong", "nan", "touches"], ["hang"]], ids=", ".join
)
def test_broken_variants_fail_their_check(faults, tmp_path):
    """An illegal access, a hang, memory that is kept and wrong results are journalled, each with
    its reason; the others are timed.
    """
    outcome = sweep(tmp_path, faults, False)
    victims = {f"faulty_cuda.{fault}" for fault in faults}
    checks = {r.variant: r for r in outcome.records if isinstance(r, Check)}
    for fault in faults:
        found, (status, reason) = checks.pop(f"faulty_cuda.{fault}"), SHOWS[fault]
        assert found.status == status, found.reason
        assert re.search(reason, found.reason), found.reason
    assert checks and all(r.status == "ok" for r in checks.values()), checks
    assert not any(isinstance(r, Trial) and r.variant.id in victims for r in outcome.records)
    assert_a_table(outcome, tmp_path, victims)
    assert_the_gpu_works()


@pytest.mark.usefixtures("planted")
@pytest.mark.parametrize("fault, status", [("wild", "crashed"), ("hang", "timeout")])
def test_variants_that_break_when_they_are_timed(fault, status, tmp_path):
    """One that passes its check and breaks at one batch size is a failed trial there; the cell is
    timed without it.
    """
    outcome = sweep(tmp_path, [fault], True)
    victim = f"faulty_cuda.{fault}.late"
    assert [r.status for r in outcome.records if isinstance(r, Check) and r.variant == victim] == [
        "ok"
    ]
    trials = [r for r in outcome.records if isinstance(r, Trial) and r.role == "decode"]
    failed = [(r.problem.B, r.variant.id, r.status) for r in trials if r.status != "ok"]
    assert failed == [(faulty.LATE_BATCH, victim, status)]
    assert_a_table(outcome, tmp_path, {victim})
    assert_the_gpu_works()
