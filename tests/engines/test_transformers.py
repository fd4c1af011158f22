"""transformers' models with and without gdntune: the same tokens, and what is not served goes on."""

import contextlib
import inspect
import logging
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

import models  # noqa: E402

from gdntune.engines import substitute  # noqa: E402
from gdntune.engines import transformers as ours  # noqa: E402
from gdntune.errors import ToolMissing  # noqa: E402


@pytest.fixture(autouse=True)
def as_before():
    """transformers as it was, for the next test."""
    yield
    ours.disable()
    substitute._said.clear()


@pytest.mark.parametrize("name", models.MODELS)
def test_same_tokens(name):
    """Two requests, 200 tokens in fp32, greedily: every step of every layer is ours, and no token
    differs.
    """
    model = models.made(name)
    expected = models.generate(model)
    ours.enable()
    assert torch.equal(models.generate(model), expected)
    assert expected[:, 7:].unique().numel() > 3, "tokens that repeat say nothing"
    served = ours.replaced()[f"transformers.models.{name}.modeling_{name}.{models.MODELS[name][1]}"]
    assert (served.counts.served, served.counts.passed_on) == (199, 0)


def test_without_the_library(monkeypatch):
    """Fault: enable() without transformers was a bare ModuleNotFoundError, and half done."""
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "transformers.integrations", None)
        with pytest.raises(ToolMissing, match="a process that has transformers; install it"):
            ours.enable()
    assert not ours._PATCHES._on and not ours.replaced()


def step_arguments(T=1, K=64, V=64, dtype=torch.float32, kda=False, HV=2):
    """A GDN or KDA step of two requests as the models call it."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    q, k = (normal(2, T, 2, K).to(dtype) for _ in range(2))
    v = normal(2, T, HV, V).to(dtype)
    g = -torch.rand(2, T, v.shape[2], *([K] if kda else []), generator=generator)
    beta = torch.rand(2, T, v.shape[2], generator=generator).to(dtype)
    return (q, k, v, g, beta), normal(2, v.shape[2], K, V)


def module(name):
    """The module of a model."""
    return __import__(f"transformers.models.{name}.modeling_{name}", fromlist=["_"])


@pytest.mark.parametrize("name", [*ours.GDN_MODELS, *ours.KDA_MODELS])
@pytest.mark.parametrize("T", [1, 3])
def test_every_models_step(name, T):
    """The step of each model is ours and returns what its own does, updated in the cache's tensor;
    without the final state nothing is written.
    """
    pytest.importorskip(f"transformers.models.{name}")
    kda = name in ours.KDA_MODELS
    arguments, state = step_arguments(T, kda=kda, HV=2 if kda else 4)
    # older versions repeat the heads before the step
    repeated = [x.repeat_interleave(1 if kda else 2, 2) for x in arguments[:2]]
    attribute = ours.KDA_STEP if kda else ours.GDN_STEP
    call = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected = getattr(module(name), attribute)(
        *repeated, *arguments[2:], initial_state=state.clone(), **call
    )
    ours.enable()
    step = getattr(module(name), attribute)
    assert step is ours.replaced()[f"transformers.models.{name}.modeling_{name}.{attribute}"]
    given = state.clone()
    output, final = step(*arguments, initial_state=given, **call)
    assert final is given
    torch.testing.assert_close((output, final), expected, atol=1e-5, rtol=2e-6)
    given = state.clone()
    output, final = step(*arguments, initial_state=given, use_qk_l2norm_in_kernel=True)
    assert final is None
    assert torch.equal(given, state)
    torch.testing.assert_close(output, expected[0], atol=1e-5, rtol=2e-6)
    assert step.counts.passed_on == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"K": 48}, "head sizes K=48, V=64"),
        ({"T": 17}, "17 tokens a request: 1 to 16 are served"),
        ({"dtype": torch.float64}, "tensors of torch.float64"),
        ({"grad": True}, "gradients are on: decode has none; call under torch.no_grad()"),
        ({"state": (2, 2, 64, 32)}, "a state (2, 2, 64, 32) of torch.float32"),
    ],
)
def test_what_is_not_served_goes_on(change, said, caplog):
    """The model's own function serves it, with one line of log for each reason, however often."""
    ours.enable()
    step = module("qwen3_next").torch_recurrent_gated_delta_rule
    grad, shape = change.pop("grad", False), change.pop("state", None)
    arguments, state = step_arguments(**change)
    arguments = tuple(x.requires_grad_(grad) for x in arguments)
    if shape is not None:
        state = torch.zeros(shape)
    for _ in range(2):
        with caplog.at_level(logging.WARNING):
            try:
                output, _ = step(*arguments, initial_state=state, output_final_state=True)
            except RuntimeError:
                assert shape is not None, "theirs refuses this state too"
            else:
                assert output.requires_grad is grad
    lines = [r.message for r in caplog.records if r.name == "gdntune.engines"]
    assert lines == [f"transformers' {ours.GDN_STEP} is served by its own function: {said}"]
    assert (step.counts.served, step.counts.passed_on) == (0, 2)


def test_packed_sequences_are_theirs():
    """cu_seqlens is passed on: transformers 5.24 says what it lacks for it, older ones ignore it."""
    ours.enable()
    arguments, state = step_arguments()
    step = module("qwen3_next").torch_recurrent_gated_delta_rule
    with contextlib.suppress(ValueError):
        step(*arguments, initial_state=state, cu_seqlens=torch.tensor([0, 1]))
    assert (step.counts.served, step.counts.passed_on) == (0, 1)


