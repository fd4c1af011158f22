"""A layer's public functions: right against fp64, remembered, and clear about what they refuse."""

import dataclasses

import pytest
import torch

import gdntune
from gdntune import kernels
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.device import arch
from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract, Problem
from gdntune.runtime import call as calls
from gdntune.runtime import dispatch, layer_call, parts

CONV = ("conv_state", "conv_weight", "conv_bias", "conv_position")
BASE = {"K": 64, "V": 32, "norm": "silu"}
CONTRACTS = {
    "one token": Contract(**BASE),
    "bf16 weight": Contract(**BASE, norm_weight_dtype="bf16", state_dtype="fp32"),
    "tokens": Contract(**BASE, tokens=3),
    "slots": Contract(
        **BASE,
        tokens=3,
        intermediate="slots",
        accepted=True,
        mode="frozen",
        norm_weight_dtype="fp16",
    ),
    "ragged": Contract(**BASE, tokens=4, ragged=True),
    "v_last": Contract(**BASE, layout="v_last"),
    "kda": Contract("kda_decode", gate="softplus", K=64, V=32, norm="sigmoid", tokens=2),
    "convolution": Contract(**BASE, conv="silu"),
    "convolution alone": Contract(K=64, V=32, conv="identity", conv_width=3, conv_bias=True),
    "shifted": Contract(**BASE, conv="silu", conv_width=2, conv_window="shifted"),
    "shifted, tokens": Contract(**BASE, conv="silu", tokens=3, conv_window="shifted"),
    "shifted, slots": Contract(
        **BASE,
        conv="silu",
        tokens=3,
        intermediate="slots",
        accepted=True,
        mode="frozen",
        conv_window="shifted",
    ),
    "dims first, slots": Contract(
        **BASE,
        conv="silu",
        tokens=3,
        intermediate="slots",
        accepted=True,
        mode="frozen",
        conv_window="dims_first",
    ),
    "convolution, tokens": Contract(**BASE, conv="silu", tokens=3),
    "convolution, slots": Contract(
        **BASE, conv="silu", tokens=3, intermediate="slots", accepted=True, mode="frozen"
    ),
    "convolution, ragged": Contract(**BASE, conv="silu", tokens=4, ragged=True),
    "kda, convolution": Contract(
        "kda_decode", gate="softplus", K=64, V=32, norm="sigmoid", conv="silu", input_dtype="fp16"
    ),
    "kda, log": Contract("kda_decode", gate="log", beta="given", K=64, V=32, norm="sigmoid"),
}


def made(contract, seed=0, **options):
    """A case whose q, k and v lie in one tensor, and that tensor."""
    if contract.ragged:
        options = {"lengths": [4, 0, 2], "tail_rows": 2, **options}
    case = make_case(Problem(contract, 3, 1, 2), "cpu", seed, packed_qkv=True, **options)
    return case, case.q._base


def called(case, mixed, **changes):
    """Calls the public function of a case."""
    c = case.contract
    kept = {
        "initial_state": case.state,
        "output_gate": case.output_gate,
        "norm_weight": case.norm_weight,
        **({} if c.norm == "none" else {"norm_gate": c.norm}),
        "norm_eps": case.norm_eps,
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "ssm_state_indices": case.slot_index,
        "num_accepted_tokens": case.accepted,
        "cu_seqlens": case.cu_seqlens,
        "max_tokens": c.tokens if c.ragged else None,
        "initial_state_indices": case.read_index,
        "output_state_indices": case.write_index if c.conv == "none" else None,
        "state_layout": c.layout,
        "null_index": case.null_index,
        "output": case.output,
        **{name: getattr(case, name) for name in CONV},
        **({} if c.conv == "none" else {"conv_activation": c.conv}),
        **changes,
    }
    if c.op == "gdn_decode":
        return gdntune.gated_delta_rule_layer_decode(mixed, case.a, case.b, **kept)
    beta = {"b" if c.beta == "logit" else "beta": case.b}
    return gdntune.kda_layer_decode(mixed, case.a, **beta, **kept)


