"""vLLM's kernels as its engine calls them: packed decode at T=1, its CUDA op for drafts, the Triton
forms that it falls back to, and those from given gates for GDN and KDA. K-last pools.

They take slot 0 for padding, so a pool is handed over with an empty slot before its first. Where
each token's state is kept it goes to a slot of its own and the slot that was read stays: vLLM's
form of speculative decoding. Nothing else is written at T>1. The CUDA op has the layer's gated
norm inside, so it is judged against ours with vLLM's norm behind it.
"""

import dataclasses
import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import ToolMissing, UnsupportedProblem
from gdntune.peers.sglang import first, usual_softplus
from gdntune.peers.spec import (
    Bound,
    Entry,
    Function,
    Peer,
    mixed_qkv,
    packed,
    slots_of,
    starts,
    unless,
)
from gdntune.peers.steps import (
    between_bytes,
    convolution_bytes,
    convolved,
    gate_of,
    refuse_step,
    rows_of,
    taps_by_part,
    windows,
)
from gdntune.problem import Contract, Problem

_OPS = "vllm.third_party.flash_linear_attention.ops"
_ROWS = (
    "q k v scale initial_state inplace_final_state cu_seqlens ssm_state_indices num_accepted_tokens"
    " use_qk_l2norm_in_kernel"
)
PACKED = Function(
    f"{_OPS}.fused_recurrent",
    "fused_recurrent_gated_delta_rule_packed_decode",
    tuple(
        "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices"
        " use_qk_l2norm_in_kernel".split()
    ),
)
SIGMOID = Function(
    f"{_OPS}.fused_sigmoid_gating",
    "fused_sigmoid_gating_delta_rule_update",
    tuple(f"{_ROWS} A_log dt_bias a b beta threshold is_kda".split()),
)
GDN = Function(
    f"{_OPS}.fused_recurrent",
    "fused_recurrent_gated_delta_rule",
    tuple(f"{_ROWS} g beta".split()),
)
# The function below fused_recurrent_kda, which in some versions drops num_accepted_tokens.
KDA = Function(f"{_OPS}.kda", "fused_recurrent_kda_fwd", tuple(f"{_ROWS} g beta".split()))
# What its Kimi models call, from raw gates.
_K3 = "vllm.models.kimi_k3.nvidia.ops.third_party.kda.fused_recurrent"
_RAW = "raw_g raw_beta A_log dt_bias lower_bound initial_state out"
KDA_PACKED = Function(
    _K3,
    "fused_recurrent_kda_packed_decode",
    tuple(f"{_RAW} mixed_qkv state_indices scale".split()),
)
KDA_RAW = Function(
    _K3,
    "fused_recurrent_kda",
    tuple(f"{_RAW} q k v cu_seqlens ssm_state_indices num_accepted_tokens".split()),
)
CONV = Function(
    "vllm.model_executor.layers.mamba.ops.causal_conv1d",
    "causal_conv1d_update",
    tuple(
        "x conv_state weight bias activation conv_state_indices num_accepted_tokens"
        " query_start_loc max_query_len out".split()
    ),
)
# Below what its gated norm calls, which has no argument for the output.
GATED_NORM = Function(
    f"{_OPS}.layernorm_guard",
    "layer_norm_fwd",
    tuple("x weight bias eps z out norm_before_gate is_rms_norm activation".split()),
)
NORM = Function(
    "vllm.model_executor.layers.mamba.ops.layernorm_gated",
    "rms_norm_gated",
    tuple("x weight bias z eps norm_before_gate".split()),
)

OP, AFTER = "fused_gdn_decode_post_conv_mtp", "ours_then_rms_norm_gated"
KDA_OP = "fused_kda_decode"
# What registers torch.ops._C.<OP>: vLLM's libraries, or a module of one's own that loads one of
# them where vLLM is not installed whole.
LIBRARIES = ("vllm._C_stable_libtorch", "vllm._C", "vllm_op")
# Its rows of state_indices, and its value heads for each q/k head.
OP_TOKENS, OP_GROUPS = 8, (1, 2, 3, 4, 8)
KDA_OP_HEADS = (12, 24, 48, 96)
NORM_EPS = 1e-5

