"""Rings of corrections: verify, accept and fold together are sequential decode of what was accepted."""

import os

import pytest
import torch
from public import DEVICES, refused

import gdntune
from gdntune.checking.cases import make_case
from gdntune.checking.reference import gated_norm, gates, normalised, recurrence
from gdntune.problem import Contract, Problem
from gdntune.runtime import call as calls
from gdntune.runtime.rings import commit_contract

GDN = Contract(tokens=4, K=64, V=32, state_dtype="fp32", ring=16)
CASES = {
    "gdn": GDN,
    "bf16": GDN.replace(state_dtype="bf16"),
    "u bf16, 32": GDN.replace(ring=32, ring_dtype="bf16", tokens=8),
    "log v_last": GDN.replace(gate="log", gate_dtype="fp32", layout="v_last", tokens=2),
    "beta given": GDN.replace(beta="given", beta_dtype="fp32", tokens=8),
    "one token": GDN.replace(tokens=1),
    "kda": GDN.replace(op="kda_decode", gate="softplus"),
    "kda log": GDN.replace(op="kda_decode", gate="log", gate_dtype="fp32", tokens=8, ring=32),
    "at random": GDN.replace(state_dtype="bf16", ring_rounding="stochastic"),
    "kda bound, v_last": GDN.replace(op="kda_decode", gate="lower_bound", layout="v_last"),
}
NORMED = GDN.replace(norm="silu", norm_weight_dtype="bf16")
# what a machine without a compiler needs
CONTRACTS = [c.replace(tokens=T) for c in CASES.values() for T in {max(1, c.tokens - 1), c.tokens}]
CONTRACTS += [commit_contract(c) for c in CASES.values()] + [NORMED]
SEQUENCES = int(os.environ.get("GDNTUNE_DRAFT_SEQUENCES", 20))
STEPS = int(os.environ.get("GDNTUNE_DRAFT_STEPS", 30))
LAYERS, H, HV = 2, 1, 2

by_device = pytest.mark.parametrize("device", DEVICES)


def rings(contract=GDN, *, requests=3, slots=6, device="cpu", **settings):
    """Rings of two small layers, with states drawn at random."""
    parameters = {}
    if contract.has_parameters:
        per_key = (contract.K,) if contract.op == "kda_decode" else ()
        parameters = {
            "A_log": torch.randn(LAYERS, HV, device=device) / 4,
            "dt_bias": torch.randn(LAYERS, HV, *per_key, device=device),
        }
    if contract.gate == "lower_bound":
        settings["lower_bound"] = -5.0
    made = gdntune.RingState(
        Problem(contract, requests, H, HV), layers=LAYERS, slots=slots, device=device,
        **parameters, **settings,
    )  # fmt: skip
    made.states.normal_()
    return made, parameters


def drafts(contract, B, device, T=None):
    """q, k, v, gate and b of B requests' drafts of a layer."""
    T = contract.tokens if T is None else T
    q, k = torch.randn(2, B, T, H, contract.K, dtype=torch.bfloat16, device=device)
    v = torch.randn(B, T, HV, contract.V, dtype=torch.bfloat16, device=device)
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32}
    per_key = (contract.K,) if contract.op == "kda_decode" else ()
    gate = torch.randn(B, T, HV, *per_key, device=device).to(kinds[contract.gate_dtype])
    b = torch.randn(B, T, HV, device=device).to(kinds[contract.beta_dtype])
    if contract.gate == "log":
        gate = -gate.abs()
    return q, k, v, gate, b.sigmoid() if contract.beta == "given" else b


