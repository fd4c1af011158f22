"""FlashInfer's ring of corrections: over whole cycles of its own, and on a case's windows."""

import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gdntune.checking.cases import Case
from gdntune.errors import UnsupportedProblem
from gdntune.peers.flashinfer.arguments import (
    always_normalised,
    fault_of,
    first,
    pool_of,
    too_large,
)
from gdntune.peers.spec import (
    Bound,
    Entry,
    Function,
    dense_pool,
    slots_of,
)
from gdntune.problem import ITEMSIZE, Problem
from gdntune.sol import state_bytes

UCACHE = Function(
    "flashinfer.gdn_kernels",
    "gated_delta_rule_mtp_ucache_flush",
    tuple(
        "A_log a dt_bias q k v b scale output initial_state_source initial_state_indices k_cache"
        " u_cache g_cache hist_len cache_base flush_min restart_hist_on_flush".split()
    ),
)

# Of its ring of corrections: the rows that it has, and those that are read at most.
RING, WINDOW = 32, 16


def _refuse_ring(p: Problem) -> str | None:
    fault = fault_of(
        p.contract, state_dtype=("bf16",), mode=("frozen",), intermediate=("none",), tokens=(4, 8)
    )
    return fault or too_large(p)


def _bind_ring(case: Case) -> Bound:
    """A request's drafts, all accepted, step by step: first with an empty ring, then with 1, 2, ...
    times T of its rows, of which the full window is folded into the state, and the ring goes on
    behind it.
    """
    function = UCACHE.load()
    always_normalised(case)
    if (case.softplus_beta, case.softplus_threshold) != (1.0, 20.0):
        raise UnsupportedProblem(
            f"softplus_beta={case.softplus_beta}, softplus_threshold={case.softplus_threshold}: it"
            " has 1.0 and 20.0 alone"
        )
    p, pool = case.problem, pool_of(case)
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
    return Bound(call, first, cycle=cycle, steps=fixed)


def _refuse_windows(p: Problem) -> str | None:
    return fault_of(p.contract, state_dtype=("bf16",), ring=(WINDOW,), tokens=(4, 8)) or too_large(
        p
    )


def _bind_windows(case: Case) -> Bound:
    """The case's own windows, in its form: keys normalised, corrections by these, log decays summed
    from the window's begin on.
    """
    function = UCACHE.load()
    always_normalised(case)
    pool, states = pool_of(case), dense_pool(case)
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
    return Bound(call, first, lambda _: states, rows)


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


ENTRIES = (
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
)
