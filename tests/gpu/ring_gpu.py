"""Verify behind a ring on a GPU: checked against fp64, and timed over whole cycles beside FlashInfer's
ring and outputs alone.

    python tests/gpu/ring_gpu.py compile DIR                  # without a GPU: a bundle of what is called
    GDNTUNE_BUNDLE=DIR python tests/gpu/ring_gpu.py check [--random N]
    GDNTUNE_BUNDLE=DIR python tests/gpu/ring_gpu.py time [--l2 chain] [--sizes 1,4,16,64,256,512]

check: every compiled variant by the gate that a sweep has, N random problems, and that a request has
the same bits in any batch; exits with 1 where one is wrong. time: H=16, HV=64, bf16 state. Of T drafts
each step accepts some; a request's ring grows by them until T more do not fit, then it is folded. Each
request is elsewhere in that cycle. Microseconds a call, interleaved, means over whole cycles; the
folds are in them. `bytes`: what must move at 4.4 TB/s.
"""

import functools
import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from kernel_checks import arguments, bundle, gate, of_the_timers, randomly, session_of

from gdntune import kernels
from gdntune.checking import ring
from gdntune.checking.cases import Case, make_case
from gdntune.device import arch, gpus
from gdntune.kernels.spec import Kernel, Variant
from gdntune.problem import ITEMSIZE, Contract, Problem
from gdntune.runtime.dispatch import Runtime
from gdntune.sol import state_bytes
from gdntune.tuning.session import Session

RING = kernels.get("ring")
# what a sweep tries
TRIED = [RING.variant(s) for s in RING.space(Contract(tokens=4, ring=16), arch.target("sm_90a"))]
CONTRACTS = [
    Contract(tokens=T, ring=entries, ring_dtype=dtype)
    for T, entries, dtype in (
        (4, 16, "bf16"), (8, 16, "bf16"), (4, 16, "fp32"), (8, 16, "fp32"),
    )
]  # fmt: skip
# What else is checked, by the default rule's variant.
CHECKED = [
    Contract(ring=16),
    Contract(tokens=3, ring=16, state_dtype="fp16", input_dtype="fp16"),
    Contract(tokens=4, ring=32, state_dtype="fp32", layout="v_last"),
]
H, HV, RATE = 16, 64, 4.4e6
# FlashInfer's rows a ring; at most 16 of them are live
THEIRS = 32
SCREEN, ROUNDS = 6, 60


def frozen(T: int) -> Contract:
    """Outputs alone: the least that a verify does."""
    return Contract(tokens=T, mode="frozen")


def wanted(
    device: arch.Device, contracts: list[Contract]
) -> Iterable[tuple[Kernel, Contract, Variant, str | None]]:
    """Everything that `check` and `time` call."""
    for c in contracts:
        for v in TRIED:
            yield RING, c, v, None
    for c in CHECKED:
        yield RING, c, RING.variant(RING.default(c, 64, device)), None
    runtime = Runtime(device)
    for T in (4, 8):
        for x in runtime.choices(frozen(T)):
            yield kernels.get(x.variant.kernel), frozen(T), x.variant, None
    yield from of_the_timers()


def compile_all(folder: Path, gpu: str, contracts: list[Contract]) -> None:
    """A bundle of what is called, made without the GPU."""
    device = gpus.named(gpu)
    bundle(wanted(device, contracts), device, folder)


def check(count: int, seed: int, contracts: list[Contract]) -> bool:
    """Whether all is right."""
    session = session_of("cold-clean")
    found = [(c, TRIED) for c in contracts]
    found += [(c, [RING.variant(RING.default(c, 64, session.device))]) for c in CHECKED]
    right = gate(session, found)
    return right & randomly(session, found, count, seed, own) & invariant(session)


