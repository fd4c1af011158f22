"""Prints the host time of a decode call: `python tests/runtime/host_time.py [--device cuda]
[--peers flashinfer,sglang,vllm]`.

One token of one request, so that little but the call itself is timed: CPU time of the calling
thread in interleaved rounds, each short enough to be seldom interrupted. The least of them counts,
in us, and as a multiple of the compiled function called directly (raw).
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch

# Engines have it loaded; calls are known again in 1 us less then (gdntune/runtime/guard.py).
import torch._dynamo

import gdntune
from gdntune import peers
from gdntune.checking.cases import make_case
from gdntune.problem import Contract, Problem
from gdntune.runtime import dispatch

CALLS = 20
# The bounds: a call, of which other, and at most how many times as long.
BOUNDS = (("plan", "raw", 1.2), ("public", "raw", 1.6), ("packed", "public", 1.2))


def problem(device: str) -> Problem:
    """One request of one token: of a CPU the smallest there is, of a GPU a model's."""
    if device == "cpu":
        return Problem(Contract(K=64, V=32, state_dtype="fp32"), 1, 1, 1)
    return Problem(Contract(), 1, 16, 64)


def ours(p: Problem, device: str) -> dict[str, Callable[[], object]]:
    """Our calls by name, on the same tensors."""
    c, H, HV = p.contract, p.H, p.HV
    case = make_case(p, device)
    mixed = torch.cat([x.flatten(1) for x in (case.q, case.k, case.v)], 1)
    q, k, v = (x.unsqueeze(1) for x in mixed.split([H * c.K, H * c.K, HV * c.V], 1))
    q, k, v = (x.unflatten(-1, (-1, n)) for x, n in ((q, c.K), (k, c.K), (v, c.V)))
    a, b, flat_a, flat_b = case.a, case.b, case.a[:, 0], case.b[:, 0]
    state, A_log, dt_bias, output = case.state, case.A_log, case.dt_bias, case.output
    index = case.read_index = case.write_index = case.read_index.clone()
    wide = index.long()
    function = dispatch.runtime(device).bind(c).at(p.work_units)
    raw = (state, q, k, v, *case.arguments()[4:])
    plan = gdntune.plan(p, device)
    decode, packed = gdntune.gated_delta_rule_decode, gdntune.gated_delta_rule_packed_decode
    return {
        "raw": lambda: function(*raw),
        "plan": lambda: plan(
            q, k, v, a, b, initial_state=state, A_log=A_log, dt_bias=dt_bias,
            initial_state_indices=index, output_state_indices=index, output=output,
        ),
        "public": lambda: decode(
            q, k, v, initial_state=state, A_log=A_log, a=a, dt_bias=dt_bias, b=b,
            initial_state_indices=index, output=output,
        ),
        "public, allocates": lambda: decode(
            q, k, v, initial_state=state, A_log=A_log, a=a, dt_bias=dt_bias, b=b,
            initial_state_indices=index,
        ),
        "public, int64": lambda: decode(
            q, k, v, initial_state=state, A_log=A_log, a=a, dt_bias=dt_bias, b=b,
            initial_state_indices=wide, output=output,
        ),
        "packed": lambda: packed(
            mixed, flat_a, flat_b, A_log=A_log, dt_bias=dt_bias, initial_state=state,
            initial_state_indices=index, output=output, null_index=-1,
        ),
        "packed, allocates": lambda: packed(
            mixed, flat_a, flat_b, A_log=A_log, dt_bias=dt_bias, initial_state=state,
            initial_state_indices=index, null_index=-1,
        ),
    }  # fmt: skip


def theirs(p: Problem, device: str, names: list[str]) -> dict[str, Callable[[], object]]:
    """The calls of other libraries that serve the problem, by library and function."""
    found = {}
    for name in names:
        peer = peers.get(name)
        if fault := peer.absent():
            print(f"{name}: {fault}")
            continue
        for entry in peer.serving(p)[0]:
            found[f"{name} {entry.name}"] = entry.bind(make_case(p, device)).call
    return found


def measure(calls: dict[str, Callable[[], object]], device: str, seconds: float) -> dict:
    """The median and least time of each call in us."""
    torch.set_num_threads(1)
    times: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for call in calls.values():
            for _ in range(3):
                call()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for name, call in calls.items():
                start = time.thread_time()
                for _ in range(CALLS):
                    call()
                times[name].append((time.thread_time() - start) / CALLS * 1e6)
                if device == "cuda":
                    torch.cuda.synchronize()
    return {name: (statistics.median(x), min(x)) for name, x in times.items()}


def main(device: str = "cpu", names: str = "", seconds: float = 20.0) -> dict:
    """Measures, prints, and returns the least times by name."""
    p = problem(device)
    found = measure(
        ours(p, device) | theirs(p, device, names.split(",") if names else []), device, seconds
    )
    print(f"{p.key()} on {dispatch.runtime(device).device.name}, torch {torch.__version__}")
    for name, (median, least) in found.items():
        print(f"{name:28} {least:7.2f} us ({median:7.2f} median) {least / found['raw'][1]:5.2f}x")
    least = {name: times[1] for name, times in found.items()}
    for name, of, bound in BOUNDS:
        ratio = least[name] / least[of]
        print(
            f"{'held' if ratio <= bound else 'MISSED'}: {name} is {ratio:.2f} times {of}, at most {bound}"
        )
    return least


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--peers", default="", help="of flashinfer, sglang, vllm, by commas")
    parser.add_argument("--seconds", type=float, default=20.0)
    given = parser.parse_args()
    main(given.device, given.peers, given.seconds)
