"""The kernel of few tokens by warps that wait for nobody, without a GPU: what it serves, what it takes,
and what it asks for first. tests/ptx runs what it compiles to.
"""

import pytest

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels import wy_quads_config
from gdntune.objects.build import SPILL_LIMIT_BYTES, compile_objects
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract

SLOTS = Contract(tokens=4, intermediate="slots", accepted=True, ragged=True, mode="frozen")
KNOBS = {"threads": 64, "parts": 2}


@pytest.mark.parametrize(
    ("fields", "knobs", "reason"),
    [
        ({"op": "kda_decode", "gate": "softplus"}, {}, "op=kda_decode"),
        ({"layout": "v_last"}, {}, "layout=v_last"),
        ({"tokens": 5}, {}, "tokens=5"),
        ({"tokens": 1}, {}, "tokens=1"),
        ({"state_dtype": "fp32"}, {}, "state_dtype=fp32"),
        ({"input_dtype": "fp16"}, {}, "input_dtype=fp16"),
        ({}, {"threads": 96}, "threads=96"),
        ({}, {"parts": 3}, "parts=3"),
        ({"K": 96}, {}, "parts=2"),
        ({"K": 80}, {"parts": 1}, "K=80"),
        ({}, {"threads": 32}, "parts=2"),
        ({"V": 32}, {"threads": 256, "parts": 1}, "V=32"),
    ],
)
def test_it_refuses_with_a_reason(fields, knobs, reason):
    """What it does not serve, it says."""
    setting = wy_quads_config.Knobs(**{**KNOBS, **knobs})
    assert reason in (wy_quads_config.refuse(Contract(**{"tokens": 2, **fields}), setting) or "")


@pytest.mark.parametrize("tokens", [2, 3, 4])
def test_all_that_it_tries_is_legal(tokens):
    """Its space has settings, each legal, and its default is one of them; no default rule of the
    registry is changed by it.
    """
    device = arch.target("sm_90a")
    contract = Contract(tokens=tokens)
    space = wy_quads_config.space(contract, device)
    assert len(space) >= 6
    assert all(wy_quads_config.refuse(contract, s) is None for s in space)
    assert wy_quads_config.default(contract, 16, device) in space
    assert kernels.default(contract, 16, device).kernel != "wy_quads"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The settings with most registers, and their PTX."""
    device, kernel = arch.target("sm_90a"), kernels.get("wy_quads")
    settings = [{"threads": 128, "parts": 1}, {"threads": 64, "parts": 2}]
    wanted = [
        (object_spec(kernel, SLOTS, kernel.variant(kernel.setting(s)), device), kernel.compiler)
        for s in settings
    ]
    return list(compile_objects(wanted, Store(tmp_path_factory.mktemp("store"))))


def test_it_compiles_without_spills(built):
    """The largest settings keep what they hold in registers."""
    for made in built:
        assert made.ok, made.reason
        assert made.manifest.spill_bytes <= SPILL_LIMIT_BYTES
