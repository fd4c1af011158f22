"""SGLang's Triton kernel for decode and verify: a pool of K-last states, raw gates, one fixed tile.

Called as its engine calls it, on packed rows with cu_seqlens: the dense form is compiled anew for
    every batch size, and its loads
of cu_seqlens hide behind the load of the slot's index.
"""

from typing import Any

import torch

from gdntune.checking.cases import Case
from gdntune.errors import UnsupportedProblem
from gdntune.peers.spec import (
    Bound,
    Entry,
    Peer,
    beyond_reach,
    imported,
    intermediate_elements,
    packed,
    slots_of,
    starts,
    unless,
)
from gdntune.problem import Problem


def _refuse(p: Problem) -> str | None:
    c = p.contract
    return (
        unless(
            c,
            layout=("k_last",),
            gate=("raw", "softplus"),
            beta=("logit",),
            intermediate=("none", "dense", "indexed"),
            accepted=(False,),
        )
        or beyond_reach(p.B * p.HV * c.K * c.V, "the pool")
        or beyond_reach(intermediate_elements(p), "the buffer of intermediate states")
    )


def _bind(case: Case) -> Bound:
    update = imported(
        "sglang.srt.layers.attention.fla.fused_sigmoid_gating_recurrent",
        "fused_sigmoid_gating_delta_rule_update",
    )
    c = case.contract
    if fault := beyond_reach(case.state.numel(), "the pool"):
        raise UnsupportedProblem(fault)
    rows = slots_of(case)
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
        "disable_state_update": c.mode == "frozen",
    }
    if case.intermediate is not None:
        order = case.slot_index
        if order is None:
            order = torch.arange(case.problem.B, dtype=torch.int32, device=case.q.device)
        arguments |= {
            "intermediate_states_buffer": case.intermediate,
            "intermediate_state_indices": order,
            "cache_steps": case.intermediate.shape[1],
        }
    state = (lambda _: case.state) if c.mode == "update" else None
    return Bound(lambda: update(**arguments), lambda returned: returned, state, rows)


PEER = Peer(
    name="sglang",
    packages=("sglang", "triton"),
    distributions=("sglang",),
    remedy="pip install sglang",
    entries=(
        Entry(
            name="fused_sigmoid_gating_delta_rule_update",
            refuse=_refuse,
            bind=_bind,
            form="on the pool by slots, packed rows with cu_seqlens, the output a new tensor",
        ),
    ),
)
