"""A layer's step in one launch on a GPU: checked, and timed in a chain of layers against the parts apart.

    python tests/gpu/layer_gpu.py compile DIR [--all]         # without a GPU: a bundle of what is called
    GDNTUNE_BUNDLE=DIR python tests/gpu/layer_gpu.py check [--random N] [--all] [--having sent,roles]
    GDNTUNE_BUNDLE=DIR python tests/gpu/layer_gpu.py time [--all] [--sizes 1,4,16,64,256] [--rounds 60]
    GDNTUNE_BUNDLE=DIR python tests/gpu/layer_gpu.py why [--sizes 16,64]
    GDNTUNE_BUNDLE=DIR python tests/gpu/layer_gpu.py producers [--sizes 1,4,16,64]

check: every compiled variant by the gate that a sweep has, what several calls must agree on
(`layer_steps`), then N random problems; exits with 1 where one is wrong. --having: the random problems by
variants with all of these knobs set alone. --no-gate leaves the first out:
`compute-sanitizer --tool memcheck --kernel-regex kns=gdntune --error-exitcode 9 python tests/gpu/layer_gpu.py
check --no-gate --random 150`, and the same with --tool racecheck --print-level error: without that it warns of
each cluster's mbarrier, that its init is written and its arrive.expect_tx reads it, both by thread 0; ptxas gives
the init to the warp's uniform datapath, which racecheck takes for another thread. Of settings with window_first and roles it
reports an error all the same, where there is no race (`arrive.cu`). time: microseconds a layer, medians, in a CUDA graph of layers less the same without the
call (the L2 policy `chain`), interleaved. Each row is a contract and a batch size; `delta alone` is the
table's kernel without the parts, `apart` the same with a convolution and a norm of their own
(`layer_parts`), `fused` the best of the layer's variants; each without and with programmatic
dependent launch. The finalists go to stderr. why: the same of the step with parts left out, to see
what the convolution and the norm cost beyond their bytes. producers: the step with and without dependent
launch behind kernels that take longer, and behind a matrix product of torch's that reads as many bytes as in_proj
does. All variants are tried for six rounds, the best few for all. --all: every variant
worth trying, not a few of them. --knobs "stores=first;share=2,fetched=true": beside each variant without
dependent launch that with these knobs, and with those, where they are legal; give it to `compile` and to
`time`, where --only then names what is compiled too.
"""

import argparse
import dataclasses
import os
import random
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import layer_parts
import layer_steps
import torch
from kernel_checks import Found, bundle, gate, of_the_timers, randomly, session_of

from gdntune import kernels, sol
from gdntune.checking.cases import make_case
from gdntune.checking.check import Truth
from gdntune.device import arch, gpus
from gdntune.kernels.spec import Kernel, Variant
from gdntune.objects.store import object_spec
from gdntune.problem import Contract, Problem
from gdntune.runtime.dispatch import Runtime
from gdntune.timing import summary
from gdntune.tuning.chain import Chain, layers_of
from gdntune.tuning.session import Session

