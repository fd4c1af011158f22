"""Prints the host time of a decode call: `python tests/runtime/host_time.py`.

The CPU's smallest problem, so that little but the call itself is timed. The least of interleaved
rounds, too short to be interrupted on a busy machine, in us, and as a multiple of the compiled
function called directly.
"""

import statistics
import time

import torch

import gdntune
from gdntune.problem import Contract, Problem
from gdntune.runtime import dispatch

ROUNDS, CALLS = 1500, 20


def calls():
    """What is timed, by name."""
    B, H, HV, K, V = 1, 1, 1, 64, 32
    bf16 = torch.bfloat16
    mixed = torch.zeros(B, 2 * H * K + HV * V, dtype=bf16)
    q, k, v = (x.unsqueeze(1) for x in mixed.split([H * K, H * K, HV * V], 1))
    q, k, v = q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V))
    a, b = torch.zeros(B, HV, dtype=bf16), torch.zeros(B, HV, dtype=bf16)
    state, output = torch.zeros(4, HV, V, K), torch.zeros(B, 1, HV, V, dtype=bf16)
    A_log, dt_bias = torch.zeros(HV), torch.zeros(HV)
    index, wide = torch.ones(B, dtype=torch.int32), torch.ones(B, dtype=torch.int64)
    contract = Contract(K=K, V=V, state_dtype="fp32")
    function = dispatch.runtime("cpu").bind(contract).at(B * HV)
    a1, b1 = a.unsqueeze(1), b.unsqueeze(1)
    raw = (
        state, q, k, v, a1, b1, A_log, dt_bias, index, index, None, None, None, None, output,
        K**-0.5, 1.0, 20.0, 0.0, 1.0, -1, 1,
    )  # fmt: skip
    kept = {"A_log": A_log, "dt_bias": dt_bias, "initial_state": state}
    plain = kept | {"a": a1, "b": b1}
    decode, packed = gdntune.gated_delta_rule_decode, gdntune.gated_delta_rule_packed_decode
    found = {
        "raw": lambda: function(*raw),
        "public": lambda: decode(
            q, k, v, **plain, initial_state_indices=index, output=output, null_index=-1
        ),
        "public, allocates": lambda: decode(q, k, v, **plain, initial_state_indices=index),
        "public, int64": lambda: decode(
            q, k, v, **plain, initial_state_indices=wide, output=output
        ),
        "packed": lambda: packed(mixed, a, b, **kept, initial_state_indices=index, output=output),
    }
    if hasattr(gdntune, "Plan"):
        plan = gdntune.plan(Problem(contract, B, H, HV), "cpu")
        found["plan"] = lambda: plan(
            q, k, v, a1, b1, initial_state=state, A_log=A_log, dt_bias=dt_bias,
            initial_state_indices=index, output_state_indices=index, output=output,
        )  # fmt: skip
    return found


def measure():
    """The median and least time of each call in us."""
    torch.set_num_threads(1)
    timed = calls()
    times = {name: [] for name in timed}
    with torch.inference_mode():
        for _ in range(ROUNDS):
            for name, call in timed.items():
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                times[name].append((time.perf_counter() - start) / CALLS * 1e6)
    return {name: (statistics.median(x), min(x)) for name, x in times.items()}


if __name__ == "__main__":
    found = measure()
    for name, (median, least) in found.items():
        print(f"{name:20} {median:7.2f} us ({least:6.2f} least) {least / found['raw'][1]:5.2f}x")
