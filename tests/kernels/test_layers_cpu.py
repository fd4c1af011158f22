"""The CPU kernel of a layer: right against fp64, and careful with what it is given."""

import dataclasses
import itertools
import random

import pytest
import torch

from gdntune.checking import reference
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth, check_variant
from gdntune.checking.places import Given, places
from gdntune.checking.reference import convolution
from gdntune.device import arch
from gdntune.kernels import cpu_layer_config, cpu_recurrent_config
from gdntune.kernels.spec import arguments_of
from gdntune.objects.build import compile_objects
from gdntune.objects.store import Store, object_spec
from gdntune.problem import GATES, Contract, Problem

DEVICE = arch.detect("cpu")
KERNEL = cpu_layer_config.KERNEL
PLAIN = Contract(K=64, V=32, norm="silu", state_dtype="fp32", input_dtype="fp32")


def contracts() -> list[Contract]:
    """Every gate with both norms, each time with other fields beside them."""
    pick, found = random.Random(0), []
    for (op, gates), norm in itertools.product(GATES.items(), ("silu", "sigmoid")):
        for gate in gates:
            kept = pick.choice(("none", "dense", "indexed", "slots"))
            found.append(
                Contract(
                    op=op,
                    gate=gate,
                    norm=norm,
                    norm_weight_dtype=pick.choice(("bf16", "fp16", "fp32")),
                    tokens=pick.choice((1, 3)),
                    K=64,
                    V=pick.choice((32, 96, 128)),
                    layout=pick.choice(("k_last", "v_last")),
                    state_dtype=pick.choice(("bf16", "fp16", "fp32")),
                    input_dtype=pick.choice(("bf16", "fp16", "fp32")),
                    intermediate=kept,
                    accepted=kept == "slots",
                    mode=pick.choice(("update", "frozen")),
                    pool=kept == "slots" or pick.random() < 0.5,
                    ragged=pick.random() < 0.4,
                )
            )
    return found


def convolved() -> list[Contract]:
    """Each activation, width and window, with a norm behind and without, of GDN and KDA."""
    plain = Contract(K=64, V=32)
    return [
        plain.replace(conv="silu", norm="silu"),
        plain.replace(conv="silu", conv_width=2, conv_bias=True, input_dtype="fp16"),
        plain.replace(conv="silu", norm="silu", tokens=3),
        plain.replace(conv="silu", tokens=5, ragged=True, conv_width=3),
        plain.replace(conv="silu", norm="silu", tokens=4, intermediate="slots", accepted=True),
        plain.replace(
            conv="silu", tokens=2, intermediate="slots", accepted=True, mode="frozen", ragged=True
        ),
        plain.replace(conv="identity", conv_width=3, norm="sigmoid", input_dtype="fp32"),
        plain.replace(conv="silu", conv_window="shifted", norm="silu", layout="v_last"),
        plain.replace(conv="identity", conv_width=2, conv_window="shifted", mode="frozen"),
        plain.replace(conv="silu", conv_window="shifted", tokens=5, ragged=True),
        plain.replace(conv="silu", conv_window="shifted", tokens=2, conv_width=3),
        plain.replace(
            conv="silu",
            conv_window="shifted",
            tokens=4,
            intermediate="slots",
            accepted=True,
            mode="frozen",
            norm="silu",
        ),
        plain.replace(
            conv="silu",
            conv_window="shifted",
            conv_width=2,
            tokens=3,
            ragged=True,
            intermediate="slots",
            accepted=True,
        ),
        plain.replace(conv="silu", conv_window="shifted", tokens=1, intermediate="slots"),
        plain.replace(conv="silu", conv_window="dims_first", norm="silu"),
        plain.replace(
            conv="silu", conv_window="dims_first", tokens=3, intermediate="slots", accepted=True
        ),
        Contract("kda_decode", gate="softplus", K=64, V=96, conv="silu", conv_bias=True),
        plain.replace(conv="silu", conv_input="interleaved", norm="silu"),
        plain.replace(conv="silu", conv_input="interleaved", tokens=3, ragged=True, conv_width=3),
        plain.replace(
            conv="silu",
            conv_input="interleaved",
            norm="silu",
            tokens=4,
            intermediate="slots",
            accepted=True,
            conv_window="shifted",
            gate_dtype="fp32",
            beta_dtype="fp32",
        ),
    ]


