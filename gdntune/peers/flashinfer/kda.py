"""FlashInfer's KDA kernels: the recurrence, tensor-core verifies, a layer's step in one launch."""

import functools
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import UnsupportedProblem, listed
from gdntune.peers.flashinfer.arguments import (
    always_normalised,
    fault_of,
    first,
    in_place,
    too_large,
)
from gdntune.peers.spec import (
    Bound,
    Entry,
    Function,
    beyond_reach,
    dense_pool,
    packed,
    slots_of,
    starts,
    unless,
)
from gdntune.peers.steps import gate_of, rows_of, taps_by_part, windows
from gdntune.problem import ITEMSIZE, Problem

# The function below both public ones of this name: packed rows of a decode cannot be taken for a
# prefill there.
KDA = Function(
    "flashinfer.kda_kernels.recurrent_kda",
    "run_recurrent_kda",
    tuple(
        "q k v g beta output A_log dt_bias scale initial_state output_final_state"
        " use_qk_l2norm_in_kernel use_gate_in_kernel lower_bound beta_is_logit backend cu_seqlens"
        " ssm_state_indices num_spec_tokens num_accepted_tokens".split()
    ),
)
KDA_WY = Function(
    "flashinfer.kda_kernels.kda_decode_wy_output_only",
    "kda_wy_output_only",
    tuple(
        "q k v g beta initial_state_source initial_state_indices A_log dt_bias scale"
        " use_gate_in_kernel lower_bound beta_is_logit output".split()
    ),
)
RECOVER = Function(
    "flashinfer.kda_kernels.kda_decode_wy_output_only",
    "kda_recoverssm_verify",
    tuple(
        "q k v raw_g raw_beta A_log dt_bias lower_bound checkpoint_state correction_cache kg_cache"
        " query_start_loc state_indices spec_query_len out use_gate_in_kernel beta_is_logit scale"
        " null_min".split()
    ),
)
KDA_STEP = Function(
    "flashinfer.kda_kernels.fused_kda_decode",
    "run_fused_kda_decode",
    tuple(
        "x weight conv_state raw_gate raw_beta A_log dt_bias state_indices state output_gate"
        " norm_weight lower_bound norm_eps output backend".split()
    ),
)
KDA_STEP_HEADS = (8, 12, 16, 24, 32, 48, 64, 96)


def _refuse_kda(p: Problem) -> str | None:
    c = p.contract
    if fault := fault_of(c, op="kda_decode", state_dtype=("bf16",), intermediate=("none", "slots")):
        return fault
    if p.H != p.HV and c.has_parameters:
        return f"H={p.H}, HV={p.HV}: its A_log and dt_bias are by q/k head, expected H=HV"
    # T=1 writes the final state, T>1 each token's state to a slot of its own: nothing else.
    served = ("update", "none") if c.tokens == 1 else ("frozen", "slots")
    if (c.mode, c.intermediate) != served:
        return (
            f"mode={c.mode}, intermediate={c.intermediate} at T={c.tokens}, expected"
            f" {' and '.join(served)}"
        )
    return too_large(p)


def _bind_kda(case: Case) -> Bound:
    function = KDA.load()
    c = case.contract
    if fault := beyond_reach(case.state.numel(), "the pool"):
        raise UnsupportedProblem(fault)
    arguments: dict[str, Any] = {
        "A_log": case.A_log,
        "dt_bias": None if case.dt_bias is None else case.dt_bias.reshape(-1),
        "scale": case.scale,
        "initial_state": case.state,
        "output_final_state": False,
        "use_qk_l2norm_in_kernel": bool(case.use_qk_l2norm),
        "use_gate_in_kernel": c.has_parameters,
        "lower_bound": case.lower_bound if c.gate == "lower_bound" else None,
        "beta_is_logit": c.beta == "logit",
        "backend": "cute-dsl",
    }
    rows: dict[str, Tensor] = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "g": case.a,
        "beta": case.b,
        "output": case.output,
    }
    slots: Tensor | None = None
    if c.pool:
        # Without cu_seqlens it would copy the slots' states out of the pool and back.
        rows = {name: packed(case, x) for name, x in rows.items()}
        slots = slots_of(case) if case.slot_index is None else case.slot_index
        arguments |= {"cu_seqlens": starts(case), "ssm_state_indices": slots}
    if case.slot_index is not None:
        accepted = None if case.accepted is None else case.accepted.clamp(1, c.tokens)
        arguments |= {"num_spec_tokens": c.tokens - 1, "num_accepted_tokens": accepted}
        slots = None
    return in_place(case, functools.partial(function, **rows, **arguments), slots)


def _refuse_kda_outputs(p: Problem) -> str | None:
    c = p.contract
    fault = fault_of(
        c,
        op="kda_decode",
        state_dtype=("bf16",),
        mode=("frozen",),
        intermediate=("none",),
    )
    if fault is None and p.H != p.HV and c.has_parameters:
        return f"H={p.H}, HV={p.HV}: its A_log and dt_bias are by q/k head, expected H=HV"
    return fault or too_large(p)


def _bind_kda_outputs(case: Case) -> Bound:
    always_normalised(case)
    c = case.contract
    arguments: dict[str, Any] = {
        **{name: getattr(case, name) for name in ("q", "k", "v", "scale", "output", "A_log")},
        "g": case.a,
        "beta": case.b,
        "initial_state_source": dense_pool(case),
        "initial_state_indices": slots_of(case),
        "dt_bias": None if case.dt_bias is None else case.dt_bias.reshape(-1),
        "use_gate_in_kernel": c.has_parameters,
        "lower_bound": case.lower_bound if c.gate == "lower_bound" else None,
        "beta_is_logit": c.beta == "logit",
    }
    return Bound(functools.partial(KDA_WY.load(), **arguments), first)