@pytest.mark.parametrize("name", CONTRACTS)
def test_right(name):
    """Against fp64, padding's rows and untouched slots among it, on the first call and on one that
    is remembered.
    """
    options = {"padding": 0.4}
    if CONTRACTS[name].conv == "none":
        options["index_dtype"] = torch.int64
    case, mixed = made(CONTRACTS[name], **options)
    truth = Truth(case.clone())
    before = case.clone()
    for _ in range(2):
        case.restore(before)
        assert called(case, mixed).data_ptr() == case.output.data_ptr()
        truth.judge(case).require()


def test_rows_of_one_token():
    """[B, W] is one token: its output is [B, HV, V], the same bits, and a fresh tensor each time."""
    case, mixed = made(CONTRACTS["one token"])
    flat = case.clone()
    want = called(case, mixed)[:, 0]
    rows = {"output": None, "output_gate": flat.output_gate[:, 0]}
    for _ in range(2):
        one = flat.clone()
        one.a, one.b = one.a[:, 0], one.b[:, 0]
        got = called(one, mixed[:, 0], **rows)
        assert torch.equal(got, want)


def test_packed_rows():
    """[total, W] with cu_seqlens is one batch of packed rows."""
    case, mixed = made(CONTRACTS["ragged"])
    flat = case.clone()
    want = called(case, mixed)
    flat.a, flat.b = flat.a[0], flat.b[0]
    rows = {"output": flat.output[0], "output_gate": flat.output_gate[0]}
    got = called(flat, mixed[0], **rows)
    assert torch.equal(got.view(torch.int16), want[0].view(torch.int16))


def test_a_parameter_is_taken():
    """A model's norm weight requires a gradient."""
    case, mixed = made(CONTRACTS["one token"])
    weight = torch.nn.Parameter(case.norm_weight)
    other = case.clone()
    want = called(case, mixed)
    for _ in range(2):
        got = called(other.clone(), mixed, norm_weight=weight)
        assert torch.equal(got, want)


