"""gdntune/flashinfer_rule.py: FlashInfer's choice among our variants."""

import pytest

from gdntune import kernels
from gdntune.device.arch import target
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract
from gdntune.results import flashinfer_rule

SMS = 132


@pytest.mark.parametrize(
    ("state", "tokens", "mode", "work_units", "knobs"),
    [
        ("bf16", 2, "update", 1024, (128, 4, 8, 16)),
        ("bf16", 2, "update", 1023, (64, 4, 8, 16)),
        ("bf16", 4, "frozen", 128, (32, 4, 8, 16)),
        ("bf16", 2, "update", 127, (16, 4, 4, 32)),
        ("bf16", 1, "update", 512, (64, 4, 8, 16)),
        ("bf16", 1, "update", 511, (64, 4, 4, 32)),
        ("bf16", 1, "update", 264, (64, 4, 4, 32)),
        ("bf16", 1, "update", 263, (32, 4, 4, 32)),
        ("bf16", 1, "update", 129, (32, 4, 4, 32)),
        ("bf16", 1, "update", 128, (16, 4, 4, 32)),
        ("fp32", 1, "update", 5000, (16, 2, 4, 32)),
        ("fp32", 2, "update", 64, (8, 2, 4, 32)),
        ("fp32", 2, "update", 65, (16, 4, 4, 32)),
        ("fp32", 2, "update", 448, (16, 2, 4, 32)),
        ("fp32", 3, "update", 448, (32, 4, 4, 32)),
        ("fp32", 2, "update", 449, (32, 4, 4, 32)),
        ("fp32", 2, "update", 1024, (32, 4, 4, 32)),
        ("fp32", 2, "update", 1025, (64, 8, 4, 32)),
        ("fp32", 2, "frozen", 1025, (64, 4, 4, 32)),
        ("fp32", 3, "update", 1025, (64, 4, 4, 32)),
    ],
)  # fmt: skip
def test_the_thresholds(state, tokens, mode, work_units, knobs):
    """Each row of the table at the top of the module, at its edges."""
    c = Contract(state_dtype=state, tokens=tokens, mode=mode)
    found = flashinfer_rule.wanted(c, work_units, SMS)
    assert tuple(found[name] for name in ("tile_v", "ilp", "vec", "lanes")) == knobs
    assert found["threads"] == 128 and found.keys() == {"tile_v", "ilp", "vec", "lanes", "threads"}


@pytest.mark.parametrize(
    "changes",
    [
        {"op": "kda_decode", "gate": "softplus"},
        {"gate": "log"},
        {"layout": "v_last"},
        {"state_dtype": "fp16"},
        {"K": 64},
        {"V": 64},
        {"ragged": True},
    ],
    ids=lambda c: ",".join(c),
)
def test_what_flashinfer_does_not_serve(changes):
    """Contracts without thresholds have no choice."""
    c = Contract(**changes)
    assert flashinfer_rule.wanted(c, 100, SMS) is None
    assert flashinfer_rule.nearest(c, 100, SMS, kernels.variants(c, target("sm_90a"))) is None


def test_narrow_values_clamp_the_tile():
    """fp32 with V=32 takes no tile above V."""
    assert flashinfer_rule.wanted(Contract(state_dtype="fp32", tokens=2, V=32), 5000, SMS)["tile_v"] == 32


@pytest.mark.parametrize("state", ["bf16", "fp32"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8])
def test_the_nearest_is_legal_and_exact_where_it_is_there(state, tokens):
    """Every work units have a legal variant of ours; one with the very knobs is taken where the
    space has it.
    """
    c, device = Contract(state_dtype=state, tokens=tokens), target("sm_90a")
    ours = kernels.variants(c, device)
    by_id = {v.id: v for v in ours}
    for w in (1, 64, 100, 128, 300, 448, 512, 1000, 1024, 5000):
        asked = flashinfer_rule.wanted(c, w, device.sm_count)
        found = by_id[flashinfer_rule.nearest(c, w, device.sm_count, ours)]
        assert kernels.refuse(c, found) is None
        exact = [v.id for v in ours if v.kernel == "recurrent" and all(v.knobs[k] == x for k, x in asked.items())]
        assert not exact or found.id == exact[0]


def test_none_of_ours():
    """Other kernels' variants are none of FlashInfer's kind, so a CPU's sweep has none."""
    assert flashinfer_rule.nearest(Contract(), 100, SMS, [Variant("cpu_recurrent", "x", {"tile_v": 32})]) is None
    assert flashinfer_rule.nearest(Contract(), 100, SMS, []) is None
