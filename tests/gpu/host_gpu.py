"""What an engine needs of the runtime, in one run: host times, the first call of a process,
torch.compile, torch.export, CUDA graphs, two streams.

    python tests/gpu/host_gpu.py [--device cuda] [--peers flashinfer,sglang,vllm] [--seconds 20]

    python tests/gpu/host_gpu.py --objects DIR      # anywhere: compiles what is called

On a GPU machine set GDNTUNE_BUNDLE to what --objects made. `--device cpu` runs the same steps without
graphs and streams. Prints a line a step; exits 1 where one failed.
"""

import argparse
import compileall
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import ahead
import public

import gdntune
from gdntune.checking.cases import make_case, whole
from gdntune.checking.check import Truth
from gdntune.problem import Contract, Problem

PLAIN = Contract()
VERIFY = Contract(tokens=4, mode="frozen", intermediate="slots", accepted=True)
CONTRACTS = [PLAIN, VERIFY]
BATCHES = (1, 2, 4, 8)
FIRST_CALL_MS = 150
# A process with a CUDA context and tensors, as an engine has when it makes its first call.
FIRST = """
import sys, time, torch
device = {device!r}
x = lambda *n, dtype=torch.bfloat16: torch.zeros(n, dtype=dtype, device=device)
q, v, state = x(1, 1, 16, 128), x(1, 1, 64, 128), x(2, 64, 128, 128)
a, b, A, d = x(1, 1, 64), x(1, 1, 64), x(64, dtype=torch.float32), x(64, dtype=torch.float32)
index = torch.ones(1, dtype=torch.int32, device=device)
sync = torch.cuda.synchronize if device == "cuda" else lambda: None
sync()
start, cpu = time.perf_counter(), time.process_time()
import gdntune
gdntune.gated_delta_rule_decode(q, q, v, initial_state=state, A_log=A, a=a, dt_bias=d, b=b,
                                initial_state_indices=index)
sync()
print(time.perf_counter() - start, time.process_time() - cpu)
"""


def host_times(device: str, peers: str, seconds: float) -> str:
    """The bounds of tests/runtime/host_time.py."""
    import host_time

    least = host_time.main(device, peers, seconds)
    missed = [f"{a}/{b}" for a, b, most in host_time.BOUNDS if least[a] > most * least[b]]
    if missed and device == "cuda":
        raise AssertionError(f"beyond their bounds: {', '.join(missed)}")
    return json.dumps({name: round(us, 2) for name, us in least.items()})


def first_call(device: str) -> str:
    """Milliseconds from `import gdntune` to the result, in processes of their own."""
    env = dict(os.environ)
    # as pip leaves an installed package; compiling it here would be a third of the call
    compileall.compile_dir(Path(gdntune.__file__).parent, quiet=1)
    with tempfile.TemporaryDirectory() as folder:
        if "GDNTUNE_BUNDLE" not in env:
            from gdntune.objects.store import write_bundle
            from gdntune.runtime.dispatch import runtime

            found = runtime(device)
            gdntune.prepare(PLAIN, device)
            specs = [found.spec(PLAIN, c.variant) for c in found.choices(PLAIN)]
            write_bundle(found.store, specs, Path(folder))
            env["GDNTUNE_BUNDLE"] = folder
        took = []
        for _ in range(6):
            command = [sys.executable, "-c", FIRST.format(device=device)]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            took.append(tuple(float(s) * 1e3 for s in done.stdout.split()))
    # the first reads files from the disk
    warm = statistics.median(wall for wall, _ in took[1:])
    each = ", ".join(f"{wall:.0f} (CPU {cpu:.0f})" for wall, cpu in took)
    said = f"median {warm:.0f} ms, each {each}"
    if warm > FIRST_CALL_MS and device == "cuda":
        raise AssertionError(f"{said}: expected at most {FIRST_CALL_MS} ms")
    return said


def flow(contract: Contract, B: int, device: str, seed: int):
    """A case of a batch, some of whose requests are padding where B allows it."""
    options = {"slots": 64, "padding": 0.3 if B > 2 else 0.0}
    return make_case(Problem(contract, B, 16, 64), device, seed=seed, **options)


def put(static, case) -> None:
    """Copies a case's tensors into those that a graph knows."""
    for name, x in case.tensors().items():
        if isinstance(x, torch.Tensor):
            whole(getattr(static, name)).copy_(whole(x))