_OWN_POOL = "on a pool of its own with an empty slot 0, filled before the timed call"


def _writes(c: Contract) -> str | None:
    """Why the states that a contract keeps are not those that it writes: one at T=1, else each
    token's to its slot.
    """
    if (c.mode, c.intermediate) == ("frozen", "slots") or (c.tokens, c.mode, c.intermediate) == (
        1,
        "update",
        "none",
    ):
        return None
    return (
        "it writes each token's state to a slot of its own, at T=1 the final state: expected"
        " mode=frozen with slots, or T=1"
    )


def _shifted(case: Case) -> tuple[Tensor, Tensor]:
    """A pool without requests in slot 0, and the slots in it: [B], or [B, 1+S] where each token has
    its own. Requests are as much out of order in it as in the case's own.
    """
    if case.slot_index is not None:
        states, index = case.state, case.slot_index + 1
        pool = states.new_zeros((states.shape[0] + 1, *states.shape[1:]))
        pool[1:] = states
        return pool, index
    slots = slots_of(case).long()
    index = slots.argsort().argsort() + 1
    pool = case.state.new_zeros((case.problem.B + 1, *case.state.shape[1:]))
    pool[index] = case.state[slots]
    return pool, index.to(torch.int32)


def _bound(call: Any, pool: Tensor, index: Tensor) -> Bound:
    """A call whose output is the first that it returns, and whose states are in the pool."""
    if index.dim() == 1:
        return Bound(call, first, lambda _: pool, index)
    return Bound(call, first, intermediate=lambda _: pool[index.long()])


def _accepted(case: Case, columns: int) -> Tensor | None:
    """The counts of accepted tokens; 0 names the first column here and would be column -1 there."""
    return None if case.accepted is None else case.accepted.clamp(1, columns)


def _rows(case: Case, pool: Tensor, index: Tensor) -> dict[str, Any]:
    """The arguments that the functions on packed rows share."""
    return {
        **{name: packed(case, getattr(case, name)) for name in ("q", "k", "v")},
        "scale": case.scale,
        "initial_state": pool,
        "inplace_final_state": True,
        "cu_seqlens": starts(case),
        "ssm_state_indices": index,
        "num_accepted_tokens": _accepted(case, index.shape[-1]),
        "use_qk_l2norm_in_kernel": bool(case.use_qk_l2norm),
    }


# -- fused_recurrent_gated_delta_rule_packed_decode


def _refuse_packed(p: Problem) -> str | None:
    raw = {"op": ("gdn_decode",), "layout": ("k_last",), "gate": ("raw",), "beta": ("logit",)}
    return unless(
        p.contract, **raw, tokens=(1,), mode=("update",), intermediate=("none",), ragged=(False,)
    )  # fmt: skip


def _packed(case: Case, mixed: Tensor, out: Tensor, pool: Tensor, index: Tensor) -> dict[str, Any]:
    usual_softplus(case)
    return {
        "mixed_qkv": mixed,
        "a": case.a[:, 0],
        "b": case.b[:, 0],
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "scale": case.scale,
        "initial_state": pool,
        "out": out,
        "ssm_state_indices": index,
        "use_qk_l2norm_in_kernel": bool(case.use_qk_l2norm),
    }


def _bind_packed(case: Case) -> Bound:
    function = PACKED.load()
    pool, index = _shifted(case)
    arguments = _packed(case, mixed_qkv(case), case.output, pool, index)
    return _bound(lambda: function(**arguments), pool, index)


# -- the CUDA op for drafts, and ours with the norm that it has inside


