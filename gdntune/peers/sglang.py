"""SGLang's Triton kernels as its engine calls them: packed decode of GDN and KDA at T=1, and the
verify of several tokens. A pool of K-last states, raw gates.

Verify is called on packed rows with cu_seqlens: the dense form is compiled anew for every batch
size, and its loads of cu_seqlens hide behind the load of the slot's index. KDA's packed decode also
has a CUDA form, for some shapes on Blackwell: the library chooses.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import UnsupportedProblem
from gdntune.peers.spec import (
    Bound,
    Entry,
    Function,
    Peer,
    beyond_reach,
    dense_steps,
    intermediate_elements,
    mixed_qkv,
    packed,
    slots_of,
    starts,
    unless,
)
from gdntune.peers.steps import (
    ACTIVATIONS,
    between_bytes,
    gate_of,
    refuse_step,
    rows_of,
    taps,
    windows,
)
from gdntune.problem import Contract, Problem

_PACKED = (
    "mixed_qkv a b A_log dt_bias scale initial_state out ssm_state_indices use_qk_l2norm_in_kernel"
)
GDN_DECODE = Function(
    "sglang.kernels.ops.attention.fla.fused_recurrent",
    "fused_recurrent_gated_delta_rule_packed_decode",
    tuple(_PACKED.split()),
)
KDA_DECODE = Function(
    "sglang.kernels.ops.attention.fla.fused_recurrent",
    "fused_recurrent_kda_packed_decode",
    (*_PACKED.split(), "lower_bound"),
)
VERIFY = Function(
    "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent",
    "fused_sigmoid_gating_delta_rule_update",
    tuple(
        "A_log a dt_bias softplus_beta softplus_threshold q k v b initial_state_source"
        " initial_state_indices scale use_qk_l2norm_in_kernel cu_seqlens is_kda lower_bound"
        " disable_state_update intermediate_states_buffer intermediate_state_indices"
        " cache_steps".split()
    ),
)
CONV = Function(
    "sglang.kernels.ops.mamba.causal_conv1d_triton",
    "causal_conv1d_update",
    tuple("x conv_state weight bias activation conv_state_indices".split()),
)
NORM = Function(
    "sglang.kernels.ops.attention.fla.layernorm_gated",
    "rms_norm_gated",
    tuple("x weight bias z eps is_rms_norm activation".split()),
)
# Of its KDA models, in place.
NORM_KDA = Function(
    "sglang.kernels.ops.attention.fla.fused_norm_gate",
    "rms_norm_gated",
    tuple("x g weight bias activation eps".split()),
)


def first(returned: Any) -> Tensor:
    """The output of a call that returns (output, state)."""
    output: Tensor = returned[0]
    return output


def usual_softplus(case: Case) -> None:
    """UnsupportedProblem where a call that knows softplus with 1 and 20 alone is given others."""
    if (case.softplus_beta, case.softplus_threshold) != (1.0, 20.0):
        raise UnsupportedProblem(
            f"softplus_beta={case.softplus_beta}, softplus_threshold={case.softplus_threshold}: it"
            " has 1.0 and 20.0 alone"
        )


# -- packed decode


def _plain_decode(c: Contract, op: str, gates: tuple[str, ...]) -> str | None:
    return unless(
        c,
        op=(op,),
        layout=("k_last",),
        gate=gates,
        beta=("logit",),
        tokens=(1,),
        mode=("update",),
        intermediate=("none",),
        ragged=(False,),
    )


def _refuse_gdn(p: Problem) -> str | None:
    return _plain_decode(p.contract, "gdn_decode", ("raw",))


def _refuse_kda(p: Problem) -> str | None:
    return _plain_decode(p.contract, "kda_decode", ("softplus", "lower_bound"))


def _decode(case: Case, mixed: Tensor, out: Tensor, rows: Tensor) -> Callable[..., Any]:
    """Packed decode of either op on the case's pool, from rows of q, k and v [B, D]."""
    usual_softplus(case)
    c = case.contract
    assert case.dt_bias is not None
    arguments: dict[str, Any] = {
        "mixed_qkv": mixed,
        "a": case.a[:, 0].flatten(1),
        "b": case.b[:, 0],
        "A_log": case.A_log,
        "dt_bias": case.dt_bias.flatten(),
        "scale": case.scale,
        "initial_state": case.state,
        "out": out,
        "ssm_state_indices": rows,
        "use_qk_l2norm_in_kernel": bool(case.use_qk_l2norm),
    }
    if c.op == "kda_decode":
        arguments["lower_bound"] = case.lower_bound if c.gate == "lower_bound" else None
    function = (KDA_DECODE if c.op == "kda_decode" else GDN_DECODE).load()
    return functools.partial(function, **arguments)


def _bind_decode(case: Case) -> Bound:
    rows = slots_of(case)
    call = _decode(case, mixed_qkv(case), case.output, rows)
    return Bound(call, first, lambda _: case.state, rows)


# -- a layer's step


def _refuse_step(p: Problem) -> str | None:
    c = p.contract
    kda = c.op == "kda_decode"
    fault = refuse_step(c, norm=("sigmoid",) if kda else ("silu",), conv=True)
    return fault or (_refuse_kda(p) if kda else _refuse_gdn(p))


