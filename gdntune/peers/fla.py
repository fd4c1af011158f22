"""flash-linear-attention's recurrent kernels: any head sizes, both layouts. GDN returns a new fp32
state, KDA updates in place.

GDN takes no pool, so contracts with one are refused: on states gathered beforehand it would look up
    no slots and read memory in order.
Below KDA's public function there is one that takes slots, at T=1 or one a token. Its V-first state
is K-last in memory, the default V-last.
"""

from typing import Any

from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.peers.spec import Bound, Entry, Function, Peer, slots_of, unless
from gdntune.problem import Problem

_SHARED = (
    "q k v g beta initial_state use_gate_in_kernel A_log dt_bias use_beta_sigmoid_in_kernel"
    " use_qk_l2norm_in_kernel state_v_first cu_seqlens scale"
)
GDN = Function(
    "fla.ops.gated_delta_rule.fused_recurrent",
    "fused_recurrent_gated_delta_rule",
    (*_SHARED.split(), "output_final_state"),
)
# The function below fused_recurrent_kda: it alone updates in place, takes slots, and has no output
# to fill with zeros first.
KDA = Function(
    "fla.ops.kda.fused_recurrent",
    "fused_recurrent_kda_fwd",
    (
        *_SHARED.split(),
        *"out lower_bound inplace_final_state ssm_state_indices num_accepted_tokens".split(),
    ),
)


def _gate(case: Case) -> dict[str, Any]:
    """The arguments of gate, beta and layout, which both functions share."""
    c = case.contract
    inside = c.has_parameters
    return {
        "use_gate_in_kernel": inside,
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "use_beta_sigmoid_in_kernel": c.beta == "logit",
        "use_qk_l2norm_in_kernel": bool(case.use_qk_l2norm),
        "state_v_first": c.layout == "k_last",
        "cu_seqlens": case.cu_seqlens,
        "scale": case.scale,
    }


def _first(returned: Any) -> Tensor:
    output: Tensor = returned[0]
    return output


def _second(returned: Any) -> Tensor:
    state: Tensor = returned[1]
    return state


def _refuse_gdn(p: Problem) -> str | None:
    return unless(
        p.contract, op=("gdn_decode",), pool=(False,), state_dtype=("fp32",), intermediate=("none",)
    )


def _bind_gdn(case: Case) -> Bound:
    function = GDN.load()
    writes = case.contract.mode == "update"
    arguments = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "g": case.a,
        "beta": case.b,
        "initial_state": case.state,
        "output_final_state": writes,
        **_gate(case),
    }
    return Bound(lambda: function(**arguments), _first, _second if writes else None)


def _refuse_kda(p: Problem) -> str | None:
    c = p.contract
    if fault := unless(c, op=("kda_decode",), intermediate=("none", "slots")):
        return fault
    if c.intermediate == "slots":
        served = c.mode == "frozen" and not c.ragged
        return (
            None
            if served
            else "with slots it writes each token's state and no other, on dense batches here"
        )
    if c.pool and (c.tokens > 1 or c.ragged or c.mode == "frozen"):
        return (
            "pool=True, expected False but at T=1 with the final state: at T>1 its slots are"
            " each token's"
        )
    return None


def _bind_kda(case: Case) -> Bound:
    function = KDA.load()
    c = case.contract
    writes = c.mode == "update"
    arguments = {
        "q": case.q,
        "k": case.k,
        "v": case.v,
        "g": case.a,
        "beta": case.b,
        "out": case.output,
        "lower_bound": case.lower_bound if c.gate == "lower_bound" else None,
        "initial_state": case.state,
        "inplace_final_state": writes,
        **_gate(case),
    }
    if case.slot_index is not None:
        accepted = (
            None if case.accepted is None else case.accepted.clamp(1, case.slot_index.shape[1])
        )
        slots = {"ssm_state_indices": case.slot_index, "num_accepted_tokens": accepted}
        arguments |= {"inplace_final_state": True, **slots}
        return Bound(lambda: function(**arguments), _first)
    rows = slots_of(case) if c.pool else None
    arguments["ssm_state_indices"] = rows
    return Bound(lambda: function(**arguments), _first, _second if writes else None, rows)


PEER = Peer(
    name="fla",
    packages=("fla", "triton"),
    distributions=("fla-core", "flash-linear-attention"),
    written_for="0.6.0",
    remedy="pip install 'gdntune[peers]'",
    entries=(
        Entry(
            name="fused_recurrent_gated_delta_rule",
            refuse=_refuse_gdn,
            bind=_bind_gdn,
            form="on states in the requests' order; the new state and the output are new tensors",
            functions=(GDN,),
        ),
        Entry(
            name="fused_recurrent_kda",
            refuse=_refuse_kda,
            bind=_bind_kda,
            form="its in-place form; by slots where the contract has a pool",
            functions=(KDA,),
        ),
    ),
)
