"""Other libraries' kernels on a GPU: each entry that is installed agrees with the reference on
small problems of what it serves.
"""

from typing import Any

import pytest
import torch

from gdntune import peers
from gdntune.checking.cases import make_case
from gdntune.checking.reference import decode
from gdntune.errors import ToolMissing
from gdntune.peers.compare import Expected
from gdntune.problem import Contract, Problem

pytestmark = pytest.mark.gpu

STEP: dict[str, Any] = {"norm": "silu", "conv": "silu"}
SLOTS: dict[str, Any] = {"mode": "frozen", "intermediate": "slots"}
CONTRACTS = [
    Contract(),
    Contract(state_dtype="fp32"),
    Contract(state_dtype="fp32", layout="v_last"),
    Contract(tokens=4),
    Contract(tokens=4, mode="frozen"),
    Contract(tokens=8, mode="frozen"),
    Contract(tokens=4, mode="frozen", intermediate="dense"),
    Contract(tokens=4, state_dtype="fp32"),
    Contract(tokens=4, state_dtype="fp32", intermediate="dense"),
    Contract(op="kda_decode", gate="softplus"),
    Contract(op="kda_decode", gate="softplus", tokens=4, mode="frozen", intermediate="slots"),
    Contract(op="kda_decode", gate="softplus", state_dtype="fp32"),
    Contract(op="kda_decode", gate="lower_bound"),
    Contract(op="kda_decode", gate="softplus", tokens=4, mode="frozen"),
    Contract(op="kda_decode", gate="softplus", tokens=8, mode="frozen"),
    Contract(op="kda_decode", gate="log", beta="given"),
    Contract(tokens=4, dt_bias_dtype="bf16", accepted=True, ragged=True, **SLOTS),
    Contract(tokens=4, state_dtype="fp32", accepted=True, **SLOTS),
    Contract(op="kda_decode", gate="softplus", tokens=4, accepted=True, **SLOTS),
    Contract(tokens=2, **SLOTS),
    Contract(**STEP),
    Contract(**STEP, state_dtype="fp32"),
    Contract(norm="silu"),
    Contract(**STEP, tokens=4, accepted=True, **SLOTS),
    Contract(**STEP, tokens=4, state_dtype="fp32", accepted=True, **SLOTS),
    Contract(norm="silu", tokens=4, accepted=True, **SLOTS),
    Contract("kda_decode", gate="softplus", norm="sigmoid", conv="silu"),
    Contract("kda_decode", gate="softplus", norm="sigmoid", conv="silu", state_dtype="fp32"),
    Contract("kda_decode", gate="lower_bound", norm="sigmoid", conv="silu", state_dtype="fp32"),
    Contract(tokens=4, ring=16, ring_dtype="bf16"),
    Contract(tokens=8, ring=16),
]
# What the fused kernels of a KDA step are compiled for, elsewhere a few.
HEADS = {True: 12, False: 4}


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.key())
@pytest.mark.parametrize("name", peers.PEERS)
def test_entries_agree(name, contract):
    """Fresh states, outputs poisoned with NaN, shuffled slots: what the bench checks before it
    times.
    """
    heads = HEADS[contract.layer and contract.op == "kda_decode"]
    peer, problem = peers.get(name), Problem(contract, 5, heads, heads)
    if said := peer.absent():
        pytest.skip(said)
    entries, reason = peer.serving(problem)
    if not entries:
        pytest.skip(reason)
    for entry in entries:
        case = make_case(problem, "cuda")
        expected = Expected(case, entry.tolerance)
        try:
            bound = entry.bind(case)
        except ToolMissing:
            # This installation has not all of the library.
            continue
        case.output.fill_(float("nan"))
        if entry.follows_ours:
            # what ours leaves, by the reference
            found = decode(contract, dtype=torch.float32, **case.tensors()).stored(contract)
            case.output.copy_(found.output)
            case.state.copy_(found.state)
        returned = bound.call()
        torch.cuda.synchronize()
        verdict = expected.judge(case, bound, returned)
        assert verdict.ok, f"{entry.name}: {verdict.worst}"