def _refuse_op(p: Problem) -> str | None:
    c = p.contract
    fault = unless(
        c,
        op=("gdn_decode",),
        layout=("k_last",),
        K=(128,),
        V=(128,),
        input_dtype=("bf16",),
        gate_dtype=("bf16",),
        beta_dtype=("bf16",),
        A_log_dtype=("fp32",),
        state_dtype=("bf16", "fp32"),
        gate=("raw",),
        beta=("logit",),
        mode=("frozen",),
        intermediate=("slots",),
        tokens=tuple(range(2, OP_TOKENS + 1)),
    )
    if fault is None and p.HV // p.H not in OP_GROUPS:
        return f"HV/H={p.HV // p.H}, expected {' or '.join(map(str, OP_GROUPS))}"
    return fault


def _norm(case: Case) -> tuple[Tensor, Tensor]:
    """The gate [L, HV, V] and the weight [V] of a layer's norm, the same at each call."""
    rows = packed(case, case.v)[0]
    chance = torch.Generator(rows.device).manual_seed(0)
    gate = torch.empty_like(rows, memory_format=torch.contiguous_format)
    gate.normal_(generator=chance)
    weight = torch.empty(rows.shape[-1], dtype=torch.float32, device=rows.device)
    return gate, weight.uniform_(0.5, 1.5, generator=chance)


def _epilogue(
    gate: Tensor, weight: Tensor, tokens: int, output: Tensor, requests: Tensor
) -> Tensor:
    """RMSNorm over V, times the weight and silu of the gate, in fp64."""
    z = gate.unflatten(0, (-1, tokens))[requests].double()
    rms = output.square().mean(-1, keepdim=True).add(NORM_EPS).rsqrt()
    return output * rms * weight.double() * torch.nn.functional.silu(z)


def _op(name: str = OP) -> Any:
    """A CUDA op; ToolMissing says where it was looked for."""
    faults = []
    for library in ("", *LIBRARIES):
        if library:
            try:
                importlib.import_module(library)
            except Exception as e:  # noqa: BLE001  a library for another torch fails as it likes
                faults.append(f"{library} ({type(e).__name__}: {e})")
        if hasattr(torch.ops._C, name):
            return getattr(torch.ops._C, name)
    raise ToolMissing(
        f"torch.ops._C.{name} is not registered: none of {'; '.join(faults)} brings it; install"
        " vLLM for this torch, or leave this peer out"
    )


def _op_call(case: Case, mixed: Tensor, norm: tuple[Tensor, Tensor, float, str]) -> Bound:
    """The CUDA op for drafts. norm: the gate, the weight, eps and the gate's kind."""
    usual_softplus(case)
    pool, index = _shifted(case)
    index, out = index.contiguous(), packed(case, case.output)[0]
    accepted = _accepted(case, index.shape[1])
    if accepted is None:
        accepted = torch.ones(case.problem.B, dtype=torch.int32, device=out.device)
    gate, weight, eps, kind = norm
    arguments = (
        mixed,
        packed(case, case.a)[0],
        packed(case, case.b)[0],
        case.A_log,
        case.dt_bias,
        index,
        starts(case),
        accepted,
        pool,
        gate,
        weight,
        out,
        case.scale,
        eps,
        kind,
    )
    return Bound(
        functools.partial(_op(), *arguments),
        lambda _: out,
        intermediate=lambda _: pool[index.long()],
    )


def _bind_op(case: Case) -> Bound:
    gate, weight = _norm(case)
    bound = _op_call(case, mixed_qkv(case), (gate, weight, NORM_EPS, "silu"))
    epilogue = functools.partial(_epilogue, gate, weight, case.contract.tokens)
    return dataclasses.replace(bound, epilogue=epilogue)


def _bind_after(case: Case) -> Bound:
    function, (gate, weight) = NORM.load(), _norm(case)
    out = packed(case, case.output)[0]
    call = functools.partial(function, out, weight, None, z=gate, eps=NORM_EPS)
    epilogue = functools.partial(_epilogue, gate, weight, case.contract.tokens)
    return Bound(call, lambda returned: returned, epilogue=epilogue)


def _norm_bytes(p: Problem) -> int:
    """The gate that a norm inside reads."""
    return p.B * p.contract.tokens * p.HV * p.contract.V * 2


