"""What rounding a ring's states costs by how it is done, in fp64 arithmetic: `python tests/gpu/ring_rounding.py
[--steps 10000]`.

Steps of four drafts like a model's (`drift.py`), each accepted with 0.7 if the one before was. States
are rounded where a ring of 16 or 32 is folded, or after each token: to nearest, at random in proportion
(stochastic), or as two numbers of the dtype (a low part is kept). Prints Markdown: the states' relative
error after 10, 100, ... steps, for heads that forget and for heads that hardly do.
"""

import argparse

import torch
from drift import Flow
from ring_sequences import HV, B, H, apart, rms
from torch import Tensor

from gdntune.checking.reference import DTYPES, normalised

K, V, T = 64, 32, 4
# Of a token: the decays of the first and last head, and what beta's sigmoid is multiplied by.
CASES = {
    "forget": (0.5, 0.98, 1.0),
    "hardly forget": (0.999, 0.99999, 1.0),
    "hardly forget and hardly learn": (0.999, 0.99999, 0.005),
}
HOW = ("nearest", "stochastic", "low part")
CAPACITIES = (1, 16, 32)


def stochastic(x: Tensor, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """x rounded up or down, up with the chance that its distance says; x is no number's middle of two
    subnormal ones, which is all that is left out.
    """
    near = x.to(dtype)
    up = torch.tensor(torch.inf, dtype=dtype, device=x.device)
    other = torch.nextafter(near, torch.where(x > near, up, -up))
    apart_by = (other.double() - near.double()).abs()
    chance = (x - near.double()).abs() / apart_by
    drawn = torch.rand(x.shape, dtype=x.dtype, device=x.device, generator=draw)
    return torch.where(drawn < chance, other, near).double()


def rounded(x: Tensor, how: str, dtype: torch.dtype, draw: torch.Generator) -> Tensor:
    """x as it is stored."""
    if how == "stochastic":
        return stochastic(x, dtype, draw)
    high = x.to(dtype).double()
    return high + (x - high).to(dtype).double() if how == "low part" else high


class Way:
    """States [B, HV, V, K] rounded in one way."""

    def __init__(self, start: Tensor, dtype: str, how: str, capacity: int):
        self.now, self.how, self.dtype = start.clone(), how, DTYPES[dtype]
        self.capacity, self.draw = capacity, torch.Generator(start.device).manual_seed(0)
        self.count = torch.zeros(B, dtype=torch.int64)

    def before_step(self, accepted: Tensor) -> None:
        """Folds requests to whose rings T more do not fit."""
        if self.capacity > 1:
            folds = self.count + T > self.capacity
            found = rounded(self.now, self.how, self.dtype, self.draw)
            self.now = torch.where(folds[:, None, None, None], found, self.now)
            self.count = torch.where(folds, 0, self.count) + accepted

    def token(self, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, real: Tensor) -> None:
        """One accepted token of the requests that are `real`."""
        state = self.now * decay[..., None, None]
        u = beta[..., None] * (v - torch.einsum("bhvk,bhk->bhv", state, k))
        state = state + u[..., None] * k[..., None, :]
        if self.capacity == 1:
            state = rounded(state, self.how, self.dtype, self.draw)
        self.now = torch.where(real[:, None, None, None], state, self.now)


def table(steps: int, case: tuple[float, float, float], seed: int = 0) -> dict[str, list[float]]:
    """Errors by way, at each mark."""
    draw, flow = torch.Generator().manual_seed(seed), Flow(seed)
    start = torch.randn(B, HV, V, K, generator=draw).to(torch.bfloat16).double()
    decay = torch.linspace(*case[:2], HV).double().expand(B, HV)
    exact = Way(start, "fp32", "nearest", 1 << 30)
    ways = {
        f"| {dtype} | {how} | {capacity} |": Way(start, dtype, how, capacity)
        for dtype in ("bf16", "fp16")
        for capacity in CAPACITIES
        for how in HOW
    }
    marks = [m for m in (10**n for n in range(1, 9)) if m < steps] + [steps]
    errors: dict[str, list[float]] = {name: [] for name in ways}
    for done in range(1, steps + 1):
        if (done - 1) % 200 == 0:
            chunk = flow.chunk(200 * T, "cpu")
        x = {name: y[(done - 1) % 200 * T :][:T, :, 0].double() for name, y in chunk.items()}
        k = normalised(x["k"][:, :, :H, :K]).repeat_interleave(HV // H, 2)
        v, beta = x["v"][:, :, :HV, :V], case[2] * x["b"][:, :, :HV].sigmoid()
        kept = (torch.rand(B, T - 1, generator=draw) < 0.7).long().cumprod(1).sum(1) + 1
        for way in (exact, *ways.values()):
            way.before_step(kept)
            for t in range(T):
                way.token(k[t], v[t], decay, beta[t], t < kept)
        if done in marks:
            for name, way in ways.items():
                errors[name].append(rms(apart(way.now, exact.now)))
    return errors


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10_000)
    steps = parser.parse_args().steps
    marks = [m for m in (10**n for n in range(1, 9)) if m < steps] + [steps]
    for name, case in CASES.items():
        print(
            f"\nHeads that {name} (a token's decay {case[0]} to {case[1]}, beta to {case[2]}), by steps\n"
        )
        print("| state | rounding | folded after | " + " | ".join(map(str, marks)) + " |")
        print("| --- | --- | ---: " + "| ---: " * len(marks) + "|")
        for way, found in table(steps, case).items():
            print(f"{way} " + " | ".join(f"{x:.1e}" for x in found) + " |", flush=True)


if __name__ == "__main__":
    main()
