"""What a step of drafts costs by the raw window of 36 layers, beside SGLang's and a state per token:

    python tests/gpu/drafts.py objects DIR [--op kda]             # anywhere: compiles what is called
    GDNTUNE_BUNDLE=DIR python tests/gpu/drafts.py time [--op kda] [--state fp32] [--no-peer]

Microseconds a layer and step, interleaved, under cold-clean, each in a CUDA graph: means of verify
with the inputs in the window's memory and with copies to it, of a commit of all drafts for all
layers over their number, and of a call with a slot per token. SGLang: its Triton verify, which
writes the window itself, and its commit of all layers. Outputs, and the states of all layers after
the commit, must agree before anything is timed; exits with 1 where they do not.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from statistics import fmean
from typing import Any

import ahead
import torch
from torch import Tensor

import gdntune
from gdntune.device import arch
from gdntune.objects.store import Store, default_root
from gdntune.problem import Contract, Problem
from gdntune.runtime import environment
from gdntune.timing import Policy
from gdntune.tuning.session import Session

LAYERS, K, V = 36, 128, 128
HEADS = {"gdn": (16, 64), "kda": (32, 32)}
SIZES, TOKENS = (1, 4, 16, 64, 256), (4, 8)
# Two ways whose products are rounded differently, with outputs and states in bf16.
AGREED = 2e-2
Call = Callable[[], Any]


def contract(op: str, T: int, state: str) -> Contract:
    """Of the drafts of a layer."""
    gate: dict[str, Any] = {} if op == "gdn" else {"op": "kda_decode", "gate": "softplus"}
    return Contract(tokens=T, state_dtype=state, **gate)


def slots_contract(c: Contract) -> Contract:
    """A state per token, started from the accepted one."""
    return c.replace(mode="frozen", intermediate="slots", accepted=True)


@dataclasses.dataclass(frozen=True)
class Step:
    """One step of drafts: q of a layer, each request's slot, how many are accepted, the parameters
    of all layers.
    """

    q: Tensor
    slots: Tensor
    accepted: Tensor
    A_log: Tensor
    dt_bias: Tensor


def window(c: Contract, B: int, op: str, device: str) -> tuple[gdntune.RawWindow, Step]:
    """A window of all layers, its inputs and states drawn at random."""
    H, HV = HEADS[op]
    per_key = (K,) if op == "kda" else ()
    A_log = torch.zeros(LAYERS, HV, device=device)
    dt_bias = torch.zeros(LAYERS, HV, *per_key, device=device)
    made = gdntune.RawWindow(
        Problem(c, B, H, HV), layers=LAYERS, slots=B, A_log=A_log, dt_bias=dt_bias
    )
    for layer in range(LAYERS):
        x = made.inputs(layer)
        for tensor in (x.k, x.v, x.gate, x.b):
            tensor.normal_()
    q = torch.randn_like(made.inputs(0).k)
    slots = torch.randperm(B, device=device).int()
    accepted = torch.full((B,), c.tokens, dtype=torch.int32, device=device)
    return made, Step(q, slots, accepted, A_log, dt_bias)


def slot_per_token(c: Contract, mine: gdntune.RawWindow, s: Step) -> Call:
    """A state of each token, in a slot of its own."""
    B, T = s.q.shape[:2]
    own, HV = mine.inputs(0), mine.problem.HV
    pool = torch.randn(B * T, HV, V, K, device=s.q.device).to(mine.states.dtype)
    slots = torch.randperm(B * T, device=s.q.device).int().view(B, T)
    first = torch.randint(1, T + 1, (B,), dtype=torch.int32, device=s.q.device)
    shared: dict[str, Any] = {
        "A_log": s.A_log[0], "dt_bias": s.dt_bias[0], "initial_state": pool, "b": own.b,
        "ssm_state_indices": slots, "num_accepted_tokens": first, "disable_state_update": True,
        "output": torch.empty_like(own.v, memory_format=torch.contiguous_format),
    }  # fmt: skip
    if c.op == "kda_decode":
        return lambda: gdntune.kda_decode(s.q, own.k, own.v, own.gate, **shared)
    return lambda: gdntune.gated_delta_rule_decode(s.q, own.k, own.v, a=own.gate, **shared)


class SGLang:
    """Its raw window of as many layers: `--enable-linear-replayssm-spec` with Triton."""

    def __init__(self, c: Contract, mine: gdntune.RawWindow, s: Step):
        from sglang.kernels.ops.attention.linear import (
            fused_sigmoid_gating_recurrent,
            gdn_replayssm_spec_fold,
            kda_replayssm_spec_decode,
        )

        kda, device = c.op == "kda_decode", s.q.device
        (B, T, H), HV = s.q.shape[:3], mine.problem.HV

        def window(dtype: torch.dtype, heads: int, *width: int) -> Tensor:
            return torch.zeros(LAYERS, B, heads, T, *width, dtype=dtype, device=device)

        self.states = mine.states.unflatten(1, (LAYERS, HV)).transpose(0, 1).contiguous()
        rings = {
            "rawv": window(s.q.dtype, HV, V), "rawk": window(s.q.dtype, H, K),
            "g": window(torch.float32, HV, *((K,) if kda else ())),
            "beta": window(torch.float32, HV),
        }  # fmt: skip
        names = {"rawv": "rawv_cache", "rawk": "rawk_cache", "beta": "beta_cache"}
        names["g"] = "gk_cache" if kda else "g_cache"
        fold = (
            kda_replayssm_spec_decode.commit_kda_replayssm_spec_all_layers
            if kda
            else gdn_replayssm_spec_fold.commit_gdn_replayssm_fold_all_layers
        )
        function = fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update
        starts = torch.arange(B + 1, dtype=torch.int32, device=device) * T

        def verify(layer: int) -> Tensor:
            x = mine.inputs(layer)
            rows = [y.flatten(0, 1)[None] for y in (s.q, x.k, x.v, x.gate, x.b)]
            q, k, v, a, b = rows
            return function(
                A_log=s.A_log[layer], a=a, dt_bias=s.dt_bias[layer].flatten(), q=q, k=k, v=v, b=b,
                softplus_beta=1.0, softplus_threshold=20.0,
                initial_state_source=self.states[layer], initial_state_indices=s.slots,
                cu_seqlens=starts, use_qk_l2norm_in_kernel=True, is_kda=kda,
                disable_state_update=True, cache_ring=True,
                **{f"replayssm_{name}": x[layer] for name, x in rings.items()},
            )  # fmt: skip

        self.verify = verify
        self.commit: Call = lambda: fold(
            checkpoint_state=self.states, ssm_state_indices=s.slots, accept_lens=s.accepted,
            max_cache_len=T, num_k_heads=H, null_block_id=-1,
            **{names[name]: x for name, x in rings.items()},
        )  # fmt: skip

    def agrees(self, mine: gdntune.RawWindow, s: Step) -> bool:
        """Whether outputs and, after a commit, all states are ours, but for rounding. Both commit."""
        worst = 0.0
        for layer in range(LAYERS):
            x = mine.inputs(layer)
            ours = mine.verify(layer, s.q, x.k, x.v, x.gate, x.b, s.slots)
            worst = max(worst, apart(self.verify(layer).view_as(ours), ours))
        mine.commit(s.slots, s.accepted)
        self.commit()
        states = max(apart(self.states[n], mine.state(n)) for n in range(LAYERS))
        ok = max(worst, states) < AGREED
        said = f"outputs {worst:.1e}, states {states:.1e} apart"
        print(f"<!-- {said}{'' if ok else ': TOO FAR'} -->", flush=True)
        return ok


def apart(x: Tensor, y: Tensor) -> float:
    """The norm of the difference over the norm."""
    return float((x.float() - y.float()).norm() / y.float().norm())


def captured(call: Call) -> Callable[[Any], Any]:
    """Replays a call's kernels: eager launches of torch's small ones would wait for the host."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda _: graph.replay()


