"""Which settings of the floor's kernel are timed at a cell, and what they are called."""

import pytest

from gdntune import kernels
from gdntune.device.arch import target
from gdntune.kernels.spec import BY_INDEX, FLOORS, IN_ORDER, floor_name
from gdntune.problem import Contract, Problem


@pytest.mark.parametrize(
    ("B", "pool", "names"),
    [(1, True, {IN_ORDER}), (256, True, set(FLOORS)), (256, False, {IN_ORDER})],
)
def test_floors_at_a_cell(B, pool, names):
    """Fault: large pools had the floor by the index alone, which hid 2 to 5% at B=256. States in
    order are timed at every cell; the pool's index besides, where L2 does not hold the states.
    """
    device, problem = target("sm_90a"), Problem(Contract(pool=pool), B, 16, 64)
    found = kernels.at(problem, device, kernels.variants(problem.contract, device, "floor"))
    assert {floor_name(v) for v in found} == names
    assert FLOORS == (IN_ORDER, BY_INDEX)
