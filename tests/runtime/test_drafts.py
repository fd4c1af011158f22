"""The raw window: verify reads the states, commit folds what was accepted, and the two together are
sequential decode of the accepted tokens.
"""

import os

import pytest
import torch
from public import DEVICES

import gdntune
from gdntune.checking.reference import gates, normalised, recurrence
from gdntune.problem import Contract, Problem

GDN = Contract(tokens=4, K=64, V=32, state_dtype="fp32")
CASES = {
    "gdn": GDN,
    "gdn bf16": GDN.replace(state_dtype="bf16"),
    "log v_last": GDN.replace(gate="log", gate_dtype="fp32", layout="v_last", tokens=2),
    "beta given": GDN.replace(beta="given", beta_dtype="fp32", tokens=8),
    "kda": GDN.replace(op="kda_decode", gate="softplus"),
    "kda lower_bound": GDN.replace(op="kda_decode", gate="lower_bound", gate_dtype="fp32"),
}
# what a machine without a compiler needs
CONTRACTS = [x for c in CASES.values() for x in (c.replace(mode="frozen"), c.replace(ragged=True))]
SEQUENCES = int(os.environ.get("GDNTUNE_DRAFT_SEQUENCES", 30))
STEPS = int(os.environ.get("GDNTUNE_DRAFT_STEPS", 12))
LAYERS, H, HV = 2, 1, 2
BOUND = -5.0

by_device = pytest.mark.parametrize("device", DEVICES)


def a_window(contract=GDN, *, requests=3, slots=6, device="cpu", **settings):
    """A window of two small layers with states drawn at random."""
    parameters = {}
    if contract.has_parameters:
        per_key = (contract.K,) if contract.op == "kda_decode" else ()
        parameters = {
            "A_log": torch.randn(LAYERS, HV, device=device) / 4,
            "dt_bias": torch.randn(LAYERS, HV, *per_key, device=device),
        }
    if contract.gate == "lower_bound":
        settings["lower_bound"] = BOUND
    window = gdntune.RawWindow(
        Problem(contract, requests, H, HV), layers=LAYERS, slots=slots, device=device,
        **parameters, **settings,
    )  # fmt: skip
    window.states.normal_()
    return window, parameters


def drafts(window, B):
    """q, k, v, gate and b of B requests' drafts of a layer."""
    inputs = window.inputs(0)
    c = window.problem.contract
    q, k, v, gate, b = (
        torch.randn_like(x[:1].float()).expand(B, *x.shape[1:]).clone().normal_().to(x.dtype)
        for x in (inputs.k, inputs.k, inputs.v, inputs.gate, inputs.b)
    )
    if c.gate == "log":
        gate = -gate.abs()
    return q, k, v, gate, b.sigmoid() if c.beta == "given" else b


