"""The CPU kernel of rings: right against fp64 in every dtype and layout, and careful with what it
is given.
"""

import dataclasses

import pytest
import torch

from gdntune import kernels
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth, check_variant
from gdntune.device import arch
from gdntune.errors import UnsupportedProblem
from gdntune.kernels import (
    cpu_recurrent_config,
    cpu_ring_config,
    cpu_ring_norm_config,
    ring_config,
    ring_kda_config,
    ring_norm_config,
)
from gdntune.objects.build import SPILL_LIMIT_BYTES, compile_objects
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract, Problem, contract_fault

DEVICE = arch.detect("cpu")
KERNEL = cpu_ring_config.KERNEL
PLAIN = Contract(K=64, V=32, tokens=3, ring=16)
CONTRACTS = [
    PLAIN,
    PLAIN.replace(tokens=1, ring=32, state_dtype="fp32", ring_dtype="bf16"),
    PLAIN.replace(tokens=8, state_dtype="fp16", layout="v_last", gate="log", beta="given"),
    PLAIN.replace(input_dtype="fp32", state_dtype="fp32", V=96, tokens=16),
    PLAIN.replace(input_dtype="fp16", K=96, layout="v_last"),
    PLAIN.replace(ring_rounding="stochastic"),
    PLAIN.replace(ring_rounding="stochastic", state_dtype="fp16", layout="v_last", K=96),
    PLAIN.replace(op="kda_decode", gate="softplus"),
    PLAIN.replace(
        op="kda_decode", gate="lower_bound", layout="v_last", state_dtype="fp32", ring=32
    ),
    PLAIN.replace(op="kda_decode", gate="log", ring_dtype="bf16", beta="given", tokens=1),
    PLAIN.replace(norm="silu", norm_weight_dtype="bf16"),
    PLAIN.replace(norm="sigmoid", input_dtype="fp32", V=96, layout="v_last", tokens=1),
    PLAIN.replace(norm="silu", norm_weight_dtype="fp16", input_dtype="fp16", ring=32),
]


@pytest.fixture(scope="module")
def functions():
    """The compiled function of each contract."""
    store = Store()
    specs, compilers = {}, {}
    for c in CONTRACTS:
        kernel = cpu_ring_norm_config.KERNEL if c.layer else KERNEL
        variant = kernel.variant(kernel.default(c, 1, DEVICE))
        specs[c], compilers[c] = object_spec(kernel, c, variant, DEVICE), kernel.compiler
    for built in compile_objects([(s, compilers[c]) for c, s in specs.items()], store):
        assert built.ok, built.reason
    loaded = store.load(list(specs.values()))
    return {c: loaded[s.key] for c, s in specs.items()}


@pytest.mark.parametrize("contract", CONTRACTS, ids=Contract.key)
def test_right(functions, contract):
    """By the gate that every variant passes: outputs, what is appended, what is folded, and that
    all else is as it was.
    """
    check_variant(functions[contract], contract, seeds=(0,)).require()


def test_a_fold_says_what_decode_would(functions):
    """The state after a fold is that of a decode of the same tokens from the same state."""
    c = PLAIN
    case = make_case(Problem(c, 2, 1, 2), "cpu", 0)
    case.ring_count.fill_(0)
    kept = case.clone()
    functions[c](*kept.arguments())
    folded = dataclasses.replace(kept, flush_min=0, append=0, output=kept.output.clone())
    folded.ring_count.fill_(c.tokens)
    functions[c](*folded.arguments())
    plain = dataclasses.replace(case, problem=Problem(c.replace(ring=0), 2, 1, 2))
    truth = Truth(plain)
    # u is kept in fp32, the state is rounded once: as in one call
    got = dataclasses.replace(plain.clone(), state=folded.state, output=kept.output)
    truth.judge(got).require()


