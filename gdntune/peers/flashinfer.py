"""FlashInfer's CuTe DSL kernels: GDN decode and verify in both state dtypes, its tensor-core
verifies of GDN and KDA, its ring of corrections, recurrent KDA.

The functions take their own thresholds from B*HV; `backend` names these kernels, so that no other
is tried first.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import UnsupportedProblem, listed
from gdntune.peers.spec import (
    Bound,
    Entry,
    Function,
    Peer,
    beyond_reach,
    dense_pool,
    dense_steps,
    intermediate_elements,
    packed,
    slots_of,
    starts,
    unless,
)
from gdntune.peers.steps import gate_of, rows_of, taps_by_part, windows
from gdntune.problem import ITEMSIZE, Contract, Problem
from gdntune.sol import state_bytes

_GDN = "q k v A_log a dt_bias b scale output use_qk_l2norm"
PRETRANSPOSE = Function(
    "flashinfer.gdn_decode",
    "gated_delta_rule_decode_pretranspose",
    tuple(
        f"{_GDN} state initial_state initial_state_indices intermediate_states_buffer"
        " disable_state_update backend".split()
    ),
)
MTP = Function(
    "flashinfer.gdn_decode",
    "gated_delta_rule_mtp",
    tuple(
        f"{_GDN} initial_state initial_state_indices intermediate_states_buffer"
        " disable_state_update".split()
    ),
)
V_LAST = Function(
    "flashinfer.gdn_decode", "gated_delta_rule_decode", tuple(f"{_GDN} state backend".split())
)
WY = Function(
    "flashinfer.gdn_kernels",
    "gated_delta_rule_mtp_wy_output_only",
    tuple(
        "A_log a dt_bias softplus_beta softplus_threshold q k v b scale initial_state_source"
        " initial_state_indices disable_state_update use_qk_l2norm_in_kernel output".split()
    ),
)
UCACHE = Function(
    "flashinfer.gdn_kernels",
    "gated_delta_rule_mtp_ucache_flush",
    tuple(
        "A_log a dt_bias q k v b scale output initial_state_source initial_state_indices k_cache"
        " u_cache g_cache hist_len cache_base flush_min restart_hist_on_flush".split()
    ),
)
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

# Rows that the tensor-core verify works on, whatever T is.
WY_TOKENS = 16
# T that it reads and writes without staging.
WY_NATIVE = (4, 8, WY_TOKENS)
# Of its ring of corrections: the rows that it has, and those that are read at most.
RING, WINDOW = 32, 16


def _fault(
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


def _too_large(p: Problem) -> str | None:
    c = p.contract
    return beyond_reach(p.B * p.HV * c.K * c.V, "the pool") or beyond_reach(
        intermediate_elements(p), "the buffer of intermediate states"
    )


def _gdn(case: Case) -> dict[str, Any]:
    """The arguments that its GDN functions share."""
    names = ("q", "k", "v", "A_log", "a", "dt_bias", "b", "scale")
    return {
        **{name: getattr(case, name) for name in names},
        "use_qk_l2norm": bool(case.use_qk_l2norm),
    }


def _pool(case: Case) -> dict[str, Any]:
    """The pool and its slots; states without a pool are one whose slots are 0..B-1."""
    if fault := beyond_reach(case.state.numel(), "the pool"):
        raise UnsupportedProblem(fault)
    return {"initial_state": case.state, "initial_state_indices": slots_of(case)}


def _first(returned: Any) -> Tensor:
    output: Tensor = returned[0] if isinstance(returned, tuple) else returned
    return output


def _in_place(case: Case, call: Any, rows: Tensor | None, steps: Tensor | None = None) -> Bound:
    """A call that updates the case's states, and writes those between tokens to `steps`."""
    state = (lambda _: case.state) if case.contract.mode == "update" else None
    between = None if steps is None else lambda _: steps
    return Bound(call, _first, state, rows, intermediate=between)


# -- gated_delta_rule_decode_pretranspose


def _refuse_pretranspose(p: Problem) -> str | None:
    c = p.contract
    if fault := _fault(c, state_dtype=("bf16", "fp32"), intermediate=("none", "dense")):
        return fault
    if c.tokens == 1:
        served = c.mode == "update" and c.intermediate == "none"
        return None if served else "at T=1 it writes the final state and nothing else"
    if c.state_dtype == "fp32":
        return "at T>1 it hands fp32 states to gated_delta_rule_mtp"
    if c.intermediate == "dense" and c.mode == "update":
        return "with intermediate states it writes the final one below B*HV=128 alone"
    return _too_large(p)