def truth(window, parameters, layer, given, states):
    """fp64: outputs, and the states after each token, of requests that start from `states`."""
    c = window.problem.contract
    q, k, v, gate, b = (x.double() for x in given)
    A_log, dt_bias = (
        parameters[name][layer].double() if parameters else None for name in ("A_log", "dt_bias")
    )
    decay, beta = gates(c, gate, b, A_log, dt_bias, 1.0, 20.0, BOUND, 1.0)
    spread = [normalised(x).repeat_interleave(HV // H, 2) for x in (q, k)]
    return recurrence(spread[0] * c.K**-0.5, spread[1], v, decay, beta, states)


def of(window, layer, slots):
    """fp64 states [n, HV, V, K] of some slots."""
    found = window.state(layer)[slots].double()
    return found if window.problem.contract.layout == "k_last" else found.mT


@by_device
@pytest.mark.parametrize("name", CASES)
def test_steps_are_sequential_decode(name, device):
    """Random sequences of verify, accept, commit: outputs and states are those of fp64 decode of
    the accepted tokens; what is not accepted leaves no trace.
    """
    torch.manual_seed(len(name))
    contract = CASES[name]
    window, parameters = a_window(contract, requests=SEQUENCES, slots=SEQUENCES, device=device)
    states = [of(window, layer, slice(None)) for layer in range(LAYERS)]
    # of a state in bf16 each commit rounds, as each decode call does
    loose = 2e-2 if contract.state_dtype == "bf16" else 1e-4
    for _ in range(STEPS):
        B = int(torch.randint(1, SEQUENCES + 1, ()))
        slots = torch.randperm(SEQUENCES, device=device)[:B]
        accepted = torch.randint(0, contract.tokens + 1, (B,), device=device)
        for layer in range(LAYERS):
            given = drafts(window, B)
            output = window.verify(layer, *given, slots)
            right, after = truth(window, parameters, layer, given, states[layer][slots])
            torch.testing.assert_close(output.double(), right, rtol=2e-2, atol=2e-2)
            some = accepted > 0
            states[layer][slots[some]] = after[some, accepted[some] - 1]
        window.commit(slots, accepted)
        for layer in range(LAYERS):
            found = of(window, layer, slice(None))
            torch.testing.assert_close(found, states[layer], rtol=loose, atol=loose)
            if contract.state_dtype == "bf16":
                states[layer] = found


@by_device
def test_a_commit_is_a_decode_call(device):
    """Bit for bit: folding m tokens is decoding them in one ragged call."""
    torch.manual_seed(0)
    window, parameters = a_window(device=device)
    slots, accepted = torch.tensor([4, 0, 2], device=device), torch.tensor([1, 4, 3], device=device)
    alone = [window.state(layer).clone() for layer in range(LAYERS)]
    kept = [drafts(window, 3) for _ in range(LAYERS)]
    for layer, (q, k, v, a, b) in enumerate(kept):
        window.verify(layer, q, k, v, a, b, slots)
        rows = [torch.cat([x[n, :m] for n, m in enumerate(accepted.tolist())])[None]
                for x in (q, k, v, a, b)]  # fmt: skip
        gdntune.gated_delta_rule_decode(
            *rows[:3], a=rows[3], b=rows[4], A_log=parameters["A_log"][layer],
            dt_bias=parameters["dt_bias"][layer], initial_state=alone[layer],
            initial_state_indices=slots, max_tokens=4,
            cu_seqlens=torch.tensor([0, 1, 5, 8], dtype=torch.int32, device=device),
        )  # fmt: skip
    window.commit(slots, accepted)
    for layer in range(LAYERS):
        torch.testing.assert_close(window.state(layer), alone[layer], rtol=1e-5, atol=1e-6)


def test_right_calls_pass_the_check(monkeypatch):
    """GDNTUNE_CHECK refuses nothing that is as documented."""
    monkeypatch.setenv("GDNTUNE_CHECK", "1")
    window, _ = a_window()
    slots = torch.tensor([3, -1, 0])
    for layer in range(LAYERS):
        window.verify(layer, *drafts(window, 3), slots)
    track = torch.tensor([4, -1, 5]), torch.tensor([0, 0, 7])
    window.commit(
        slots, torch.tensor([1, 0, 4]), track_state_indices=track[0], track_steps=track[1]
    )


@by_device
def test_verify_leaves_states_alone(device):
    """And repeats itself bit for bit; padding has zero outputs."""
    window, _ = a_window(device=device)
    before = window.states.clone()
    given, slots = drafts(window, 3), torch.tensor([2, -1, 5], device=device)
    first = window.verify(1, *given, slots)
    assert torch.equal(window.verify(1, *given, slots), first)
    assert not first[1].any() and first[0].any()
    assert torch.equal(window.states, before)


@by_device
def test_nothing_accepted_changes_nothing(device):
    """0 accepted, padding, the null slot and slots outside the pool: bit for bit."""
    window, _ = a_window(requests=5, null_index=0, device=device)
    before = window.states.clone()
    slots = torch.tensor([3, -1, 0, 6, 2], device=device)
    for layer in range(LAYERS):
        window.verify(layer, *drafts(window, 5), slots)
    window.commit(slots, torch.tensor([0, 4, 4, 4, -7], device=device))
    assert torch.equal(window.states, before)


@by_device
def test_counts_beyond_the_drafts_are_clamped(device):
    """More than T accepted is T."""
    found = []
    for count in (4, 9):
        torch.manual_seed(1)
        window, _ = a_window(device=device)
        for layer in range(LAYERS):
            window.verify(layer, *drafts(window, 2), torch.tensor([1, 2], device=device))
        window.commit(torch.tensor([1, 2], device=device), torch.tensor([count, 2], device=device))
        found.append(window.states)
    assert torch.equal(*found)


@by_device
def test_a_snapshot_is_the_state_at_its_step(device):
    """For a prefix cache: the state after token track_steps[n], where it was accepted."""
    torch.manual_seed(2)
    window, parameters = a_window(device=device)
    slots, accepted = torch.tensor([0, 1, 2], device=device), torch.tensor([4, 2, 3], device=device)
    track, steps = torch.tensor([3, 4, -1], device=device), torch.tensor([1, 2, 0], device=device)
    before, wanted = window.states.clone(), []
    for layer in range(LAYERS):
        given = drafts(window, 3)
        window.verify(layer, *given, slots)
        wanted.append(truth(window, parameters, layer, given, of(window, layer, slots))[1])
    window.commit(slots, accepted, track_state_indices=track, track_steps=steps)
    for layer in range(LAYERS):
        found = of(window, layer, slice(None))
        torch.testing.assert_close(found[3], wanted[layer][0, 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found[0], wanted[layer][0, 3], rtol=1e-4, atol=1e-4)
    # step 2 of request 1 was not accepted; request 2 has no slot for it
    assert torch.equal(window.states[4:], before[4:])


def test_the_windows_own_memory_is_not_copied():
    """What is written to `inputs` is verified where it lies."""
    window, _ = a_window()
    own, (q, k, v, a, b) = window.inputs(0), drafts(window, 3)
    slots = torch.tensor([0, 1, 2])
    copied = window.verify(0, q, k, v, a, b, slots)
    other = window.inputs(1)
    for mine, given in zip((own.k, own.v, own.gate, own.b), (k, v, a, b), strict=True):
        assert torch.equal(mine, given)
        mine.copy_(given)
    assert torch.equal(window.verify(0, q, own.k, own.v, own.gate, own.b, slots), copied)
    assert not other.k.any()


def test_sizes_and_places():
    """What it owns, and views of it."""
    window, _ = a_window(slots=6)
    inputs, T = window._all, GDN.tokens
    assert window.states.shape == (6, LAYERS * HV, 32, 64)
    assert window.state(1).data_ptr() == window.states[:, HV:].data_ptr()
    kept = 3 * T * LAYERS * (H * 64 + HV * (32 + 2)) * 2
    assert window.bytes == window.states.nbytes + kept + inputs.v.nbytes + 4 * 4
    window.reset(torch.tensor([2, 3]))
    assert not window.states[2:4].any() and window.states[1].any()
    verify, commit = window.contracts
    assert (verify.mode, commit.mode, commit.ragged) == ("frozen", "update", True)


REFUSED = {
    "a problem": (lambda: gdntune.RawWindow(GDN, layers=1, slots=1), "expected a gdntune.Problem"),
    "drafts": (lambda: a_window(GDN.replace(tokens=1)), "expected 2 to 16 drafts"),
    "layers": (
        lambda: gdntune.RawWindow(Problem(GDN, 1, 1, 1), layers=0, slots=1),
        "layers=0: expected a positive number",
    ),
    "parameters": (
        lambda: gdntune.RawWindow(Problem(GDN, 1, 1, 1), layers=1, slots=1),
        "A_log: the contract's gate has parameters; expected [1, 1]",
    ),
    "bound": (lambda: a_window(lower_bound=-5.0), "lower_bound=-5.0 with the gate raw"),
    "layer": (lambda: a_window()[0].state(2), "layer=2: expected 0 to 1"),
    "many": (lambda: a_window()[0].commit(torch.arange(4), torch.arange(4)), "made for 3"),
    "counts": (
        lambda: a_window()[0].commit(torch.arange(3), torch.arange(2)),
        "accept_lens: expected a tensor [3]",
    ),
    "half a snapshot": (
        lambda: a_window()[0].commit(torch.arange(3), torch.arange(3), track_steps=torch.arange(3)),
        "expected both or neither",
    ),
    "shape": (
        lambda: (w := a_window()[0]).verify(0, *drafts(w, 2), torch.arange(3)),
        "k is of shape [2, 4, 1, 64]: expected [3, 4, 1, 64]",
    ),
    "tree": (
        lambda: (w := a_window()[0]).verify(
            0, *drafts(w, 3), torch.arange(3), retrieve_parent_token=torch.zeros(3, 4)
        ),
        "retrieve_parent_token: drafts that form a tree are not served",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_misuse_is_refused_by_name(name):
    """Before anything is written."""
    call, words = REFUSED[name]
    with pytest.raises(gdntune.UnsupportedProblem) as error:
        call()
    assert words in str(error.value)


CHECKED = {
    "counts": (([0, 1], [5, 0]), {}, "accept_lens[0]=5: expected 0 to 4"),
    "twice": (([1, 1], [1, 1]), {}, "state_indices names slots [1] more than once"),
    "outside": (([0, 6], [1, 1]), {}, "slot 6: the window has 6"),
    "tracked and live": (([0, 1], [1, 1]), {"track": [1, 3]}, "slots [1] are tracked and live"),
    "tracked twice": (([0, 1], [1, 1]), {"track": [3, 3]}, "track_state_indices names slots [3]"),
    "a step": (([0, 1], [1, 1]), {"steps": [-1, 0]}, "track_steps[0]=-1: expected 0 or more"),
}


@pytest.mark.parametrize("name", CHECKED)
def test_values_are_checked_where_asked_for(name, monkeypatch):
    """GDNTUNE_CHECK=1 reads what lies on the device."""
    given, more, words = CHECKED[name]
    track = torch.tensor(more.get("track", [3, 4])), torch.tensor(more.get("steps", [0, 0]))
    names = ("track_state_indices", "track_steps")
    tracked = dict(zip(names, track, strict=True)) if more else {}
    window, _ = a_window()
    monkeypatch.setenv("GDNTUNE_CHECK", "1")
    with pytest.raises(gdntune.UnsupportedProblem) as error:
        window.commit(*map(torch.tensor, given), **tracked)
    assert words in str(error.value) and "GDNTUNE_CHECK=1" in str(error.value)
