"""vLLM's kernels as its engine calls them: packed decode at T=1, its CUDA op for drafts, the Triton
forms that it falls back to, and those from given gates for GDN and KDA. K-last pools.

They take slot 0 for padding, so a pool is handed over with an empty slot before its first. Where
each token's state is kept it goes to a slot of its own and the slot that was read stays: vLLM's
form of speculative decoding. Nothing else is written at T>1. The CUDA op has the layer's gated
norm inside, so it is judged against ours with vLLM's norm behind it.
"""

import functools
import importlib
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import ToolMissing
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
NORM = Function(
    "vllm.model_executor.layers.mamba.ops.layernorm_gated",
    "rms_norm_gated",
    tuple("x weight bias z eps norm_before_gate".split()),
)

OP, AFTER = "fused_gdn_decode_post_conv_mtp", "ours_then_rms_norm_gated"
# What registers torch.ops._C.<OP>: vLLM's libraries, or a module of one's own that loads one of
# them where vLLM is not installed whole.
LIBRARIES = ("vllm._C_stable_libtorch", "vllm._C", "vllm_op")
# Its rows of state_indices, and its value heads for each q/k head.
OP_TOKENS, OP_GROUPS = 8, (1, 2, 3, 4, 8)
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


def _bind_packed(case: Case) -> Bound:
    usual_softplus(case)
    function = PACKED.load()
    pool, index = _shifted(case)
    arguments = {
        "mixed_qkv": mixed_qkv(case),
        "a": case.a[:, 0],
        "b": case.b[:, 0],
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "scale": case.scale,
        "initial_state": pool,
        "out": case.output,
        "ssm_state_indices": index,
        "use_qk_l2norm_in_kernel": bool(case.use_qk_l2norm),
    }
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


def _op() -> Any:
    """The CUDA op; ToolMissing says where it was looked for."""
    faults = []
    for library in ("", *LIBRARIES):
        if library:
            try:
                importlib.import_module(library)
            except Exception as e:  # noqa: BLE001  a library for another torch fails as it likes
                faults.append(f"{library} ({type(e).__name__}: {e})")
        if hasattr(torch.ops._C, OP):
            return getattr(torch.ops._C, OP)
    raise ToolMissing(
        f"torch.ops._C.{OP} is not registered: none of {'; '.join(faults)} brings it; install vLLM"
        " for this torch, or leave this peer out"
    )


def _bind_op(case: Case) -> Bound:
    usual_softplus(case)
    op, (gate, weight) = _op(), _norm(case)
    pool, index = _shifted(case)
    index, out = index.contiguous(), packed(case, case.output)[0]
    accepted = _accepted(case, index.shape[1])
    if accepted is None:
        accepted = torch.ones(case.problem.B, dtype=torch.int32, device=out.device)
    arguments = (
        mixed_qkv(case),
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
        NORM_EPS,
        "silu",
    )
    return Bound(
        functools.partial(op, *arguments),
        lambda _: out,
        intermediate=lambda _: pool[index.long()],
        epilogue=functools.partial(_epilogue, gate, weight, case.contract.tokens),
    )


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


# -- fused_sigmoid_gating_delta_rule_update


def _refuse_sigmoid(p: Problem) -> str | None:
    c = p.contract
    if _refuse_packed(p) is None:
        return "tokens=1 of dense batches, where its engine calls packed decode; expected T>1"
    if fault := unless(c, layout=("k_last",), gate=("raw", "softplus"), beta=("logit",)):
        return fault
    if c.op == "kda_decode" and c.tokens > 1:
        return (
            f"KDA at T={c.tokens}, expected T=1: from token to token it moves on in the gate by"
            " heads, not by heads times K"
        )
    return _writes(c)


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
        "is_kda": case.contract.op == "kda_decode",
    }
    return _bound(lambda: function(**arguments), pool, index)


# -- fused_recurrent_gated_delta_rule and fused_recurrent_kda, from a log decay and beta


def _refuse_given(p: Problem, op: str) -> str | None:
    c = p.contract
    return unless(c, op=(op,), layout=("k_last",), gate=("log",), beta=("given",)) or _writes(c)


def _refuse_gdn(p: Problem) -> str | None:
    return _refuse_given(p, "gdn_decode")


def _refuse_kda(p: Problem) -> str | None:
    c = p.contract
    if fault := _refuse_given(p, "kda_decode"):
        return fault
    if p.H != p.HV or c.K != c.V:
        return (
            f"H={p.H}, HV={p.HV}, K={c.K}, V={c.V}: its output has the shape of k, expected H=HV"
            " and K=V"
        )
    return None


def _bind_given(case: Case) -> Bound:
    function = (GDN if case.contract.op == "gdn_decode" else KDA).load()
    pool, index = _shifted(case)
    arguments = {
        **_rows(case, pool, index),
        "g": packed(case, case.a),
        "beta": packed(case, case.b),
    }
    return _bound(lambda: function(**arguments), pool, index)


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
            name="fused_recurrent_kda",
            refuse=_refuse_kda,
            bind=_bind_given,
            form=_PACKED_ROWS,
            functions=(KDA,),
        ),
    ),
)
