"""What stands before a state's loads in machine code, with a fence and without one."""

import dataclasses
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import early_loads
import pytest

from gdntune import kernels
from gdntune.kernels import recurrent_config, wy_block_config
from gdntune.problem import Contract

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux alone")

KDA = {"op": "kda_decode", "gate": "softplus", "tokens": 8}
WY = wy_block_config.Knobs(32, 4)
ROWS = recurrent_config.Knobs(64, 8, 8, 16, 128, early=True, spread=True)
# kernel, contract, a setting without a fence, the state's loads, and waits for memory with a fence
CASES = (
    ("wy_block", Contract(tokens=4), WY, 16, 1),
    ("wy_block", Contract(**KDA, mode="frozen"), WY, 16, 1),
    ("recurrent", Contract(tokens=4), ROWS, 8, 2),
)


def test_a_fence_keeps_arithmetic_behind_the_states_loads():
    """Fault: ptxas computed KDA's gates, and widened GDN's keys, ahead of the state's loads, which were
    a memory's latency late; the warp's barrier in the source kept nothing back. `recurrent` waited
    for one token before it asked for the next.
    """
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = []
        for name, contract, knobs, *expected in CASES:
            kernel = kernels.get(name)
            facts = dict(kernel.facts(contract))
            for fence in (False, True):
                setting = kernel.variant(dataclasses.replace(knobs, fence=fence)).knobs
                made = pool.submit(early_loads.cubin, kernel.compiler, facts, setting, "sm_90a")
                jobs.append((fence, expected, made))
    for fence, (loads, waits), made in jobs:
        found = early_loads.early(early_loads.instructions(made.result()))
        assert found.loads == loads
        if fence:
            assert (found.special, found.floats) == (0, 0) and found.waits <= waits
        else:
            # a compiler that needs no fence: the knob can go
            assert found.waits > waits
