"""KDA through the public function: it is GDN with a gate for each key dimension, in every gate mode
and up to the ends of their range.
"""

import dataclasses
import itertools
import math

import pytest
import torch
from public import DEVICES, call, refused

import gdntune
from gdntune.checking.cases import make_case
from gdntune.checking.check import TOLERANCE, Truth
from gdntune.problem import Contract, Problem

GATES = {
    "log": Contract(op="kda_decode", gate="log", state_dtype="fp32", gate_dtype="fp32"),
    "softplus": Contract(op="kda_decode", gate="softplus", state_dtype="fp32", gate_dtype="fp32"),
    "lower_bound": Contract(
        op="kda_decode", gate="lower_bound", state_dtype="fp32", gate_dtype="fp32"
    ),
}
WITH_PARAMETERS = ("softplus", "lower_bound")
GDN = Contract(state_dtype="fp32", gate_dtype="fp32")
# what a machine without a compiler needs
CONTRACTS = [
    c.replace(tokens=T, layout=layout)
    for c in (*GATES.values(), GDN, GDN.replace(gate="log"))
    for T in (1, 3)
    for layout in ("k_last", "v_last")
]
CONTRACTS += [
    GATES[gate].replace(gate_dtype=dtype) for gate in WITH_PARAMETERS for dtype in ("bf16", "fp16")
]
CONTRACTS += [GATES["lower_bound"].replace(beta="given", beta_dtype="fp32")]

by_device = pytest.mark.parametrize("device", DEVICES)
by_gate = pytest.mark.parametrize("gate", GATES)
K = 128


def judged(before, **changes):
    """A clone of a case after its public call, which must agree with the fp64 reference and touch
    nothing else.
    """
    truth = Truth(before)
    case = before.clone()
    call(case, **changes)
    truth.judge(case).require()
    return case


@by_device
@by_gate
@pytest.mark.parametrize("tokens, layout", [(1, "k_last"), (3, "k_last"), (3, "v_last")])
def test_a_gate_constant_over_k_is_gdn(tokens, layout, gate, device):
    """With the same gate at each key dimension KDA equals GDN to fp32's rounding; lower_bound
    equals GDN of the log decay it makes.
    """
    raw = gate == "softplus"
    contract = GDN.replace(tokens=tokens, layout=layout, gate="raw" if raw else "log")
    gdn = make_case(Problem(contract, 3, 2, 4), device, seed=1)
    kda = gdn.clone()
    kda.problem = Problem(GATES[gate].replace(tokens=tokens, layout=layout), 3, 2, 4)
    if gate == "lower_bound":
        # decays of e^-0.5 to e^-4
        x = torch.randn(gdn.a.shape, device=device)
        kda.A_log, bias = (
            torch.linspace(-1, 1, 4, device=device),
            torch.linspace(-1, 0, 4, device=device),
        )
        gdn.a = (
            -5 * torch.sigmoid(kda.A_log.double().exp() * (x.double() + bias.double()))
        ).float()
        kda.a, kda.dt_bias = x, bias
    kda.a = kda.a[..., None].expand(*kda.a.shape, K).contiguous()
    if kda.dt_bias is not None:
        kda.dt_bias = kda.dt_bias[:, None].expand(-1, K).contiguous()
    call(gdn)
    call(kda)
    apart = (gdn.state.double() - kda.state.double()).norm(dim=-1)
    assert bool((apart <= 2 * TOLERANCE * tokens * gdn.state.double().norm(dim=-1)).all())
    torch.testing.assert_close(kda.output.float(), gdn.output.float(), rtol=2**-7, atol=1e-5)


def spread(values, shape, device):
    """The values one after another, as often as a shape needs."""
    turns = itertools.cycle(values)
    count = torch.Size(shape).numel()
    return (
        torch.tensor([next(turns) for _ in range(count)], dtype=torch.float64)
        .view(shape)
        .to(device)
    )


