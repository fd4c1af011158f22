"""The kernel of few tokens by warps that wait for nobody, without a GPU: what it serves and what it
takes. tests/ptx runs what it compiles to.
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


def test_it_compiles_without_spills(tmp_path):
    """The settings with most registers keep what they hold in registers."""
    device, kernel = arch.target("sm_90a"), kernels.get("wy_quads")
    settings = [{"threads": 128, "parts": 1}, {"threads": 64, "parts": 2}]
    wanted = [
        (object_spec(kernel, SLOTS, kernel.variant(kernel.setting(s)), device), kernel.compiler)
        for s in settings
    ]
    for made in compile_objects(wanted, Store(tmp_path)):
        assert made.ok, made.reason
        assert made.manifest.spill_bytes <= SPILL_LIMIT_BYTES
