"""gdntune/peers/steps.py and the adapters of a layer's step: on stand-ins that compute what the
libraries' functions do, by their sources, each step agrees with the reference.
"""

from pathlib import Path

import pytest
import torch
from torch.nn import functional

from gdntune import peers
from gdntune.checking.cases import make_case
from gdntune.peers import spec, steps, vllm
from gdntune.peers.compare import Expected
from gdntune.problem import Contract, Problem, contract_fault
from gdntune.tuning import config

STEP = {"norm": "silu", "conv": "silu"}
KDA = {"op": "kda_decode", "gate": "softplus", "norm": "sigmoid", "conv": "silu"}
SLOTS = {"tokens": 4, "mode": "frozen", "intermediate": "slots", "accepted": True}
SWISH = {"silu": functional.silu, "swish": functional.silu, "sigmoid": torch.sigmoid}


def update(
    x, conv_state, weight, bias, activation, conv_state_indices,
    num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, out=None,
):  # fmt: skip
    """vLLM's and SGLang's convolution: windows [slots, D, rows] are shifted in place, of drafts by
    one from the accepted token on; slot 0 is skipped.
    """
    assert conv_state.stride(1) == 1 and x.shape[1] == conv_state.shape[1] == weight.shape[0]
    out, width = torch.empty_like(x) if out is None else out, weight.shape[1]
    tokens = 1 if query_start_loc is None else max_query_len
    for n, slot in enumerate(conv_state_indices.tolist()):
        if slot == 0:
            continue
        rows = x[n * tokens : (n + 1) * tokens]
        at = 0 if num_accepted_tokens is None else int(num_accepted_tokens[n]) - 1
        held = conv_state[slot, :, at : at + width - 1].T.clone()
        seen = torch.cat((held, rows)).float()
        y = seen.unfold(0, width, 1).mul(weight.float()).sum(-1)
        y = y if bias is None else y + bias.float()
        out[n * tokens : (n + 1) * tokens] = functional.silu(y) if activation else y
        conv_state[slot] = torch.cat((held[1:], rows)).T
    return out


def rule(q, k, v, decay, beta, state):
    """One token of the gated delta rule on a state [HV, V, K], in fp32."""
    q, k = (functional.normalize(x, dim=-1, eps=1e-6) for x in (q, k))
    group = v.shape[0] // q.shape[0]
    q, k = (x.repeat_interleave(group, 0) for x in (q, k))
    state = state.float() * decay
    delta = (v - (state @ k[..., None])[..., 0]) * beta[:, None]
    state = state + delta[..., None] * k[:, None]
    return (state @ q[..., None])[..., 0], state


def token(mixed, a, b, A_log, dt_bias, scale, state, lower_bound=None):
    """One request's token from packed q, k and v [D] and raw gates."""
    HV, V, K = state.shape
    heads = (len(mixed) - HV * V) // (2 * K)
    q, k, v = mixed.float().split([heads * K, heads * K, HV * V])
    per_head = a.numel() == HV
    g = a.float().reshape(HV, -1) + dt_bias.float().reshape(HV, -1)
    size = A_log.float().exp()[:, None]
    log = (
        -size * functional.softplus(g)
        if lower_bound is None
        else lower_bound * (size * g).sigmoid()
    )
    decay = log.exp()[:, None] if not per_head else log.exp()[..., None]
    out, state = rule(
        q.view(heads, K), k.view(heads, K), v.view(HV, V), decay, b.float().sigmoid(), state
    )
    return out * scale, state


def decode(
    mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices,
    use_qk_l2norm_in_kernel, lower_bound=None,
):  # fmt: skip
    """Packed decode of either library."""
    assert use_qk_l2norm_in_kernel and mixed_qkv.dim() == 2
    for n, slot in enumerate(ssm_state_indices.tolist()):
        o, state = token(
            mixed_qkv[n], a[n], b[n], A_log, dt_bias, scale, initial_state[slot], lower_bound
        )
        out[n, 0], initial_state[slot] = o, state
    return out, initial_state


def normed(x, z, weight, eps, activation):
    """The gated norm, in fp32."""
    x = x.float()
    rms = x.square().mean(-1, keepdim=True).add(eps).rsqrt()
    return x * rms * weight.float() * SWISH[activation](z.float())


def layer_norm_fwd(x, weight, bias, eps, z, out, norm_before_gate, is_rms_norm, activation):
    """vLLM's."""
    assert x.dim() == z.dim() == 2 and bias is None and norm_before_gate and is_rms_norm
    out.copy_(normed(x, z, weight, eps, activation))
    return out, None, None


def rms_norm_gated(*, x, weight, bias, z, eps, is_rms_norm, activation):
    """SGLang's."""
    assert bias is None and is_rms_norm
    return normed(x, z, weight, eps, activation).to(x.dtype)


def norm_in_place(x, g, weight, bias, activation, eps):
    """SGLang's for KDA."""
    assert bias is None
    return x.copy_(normed(x, g, weight, eps, activation))