def test_enable_and_disable_any_number_of_times():
    """What stood there before is back, the same object, and is not wrapped twice."""
    place = module("qwen3_next")
    before = place.torch_recurrent_gated_delta_rule
    ours.disable()
    ours.enable()
    first = place.torch_recurrent_gated_delta_rule
    ours.enable()
    assert place.torch_recurrent_gated_delta_rule is first is not before
    ours.disable()
    ours.disable()
    assert place.torch_recurrent_gated_delta_rule is before


def test_anothers_replacement_stays():
    """disable() leaves what somebody else has put there since."""
    place = module("qwen3_next")
    before = place.torch_recurrent_gated_delta_rule
    ours.enable()
    place.torch_recurrent_gated_delta_rule = other = object()
    ours.disable()
    assert place.torch_recurrent_gated_delta_rule is other
    place.torch_recurrent_gated_delta_rule = before


def test_compiled_whole(caplog):
    """torch.compile(fullgraph) takes the decoding step of a model as one graph, and a step that is
    not served goes on there too.
    """
    model = models.made("qwen3_next")
    if "cache" not in inspect.signature(model.model.layers[0].linear_attn.forward).parameters:
        pytest.skip("an older transformers, whose layer takes its cache by another name")
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(torch.arange(1, 15).reshape(2, 7), cache=cache)
        other = [x.clone() for layer in cache.layers[:1] for x in layer.recurrent_states.values()]
        token = torch.tensor([[3], [5]])
        layer = model.model.layers[0].linear_attn
        hidden = model.model.embed_tokens(token)
        conv = cache.layers[0].conv_states[0].clone()
        expected = layer(hidden, cache=cache)
        after = cache.layers[0].recurrent_states[0].clone()
        cache.layers[0].recurrent_states[0].copy_(other[0])
        cache.layers[0].conv_states[0].copy_(conv)
        ours.enable()
        graphs = []
        compiled = torch.compile(
            layer, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph.forward
        )
        got = compiled(hidden, cache=cache)
    called = {str(node.target) for graph in graphs for node in graph.graph.nodes}
    assert "gdntune.gated_delta_rule_decode" in called, called
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=2e-6)
    torch.testing.assert_close(cache.layers[0].recurrent_states[0], after, atol=1e-5, rtol=2e-6)
    arguments, state = step_arguments(K=48)
    step = module("qwen3_next").torch_recurrent_gated_delta_rule
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        torch.compile(step, backend="aot_eager")(*arguments, initial_state=state)
    assert [r.message for r in caplog.records if "K=48" in r.message]


class Mode:
    """A stand-in for `kernels.Mode`."""

    INFERENCE, TRAINING = "inference", "training"


def test_offered_to_use_kernels(monkeypatch):
    """Where `kernels` is installed, transformers' mapping has ours for inference on CUDA, and
    afterwards what it had. Its layer has the members and the parameters that `kernels` allows.
    """
    from transformers.integrations import hub_kernels

    theirs = object()
    mapping = {ours.HUB_NAMES[0]: {"cuda": {Mode.INFERENCE: theirs, Mode.TRAINING: theirs}}}
    monkeypatch.setattr(hub_kernels, "Mode", Mode, raising=False)
    monkeypatch.setattr(
        hub_kernels, "get_kernel_mapping_transformers", lambda: mapping, raising=False
    )
    ours.enable()
    ours.enable()
    for name in ours.HUB_NAMES:
        assert mapping[name]["cuda"][Mode.INFERENCE].load() is ours.HubLayer
    assert mapping[ours.HUB_NAMES[0]]["cuda"][Mode.TRAINING] is theirs
    ours.disable()
    assert mapping == {
        ours.HUB_NAMES[0]: {"cuda": {Mode.INFERENCE: theirs, Mode.TRAINING: theirs}},
        ours.HUB_NAMES[1]: {"cuda": {}},
    }
    extra = {n for n, _ in inspect.getmembers(ours.HubLayer)} - {
        n for n, _ in inspect.getmembers(torch.nn.Module)
    }
    assert extra == {"can_torch_compile", "has_backward"}
    for name, step in (("qwen3_next", ours.GDN_STEP), ("kimi_linear", ours.KDA_STEP)):
        reference = inspect.signature(getattr(module(name), step)).parameters.values()
        own = list(inspect.signature(ours.HubLayer.forward).parameters.values())[1:]
        assert [(p.name, p.kind) for p in own] == [(p.name, p.kind) for p in reference]


def test_hub_layer_serves_and_goes_on():
    """Bound to a module as `kernels` does it, the layer serves a step, and what it does not serve
    runs the module's own forward.
    """
    from types import MethodType

    class Func(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return "theirs"

    func = Func()
    func.forward = MethodType(ours.HubLayer.forward, func)
    arguments, state = step_arguments()
    own = module("qwen3_next").torch_recurrent_gated_delta_rule
    expected = own(*arguments, initial_state=state.clone(), output_final_state=True)
    got = func(*arguments, initial_state=state, output_final_state=True)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=2e-6)
    arguments, state = step_arguments(K=48)
    assert func(*arguments, initial_state=state) == "theirs"
