"""The engines' hooks and plug-ins on a GPU, against transformers' and the engines' own kernels.

    python tests/gpu/engines_gpu.py compile DIR           # without a GPU: a bundle of what it calls
    GDNTUNE_BUNDLE=DIR python tests/gpu/engines_gpu.py run [PART...] [--out FILE]
    python tests/gpu/engines_gpu.py run --device cpu      # small sizes, no compiler of graphs

Parts: vllm and sglang compare each call that they make with their Triton kernels, where these can be
imported, and with fp64, then time decode and verify; transformers generates 200 tokens
with and without gdntune, eager, compiled and in CUDA graphs; tokens times a model of 12 layers.
Prints a line a result, writes them to FILE as JSON, and exits with 1 if one of them is wrong.
"""

import argparse
import contextlib
import fcntl
import importlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
sys.path.insert(0, str(Path(__file__).parents[2]))

import ahead
import calls
import models
import stand_ins
import theirs
import torch

from gdntune.engines import sglang, transformers, vllm
from gdntune.errors import UnsupportedProblem
from gdntune.runtime import call, dispatch

# Not served where vLLM's newer gated norm is absent.
MAY_PASS_ON = {"post conv sigmoid"}
RESULTS: list[dict[str, Any]] = []
BATCHES = [1, 16]
MODES = ["eager", "compiled", "graphs"]


def say(part: str, name: str, ok: bool | None, **facts: Any) -> None:
    """Prints and keeps one result; ok is None for what is no check."""
    RESULTS.append({"part": part, "name": name, "ok": ok, **facts})
    mark = {True: "ok", False: "WRONG", None: "  "}[ok]
    text = "  ".join(
        f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in facts.items()
    )
    print(f"{part:12} {mark:6} {name:44} {text}", flush=True)


def sizes(device: str) -> Iterator[calls.Sizes]:
    """The sizes and dtypes of the calls that are compared."""
    if device == "cpu":
        yield calls.Sizes()
        return
    for state in (torch.float32, torch.bfloat16):
        for B in (4, 33):
            yield calls.Sizes(
                B=B, T=4, H=16, HV=32, K=128, V=128, dtype=torch.bfloat16, state=state, device=device
            )  # fmt: skip


# -- the engines' modules: stand-ins around the kernels that are installed


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Packages vllm and sglang: what is installed of them, with stand-ins for the modules that are
    not.
    """
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        stand_ins.write_vllm(root)
        stand_ins.write_sglang(root)
        sys.path.append(folder)
        try:
            for path in sorted(
                p for p in root.rglob("*") if p.is_dir() and p.name != "__pycache__"
            ):
                module = importlib.import_module(".".join(path.relative_to(root).parts))
                if str(path) not in module.__path__:
                    module.__path__.append(str(path))
            yield
        finally:
            sys.path.remove(folder)


def kernel(module: str, name: str) -> Callable[..., Any] | None:
    """An engine's kernel, or None where it is not installed."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception:  # noqa: BLE001 - without triton, or with another one, anything is raised
        return None


FLA = "vllm.third_party.flash_linear_attention.ops"
TRITON = {
    "fused_recurrent_gated_delta_rule_packed_decode": f"{FLA}.fused_recurrent",
    "fused_recurrent_gated_delta_rule": f"{FLA}.fused_recurrent",
    "fused_sigmoid_gating_delta_rule_update": f"{FLA}.fused_sigmoid_gating",
    "fused_gdn_decode_post_conv_mtp": f"{FLA}.fused_gdn_decode_post_conv_mtp",
}


def vllm_kernel(name: str) -> Callable[..., Any] | None:
    """vLLM's Triton function of a name."""
    if name not in TRITON:
        return None
    if name != "fused_gdn_decode_post_conv_mtp":
        return kernel(TRITON[name], name)
    written = kernel(TRITON[name], name + "_triton")

    def made(**arguments: Any) -> Any:
        if arguments.get("out") is None:  # vLLM's layer makes it before it calls this one
            arguments["out"] = torch.empty_like(arguments["output_gate"])
        written(**arguments)
        return arguments["out"]

    return made


