"""Long lives of sequences behind a ring, against decode of what was accepted, token by token:

    python tests/gpu/ring_sequences.py objects DIR   # anywhere: compiles what is called on a GPU
    GDNTUNE_BUNDLE=DIR python tests/gpu/ring_sequences.py sequences drift bits [--device cpu]

sequences: random steps (who is in it, how many drafts, how many are accepted, commits, resets), of
2,000 sequences in all. drift: 10,000 steps of four drafts on inputs like a model's
(`drift.py`), by the dtype of the state, the ring's capacity and u's dtype. bits: one request's
outputs and states are the same bits in every batch.

Each is judged beside decode by the public function, one token a call, in the same state dtype: a
ring may be no further from fp64 than that; with u in bf16, than decode with a state in bf16. Prints
Markdown; exits with 1 where one is worse.
"""

import argparse
import copy
import dataclasses
import sys
import time
from pathlib import Path

import torch
from drift import Flow
from torch import Tensor

import gdntune
from gdntune.checking.reference import DTYPES, gates, normalised, recurrence
from gdntune.problem import Contract, Problem

B, H, HV = 2, 1, 2
# Of a relative error: what fp32 arithmetic on terms of bf16 may cost, as in a sweep's checks.
ROUNDOFF = 64 * 2.0**-24
# A ring's error over sequential decode's: in the mean, and of the worst sequence, which is chance.
MEAN, WORST = 1.05, 1.5
FORMS = {
    "fp32": Contract(tokens=4, ring=16, state_dtype="fp32"),
    "bf16": Contract(tokens=4, ring=16),
    "bf16, u bf16": Contract(tokens=4, ring=16, ring_dtype="bf16"),
    "fp16": Contract(tokens=4, ring=16, state_dtype="fp16"),
    "bf16, T=8, 32": Contract(tokens=8, ring=32),
    "bf16, one token": Contract(ring=16),
    "bf16, at random": Contract(tokens=4, ring=16, ring_rounding="stochastic"),
}
DRIFTS = (
    [
        Contract(tokens=4, ring=ring, state_dtype=state)
        for state in ("bf16", "fp16", "fp32")
        for ring in (16, 32)
    ]
    + [
        Contract(tokens=4, ring=ring, state_dtype=state, ring_dtype="bf16")
        for state, ring in (("bf16", 16), ("bf16", 32), ("fp32", 16))
    ]
    + [
        Contract(tokens=4, ring=16, state_dtype=state, ring_rounding="stochastic")
        for state in ("bf16", "fp16")
    ]
)


def numbers(c: Contract) -> list[int]:
    """How many drafts a step may have: each number above four is an object of its own."""
    return list(range(1, c.tokens + 1)) if c.tokens <= 4 else [4, c.tokens]


@dataclasses.dataclass(frozen=True)
class Drafts:
    """A step's drafts: q, k [B, T, H, K], v [B, T, HV, V], a and b [B, T, HV], in bf16."""

    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor

    def of(self, t: int) -> tuple[Tensor, ...]:
        """Draft t alone."""
        return tuple(getattr(self, f.name)[:, t : t + 1] for f in dataclasses.fields(self))


@dataclasses.dataclass(frozen=True)
class Model:
    """The parameters [1, HV] of the one layer."""

    A_log: Tensor
    dt_bias: Tensor


