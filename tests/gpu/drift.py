"""How far a long decode drifts from fp64, by the dtype of the state: `python tests/gpu/drift.py
[--device cuda] [--steps 10000]`.

Steps of one token on inputs like a model's: keys and queries that change slowly and share a
direction, queries near keys, gates of A_log = log(1..16) and dt_bias = softplus^-1(0.001..0.1).
Prints JSON: at 1, 10, 100, ... steps the relative error of states and outputs of the public
function, of rounding alone (fp64 arithmetic, states rounded where they are stored) and of peers
that are installed.
"""

import argparse
import dataclasses
import json
import math
import sys
import time

import torch

import gdntune
from gdntune import peers
from gdntune.checking.cases import Case, make_case
from gdntune.checking.reference import DTYPES, normalised, softplus
from gdntune.device import arch
from gdntune.problem import Contract, Problem

B, H, HV = 2, 2, 4
STATES = ("bf16", "fp16", "fp32")
CONTRACTS = [Contract(state_dtype=dtype) for dtype in STATES]
# Steps whose inputs are made at once.
CHUNK = 200
# A key's correlation with the one before, and the share of its energy in a direction that all keys
# of a head have.
MEMORY, SHARED = 0.8, 0.3
FLOW = ("q", "k", "v", "a", "b")


class Flow:
    """The inputs of a long decode, chunk by chunk, in the dtypes of a call. Made on the CPU, so
    that every device sees the same.
    """

    def __init__(self, seed: int):
        self.draw = torch.Generator().manual_seed(seed)
        self.last = {
            name: self._normal(B, heads, 128) for name, heads in (("q", H), ("k", H), ("v", HV))
        }
        self.shared = self._normal(1, B, H, 128)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape).normal_(generator=self.draw)

    def _slow(self, name: str, steps: int, heads: int) -> torch.Tensor:
        """Normal vectors, each step's correlated with the last one's."""
        fresh, found = self._normal(steps, B, heads, 128), []
        for x in fresh:
            self.last[name] = MEMORY * self.last[name] + math.sqrt(1 - MEMORY**2) * x
            found.append(self.last[name])
        return torch.stack(found)

    def chunk(self, steps: int, device: str) -> dict[str, torch.Tensor]:
        """q, k, v [steps, B, 1, heads, 128] and a, b [steps, B, 1, HV] in bf16."""
        k = math.sqrt(1 - SHARED) * self._slow("k", steps, H) + math.sqrt(SHARED) * self.shared
        q = (k + self._slow("q", steps, H)) / math.sqrt(2)
        found = {"q": q, "k": k, "v": self._slow("v", steps, HV)}
        found |= {"a": self._normal(steps, B, HV), "b": self._normal(steps, B, HV)}
        return {name: x.unsqueeze(2).to(torch.bfloat16).to(device) for name, x in found.items()}