def _bind_pretranspose(case: Case) -> Bound:
    function = PRETRANSPOSE.load()
    c = case.contract
    arguments = {**_gdn(case), "output": case.output, "state": None, "backend": "flashinfer"}
    if c.pool or c.state_dtype == "bf16":
        arguments |= _pool(case)
    else:
        arguments["state"] = case.state
    steps = dense_steps(case)
    if c.tokens > 1:
        arguments |= {
            "intermediate_states_buffer": steps,
            "disable_state_update": c.mode == "frozen",
        }
    rows = arguments.get("initial_state_indices")
    return _in_place(case, functools.partial(function, **arguments), rows, steps)


# -- gated_delta_rule_mtp


def _refuse_mtp(p: Problem) -> str | None:
    c = p.contract
    fault = _fault(c, state_dtype=("fp32",), intermediate=("none", "dense"))
    return fault or ("T=1, expected T>1" if c.tokens == 1 else _too_large(p))


def _bind_mtp(case: Case) -> Bound:
    function = MTP.load()
    steps = dense_steps(case)
    arguments = {
        **_gdn(case),
        **_pool(case),
        "output": case.output,
        "intermediate_states_buffer": steps,
        # Its default is about to change from True to False.
        "disable_state_update": case.contract.mode == "frozen",
    }
    rows = arguments["initial_state_indices"]
    return _in_place(case, functools.partial(function, **arguments), rows, steps)


# -- gated_delta_rule_decode


def _refuse_v_last(p: Problem) -> str | None:
    # On states gathered from a pool beforehand it would look up no slots, which is another job.
    fault = _fault(
        p.contract,
        layout="v_last",
        pool=(False,),
        state_dtype=("fp32",),
        tokens=(1,),
        mode=("update",),
        intermediate=("none",),
    )
    return fault or _too_large(p)


def _bind_v_last(case: Case) -> Bound:
    function = V_LAST.load()
    arguments = {**_gdn(case), "state": case.state, "output": case.output, "backend": "flashinfer"}
    return Bound(functools.partial(function, **arguments), _first, lambda _: case.state)


# -- gated_delta_rule_mtp_wy_output_only


def _refuse_wy(p: Problem) -> str | None:
    fault = _fault(p.contract, state_dtype=("bf16",), mode=("frozen",), intermediate=("none",))
    return fault or _too_large(p)


def _bind_wy(case: Case) -> Bound:
    function = WY.load()
    if not case.use_qk_l2norm:
        raise UnsupportedProblem("use_qk_l2norm=False: it always normalises")
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
    pool = _pool(case)
    arguments |= {
        "initial_state_source": dense_pool(case),
        "initial_state_indices": pool["initial_state_indices"],
        "disable_state_update": True,
        "use_qk_l2norm_in_kernel": True,
        # Into an output of fewer rows than 16 it would copy its own.
        "output": case.output if case.contract.tokens == WY_TOKENS else None,
    }
    return Bound(functools.partial(function, **arguments), _first)


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


# -- gated_delta_rule_mtp_ucache_flush


def _refuse_ring(p: Problem) -> str | None:
    fault = _fault(
        p.contract, state_dtype=("bf16",), mode=("frozen",), intermediate=("none",), tokens=(4, 8)
    )
    return fault or _too_large(p)


