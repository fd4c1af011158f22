"""The layer's settings: how states are stored, and what the default rule chooses for it."""

import dataclasses

import pytest

from gdntune.device import arch, gpus
from gdntune.kernels.layer_config import KERNEL, Knobs
from gdntune.problem import Contract

STEP = {"norm": "silu", "conv": "silu"}
DRAFTS = Contract(**STEP, tokens=4, mode="frozen", intermediate="slots", accepted=True)


def test_bulk_stores_want_a_gpu_that_has_them():
    """Before Hopper no setting that is tried stores in bulk; from there on drafts' do."""
    before = {s.stores for s in KERNEL.space(DRAFTS, gpus.named("rtx 4090"))}
    assert before == {"plain", "first"}
    assert {"bulk", "bulkfirst"} <= {s.stores for s in KERNEL.space(DRAFTS, arch.target("sm_90a"))}


def test_bulk_stores_take_shared_memory_and_rows_of_keys():
    """Two places for what a block holds; rows of V side by side, as v_last has them, are refused."""
    plain = Knobs(64, 8, 8, 16, 128, early=True, spread=True, row=True)
    bulk = dataclasses.replace(plain, stores="bulk")
    more = KERNEL.block(DRAFTS, bulk).shared_bytes - KERNEL.block(DRAFTS, plain).shared_bytes
    assert 2 * 64 * 128 * 2 <= more < 2 * 64 * 128 * 2 + 256
    assert KERNEL.refuse(DRAFTS, bulk) is None
    v_last = Knobs(128, 1, 8, 8, 128, early=True, stores="bulk")
    assert "k_last" in KERNEL.refuse(DRAFTS.replace(layout="v_last"), v_last)


@pytest.mark.parametrize(
    ("contract", "units", "expected"),
    [
        (DRAFTS, 256, "plain"),
        (DRAFTS, 4096, "bulk"),
        (DRAFTS.replace(state_dtype="fp32"), 1024, "bulk"),
        (Contract(**STEP), 4096, "plain"),
    ],
)
def test_the_default_rule_stores_many_drafts_in_bulk(contract, units, expected):
    """Where states are more than L2 holds and each token's is written."""
    assert KERNEL.default(contract, units, gpus.named("h200")).stores == expected


KDA = Contract(op="kda_decode", gate="softplus", state_dtype="fp32", **STEP)
WHOLE = Knobs(128, 4, 4, 16, 256, early=True, spread=True)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"sent": True}, "ahead=1: expected 2"),
        ({"sent": True, "ahead": 2, "copied": True}, "copied=False"),
        ({"once": True, "threads": 64, "ilp": 8}, "a thread a key"),
        ({"window_first": True}, "copied=True"),
        ({"roles": True}, "apart=True, warps that convolve first, and T=1"),
        ({"fence": True, "apart": True, "once": True}, "roles=False"),
    ],
)
def test_rows_that_are_sent_and_decays_once(knobs, reason):
    """What they need; and that a setting with it is legal."""
    assert reason in KERNEL.refuse(KDA, dataclasses.replace(WHOLE, **knobs))
    for legal in ({"sent": True}, {"copied": True, "window_first": True}):
        setting = dataclasses.replace(WHOLE, ahead=2, once=True, **legal)
        assert KERNEL.refuse(KDA, setting) is None
        assert setting in KERNEL.space(KDA, arch.target("sm_90a")) or legal.get("sent") is None


def test_decays_once_are_of_one_token_of_kda():
    """Of several tokens they are computed where the tokens are staged; GDN has one a head."""
    for contract in (
        KDA.replace(tokens=2),
        Contract(**STEP, state_dtype="fp32"),
        KDA.replace(conv="none"),
    ):
        assert "KDA at T=1" in KERNEL.refuse(contract, dataclasses.replace(WHOLE, once=True))


def test_the_default_rule_takes_what_was_measured():
    """No table has rows that are sent yet."""
    for units in (32, 128, 512, 8192):
        chosen = KERNEL.default(KDA, units, gpus.named("h200"))
        assert not (chosen.sent or chosen.once or chosen.window_first)


def test_rows_that_are_sent_want_hopper():
    """cp.async.bulk."""
    assert not any(s.sent for s in KERNEL.space(KDA, gpus.named("rtx 4090")))