def _norm_bytes_apart(p: Problem) -> int:
    """And the output that a norm apart reads and writes again."""
    return 3 * _norm_bytes(p)


# -- a layer's step


def _refuse_step(p: Problem) -> str | None:
    return refuse_step(p.contract) or _refuse_packed(p)


def _bind_step(case: Case) -> Bound:
    decode, norm = PACKED.load(), GATED_NORM.load()
    conv = convolved(case, CONV)
    pool, index = _shifted(case)
    between = torch.empty_like(case.output)
    arguments = _packed(case, conv.rows, between, pool, index)
    normed = normalisation(case, between)

    def call() -> Tensor:
        conv.call()
        decode(**arguments)
        norm(**normed)
        return case.output

    return Bound(call, lambda output: output, lambda _: pool, index, left=conv.left)


def normalisation(case: Case, outputs: Tensor) -> dict[str, Any]:
    """The arguments of its gated norm, from a delta rule's outputs to the case's."""
    gate, weight = gate_of(case)
    V = case.contract.V
    return {
        "x": outputs.view(-1, V),
        "weight": weight,
        "bias": None,
        "eps": case.norm_eps,
        "z": gate.reshape(-1, V),
        "out": case.output.view(-1, V),
        "norm_before_gate": True,
        "is_rms_norm": True,
        "activation": case.contract.norm,
    }


def _refuse_drafts(p: Problem) -> str | None:
    return refuse_step(p.contract, norm=("silu", "sigmoid")) or _refuse_op(p)


def _bind_drafts(case: Case) -> Bound:
    conv, (gate, weight) = convolved(case, CONV), gate_of(case)
    bound = _op_call(case, conv.rows, (gate, weight, case.norm_eps, case.contract.norm))

    def call() -> Any:
        conv.call()
        return bound.call()

    return dataclasses.replace(bound, call=call, left=conv.left)


def _refuse_kda_step(p: Problem) -> str | None:
    c = p.contract
    if fault := unless(
        c, op=("kda_decode",), layout=("k_last",), K=(128,), V=(128,), input_dtype=("bf16",),
        gate_dtype=("bf16",), beta_dtype=("bf16",), state_dtype=("fp32",), norm=("sigmoid",),
        norm_weight_dtype=("fp32",), A_log_dtype=("fp32",), dt_bias_dtype=("fp32",),
        conv=("silu",), conv_width=(4,), gate=("softplus", "lower_bound"), beta=("logit",),
        tokens=(1,), mode=("update",), intermediate=("none",), ragged=(False,),
    ):  # fmt: skip
        return fault
    if p.H != p.HV or p.HV not in KDA_OP_HEADS:
        return f"H={p.H}, HV={p.HV}, expected both {' or '.join(map(str, KDA_OP_HEADS))}"
    return None


def _bind_kda_step(case: Case) -> Bound:
    usual_kda(case)
    held, (gate, weight) = windows(case), gate_of(case)
    pool, index = _shifted(case)
    assert case.dt_bias is not None
    arguments = (
        rows_of(case),
        taps_by_part(case),
        None if case.conv_bias is None else case.conv_bias.float(),
        held.channels_first,
        packed(case, case.a),
        packed(case, case.b),
        case.A_log,
        case.dt_bias.reshape(-1),
        # Of windows and states: both are of the requests alone, in the order of their slots.
        index,
        pool,
        packed(case, case.output),
        case.lower_bound if case.contract.gate == "lower_bound" else None,
        gate,
        weight,
        case.norm_eps,
    )
    call = functools.partial(_op(KDA_OP), *arguments)
    return Bound(call, lambda _: case.output, lambda _: pool, index, left=held.left)


# -- fused_recurrent_kda_packed_decode and fused_recurrent_kda, from raw gates


def _refuse_kda_heads(p: Problem) -> str | None:
    c = p.contract
    if p.H == p.HV and c.K == c.V:
        return None
    return f"H={p.H}, HV={p.HV}, K={c.K}, V={c.V}: expected H=HV and K=V"


