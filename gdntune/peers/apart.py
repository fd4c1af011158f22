"""Ours in launches of its own: vLLM's convolution, our delta rule by the table in use, vLLM's gated
norm. What a layer's step costs without the fused kernel.

Ours is called through the public functions, on views of what the convolution leaves, and writes the
case's own states.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.peers.spec import Bound, Entry, Peer, slots_of, unless
from gdntune.peers.steps import alone, between_bytes, convolved, refuse_step, split
from gdntune.peers.vllm import CONV, GATED_NORM, normalisation
from gdntune.problem import Problem
from gdntune.runtime import ops
from gdntune.runtime.loading import prepare


def _refuse(p: Problem) -> str | None:
    c = p.contract
    return refuse_step(c, norm=("silu", "sigmoid")) or unless(
        c, intermediate=("none", "slots"), gate=("raw", "softplus", "lower_bound"), beta=("logit",)
    )


def _delta_rule(case: Case, rows: Tensor, output: Tensor) -> Callable[[], Any]:
    """Our public function on packed rows [B*T, D]."""
    c = case.contract
    if case.q.is_cuda:
        # All that the table can choose at once: one by one, each batch would compile for itself.
        prepare(alone(c), index=case.q.device.index or 0)
    q, k, v = split(case, rows)
    arguments: dict[str, Any] = {
        "q": q,
        "k": k,
        "v": v,
        "b": case.b,
        "A_log": case.A_log,
        "dt_bias": case.dt_bias,
        "initial_state": case.state,
        "disable_state_update": c.mode == "frozen",
        "state_layout": c.layout,
        "scale": case.scale,
        "use_qk_l2norm": bool(case.use_qk_l2norm),
        "null_index": case.null_index,
        "output": output,
    }
    if case.slot_index is not None:
        slots = {"ssm_state_indices": case.slot_index, "num_accepted_tokens": case.accepted}
        arguments |= slots
    elif c.pool:
        arguments["initial_state_indices"] = slots_of(case)
    softplus = {
        "softplus_beta": case.softplus_beta,
        "softplus_threshold": case.softplus_threshold,
    }
    if c.op == "kda_decode":
        bound = case.lower_bound if c.gate == "lower_bound" else None
        arguments |= {"g": case.a, "lower_bound": bound, **softplus}
        return lambda: ops.kda_decode(**arguments)
    arguments |= {"a": case.a, **softplus}
    return lambda: ops.gated_delta_rule_decode(**arguments)


def _bind(case: Case) -> Bound:
    norm, conv = GATED_NORM.load(), convolved(case, CONV)
    between = torch.empty_like(case.output)
    decode, normed = _delta_rule(case, conv.rows, between), normalisation(case, between)

    def call() -> Tensor:
        conv.call()
        decode()
        norm(**normed)
        return case.output

    writes = case.contract.mode == "update"
    state = (lambda _: case.state) if writes else None
    rows = slots_of(case) if writes and case.contract.pool else None
    return Bound(call, lambda output: output, state, rows, left=conv.left)


PEER = Peer(
    name="apart",
    packages=("vllm", "triton"),
    distributions=("vllm",),
    written_for="0.33.0",
    remedy="pip install vllm==0.33.0, whose convolution and norm it calls",
    entries=(
        Entry(
            name="conv_ours_norm",
            refuse=_refuse,
            bind=_bind,
            form="vLLM's convolution where there is one, our delta rule, vLLM's gated norm; windows"
            " of its own, filled before the timed call",
            extra_bytes=between_bytes,
            # The products of its convolution are rounded to the inputs' dtype.
            tolerance=2e-2,
            functions=(CONV, GATED_NORM),
            packed=True,
            kind="layer",
            several=True,
        ),
    ),
)
