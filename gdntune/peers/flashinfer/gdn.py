"""FlashInfer's GDN kernels: decode and verify in both state dtypes, and its tensor-core verify."""

import functools

from gdntune.checking.cases import Case
from gdntune.peers.flashinfer.arguments import (
    GDN,
    always_normalised,
    fault_of,
    first,
    in_place,
    inputs_of,
    pool_of,
    too_large,
)
from gdntune.peers.spec import (
    Bound,
    Entry,
    Function,
    dense_pool,
    dense_steps,
)
from gdntune.problem import ITEMSIZE, Problem

PRETRANSPOSE = Function(
    "flashinfer.gdn_decode",
    "gated_delta_rule_decode_pretranspose",
    tuple(
        f"{GDN} state initial_state initial_state_indices intermediate_states_buffer"
        " disable_state_update backend".split()
    ),
)
MTP = Function(
    "flashinfer.gdn_decode",
    "gated_delta_rule_mtp",
    tuple(
        f"{GDN} initial_state initial_state_indices intermediate_states_buffer"
        " disable_state_update".split()
    ),
)
V_LAST = Function(
    "flashinfer.gdn_decode", "gated_delta_rule_decode", tuple(f"{GDN} state backend".split())
)
WY = Function(
    "flashinfer.gdn_kernels",
    "gated_delta_rule_mtp_wy_output_only",
    tuple(
        "A_log a dt_bias softplus_beta softplus_threshold q k v b scale initial_state_source"
        " initial_state_indices disable_state_update use_qk_l2norm_in_kernel output".split()
    ),
)

# Rows that the tensor-core verify works on, whatever T is.
WY_TOKENS = 16
# T that it reads and writes without staging.
WY_NATIVE = (4, 8, WY_TOKENS)


def _refuse_pretranspose(p: Problem) -> str | None:
    c = p.contract
    if fault := fault_of(c, state_dtype=("bf16", "fp32"), intermediate=("none", "dense")):
        return fault
    if c.tokens == 1:
        served = c.mode == "update" and c.intermediate == "none"
        return None if served else "at T=1 it writes the final state and nothing else"
    if c.state_dtype == "fp32":
        return "at T>1 it hands fp32 states to gated_delta_rule_mtp"
    if c.intermediate == "dense" and c.mode == "update":
        return "with intermediate states it writes the final one below B*HV=128 alone"
    return too_large(p)


def _bind_pretranspose(case: Case) -> Bound:
    function = PRETRANSPOSE.load()
    c = case.contract
    arguments = {**inputs_of(case), "output": case.output, "state": None, "backend": "flashinfer"}
    if c.pool or c.state_dtype == "bf16":
        arguments |= pool_of(case)
    else:
        arguments["state"] = case.state
    steps = dense_steps(case)
    if c.tokens > 1:
        arguments |= {
            "intermediate_states_buffer": steps,
            "disable_state_update": c.mode == "frozen",
        }
    rows = arguments.get("initial_state_indices")
    return in_place(case, functools.partial(function, **arguments), rows, steps)


def _refuse_mtp(p: Problem) -> str | None:
    c = p.contract
    fault = fault_of(c, state_dtype=("fp32",), intermediate=("none", "dense"))
    return fault or ("T=1, expected T>1" if c.tokens == 1 else too_large(p))


def _bind_mtp(case: Case) -> Bound:
    function = MTP.load()
    steps = dense_steps(case)
    arguments = {
        **inputs_of(case),
        **pool_of(case),
        "output": case.output,
        "intermediate_states_buffer": steps,
        # Its default is about to change from True to False.
        "disable_state_update": case.contract.mode == "frozen",
    }
    rows = arguments["initial_state_indices"]
    return in_place(case, functools.partial(function, **arguments), rows, steps)


def _refuse_v_last(p: Problem) -> str | None:
    # On states gathered from a pool beforehand it would look up no slots, which is another job.
    fault = fault_of(
        p.contract,
        layout="v_last",
        pool=(False,),
        state_dtype=("fp32",),
        tokens=(1,),
        mode=("update",),
        intermediate=("none",),
    )
    return fault or too_large(p)


def _bind_v_last(case: Case) -> Bound:
    function = V_LAST.load()
    arguments = {
        **inputs_of(case),
        "state": case.state,
        "output": case.output,
        "backend": "flashinfer",
    }
    return Bound(functools.partial(function, **arguments), first, lambda _: case.state)


def _refuse_wy(p: Problem) -> str | None:
    fault = fault_of(p.contract, state_dtype=("bf16",), mode=("frozen",), intermediate=("none",))
    return fault or too_large(p)


def _bind_wy(case: Case) -> Bound:
    function = WY.load()
    always_normalised(case)
    names = (
        "A_log",
        "a",
        "dt_bias",
        "softplus_beta",
        "softplus_threshold",
        "q",
        "k",
        "v",
        "b",
        "scale",
    )
    arguments = {name: getattr(case, name) for name in names}
    pool = pool_of(case)
    arguments |= {
        "initial_state_source": dense_pool(case),
        "initial_state_indices": pool["initial_state_indices"],
        "disable_state_update": True,
        "use_qk_l2norm_in_kernel": True,
        # Into an output of fewer rows than 16 it would copy its own.
        "output": case.output if case.contract.tokens == WY_TOKENS else None,
    }
    return Bound(functools.partial(function, **arguments), first)


def _wy_extra_bytes(p: Problem) -> int:
    """Where T is not native: the copies of the inputs into 16 rows, reading those, and writing
    outputs of 16 rows.
    """
    c = p.contract
    if c.tokens in WY_NATIVE:
        return 0
    row = p.B * (2 * p.H * c.K + p.HV * c.V + 2 * p.HV) * ITEMSIZE[c.input_dtype]
    out = p.B * p.HV * c.V * ITEMSIZE[c.input_dtype]
    return row * (c.tokens + WY_TOKENS) + out * (WY_TOKENS - c.tokens)


ENTRIES = (
    Entry(
        "gated_delta_rule_decode_pretranspose",
        _refuse_pretranspose,
        _bind_pretranspose,
        "on the pool by slots",
        functions=(PRETRANSPOSE,),
    ),
    Entry(
        "gated_delta_rule_mtp",
        _refuse_mtp,
        _bind_mtp,
        "on the pool by slots, disable_state_update given",
        functions=(MTP,),
    ),
    Entry(
        "gated_delta_rule_decode",
        _refuse_v_last,
        _bind_v_last,
        "on states in the requests' order, updated in place",
        functions=(V_LAST,),
    ),
    Entry(
        "gated_delta_rule_mtp_wy_output_only",
        _refuse_wy,
        _bind_wy,
        "on the pool by slots; inputs are staged in 16 rows within the call unless T is 4, 8 or 16",
        _wy_extra_bytes,
        # It rounds A_log, dt_bias and the matrices of its products to bf16.
        tolerance=2e-2,
        functions=(WY,),
    ),
)