REFUSED = {
    "norm_gate": ({"norm_gate": "gelu"}, "norm_gate='gelu': expected one of silu, sigmoid"),
    "norm_eps": ({"norm_eps": -1.0}, "norm_eps=-1.0: expected a finite number from 0"),
    "output_gate": ({"output_gate": None}, "output_gate and norm_weight: expected both or neither"),
    "neither": (
        {"output_gate": None, "norm_weight": None},
        "expected one of the two pairs; without either call",
    ),
    "conv_bias": (
        {"conv_bias": torch.zeros(192)},
        "conv_bias without conv_state and conv_weight",
    ),
    "its shape": (
        {"output_gate": torch.zeros(3, 1, 2, 16, dtype=torch.bfloat16)},
        r"output_gate has shape \(3, 1, 2, 16\).*expected the shape \[3, 1, 2, 32\]",
    ),
    "its dtype": (
        {"output_gate": torch.zeros(3, 1, 2, 32)},
        "output_gate has dtype torch.float32: expected q's, torch.bfloat16",
    ),
    "norm_weight": (
        {"norm_weight": torch.ones(32, dtype=torch.float64)},
        "norm_weight has dtype torch.float64: expected one of",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name):
    """What is wrong is named, and nothing is written."""
    case, mixed = made(CONTRACTS["one token"])
    changes, message = REFUSED[name]
    with pytest.raises(UnsupportedProblem, match=message):
        called(case, mixed, **changes)
    assert case.output.isnan().all()


RING = {
    "tokens": (
        {"tokens": 3},
        {},
        "conv_state has 4 rows a slot: expected 6 or more, those of a ring of .*width 4 and 3 tokens",
    ),
    "shifted": (
        {"tokens": 3},
        {"conv_position": None},
        "conv_state has 4 rows a slot: expected 3, those before a token of a convolution of width 4",
    ),
    "no pool": (
        {},
        {"initial_state_indices": None},
        "pool=False: its windows are in the slots of a pool",
    ),
    "output_state_indices": (
        {},
        {"output_state_indices": torch.zeros(3, dtype=torch.int32)},
        "output_state_indices with a convolution",
    ),
    "width": (
        {},
        {"conv_weight": torch.zeros(192, 5, dtype=torch.bfloat16)},
        "conv_width=5: expected 2 to 4",
    ),
    "rows": (
        {},
        {"conv_state": torch.zeros(3, 3, 192, dtype=torch.bfloat16)},
        "conv_state has 3 rows a slot: expected 4 or more",
    ),
    "slots": (
        {},
        {"conv_state": torch.zeros(2, 4, 192, dtype=torch.bfloat16)},
        r"conv_state has shape \(2, 4, 192\).*expected the shape \[3, rows, 192\]",
    ),
    "dtype": (
        {},
        {"conv_state": torch.zeros(3, 4, 192)},
        "conv_state has dtype torch.float32: expected q's",
    ),
    "position": (
        {},
        {"conv_position": torch.zeros(3, dtype=torch.int64)},
        "conv_position has dtype torch.int64: expected torch.int32",
    ),
    "activation": ({}, {"conv_activation": "relu"}, "conv_activation='relu': expected one of"),
}


@pytest.mark.parametrize("name", RING)
def test_a_convolution_refused_by_name(name):
    """What is wrong with a convolution is named, and nothing is written."""
    fields, changes, message = RING[name]
    case, mixed = made(Contract(K=64, V=32, conv="silu"))
    assert case.conv_state.shape == (3, 4, 192)
    if "tokens" in fields:
        mixed = mixed.repeat(1, fields["tokens"], 1)
        a = case.a.repeat(1, fields["tokens"], 1)
        case.a, case.b, case.output = a, a, None
        case.output_gate = None
    with pytest.raises(UnsupportedProblem, match=message):
        called(case, mixed, **changes)
    assert case.output is None or case.output.isnan().all()


@pytest.mark.parametrize("name", CONTRACTS)
def test_more_requests_than_a_launch_has(name, monkeypatch):
    """Three requests by launches of two, on the first call and on one that is known."""
    monkeypatch.setattr(parts, "MAX_REQUESTS", 2)
    calls.forget()
    case, mixed = made(CONTRACTS[name])
    truth = Truth(case)
    for _ in range(2):
        once = truth.before.clone()
        called(once, once.q.as_strided(mixed.shape, mixed.stride(), mixed.storage_offset()))
        truth.judge(once).require()
    calls.forget()


@pytest.mark.parametrize(
    "name", ["one token", "convolution", "convolution, slots", "kda", "shifted"]
)
def test_under_torch_compile(name):
    """One operator, whole: before, torch.compile was refused."""
    case, mixed = made(CONTRACTS[name])
    truth = Truth(case.clone())
    torch.compile(called, fullgraph=True, backend="aot_eager")(case, mixed)
    truth.judge(case).require()


@pytest.mark.parametrize("name", CONTRACTS)
def test_a_plan(name):
    """Right on its first call, on a known one, and for fewer requests; more are refused."""
    case, mixed = made(CONTRACTS[name])
    truth, c = Truth(case), case.contract
    plan = gdntune.plan(Problem(c, 3, 1, 2), "cpu", norm_eps=case.norm_eps)
    names = "A_log dt_bias num_accepted_tokens cu_seqlens output_gate norm_weight".split()
    fields = {"num_accepted_tokens": "accepted"}
    for call in range(2):
        once = truth.before.clone()
        rows = once.q.as_strided(mixed.shape, mixed.stride(), mixed.storage_offset())
        kept = {x: getattr(once, fields.get(x, x)) for x in (*names, *CONV)}
        kept |= {"initial_state_indices": once.read_index, "slot_indices": once.slot_index}
        kept |= {"output_state_indices": once.write_index, "initial_state": once.state}
        assert plan(rows, once.a, once.b, output=once.output, **kept) is once.output, call
        truth.judge(once).require()
    if not c.ragged:
        want = once.output[:2].clone()
        once = truth.before.clone()
        rows = once.q.as_strided(mixed.shape, mixed.stride(), mixed.storage_offset())[:2]
        by_request = ("initial_state_indices", "output_state_indices", "slot_indices")
        by_request += ("num_accepted_tokens", "output_gate", "conv_position")
        kept = {x: getattr(once, fields.get(x, x)) for x in (*names, *CONV)}
        kept |= {"initial_state_indices": once.read_index, "slot_indices": once.slot_index}
        kept |= {"output_state_indices": once.write_index}
        kept |= {x: kept[x][:2] for x in by_request if kept[x] is not None}
        plan(rows, once.a[:2], once.b[:2], initial_state=once.state, output=once.output[:2], **kept)
        assert torch.equal(once.output[:2], want)


BESIDE = {
    "step": Contract(**BASE, conv="silu", conv_input="interleaved"),
    "no norm, ragged": Contract(
        K=64, V=32, conv="silu", conv_input="interleaved", tokens=4, ragged=True
    ),
    "drafts": Contract(
        **BASE,
        conv="silu",
        conv_input="interleaved",
        tokens=3,
        intermediate="slots",
        accepted=True,
        mode="frozen",
        conv_window="shifted",
    ),
}


def heads_of(case):
    """A case's a and b as views [B, T, H, HV/H] of in_proj_ba's rows."""
    H, r = case.q.shape[2], case.v.shape[2] // case.q.shape[2]
    return {
        x.data_ptr(): x.as_strided((*x.shape[:2], H, r), (*x.stride()[:2], 2 * r, 1))
        for x in (case.a, case.b)
    }


def beside(contract, **options):
    """A case of two q/k heads with three value heads each, side by side."""
    if contract.ragged:
        options |= {"lengths": [4, 0, 2], "tail_rows": 2}
    return make_case(Problem(contract, 3, 2, 6), "cpu", 0, padding=0.4, **options)


def called_beside(case, **changes):
    """`called` with a case's rows as projections leave them."""
    views = heads_of(case)
    split = dataclasses.replace(
        case, a=views[case.a.data_ptr()], b=views[case.b.data_ptr()], output_gate=None
    )
    return called(split, case.mixed_qkv, **{"conv_input": "interleaved", **changes})


@pytest.mark.parametrize("name", BESIDE)
def test_rows_with_heads_side_by_side(name):
    """The rows of Qwen3-Next's projections without a copy, on the first call and on one that is
    remembered; one token's as [B, ...] too, and by a plan.
    """
    case = beside(BESIDE[name])
    truth = Truth(case)
    for call in range(2):
        once = truth.before.clone()
        assert called_beside(once) is not None, call
        truth.judge(once).require()
    once = truth.before.clone()
    plan = gdntune.plan(Problem(case.contract, 3, 2, 6), "cpu", norm_eps=case.norm_eps)
    names = ("A_log", "dt_bias", "cu_seqlens", "norm_weight", *CONV)
    kept = {x: getattr(once, x) for x in names}
    kept |= {"initial_state_indices": once.read_index, "slot_indices": once.slot_index}
    kept |= {"output_state_indices": once.write_index, "num_accepted_tokens": once.accepted}
    views = heads_of(once)
    for _ in range(2):
        plan(
            once.mixed_qkv, views[once.a.data_ptr()], views[once.b.data_ptr()],
            initial_state=once.state, output=once.output, **kept,
        )  # fmt: skip
        truth.judge(once).require()
        once.restore(truth.before)


def test_one_token_of_heads_side_by_side():
    """Rows [B, D] are those of one token."""
    case = beside(BESIDE["step"])
    truth = Truth(case)
    flat = truth.before.clone()
    views = heads_of(flat)
    split = dataclasses.replace(
        flat, a=views[flat.a.data_ptr()][:, 0], b=views[flat.b.data_ptr()][:, 0], output_gate=None
    )
    out = called(split, flat.mixed_qkv[:, 0], conv_input="interleaved", output=None)
    assert out.shape == (3, 6, 32)
    flat.output[:, 0] = out
    truth.judge(flat).require()


def test_heads_side_by_side_under_torch_compile():
    """The operator sees a and b as views of four dimensions, and its output has three of heads."""
    case = beside(BESIDE["step"])
    truth = Truth(case)
    once = truth.before.clone()
    views = heads_of(once)

    def step(mixed, a, b):
        split = dataclasses.replace(once, a=a, b=b, output_gate=None)
        return called(split, mixed, conv_input="interleaved", output=None)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    rows = once.mixed_qkv, views[once.a.data_ptr()], views[once.b.data_ptr()]
    once.output.copy_(compiled(*rows))
    truth.judge(once).require()


WRONG_HEADS = {
    "layout": ({"conv_input": "packed by head"}, "conv_input='packed by head': expected one of"),
    "gate": ({"output_gate": torch.ones(3, 1, 6, 32).bfloat16()}, "the gate is in mixed_qkv"),
    "no convolution": (
        dict.fromkeys(("conv_state", "conv_weight", "conv_position")),
        "conv_input='interleaved' without conv_state",
    ),
}


@pytest.mark.parametrize("name", WRONG_HEADS)
def test_heads_side_by_side_are_refused(name):
    """What does not go with rows of heads side by side says so."""
    changes, said = WRONG_HEADS[name]
    case = beside(BESIDE["step"])
    with pytest.raises(UnsupportedProblem, match=said):
        called_beside(case, **changes)


def test_gates_that_are_no_views():
    """a and b copied out of their rows have other strides, which kernels would read wrongly."""
    case = beside(BESIDE["step"])
    views = heads_of(case)
    split = dataclasses.replace(
        case, a=views[case.a.data_ptr()].clone(), b=views[case.b.data_ptr()], output_gate=None
    )
    with pytest.raises(UnsupportedProblem, match="a has strides .*expected 6 between q/k heads"):
        called(split, case.mixed_qkv, conv_input="interleaved")
    with pytest.raises(UnsupportedProblem, match=r"expected 2\*H\*K"):
        called_beside(dataclasses.replace(case, mixed_qkv=case.mixed_qkv[..., :-8]))


def test_the_operators_say_what_they_write():
    """State, output and windows, and nothing else: what torch.library checks of an operator."""
    case, mixed = made(CONTRACTS["convolution"])
    given = (
        mixed, case.a, case.b, case.state, case.A_log, case.dt_bias, case.read_index,
        case.read_index, None, None, None, case.output.fill_(0), case.output_gate,
        case.norm_weight, case.conv_state.nan_to_num_(), case.conv_weight, None,
        case.conv_position,
    )  # fmt: skip
    settings = ("raw", True, False, "k_last", False, False, False, None, None, 1.0, 20.0, 0.0)
    ends = (False, -1, True, "silu", 1e-6, "silu", "packed")
    torch.library.opcheck(
        torch.ops.gdntune.gated_delta_rule_layer_decode.default, (*given, *settings, *ends)
    )


def test_readers_of_a_shifted_window():
    """On CUDA a block or a cluster has all readers of a window, so that they can wait for one another:
    settings and calls where others would read it are refused by name.
    """
    contract, device = Contract(conv="silu", conv_window="shifted"), arch.target("sm_90a")
    layer = kernels.get("layer")
    found = {(s.share * s.group, s.tile_v) for s in layer.space(contract, device)}
    assert found == {(8, 128)}
    shared = layer.default(contract.replace(conv_window="ring"), 64, device)
    assert "expected share * group = 8" in layer.refuse(contract, shared)
    layer_call.check_readers("gdn_decode", 2, 16)
    with pytest.raises(UnsupportedProblem, match="HV=18, H=2 without conv_position.*at most 8"):
        layer_call.check_readers("gdn_decode", 2, 18)
    with pytest.raises(UnsupportedProblem, match="at most 1 value heads"):
        layer_call.check_readers("kda_decode", 1, 2)


def test_steps_in_a_row():
    """Nine calls of one token, the ring going round twice, are the convolution and the delta rule
    over nine tokens.
    """
    T, contract = 9, Contract(K=64, V=32, norm="silu", conv="silu", state_dtype="fp32")
    case, _ = made(contract)
    D = case.mixed_qkv.shape[-1]
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(3, T, D, generator=generator).bfloat16()
    case.conv_state.zero_()
    start = case.state.clone()
    outputs = []
    for t in range(T):
        at = torch.full((3,), t % 4, dtype=torch.int32)
        changes = {"output": None, "conv_position": at}
        outputs.append(called(case, tokens[:, t : t + 1], **changes))
    # the same apart, in fp32 but for the rounding of the convolution
    x = torch.nn.functional.pad(tokens.float().transpose(1, 2), (3, 0))
    y = torch.nn.functional.conv1d(x, case.conv_weight.float()[:, None], groups=D)
    y = torch.nn.functional.silu(y).bfloat16().transpose(1, 2)
    pool = start
    for t in range(T):
        q, k, v = y[:, t : t + 1].split((64, 64, 64), -1)
        o = gdntune.gated_delta_rule_decode(
            q.unflatten(-1, (1, 64)).float(), k.unflatten(-1, (1, 64)).float(),
            v.unflatten(-1, (2, 32)).float(), A_log=case.A_log, a=case.a, dt_bias=case.dt_bias,
            b=case.b, initial_state=pool, initial_state_indices=case.read_index,
        )  # fmt: skip
        z = case.output_gate.float()
        rstd = torch.rsqrt((o * o).mean(-1, keepdim=True) + 1e-6)
        want = o * rstd * case.norm_weight * torch.nn.functional.silu(z)
        # a channel near the middle between two bf16 numbers may round to either
        torch.testing.assert_close(outputs[t].float(), want, rtol=2**-6, atol=2**-6)


def test_rejected_drafts_leave_the_window_as_it_was():
    """Three drafts, of which one is accepted, then three others: as if the rejected ones had never
    been, by the position alone.
    """
    contract = Contract(
        K=64, V=32, conv="silu", tokens=3, intermediate="slots", accepted=True, mode="frozen",
        state_dtype="fp32",
    )  # fmt: skip
    case, _ = made(contract, extra_rows=2)
    rows = case.conv_state.shape[1]
    case.conv_state.nan_to_num_(0.0)
    generator = torch.Generator().manual_seed(2)
    drafts = torch.randn(2, 3, 3, case.mixed_qkv.shape[-1], generator=generator).bfloat16()

    def step(case, mixed, at, accepted):
        changes = {
            "output": None,
            "conv_position": torch.full((3,), at % rows, dtype=torch.int32),
            "num_accepted_tokens": torch.full((3,), accepted, dtype=torch.int32),
        }
        return called(case, mixed, **changes)

    other = case.clone()
    step(case, drafts[0], 5, 1)
    got = step(case, drafts[1], 6, 1)
    # the same with other rejected drafts
    changed = drafts[0].clone()
    changed[:, 1:] = 7
    step(other, changed, 5, 1)
    assert torch.equal(got, step(other, drafts[1], 6, 1))
    # and the accepted one counts
    changed[:, 0] = 7
    assert not torch.equal(got, step_again(other, changed, drafts[1], step))


def test_shifted_windows_of_drafts_roll_as_rings_do():
    """Four calls of three drafts, of which three, one and two are accepted: a window that is shifted
    by the count of accepted tokens alone, as vLLM's pools are, gives what a ring gives.
    """
    contract = Contract(
        K=64, V=32, conv="silu", tokens=3, intermediate="slots", accepted=True, mode="frozen",
        state_dtype="fp32",
    )  # fmt: skip
    ring, _ = made(contract)
    shifted = ring.clone()
    ring.conv_state.nan_to_num_(0.0)
    # width - 2 + T rows, of which the first three are the window
    D = ring.mixed_qkv.shape[-1]
    shifted.conv_state = ring.conv_state.new_zeros(len(ring.conv_state), 5, D)
    shifted.conv_state[:, :3] = ring.conv_state[:, 2:5]
    generator, at = torch.Generator().manual_seed(2), 5
    for accepted, staying in ((1, 3), (3, 1), (1, 2), (2, 1)):
        drafts = torch.randn(3, 3, D, generator=generator).bfloat16()
        counts = {"output": None, "num_accepted_tokens": torch.full((3,), accepted).int()}
        place = {"conv_position": torch.full((3,), at % 6, dtype=torch.int32)}
        want = called(ring, drafts, **counts, **place)
        assert torch.equal(called(shifted, drafts, **counts, conv_position=None), want)
        at += staying


def step_again(case, first, second, step):
    """Both steps anew."""
    step(case, first, 5, 1)
    return step(case, second, 6, 1)


def test_columns_that_do_not_fit_are_refused():
    """The packed row's width is that of the heads."""
    case, mixed = made(CONTRACTS["one token"])
    with pytest.raises(UnsupportedProblem, match=r"mixed_qkv has 184 columns.*2\*H\*K \+ HV\*V"):
        called(case, mixed[..., :184])


def test_a_table_without_a_layer_says_nothing_of_one():
    """Rules of the delta rule alone are not near to a layer's contract: their kernels have no norm."""
    plain = Contract()
    found = dispatch.runtime("cpu").choices(plain.replace(norm="silu"))
    assert {c.variant.kernel for c in found} == {"cpu_layer"}
