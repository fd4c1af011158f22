"""vLLM's plug-in on stand-ins with its functions' recorded signatures: their calls reach ours, and
are right against theirs; what is not served goes on.
"""

import importlib
import inspect
import logging

import calls
import pytest
import stand_ins
import theirs
import torch

import gdntune
from gdntune.engines import late, substitute
from gdntune.engines import vllm as ours
from gdntune.errors import UnsupportedProblem

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


SIZES = calls.Sizes()
CASES = {name: case for name, *case in calls.of_vllm(SIZES)}
DIRECT = [name for name, (_, function, _) in CASES.items() if function != "fused_mtp_decode_impl"]


@pytest.mark.parametrize("name", DIRECT)
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


def test_served_counts(vllm, caplog):
    """What an operator reads: calls of each function that ours served, and those that went on."""
    module, function, arguments = CASES[DIRECT[0]]
    ours.enable()
    name = f"vLLM's {function}"
    before = gdntune.served().get(name, (0, 0))
    getattr(vllm(module), function)(**arguments())
    assert gdntune.served()[name] == (before[0] + 1, before[1])
    with caplog.at_level("INFO", "gdntune.engines"):
        substitute._say_served()
    assert f"{name}: {before[0] + 1} calls served by gdntune" in caplog.text


@pytest.mark.parametrize("name", [name for name in CASES if name not in DIRECT])
def test_post_conv_op(name, vllm):
    """The fused op's contract, gated norm included: what fused_mtp_decode_impl() returns is ours,
    the same object each time.
    """
    arguments = CASES[name][2]
    qwen, first, second = vllm(ours.QWEN), arguments(), arguments()
    expected = qwen.fused_mtp_decode_impl()(**first)
    ours.enable()
    op = qwen.fused_mtp_decode_impl()
    assert op is qwen.fused_mtp_decode_impl()
    output = op(**second)
    assert op.counts.served == 1
    assert second["out"] is None or output is second["out"]
    torch.testing.assert_close(output, expected, atol=5e-6, rtol=5e-5)
    torch.testing.assert_close(second["state"], first["state"], atol=2e-6, rtol=2e-5)


def test_layer_class(vllm):
    """vLLM's layer calls by the names of its module: decode and drafts of bf16 rows and an fp32
    pool are ours.
    """
    qwen, results = vllm(ours.QWEN), []
    cases = {name: make for name, _, _, make in calls.of_vllm(SIZES._replace(dtype=torch.bfloat16))}
    for on in (False, True):
        if on:
            ours.enable()
        one, drafts = cases["packed"](), cases["post conv silu"]()
        layer = qwen.QwenGatedDeltaNetAttention(
            one["A_log"], one["dt_bias"], drafts["norm_weight"], one["initial_state"]
        )
        layer.decode(
            one["mixed_qkv"], one["a"], one["b"], one["ssm_state_indices"], one["out"].squeeze(1)
        )
        layer.drafts(
            drafts["mixed_qkv"], drafts["a"], drafts["b"], drafts["state_indices"],
            drafts["cu_seqlens"], drafts["num_accepted_tokens"], drafts["output_gate"],
            drafts["out"],
        )  # fmt: skip
        results.append((one["out"], drafts["out"], layer.pool))
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
    # Fault: `false` meant on.
    monkeypatch.setenv("GDNTUNE_VLLM", "false")
    with pytest.raises(
        UnsupportedProblem, match="GDNTUNE_VLLM='false': expected 1, or 0 or nothing"
    ):
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
        ("packed", {"initial_state": lambda: SIZES.pool().double()}, "initial_state has dtype"),
        ("sigmoid drafts", {"inplace_final_state": lambda: False}, "inplace_final_state=False"),
        ("sigmoid", {"ssm_state_indices": lambda: SIZES.indices(1, 2, 3)}, "4 rows of 4 requests"),
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


def test_a_refusal_is_of_its_sizes():
    """Fault: nine rows of three requests are refused, and so were nine rows of nine afterwards, since
    the number of requests was no part of what was remembered.
    """
    asked = []

    def served(q, cu_seqlens):
        asked.append(N := cu_seqlens.shape[0] - 1)
        if q.shape[1] != N:
            raise UnsupportedProblem("expected a row a request")
        return "ours"

    both = substitute.before("an engine's function", served, lambda *_: "theirs")
    q, three, nine = torch.zeros(1, 9, 4, 64), torch.zeros(4), torch.zeros(10)
    assert [both(q, three), both(q, three), both(q, nine)] == ["theirs", "theirs", "ours"]
    # the second call was known again, without being worded anew
    assert asked == [3, 9]
    assert (both.counts.served, both.counts.passed_on) == (1, 2)


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
    assert not torch.equal(state[0], SIZES.pool()[0])
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
    x, weight = torch.zeros(3, 4, 64), torch.ones(64)
    ours._norm_of("cuda", "sigmoid")(x, SIZES.normal(3, 4, 64), weight, 1e-6, "sigmoid")
    ((args, kwargs),) = seen[ours.NORMS[0][0]]
    assert args[0].shape == (12, 64)
    assert args[0].data_ptr() == x.data_ptr() == kwargs["out"].data_ptr()
    assert kwargs["activation"] == "sigmoid"
    ours._norm_of.cache_clear()