def _refuse_kda_packed(p: Problem) -> str | None:
    fault = unless(
        p.contract, op=("kda_decode",), layout=("k_last",), gate=("softplus", "lower_bound"),
        beta=("logit",), tokens=(1,), mode=("update",), intermediate=("none",), ragged=(False,),
    )  # fmt: skip
    return fault or _refuse_kda_heads(p)


def usual_kda(case: Case) -> None:
    """UnsupportedProblem for a case that calls without these arguments cannot take."""
    usual_softplus(case)
    if not case.use_qk_l2norm:
        raise UnsupportedProblem("use_qk_l2norm=False: it always normalises")


def _raw_gates(case: Case, pool: Tensor) -> dict[str, Any]:
    usual_kda(case)
    return {
        "raw_g": packed(case, case.a),
        "raw_beta": packed(case, case.b),
        "A_log": case.A_log,
        "dt_bias": None if case.dt_bias is None else case.dt_bias.reshape(-1),
        "lower_bound": case.lower_bound if case.contract.gate == "lower_bound" else None,
        "initial_state": pool,
        "out": packed(case, case.output),
    }


def _bind_kda_packed(case: Case) -> Bound:
    function = KDA_PACKED.load()
    pool, index = _shifted(case)
    arguments = {
        **_raw_gates(case, pool),
        "mixed_qkv": mixed_qkv(case),
        "state_indices": index,
        "scale": case.scale,
    }
    return _bound(lambda: function(**arguments), pool, index)


def _refuse_kda_raw(p: Problem) -> str | None:
    c = p.contract
    if _refuse_kda_packed(p) is None:
        return "tokens=1 of dense batches, where its engine calls packed decode; expected T>1"
    gates = {"gate": ("softplus", "lower_bound"), "beta": ("logit",)}
    fault = unless(c, op=("kda_decode",), layout=("k_last",), **gates)
    return fault or _refuse_kda_heads(p) or _writes(c)


def _bind_kda_raw(case: Case) -> Bound:
    if case.scale != case.contract.K**-0.5:
        raise UnsupportedProblem(f"scale={case.scale}: it has 1/sqrt(K) alone")
    function = KDA_RAW.load()
    pool, index = _shifted(case)
    arguments = {
        **_raw_gates(case, pool),
        **{name: packed(case, getattr(case, name)) for name in ("q", "k", "v")},
        "cu_seqlens": starts(case),
        "ssm_state_indices": index.contiguous(),
        "num_accepted_tokens": _accepted(case, index.shape[-1]),
    }
    return _bound(lambda: function(**arguments), pool, index)


# -- fused_sigmoid_gating_delta_rule_update


def _refuse_sigmoid(p: Problem) -> str | None:
    c = p.contract
    if _refuse_packed(p) is None:
        return "tokens=1 of dense batches, where its engine calls packed decode; expected T>1"
    fault = unless(c, op=("gdn_decode",), layout=("k_last",), gate=("raw",), beta=("logit",))
    return fault or _writes(c)


def _bind_sigmoid(case: Case) -> Bound:
    function = SIGMOID.load()
    pool, index = _shifted(case)
    arguments = {
        **_rows(case, pool, index),
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "a": packed(case, case.a),
        "b": packed(case, case.b),
        "beta": case.softplus_beta,
        "threshold": case.softplus_threshold,
        "is_kda": False,
    }
    return _bound(lambda: function(**arguments), pool, index)


# -- fused_recurrent_gated_delta_rule and fused_recurrent_kda, from a log decay and beta


def _refuse_given(p: Problem, op: str) -> str | None:
    c = p.contract
    return unless(c, op=(op,), layout=("k_last",), gate=("log",), beta=("given",)) or _writes(c)


def _refuse_gdn(p: Problem) -> str | None:
    return _refuse_given(p, "gdn_decode")


def _refuse_kda(p: Problem) -> str | None:
    return _refuse_given(p, "kda_decode") or _refuse_kda_heads(p)