CONV = PLAIN.replace(conv="silu")
CONTRACTS = {c.key(): c for c in [*contracts(), *convolved(), PLAIN, CONV]}


@pytest.fixture(scope="module")
def functions():
    """The compiled function of each contract, by the default rule."""
    store = Store()
    specs = {}
    for key, c in CONTRACTS.items():
        variant = KERNEL.variant(KERNEL.default(c, 8, DEVICE))
        specs[key] = object_spec(KERNEL, c, variant, DEVICE)
    made = compile_objects([(spec, KERNEL.compiler) for spec in specs.values()], store)
    assert [built.reason for built in made if not built.ok] == []
    loaded = store.load(list(specs.values()))
    return {key: loaded[spec.key] for key, spec in specs.items()}


@pytest.mark.parametrize("key", CONTRACTS)
def test_right(key, functions):
    """Against fp64, with padding, gaps between the gate's rows, gates beyond exp's range."""
    check_variant(functions[key], CONTRACTS[key], seeds=(0,)).require()


FAULTS = {
    "eps is another": {"norm_eps": lambda case: 1e-6},
    "the gate is another head's": {"output_gate": lambda case: case.output_gate.flip(2)},
    "the weight is of bf16": {"norm_weight": lambda case: case.norm_weight.bfloat16().float()},
    "the window is a row off": {"conv_position": lambda case: (case.conv_position + 1) % 4},
    "the new row is not stored": {"conv_state": lambda case: case.conv_state.clone()},
    "a tap is missing": {"conv_weight": lambda case: case.conv_weight * torch.tensor([1, 0, 1, 1])},
    "a bias is there": {"conv_bias": lambda case: torch.full((case.mixed_qkv.shape[2],), 2.0**-7)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_check_sees(fault, functions):
    """What a wrong kernel would do: the right one, called with other arguments, is refused."""
    truth = Truth(make_case(Problem(CONV, 4, 1, 2), norm_eps=0.1))
    right, wrong = truth.before.clone(), truth.before.clone()
    functions[CONV.key()](*right.arguments())
    assert truth.judge(right).ok
    arguments = dict(zip(arguments_of(CONV), wrong.arguments(), strict=True))
    arguments |= {name: spoil(wrong) for name, spoil in FAULTS[fault].items()}
    functions[CONV.key()](*arguments.values())
    assert not truth.judge(wrong).ok


@pytest.mark.parametrize(("tokens", "B"), [(1, 64), (4, 64)])
def test_no_input_lies_on_an_edge(tokens, B):
    """A convolution near the middle between two bf16 numbers rounds to either in a right kernel:
    such inputs are drawn anew, so that what is judged is the kernel.

    Fault: where the newest token's tap was next to nothing another input changed nothing, and of
    a million channels one never settled.
    """
    c = PLAIN.replace(conv="silu", input_dtype="bf16", tokens=tokens)
    case = make_case(Problem(c, B, 4, 64))
    where = places(case.contract, Given(**case.tensors()))
    y = convolution(case.contract, Given(**case.tensors()), where, torch.float64)
    for lost in (-1, 1):
        assert torch.equal((y * (1 + lost * 2.0**-19)).bfloat16(), y.bfloat16())


@pytest.mark.parametrize("l2norm", [True, False])
def test_keys_behind_a_convolution_are_near_unit_length(l2norm):
    """Fault: keys that nobody normalises were about five long behind the convolution, as its input
    alone was scaled. An update multiplies fp32's roundings by beta |k|^2 then, and 6 of 1000 right
    results on an H200 were refused.
    """
    c = Contract(conv="silu", norm="silu", state_dtype="fp32")
    for seed in range(3):
        truth = Truth(make_case(Problem(c, 8, 2, 4), "cpu", seed, use_qk_l2norm=l2norm))
        case = truth.before.clone()
        found = reference.decode(c, dtype=torch.float32, **case.tensors())
        part = next(part for part in truth.parts if part.name == "state")
        assert float(part.excesses(found.state[part.places]).max()) < 0.3


def _nearest(y):
    """As the unfused path rounds."""
    return y.bfloat16().double()


def _truncated(y):
    """Towards zero."""
    return (y.float().view(torch.int32) & -65536).view(torch.float32).double()


@pytest.mark.parametrize("l2norm", [True, False])
@pytest.mark.parametrize(
    ("rounded", "right"), [(_nearest, True), (_truncated, False), (lambda y: y, False)]
)
def test_the_check_sees_how_a_convolution_is_rounded(
    rounded, right, l2norm, functions, monkeypatch
):
    """Results of convolutions that are rounded to nearest pass; cut off, or not rounded, they do
    not.
    """
    c = Contract(K=64, V=32, conv="silu", norm="silu")
    truth = Truth(make_case(Problem(c, 4, 1, 2), use_qk_l2norm=l2norm))
    case = truth.before.clone()
    functions[c.key()](*case.arguments())
    assert truth.judge(case).ok
    exact = reference.convolution
    # what is fp32 is not rounded after this
    unrounded = c.replace(input_dtype="fp32")
    monkeypatch.setattr(reference, "convolution", lambda _, *given: rounded(exact(c, *given)))
    found = reference.decode(unrounded, **truth.before.tensors())
    case.output.copy_(found.output)
    case.state.copy_(found.state)
    assert truth.judge(case).ok == right


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("output_gate", lambda z: z[:, :, :1], r"output_gate: shape \[2, 1, 1, 32\]"),
        ("output_gate", lambda z: None, r"output_gate: None.*\[B, T, HV, V\]"),
        ("norm_weight", lambda w: w[:16], r"norm_weight: shape \[16\].*\[V\] = \[32\]"),
        ("norm_weight", lambda w: w.double(), "norm_weight: dtype code 2 of 64 bits"),
        ("norm_eps", lambda e: None, "norm_eps: no number"),
        ("q", lambda q: q[..., :32], r"q: shape \[2, 1, 1, 32\]"),
    ],
)
def test_wrong_arguments_are_refused_by_name(name, spoil, message, functions):
    """What is wrong is named, and nothing is written."""
    case = make_case(Problem(PLAIN, 2, 1, 2))
    arguments = list(case.arguments())
    place = arguments_of(PLAIN).index(name)
    arguments[place] = spoil(arguments[place])
    with pytest.raises((TypeError, ValueError), match=message):
        functions[PLAIN.key()](*arguments)
    assert case.output.isnan().all()


def test_no_requests_is_no_work(functions):
    """B=0 returns at once."""
    case = make_case(Problem(PLAIN, 2, 1, 2))
    nobody = {
        x: getattr(case, x)[:0]
        for x in "q k v a b output output_gate read_index write_index".split()
    }
    before = case.clone()
    functions[PLAIN.key()](*dataclasses.replace(case, **nobody).arguments())
    assert torch.equal(case.state, before.state)


def test_kernels_serve_contracts_with_their_arguments():
    """A kernel whose calling convention has no norm is not offered a contract that has one, nor the
    other way round.
    """
    plain, own = cpu_recurrent_config.KERNEL, Contract()
    setting = plain.default(own, 8, DEVICE)
    assert plain.fault(own, setting) is None
    assert "norm='silu'" in plain.fault(PLAIN, setting)
    assert "norm='none'" in KERNEL.fault(own, setting)
    assert plain.variants(PLAIN, DEVICE) == ()
    assert KERNEL.variants(own, DEVICE) == ()