LAYER = kernels.get("layer")
STEP = {"norm": "silu", "conv": "silu"}
SLOTS = {"tokens": 4, "mode": "frozen", "intermediate": "slots", "accepted": True}
TIMED = {
    "step, bf16": Contract(**STEP),
    "step, fp32": Contract(**STEP, state_dtype="fp32"),
    "step, T=4 slots, bf16": Contract(**STEP, **SLOTS),
    "norm, T=4 slots, bf16": Contract(norm="silu", **SLOTS),
    # as the engines have them; the parts apart have rings alone
    "shifted, bf16": Contract(**STEP, conv_window="shifted"),
    "shifted, T=4 drafts, bf16": Contract(**STEP, **SLOTS, conv_window="shifted"),
}
HEADS = ((16, 64), (16, 32))
# the batch sizes whose delta rule alone is compiled: --sizes are among them
SIZES = (1, 4, 16, 64, 256)
# What else is checked, by the default rule's variant.
CHECKED = [
    Contract(norm="silu"),
    Contract(conv="silu"),
    Contract(
        norm="sigmoid", conv="identity", conv_width=3, conv_bias=True, norm_weight_dtype="bf16"
    ),
    Contract(**STEP, layout="v_last"),
    Contract(**STEP, layout="v_last", state_dtype="fp32", conv_width=2),
    Contract(**STEP, tokens=4, ragged=True, state_dtype="fp32"),
    Contract(**STEP, tokens=3, conv_bias=True),
    Contract(**STEP, conv_window="shifted"),
    Contract(**STEP, conv_window="shifted", state_dtype="fp32", conv_width=3),
    Contract(**STEP, **SLOTS, conv_window="shifted"),
    Contract(**STEP, tokens=4, ragged=True, conv_window="shifted"),
    Contract(**STEP, **SLOTS, conv_window="dims_first"),
    Contract(**STEP, conv_input="interleaved"),
    Contract(**STEP, **SLOTS, conv_input="interleaved"),
    Contract(**STEP, tokens=4, ragged=True, conv_input="interleaved", conv_window="shifted"),
    Contract(norm="silu", tokens=8, intermediate="dense", mode="frozen"),
    Contract("kda_decode", gate="softplus", norm="sigmoid", conv="silu"),
    Contract("kda_decode", gate="lower_bound", norm="sigmoid", conv="silu", state_dtype="fp32"),
    Contract("kda_decode", gate="softplus", norm="sigmoid", conv="silu", **SLOTS),
]
# Checked by every variant that is compiled, and not timed.
KDA = Contract("kda_decode", gate="softplus", norm="sigmoid", conv="silu", state_dtype="fp32")
# The step with parts left out; of them all the delta rule is the same.
LESS = {
    "step": Contract(**STEP),
    "norm alone": Contract(norm="silu"),
    "convolution alone": Contract(conv="silu"),
    "convolution alone, two taps": Contract(conv="silu", conv_width=2),
    "convolution alone, no silu": Contract(conv="identity"),
    "step, windows shifted": Contract(**STEP, conv_window="shifted"),
}
SCREEN, FINALISTS = 6, 6


def plain_of(c: Contract) -> Contract:
    """The contract of the delta rule alone."""
    own = (
        "norm",
        "norm_weight_dtype",
        "conv",
        "conv_width",
        "conv_bias",
        "conv_window",
        "conv_input",
    )
    return c.replace(**{name: getattr(Contract(), name) for name in own})


# Knobs that are tried beside the space's, by --knobs.
BESIDE: list[dict[str, Any]] = []


def knobs_of(text: str) -> list[dict[str, Any]]:
    """What --knobs names."""
    kinds = {f.name: type(f.default) for f in dataclasses.fields(LAYER.knobs)}
    made: dict[Any, Callable[[str], Any]] = {bool: lambda x: x == "true", int: int, str: str}
    return [
        {n: made[kinds.get(n, int)](x) for n, x in (pair.split("=") for pair in one.split(","))}
        for one in text.split(";")
        if one
    ]


def tried(c: Contract, device: arch.Device, every: bool) -> list[Variant]:
    """The layer's variants with those of --knobs."""
    found = of_the_space(c, device, every)
    settings = [LAYER.setting(v.knobs) for v in found if v.knobs["pdl"] == "none"]
    more = [dataclasses.replace(s, **knobs) for knobs in BESIDE for s in settings]
    return [*dict.fromkeys([*found, *(LAYER.variant(s) for s in more if not LAYER.refuse(c, s))])]


def of_the_space(c: Contract, device: arch.Device, every: bool) -> list[Variant]:
    """The layer's variants: of a few, those of 16 threads a row."""
    found = LAYER.variants(c, device, "chain")
    default = LAYER.variant(LAYER.default(c, 64, device))
    if every:
        return [*dict.fromkeys([default, *found])]

    few = [
        v for v in found if v.knobs["lanes"] == 16 and v.knobs["row"] == (c.intermediate == "slots")
    ]
    return [*dict.fromkeys([default, *few])]


def alone(c: Contract, device: arch.Device) -> list[Variant]:
    """Those of them without dependent launch."""
    return [v for v in tried(c, device, False) if v.knobs["pdl"] == "none"]