def _refuse_recover(p: Problem) -> str | None:
    if p.H != p.HV:
        return f"H={p.H}, HV={p.HV}: it knows one number of heads, expected H=HV"
    c = p.contract
    gates = unless(c, gate=("softplus", "lower_bound")) if c.op == "kda_decode" else None
    return gates or _refuse_kda_outputs(p)


def _bind_recover(case: Case) -> Bound:
    always_normalised(case)
    c, p, slots = case.contract, case.problem, len(case.state)
    rows = {"q": case.q, "k": case.k, "v": case.v, "raw_g": case.a, "raw_beta": case.b}
    assert case.dt_bias is not None
    arguments: dict[str, Any] = {
        **{name: packed(case, x) for name, x in rows.items()},
        "out": packed(case, case.output),
        "A_log": case.A_log,
        "dt_bias": case.dt_bias.reshape(-1),
        "lower_bound": case.lower_bound if c.gate == "lower_bound" else None,
        "checkpoint_state": case.state,
        "correction_cache": case.state.new_zeros(slots, p.HV, c.tokens, c.V, dtype=torch.float32),
        "kg_cache": case.state.new_zeros(slots, p.HV, c.tokens, 2 * c.K),
        "query_start_loc": starts(case),
        "state_indices": slots_of(case),
        "spec_query_len": c.tokens,
        "use_gate_in_kernel": True,
        "beta_is_logit": c.beta == "logit",
        "scale": case.scale,
        # slot 0 is a request's own here
        "null_min": 0,
    }
    return Bound(functools.partial(RECOVER.load(), **arguments), first)


def _recover_extra_bytes(p: Problem) -> int:
    """What it keeps of each token to fold accepted ones in later: corrections in fp32, k and the
    gate as they came.
    """
    c = p.contract
    return p.B * p.HV * c.tokens * (4 * c.V + 2 * c.K * ITEMSIZE[c.input_dtype])


def _refuse_kda_step(p: Problem) -> str | None:
    c = p.contract
    if fault := fault_of(
        c,
        op="kda_decode",
        state_dtype=("bf16", "fp32"),
        norm=("sigmoid",),
        norm_weight_dtype=("fp32",),
        conv=("silu",),
        conv_width=(4,),
        conv_bias=(False,),
        tokens=(1,),
        mode=("update",),
        intermediate=("none",),
    ):
        return fault
    if c.gate == "log" or c.beta != "logit":
        return f"gate={c.gate}, beta={c.beta}: expected raw gates and beta's logit"
    if p.H != p.HV or p.HV not in KDA_STEP_HEADS:
        return f"H={p.H}, HV={p.HV}: expected both one of {listed(map(str, KDA_STEP_HEADS))}"
    return too_large(p)


def _bind_kda_step(case: Case) -> Bound:
    always_normalised(case)
    c, held, (gate, weight) = case.contract, windows(case), gate_of(case)
    # Its slots are those of the windows, in one order with the states'.
    index, slots = held.index, slots_of(case).long()
    states = case.state.new_zeros((len(held.pool), *case.state.shape[1:]))
    states[index.long()] = case.state[slots]
    assert case.dt_bias is not None
    arguments: dict[str, Any] = {
        "x": rows_of(case),
        "weight": taps_by_part(case),
        "conv_state": held.channels_first,
        "raw_gate": packed(case, case.a),
        "raw_beta": packed(case, case.b),
        "A_log": case.A_log,
        "dt_bias": case.dt_bias.reshape(-1),
        "state_indices": index,
        "state": states,
        "output_gate": gate,
        "norm_weight": weight,
        "lower_bound": case.lower_bound if c.gate == "lower_bound" else None,
        "norm_eps": case.norm_eps,
        "output": packed(case, case.output),
        "backend": "cute-dsl",
    }
    call = functools.partial(KDA_STEP.load(), **arguments)
    return Bound(call, first, lambda _: states, index, left=held.left)


ENTRIES = (
    Entry(
        "recurrent_kda",
        _refuse_kda,
        _bind_kda,
        "on the pool by slots, packed rows with cu_seqlens",
        functions=(KDA,),
    ),
    Entry(
        "kda_wy_output_only",
        _refuse_kda_outputs,
        _bind_kda_outputs,
        "on the pool by slots; below some B*HV the library's recurrence instead",
        # The matrices of its products are bf16.
        tolerance=2e-2,
        functions=(KDA_WY,),
    ),
    Entry(
        "kda_recoverssm_verify",
        _refuse_recover,
        _bind_recover,
        "on the pool by slots, packed rows; it also keeps each token's correction, k and gate"
        " in caches by slots",
        _recover_extra_bytes,
        # The matrices of its products are bf16.
        tolerance=2e-2,
        functions=(RECOVER,),
    ),
    Entry(
        "fused_kda_decode",
        _refuse_kda_step,
        _bind_kda_step,
        "on a pool and windows of its own with an empty slot 0, filled before the timed call",
        # It keeps q, k and v in fp32 behind the convolution.
        tolerance=2e-2,
        functions=(KDA_STEP,),
        kind="layer",
    ),
)