def _bind_ring(case: Case) -> Bound:
    """A request's drafts, all accepted, step by step: first with an empty ring, then with 1, 2, ...
    times T of its rows, of which the full window is folded into the state, and the ring goes on
    behind it.
    """
    function = UCACHE.load()
    if not case.use_qk_l2norm:
        raise UnsupportedProblem("use_qk_l2norm=False: it always normalises")
    if (case.softplus_beta, case.softplus_threshold) != (1.0, 20.0):
        raise UnsupportedProblem(
            f"softplus_beta={case.softplus_beta}, softplus_threshold={case.softplus_threshold}: it"
            " has 1.0 and 20.0 alone"
        )
    p, pool = case.problem, _pool(case)
    # Its descriptors take no gaps between slots, unless compiled anew for each pool and batch.
    c, states = p.contract, dense_pool(case)
    names = ("A_log", "a", "dt_bias", "q", "k", "v", "b", "scale", "output")
    arguments = {name: getattr(case, name) for name in names} | {
        "initial_state_source": states,
        "initial_state_indices": pool["initial_state_indices"],
        "k_cache": states.new_zeros(len(states), p.H, RING, c.K),
        "u_cache": states.new_zeros(len(states), p.HV, RING, c.V),
        "g_cache": states.new_zeros(len(states), p.HV, RING, dtype=torch.float32),
        # the rows that are read, and where they begin, are set below, as a server does once for all
        # layers
        "restart_hist_on_flush": False,
    }
    cycle = WINDOW // c.tokens

    def everyone(n: int) -> Tensor:
        return torch.full((p.B,), n, dtype=torch.int32, device=states.device)

    filled = [everyone(c.tokens * i) for i in range(cycle + 1)]
    begins = [everyone(0), everyone(WINDOW)]
    steps = itertools.chain(
        [(filled[0], begins[0])],
        itertools.cycle((rows, begin) for begin in begins for rows in filled[1:]),
    )

    def call() -> Any:
        rows, begin = next(steps)
        return function(**arguments, hist_len=rows, cache_base=begin)

    def step(rows: Tensor) -> Callable[[], Any]:
        return functools.partial(function, **arguments, hist_len=rows, cache_base=begins[0])

    # what is appended goes behind the window, so that a step may be repeated as it is
    fixed = tuple(step(rows) for rows in filled[1:])
    return Bound(call, _first, cycle=cycle, steps=fixed)


def _refuse_windows(p: Problem) -> str | None:
    return _fault(p.contract, state_dtype=("bf16",), ring=(WINDOW,), tokens=(4, 8)) or _too_large(p)


def _bind_windows(case: Case) -> Bound:
    """The case's own windows, in its form: keys normalised, corrections by these, log decays summed
    from the window's begin on.
    """
    function = UCACHE.load()
    _always_normalised(case)
    pool, states = _pool(case), dense_pool(case)
    caches = _caches(case, len(states))
    names = ("A_log", "a", "dt_bias", "q", "k", "v", "b", "scale", "output")
    base, count = _window(case)
    arguments = {name: getattr(case, name) for name in names} | {
        "initial_state_source": states,
        "initial_state_indices": pool["initial_state_indices"],
        **caches,
        "hist_len": count.to(torch.int32),
        "cache_base": base.to(torch.int32),
        "flush_min": min(case.flush_min, WINDOW + 1 - case.contract.tokens),
        "restart_hist_on_flush": False,
    }
    rows = pool["initial_state_indices"]
    call = functools.partial(function, **arguments)
    return Bound(call, _first, lambda _: states, rows)


def _window(case: Case) -> tuple[Tensor, Tensor]:
    """Where each request's live entries begin, and how many they are; int64 [B]."""
    assert case.ring_base is not None and case.ring_count is not None and case.ring_u is not None
    base = case.ring_base.long().clamp(0, case.ring_u.shape[2] - 1)
    return base, case.ring_count.long().clamp(0, WINDOW)