def test_too_few_rows_are_refused(functions):
    """New entries would lie on live ones."""
    case = make_case(Problem(PLAIN, 2, 1, 2), "cpu", 0)
    few = {name: getattr(case, name)[:, :, :18] for name in ("ring_k", "ring_u", "ring_decay")}
    with pytest.raises(ValueError, match="ring_u: 18 rows were given, expected ring"):
        functions[PLAIN](*dataclasses.replace(case, **few).arguments())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"ring": 8}, "ring=8"),
        ({"mode": "frozen"}, "mode='frozen'"),
        ({"ragged": True}, "ragged=True"),
        ({"pool": False}, "pool=False"),
        ({"conv": "silu"}, "conv='silu'"),
        ({"op": "kda_decode", "gate": "log", "norm": "silu"}, "norm='silu', op=kda_decode"),
        ({"norm_weight_dtype": "bf16"}, "norm_weight_dtype='bf16'"),
        ({"ring": 0, "ring_dtype": "bf16"}, "ring_dtype or ring_rounding with ring=0"),
        ({"state_dtype": "fp32", "ring_rounding": "stochastic"}, "state_dtype='fp32'"),
    ],
)
def test_contracts_without_a_meaning(changes, said):
    """Each says which field."""
    assert said in contract_fault(PLAIN.replace(**changes))


def test_kernels_serve_rings_or_none():
    """A kernel of rings has other arguments: no other serves its contracts, nor it theirs."""
    cuda = arch.target("sm_90a")
    assert {v.kernel for v in kernels.variants(PLAIN, cuda)} == {"ring"}
    kda = PLAIN.replace(op="kda_decode", gate="softplus")
    assert {v.kernel for v in kernels.variants(kda, cuda)} == {"ring_kda"}
    assert kernels.default(kda, 64, cuda).kernel == "ring_kda"
    assert not {"ring", "ring_kda"} & {
        v.kernel for v in kernels.variants(PLAIN.replace(ring=0), cuda)
    }
    normed = PLAIN.replace(norm="silu")
    assert {v.kernel for v in kernels.variants(normed, cuda)} == {"ring_norm"}
    assert kernels.default(normed, 64, DEVICE).kernel == "cpu_ring_norm"
    variant = cpu_recurrent_config.KERNEL.variant(
        cpu_recurrent_config.KERNEL.default(PLAIN.replace(ring=0), 1, DEVICE)
    )
    assert "ring=16" in kernels.refuse(PLAIN, variant)


def test_shared_memory_is_what_is_allocated():
    """Of the configs' shapes: operands, Gram matrices, factors, squares, decays, keys for a fold,
    matrices of three terms, sums of each half of K where four warps share 16 entries, and the state
    where it waits there.
    """
    c = Contract(tokens=4, ring=16)
    rows, N = 8 + 1, 4
    operands = 2 * 136 * rows + 4 * (2 * N * N + 4 * N + (N + 4)) + 8 * N
    expected = operands + 2 * 136 * 16 + 128 * (3 + 1)
    for warps, shared, parts in ((4, False, 2), (4, True, 2), (2, True, 1)):
        knobs = ring_config.Knobs(32, warps, 32 * warps, shared=shared)
        state = 2 * 128 * 32 * warps if shared else 0
        sums = parts * 2 * 32 * 2 * 4
        assert ring_config.block(c, knobs).shared_bytes == expected + state + sums


def test_the_default_is_tried():
    """At every size, of what the configs sweep, and by few variants."""
    device = arch.target("sm_90a")
    for changes in ({}, {"tokens": 8, "ring_dtype": "bf16"}, {"state_dtype": "fp32", "ring": 32}):
        c = Contract(tokens=4, ring=16).replace(**changes)
        tried = ring_config.space(c, device)
        assert 3 <= len(tried) <= 10
        assert {ring_config.default(c, n, device) for n in (1, 64, 4096)} <= set(tried)


def test_a_norm_has_all_of_a_head_in_a_block():
    """Of every width that a block can have; what it cannot have is refused by name."""
    device = arch.target("sm_90a")
    plain = Contract(tokens=4, ring=16, norm="silu")
    for V in (32, 64, 128, 256):
        for changes in ({}, {"state_dtype": "fp32"}, {"tokens": 16, "layout": "v_last"}):
            c = plain.replace(V=V, **changes)
            chosen = {ring_norm_config.default(c, n, device) for n in (1, 4096)}
            for s in (*ring_norm_config.space(c, device), *chosen):
                assert s.rows * s.warps * s.passes == V
                outputs = 4 * c.tokens * V
                inner = ring_config.block(c.replace(norm="none"), s)
                assert ring_norm_config.block(c, s) == (
                    inner.threads,
                    inner.shared_bytes + outputs,
                )
    # a whole head of many tokens in shared memory is more than some GPUs have
    large = plain.replace(K=256, tokens=16, ring=32)
    most = ring_norm_config.refuse(large, ring_config.Knobs(16, 8, 256, shared=True))
    assert "121424 bytes of shared memory a block" in most
    assert not ring_norm_config.default(large, 4096, device).shared
    half = ring_norm_config.refuse(plain, ring_config.Knobs(16, 4))
    assert "V=128 with rows*warps*passes=64" in half
    with pytest.raises(UnsupportedProblem, match="V=96: .* expected 32, 64, 128, 256 or 512"):
        ring_norm_config.default(plain.replace(V=96), 64, device)


