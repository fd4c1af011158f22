"""Contracts and calls of the public functions, for their tests."""

import torch

import gdntune
from gdntune.problem import Contract

CONTRACTS = {
    "T=1 pool": Contract(state_dtype="fp32"),
    "T=3 bf16": Contract(tokens=3),
    "rows": Contract(pool=False, tokens=2, state_dtype="fp32"),
    "dense frozen": Contract(tokens=3, intermediate="dense", mode="frozen", state_dtype="fp32"),
    "indexed update": Contract(tokens=2, intermediate="indexed", state_dtype="fp32"),
    "slots accepted": Contract(
        tokens=3, intermediate="slots", accepted=True, mode="frozen", state_dtype="fp32"
    ),
    "slots update": Contract(tokens=2, intermediate="slots", mode="update", state_dtype="fp32"),
    "ragged": Contract(tokens=4, ragged=True, state_dtype="fp32"),
    "v_last log": Contract(
        layout="v_last",
        gate="log",
        beta="given",
        state_dtype="fp32",
        gate_dtype="fp32",
        beta_dtype="fp32",
    ),
    "kda log": Contract(op="kda_decode", gate="log", beta="given", tokens=2, state_dtype="fp32"),
    "kda softplus": Contract(op="kda_decode", gate="softplus", state_dtype="fp32"),
    "kda lower_bound": Contract(op="kda_decode", gate="lower_bound", tokens=2, state_dtype="fp32"),
}


def int32(*shape):
    """An index tensor of zeros."""
    return torch.zeros(shape, dtype=torch.int32)


# contract, what is changed of its right call, and what the message says
ONE, DENSE, SLOTS, RAGGED = "T=1 pool", "dense frozen", "slots accepted", "ragged"


def packed(**changes):
    """A packed call of 3 requests, H=2, HV=4, K=V=128, with some arguments changed."""
    arguments = {
        "mixed_qkv": torch.zeros(3, 2 * 2 * 128 + 4 * 128, dtype=torch.bfloat16),
        "a": torch.zeros(3, 4),
        "b": torch.zeros(3, 4),
        "A_log": torch.zeros(4),
        "dt_bias": torch.zeros(4),
        "initial_state": torch.zeros(5, 4, 128, 128),
        "initial_state_indices": int32(3),
    }
    return gdntune.gated_delta_rule_packed_decode(**{**arguments, **changes})