def graphs(device: str, contract: Contract, compiled: bool) -> str:
    """A graph a batch size; replays with other inputs, indices, counts and padding, the output
    poisoned before each.
    """
    gdntune.prepare(contract, device)
    function = torch.compile(public.call, fullgraph=True) if compiled else public.call
    replays = 0
    for B in BATCHES:
        static = flow(contract, B, device, 100 + B)
        run = functools.partial(function, static)
        if device == "cuda":
            stream = torch.cuda.Stream()
            if compiled:
                with torch.cuda.stream(stream):
                    run()
                torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                run()
            run = graph.replay
        for seed in range(4):
            case = flow(contract, B, device, seed)
            put(static, case)
            assert static.output.isnan().all()
            run()
            Truth(case).judge(static).require()
            replays += 1
    return f"{len(BATCHES)} graphs, {replays} replays right"


def packed_graph(device: str) -> str:
    """The packed call in a graph: other addresses inside it are those of its capture."""
    static = flow(PLAIN, 4, device, 7)
    mixed = torch.cat([x.flatten(1) for x in (static.q, static.k, static.v)], 1)

    def call():
        gdntune.gated_delta_rule_packed_decode(
            mixed, static.a[:, 0], static.b[:, 0], A_log=static.A_log, dt_bias=static.dt_bias,
            initial_state=static.state, initial_state_indices=static.read_index,
            scale=static.scale, null_index=-1, output=static.output,
        )  # fmt: skip

    case = flow(PLAIN, 4, device, 8)
    for _ in range(2):  # looked at whole, then by headers
        call()
    run = call
    if device == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        run = graph.replay
    for seed in range(3):
        case = flow(PLAIN, 4, device, seed)
        put(static, case)
        mixed.copy_(torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], 1))
        run()
        Truth(case).judge(static).require()
    from gdntune.runtime import packed

    return f"3 replays right, {'headers' if packed._CALLS.recent.adapt.aims else 'VIEWS'} are used"


def compiled(device: str) -> str:
    """torch.compile(fullgraph=True), B a symbol, something computed on the output."""
    torch._dynamo.reset()
    backend = "inductor" if device == "cuda" else "aot_eager"
    for contract in CONTRACTS:
        run = torch.compile(lambda c: public.call(c) * 2, fullgraph=True, backend=backend)
        for B in BATCHES:
            case = flow(contract, B, device, B)
            mine = case.clone()
            doubled = run(mine)
            Truth(case).judge(mine).require()
            live = ~mine.output.isnan()
            assert torch.equal(doubled[live], mine.output[live] * 2)
    return f"{len(CONTRACTS)} contracts, B = {', '.join(map(str, BATCHES))}"


def exported(device: str) -> str:
    """torch.export's program on other tensors."""

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, a, b, state, A_log, dt_bias, index, output):
            return gdntune.gated_delta_rule_decode(
                q, k, v, a=a, b=b, initial_state=state, A_log=A_log, dt_bias=dt_bias,
                initial_state_indices=index, output=output,
            )  # fmt: skip

    def tensors(c):
        return (c.q, c.k, c.v, c.a, c.b, c.state, c.A_log, c.dt_bias, c.read_index, c.output)

    program = torch.export.export(Layer(), tensors(flow(PLAIN, 4, device, 1))).module()
    case = flow(PLAIN, 4, device, 2)
    mine = case.clone()
    program(*tensors(mine))
    Truth(case).judge(mine).require()
    return "right"


def streams(device: str) -> str:
    """Two streams of two threads, each with a pool of its own."""
    import threading

    gdntune.prepare(PLAIN, device)
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            stream = torch.cuda.Stream() if device == "cuda" else None
            with torch.cuda.stream(stream):
                for n in range(10):
                    case = flow(PLAIN, 4, device, 10 * seed + n)
                    mine = case.clone()
                    public.call(mine)
                    if stream:
                        stream.synchronize()
                    Truth(case).judge(mine).require()
        except Exception:  # noqa: BLE001
            wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong, wrong[0]
    return "20 calls right"


def main() -> int:
    """Runs the steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--peers", default="")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--objects", metavar="DIR")
    given = parser.parse_args()
    if given.objects:
        ahead.bundle(CONTRACTS, given.objects)
        return 0
    device = given.device
    steps = {
        "first call from a bundle": lambda: first_call(device),
        "host times": lambda: host_times(device, given.peers, given.seconds),
        "graphs, T=1": lambda: graphs(device, PLAIN, False),
        "graphs, T=4 by accepted counts": lambda: graphs(device, VERIFY, False),
        "graph of the packed call": lambda: packed_graph(device),
        "torch.compile": lambda: compiled(device),
        "torch.export": lambda: exported(device),
        "two streams": lambda: streams(device),
    }
    if device == "cuda":
        steps["graphs of compiled calls"] = lambda: graphs(device, PLAIN, True)
    failed = 0
    for name, step in steps.items():
        try:
            print(f"ok: {name}: {step()}", flush=True)
        except Exception:  # noqa: BLE001
            failed += 1
            print(f"FAILED: {name}: {traceback.format_exc()}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