def with_pdl(variant: Variant) -> Variant:
    """A variant of `recurrent` that starts before the kernel ahead ends, and waits for it first."""
    kernel = kernels.get(variant.kernel)
    return kernel.variant(kernel.setting({**variant.knobs, "pdl": "first"}))


def apart(c: Contract, runtime: Runtime, work_units: int) -> Variant:
    """The table's choice for the delta rule alone."""
    found = runtime.choices(plain_of(c))
    return [x.variant for x in found if x.first <= work_units][-1]


def wanted(
    device: arch.Device, every: bool, only: str = ""
) -> Iterable[tuple[Kernel, Contract, Variant, str | None]]:
    """Everything that `check` and `time` call; `only`: of `time` these rows."""
    runtime = Runtime(device)
    for name, c in TIMED.items():
        if not named(name, only):
            continue
        for v in tried(c, device, every):
            yield LAYER, c, v, None
        for v in dict.fromkeys(apart(c, runtime, B * HV) for B in SIZES for _, HV in HEADS):
            for one in (v, with_pdl(v)):
                yield kernels.get(v.kernel), plain_of(c), one, None
    if not only:
        for v in tried(KDA, device, every):
            yield LAYER, KDA, v, None
        for c in LESS.values():
            for v in alone(c, device):
                yield LAYER, c, v, None
        for c in [*CHECKED, *layer_steps.contracts()]:
            yield LAYER, c, LAYER.variant(LAYER.default(c, 64, device)), None
    for part in (layer_parts.CONV, layer_parts.NORM):
        for setting in (layer_parts.Knobs(), layer_parts.Knobs(True)):
            for tokens in (1, SLOTS["tokens"]):
                yield part, Contract(tokens=tokens), part.variant(setting), None
    yield layer_parts.PRODUCER, Contract(), layer_parts.PRODUCER.variant(layer_parts.Knobs()), None
    yield from of_the_timers()


def named(name: str, only: str) -> bool:
    """Whether --only, names or parts of them with | between, has a row."""
    return any(x in name for x in only.split("|"))


def compile_all(folder: Path, gpu: str, every: bool, only: str) -> None:
    """A bundle of what is called, made without the GPU."""
    # the compiling processes import the parts
    own = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([own, *sys.path])
    device = gpus.named(gpu)
    bundle(wanted(device, every, only), device, folder)


def having(found: Found, knobs: list[str]) -> Found:
    """Of each contract the variants with all of these knobs set; exits where there is none at all."""
    kept = [(c, [v for v in variants if all(v.knobs[k] for k in knobs)]) for c, variants in found]
    kept = [(c, variants) for c, variants in kept if variants]
    if not kept:
        sys.exit(f"--having {','.join(knobs)}: no variant has all of them")
    return kept


def check(every: bool, count: int, seed: int, gated: bool, only: str, knobs: list[str]) -> bool:
    """Whether all is right; only: of these rows of `time` the variants alone; knobs: what random problems' variants have set."""
    session = session_of("cold-clean")
    found = [(c, tried(c, session.device, every)) for name, c in TIMED.items() if named(name, only)]
    if only:
        return gate(session, found)
    found += [(KDA, tried(KDA, session.device, every))]
    found += [(c, [LAYER.variant(LAYER.default(c, 64, session.device))]) for c in CHECKED]
    right = not gated or gate(session, found)

    def function_of(c: Contract) -> Callable[..., Any]:
        return session.function(c, LAYER.variant(LAYER.default(c, 64, session.device)))

    right &= layer_steps.agree(function_of, session.place)
    return right & randomly(session, having(found, knobs), count, seed, own)


def own(pick: random.Random, problem: Problem) -> dict[str, Any]:
    """A layer's options of a random case."""
    options: dict[str, Any] = {"norm_eps": pick.choice((1e-6, 1e-5, 0.1))}
    if problem.contract.ragged:
        options["lengths"] = [pick.randint(0, problem.contract.tokens) for _ in range(problem.B)]
    return options