def _bind_step(case: Case) -> Bound:
    c, rows, held = case.contract, slots_of(case), windows(case)
    gate, weight = gate_of(case)
    convolve, x = CONV.load(), rows_of(case)
    between = torch.empty_like(case.output)
    decode = _decode(case, x, between, rows)
    before: dict[str, Any] = {
        "conv_state": held.channels_first,
        "weight": taps(case),
        "bias": case.conv_bias,
        "activation": ACTIVATIONS[c.conv],
        "conv_state_indices": held.index,
    }
    V = c.V
    shared = {"x": between.view(-1, V), "weight": weight, "bias": None, "eps": case.norm_eps}
    if c.op == "kda_decode":
        norm, own = NORM_KDA.load(), {"g": gate.reshape(-1, V), "activation": "sigmoid"}
    else:
        own = {"z": gate.reshape(-1, V), "is_rms_norm": True, "activation": "swish"}
        norm = NORM.load()

    def call() -> Any:
        # A tensor of its own, made anew each time.
        decode(mixed_qkv=convolve(x, **before))
        return norm(**shared, **own)

    return Bound(call, lambda output: output, lambda _: case.state, rows, left=held.left)


# -- verify


def _refuse_verify(p: Problem) -> str | None:
    c = p.contract
    if _refuse_gdn(p) is None or _refuse_kda(p) is None:
        return "tokens=1 of dense batches, where its engine calls packed decode; expected T>1"
    return (
        unless(
            c,
            layout=("k_last",),
            gate=("raw", "softplus", "lower_bound"),
            beta=("logit",),
            intermediate=("none", "dense", "indexed"),
            accepted=(False,),
        )
        or beyond_reach(p.B * p.HV * c.K * c.V, "the pool")
        or beyond_reach(intermediate_elements(p), "the buffer of intermediate states")
    )


def _bind_verify(case: Case) -> Bound:
    c = case.contract
    if fault := beyond_reach(case.state.numel(), "the pool"):
        raise UnsupportedProblem(fault)
    rows, buffer = slots_of(case), dense_steps(case)
    arguments: dict[str, Any] = {
        "A_log": case.A_log,
        "a": packed(case, case.a),
        "dt_bias": case.dt_bias,
        "softplus_beta": case.softplus_beta,
        "softplus_threshold": case.softplus_threshold,
        "q": packed(case, case.q),
        "k": packed(case, case.k),
        "v": packed(case, case.v),
        "b": packed(case, case.b),
        "initial_state_source": case.state,
        "initial_state_indices": rows,
        "scale": case.scale,
        "use_qk_l2norm_in_kernel": bool(case.use_qk_l2norm),
        "cu_seqlens": starts(case),
        "is_kda": c.op == "kda_decode",
        "lower_bound": case.lower_bound if c.gate == "lower_bound" else None,
        "disable_state_update": c.mode == "frozen",
    }
    steps: Callable[[Any], Tensor] | None = None
    if buffer is not None:
        order = case.slot_index
        if order is None:
            order = torch.arange(case.problem.B, dtype=torch.int32, device=case.q.device)
        arguments |= {
            "intermediate_states_buffer": buffer,
            "intermediate_state_indices": order,
            "cache_steps": buffer.shape[1],
        }
        if buffer is not case.intermediate:
            steps = functools.partial(_rows, buffer, case.slot_index)
    call = functools.partial(VERIFY.load(), **arguments)
    state = (lambda _: case.state) if c.mode == "update" else None
    return Bound(call, lambda returned: returned, state, rows, intermediate=steps)


def _rows(buffer: Tensor, index: Tensor | None, _: Any) -> Tensor:
    """A buffer's rows by request."""
    return buffer if index is None else buffer[index.long()]


PEER = Peer(
    name="sglang",
    packages=("sglang", "triton"),
    distributions=("sglang",),
    written_for="0.5.23",
    remedy="pip install sglang==0.5.23",
    entries=(
        Entry(
            name="fused_recurrent_gated_delta_rule_packed_decode",
            refuse=_refuse_gdn,
            bind=_bind_decode,
            form="on the pool by slots; q, k and v in one tensor, packed before the call",
            functions=(GDN_DECODE,),
            packed=True,
        ),
        Entry(
            name="fused_recurrent_kda_packed_decode",
            refuse=_refuse_kda,
            bind=_bind_decode,
            form="on the pool by slots; q, k and v in one tensor, packed before the call",
            functions=(KDA_DECODE,),
            packed=True,
        ),
        Entry(
            name="fused_sigmoid_gating_delta_rule_update",
            refuse=_refuse_verify,
            bind=_bind_verify,
            form="on the pool by slots, packed rows with cu_seqlens, the output a new tensor",
            functions=(VERIFY,),
        ),
        Entry(
            name="conv_packed_decode_norm",
            refuse=_refuse_step,
            bind=_bind_step,
            form="on the pool by slots, windows of its own, filled before the timed call;"
            " convolution, packed decode, gated norm",
            extra_bytes=between_bytes,
            # The products of its convolution are rounded to the inputs' dtype.
            tolerance=2e-2,
            functions=(CONV, GDN_DECODE, KDA_DECODE, NORM, NORM_KDA),
            kind="layer",
            several=True,
        ),
    ),
)