def test_the_default_of_kda_is_what_was_fastest():
    """Tried ones at every size, of every layout; for few heads small blocks, else a head's rows at once."""
    device = arch.target("sm_90a")
    for changes in ({}, {"layout": "v_last"}, {"state_dtype": "fp32", "ring": 32, "tokens": 8}):
        c = Contract(op="kda_decode", gate="softplus", tokens=4, ring=16).replace(**changes)
        tried = ring_kda_config.space(c, device)
        assert 0 < len(tried) <= 12
        assert {ring_kda_config.default(c, n, device) for n in (1, 32, 4096)} <= set(tried)
        assert ring_kda_config.default(c, 4096, device).tile_v == 128
    refused = ring_kda_config.refuse(c.replace(op="gdn_decode", gate="raw"), tried[0])
    assert "op=gdn_decode: expected kda_decode" in refused
    large = c.replace(K=256, ring=32, tokens=16)
    assert "bytes of shared memory" in ring_kda_config.refuse(large, tried[0])


def test_kda_compiles_without_spills(tmp_path):
    """What holds most in registers: a long ring, fp32 states, rounding at random."""
    pytest.importorskip("cutlass", reason="nvidia-cutlass-dsl has wheels for Linux alone")
    device, kernel = arch.target("sm_90a"), kernels.get("ring_kda")
    plain = Contract(op="kda_decode", gate="softplus", tokens=8, ring=32)
    objects = []
    for c in (plain.replace(state_dtype="fp32"), plain.replace(ring_rounding="stochastic")):
        v = kernel.variant(kernel.default(c, 4096, device))
        objects.append((object_spec(kernel, c, v, device), kernel.compiler))
    for built in compile_objects(objects, Store(tmp_path)):
        assert built.ok, built.reason
        assert built.manifest.spill_bytes <= SPILL_LIMIT_BYTES


def test_a_reset_ring_reads_nothing(functions):
    """With no live entry a ring may hold anything."""
    case = make_case(Problem(PLAIN, 1, 1, 1), "cpu", 0)
    case.ring_count.fill_(0)
    for x in (case.ring_k, case.ring_u, case.ring_decay):
        x.fill_(torch.nan)
    truth = Truth(case)
    after = case.clone()
    functions[PLAIN](*after.arguments())
    truth.judge(after).require()


def test_rounding_at_random_loses_nothing_in_the_mean(functions):
    """A state that decays by a thousandth in bf16: to nearest nothing decays, at random all does in the
    mean. Another seed rounds otherwise, the same one the same.
    """
    found = {}
    for name, seed in (("nearest", 0), ("stochastic", 1), ("again", 1), ("other", 2)):
        c = PLAIN if name == "nearest" else PLAIN.replace(ring_rounding="stochastic")
        case = make_case(Problem(c, 4, 2, 4), "cpu", 0, padding=0.0, flush_min=0, append=False)
        case.ring_count.fill_(1)
        case.ring_u.zero_()
        case.ring_k.zero_()
        case.ring_decay.fill_(0.999)
        if case.ring_seed is not None:
            case.ring_seed[1] = seed
        slots = case.read_index.long()
        before = case.state[slots].double()
        functions[c](*case.arguments())
        found[name] = case.state[case.write_index.long()].double(), before
    kept = {name: float((after / before).mean()) for name, (after, before) in found.items()}
    assert kept["nearest"] > 0.9998
    assert abs(kept["stochastic"] - 0.999) < 2e-4
    assert torch.equal(found["stochastic"][0], found["again"][0])
    assert not torch.equal(found["stochastic"][0], found["other"][0])