def row(session: Session, op: str, c: Contract, B: int, peer: bool) -> bool:
    """A row of the table; whether the two agree."""
    mine, s = window(c, B, op, "cuda")
    mine.states.normal_()
    own, right = mine.inputs(0), True
    given = [x.clone() for x in (own.k, own.v, own.gate, own.b)]
    out = torch.empty(B, c.tokens, mine.problem.HV, V, dtype=torch.bfloat16, device="cuda")
    calls: list[Call] = [
        lambda: mine.verify(0, s.q, own.k, own.v, own.gate, own.b, s.slots, output=out),
        lambda: mine.verify(0, s.q, *given, s.slots, output=out),
        lambda: mine.commit(s.slots, s.accepted),
        slot_per_token(c, mine, s),
    ]
    if peer:
        theirs = SGLang(c, mine, s)
        right = theirs.agrees(mine, s)
        calls += [lambda: theirs.verify(0), theirs.commit]
    timed = session.timer.measure([captured(call) for call in calls], 48 if B < 256 else 24)
    verify, copies, commit, slot, *other = map(fmean, timed)
    total = verify + commit / LAYERS
    cells = [c.tokens, B, verify, copies, commit / LAYERS, total, copies + commit / LAYERS, slot]
    cells += [slot / total]
    if peer:
        their = other[0] + other[1] / LAYERS
        cells += [other[0], other[1] / LAYERS, their, their / total]
    print("| " + " | ".join(x if isinstance(x, str) else f"{x:.4g}" for x in cells) + " |")
    sys.stdout.flush()
    torch.cuda.empty_cache()
    return right


def time_all(op: str, state: str, sizes: list[int], peer: bool) -> bool:
    """The table."""
    device = arch.detect("cuda")
    session = Session(device, 0, Store(default_root(), environment.bundles()), Policy())
    H, HV = HEADS[op]
    print(f"{device.name}, {op}, H={H}, HV={HV}, {state} states: means in us a layer\n")
    heads = [
        "T", "B", "verify", "with copies", "commit / layer", "window", "window with copies",
        "a slot per token", "over window",
    ]  # fmt: skip
    if peer:
        heads += ["SGLang verify", "commit / layer", "window", "over ours"]
    print(f"| {' | '.join(heads)} |\n" + "| ---: " * len(heads) + "|")
    found = [row(session, op, contract(op, T, state), B, peer) for T in TOKENS for B in sizes]
    return all(found)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("objects", "time"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--op", choices=tuple(HEADS), default="gdn")
    parser.add_argument("--state", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)))
    parser.add_argument("--no-peer", action="store_true")
    given = parser.parse_args()
    if given.what == "objects":
        found = [contract(given.op, T, given.state) for T in TOKENS]
        windows = [x for c in found for x in window(c, 1, given.op, "cpu")[0].contracts]
        ahead.bundle([*windows, *map(slots_contract, found)], given.folder)
        return
    sizes = [int(n) for n in given.sizes.split(",")]
    sys.exit(not time_all(given.op, given.state, sizes, not given.no_peer))


if __name__ == "__main__":
    main()