FP32 = torch.finfo(torch.float32).max
ENDS = {
    "log": {"g": [0.0, -1e-38, -1e-7, -1.0, -87.0, -88.8, -104.0, -1e4, -FP32, float("-inf")]},
    "softplus": {
        "g": [0.0, 1e-38, -1e-38, 88.0, 89.0, -88.0, -104.0, 1e4, -1e4, FP32 / 2, -FP32 / 2],
        "dt_bias": [0.0, 88.8, -88.8, -200.0, 1e6, FP32 / 2, -FP32 / 2],
        "A_log": [0.0, -88.0, -FP32, 88.0, 88.8, 104.0, 1e4, FP32],
    },
    "lower_bound": {
        "g": [0.0, 1e-38, -1e-38, 88.0, 89.0, -88.0, -104.0, 1e4, -1e4, FP32 / 2, -FP32 / 2],
        "dt_bias": [0.0, 88.8, -88.8, -200.0, 1e6, FP32 / 2, -FP32 / 2],
        "A_log": [0.0, -88.0, -FP32, 88.0, 88.8, 104.0, 1e4, FP32],
    },
}


@by_device
@pytest.mark.parametrize("gate, name", [(gate, name) for gate in ENDS for name in ENDS[gate]])
@pytest.mark.parametrize("tokens", [1, 3])
def test_ends_of_the_range(tokens, gate, name, device):
    """Fault: gates at which exp overflows made 0 * inf = NaN. g, dt_bias and A_log at the ends of
    fp32, each with the others as models have them.
    """
    before = make_case(Problem(GATES[gate].replace(tokens=tokens), 2, 2, 4), device, seed=2)
    field = "a" if name == "g" else name
    x = getattr(before, field)
    x.copy_(spread(ENDS[gate][name], x.shape, device))
    after = judged(before)
    assert after.output.isfinite().all() and after.state.isfinite().all()


@by_device
@pytest.mark.parametrize("gate", WITH_PARAMETERS)
def test_ends_of_the_range_together(gate, device):
    """As above, g, dt_bias and A_log at once, up to exp(A_log) = 55: beyond, a softplus below
    fp32's normal numbers would count.

    On CUDA exp(A_log) below fp32's normal numbers is zero, which counts beside such a g: from -80
    there.
    """
    least = -FP32 if device == "cpu" else -80.0
    before = make_case(Problem(GATES[gate], 4, 5, 5), device, seed=3)
    for field, name in (("a", "g"), ("dt_bias", "dt_bias"), ("A_log", "A_log")):
        x = getattr(before, field)
        x.copy_(
            spread(ENDS[gate][name], x.shape, device).clamp(
                *((least, 4.0) if name == "A_log" else (-FP32, FP32))
            )
        )
    after = judged(before)
    assert after.output.isfinite().all() and after.state.isfinite().all()


# exp(A_log) beyond fp32's largest number, and g with which a zero stood beside it: the decay is 0,
# then 1
VANISHING = {
    "softplus": [(0.0, 0.0), (3.0, 0.0), (-70.0, 0.0), (-250.0, 1.0), (-1e4, 1.0), (-FP32, 1.0)],
    "lower_bound": [
        (0.0, math.exp(-2.5)),
        (1e-6, math.exp(-5)),
        (FP32, math.exp(-5)),
        (-1e-6, 1.0),
        (-FP32, 1.0),
    ],
}


@by_device
@pytest.mark.parametrize("A_log", [88.8, 100.0, 200.0])
@pytest.mark.parametrize("gate", WITH_PARAMETERS)
def test_rates_beyond_exp(gate, A_log, device):
    """Fault: exp(A_log) overflowed from 88.7 on, and inf * 0 was NaN. The decay has its limit
    there: zero, one, or what lower_bound says.
    """
    values, decays = zip(*VANISHING[gate], strict=True)
    before = make_case(Problem(GATES[gate], 2, 1, 1), device, seed=7)
    before.A_log.fill_(A_log)
    before.dt_bias.fill_(0.0)
    before.a.copy_(spread(values, before.a.shape, device))
    before.b.fill_(-200.0)
    after = judged(before)
    # beta is zero: the state is its decay alone
    kept, found = before.state[before.read_index.long()], after.state[after.write_index.long()]
    wanted = kept.double() * spread(decays, before.a[:, 0].shape, device)[..., None, :]
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("A_log", [86.0, 88.5, 90.0, 104.0, 200.0, 1e4, FP32])
@pytest.mark.parametrize("op", ["gdn", "kda"])
def test_rates_that_a_vanishing_softplus_answers(op, A_log):
    """exp(A_log) and softplus(x) beyond fp32 at both ends, their product within: exp(A_log + x),
    which the CPU's kernels follow too.
    """
    contract = GDN if op == "gdn" else GATES["softplus"]
    before = make_case(Problem(contract, 8, 1, 1), "cpu", seed=8)
    before.A_log.fill_(A_log)
    before.dt_bias.fill_(0.0)
    x = spread([-3.0, -1.0, 0.0, 1.0, 2.0, -8.0, -20.0, 30.0], before.a.shape, "cpu")
    before.a.copy_((x - A_log).clamp(min=-FP32))
    after = judged(before)
    assert after.output.isfinite().all() and after.state.isfinite().all()


