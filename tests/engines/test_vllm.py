"""vLLM's plug-in on stand-ins with its functions' recorded signatures: their calls reach ours, and
are right against theirs; what is not served goes on.
"""

import importlib
import inspect
import logging

import pytest
import stand_ins
import theirs
import torch

from gdntune.engines import late, substitute
from gdntune.engines import vllm as ours
from gdntune.errors import UnsupportedProblem

H, HV, K, V, SLOTS = 2, 4, 64, 64, 12
NAMES = {
    "gdn": (ours.QWEN, "fused_recurrent_gated_delta_rule_packed_decode"),
    "kda": (ours.KIMI, "fused_recurrent_kda_packed_decode"),
}


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A package vllm that can be imported; the plug-in is off afterwards."""
    monkeypatch.delenv("GDNTUNE_VLLM", raising=False)
    stand_ins.write_vllm(tmp_path)
    with stand_ins.importable(tmp_path, "vllm"):
        theirs.CALLS.clear()
        yield importlib.import_module
        ours.disable()
        substitute._said.clear()


def normal(*shape, seed=0, dtype=torch.float32):
    """Random numbers that depend on their shape and seed alone."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def pool(dtype=torch.float32, heads=HV):
    """A pool whose slots are padded to pages, as vLLM's are."""
    return normal(SLOTS, heads * V * K + 32, dtype=dtype)[:, : heads * V * K].unflatten(
        1, (heads, V, K)
    )


def indices(*values):
    """int32 indices."""
    return torch.tensor(values, dtype=torch.int32)


def gdn_rows(L, dtype=torch.float32):
    """mixed_qkv, a, b of L rows, each a slice of something wider, and A_log, dt_bias."""
    wide = normal(L, 2 * H * K + HV * V + 64, dtype=dtype)[:, : 2 * H * K + HV * V]
    ba = normal(L, 2 * HV, seed=1, dtype=dtype)
    return (wide, ba[:, :HV], ba[:, HV:]), (normal(HV, seed=2), normal(HV, seed=3))


def cases():
    """A name, where it is, which function, and its arguments, made anew for each call."""
    (mixed, a, b), (A_log, dt_bias) = gdn_rows(4)
    q, k, v = (x.unsqueeze(0) for x in theirs.split(mixed, HV, K, V))
    one, drafts = indices(3, 0, 7, -1), indices((1, 2, 3), (4, 5, 0), (0, 0, 0))
    # two requests of 3 and 1 tokens, and one of padding without any
    ragged, accepted = indices(0, 3, 4, 4), indices(2, 1, 1)
    dense = indices(0, 1, 2, 3, 4)
    g, beta = -torch.rand(1, 4, HV, K), torch.rand(1, 4, HV)
    full = {"A_log": A_log, "dt_bias": dt_bias, "a": a, "b": b}
    yield "packed", ours.QWEN, "fused_recurrent_gated_delta_rule_packed_decode", lambda: {
        "mixed_qkv": mixed, **full, "scale": 0.2, "initial_state": pool(),
        "out": torch.empty(4, 1, HV, V), "ssm_state_indices": one, "use_qk_l2norm_in_kernel": True,
    }  # fmt: skip
    rows = {"q": q, "k": k, "v": v, "use_qk_l2norm_in_kernel": True}
    yield "sigmoid", ours.QWEN, "fused_sigmoid_gating_delta_rule_update", lambda: {
        **full, **rows, "initial_state": pool(), "cu_seqlens": dense, "ssm_state_indices": one,
    }  # fmt: skip
    yield "sigmoid drafts", ours.QWEN, "fused_sigmoid_gating_delta_rule_update", lambda: {
        **full, **rows, "initial_state": pool(), "cu_seqlens": ragged, "ssm_state_indices": drafts,
        "num_accepted_tokens": accepted,
    }  # fmt: skip
    yield "olmo", ours.OLMO, "fused_recurrent_gated_delta_rule", lambda: {
        **rows, "g": g[..., 0], "beta": beta, "initial_state": pool(), "cu_seqlens": ragged,
        "ssm_state_indices": drafts, "num_accepted_tokens": accepted,
    }  # fmt: skip
    kmixed = normal(4, 2 * HV * K + HV * V + 64)[:, : 2 * HV * K + HV * V]
    q, k, v = (x.unsqueeze(0) for x in theirs.split(kmixed, HV, K, V))
    raw = {
        "raw_g": normal(1, 4, HV, K), "raw_beta": normal(1, 4, HV, seed=4),
        "A_log": A_log, "dt_bias": normal(HV * K, seed=5),
    }  # fmt: skip
    for bound in (None, -5.0):
        yield f"kda packed {bound}", ours.KIMI, "fused_recurrent_kda_packed_decode", lambda bound=bound: {
            "mixed_qkv": kmixed, **raw, "lower_bound": bound, "initial_state": pool(),
            "state_indices": one,
        }  # fmt: skip
    yield "kda packed out", ours.KIMI, "fused_recurrent_kda_packed_decode", lambda: {
        "mixed_qkv": kmixed, **raw, "lower_bound": None, "initial_state": pool(),
        "state_indices": one, "scale": 0.3, "out": torch.empty(1, 4, HV, V),
    }  # fmt: skip
    yield "kda drafts", ours.KIMI, "fused_recurrent_kda", lambda: {
        "q": q, "k": k, "v": v, **raw, "lower_bound": -5.0, "initial_state": pool(),
        "cu_seqlens": ragged, "ssm_state_indices": drafts, "num_accepted_tokens": accepted,
        "out": torch.empty(1, 4, HV, V),
    }  # fmt: skip
    yield "kda one", ours.KIMI, "fused_recurrent_kda", lambda: {
        "q": q, "k": k, "v": v, **raw, "lower_bound": None, "initial_state": pool(),
        "cu_seqlens": dense, "ssm_state_indices": one,
    }  # fmt: skip
    yield "bailing", ours.BAILING, "fused_recurrent_kda", lambda: {
        "q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": pool(),
        "cu_seqlens": dense, "ssm_state_indices": one, "safe_gate": True, "lower_bound": -5.0,
    }  # fmt: skip