def sglang_kernel(method: str, kda: bool) -> Callable[[dict[str, Any]], Any] | None:
    """What a method of SGLang's Triton kernels does, by its functions that are installed."""
    place = "sglang.kernels.ops.attention"
    if method == "packed_decode":
        name = f"fused_recurrent_{'kda' if kda else 'gated_delta_rule'}_packed_decode"
        packed = kernel(f"{place}.fla.fused_recurrent", name)

        def run_packed(a: dict[str, Any]) -> Any:
            out = a["mixed_qkv"].new_empty(len(a["b"]), 1, a["num_v_heads"], a["head_v_dim"])
            more = {"lower_bound": a["lower_bound"]} if kda else {}
            packed(
                mixed_qkv=a["mixed_qkv"], a=a["a"], b=a["b"], A_log=a["A_log"].reshape(-1),
                dt_bias=a["dt_bias"].reshape(-1), scale=a["scale"], out=out, **more,
                initial_state=a["ssm_states"], ssm_state_indices=a["cache_indices"],
                use_qk_l2norm_in_kernel=True,
            )  # fmt: skip
            return out.transpose(0, 1)

        return packed and run_packed
    update = kernel(
        f"{place}.linear.fused_sigmoid_gating_recurrent", "fused_sigmoid_gating_delta_rule_update"
    )

    def run(a: dict[str, Any]) -> Any:
        drafts = "intermediate_states_buffer intermediate_state_indices cache_steps"
        verify = {name: a[name] for name in drafts.split()} if method == "target_verify" else {}
        return update(
            A_log=a["A_log"], dt_bias=a["dt_bias"], q=a["q"], k=a["k"], v=a["v"], a=a["a"],
            b=a["b"], initial_state_source=a["ssm_states"], softplus_beta=1.0,
            initial_state_indices=a["cache_indices"], cu_seqlens=a["query_start_loc"],
            use_qk_l2norm_in_kernel=True, softplus_threshold=20.0, is_kda=kda,
            lower_bound=a.get("lower_bound"), disable_state_update=bool(verify), **verify,
        )  # fmt: skip

    return update and run


STATES = ("initial_state", "state", "ssm_states", "intermediate_states_buffer")


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> list[torch.Tensor]:
    """The output of a call and the states that it leaves."""
    result = function(**arguments)
    output = result[0] if isinstance(result, tuple) else result
    return [output, *(arguments[name] for name in STATES if arguments.get(name) is not None)]


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference where the exact result is not all zero: a padding row may hold
    anything. Relative to the largest value.
    """
    live = exact.double().flatten(2).abs().amax(-1) > 0
    return float((got.double() - exact.double())[live].abs().max() / exact.double().abs().max())


def compare(
    part: str, name: str, ours: Callable[..., Any], own: Callable[..., Any] | None,
    exact: Callable[..., Any], make: calls.Arguments, s: calls.Sizes,
) -> None:  # fmt: skip
    """One call by ours, by the engine's kernel and in fp64."""
    reference = outcome(exact, make())
    before = ours.counts.served
    got = outcome(ours, make())
    served = ours.counts.served > before
    mine = max(error(g, r) for g, r in zip(got, reference, strict=True))
    other = None
    if own is not None:
        other = max(error(g, r) for g, r in zip(outcome(own, make()), reference, strict=True))
    # a rounding of the coarsest dtype, and what the engine's own kernel is off by
    coarse = max(torch.finfo(x).eps for x in (s.dtype, s.state))
    ok = mine <= max(2 * coarse, 1e-6, 1.5 * (other or 0.0)) and (served or name in MAY_PASS_ON)
    title = f"{name} B={s.B} state={str(s.state)[6:]}"
    facts = {} if other is None else {"error_theirs": other}
    say(part, title, ok, error=mine, **facts, served=served)


