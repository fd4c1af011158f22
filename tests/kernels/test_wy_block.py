"""The kernel whose block works together, without a GPU: what it refuses, and that it compiles without
spills.
"""

import pytest
from ptx.cover import EVERY

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels import wy_block_config
from gdntune.kernels.wy_block_config import KERNEL, Knobs
from gdntune.objects.build import SPILL_LIMIT_BYTES, compile_objects
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract

pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux alone")

KDA = Contract(op="kda_decode", gate="softplus", tokens=8)
TF32 = {"op": "kda_decode", "gate": "softplus", "state_dtype": "fp32"}
# of each kind of contract a setting that is tried
CASES = {
    "GDN": (Contract(tokens=8), Knobs(32, 4, registers=128)),
    "GDN, whole lines": (Contract(tokens=8), Knobs(32, 4, registers=128, lines=True)),
    "GDN, T=3, frozen": (Contract(tokens=3, mode="frozen"), Knobs(32, 4)),
    "GDN, T=16, ragged": (Contract(tokens=16, ragged=True), Knobs(16, 4)),
    "GDN, ahead": (Contract(tokens=4), Knobs(32, 4, ahead=512)),
    "KDA": (KDA, Knobs(32, 4)),
    "KDA, ahead": (KDA, Knobs(32, 4, ahead=256)),
    "KDA, fp32 state": (KDA.replace(state_dtype="fp32"), Knobs(16, 8, threads=256, terms=3)),
    "KDA, TF32": (
        KDA.replace(state_dtype="fp32"),
        Knobs(16, 4, registers=128, tf32=True, ahead=256),
    ),
    "KDA, TF32, whole rows": (
        KDA.replace(state_dtype="fp32"),
        Knobs(32, 4, registers=168, tf32=True, copied=4, lines=True, fence=True, ahead=128),
    ),
    "KDA, TF32, two passes": (
        KDA.replace(state_dtype="fp32"),
        Knobs(16, 4, registers=168, passes=2, tf32=True),
    ),
    "KDA, T=4, fp16, v_last, K=64": (
        KDA.replace(tokens=4, layout="v_last", input_dtype="fp16", state_dtype="fp16", K=64, V=64),
        Knobs(16, 4, threads=256, matrices=True, terms=3),
    ),
    "GDN, v_last": (
        Contract(tokens=8, layout="v_last"),
        Knobs(32, 4, registers=128, matrices=True),
    ),
    "GDN, K=256, dense": (Contract(tokens=8, K=256, V=32, pool=False), Knobs(16, 2)),
}


# Those that hold most in registers: whole lines, more than GDN without them.
FEW = ("GDN, whole lines", "KDA, fp32 state", "KDA, TF32", "KDA, T=4, fp16, v_last, K=64")


def test_it_compiles_without_spills(tmp_path):
    """What it serves compiles for Hopper, all kinds with GDNTUNE_TEST_ALL=1; what ptxas keeps in local
    memory is below the limit beyond which a sweep drops a variant. For Blackwell every kind does,
    see tests/device/test_occupancy.py.
    """
    device = arch.target("sm_90a")
    objects = []
    for contract, knobs in (case for name, case in CASES.items() if EVERY or name in FEW):
        spec = object_spec(KERNEL, contract, KERNEL.variant(knobs), device)
        objects.append((spec, KERNEL.compiler))
    for built in compile_objects(objects, Store(tmp_path)):
        assert built.ok, built.reason
        assert built.manifest.registers > 0
        assert built.manifest.spill_bytes <= SPILL_LIMIT_BYTES