def truth(contract, parameters, layer, given, states):
    """fp64: outputs, and the states after each token, of requests that start from `states`."""
    q, k, v, gate, b = (x.double() for x in given)
    A_log, dt_bias = (
        parameters[name][layer].double() if parameters else None for name in ("A_log", "dt_bias")
    )
    decay, beta = gates(contract, gate, b, A_log, dt_bias, 1.0, 20.0, -5.0, 1.0)
    spread = [normalised(x).repeat_interleave(HV // H, 2) for x in (q, k)]
    return recurrence(spread[0] * contract.K**-0.5, spread[1], v, decay, beta, states)


def of(made, layer, slots=slice(None)):
    """fp64 states [n, HV, V, K] of some slots."""
    found = made.state(layer)[slots].double()
    return found if made.problem.contract.layout == "k_last" else found.mT


@by_device
@pytest.mark.parametrize("name", CASES)
def test_steps_are_sequential_decode(name, device):
    """Random sequences of steps, of other requests each time: outputs are those of fp64 decode of
    what was accepted, through hundreds of folds; a commit leaves its states.
    """
    torch.manual_seed(len(name))
    contract = CASES[name]
    made, parameters = rings(contract, requests=SEQUENCES, slots=SEQUENCES, device=device)
    states = [of(made, layer) for layer in range(LAYERS)]
    # of a state in bf16 a fold rounds, and so does u in bf16
    loose = 3e-2 if "bf16" in (contract.state_dtype, contract.ring_dtype) else 1e-4
    for step in range(STEPS):
        B = int(torch.randint(1, SEQUENCES + 1, ()))
        slots = torch.randperm(SEQUENCES, device=device)[:B]
        # drafts may be fewer than the rings were made for
        T = max(1, contract.tokens - step % 2)
        accepted = torch.randint(0, T + 1, (B,), device=device)
        made.begin(slots)
        for layer in range(LAYERS):
            given = drafts(contract, B, device, T)
            output = made.verify(layer, *given, slots)
            right, after = truth(contract, parameters, layer, given, states[layer][slots])
            torch.testing.assert_close(output.double(), right, rtol=3e-2, atol=3e-2)
            some = accepted > 0
            states[layer][slots[some]] = after[some, accepted[some] - 1]
        made.accept(slots, accepted)
        assert int(made.counts.max()) <= contract.ring
    every = torch.arange(SEQUENCES, device=device)
    made.commit(every)
    assert not made.counts.any()
    for layer in range(LAYERS):
        torch.testing.assert_close(of(made, layer), states[layer], rtol=loose, atol=loose)


def behind(device, B=3):
    """The arguments of a norm for B requests' drafts."""
    gate = torch.randn(B, NORMED.tokens, HV, NORMED.V, device=device).bfloat16()
    weight = torch.nn.Parameter((1 + torch.randn(NORMED.V, device=device) / 4).bfloat16())
    return {"output_gate": gate, "norm_weight": weight, "norm_eps": 1e-5}


@by_device
def test_a_norm_behind_verify(device):
    """Outputs are fp64 decode's behind fp64's gated norm, step by step, the weight a module's parameter;
    what is kept and committed is as without a norm.
    """
    torch.manual_seed(0)
    made, parameters = rings(NORMED, device=device)
    assert commit_contract(NORMED) == commit_contract(GDN)
    slots = torch.tensor([4, 1, 2], device=device)
    states = [of(made, layer, slots) for layer in range(LAYERS)]
    for _ in range(12):
        accepted = torch.randint(0, 5, (3,), device=device)
        made.begin(slots)
        for layer in range(LAYERS):
            given, norm = drafts(NORMED, 3, device), behind(device)
            output = made.verify(layer, *given, slots, **norm)
            right, after = truth(NORMED, parameters, layer, given, states[layer])
            gate, weight = norm["output_gate"].double(), norm["norm_weight"].detach().double()
            right = gated_norm(right, weight, gate, 1e-5, "silu")
            torch.testing.assert_close(output.double(), right, rtol=3e-2, atol=3e-2)
            some = accepted > 0
            states[layer][some] = after[some, accepted[some] - 1]
        made.accept(slots, accepted)
    made.commit(slots)
    for layer in range(LAYERS):
        torch.testing.assert_close(of(made, layer, slots), states[layer], rtol=1e-4, atol=1e-4)


@by_device
def test_what_a_norm_lacks_is_named(device):
    """One of a pair, another gate, a weight of whole numbers, a gate of another shape."""
    made, _ = rings(NORMED, device=device)
    slots, given = torch.tensor([4, 1, 2], device=device), drafts(NORMED, 3, device)
    made.begin(slots)
    norm = behind(device)
    refused("norm='silu': expected both", made.verify, 0, *given, slots)
    lacking = {**norm, "output_gate": None}
    refused("output_gate and norm_weight: expected both or neither", made.verify, 0, *given, slots,
            **lacking)  # fmt: skip
    whole = {**norm, "norm_weight": torch.ones(NORMED.V, dtype=torch.int32, device=device)}
    refused("norm_weight has dtype torch.int32", made.verify, 0, *given, slots, **whole)
    short = {**norm, "output_gate": norm["output_gate"][..., :16]}
    refused("output_gate has shape", made.verify, 0, *given, slots, **short)
    refused("norm_eps=-1", made.verify, 0, *given, slots, **{**norm, "norm_eps": -1})
    plain, _ = rings(GDN, device=device)
    plain.begin(slots)
    refused("norm='none': expected neither", plain.verify, 0, *given, slots, **norm)


@by_device
def test_nothing_accumulates(device):
    """After 400 steps fp32 rings are as near to fp64 as in the first: nothing is cumulative."""
    torch.manual_seed(0)
    made, parameters = rings(requests=1, slots=1, device=device)
    states = [of(made, layer) for layer in range(LAYERS)]
    slots, all_four = torch.tensor([0], device=device), torch.tensor([4], device=device)
    worst = []
    for _ in range(400):
        made.begin(slots)
        for layer in range(LAYERS):
            given = drafts(GDN, 1, device)
            given = (*(x.float() for x in given[:3]), *given[3:])
            given = tuple(x.bfloat16() if i < 3 else x for i, x in enumerate(given))
            made.verify(layer, *given, slots)
            _, after = truth(GDN, parameters, layer, given, states[layer])
            states[layer] = after[:, -1]
        made.accept(slots, all_four)
        if not len(worst) % 10:
            made.commit(slots)
            worst.append(max(float((of(made, i) - states[i]).abs().max()) for i in range(LAYERS)))
        else:
            worst.append(0.0)
    assert max(worst) < 1e-4


@by_device
def test_folds_are_where_the_counts_say(device):
    """Staggered requests: each state changes in the step in which its own ring is full, or has
    flush_min entries, and in no other.
    """
    torch.manual_seed(0)
    for flush_min, steps in ((None, [False, False, False, False, True]), (4, [False, True, True])):
        made, _ = rings(device=device, flush_min=flush_min)
        slots, accepted = torch.tensor([2, 5], device=device), torch.tensor([4, 4], device=device)
        for changes in steps:
            before = made.states.clone()
            made.begin(slots)
            for layer in range(LAYERS):
                made.verify(layer, *drafts(GDN, 2, device), slots)
            made.accept(slots, accepted)
            changed = (made.states != before).flatten(1).any(1)
            assert changed.nonzero().flatten().tolist() == ([2, 5] if changes else [])


@by_device
def test_padding_moves_nothing(device):
    """Slots that are nobody's: outputs are zero, no cursor and no state changes."""
    made, _ = rings(device=device, null_index=0, flush_min=0)
    kept = made.states.clone(), made.ring_u.clone()
    slots = torch.tensor([0, -1, 9], device=device, dtype=torch.int32)
    made.begin(slots)
    output = made.verify(0, *drafts(GDN, 3, device), slots)
    made.accept(slots, torch.tensor([4, 4, 4], device=device))
    made.commit(slots)
    assert not output.any()
    assert not made.counts.any()
    assert torch.equal(made.states, kept[0])
    assert torch.equal(made.ring_u, kept[1])


@by_device
def test_a_tracked_slot_gets_the_state_of_a_prefix(device):
    """A commit's second slot holds the state after so many entries, with a ring of its own."""
    torch.manual_seed(0)
    made, parameters = rings(device=device)
    start = [of(made, layer)[1:2] for layer in range(LAYERS)]
    slots = torch.tensor([1], device=device)
    given = [drafts(GDN, 1, device) for _ in range(LAYERS)]
    made.begin(slots)
    for layer in range(LAYERS):
        made.verify(layer, *given[layer], slots)
    made.accept(slots, torch.tensor([3], device=device))
    made.commit(
        slots,
        track_state_indices=torch.tensor([4], device=device),
        track_counts=torch.tensor([2], device=device),
    )
    for layer in range(LAYERS):
        _, after = truth(GDN, parameters, layer, given[layer], start[layer])
        for slot, tokens in ((4, 2), (1, 3)):
            torch.testing.assert_close(
                of(made, layer)[slot], after[0, tokens - 1], rtol=1e-4, atol=1e-4
            )


@by_device
def test_a_commit_of_accepted_drafts(device):
    """The function of tensors: accepted drafts are folded with the live entries, all layers at once,
    and a second slot has the state after one of them; a request that accepted fewer has none.
    """
    torch.manual_seed(0)
    made, parameters = rings(device=device)
    start = [of(made, layer) for layer in range(LAYERS)]
    slots = torch.tensor([1, 4], device=device)
    given = [drafts(GDN, 2, device) for _ in range(LAYERS)]
    made.begin(slots)
    for layer in range(LAYERS):
        made.verify(layer, *given[layer], slots)
    before = made.states[3].clone()
    none = torch.zeros(2, dtype=torch.int32, device=device)
    gdntune.gated_delta_rule_commit(
        made.states, made.ring_k, made.ring_u, made.ring_decay, none, none, slots,
        torch.tensor([3, 1], device=device), track_state_indices=torch.tensor([2, 3], device=device),
        track_steps=torch.tensor([1, 1], device=device),
    )  # fmt: skip
    for layer in range(LAYERS):
        _, after = truth(GDN, parameters, layer, given[layer], start[layer][slots])
        for slot, n, tokens in ((1, 0, 3), (2, 0, 2), (4, 1, 1)):
            torch.testing.assert_close(
                of(made, layer)[slot], after[n, tokens - 1], rtol=1e-4, atol=1e-4
            )
    assert torch.equal(made.states[3], before)


@by_device
def test_a_reset_slot_starts_from_nothing(device):
    """Neither its state nor what its ring held is seen again."""
    torch.manual_seed(0)
    made, parameters = rings(device=device)
    slots = torch.tensor([3], device=device)
    for _ in range(2):
        made.begin(slots)
        made.verify(0, *drafts(GDN, 1, device), slots)
        made.accept(slots, torch.tensor([4], device=device))
    made.reset(slots)
    given = drafts(GDN, 1, device)
    made.begin(slots)
    output = made.verify(0, *given, slots)
    right, _ = truth(GDN, parameters, 0, given, torch.zeros(1, HV, 32, 64, device=device).double())
    torch.testing.assert_close(output.double(), right, rtol=2e-2, atol=2e-2)


def test_misuse_is_refused(monkeypatch):
    """Each says what was given and what is expected."""
    made, _ = rings()
    slots, four = torch.tensor([0, 1]), torch.tensor([4, 4])
    given = drafts(GDN, 2, "cpu")
    made.begin(slots)
    refused("tree", made.verify, 0, *given, slots, retrieve_parent_token=torch.zeros(2, 4))
    refused("layer=2", made.verify, 2, *given, slots)
    refused("T up to 4", made.verify, 0, *drafts(GDN, 2, "cpu", 5), slots)
    refused("made for 3", made.begin, torch.arange(4))
    refused("accept_lens", made.accept, slots, torch.tensor([1]))
    refused("flush_min=18", rings, flush_min=18)
    refused("expected a contract with ring=16 or 32", rings, GDN.replace(ring=0))
    refused("expected both or neither", made.commit, slots, track_counts=four)
    monkeypatch.setenv("GDNTUNE_CHECK", "1")
    refused(r"accept_lens\[1\]=5", made.accept, slots, torch.tensor([1, 5]))
    refused("more than once", made.accept, torch.tensor([1, 1]), four)
    refused(
        "tracked and live", made.commit, slots,
        track_state_indices=torch.tensor([1, 2]), track_counts=four,
    )  # fmt: skip


def test_values_on_the_device_are_looked_at_under_check(monkeypatch):
    """Counts and bases beyond their range are clamped, and refused where one asks."""
    case = make_case(Problem(GDN, 2, 1, 2), "cpu", 0, out_of_range=True, padding=0.0)
    call = {
        "initial_state": case.state, "initial_state_indices": case.read_index,
        "A_log": case.A_log, "a": case.a, "dt_bias": case.dt_bias, "b": case.b,
        **{n: getattr(case, n) for n in ("ring_k", "ring_u", "ring_decay", "ring_base")},
    }  # fmt: skip
    qkv = case.q, case.k, case.v
    gdntune.gated_delta_rule_verify(*qkv, **call, ring_count=case.ring_count)
    monkeypatch.setenv("GDNTUNE_CHECK", "1")
    # what was looked at without it is not looked at again
    calls.forget()
    refused(
        r"ring_base\[0\] is -1", gdntune.gated_delta_rule_verify, *qkv, **call,
        ring_count=case.ring_count,
    )  # fmt: skip
    call["ring_base"] = torch.zeros_like(case.ring_base)
    refused(
        r"ring_count\[0\] is 17", gdntune.gated_delta_rule_verify, *qkv, **call,
        ring_count=case.ring_count,
    )  # fmt: skip


def test_what_no_kernel_has_is_refused():
    """Rings that are too short, counts of another dtype, a capacity that there is not."""
    case = make_case(Problem(GDN, 2, 1, 2), "cpu", 0)
    names = ("ring_k", "ring_u", "ring_decay", "ring_base", "ring_count")
    good = {
        "initial_state": case.state, "initial_state_indices": case.read_index,
        "A_log": case.A_log, "a": case.a, "dt_bias": case.dt_bias, "b": case.b,
        **{n: getattr(case, n) for n in names},
    }  # fmt: skip
    for match, changes in (
        ("capacity=8", {"capacity": 8}),
        ("ring_count has dtype torch.int64", {"ring_count": case.ring_count.long()}),
        ("18 rows", {n: good[n][:, :, :18].contiguous() for n in names[:3]}),
        ("ring_u has dtype torch.float16", {"ring_u": case.ring_u.half()}),
        ("ring_k has shape", {"ring_k": case.ring_k[..., :32]}),
        ("the gate", {"A_log": None}),
        ("flush_min=-1", {"flush_min": -1}),
        ("initial_state_indices is of type", {"initial_state_indices": None}),
    ):
        refused(
            match, gdntune.gated_delta_rule_verify, case.q, case.k, case.v, **{**good, **changes}
        )


def test_misuse_of_kda_is_refused():
    """Gates that do not go together, decays of another shape, a bound that the gate has not."""
    c = GDN.replace(op="kda_decode", gate="softplus")
    case = make_case(Problem(c, 2, 1, 2), "cpu", 0)
    names = ("ring_k", "ring_u", "ring_decay", "ring_base", "ring_count")
    good = {
        "initial_state": case.state, "initial_state_indices": case.read_index,
        "A_log": case.A_log, "dt_bias": case.dt_bias, "b": case.b,
        **{n: getattr(case, n) for n in names},
    }  # fmt: skip
    for match, changes in (
        ("A_log and dt_bias together", {"A_log": None}),
        ("lower_bound with them alone", {"A_log": None, "dt_bias": None, "lower_bound": -5.0}),
        ("expected b .* or beta", {"beta": case.b}),
        ("ring_decay has shape", {"ring_decay": case.ring_decay[..., 0].contiguous()}),
        ("ring_seed has shape", {"ring_seed": torch.zeros(3, dtype=torch.int32)}),
        ("ring_rounding='stochastic'", {"ring_seed": torch.zeros(2, dtype=torch.int32)}),
        ("tree", {"retrieve_parent_token": torch.zeros(2, 4)}),
    ):
        given = {**good, **changes}
        if "ring_seed" in changes and changes["ring_seed"].shape == (3,):
            given["initial_state"] = case.state.bfloat16()
        refused(match, gdntune.kda_verify, case.q, case.k, case.v, case.a, **given)
    refused("lower_bound=-5.0 with the gate softplus", rings, c, lower_bound=-5.0)


def test_seeds_are_a_layers_and_a_steps_own():
    """With rounding at random each layer and step has another key; the seed says which."""
    c = GDN.replace(state_dtype="bf16", ring_rounding="stochastic")
    found = []
    for seed in (0, 0, 1):
        torch.manual_seed(0)
        made, _ = rings(c, seed=seed, flush_min=0)
        slots = torch.tensor([1], device="cpu")
        for _ in range(2):
            made.begin(slots)
            for layer in range(LAYERS):
                made.verify(layer, *drafts(c, 1, "cpu"), slots)
            made.accept(slots, torch.tensor([4]))
        found.append(made.states.clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])