def _caches(case: Case, slots: int) -> dict[str, Tensor]:
    p, c = case.problem, case.contract
    assert case.ring_k is not None and case.ring_u is not None and case.ring_decay is not None
    base, count = _window(case)
    entry = torch.arange(WINDOW, device=base.device)
    ours, theirs = ((base[:, None] + entry) % size for size in (case.ring_u.shape[2], RING))
    slot, live = slots_of(case).long()[:, None], (entry < count[:, None])[..., None]
    k, u, decay = (x[slot, :, ours].float() for x in (case.ring_k, case.ring_u, case.ring_decay))
    length = k.square().sum(-1, keepdim=True).add(1e-6).sqrt()
    sums = torch.where(live, decay, 1.0).log().cumsum(1)
    found = {
        "k_cache": (k / length, (p.H, RING, c.K), case.q.dtype),
        "u_cache": (
            u * length.repeat_interleave(p.HV // p.H, 2), (p.HV, RING, c.V), case.q.dtype
        ),
        "g_cache": (sums, (p.HV, RING), torch.float32),
    }  # fmt: skip
    caches = {}
    for name, (values, shape, dtype) in found.items():
        cache = caches[name] = case.state.new_zeros(slots, *shape, dtype=dtype)
        real = live if values.dim() == 3 else live[..., None]
        cache[slot, :, theirs] = torch.where(real, values, 0.0).to(dtype)
    return caches


def _ring_extra_bytes(p: Problem) -> int:
    """In the mean over a cycle: rows of the ring read and appended, and the state read again and
    written once.
    """
    c = p.contract
    cycle = WINDOW // c.tokens
    row = p.B * (p.H * c.K + p.HV * c.V) * ITEMSIZE[c.input_dtype] + p.B * p.HV * 4
    # T, 2T, ... up to the window are read, and T appended
    rows = c.tokens * (cycle + 1) / 2 + c.tokens
    return round(row * rows + 2 * state_bytes(p) / cycle)


# -- recurrent_kda


def _refuse_kda(p: Problem) -> str | None:
    c = p.contract
    if fault := _fault(c, op="kda_decode", state_dtype=("bf16",), intermediate=("none", "slots")):
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
    return _too_large(p)


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
    return _in_place(case, functools.partial(function, **rows, **arguments), slots)


# -- kda_wy_output_only and kda_recoverssm_verify


def _refuse_kda_outputs(p: Problem) -> str | None:
    c = p.contract
    fault = _fault(
        c,
        op="kda_decode",
        state_dtype=("bf16",),
        mode=("frozen",),
        intermediate=("none",),
    )
    if fault is None and p.H != p.HV and c.has_parameters:
        return f"H={p.H}, HV={p.HV}: its A_log and dt_bias are by q/k head, expected H=HV"
    return fault or _too_large(p)


def _always_normalised(case: Case) -> None:
    if not case.use_qk_l2norm:
        raise UnsupportedProblem("use_qk_l2norm=False: it always normalises")
    if (case.softplus_beta, case.softplus_threshold) != (1.0, 20.0):
        raise UnsupportedProblem(
            f"softplus_beta={case.softplus_beta}, softplus_threshold={case.softplus_threshold}: it"
            " has 1.0 and 20.0 alone"
        )


def _bind_kda_outputs(case: Case) -> Bound:
    _always_normalised(case)
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
    return Bound(functools.partial(KDA_WY.load(), **arguments), _first)


def _refuse_recover(p: Problem) -> str | None:
    if p.H != p.HV:
        return f"H={p.H}, HV={p.HV}: it knows one number of heads, expected H=HV"
    c = p.contract
    gates = unless(c, gate=("softplus", "lower_bound")) if c.op == "kda_decode" else None
    return gates or _refuse_kda_outputs(p)


def _bind_recover(case: Case) -> Bound:
    _always_normalised(case)
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
    return Bound(functools.partial(RECOVER.load(), **arguments), _first)


# -- fused_kda_decode


def _refuse_kda_step(p: Problem) -> str | None:
    c = p.contract
    if fault := _fault(
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
    return _too_large(p)


def _bind_kda_step(case: Case) -> Bound:
    _always_normalised(case)
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
    return Bound(call, _first, lambda _: states, index, left=held.left)


def _recover_extra_bytes(p: Problem) -> int:
    """What it keeps of each token to fold accepted ones in later: corrections in fp32, k and the
    gate as they came.
    """
    c = p.contract
    return p.B * p.HV * c.tokens * (4 * c.V + 2 * c.K * ITEMSIZE[c.input_dtype])


PEER = Peer(
    name="flashinfer",
    packages=("flashinfer", "cutlass"),
    distributions=("flashinfer-python",),
    written_for="0.7.4",
    remedy="pip install 'gdntune[peers]'",
    cache="FLASHINFER_WORKSPACE_BASE",
    entries=(
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
            "on the pool by slots; inputs are staged in 16 rows within the call unless T is 4, 8"
            " or 16",
            _wy_extra_bytes,
            # It rounds A_log, dt_bias and the matrices of its products to bf16.
            tolerance=2e-2,
            functions=(WY,),
        ),
        Entry(
            "gated_delta_rule_mtp_ucache_flush",
            _refuse_ring,
            _bind_ring,
            "on the pool by slots, on a copy without gaps where it has some, a ring of corrections"
            " beside it; means over whole cycles, all drafts accepted, the window folded into the"
            " state once in each",
            _ring_extra_bytes,
            # It rounds A_log, dt_bias and the matrices of its products to bf16.
            tolerance=2e-2,
            functions=(UCACHE,),
        ),
        Entry(
            "ucache_flush_by_windows",
            _refuse_windows,
            _bind_windows,
            "gated_delta_rule_mtp_ucache_flush on the case's windows, in rings of its own;"
            " corrections in bf16",
            # It rounds A_log, dt_bias and the matrices of its products to bf16.
            tolerance=2e-2,
            functions=(UCACHE,),
            kind="ring",
        ),
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
    ),
)