def own(pick: random.Random, problem: Problem) -> dict[str, Any]:
    """A ring's options of a random case."""
    return {
        "out_of_range": pick.random() < 0.3,
        "flush_min": pick.choice((None, 0, 4, problem.contract.ring // 2)),
        "append": pick.random() < 0.8,
    }


def invariant(session: Session) -> bool:
    """Whether a request has the same bits alone and among others."""
    c = CONTRACTS[0]
    function, same = session.function(c, TRIED[0]), True
    whole = make_case(Problem(c, 17, 2, 4), "cuda", 0, flush_min=8)
    alone = whole.clone()
    function(*whole.arguments())
    rows = (
        "q",
        "k",
        "v",
        "a",
        "b",
        "output",
        "read_index",
        "write_index",
        "ring_base",
        "ring_count",
    )
    for n in (0, 5, 16):
        one = alone.clone()
        for name in rows:
            setattr(one, name, getattr(one, name)[n : n + 1])
        function(*one.arguments())
        same &= torch.equal(one.output, whole.output[n : n + 1])
        slot = int(one.write_index[0])
        same &= torch.equal(one.state[slot], whole.state[slot])
    print("the same bits alone and among others" if same else "wrong: bits depend on the batch")
    return same


def windows(T: int, accepted: int, entries: int) -> list[int]:
    """The live entries at each step of a cycle."""
    steps = list(range(accepted, entries + 1, accepted))
    return steps[: 1 + next(i for i, n in enumerate(steps) if n + T > entries)]


def counts(B: int, cycle: list[int], step: int, seed: int = 0) -> torch.Tensor:
    """Each request's live entries: elsewhere in the cycle, evenly."""
    order = random.Random(seed).sample(range(B), B)
    return torch.tensor(
        [cycle[(n + step) % len(cycle)] for n in order], dtype=torch.int32, device="cuda"
    )


def filled(case: Case) -> Case:
    """Numbers in every row of the rings: which of them are live, each step says."""
    for name in ring.TENSORS:
        x = getattr(case, name)
        x.copy_(torch.where(x.isnan(), torch.rand_like(x) * 0.4 + 0.5, x))
    case.ring_base.zero_()
    return case


def turning(calls: list[list[Callable[[], Any]]]) -> Callable[[Any], Any]:
    """A call that goes through a cycle's steps; of several layers each is at another step."""
    if len(calls) > 1:
        one = [steps[layer % len(steps)] for layer, steps in enumerate(calls)]
        return lambda layer: one[layer]()
    turns = itertools.cycle(calls[0])
    return lambda _: next(turns)()


def ours(
    function: Callable[..., Any], cases: list[Case], found: list[torch.Tensor]
) -> Callable[[Any], Any]:
    """Our ring."""
    at = list(cases[0].tensors()).index("ring_count")

    def steps(case: Case) -> list[Callable[[], Any]]:
        a = case.arguments()
        return [functools.partial(function, *a[:at], n, *a[at + 1 :]) for n in found]

    return turning([steps(case) for case in cases])


def theirs(cases: list[Case], found: list[torch.Tensor]) -> Callable[[Any], Any] | None:
    """FlashInfer's ring on the same inputs and states; None where it is not installed."""
    try:
        from flashinfer.gdn_kernels import gated_delta_rule_mtp_ucache_flush as function
    except ImportError:
        return None

    def empty(case: Case, heads: int, *width: int) -> torch.Tensor:
        slots = case.state.shape[0]
        return torch.rand(slots, heads, THEIRS, *width, device="cuda").sub_(0.5).div_(8)

    def steps(case: Case) -> list[Callable[[], Any]]:
        K, V = case.contract.K, case.contract.V
        names = ("A_log", "a", "dt_bias", "q", "k", "v", "b", "scale", "output")
        # once: what has gaps its call would copy each time
        given = {name: getattr(case, name) for name in names} | {
            **{name: getattr(case, name).contiguous() for name in ("q", "k", "v")},
            # a pool with gaps is refused, and at one request copied by each call
            "initial_state_source": case.state.contiguous(),
            "initial_state_indices": case.read_index,
            "k_cache": empty(case, H, K).bfloat16(),
            "u_cache": empty(case, HV, V).bfloat16(),
            # log decays
            "g_cache": -empty(case, HV).abs(),
            "cache_base": torch.zeros_like(found[0]),
            "restart_hist_on_flush": False,
        }
        return [functools.partial(function, **given, hist_len=n) for n in found]

    return turning([steps(case) for case in cases])


def least_us(problem: Problem, cycle: list[int]) -> float:
    """The bytes of a step in the mean over a cycle, at RATE bytes a microsecond."""
    c, B, T = problem.contract, problem.B, problem.contract.tokens
    entry = B * (H * c.K * 2 + HV * (c.V * ITEMSIZE[c.ring_dtype] + 4))
    inputs = B * T * (2 * (H * c.K + HV * c.V) * 2 + 2 * HV * 2)
    states = state_bytes(problem) * (1 + 1 / len(cycle))
    return (states + inputs + entry * (fmean(cycle) + T)) / RATE


def row(session: Session, c: Contract, B: int, accepted: int, chosen: dict[Any, Variant]) -> None:
    """A cell's times."""
    problem, cycle = Problem(c, B, H, HV), windows(c.tokens, accepted, c.ring)
    if session.chained is None:
        cases = [filled(make_case(problem, "cuda", 0))]
    else:
        cases = [filled(case) for case in session.calls(problem, "decode", TRIED[:1]).cases]
    found = [counts(B, cycle, step) for step in range(len(cycle))]
    rounds = -(-ROUNDS // len(cycle)) * len(cycle)
    key = c, B
    if key not in chosen:
        calls = [ours(session.function(c, v), cases, found) for v in TRIED]
        timed = session.timer.measure(calls, -(-SCREEN // len(cycle)) * len(cycle))
        means = [fmean(x) for x in timed]
        chosen[key] = TRIED[means.index(min(means))]
        said = ", ".join(
            f"{v.id} {us:.2f}"
            for v, us in sorted(zip(TRIED, means, strict=True), key=lambda x: x[1])
        )
        print(
            f"<!-- T={c.tokens} {accepted} B={B} ring={c.ring} u {c.ring_dtype}: {said} -->",
            flush=True,
        )
    alone = Contract(tokens=c.tokens, mode="frozen")
    least = Runtime(session.device, session.store).bind(alone).at(problem.work_units)
    # without the write index and the ring
    plain = [
        [
            None if name == "write_index" else x
            for name, x in zip(case.tensors(), case.arguments(), strict=True)
        ][:22]
        for case in cases
    ]
    calls = [
        ours(session.function(c, chosen[key]), cases, found),
        turning([[functools.partial(least, *a)] for a in plain]),
    ]
    other = theirs(cases, found) if c.ring == 16 else None
    times = [fmean(x) for x in session.timer.measure(calls + ([other] if other else []), rounds)]
    peer = times[2] if other else float("nan")
    bound = least_us(problem, cycle)
    print(
        f"| {c.tokens} | {accepted} | {B} | {c.ring} | {c.ring_dtype} | {times[0]:.2f} | {peer:.2f} |"
        f" {peer / times[0]:.3f} | {times[1]:.2f} | {bound:.2f} | {times[0] / bound:.2f} |"
        f" {chosen[key].id} |",
        flush=True,
    )
    torch.cuda.empty_cache()


def time_all(sizes: list[int], l2: str, contracts: list[Contract], every: bool) -> None:
    """One table. every: the fastest variant is looked for in each row, else in a size's first."""
    session = session_of(l2)
    print(
        f"{session.device.name}, {l2}, {session.timer.policy.timer}: means over whole cycles, us\n"
    )
    print(
        "| T | accepted | B | ring | u | ours | FlashInfer | ratio | outputs alone | bytes | of them |"
        " variant |"
    )
    print("| ---: " * 11 + "| --- |", flush=True)
    chosen: dict[Any, Variant] = {}
    for c in contracts:
        session.load(c, TRIED)
        for B in sizes:
            for accepted in (c.tokens, c.tokens // 2, c.tokens // 4):
                if c.ring == 16 or accepted == c.tokens:
                    row(session, c, B, accepted, {} if every else chosen)


def main() -> None:
    """The command line."""
    parser = arguments(__doc__, "1,4,16,64,256,512")
    parser.add_argument("--rings", type=int, default=len(CONTRACTS), help="so many of CONTRACTS")
    parser.add_argument(
        "--tokens", default="4,8", help="T among them, so that two GPUs share the work"
    )
    parser.add_argument("--variants", help="ids among those that are tried")
    parser.add_argument("--every", action="store_true", help="rank the variants in each row")
    given = parser.parse_args()
    if given.variants:
        TRIED[:] = [v for v in TRIED if v.id in given.variants.split(",")]
    tokens = [int(n) for n in given.tokens.split(",")]
    contracts = [c for c in CONTRACTS[: given.rings] if c.tokens in tokens]
    if given.what == "compile":
        compile_all(given.folder, given.gpu, contracts)
    elif given.what == "check":
        raise SystemExit(not check(given.random, given.seed, contracts))
    else:
        time_all([int(n) for n in given.sizes.split(",")], given.l2, contracts, given.every)


if __name__ == "__main__":
    main()
