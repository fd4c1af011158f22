"""The kernel of two to four tokens in one pass, without a GPU: what it serves, what it takes, and
how it addresses memory. tests/ptx runs what it compiles to.
"""

import pytest

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels import wy_lanes_config, wy_quads_config
from gdntune.objects.build import SPILL_LIMIT_BYTES, compile_objects
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract

SLOTS = Contract(tokens=4, intermediate="slots", accepted=True, ragged=True, mode="frozen")
KNOBS = {"ilp": 1, "lanes": 16, "threads": 128}


@pytest.mark.parametrize(
    ("fields", "knobs", "reason"),
    [
        ({"op": "kda_decode", "gate": "softplus"}, {}, "op=kda_decode"),
        ({"layout": "v_last"}, {}, "layout=v_last"),
        ({"tokens": 5}, {}, "tokens=5"),
        ({"tokens": 1}, {}, "tokens=1"),
        ({}, {"threads": 96}, "threads=96"),
        ({}, {"lanes": 12}, "lanes=12"),
        ({"K": 96}, {}, "K=96"),
        ({}, {"ilp": 3}, "ilp=3"),
        ({}, {"shared": True, "threads": 32}, "shared=True"),
        ({"V": 32}, {"ilp": 8, "lanes": 4}, "ilp=8"),
        ({"V": 32}, {"ilp": 4, "lanes": 8}, "V=32"),
        ({"tokens": 4}, {"lanes": 4}, "would spill"),
    ],
)
def test_it_refuses_with_a_reason(fields, knobs, reason):
    """What it does not serve, it says."""
    setting = wy_lanes_config.Knobs(**{**KNOBS, **knobs})
    assert reason in (wy_lanes_config.refuse(Contract(**{"tokens": 2, **fields}), setting) or "")


@pytest.mark.parametrize(("config", "least"), [(wy_lanes_config, 12), (wy_quads_config, 6)])
@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_all_that_they_try_is_legal(tokens, config, least):
    """A space has settings, each legal, and the default is one of them; no default rule of the
    registry is changed by it. So it is with `wy_quads`.
    """
    device = arch.target("sm_90a")
    contract = Contract(tokens=tokens)
    space = config.space(contract, device)
    assert len(space) >= least
    assert all(config.refuse(contract, s) is None for s in space)
    assert config.default(contract, 16, device) in space
    assert kernels.default(contract, 16, device).kernel != config.KERNEL.name


def test_it_compiles_without_spills(tmp_path):
    """The largest settings keep what they hold in registers."""
    device, kernel = arch.target("sm_90a"), kernels.get("wy_lanes")
    settings = [
        (Contract(tokens=4), {**KNOBS, "ilp": 2, "shared": True}),
        (SLOTS, {**KNOBS, "lanes": 8}),
    ]
    wanted = [
        (object_spec(kernel, c, kernel.variant(kernel.setting(s)), device), kernel.compiler)
        for c, s in settings
    ]
    for built in compile_objects(wanted, Store(tmp_path)):
        assert built.ok, built.reason
        assert built.manifest.spill_bytes <= SPILL_LIMIT_BYTES