@pytest.mark.parametrize(
    ("fields", "knobs", "reason"),
    [
        ({"intermediate": "dense"}, {}, "intermediate=dense"),
        ({"tokens": 1}, {}, "tokens=1"),
        ({"K": 96}, {}, "K=96"),
        ({}, {"matrices": True}, "matrices=True with layout=k_last"),
        ({"layout": "v_last"}, {"lines": True}, "lines=True with layout=v_last"),
        (
            {"layout": "v_last", "state_dtype": "fp32"},
            {"matrices": True},
            "matrices=True with layout=v_last, state_dtype=fp32",
        ),
        ({}, {"ahead": 500}, "ahead=500: expected 0 or a power of two"),
        ({"ragged": True}, {"ahead": 512}, "ahead=512 with layout=k_last, ragged=True"),
        ({"layout": "v_last"}, {"ahead": 512}, "ahead=512 with layout=v_last"),
        ({}, {"pdl": "last"}, "pdl='last': expected one of none, first, state"),
        ({}, {"rows": 8}, "rows=8"),
        ({}, {"warps": 3}, "warps=3"),
        ({}, {"warps": 8}, "warps=8 with threads=128"),
        ({}, {"threads": 64}, "threads=64"),
        ({}, {"passes": 3}, "passes=3"),
        ({}, {"passes": 2}, "V=128"),
        ({}, {"registers": 100}, "registers=100"),
        ({"state_dtype": "fp32"}, {}, "registers a thread"),
        ({}, {"tf32": True}, "tf32=True with op=gdn_decode"),
        ({**TF32, "tokens": 4}, {"tf32": True}, "tokens=4: expected kda_decode, fp32 and 5 to 8"),
        (TF32, {"rows": 16, "tf32": True, "terms": 3}, "tf32=True with terms=3"),
        (TF32, {"rows": 16, "tf32": True, "lines": True}, "tf32=True with lines=True, copied=0"),
        ({}, {"lines": True, "copied": 2}, "copied=2 with lines=True, mode=update: expected 4"),
        (
            {**TF32, "layout": "v_last"},
            {"rows": 16, "tf32": True},
            "layout=v_last: expected k_last",
        ),
        ({**TF32, "K": 64}, {"rows": 16, "tf32": True, "threads": 256}, "at most 128 threads"),
    ],
)
def test_it_refuses_with_a_reason(fields, knobs, reason):
    """What it does not serve, it says."""
    contract = Contract(**{"tokens": 8, **fields})
    setting = Knobs(**{"rows": 32, "warps": 4, **knobs})
    assert reason in (wy_block_config.refuse(contract, setting) or "")


@pytest.mark.parametrize("name", CASES)
def test_spaces_and_defaults_are_legal(name):
    """Settings that are tried are legal and have ids of their own; so is the default of any size,
    which is what the device's default rule names where this kernel leads, and nowhere else.
    """
    contract, knobs = CASES[name]
    device = arch.target("sm_90a")
    found = wy_block_config.space(contract, device)
    assert len({KERNEL.variant(s).id for s in found}) == len(found) > 0
    assert all(wy_block_config.refuse(contract, s) is None for s in (*found, knobs))
    for exponent in range(0, 16, 3):
        default = wy_block_config.default(contract, 1 << exponent, device)
        assert wy_block_config.refuse(contract, default) is None
        named = kernels.default(contract, 1 << exponent, device)
        assert (named.kernel == KERNEL.name) is wy_block_config.leads(contract)


@pytest.mark.parametrize(
    ("fields", "leads"),
    [
        ({"tokens": 2, "mode": "frozen", "state_dtype": "fp32"}, True),
        ({"tokens": 2}, False),
        ({"tokens": 3}, True),
        ({"tokens": 5, "state_dtype": "fp32"}, False),
        ({"tokens": 6, "state_dtype": "fp32"}, True),
        ({"tokens": 8, "mode": "frozen", "intermediate": "dense"}, False),
        ({"tokens": 8, "K": 96, "V": 96}, False),
        ({}, False),
    ],
)
def test_where_it_leads(fields, leads):
    """Outputs alone, and final states of enough tokens; never what it cannot serve."""
    for op in ("gdn_decode", "kda_decode") if "K" not in fields else ("gdn_decode",):
        gate = {"gate": "softplus"} if op == "kda_decode" else {}
        assert wy_block_config.leads(Contract(op=op, **fields, **gate)) is leads
