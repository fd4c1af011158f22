"""Tensors that torch's dispatcher has and memory has not: right, or refused by name, never a crash.

Faults: FakeTensorMode and functionalize ended the process, make_fx dropped the call, a negated view
gave wrong numbers.
"""

import pytest
import torch
from public import refused
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import gdntune
from gdntune.errors import UnsupportedProblem

BF16 = torch.bfloat16


def tensors(*shape, dtype=BF16):
    """Small numbers that tests can tell apart."""
    return torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).to(dtype)


def gdn():
    """A right call of gated_delta_rule_decode, with every tensor that goes with a pool."""
    return {
        "q": tensors(2, 1, 1, 64), "k": tensors(2, 1, 1, 64), "v": tensors(2, 1, 1, 32),
        "initial_state": tensors(3, 1, 32, 64, dtype=torch.float32), "A_log": torch.zeros(1),
        "a": tensors(2, 1, 1), "dt_bias": torch.zeros(1), "b": tensors(2, 1, 1),
        "initial_state_indices": torch.tensor([0, 1], dtype=torch.int32),
        "output_state_indices": torch.tensor([1, 2], dtype=torch.int32),
        "output": torch.zeros(2, 1, 1, 32, dtype=BF16),
    }  # fmt: skip


def verify():
    """As above, several tokens with a buffer of states."""
    call = gdn()
    for name in ("q", "k", "v", "a", "b", "output"):
        call[name] = torch.cat([call[name]] * 2, 1).contiguous()
    call["intermediate_states_buffer"] = torch.zeros(2, 2, 1, 32, 64)
    call["intermediate_state_indices"] = torch.tensor([1, 0], dtype=torch.int32)
    return call


def slots():
    """As above, the states to slots of the pool; ragged."""
    call = verify()
    for name in list(call):
        if "indices" in name or "buffer" in name:
            del call[name]
    for name in ("q", "k", "v", "a", "b", "output"):
        call[name] = call[name].flatten(0, 1)[None]
    call["ssm_state_indices"] = torch.tensor([[0, 1], [2, -1]], dtype=torch.int32)
    call["num_accepted_tokens"] = torch.tensor([1, 1], dtype=torch.int32)
    call["cu_seqlens"] = torch.tensor([0, 2, 4], dtype=torch.int32)
    return call


def kda():
    """A right call of kda_decode."""
    call = gdn()
    del call["a"]
    return call | {"g": tensors(2, 1, 1, 64), "dt_bias": torch.zeros(1, 64)}


def packed():
    """A right call of gated_delta_rule_packed_decode."""
    call = gdn()
    for name in ("q", "k", "v", "output_state_indices"):
        del call[name]
    return call | {"mixed_qkv": tensors(2, 160), "a": tensors(2, 1), "b": tensors(2, 1)}


CALLS = {
    "gdn": (gdntune.gated_delta_rule_decode, gdn),
    "verify": (gdntune.gated_delta_rule_decode, verify),
    "slots": (gdntune.gated_delta_rule_decode, slots),
    "kda": (gdntune.kda_decode, kda),
    "packed": (gdntune.gated_delta_rule_packed_decode, packed),
}


class Subclass(torch.Tensor):
    """A tensor whose operations are its own."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"no rule for {function}")


def freed(x):
    """A tensor whose memory was given back, as FSDP does to parameters."""
    x.untyped_storage().resize_(0)
    return x


MADE = {
    "fake": lambda x: FakeTensorMode().from_tensor(x),
    "functional": torch._to_functional_tensor,
    "negated": torch._neg_view,
    "zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
    "freed": freed,
    "meta": lambda x: x.to("meta"),
    "batched": lambda x: torch._C._functorch._add_batch_dim(x[None], 0, 1),
    "subclass": lambda x: torch.Tensor._make_subclass(Subclass, x),
    "nested": lambda x: torch.nested.nested_tensor([x[0], x[0]]),
}
TRANSFORMS = {
    "vmap": lambda f, x: torch.vmap(f)(torch.stack([x, x])),
    "functionalize": lambda f, x: torch.func.functionalize(f)(x),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("kind", [*MADE, *TRANSFORMS])
@pytest.mark.parametrize("name", CALLS)
def test_every_argument_is_refused_by_name(name, kind):
    """Each tensor argument of each public function, after a right call, whose record is found."""
    function, make = CALLS[name]
    function(**make())
    for argument in make():
        call = make()
        x = call.pop(argument)

        def go(x, call=call, argument=argument):
            return function(**{**call, argument: x})

        # a subclass may refuse the views of a packed call before ours
        own = (NotImplementedError,) if kind == "subclass" else ()
        with pytest.raises((UnsupportedProblem, *own)):
            TRANSFORMS[kind](go, x) if kind in TRANSFORMS else go(MADE[kind](x))


@pytest.mark.parametrize("name", CALLS)
def test_fake_tensors_give_a_fake_output(name):
    """Under FakeTensorMode a call computes nothing and says what it would return."""
    function, make = CALLS[name]
    function(**make())
    with FakeTensorMode() as mode:
        call = {n: mode.from_tensor(x) for n, x in make().items()}
        given = call.pop("output")
        returned = function(**call)
    assert isinstance(returned, torch._subclasses.FakeTensor)
    assert returned.shape == given.shape and returned.dtype == given.dtype


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", CALLS)
def test_make_fx_keeps_the_call(name, mode):
    """The traced graph, run on other tensors, does what the call does: output and states."""
    function, make = CALLS[name]
    names = list(make())
    graph = make_fx(lambda *xs: function(**dict(zip(names, xs, strict=True))), tracing_mode=mode)
    traced = graph(*(x.clone() for x in make().values()))
    left, right = make(), make()
    returned = traced(*left.values())
    assert torch.equal(returned, function(**right))
    for n in names:
        assert torch.equal(left[n], right[n]), n


def test_parameters_of_a_subclass_are_tensors():
    """Engines' weights are subclasses of Parameter without operations of their own."""

    class Weight(torch.nn.Parameter):
        pass

    call, right = gdn(), gdn()
    call["A_log"] = Weight(call["A_log"], requires_grad=False)
    assert torch.equal(
        gdntune.gated_delta_rule_decode(**call), gdntune.gated_delta_rule_decode(**right)
    )


