"""KDA's verify behind a ring on a GPU: checked against fp64, and timed over whole cycles beside outputs
alone, a call that writes the final state, and a state per token.

    python tests/gpu/ring_kda_gpu.py compile DIR                  # without a GPU: a bundle
    GDNTUNE_BUNDLE=DIR python tests/gpu/ring_kda_gpu.py check [--random N]
    GDNTUNE_BUNDLE=DIR python tests/gpu/ring_kda_gpu.py time [--sizes 1,4,16,64,256]

check: every compiled variant by the gate that a sweep has, and N random problems; exits with 1 where
one is wrong. time: H=HV=32, bf16 state, all drafts accepted, each request elsewhere in the cycle;
microseconds a call, interleaved, means over whole cycles, folds included. `window`: outputs alone and
a call that writes the state, which the raw window's verify and commit are, a layer.
"""

import functools
from collections.abc import Callable, Iterable
from statistics import fmean
from typing import Any

import torch
from kernel_checks import arguments, bundle, gate, of_the_timers, randomly, session_of

from gdntune import kernels
from gdntune.checking.cases import Case, make_case
from gdntune.device import arch, gpus
from gdntune.kernels.ring_kda_config import Knobs
from gdntune.kernels.spec import Kernel, Variant
from gdntune.problem import Contract, Problem
from gdntune.runtime.dispatch import Runtime
from gdntune.sol import state_bytes
from gdntune.tuning import rings
from gdntune.tuning.session import Session

RING = kernels.get("ring_kda")
TRIED = [
    RING.variant(s)
    for s in (Knobs(32, 4, 8, 16, 128), Knobs(32, 2, 8, 16, 128), Knobs(64, 4, 8, 16, 128),
              Knobs(128, 4, 8, 16, 128), Knobs(64, 4, 8, 16, 128, 96), Knobs(64, 8, 8, 16, 128),
              Knobs(32, 2, 8, 8, 128), Knobs(128, 4, 8, 16, 256, 96))
]  # fmt: skip
KDA = Contract(op="kda_decode", gate="softplus", ring=16)
CONTRACTS = [
    KDA.replace(tokens=T, ring_dtype=u) for T, u in ((4, "fp32"), (8, "fp32"), (1, "fp32"))
]
CONTRACTS.append(KDA.replace(tokens=4, ring_dtype="bf16"))
# What else is checked, by the default rule's variant.
CHECKED = [
    KDA.replace(tokens=3, gate="lower_bound", state_dtype="fp16", input_dtype="fp16"),
    KDA.replace(tokens=16, ring=32, state_dtype="fp32", layout="v_last", gate="log"),
]
H, HV, RATE = 32, 32, 4.4e6
ROUNDS = 48


def beside(c: Contract) -> dict[str, Contract]:
    """What else a step of drafts may be: the same tokens without a ring."""
    plain = c.replace(ring=0, ring_dtype="fp32")
    frozen = plain.replace(mode="frozen")
    return {
        "alone": frozen,
        "final": plain,
        "slots": frozen.replace(intermediate="slots", accepted=True),
    }


def wanted(
    device: arch.Device, sizes: list[int]
) -> Iterable[tuple[Kernel, Contract, Variant, str | None]]:
    """Everything that `check` and `time` call."""
    for c in CONTRACTS:
        for v in TRIED:
            yield RING, c, v, None
    for c in CHECKED:
        yield RING, c, RING.variant(RING.default(c, 64, device)), None
    runtime = Runtime(device)
    for c in CONTRACTS:
        for other in beside(c).values():
            if other.tokens == 1 and other.mode == "frozen":
                continue
            for B in sizes:
                v = runtime.bind(other).choice(B * HV).variant
                yield kernels.get(v.kernel), other, v, None
    yield from of_the_timers()