def part_vllm(device: str) -> None:
    """vLLM's calls through its modules, with the plug-in on."""
    with engines():
        vllm.enable()
        real = theirs.call
        for s in sizes(device):
            for name, module, function, make in calls.of_vllm(s):
                ours = getattr(importlib.import_module(module), function)
                if function == "fused_mtp_decode_impl":
                    ours, function = ours(), "fused_gdn_decode_post_conv_mtp"
                exact = _exact(real, function, ours)
                own = vllm_kernel(function) if device == "cuda" else None
                with mock.patch.object(theirs, "call", real if own is None else _by(own)):
                    compare("vllm", name, ours, own, exact, make, s)
        if device == "cuda":
            times_of_vllm()
        vllm.disable()


def _by(own: Callable[..., Any]) -> Callable[[str, dict[str, Any]], Any]:
    return lambda name, arguments: own(**arguments)


def _exact(real: Callable[..., Any], function: str, ours: Callable[..., Any]) -> Callable[..., Any]:
    """The fp64 stand-in of a function, with its defaults."""
    import inspect

    def exact(**arguments: Any) -> Any:
        bound = inspect.signature(ours).bind(**arguments)
        bound.apply_defaults()
        return real(function, dict(bound.arguments))

    return exact


def part_sglang(device: str) -> None:
    """SGLang's calls through its dispatchers, with the plug-in on."""
    with engines():
        sglang.enable()
        importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry.apply_hooks()
        backend = importlib.import_module(f"{sglang.LINEAR}.utils").LinearAttnKernelBackend
        real, chosen = theirs.sglang, backend("gdntune")
        for op in ("gdn", "kda"):
            module = importlib.import_module(f"{sglang.LINEAR}.{op}_backend")
            built = getattr(module, f"{op.upper()}KernelDispatcher")(chosen, chosen, chosen)
            for s in sizes(device):
                for method, make in calls.of_sglang(op, s).items():
                    holder = (
                        built.verify_kernel if method == "target_verify" else built.decode_kernel
                    )
                    own = sglang_kernel(method, op == "kda") if device == "cuda" else None

                    def exact(method=method, op=op, **arguments):
                        return real(method, op == "kda", arguments)

                    def by_own(own=own, **arguments):
                        return own(arguments)

                    through = _counted(getattr(built, method), getattr(holder, method).counts)
                    compare(
                        "sglang", f"{op} {method}", through, own and by_own, exact, make, s
                    )  # fmt: skip
        if device == "cuda":
            times_of_sglang()
        sglang.disable()


def _counted(function: Callable[..., Any], counts: Any) -> Callable[..., Any]:
    """A dispatcher's method with the counts of the kernel's that it calls."""

    def counted(**arguments: Any) -> Any:
        return function(**arguments)

    counted.counts = counts
    return counted


# -- times of calls