def recurrence(flow: dict[str, torch.Tensor], case: Case) -> tuple[torch.Tensor, ...]:
    """What the formula takes, of a chunk, in fp64: q and k normalised, q scaled; v; the decay;
    beta.
    """
    x = {name: y[:, :, 0].double() for name, y in flow.items()}
    q, k = (normalised(x[name]).repeat_interleave(HV // H, 2) for name in ("q", "k"))
    assert case.A_log is not None and case.dt_bias is not None
    log_decay = -case.A_log.double().exp() * softplus(x["a"] + case.dt_bias.double(), 1.0, 20.0)
    return q * case.scale, k, x["v"], log_decay.exp(), x["b"].sigmoid()


class Exact:
    """States in fp64; with a dtype rounded to it after each step, as where they are stored: what
    that rounding alone costs.
    """

    def __init__(self, state: torch.Tensor, dtype: torch.dtype | None = None):
        self.now, self.dtype = state.double(), dtype

    def step(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor,
    ) -> torch.Tensor:
        """One token's output [B, HV, V]."""
        state = self.now * decay[..., None, None]
        u = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", state, k))
        state = state + u[..., None] * k[..., None, :]
        self.now = state if self.dtype is None else state.to(self.dtype).double()
        return torch.einsum("bhvk,bhk->bhv", state, q)


class Public:
    """Our function on a case of its own."""

    def __init__(self, case: Case):
        self.case = case

    def step(self, flow: dict[str, torch.Tensor]) -> torch.Tensor:
        """One token's output [B, HV, V]."""
        c = self.case
        return gdntune.gated_delta_rule_decode(
            **flow,
            initial_state=c.state,
            A_log=c.A_log,
            dt_bias=c.dt_bias,
            initial_state_indices=c.read_index,
            output=c.output,
        )[:, 0]

    @property
    def now(self) -> torch.Tensor:
        """The states by request."""
        assert self.case.read_index is not None
        return self.case.state[self.case.read_index.long()]


class Other:
    """A peer's entry on a case of its own, into whose tensors each step's inputs are copied."""

    def __init__(self, entry: peers.Entry, case: Case):
        self.case, self.bound, self.returned = case, entry.bind(case), None

    def step(self, flow: dict[str, torch.Tensor]) -> torch.Tensor:
        """One token's output [B, HV, V]."""
        for name, x in flow.items():
            getattr(self.case, name).copy_(x)
        self.returned = self.bound.call()
        return self.bound.output(self.returned).reshape(B, HV, -1)

    @property
    def now(self) -> torch.Tensor:
        """The states by request."""
        assert self.bound.state is not None
        state = self.bound.state(self.returned)
        return state if self.bound.rows is None else state[self.bound.rows.long()]


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The norm of the difference over the norm of what is wanted."""
    return float((got.double() - want).norm() / want.norm())


def drift(
    device: str, steps: int, names: tuple[str, ...] = ("flashinfer",), seed: int = 0
) -> dict[str, object]:
    """The report of a long decode on a device; names: peers, of which those are compared that are
    installed and serve a state's dtype.
    """
    first = {c.state_dtype: make_case(Problem(c, B, H, HV), device, seed) for c in CONTRACTS}
    start = first["bf16"]
    assert start.read_index is not None
    state = start.state[start.read_index.long()]
    # every dtype starts from the states and parameters of one case, whose states all dtypes hold
    cases = {
        dtype: dataclasses.replace(case, A_log=start.A_log, dt_bias=start.dt_bias)
        for dtype, case in first.items()
    }
    for case in cases.values():
        assert case.read_index is not None
        case.state[case.read_index.long()] = state.to(case.state.dtype)
    exact = Exact(state)
    rounded = {dtype: Exact(state, DTYPES[dtype]) for dtype in STATES}
    others: dict[tuple[str, str], Public | Other] = {
        ("gdntune", d): Public(case.clone()) for d, case in cases.items()
    }
    absent = {}
    for name in names:
        peer = peers.get(name)
        if said := peer.absent():
            absent[name] = said
            continue
        for dtype, case in cases.items():
            if found := peer.serving(case.problem)[0]:
                others[f"{name}.{found[0].name}", dtype] = Other(found[0], case.clone())
    marks = [m for m in (10**n for n in range(9)) if m <= steps]
    rows: list[dict[str, object]] = []
    flow, done, began = Flow(seed), 0, time.perf_counter()
    while done < steps:
        many = flow.chunk(min(CHUNK, steps - done), device)
        formula = recurrence(many, start)
        for t in range(many["q"].shape[0]):
            done += 1
            one = [x[t] for x in formula]
            call = {name: many[name][t] for name in FLOW}
            want = exact.step(*one)
            got = {("rounding alone", d): x.step(*one) for d, x in rounded.items()}
            got |= {who: x.step(call) for who, x in others.items()}
            if done in marks:
                states = {
                    **{("rounding alone", d): x.now for d, x in rounded.items()},
                    **{w: x.now for w, x in others.items()},
                }
                for (who, dtype), output in got.items():
                    apart = {
                        "state_error": error(states[who, dtype], exact.now),
                        "output_error": error(output, want),
                    }
                    rows.append({"who": who, "state": dtype, "step": done, **apart})
    found_device = arch.detect("cpu" if device == "cpu" else "cuda")
    return {
        "device": found_device.name,
        "software": arch.software(),
        "problem": {"B": B, "H": H, "HV": HV, "K": 128, "V": 128, "seed": seed},
        "steps": steps,
        "seconds": round(time.perf_counter() - began, 1),
        "absent": absent,
        "rows": rows,
    }


def main() -> None:
    """Parses, runs, prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peers", default="flashinfer", help="names, separated by commas")
    given = parser.parse_args()
    names = tuple(name for name in given.peers.split(",") if name)
    json.dump(drift(given.device, given.steps, names, given.seed), sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