def _bind_given(case: Case) -> Bound:
    function = (GDN if case.contract.op == "gdn_decode" else KDA).load()
    pool, index = _shifted(case)
    arguments = {
        **_rows(case, pool, index),
        "g": packed(case, case.a),
        "beta": packed(case, case.b),
    }
    return _bound(lambda: function(**arguments), pool, index)


_STEP = f"{_OWN_POOL}, windows too; convolution where there is one"
_PACKED_ROWS = f"{_OWN_POOL}; packed rows with cu_seqlens, the output a new tensor"

PEER = Peer(
    name="vllm",
    packages=("vllm", "triton"),
    distributions=("vllm",),
    written_for="0.33.0",
    remedy="pip install vllm==0.33.0",
    entries=(
        Entry(
            name="fused_recurrent_gated_delta_rule_packed_decode",
            refuse=_refuse_packed,
            bind=_bind_packed,
            form=f"{_OWN_POOL}; q, k and v in one tensor, packed before the call",
            functions=(PACKED,),
            packed=True,
        ),
        Entry(
            name=OP,
            refuse=_refuse_op,
            bind=_bind_op,
            form=f"its CUDA op {_OWN_POOL}; q, k and v in one tensor, packed before the call; the"
            " gated norm inside",
            extra_bytes=_norm_bytes,
            packed=True,
            partner=AFTER,
        ),
        Entry(
            name=AFTER,
            refuse=_refuse_op,
            bind=_bind_after,
            form="our choice, then vLLM's gated norm on its output, into a new tensor",
            extra_bytes=_norm_bytes_apart,
            functions=(NORM,),
            follows_ours=True,
        ),
        Entry(
            name="fused_sigmoid_gating_delta_rule_update",
            refuse=_refuse_sigmoid,
            bind=_bind_sigmoid,
            form=_PACKED_ROWS,
            functions=(SIGMOID,),
        ),
        Entry(
            name="fused_recurrent_gated_delta_rule",
            refuse=_refuse_gdn,
            bind=_bind_given,
            form=_PACKED_ROWS,
            functions=(GDN,),
        ),
        Entry(
            name="fused_recurrent_kda_fwd",
            refuse=_refuse_kda,
            bind=_bind_given,
            form=_PACKED_ROWS,
            functions=(KDA,),
        ),
        Entry(
            name="fused_recurrent_kda_packed_decode",
            refuse=_refuse_kda_packed,
            bind=_bind_kda_packed,
            form=f"{_OWN_POOL}; q, k and v in one tensor, packed before the call",
            functions=(KDA_PACKED,),
            packed=True,
        ),
        Entry(
            name="fused_recurrent_kda",
            refuse=_refuse_kda_raw,
            bind=_bind_kda_raw,
            form=f"{_OWN_POOL}; packed rows with cu_seqlens",
            functions=(KDA_RAW,),
        ),
        Entry(
            name="conv_packed_decode_norm",
            refuse=_refuse_step,
            bind=_bind_step,
            form=f"{_STEP}, packed decode, gated norm",
            extra_bytes=between_bytes,
            # The products of its convolution are rounded to the inputs' dtype.
            tolerance=2e-2,
            functions=(CONV, PACKED, GATED_NORM),
            packed=True,
            kind="layer",
            several=True,
        ),
        Entry(
            name="conv_post_conv_mtp",
            refuse=_refuse_drafts,
            bind=_bind_drafts,
            form=f"{_STEP}, its CUDA op with the norm inside",
            extra_bytes=convolution_bytes,
            tolerance=2e-2,
            functions=(CONV,),
            packed=True,
            kind="layer",
            several=True,
        ),
        Entry(
            name=KDA_OP,
            refuse=_refuse_kda_step,
            bind=_bind_kda_step,
            form=f"its CUDA op {_OWN_POOL}, windows too",
            # It rounds neither q, k and v behind the convolution nor the outputs before the norm.
            tolerance=2e-2,
            kind="layer",
        ),
    ),
)