CASES = {name: case for name, *case in cases()}


@pytest.mark.parametrize("name", CASES)
def test_calls_reach_ours_and_are_right(name, vllm):
    """Outputs and pools of each function are what vLLM's own gives, padding and short requests
    included, by our kernels alone.
    """
    module, function, arguments = CASES[name]
    expected = getattr(vllm(module), function)(**arguments())
    assert theirs.CALLS[function] == 1
    ours.enable()
    replaced = getattr(vllm(module), function)
    assert inspect.signature(replaced) == inspect.signature(replaced.__wrapped__)
    output, state = replaced(**arguments())
    assert (theirs.CALLS[function], replaced.counts.served) == (1, 1)
    torch.testing.assert_close(output, expected[0].float(), atol=2e-6, rtol=2e-5)
    torch.testing.assert_close(state, expected[1], atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("given", [True, False])
def test_post_conv_op(activation, given, vllm):
    """The fused op's contract, gated norm included: what fused_mtp_decode_impl() returns is ours,
    the same object each time.
    """
    (mixed, a, b), (A_log, dt_bias) = gdn_rows(4)

    def arguments():
        return {
            "mixed_qkv": mixed, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias,
            "state_indices": indices((1, 2, 3), (4, 5, 0), (0, 0, 0)),
            "cu_seqlens": indices(0, 3, 4, 4), "num_accepted_tokens": indices(2, 1, 1),
            "state": pool(), "output_gate": normal(4, HV * V + 8)[:, : HV * V].unflatten(1, (HV, V)),
            "norm_weight": normal(V), "out": torch.empty(4, HV, V) if given else None,
            "scale": 0.1, "norm_eps": 1e-6, "output_gate_activation": activation,
        }  # fmt: skip

    qwen, first, second = vllm(ours.QWEN), arguments(), arguments()
    expected = qwen.fused_mtp_decode_impl()(**first)
    ours.enable()
    op = qwen.fused_mtp_decode_impl()
    assert op is qwen.fused_mtp_decode_impl()
    output = op(**second)
    assert op.counts.served == 1
    assert output is second["out"] or not given
    torch.testing.assert_close(output, expected, atol=5e-6, rtol=5e-5)
    torch.testing.assert_close(second["state"], first["state"], atol=2e-6, rtol=2e-5)


def test_layer_class(vllm):
    """vLLM's layer calls by the names of its module: decode and drafts of bf16 rows and an fp32
    pool are ours.
    """
    qwen = vllm(ours.QWEN)
    (mixed, a, b), parameters = gdn_rows(4, torch.bfloat16)
    results = []
    for on in (False, True):
        if on:
            ours.enable()
        layer = qwen.QwenGatedDeltaNetAttention(
            *parameters, normal(V, dtype=torch.bfloat16), pool()
        )
        out = torch.empty(2, 4, HV, V, dtype=torch.bfloat16)
        layer.decode(mixed, a, b, indices(3, 0, 7, 8), out[0])
        layer.drafts(
            mixed, a, b, indices((1, 2, 3), (4, 5, 6)), indices(0, 3, 4), indices(1, 3),
            normal(4, HV, V, dtype=torch.bfloat16), out[1],
        )  # fmt: skip
        results.append((out, layer.pool))
    assert sum(theirs.CALLS.values()) == 2
    torch.testing.assert_close(results[1], results[0], atol=1e-2, rtol=1e-2)


def test_off_without_the_variable(vllm, monkeypatch):
    """The entry point does nothing unless GDNTUNE_VLLM is 1, and afterwards the same however often
    it is called.
    """
    qwen, name = vllm(ours.QWEN), NAMES["gdn"][1]
    before = getattr(qwen, name)
    for off in ("", "0"):
        monkeypatch.setenv("GDNTUNE_VLLM", off)
        ours.plugin()
        assert getattr(qwen, name) is before
    monkeypatch.setenv("GDNTUNE_VLLM", "1")
    ours.plugin()
    first = getattr(qwen, name)
    ours.plugin()
    assert getattr(qwen, name) is first is not before
    ours.disable()
    assert getattr(qwen, name) is before


def test_nothing_is_imported_before_vllm_does(vllm):
    """The plug-in imports no module of vLLM; what vLLM imports later has ours, in each module that
    holds the name, once.
    """
    import sys

    ours.enable()
    assert not [m for m in sys.modules if m.startswith("vllm")]
    for module, name in NAMES.values():
        assert not hasattr(getattr(vllm(module), name).__wrapped__, "counts")
    assert not {m for m, _ in NAMES.values()} & late._waiting.keys()
    ours.disable()
    assert not late._waiting


@pytest.mark.parametrize(
    ("case", "change", "said"),
    [
        ("packed", {"initial_state": lambda: pool().double()}, "initial_state has dtype"),
        ("sigmoid drafts", {"inplace_final_state": lambda: False}, "inplace_final_state=False"),
        ("sigmoid", {"ssm_state_indices": lambda: indices(1, 2, 3)}, "4 rows of 4 requests"),
        ("kda drafts", {"dt_bias": lambda: None}, "dt_bias is None"),
        ("olmo", {"cu_seqlens": lambda: None}, "cu_seqlens are missing"),
    ],
)
def test_what_is_not_served_is_theirs(case, change, said, vllm, caplog, monkeypatch):
    """vLLM's function gets the same arguments, with one line of log for all such calls, and a pool
    that nobody has touched.
    """
    module, function, arguments = CASES[case]
    given = []
    monkeypatch.setattr(theirs, "call", lambda name, a: given.append((name, a)) or "theirs")
    ours.enable()
    call = arguments() | {name: make() for name, make in change.items()}
    untouched = call["initial_state"].clone()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert getattr(vllm(module), function)(**call) == "theirs"
    assert len(given) == 3
    assert all(given[0][1][name] is x for name, x in call.items() if name in given[0][1])
    assert torch.equal(call["initial_state"], untouched)
    lines = [r.message for r in caplog.records if r.name == "gdntune.engines"]
    assert len(lines) == 1
    assert said in lines[0]


def test_a_fault_is_not_passed_on(vllm, monkeypatch):
    """Only what ours does not serve goes on: another error may have written states already."""
    from gdntune.errors import GdntuneError

    def broken(*args, **kwargs):
        raise GdntuneError("the launch failed")

    monkeypatch.setattr("gdntune.runtime.ops.gated_delta_rule_packed_decode", broken)
    ours.enable()
    module, function, arguments = CASES["packed"]
    with pytest.raises(GdntuneError, match="the launch failed"):
        getattr(vllm(module), function)(**arguments())
    assert not theirs.CALLS


def test_null_index_is_an_argument(vllm):
    """With null_index=-1 slot 0 is a request's, and a second enable() with another is refused."""
    module, function, arguments = CASES["packed"]
    ours.enable(null_index=-1)
    ours.enable(null_index=-1)
    output, state = getattr(vllm(module), function)(**arguments())
    assert output[1].abs().max() > 0
    assert not torch.equal(state[0], pool()[0])
    with pytest.raises(UnsupportedProblem, match=r"null_index=0: since enable\(\) it is -1"):
        ours.enable()


def test_another_version_is_left_alone(tmp_path, vllm, caplog):
    """A function that is gone or has other parameters is not replaced, and a line of log says so."""
    kimi = tmp_path / (ours.KIMI.replace(".", "/") + "/__init__.py")
    kimi.write_text("def fused_recurrent_kda(q, k, v, scale):\n    return 'theirs'\n")
    ours.enable()
    with caplog.at_level(logging.WARNING):
        assert vllm(ours.KIMI).fused_recurrent_kda(1, 2, 3, 4) == "theirs"
    said = [r.message for r in caplog.records if r.name == "gdntune.engines"]
    assert f"{ours.KIMI}.fused_recurrent_kda_packed_decode is not there" in said[0]
    assert "has no parameter raw_g, raw_beta, A_log" in said[1]


def test_norm_is_vllms_kernel_on_cuda(tmp_path, vllm, monkeypatch):
    """On CUDA the gated norm is vLLM's, the newest of the known places; without one the op is not
    served, before a state is written.
    """
    ours._norm_of.cache_clear()
    with pytest.raises(UnsupportedProblem, match="is in none of the places"):
        ours._norm_of("cuda", "silu")
    seen = {}
    for module, name, _ in ours.NORMS:
        path = tmp_path / f"{module.replace('.', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"def {name}(*args, **kwargs):\n    CALLED.append((args, kwargs))\n")
        for parent in [p for p in path.parents if tmp_path in p.parents]:
            (parent / "__init__.py").touch()
        importlib.invalidate_caches()
        seen[module] = vllm(module).CALLED = []
    x, weight = torch.zeros(3, HV, V), torch.ones(V)
    ours._norm_of("cuda", "sigmoid")(x, normal(3, HV, V), weight, 1e-6, "sigmoid")
    ((args, kwargs),) = seen[ours.NORMS[0][0]]
    assert args[0].shape == (3 * HV, V)
    assert args[0].data_ptr() == x.data_ptr() == kwargs["out"].data_ptr()
    assert kwargs["activation"] == "sigmoid"
    ours._norm_of.cache_clear()