def own(pick: Any, problem: Problem) -> dict[str, Any]:
    """A ring's options of a random case."""
    return {
        "out_of_range": pick.random() < 0.3,
        "flush_min": pick.choice((None, 0, 4, problem.contract.ring // 2)),
        "append": pick.random() < 0.8,
        "parameters_by_head": pick.choice(("HV", "H")),
    }


def check(count: int, seed: int) -> bool:
    """Whether all is right."""
    session = session_of("cold-clean")
    found = [(c, TRIED) for c in CONTRACTS]
    found += [(c, [RING.variant(RING.default(c, 64, session.device))]) for c in CHECKED]
    return gate(session, found) & randomly(session, found, count, seed, own)


def turning(function: Callable[..., Any], cases: list[Case]) -> Callable[[Any], Any]:
    """A call that goes through a cycle's steps."""
    return rings.in_turns([functools.partial(function, *x.arguments()) for x in cases])


def row(session: Session, c: Contract, B: int) -> None:
    """A size's times."""
    problem = Problem(c, B, H, HV)
    cases = rings.steps(make_case(problem, "cuda", 0))
    runtime = Runtime(session.device, session.store)
    calls = [turning(session.function(c, v), cases) for v in TRIED]
    names = []
    for name, other in beside(c).items():
        if c.tokens == 1 and other.mode == "frozen":
            continue
        case = make_case(Problem(other, B, H, HV), "cuda", 0)
        function = runtime.bind(other).at(B * HV)
        names.append(name)
        calls.append(rings.in_turns([functools.partial(function, *case.arguments())]))
    rounds = -(-ROUNDS // len(cases)) * len(cases)
    times = [fmean(x) for x in session.timer.measure(calls, rounds)]
    tried, rest = times[: len(TRIED)], dict(zip(names, times[len(TRIED) :], strict=True))
    best = min(range(len(TRIED)), key=tried.__getitem__)
    said = ", ".join(f"{v.id[9:]} {us:.2f}" for v, us in zip(TRIED, tried, strict=True))
    print(f"<!-- T={c.tokens} u {c.ring_dtype} B={B}: {said} -->")
    window = rest.get("alone", 0.0) + rest["final"]
    # states read each step and written in one of a cycle; entries: k, u and decays
    entry = 2 * c.K + (4 if c.ring_dtype == "fp32" else 2) * c.V + 4 * c.K
    live = fmean(rings.windows(c)) + c.tokens
    least = (state_bytes(problem) * (1 + 1 / len(cases)) + B * HV * entry * live) / RATE
    print(
        f"| {c.tokens} | {B} | {c.ring_dtype} | {tried[best]:.2f} | {least:.2f} |"
        f" {rest.get('alone', float('nan')):.2f} | {rest['final']:.2f} | {window:.2f} |"
        f" {rest.get('slots', float('nan')):.2f} | {window / tried[best]:.2f} |"
        f" {TRIED[best].id} |",
        flush=True,
    )
    torch.cuda.empty_cache()


def time_all(sizes: list[int], l2: str) -> None:
    """The table."""
    session = session_of(l2)
    print(f"{session.device.name}, {l2}, H=HV={HV}, bf16: means over whole cycles, us\n")
    print("| T | B | u | ring | bytes | outputs alone | final state | window | a slot per token |"
          " window / ring | variant |")  # fmt: skip
    print("| ---: " * 10 + "| --- |", flush=True)
    for c in CONTRACTS:
        session.load(c, TRIED)
        for B in sizes:
            row(session, c, B)


def main() -> None:
    """The command line."""
    parser = arguments(__doc__, "1,4,16,64,256")
    given = parser.parse_args()
    sizes = [int(n) for n in given.sizes.split(",")]
    if given.what == "compile":
        device = gpus.named(given.gpu)
        bundle(wanted(device, sizes), device, given.folder)
    elif given.what == "check":
        raise SystemExit(not check(given.random, given.seed))
    else:
        time_all(sizes, given.l2)


if __name__ == "__main__":
    main()