def drafts(
    mixed, a, b, A_log, dt_bias, index, starts, accepted, pool, gate, weight, out, scale, eps, kind
):
    """vLLM's CUDA op: from the slot of the last accepted token, a state a token to its slot."""
    for n, (first, last) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        state = pool[int(index[n, int(accepted[n]) - 1])].clone()
        for t, row in enumerate(range(first, last)):
            o, state = token(mixed[row], a[row], b[row], A_log, dt_bias, scale, state)
            pool[int(index[n, t])] = state
            out[row] = normed(o, gate[row], weight, eps, kind)


def fused(x, weight, conv_state, gates, A_log, dt_bias, indices, state, out, lower_bound, norm):
    """A KDA step in one kernel, FlashInfer's or vLLM's."""
    assert weight.dtype == torch.float32 and weight.shape[:2] == (3, 4)
    raw_g, raw_beta = gates
    assert raw_g.shape[:2] == raw_beta.shape[:2] == (1, len(x))
    mixed = update(x, conv_state, weight.transpose(1, 2).flatten(0, 1), None, "silu", indices)
    gate, norm_weight, eps = norm
    for n, slot in enumerate(indices.tolist()):
        o, state[slot] = token(
            mixed[n], raw_g[0, n], raw_beta[0, n], A_log, dt_bias, x.new_tensor(128.0) ** -0.5,
            state[slot], lower_bound,
        )  # fmt: skip
        out[0, n] = normed(o, gate[n], norm_weight, eps, "sigmoid")


def flashinfers(
    x, weight, conv_state, raw_gate, raw_beta, A_log, dt_bias, state_indices, state, output_gate,
    norm_weight, lower_bound, norm_eps, output, backend,
):  # fmt: skip
    """FlashInfer's."""
    assert backend == "cute-dsl" and conv_state.shape[0] == state.shape[0]
    norm = output_gate, norm_weight, norm_eps
    gates = raw_gate, raw_beta
    fused(
        x,
        weight,
        conv_state,
        gates,
        A_log,
        dt_bias,
        state_indices,
        state,
        output,
        lower_bound,
        norm,
    )
    return output


def vllms(
    x, weight, bias, conv_state, raw_g, raw_beta, A_log, dt_bias, indices, state, out, lower_bound,
    output_gate, norm_weight, norm_eps,
):  # fmt: skip
    """vLLM's."""
    assert bias is None
    norm, gates = (output_gate, norm_weight, norm_eps), (raw_g, raw_beta)
    fused(x, weight, conv_state, gates, A_log, dt_bias, indices, state, out, lower_bound, norm)


FUNCTIONS = {
    "causal_conv1d_update": update,
    "fused_recurrent_gated_delta_rule_packed_decode": decode,
    "fused_recurrent_kda_packed_decode": decode,
    "layer_norm_fwd": layer_norm_fwd,
    "run_fused_kda_decode": flashinfers,
}


@pytest.fixture
def libraries(monkeypatch):
    """The libraries' functions, as they compute."""

    def imported(module, name):
        if name == "rms_norm_gated":
            return norm_in_place if "fused_norm_gate" in module else rms_norm_gated
        return FUNCTIONS[name]

    monkeypatch.setattr(spec, "imported", imported)
    ops = {vllm.OP: drafts, vllm.KDA_OP: vllms}
    monkeypatch.setattr(vllm, "_op", lambda name=vllm.OP: ops[name])


CASES = [
    ("vllm", "conv_packed_decode_norm", Contract(**STEP), (5, 2, 4)),
    ("vllm", "conv_packed_decode_norm", Contract(**STEP, state_dtype="fp32"), (5, 2, 4)),
    ("vllm", "conv_packed_decode_norm", Contract(norm="silu"), (3, 2, 2)),
    ("vllm", "conv_packed_decode_norm", Contract(**STEP, conv_width=3, conv_bias=True), (3, 2, 4)),
    ("vllm", "conv_packed_decode_norm", Contract(**STEP, conv_window="shifted"), (5, 2, 4)),
    ("vllm", "conv_post_conv_mtp", Contract(**STEP, **SLOTS), (5, 2, 4)),
    ("vllm", "conv_post_conv_mtp", Contract(**STEP, **SLOTS, conv_window="shifted"), (5, 2, 4)),
    ("vllm", "conv_post_conv_mtp", Contract(**STEP, **SLOTS, conv_window="dims_first"), (3, 2, 4)),
    ("vllm", "conv_post_conv_mtp", Contract(**STEP, **SLOTS, state_dtype="fp32"), (3, 2, 4)),
    ("vllm", "conv_post_conv_mtp", Contract(norm="sigmoid", **SLOTS), (5, 2, 4)),
    ("vllm", "fused_kda_decode", Contract(**KDA, state_dtype="fp32"), (3, 12, 12)),
    ("sglang", "conv_packed_decode_norm", Contract(**STEP), (5, 2, 4)),
    ("sglang", "conv_packed_decode_norm", Contract(**KDA), (3, 2, 2)),
    ("flashinfer", "fused_kda_decode", Contract(**KDA), (3, 8, 8)),
    (
        "flashinfer",
        "fused_kda_decode",
        Contract(**{**KDA, "gate": "lower_bound"}, state_dtype="fp32"),
        (3, 8, 8),
    ),
    ("apart", "conv_ours_norm", Contract(**STEP), (5, 2, 4)),
    ("apart", "conv_ours_norm", Contract(**STEP, **SLOTS), (5, 2, 4)),
    ("apart", "conv_ours_norm", Contract(norm="silu", **SLOTS), (3, 2, 4)),
    ("apart", "conv_ours_norm", Contract(**KDA), (3, 2, 2)),
]


