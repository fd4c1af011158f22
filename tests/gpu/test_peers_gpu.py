"""Other libraries' kernels on a GPU: each entry that is installed agrees with the reference on
small problems of what it serves.
"""

import pytest
import torch

from gdntune import peers
from gdntune.checking.cases import make_case
from gdntune.peers.compare import Expected
from gdntune.problem import Contract, Problem

pytestmark = pytest.mark.gpu

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
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.key())
@pytest.mark.parametrize("name", peers.PEERS)
def test_entries_agree(name, contract):
    """Fresh states, outputs poisoned with NaN, shuffled slots: what the bench checks before it
    times.
    """
    peer, problem = peers.get(name), Problem(contract, 5, 4, 4)
    if said := peer.absent():
        pytest.skip(said)
    entries, reason = peer.serving(problem)
    if not entries:
        pytest.skip(reason)
    for entry in entries:
        case = make_case(problem, "cuda")
        expected = Expected(case, entry.tolerance)
        bound = entry.bind(case)
        case.output.fill_(float("nan"))
        returned = bound.call()
        torch.cuda.synchronize()
        verdict = expected.judge(case, bound, returned)
        assert verdict.ok, f"{entry.name}: {verdict.worst}"
