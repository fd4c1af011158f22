"""FlashInfer's ring behind the windows that a case has, and what is timed of a ring: whole cycles."""

from pathlib import Path

import pytest
import torch
from test_steps import token

from gdntune import peers
from gdntune.checking.cases import make_case
from gdntune.peers import spec
from gdntune.peers.compare import Expected
from gdntune.problem import Contract, Problem
from gdntune.tuning import config, rings

RING = "ucache_flush_by_windows"
BEHIND = Contract(tokens=4, ring=16, ring_dtype="bf16")


def ucache(
    A_log, a, dt_bias, q, k, v, b, scale, output, initial_state_source, initial_state_indices,
    k_cache, u_cache, g_cache, hist_len, cache_base, flush_min, restart_hist_on_flush,
):  # fmt: skip
    """FlashInfer's ring, by its documentation: keys normalised, log decays summed in the window."""
    assert not restart_hist_on_flush and k_cache.shape[2] == 32
    for n, slot in enumerate(initial_state_indices.tolist()):
        live = (int(cache_base[n]) + torch.arange(int(hist_len[n]))) % 32
        state = initial_state_source[slot].float()
        if len(live):
            g = g_cache[slot][:, live]
            u = u_cache[slot][:, live].float() * (g[:, -1:] - g).exp()[..., None]
            keys = k_cache[slot][:, live].float()
            keys = keys.repeat_interleave(len(u) // len(keys), 0)
            state = state * g[:, -1, None, None].exp() + u.transpose(1, 2) @ keys
        if len(live) >= flush_min:
            initial_state_source[slot] = state
        for t in range(q.shape[1]):
            mixed = torch.cat([x[n, t].flatten() for x in (q, k, v)])
            out, state = token(mixed, a[n, t], b[n, t], A_log, dt_bias, scale, state)
            output[n, t] = out
    return output


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The function, as it computes."""
    monkeypatch.setattr(spec, "imported", lambda module, name: ucache)


@pytest.mark.parametrize("gap", [0, 64])
@pytest.mark.parametrize("contract", [BEHIND, BEHIND.replace(tokens=8, ring_dtype="fp32")])
def test_its_windows_are_the_cases(contract, gap):
    """Outputs and folded states agree with the reference, some requests folding and some not; the
    states of those that do not fold stay.
    """
    entry = peers.get("flashinfer").entry(RING)
    problem = Problem(contract, 7, 2, 4)
    assert peers.get("flashinfer").serving(problem)[0] == [entry]
    case = rings.steps(make_case(problem, seed=1, slot_stride_pad=gap))[0]
    folds = case.ring_count + contract.tokens > contract.ring
    assert bool(folds.any()) and not bool(folds.all())
    expected = Expected(case, entry.tolerance)
    bound = entry.bind(case)
    verdict = expected.judge(case, bound, bound.call())
    assert verdict.ok, verdict.worst
    # A window that is taken for another one is told.
    wrong = entry.bind(make_case(problem, seed=1, slot_stride_pad=gap))
    assert not expected.judge(case, wrong, wrong.call()).ok


def test_the_bench_config_of_rings():
    """configs/bench-ring.yaml: each cell beside FlashInfer's ring."""
    whole = config.load(Path(__file__).parents[2] / "configs" / "bench-ring.yaml")
    cells = whole.all_problems()
    assert len(cells) == 24 and {p.contract.tokens for p in cells} == {4, 8}
    assert all(peers.get("flashinfer").serving(p)[0] for p in cells)


def test_what_else_it_serves_of_rings():
    """Rings of 16 alone, at T=4 and 8; SGLang's and vLLM's entries know none."""
    for other in (BEHIND.replace(ring=32), BEHIND.replace(tokens=2)):
        found, reason = peers.get("flashinfer").serving(Problem(other, 2, 2, 4))
        assert not found and "expected" in reason
    assert peers.get("sglang").serving(Problem(BEHIND, 2, 2, 4)) == (
        [],
        "norm=none, conv=none, ring=16: no entry serves a ring of corrections",
    )


@pytest.mark.parametrize(("tokens", "entries"), [(4, 16), (8, 16), (1, 16), (4, 32)])
def test_a_cycle_in_which_all_drafts_are_accepted(tokens, entries):
    """Each request goes through all counts of a cycle once, staggered; one of them folds, at B=1
    the first step's. Layers are spread over the cycle, and one folds.
    """
    contract = Contract(tokens=tokens, ring=entries)
    for B in (1, 5):
        case = make_case(Problem(contract, B, 1, 1))
        found = torch.stack([one.ring_count for one in rings.steps(case)])
        assert found.shape == (entries // tokens, B)
        for mine in found.T.tolist():
            assert sorted(mine) == list(range(tokens, entries + 1, tokens))
    assert int(found[0].max()) == entries
    assert not any(x.isnan().any() for x in (case.ring_k, case.ring_u, case.ring_decay))
    layers = rings.spread([make_case(Problem(contract, 1, 1, 1), seed=n) for n in range(12)])
    counts = [int(one.ring_count) for one in layers]
    assert counts[0] == entries and len(set(counts)) == min(12, entries // tokens)


def test_calls_go_through_the_cycle():
    """Each call goes on by itself, whatever turn it is given."""
    seen = []
    call = rings.in_turns([lambda n=n: seen.append(n) for n in range(3)])
    for turn in (0, 2, 4, 6):
        call(turn)
    assert seen == [0, 1, 2, 0]