@by_device
@pytest.mark.parametrize("gate_dtype, limit", [("bf16", 3.3e38), ("fp16", 65504.0)])
@pytest.mark.parametrize("gate", WITH_PARAMETERS)
def test_ends_of_16_bit_gates(gate, gate_dtype, limit, device):
    """As above with g of 16 bits."""
    before = make_case(Problem(GATES[gate].replace(gate_dtype=gate_dtype), 2, 2, 4), device, seed=4)
    before.a.copy_(spread([limit, -limit, 0.0, 90.0, -90.0, 1.0, -1.0], before.a.shape, device))
    after = judged(before)
    assert after.output.isfinite().all() and after.state.isfinite().all()


@by_device
@pytest.mark.parametrize("gate", WITH_PARAMETERS)
@pytest.mark.parametrize(
    "A_of, dt_of, flat", [*itertools.product(("HV", "H"), ("HV", "H"), (False, True))]
)
def test_shapes_of_the_parameters(A_of, dt_of, flat, gate, device):
    """A_log [HV] or [H], dt_bias [HV, K], [H, K] or these flat, in any pairing: the bits of one row
    a value head written out.
    """
    H, HV = 2, 6
    explicit = make_case(Problem(GATES[gate], 3, H, HV), device, seed=5)
    short = {"A_log": explicit.A_log[:H].clone(), "dt_bias": explicit.dt_bias[:H].clone()}
    given = {}
    for name, of in (("A_log", A_of), ("dt_bias", dt_of)):
        if of == "H":
            setattr(explicit, name, short[name].repeat_interleave(HV // H, 0))
            given[name] = short[name]
        else:
            given[name] = getattr(explicit, name)
    if flat:
        given["dt_bias"] = given["dt_bias"].flatten()
    other = explicit.clone()
    judged(explicit)
    call(explicit)
    call(other, **given)
    assert torch.equal(other.output, explicit.output)
    assert torch.equal(other.state, explicit.state)


@by_device
def test_lower_bound_is_dynamic(device):
    """One object serves every lower_bound, and beta given or as a logit each what it says."""
    before = make_case(Problem(GATES["lower_bound"], 2, 1, 2), device, seed=6, lower_bound=-1.0)
    first = judged(before)
    before.lower_bound = -5.0
    assert not torch.equal(judged(before).state, first.state)
    given = dataclasses.replace(
        before.clone(), problem=Problem(GATES["lower_bound"].replace(beta="given"), 2, 1, 2)
    )
    given.b = before.b.float().sigmoid()
    call(given)
    torch.testing.assert_close(given.state, judged(before).state, rtol=1e-5, atol=1e-5)


def kda(gate="softplus", **changes):
    """A KDA call with some arguments changed; those that are None are left out."""
    case = make_case(Problem(GATES[gate], 3, 2, 4), "cpu")
    arguments = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "g": case.a,
        "initial_state": case.state,
        "initial_state_indices": case.read_index,
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "b": case.b,
        "lower_bound": case.lower_bound if gate == "lower_bound" else None,
    }
    return gdntune.kda_decode(**{**arguments, **changes})


REFUSALS = {
    "A_log alone": ({"dt_bias": None}, "A_log and dt_bias: expected both .* or neither"),
    "dt_bias alone": ({"A_log": None}, "A_log and dt_bias: expected both .* or neither"),
    "lower_bound of a log decay": ({"A_log": None, "dt_bias": None, "lower_bound": -5.0}, "lower_bound without A_log and dt_bias"),
    "no beta": ({"b": None}, r"beta: expected b \(a logit\) or beta"),
    "both betas": ({"beta": torch.zeros(3, 1, 4)}, r"beta: expected b \(a logit\) or beta"),
    "A_log heads": ({"A_log": torch.zeros(3)}, r"A_log has shape \(3,\).*\[4\] .* or \[2\]"),
    "A_log of one": ({"A_log": torch.zeros(1)}, r"A_log has shape \(1,\).*\[4\] .* or \[2\]"),
    "A_log of no dimension": ({"A_log": torch.tensor(0.0)}, r"A_log has shape \(\).*\[4\] .* or \[2\]"),
    "A_log of four dimensions": ({"A_log": torch.zeros(1, 1, 4, 1)}, r"A_log has shape \(1, 1, 4, 1\).*\[4\] .* or \[2\]"),
    "A_log dtype": ({"A_log": torch.zeros(4, dtype=torch.float64)}, "A_log has dtype torch.float64: expected one of"),
    "dt_bias heads": ({"dt_bias": torch.zeros(3, K)}, r"dt_bias \(3, 128\).*\[4, 128\] or \[2, 128\]"),
    "dt_bias of each head": ({"dt_bias": torch.zeros(4)}, r"dt_bias has shape \(4,\): expected \[HV, K\], \[H, K\] and these flat, K=128"),
    "dt_bias flat of other heads": ({"dt_bias": torch.zeros(3 * K)}, r"dt_bias \(3, 128\).*\[4, 128\] or \[2, 128\]"),
    "dt_bias of another K": ({"dt_bias": torch.zeros(4, 64)}, r"dt_bias has shape \(4, 64\).*128"),
    "dt_bias dtype": ({"dt_bias": torch.zeros(4, K, dtype=torch.int32)}, "dt_bias has dtype torch.int32: expected one of"),
    "g of each head": ({"g": torch.zeros(3, 1, 4)}, r"g has shape \(3, 1, 4\).*\[3, 1, 4, 128\]"),
    "g of q/k heads": ({"g": torch.zeros(3, 1, 2, K)}, r"g has shape \(3, 1, 2, 128\).*\[3, 1, 4, 128\]"),
    "dt_bias of a list": ({"dt_bias": [0.0] * 512}, "dt_bias is of type list: expected a torch.Tensor"),
    "q of an array beside a flat dt_bias": ({"q": torch.zeros(3, 1, 2, K).numpy(), "dt_bias": torch.zeros(4 * K)}, "q is of type ndarray: expected a torch.Tensor"),
    "no K beside a flat dt_bias": ({"q": torch.zeros(3, 1, 2, 0), "dt_bias": torch.zeros(4 * K)}, r"dt_bias has shape \(512,\): expected .* K=0"),
    "no g": ({"g": None}, "g is of type NoneType: expected a torch.Tensor"),
    "g dtype": ({"g": torch.zeros(3, 1, 4, K, dtype=torch.float64)}, "g has dtype torch.float64: expected one of"),
    "beta per k": ({"b": torch.zeros(3, 1, 4, K)}, r"b has shape \(3, 1, 4, 128\).*\[3, 1, 4\]"),
    "layout": ({"state_layout": "v_first"}, "state_layout='v_first': expected one of k_last, v_last"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name):
    """Every refusal names the argument, what was given and what is expected."""
    changes, match = REFUSALS[name]
    refused(match, kda, **changes)


@pytest.mark.parametrize("lower_bound", [math.nan, -math.inf, 1.0, "x"])
def test_refusals_of_lower_bound(lower_bound):
    """No number, or one with which states grow without bound."""
    refused(
        f"lower_bound={lower_bound!r}: expected a finite number of at most 0",
        kda,
        "lower_bound",
        lower_bound=lower_bound,
    )


@pytest.mark.parametrize("gate", WITH_PARAMETERS)
def test_parameters_that_are_too_short_are_refused_on_later_calls_too(gate):
    """Fault: a compiled call took any number of heads in A_log and dt_bias, and read beyond their
    ends. The first call is right.
    """
    kda(gate)
    refused("A_log has shape", kda, gate, A_log=torch.zeros(1))
    refused("A_log has shape .* dt_bias", kda, gate, dt_bias=torch.zeros(1, K))