def parts_call(
    session: Session, cases: list[Any], variant: Variant, pdl: bool
) -> Callable[[int], None]:
    """A layer's step apart: convolution, delta rule, norm, on the tensors of the fused one."""
    c = cases[0].contract
    part = {p.name: session.store.load([s])[s.key] for p, s in (
        (p, object_spec(p, Contract(tokens=c.tokens), p.variant(layer_parts.Knobs(pdl)), session.device))
        for p in (layer_parts.CONV, layer_parts.NORM)
    )}  # fmt: skip
    rule = session.function(plain_of(c), variant)
    o = torch.empty_like(cases[0].output)
    y = None if c.conv == "none" else torch.empty_like(cases[0].mixed_qkv)
    # of drafts a window is in the slot of column 0
    slots = [
        case.read_index if case.slot_index is None else case.slot_index[:, 0].clone()
        for case in cases
    ]
    rules = []
    for case in cases:
        inputs = {"output": o}
        if y is not None:
            inputs["mixed_qkv"] = y
        inner = case.with_inputs(**inputs)
        rules.append(inner.arguments()[:22])

    def call(layer: int) -> None:
        case = cases[layer]
        if y is not None:
            part["part_conv"](
                case.mixed_qkv,
                case.conv_state,
                case.conv_weight,
                case.conv_position,
                slots[layer],
                y,
            )
        rule(*rules[layer])
        part["part_norm"](o, case.output_gate, case.norm_weight, case.output, case.norm_eps)

    return call


def agrees(session: Session, c: Contract, runtime: Runtime) -> float:
    """The largest difference between the parts apart and the truth, of the output's scale: the parts
    that are timed must compute the same.
    """
    problem = Problem(c, 4, 16, 64)
    case = make_case(problem, "cuda", 0)
    truth = Truth(case.clone())
    variant = apart(c, runtime, SIZES[0] * HEADS[0][1])
    parts_call(session, [case], variant, False)(0)
    part = truth.parts[0]
    got = case.output.flatten(0, 1)[part.places].double()
    return float((got - part.want).abs().max() / part.want.abs().max())


def time_all(every: bool, sizes: list[int], rounds: int, only: str) -> None:
    """One table a number of heads and contract."""
    session = session_of("chain")
    runtime = Runtime(session.device, session.store)
    for name, c in TIMED.items():
        if c.conv_window != "ring" or not any(named(f"{name}, HV={HV}", only) for _, HV in HEADS):
            continue
        print(
            f"{c.key()}: parts apart differ by {agrees(session, c, runtime):.2g} of the largest output"
        )
    for H, HV in HEADS:
        for name, c in TIMED.items():
            # half the heads: where small batches leave SMs without a block
            if (HV == 32 and c.tokens == 1 and not every) or not named(f"{name}, HV={HV}", only):
                continue
            print(
                f"\n{name}, H={H}, HV={HV}, {session.device.name}: us a layer, in brackets with dependent launch\n"
            )
            print("| B | delta alone | apart | fused | fused / apart | fused's variants |")
            print("| ---: | ---: | ---: | ---: | ---: | --- |", flush=True)
            for B in sizes:
                one_row(session, runtime, Problem(c, B, H, HV), every, rounds)


def one_row(session: Session, runtime: Runtime, problem: Problem, every: bool, rounds: int) -> None:
    """A batch size's times."""
    c = problem.contract
    variants = tried(c, session.device, every)
    session.load(c, variants)
    calls = session.calls(problem, "decode", variants)
    screened = session.timer.measure(calls.calls, SCREEN)
    calls.restore()
    order = sorted(range(len(variants)), key=lambda i: summary(screened[i]).median_us)
    last = [
        i
        for pdl in (False, True)
        for i in [i for i in order if (variants[i].knobs["pdl"] != "none") is pdl][:FINALISTS]
    ]
    chosen = apart(c, runtime, problem.work_units)
    inner = [case.arguments()[:22] for case in calls.cases]
    # on what the convolution leaves and on what it takes the delta rule's time is the same
    rules = [session.function(plain_of(c), v) for v in (chosen, with_pdl(chosen))]
    alone = [lambda layer, rule=rule: rule(*inner[layer]) for rule in rules]
    threes = [
        parts_call(session, calls.cases, v, pdl)
        for v, pdl in ((chosen, False), (with_pdl(chosen), True))
        if c.conv_window == "ring"
    ]
    timed = session.timer.measure([*alone, *threes, *(calls.calls[i] for i in last)], rounds)
    calls.restore()
    times = [summary(x).median_us for x in timed]
    fused = {}
    delta, parts, own = times[:2], times[2 : -len(last)], times[-len(last) :]
    for i, us in zip(last, own, strict=True):
        pdl = variants[i].knobs["pdl"] != "none"
        fused[pdl] = min(fused.get(pdl, (us, variants[i].id)), (us, variants[i].id))
    best = [fused[False], fused[True]]
    ratios = [us / apart for (us, _), apart in zip(best, parts, strict=False)]
    columns = (
        str(problem.B),
        *(_pair(x) for x in (delta, parts, [us for us, _ in best], ratios)),
        ", ".join(name for _, name in best),
    )
    print(f"| {' | '.join(columns)} |", flush=True)
    ranked = sorted((us, variants[i].id) for i, us in zip(last, own, strict=True))
    print("  ".join(f"{us:.2f} {name}" for us, name in ranked), file=sys.stderr, flush=True)
    torch.cuda.empty_cache()