@pytest.mark.parametrize(
    ("peer", "name", "contract", "sizes"),
    CASES,
    ids=lambda x: x.key() if isinstance(x, Contract) else None,
)
def test_a_step_agrees_with_the_reference(libraries, peer, name, contract, sizes):
    """Outputs, states and windows of convolution, delta rule and norm, with slots out of order."""
    entry = peers.get(peer).entry(name)
    problem = Problem(contract, *sizes)
    assert entry in peers.get(peer).serving(problem)[0]
    case = make_case(problem, seed=3)
    expected = Expected(case, entry.tolerance)
    bound = entry.bind(case)
    case.output.fill_(torch.nan)
    returned = bound.call()
    verdict = expected.judge(case, bound, returned)
    assert verdict.ok, verdict.worst
    if contract.conv != "none":
        assert bound.left is not None
        # A second call finds other windows: what it leaves is no longer what one call does.
        bound.call()
        again = expected.judge(case, bound, returned)
        assert not again.ok and "windows of request" in again.worst


@pytest.mark.parametrize("conv_window", ["ring", "shifted", "dims_first"])
def test_the_delta_rule_alone_has_nothing_of_the_parts_around_it(conv_window):
    """Its contract is a legal one: on a GPU that of shifted windows kept `conv_window` and was refused."""
    whole = Contract(**STEP, conv_window=conv_window, conv_width=3, conv_bias=True)
    assert steps.alone(whole) == Contract()
    assert contract_fault(steps.alone(whole)) is None


def test_what_is_served_of_a_layer():
    """Entries of the delta rule alone serve no layer's contract, and those of a layer nothing
    else; a reason is of the same kind alone.
    """
    found = {
        name: tuple(e.name for e in peers.get(name).serving(problem)[0])
        for problem in [Problem(Contract(**STEP, **SLOTS), 4, 16, 64)]
        for name in ("flashinfer", "sglang", "vllm", "apart", "fla")
    }
    assert found == {
        "flashinfer": (),
        "sglang": (),
        "vllm": ("conv_post_conv_mtp",),
        "apart": ("conv_ours_norm",),
        "fla": (),
    }
    plain = Problem(Contract(), 4, 16, 64)
    for name in ("flashinfer", "sglang", "vllm"):
        assert not any(e.kind != "rule" for e in peers.get(name).serving(plain)[0])
    assert peers.get("apart").serving(plain) == (
        [],
        "norm=none, conv=none, ring=0: no entry serves gates and delta rule alone",
    )
    _, reason = peers.get("fla").serving(Problem(Contract(**STEP), 4, 16, 64))
    assert reason == "norm=silu, conv=silu, ring=0: no entry serves more than gates and delta rule"
    _, reason = peers.get("vllm").serving(Problem(Contract(**KDA), 4, 32, 32))
    assert "state_dtype=bf16, expected fp32" in reason and "mixed_qkv" not in reason


def test_bytes_between_the_launches():
    """What a convolution and a norm of their own write and read again."""
    B, H, HV, size = 3, 2, 4, 2
    step = Problem(Contract(**STEP), B, H, HV)
    qkv, out = (2 * H + HV) * 128, HV * 128
    assert steps.between_bytes(step) == 2 * B * (qkv + out) * size
    assert steps.convolution_bytes(step) == 2 * B * qkv * size
    drafts = Problem(Contract(norm="silu", **SLOTS), B, H, HV)
    assert steps.between_bytes(drafts) == 2 * B * 4 * out * size
    assert steps.convolution_bytes(drafts) == 0


def test_the_bench_config_of_a_layer():
    """configs/bench-layer.yaml: each cell beside ours in launches of its own and one library or
    two, with all batches and heads of a layer's step.
    """
    whole = config.load(Path(__file__).parents[2] / "configs" / "bench-layer.yaml")
    cells = whole.all_problems()
    assert len(cells) == 70 and {p.B for p in cells} == {1, 4, 16, 64, 256}
    assert all(peers.get("apart").serving(p)[0] for p in cells)
    found = {
        (name, entry.name)
        for p in cells
        for name in ("flashinfer", "sglang", "vllm")
        for entry in peers.get(name).serving(p)[0]
    }
    layers = {
        (name, entry.name)
        for name in ("flashinfer", "sglang", "vllm")
        for entry in peers.get(name).entries
        if entry.kind == "layer"
    }
    assert found == layers
    for p in cells:
        others = [n for n in ("flashinfer", "sglang", "vllm") if peers.get(n).serving(p)[0]]
        assert others, p.key()