class Exact:
    """States [n, HV, V, K] in fp64, one token after another."""

    def __init__(self, contract: Contract, model: Model, start: Tensor):
        self.contract, self.model, self.now = contract, model, start.double()

    def step(self, x: Drafts, slots: Tensor, accepted: Tensor) -> Tensor:
        """The outputs of all drafts; of the accepted ones the states are kept."""
        q, k, v, a, b = (getattr(x, f.name).double() for f in dataclasses.fields(x))
        parameters = self.model.A_log[0].double(), self.model.dt_bias[0].double()
        decay, beta = gates(self.contract, a, b, *parameters, 1.0, 20.0, -5.0, 1.0)
        q, k = (normalised(y).repeat_interleave(HV // H, 2) for y in (q, k))
        before = self.now[slots]
        outputs, after = recurrence(q * q.shape[-1] ** -0.5, k, v, decay, beta, before)
        every = torch.cat((before[:, None], after), 1)
        self.now[slots] = every[torch.arange(slots.shape[0], device=slots.device), accepted]
        return outputs


class Sequential:
    """The public function, one token a call, on states of a dtype."""

    def __init__(self, dtype: torch.dtype, model: Model, start: Tensor):
        self.model, self.pool = model, start.to(dtype)

    def step(self, x: Drafts, slots: Tensor, accepted: Tensor) -> Tensor:
        """The outputs of all drafts; those that are not accepted are padding, with zeros."""
        found = []
        for t in range(x.q.shape[1]):
            q, k, v, a, b = x.of(t)
            found.append(
                gdntune.gated_delta_rule_decode(
                    q, k, v, a=a, b=b, A_log=self.model.A_log[0], dt_bias=self.model.dt_bias[0],
                    initial_state=self.pool,
                    initial_state_indices=torch.where(t < accepted, slots, -1).int(),
                )
            )  # fmt: skip
        return torch.cat(found, 1)

    def states(self) -> Tensor:
        """Those of all sequences."""
        return self.pool


class Behind:
    """The ring."""

    def __init__(self, contract: Contract, model: Model, start: Tensor, **settings: bool):
        n = start.shape[0]
        self.settings = settings
        self.ring = gdntune.RingState(
            Problem(contract, n, H, HV), layers=1, slots=n, A_log=model.A_log,
            dt_bias=model.dt_bias,
        )  # fmt: skip
        self.ring.states.copy_(start)

    def step(self, x: Drafts, slots: Tensor, accepted: Tensor) -> Tensor:
        """The outputs of all drafts."""
        self.ring.begin(slots)
        output = self.ring.verify(0, x.q, x.k, x.v, x.a, x.b, slots, **self.settings)
        self.ring.accept(slots, accepted)
        return output

    def states(self) -> Tensor:
        """Those of all sequences, as a commit would leave them; the ring stays as it is."""
        apart = copy.deepcopy(self.ring)
        apart.commit(torch.arange(apart.slots, device=apart.states.device))
        return apart.states


def sized(contract: Contract, device: str) -> Contract:
    """On a CPU smaller heads do."""
    return contract if device == "cuda" else contract.replace(K=64, V=32)


def random_drafts(contract: Contract, B: int, T: int, device: str) -> Drafts:
    """Drafts drawn independently."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(B, T, *shape, dtype=torch.bfloat16, device=device)

    K, V = contract.K, contract.V
    return Drafts(normal(H, K), normal(H, K), normal(HV, V), normal(HV), normal(HV))


def a_model(device: str) -> Model:
    """Gates whose decay reaches from 0.3 to 0.999."""
    return Model(
        torch.linspace(-2.0, 1.0, HV, device=device)[None],
        torch.linspace(-3.0, 0.0, HV, device=device)[None],
    )


def apart(found: Tensor, exact: Tensor) -> Tensor:
    """[n]: the norm of each sequence's difference over that of what is right."""
    right = exact.double().flatten(1)
    return (found.double().flatten(1) - right).norm(dim=1) / right.norm(dim=1).clamp(min=1e-6)


def rms(x: Tensor) -> float:
    """Of a vector."""
    return float(x.square().mean().sqrt())


def judged(ring: Tensor, alone: Tensor) -> bool:
    """Whether a ring's errors, one a sequence, are no more than sequential decode's."""
    return (
        rms(ring) <= MEAN * rms(alone) + ROUNDOFF
        and float(ring.max()) <= WORST * float(alone.max()) + ROUNDOFF
    )  # fmt: skip


def beside(c: Contract) -> str:
    """The state dtype of the decode that a ring is judged beside."""
    return "bf16" if c.ring_dtype == "bf16" else c.state_dtype


def one_form(contract: Contract, count: int, steps: int, device: str) -> tuple[Tensor, ...]:
    """Errors of `count` sequences: states, and each one's mean over the outputs of what was
    accepted, behind a ring and in sequential decode.
    """
    model, tokens = a_model(device), numbers(contract)
    start = torch.randn(count, HV, contract.V, contract.K, device=device)
    start = start.to(DTYPES[contract.state_dtype])
    exact = Exact(contract, model, start)
    both = Behind(contract, model, start), Sequential(start.dtype, model, start)
    sums, times = torch.zeros(2, count, device=device).double(), torch.zeros(count, device=device)
    for _ in range(steps):
        B = int(torch.randint(1, count + 1, ()))
        slots = torch.randperm(count, device=device)[:B]
        T = tokens[int(torch.randint(len(tokens), ()))]
        accepted = torch.randint(0, T + 1, (B,), device=device)
        x = random_drafts(contract, B, T, device)
        right = exact.step(x, slots, accepted)
        kept = (torch.arange(T, device=device) < accepted[:, None])[..., None, None]
        some = accepted > 0
        for n, way in enumerate(both):
            found = way.step(x, slots, accepted)
            wrong = apart(torch.where(kept, found, 0), torch.where(kept, right, 0))
            sums[n, slots] += torch.where(some, wrong, 0)
        times[slots] += some
        chance = float(torch.rand(()))
        if chance < 0.1:
            both[0].ring.commit(torch.randperm(count, device=device)[: 1 + B // 4])
        elif chance < 0.15:
            gone = torch.randperm(count, device=device)[:1]
            both[0].ring.reset(gone)
            for states in (both[1].pool, exact.now):
                states[gone] = 0
    states = [apart(way.states(), exact.now) for way in both]
    return (*states, *(sums / times.clamp(min=1)))


def sequences(count: int, steps: int, device: str, seed: int = 0) -> bool:
    """Whether all forms are right; `count` sequences in all."""
    torch.manual_seed(seed)
    print(f"\n{count} sequences in all, {steps} steps; relative errors to fp64\n")
    print("| state | sequences | states, rms | sequential | states, worst | sequential |"
          " outputs, rms | sequential | |")  # fmt: skip
    print("| --- " + "| ---: " * 7 + "| --- |")
    right = True
    for name, form in FORMS.items():
        many = -(-count // len(FORMS))
        contract = sized(form, device)
        ring, alone, outputs, theirs = one_form(contract, many, steps, device)
        ok = judged(ring, alone) and judged(outputs, theirs)
        right &= ok
        print(
            f"| {name} | {many} | {rms(ring):.2e} | {rms(alone):.2e} | {float(ring.max()):.2e} |"
            f" {float(alone.max()):.2e} | {rms(outputs):.2e} | {rms(theirs):.2e} |"
            f" {'right' if ok else 'WRONG'} |",
            flush=True,
        )
    return right


class Steps:
    """The same step of all ways, whose inputs lie in the same memory each time: on a GPU one graph.
    The fp64 states are made by hand, so that they are captured too.
    """

    def __init__(self, contracts: list[Contract], B: int, device: str, seed: int):
        self.device, self.B, self.T = device, B, contracts[0].tokens
        self.contracts = [sized(c, device) for c in contracts]
        c, self.model = self.contracts[0], a_model(device)
        draw = torch.Generator().manual_seed(seed)
        start = torch.randn(B, HV, c.V, c.K, generator=draw).to(torch.bfloat16).to(device)
        self.x = random_drafts(c, B, self.T, device)
        self.slots = torch.arange(B, device=device)
        self.accepted = torch.zeros(B, dtype=torch.int64, device=device)
        self.exact = Exact(c, self.model, start)
        dtypes = {c.state_dtype: DTYPES[c.state_dtype] for c in contracts}
        self.alone = {d: Sequential(dtype, self.model, start) for d, dtype in dtypes.items()}
        self.behind = [Behind(c, self.model, start) for c in self.contracts]
        self.graph: torch.cuda.CUDAGraph | None = None

    def _all(self) -> None:
        for way in (self.exact, *self.alone.values(), *self.behind):
            way.step(self.x, self.slots, self.accepted)

    def capture(self) -> None:
        """One graph of a step; the steps before it accept nothing, so that they leave no trace."""
        for _ in range(2):
            self._all()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self._all()

    def step(self, given: Drafts, accepted: Tensor) -> None:
        """One step."""
        for f in dataclasses.fields(given):
            getattr(self.x, f.name).copy_(getattr(given, f.name))
        self.accepted.copy_(accepted)
        if self.graph is None:
            self._all()
        else:
            self.graph.replay()


def chunks(steps: Steps, many: int, seed: int):
    """Drafts like a model's: its slow keys, cut to the heads at hand."""
    flow, T, B, c = Flow(seed), steps.T, steps.B, steps.contracts[0]
    while True:
        x = flow.chunk(many * T, steps.device)
        # [steps * T, B', 1, heads, size] -> [steps, B, T, heads, size]
        laid = {
            name: y[:, :B, 0].unflatten(0, (many, T)).transpose(1, 2) for name, y in x.items()
        }  # fmt: skip
        sizes = {"q": c.K, "k": c.K, "v": c.V}
        heads = {"q": H, "k": H, "v": HV, "a": HV, "b": HV}
        cut = {name: y[:, :, :, : heads[name]] for name, y in laid.items()}
        cut = {name: y[..., : sizes[name]] if name in sizes else y for name, y in cut.items()}
        for n in range(many):
            yield Drafts(**{name: y[n] for name, y in cut.items()})


def drifts(steps: int, device: str, seed: int = 0, contracts: list[Contract] | None = None) -> bool:
    """Whether no ring drifts beyond sequential decode in its dtype; a table at 10, 100, ... steps."""
    ways = Steps(contracts or DRIFTS, B, device, seed)
    if device == "cuda":
        ways.capture()
    marks = [m for m in (10**n for n in range(1, 9)) if m < steps] + [steps]
    draw = torch.Generator().manual_seed(seed)
    rows: dict[str, list[str]] = {}
    verdicts, began = [], time.perf_counter()
    flow = chunks(ways, min(200, steps), seed)
    for done in range(1, steps + 1):
        # each draft with 0.7 if the one before was
        kept = (torch.rand(B, ways.T - 1, generator=draw) < 0.7).int().cumprod(1).sum(1) + 1
        ways.step(next(flow), kept.to(device))
        if done not in marks:
            continue
        exact = ways.exact.now
        alone = {d: apart(x.states(), exact) for d, x in ways.alone.items()}
        for dtype, error in alone.items():
            rows.setdefault(f"| {dtype} | none | | |", []).append(f"{rms(error):.2e}")
        for c, way in zip(ways.contracts, ways.behind, strict=True):
            error = apart(way.states(), exact)
            verdicts.append(judged(error, alone[beside(c)]))
            name = f"| {c.state_dtype} | {c.ring} | {c.ring_dtype} | {c.ring_rounding} |"
            rows.setdefault(name, []).append(f"{rms(error):.2e}" + ("" if verdicts[-1] else " !"))
    print(f"\nStates' relative error to fp64 after so many steps of {ways.T} drafts, 0.7 accepted;"
          f" {time.perf_counter() - began:.0f} s\n")  # fmt: skip
    print("| state | ring | u | rounding | " + " | ".join(map(str, marks)) + " |")
    print("| --- | --- | --- | --- " + "| ---: " * len(marks) + "|")
    for name, values in sorted(rows.items()):
        print(f"{name} " + " | ".join(values) + " |", flush=True)
    return all(verdicts)


def bits(device: str, seed: int = 0, sizes: tuple[int, ...] = (1, 2, 3, 5, 17, 64, 200)) -> bool:
    """Whether a sequence's outputs and state are the same bits in every batch, folds included."""
    c, steps = sized(FORMS["bf16"], device), 24
    draw = torch.Generator(device).manual_seed(seed)
    torch.manual_seed(seed)
    model = a_model(device)
    own = [random_drafts(c, 1, c.tokens, device) for _ in range(steps)]
    kept = torch.randint(1, c.tokens + 1, (steps, 1), device=device, generator=draw)
    start = torch.randn(1, HV, c.V, c.K, device=device).bfloat16()
    found = []
    for B in sizes:
        others = torch.randn(B, HV, c.V, c.K, device=device).bfloat16()
        at = B // 2
        others[at] = start[0]
        way, outputs = Behind(c, model, others, batch_invariant=True), []
        for x, n in zip(own, kept, strict=True):
            many = random_drafts(c, B, c.tokens, device)
            for f in dataclasses.fields(x):
                getattr(many, f.name)[at] = getattr(x, f.name)[0]
            accepted = torch.randint(0, c.tokens + 1, (B,), device=device)
            accepted[at] = n[0]
            outputs.append(way.step(many, torch.arange(B, device=device), accepted)[at])
        found.append((torch.stack(outputs), way.ring.states[at], way.ring.ring_u[at]))
    same = [all(map(torch.equal, x, found[0])) for x in found]
    said = ", ".join(f"{B} {'same' if ok else 'OTHER'}" for B, ok in zip(sizes, same, strict=True))
    print(f"\nbits of one request in a batch of: {said}")
    return all(same)


def objects(folder: Path) -> None:
    """A bundle of what a GPU is asked."""
    from ahead import bundle

    from gdntune.runtime.rings import commit_contract

    # requests of a call, on HV heads each: those of `sequences`, of `drift`
    many = {c.replace(tokens=T): 2000 for c in FORMS.values() for T in numbers(c)}
    many |= {commit_contract(c): 2000 for c in FORMS.values()}
    many |= {Contract(state_dtype=c.state_dtype): 2000 for c in FORMS.values()}
    few = {
        x: 2 for c in DRIFTS for x in (c, commit_contract(c), Contract(state_dtype=c.state_dtype))
    }
    most = {c: HV * n // (1 if n < 2000 else len(FORMS)) for c, n in (few | many).items()}
    # `bits` asks for the choice of the largest sizes
    most.pop(FORMS["bf16"])
    bundle(dict.fromkeys((*few, *many)), folder, most=most)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", nargs="+", help="objects DIR, or of sequences, drift, bits")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=300, help="of a sequence")
    parser.add_argument("--drift", type=int, default=10_000, help="steps of the drift")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.what[0] == "objects":
        objects(Path(given.what[1]))
        return
    kinds = {
        "sequences": lambda: sequences(given.count, given.steps, given.device, given.seed),
        "drift": lambda: drifts(given.drift, given.device, given.seed),
        "bits": lambda: bits(given.device, given.seed),
    }
    if unknown := set(given.what) - set(kinds):
        parser.error(f"{sorted(unknown)}: expected of {sorted(kinds)}")
    found = [kinds[name]() for name in given.what]
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