def _pair(times: list[float]) -> str:
    """Without dependent launch, and in brackets with it."""
    return "{:.2f} ({:.2f})".format(*times) if times else "-"


def why(sizes: list[int], rounds: int) -> None:
    """The best time of the delta rule alone and of the step with parts left out, and their bytes."""
    session = session_of("chain")
    runtime = Runtime(session.device, session.store)
    print(f"H=16, HV=64, bf16, {session.device.name}: us a layer, MB that must move\n")
    print("| B | what | us | MB | variant |\n| ---: | --- | ---: | ---: | --- |", flush=True)
    for B in sizes:
        rows = {"delta rule": Contract(), **LESS}
        for name, c in rows.items():
            problem = Problem(c, B, 16, 64)
            if c.layer:
                variants = alone(c, session.device)
            else:
                variants = [apart(c, runtime, problem.work_units)]
            session.load(c, variants)
            calls = session.calls(problem, "decode", variants)
            times = [summary(x).median_us for x in session.timer.measure(calls.calls, rounds)]
            us, best = min(zip(times, (v.id for v in variants), strict=True))
            moved = sol.bytes_moved(problem) / 1e6
            print(f"| {B} | {name} | {us:.2f} | {moved:.1f} | {best} |", flush=True)
            torch.cuda.empty_cache()


class Projected(Chain):
    """Layers whose inputs are a matrix product's rows, as in_proj leaves them: it reads the weights too."""

    HIDDEN = 2048

    def __init__(self, problem: Problem, place: str, layers: int) -> None:
        super().__init__(problem, place, layers)
        first = self.cases[0]
        parts = ("mixed_qkv", "output_gate", "a", "b")
        sizes = [getattr(first, name)[0, 0].numel() for name in parts]
        made = {"dtype": first.mixed_qkv.dtype, "device": place}
        self._hidden = torch.randn(problem.B, self.HIDDEN, **made)
        self._weights = torch.randn(layers, self.HIDDEN, sum(sizes), **made) / self.HIDDEN**0.5
        self._rows = torch.zeros(layers, problem.B, sum(sizes), **made)
        for layer, case in enumerate(self.cases):
            views = self._rows[layer].split(sizes, 1)
            self.cases[layer] = case.with_inputs(
                **{
                    name: x.unflatten(1, getattr(first, name).shape[1:])
                    for name, x in zip(parts, views, strict=True)
                }
            )

    def produce(self, layer: int) -> None:
        """The output's zeros first, so that the product is what the call waits for."""
        self.cases[layer].output.zero_()
        torch.mm(self._hidden, self._weights[layer], out=self._rows[layer])


PRODUCT = "a matrix product"
PRODUCERS = ("the chain's copy", "64 steps", "1000 steps", "5000 steps", PRODUCT)
PDL = ("none", "first", "state")