SHAPES = {
    "g of KDA to GDN": ("gdn", {"a": tensors(2, 1, 1, 64)}, r"a has shape .*\[2, 1, 1\]"),
    "g of GDN to KDA": ("kda", {"g": tensors(2, 1, 1)}, r"g has shape .*\[2, 1, 1, 64\]"),
    "address": ("gdn", {"q": tensors(129)[1:].view(2, 1, 1, 64)}, "multiple of 16 bytes"),
    "stride": (
        "gdn", {"k": tensors(2, 1, 1, 66)[..., :64]}, "stride 66 at dimension 0 is not a multiple"
    ),
    "state's address": (
        "gdn",
        {"initial_state": torch.zeros(3 * 32 * 64 + 1)[1:].view(3, 1, 32, 64)},
        "multiple of 16 bytes",
    ),
    "g's address": ("kda", {"g": tensors(129)[1:].view(2, 1, 1, 64)}, "multiple of 16 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("name", SHAPES)
def test_the_cpu_refuses_what_cuda_refuses(name, when):
    """Faults: the CPU took a gate of the other op, odd addresses and strides."""
    kind, changes, match = SHAPES[name]
    function, make = CALLS[kind]
    from gdntune.runtime import call

    call.forget()
    if when == "later":
        function(**make())
    refused(match, function, **(make() | changes))


@pytest.mark.parametrize("when", ["first", "later"])
def test_a_gate_for_each_channel_is_kdas_alone(when):
    """Fault: the CPU took g [B, T, HV, K] for GDN, and computed KDA's formula."""
    call = {
        "q": tensors(2, 1, 2, 64), "k": tensors(2, 1, 2, 64), "v": tensors(2, 1, 2, 32),
        "initial_state": torch.zeros(2, 2, 32, 64), "g": torch.zeros(2, 1, 2),
        "beta": torch.zeros(2, 1, 2),
    }  # fmt: skip
    if when == "later":
        gdntune.gated_delta_rule_decode(**call)
    call["g"] = torch.zeros(2, 1, 2, 64)
    refused(r"g has shape .*\[2, 1, 2\]", gdntune.gated_delta_rule_decode, **call)


@pytest.mark.parametrize("when", ["first", "later"])
def test_pools_padded_by_head_are_refused(when):
    """Fault: the CPU took a pool whose heads lie apart, which CUDA kernels refuse."""
    call = {
        "q": tensors(2, 1, 2, 64), "k": tensors(2, 1, 2, 64), "v": tensors(2, 1, 2, 32),
        "initial_state": torch.zeros(3, 2, 32, 64), "g": torch.zeros(2, 1, 2),
        "beta": torch.zeros(2, 1, 2), "initial_state_indices": torch.tensor([0, 1]),
    }  # fmt: skip
    if when == "later":
        gdntune.gated_delta_rule_decode(**call)
    call["initial_state"] = torch.zeros(3, 2, 33, 64)[:, :, :32]
    refused(
        "initial_state .*expected contiguous inner dimensions",
        gdntune.gated_delta_rule_decode,
        **call,
    )


@pytest.mark.parametrize(
    "setting, alike, wrong",
    [
        ("null_index", (0, 0.0, False, 0j), 0.5),
        ("scale", (1, 1.0, True), "1"),
        ("use_qk_l2norm", (1, 1.0, True), 2),
        ("batch_invariant", (0, 0.0, False), 2),
        ("softplus_threshold", (20, 20.0), None),
    ],
)
def test_equal_numbers_have_one_answer(setting, alike, wrong):
    """Fault: null_index=0.0 was refused, or taken if a call with 0 had gone before: a cache cannot
    tell equal numbers apart.
    """
    from gdntune.runtime import call

    found = []
    for order in (alike, alike[::-1]):
        call.forget()
        found += [gdntune.gated_delta_rule_decode(**gdn(), **{setting: value}) for value in order]
        refused(f"{setting}", gdntune.gated_delta_rule_decode, **gdn(), **{setting: wrong})
    assert all(torch.equal(found[0], x) for x in found)
