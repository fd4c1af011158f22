"""vLLM's Triton kernels: packed decode, decode and verify from raw gates, and from given ones for
GDN and KDA. K-last pools.

They take slot 0 for padding, so a pool is handed over with an empty slot before its first. Where
each token's state is kept it goes
to a slot of its own and the slot that was read stays: vLLM's form of speculative decoding. Nothing
    else is written at T>1.
"""

from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import ToolMissing
from gdntune.peers.spec import Bound, Entry, Peer, imported, packed, slots_of, starts, unless
from gdntune.problem import Contract, Problem

# Where its copy of flash-linear-attention is, the newest place first.
PLACES = ("vllm.third_party.flash_linear_attention.ops", "vllm.model_executor.layers.fla.ops")
_OWN_POOL = "on a pool of its own with an empty slot 0, filled before the timed call"


def _function(module: str, name: str) -> Any:
    """A function of the installed version; ToolMissing says of each place why it is not there."""
    faults = []
    for place in PLACES:
        try:
            return imported(f"{place}.{module}", name)
        except ToolMissing as e:
            faults.append(str(e))
    raise ToolMissing("; ".join(faults))


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
    its own.
    """
    if case.slot_index is not None:
        states, index = case.state, case.slot_index + 1
    else:
        states = case.state[slots_of(case).long()]
        index = torch.arange(1, case.problem.B + 1, dtype=torch.int32, device=states.device)
    pool = states.new_zeros((states.shape[0] + 1, *states.shape[1:]))
    pool[1:] = states
    return pool, index


def _bound(call: Any, pool: Tensor, index: Tensor) -> Bound:
    """A call whose output is the first that it returns, and whose states are in the pool."""
    if index.dim() == 1:
        return Bound(call, _first, lambda _: pool, index)
    return Bound(call, _first, intermediate=lambda _: pool[index.long()])


def _first(returned: Any) -> Tensor:
    output: Tensor = returned[0]
    return output


def _rows(case: Case, pool: Tensor, index: Tensor) -> dict[str, Any]:
    """The arguments that the functions on packed rows share."""
    accepted = None if case.accepted is None else case.accepted.clamp(1, index.shape[1])
    return {
        **{name: packed(case, getattr(case, name)) for name in ("q", "k", "v")},
        "scale": case.scale,
        "initial_state": pool,
        "inplace_final_state": True,
        "cu_seqlens": starts(case),
        "ssm_state_indices": index,
        "num_accepted_tokens": accepted,
        "use_qk_l2norm_in_kernel": bool(case.use_qk_l2norm),
    }


# -- fused_recurrent_gated_delta_rule_packed_decode


def _refuse_packed(p: Problem) -> str | None:
    raw = {"op": ("gdn_decode",), "layout": ("k_last",), "gate": ("raw",), "beta": ("logit",)}
    return unless(
        p.contract, **raw, tokens=(1,), mode=("update",), intermediate=("none",), ragged=(False,)
    )  # fmt: skip


def _bind_packed(case: Case) -> Bound:
    function = _function("fused_recurrent", "fused_recurrent_gated_delta_rule_packed_decode")
    pool, index = _shifted(case)
    arguments = {
        "mixed_qkv": torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], dim=1),
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


# -- fused_sigmoid_gating_delta_rule_update


def _refuse_sigmoid(p: Problem) -> str | None:
    c = p.contract
    if fault := unless(c, layout=("k_last",), gate=("raw", "softplus"), beta=("logit",)):
        return fault
    if c.op == "kda_decode" and c.tokens > 1:
        return (
            f"KDA at T={c.tokens}, expected T=1: from token to token it moves on in the gate by"
            " heads, not by heads times K"
        )
    return _writes(c)


def _bind_sigmoid(case: Case) -> Bound:
    function = _function("fused_sigmoid_gating", "fused_sigmoid_gating_delta_rule_update")
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
            f"H={p.H}, HV={p.HV}, K={c.K}, V={c.V}: its output has the shape of k, so H=HV and K=V"
            " are accepted"
        )
    return None


def _bind_given(case: Case) -> Bound:
    if case.contract.op == "gdn_decode":
        function = _function("fused_recurrent", "fused_recurrent_gated_delta_rule")
    else:
        # The function below fused_recurrent_kda, which in some versions drops num_accepted_tokens.
        function = _function("kda", "fused_recurrent_kda_fwd")
    pool, index = _shifted(case)
    arguments = {
        **_rows(case, pool, index),
        "g": packed(case, case.a),
        "beta": packed(case, case.b),
    }
    return _bound(lambda: function(**arguments), pool, index)


PEER = Peer(
    name="vllm",
    packages=("vllm", "triton"),
    distributions=("vllm",),
    remedy="pip install vllm",
    entries=(
        Entry(
            name="fused_recurrent_gated_delta_rule_packed_decode",
            refuse=_refuse_packed,
            bind=_bind_packed,
            form=f"{_OWN_POOL}; q, k and v packed into one tensor before the call",
        ),
        Entry(
            name="fused_sigmoid_gating_delta_rule_update",
            refuse=_refuse_sigmoid,
            bind=_bind_sigmoid,
            form=f"{_OWN_POOL}; packed rows with cu_seqlens, the output a new tensor",
        ),
        Entry(
            name="fused_recurrent_gated_delta_rule",
            refuse=_refuse_gdn,
            bind=_bind_given,
            form=f"{_OWN_POOL}; packed rows with cu_seqlens, the output a new tensor",
        ),
        Entry(
            name="fused_recurrent_kda",
            refuse=_refuse_kda,
            bind=_bind_given,
            form=f"{_OWN_POOL}; packed rows with cu_seqlens, the output a new tensor",
        ),
    ),
)