def made_by(session: Session, problem: Problem, name: str) -> Chain:
    """A chain with this producer, in what the timer times."""
    chained = session.chained
    assert chained is not None
    # the last one's pools go first
    chained.chain = None
    layers = layers_of(problem, session.device)
    if name == PRODUCT:
        chained.weights = lambda layer: None
        chained.chain = Projected(problem, session.place, layers)
    elif name == PRODUCERS[0]:
        # which makes the chain too
        session.calls(problem, "decode", [])
    else:
        part = layer_parts.PRODUCER
        spec = object_spec(part, Contract(), part.variant(layer_parts.Knobs()), session.device)
        slow, steps = session.store.load([spec])[spec.key], int(name.split()[0])

        def copy(source: Any, target: Any) -> None:
            slow(source, target, steps, 1)

        chained.chain = Chain(problem, session.place, layers, copy=copy)
    return chained.around()


def times_in(
    session: Session, chain: Chain, c: Contract, variants: list[Variant], rounds: int
) -> list[float]:
    """Variants' median times in the chain that the timer has."""
    given = [case.arguments() for case in chain.cases]
    functions = [session.function(c, v) for v in variants]
    calls = [lambda layer, f=f: f(*given[layer]) for f in functions]
    return [summary(x).median_us for x in session.timer.measure(calls, rounds)]


def producers(sizes: list[int], rounds: int) -> None:
    """What dependent launch gains behind one producer or another."""
    session = session_of("chain")
    c = TIMED["step, bf16"]
    variants = tried(c, session.device, False)
    session.load(c, variants)
    found: dict[int, list[Variant]] = {}
    print(f"step, bf16, H=16, HV=64, {session.device.name}: us a layer\n")
    print("| producer | B | none | first | state | variants |")
    print("| --- | ---: | ---: | ---: | ---: | --- |", flush=True)
    for name in PRODUCERS:
        for B in sizes:
            chain = made_by(session, Problem(c, B, 16, 64), name)
            if B not in found:
                screened = times_in(session, chain, c, variants, SCREEN)
                order = sorted(range(len(variants)), key=lambda i: screened[i])
                found[B] = [
                    variants[i]
                    for pdl in PDL
                    for i in [i for i in order if variants[i].knobs["pdl"] == pdl][:3]
                ]
            times = times_in(session, chain, c, found[B], rounds)
            timed = list(zip(times, found[B], strict=True))
            best = [min((us, v.id) for us, v in timed if v.knobs["pdl"] == pdl) for pdl in PDL]
            said = " | ".join(f"{us:.2f}" for us, _ in best)
            print(f"| {name} | {B} | {said} | {', '.join(v for _, v in best)} |", flush=True)
            torch.cuda.empty_cache()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("compile", "check", "time", "why", "producers"))
    parser.add_argument("--no-gate", action="store_true", help="check: random problems alone")
    parser.add_argument(
        "--only", default="", help='rows whose name has this, or one of several: "step, bf16|norm"'
    )
    parser.add_argument("--knobs", default="", help="knobs beside the space's, see above")
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--gpu", default="h200")
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument(
        "--having", default="", help="check: knobs that random problems' variants have set"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sizes", default="1,4,16,64,256")
    parser.add_argument("--rounds", type=int, default=60)
    given = parser.parse_args()
    BESIDE.extend(knobs_of(given.knobs))
    if given.what == "compile":
        if given.folder is None:
            parser.error("compile: expected a folder for the bundle")
        compile_all(given.folder, given.gpu, given.all, given.only)
    elif given.what == "check":
        knobs = [k for k in given.having.split(",") if k]
        if knobs and (given.only or not given.random):
            parser.error("--having says which random problems: give --random N, and no --only")
        if unknown := set(knobs) - {f.name for f in dataclasses.fields(LAYER.knobs)}:
            parser.error(f"--having {', '.join(sorted(unknown))}: no knob of the layer")
        gated = not given.no_gate
        right = check(given.all, given.random, given.seed, gated, given.only, knobs)
        sys.exit(0 if right else 1)
    elif given.what == "producers":
        producers([int(n) for n in given.sizes.split(",")], given.rounds)
    elif given.what == "why":
        why([int(n) for n in given.sizes.split(",")], given.rounds)
    else:
        time_all(given.all, [int(n) for n in given.sizes.split(",")], given.rounds, given.only)


if __name__ == "__main__":
    main()