def microseconds(work: Callable[[], Any], repeats: int = 20) -> tuple[float, float]:
    """us a call in a CUDA graph of some, and us of the host for one."""
    for _ in range(3):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    found = []
    for _ in range(9):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(1000 * start.elapsed_time(end) / repeats)
    began = time.perf_counter()
    for _ in range(200):
        work()
    host = (time.perf_counter() - began) / 200 * 1e6
    torch.cuda.synchronize()
    return sorted(found)[len(found) // 2], host


def _timed(part: str, name: str, ours: Callable[[], Any], own: Callable[[], Any] | None) -> None:
    mine, host = microseconds(ours)
    facts = {"us": mine, "host_us": host}
    if own is not None:
        other, other_host = microseconds(own)
        facts |= {"us_theirs": other, "host_us_theirs": other_host}
    say(part, name, None, **facts)


def times_of_vllm() -> None:
    """Decode and drafts with the norm, beside vLLM's Triton kernels."""
    for B in (1, 16, 64):
        s = calls.Sizes(
            B=max(B, 2), T=4, H=16, HV=32, K=128, V=128, dtype=torch.bfloat16, device="cuda",
            state=torch.bfloat16,
        )  # fmt: skip
        made = {n: (m, f, make) for n, m, f, make in calls.of_vllm(s)}
        for name in ("packed", "post conv silu"):
            module, function, make = made[name]
            ours = getattr(importlib.import_module(module), function)
            if function == "fused_mtp_decode_impl":
                ours, function = ours(), "fused_gdn_decode_post_conv_mtp"
            first, second, own = make(), make(), vllm_kernel(function)
            with_own = None if own is None else (lambda own=own, a=second: own(**a))
            _timed("vllm", f"time of {name} B={s.B}", lambda: ours(**first), with_own)  # noqa: B023


def times_of_sglang() -> None:
    """Packed decode and verify of chains, beside SGLang's Triton kernels."""
    for op in ("gdn", "kda"):
        for B in (2, 16, 64):
            s = calls.Sizes(
                B=B, T=4, H=16, HV=32, K=128, V=128, dtype=torch.bfloat16, device="cuda",
                state=torch.bfloat16,
            )  # fmt: skip
            for method in ("packed_decode", "target_verify"):
                make = calls.of_sglang(op, s)[method]
                first, second = make(), make()
                function, own = getattr(sglang, method), sglang_kernel(method, op == "kda")
                _timed(
                    "sglang", f"time of {op} {method} B={B}",
                    lambda f=function, a=first, kda=op == "kda": f(**a, kda=kda, null_index=-1),
                    None if own is None else (lambda own=own, a=second: own(a)),
                )  # fmt: skip


# -- transformers


def modes(device: str) -> dict[str, dict[str, Any]]:
    """How generate() runs: its options of each mode."""
    from transformers import CompileConfig

    static = {"cache_implementation": "static"}
    compiled = CompileConfig(mode="default")
    if device == "cpu":  # the operator in a traced graph, without waiting for a C++ compiler
        compiled = CompileConfig(backend="aot_eager")
        compiled._compile_all_devices = True
    found = {"eager": {}, "compiled": {**static, "compile_config": compiled}}
    if device == "cuda":
        found["graphs"] = {**static, "compile_config": CompileConfig(mode="reduce-overhead")}
    return {name: options for name, options in found.items() if name in MODES}


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """How many calls our runtime gets, by public functions or operators."""
    count, run = [0], call.run

    def counting(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return run(*args, **kwargs)

    from gdntune.runtime import ops

    with mock.patch.object(call, "run", counting), mock.patch.object(ops, "run", counting):
        yield count


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Waits for the other processes of this script that are timing: several may run at once, one
    a model.
    """
    with open(Path(tempfile.gettempdir()) / "gdntune-engines-gpu.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _generated(model: Any, options: dict[str, Any], tokens: int) -> tuple[torch.Tensor, float]:
    """The tokens, and how many a second a second run gives, which compiles nothing."""
    torch._dynamo.reset()
    found = models.generate(model, tokens=tokens, **options)
    with alone():
        began = time.perf_counter()
        again = models.generate(model, tokens=tokens, **options)
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        rate = again.shape[0] * tokens / (time.perf_counter() - began)
    if not torch.equal(found, again):
        raise AssertionError("a second run of the same prompt gave other tokens")
    return found, rate


def part_transformers(device: str, tokens: int = 200) -> None:
    """The same tokens with and without gdntune, in fp32."""
    for name in models.MODELS:
        for mode, options in modes(device).items():
            title = f"{name} {mode}"
            try:
                model = models.made(name, device=device)
                transformers.disable()
                expected, theirs_rate = _generated(model, options, tokens)
                transformers.enable()
                with counted_calls() as count:
                    got, rate = _generated(model, options, tokens)
            except Exception as e:  # noqa: BLE001 - one model or mode that fails must not hide others
                say("transformers", title, False, failed=f"{type(e).__name__}: {str(e)[:300]}")
                continue
            finally:
                transformers.disable()
            same = bool(torch.equal(got, expected))
            facts: dict[str, Any] = {
                "tokens": tokens, "calls": count[0], "tokens/s": rate, "theirs": theirs_rate,
            }  # fmt: skip
            if not same:
                facts["first_difference"] = int((got != expected).any(0).nonzero()[0])
            say("transformers", title, same and count[0] > 0, **facts)


def part_tokens(device: str) -> None:
    """Tokens a second of bf16 models, by transformers' own function and by ours."""
    size = models.SMALL if device == "cuda" else models.TINY
    tokens = 128 if device == "cuda" else 3
    fla = kernel("fla.ops.gated_delta_rule", "fused_recurrent_gated_delta_rule") is not None
    for name in models.MODELS:
        try:
            model = models.made(name, size, device, torch.bfloat16)
        except Exception as e:  # noqa: BLE001
            say("tokens", name, False, failed=f"{type(e).__name__}: {str(e)[:300]}")
            continue
        for batch in BATCHES:
            for mode, options in modes(device).items():
                rates = {}
                for label in ("theirs", "gdntune"):
                    (transformers.enable if label == "gdntune" else transformers.disable)()
                    try:
                        rates[label] = _rate(model, options, tokens, batch)
                    except Exception as e:  # noqa: BLE001
                        rates[label] = f"{type(e).__name__}: {str(e)[:200]}"
                transformers.disable()
                failed = any(isinstance(x, str) for x in rates.values())
                title = f"{name} {mode} B={batch} tokens/s"
                say("tokens", title, False if failed else None, **rates, theirs_by_fla=fla)


def _rate(model: Any, options: dict[str, Any], tokens: int, batch: int) -> float:
    torch._dynamo.reset()
    models.generate(model, tokens=tokens, batch=batch, **options)  # compiles
    best = float("inf")
    with alone():
        for _ in range(2):
            began = time.perf_counter()
            models.generate(model, tokens=tokens, batch=batch, **options)
            if model.device.type == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - began)
    return batch * tokens / best


PARTS = {
    "vllm": part_vllm,
    "sglang": part_sglang,
    "transformers": part_transformers,
    "tokens": part_tokens,
}


# -- what it calls, compiled ahead


def contracts() -> list[Any]:
    """The contracts of a run on a GPU, asked for on the CPU: each call is refused when it is bound,
    and goes on to the engine's own.
    """
    found: dict[Any, None] = {}

    def record(self: Any, contract: Any, **_: Any) -> Any:
        found[contract] = None
        raise UnsupportedProblem("only asked for")

    # a contract has no batch and no number of heads
    on_cpu = [s._replace(device="cpu", H=1, HV=2) for s in sizes("cuda") if s.B == 4]
    logging.getLogger("gdntune.engines").setLevel("ERROR")
    nothing = mock.patch.object(sys.modules[__name__], "say")
    with (
        mock.patch.object(dispatch.Runtime, "bind", record), nothing,
        mock.patch.object(sys.modules[__name__], "sizes", return_value=on_cpu),
    ):  # fmt: skip
        part_vllm("cpu")
        part_sglang("cpu")
        eager = {"eager": {}}
        with mock.patch.object(sys.modules[__name__], "modes", return_value=eager):
            part_transformers("cpu", tokens=3)
        for name in models.MODELS:
            transformers.enable()
            small = models.SMALL._replace(layers=2, hidden=128, heads=2)
            models.generate(models.made(name, small, dtype=torch.bfloat16), tokens=3)
            transformers.disable()
    return list(found)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    objects = commands.add_parser("compile")
    objects.add_argument("folder")
    objects.add_argument("--arch", default="h200", help="a GPU's name, or its arch")
    run = commands.add_parser("run")
    run.add_argument("parts", nargs="*", choices=[*PARTS, []])
    run.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    run.add_argument("--out")
    run.add_argument("--tokens", type=int, default=200, help="of the part transformers")
    run.add_argument("--models", default=",".join(models.MODELS), help="of the last two parts")
    run.add_argument("--batches", default="1,16", help="of the part tokens")
    run.add_argument("--modes", default="eager,compiled,graphs", help="of the last two parts")
    given = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(name)s: %(message)s")
    if given.command == "compile":
        ahead.bundle(contracts(), given.folder, given.arch)
        return
    models.MODELS = {name: models.MODELS[name] for name in given.models.split(",")}
    BATCHES[:] = map(int, given.batches.split(","))
    MODES[:] = given.modes.split(",")
    try:
        for part in given.parts or PARTS:
            more = {"tokens": given.tokens} if part == "transformers" else {}
            PARTS[part](given.device, **more)
    finally:
        if given.out:
            Path(given.out).write_text(json.dumps(RESULTS, indent=1) + "\n")
    wrong = [r for r in RESULTS if r["ok"] is False]
    print(f"{len(RESULTS)} results, {len(wrong)} wrong")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
