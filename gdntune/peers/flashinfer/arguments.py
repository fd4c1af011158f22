"""What FlashInfer's functions share: what all of them refuse, their arguments, what they return."""

from typing import Any

from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import UnsupportedProblem
from gdntune.peers.spec import Bound, beyond_reach, intermediate_elements, slots_of, unless
from gdntune.problem import Contract, Problem

# What its GDN functions are called with.
GDN = "q k v A_log a dt_bias b scale output use_qk_l2norm"


def fault_of(
    c: Contract, *, op: str = "gdn_decode", layout: str = "k_last", **accepted: Any
) -> str | None:
    """What all its kernels want: bf16 inputs and gates, fp32 parameters, head sizes of 128, dense
    batches.
    """
    gates = ("raw",) if op == "gdn_decode" else ("softplus", "lower_bound", "log")
    beta = ("logit",) if op == "gdn_decode" else ("logit", "given")
    return unless(
        c,
        op=(op,),
        layout=(layout,),
        K=(128,),
        V=(128,),
        input_dtype=("bf16",),
        gate_dtype=("bf16",),
        beta_dtype=("bf16",),
        A_log_dtype=("fp32",),
        dt_bias_dtype=("fp32",),
        gate=gates,
        beta=beta,
        ragged=(False,),
        **accepted,
    )


def too_large(p: Problem) -> str | None:
    """A pool or a buffer of states beyond its 32-bit offsets; None: neither is."""
    c = p.contract
    return beyond_reach(p.B * p.HV * c.K * c.V, "the pool") or beyond_reach(
        intermediate_elements(p), "the buffer of intermediate states"
    )


def inputs_of(case: Case) -> dict[str, Any]:
    """The arguments that its GDN functions share."""
    names = ("q", "k", "v", "A_log", "a", "dt_bias", "b", "scale")
    return {
        **{name: getattr(case, name) for name in names},
        "use_qk_l2norm": bool(case.use_qk_l2norm),
    }


def pool_of(case: Case) -> dict[str, Any]:
    """The pool and its slots; states without a pool are one whose slots are 0..B-1."""
    if fault := beyond_reach(case.state.numel(), "the pool"):
        raise UnsupportedProblem(fault)
    return {"initial_state": case.state, "initial_state_indices": slots_of(case)}


def first(returned: Any) -> Tensor:
    """The output, also where the function returns more."""
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output


def in_place(case: Case, call: Any, rows: Tensor | None, steps: Tensor | None = None) -> Bound:
    """A call that updates the case's states, and writes those between tokens to `steps`."""
    state = (lambda _: case.state) if case.contract.mode == "update" else None
    between = None if steps is None else lambda _: steps
    return Bound(call, first, state, rows, intermediate=between)


def always_normalised(case: Case) -> None:
    """Refuses a case whose q and k are normalised before the call."""
    if not case.use_qk_l2norm:
        raise UnsupportedProblem("use_qk_l2norm=False: it always normalises")
    if (case.softplus_beta, case.softplus_threshold) != (1.0, 20.0):
        raise UnsupportedProblem(
            f"softplus_beta={case.softplus_beta}, softplus_threshold={case.softplus_threshold}: it"
            " has 1.0 and 20.0 alone"
        )
