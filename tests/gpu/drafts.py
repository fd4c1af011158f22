"""What a step of drafts costs by the raw window and by a state per token, HV=64, bf16:

    python tests/gpu/drafts.py --objects DIR        # anywhere: compiles what is called
    GDNTUNE_BUNDLE=DIR python tests/gpu/drafts.py   # on the GPU: prints Markdown

Microseconds a layer and step, interleaved, under cold-clean, each in a CUDA graph: medians of verify
with the inputs in the window's memory and with copies to it, of a commit of all drafts for all
layers over their number, and of a call with a slot per token.
"""

import sys

import ahead
import torch

import gdntune
from gdntune.device import arch
from gdntune.objects.store import Store, default_root
from gdntune.problem import Contract, Problem
from gdntune.runtime import environment
from gdntune.timing import Policy, summary
from gdntune.tuning.session import Session

LAYERS, H, HV = 36, 16, 64
SIZES, TOKENS = (1, 4, 16, 64, 256), (4, 8)


def window(T: int, B: int, device: str, state: str = "bf16") -> gdntune.RawWindow:
    """A window of all layers, its inputs drawn at random."""
    parameters = torch.zeros(2, LAYERS, HV, device=device)
    made = gdntune.RawWindow(
        Problem(Contract(tokens=T, state_dtype=state), B, H, HV), layers=LAYERS, slots=B,
        A_log=parameters[0], dt_bias=parameters[1],
    )  # fmt: skip
    for layer in range(LAYERS):
        x = made.inputs(layer)
        for tensor in (x.k, x.v, x.gate, x.b):
            tensor.normal_()
    return made


def slots_contract(T: int) -> Contract:
    """A state per token, started from the accepted one."""
    return Contract(tokens=T, mode="frozen", intermediate="slots", accepted=True)


def contracts() -> list[Contract]:
    """What is called."""
    return [
        c for T in TOKENS for c in (*window(T, 1, "cpu").contracts, slots_contract(T))
    ]  # fmt: skip


def calls(T: int, B: int) -> list:
    """verify where the inputs lie, verify with copies, commit, and a slot per token."""
    mine = window(T, B, "cuda")
    rows = torch.randperm(B, device="cuda").int()
    accepted = torch.full((B,), T, dtype=torch.int32, device="cuda")
    own = mine.inputs(0)
    q = torch.randn_like(own.k)
    given = [x.clone() for x in (own.k, own.v, own.gate, own.b)]
    out = torch.empty(B, T, HV, 128, dtype=torch.bfloat16, device="cuda")
    pool = torch.randn(B * T, HV, 128, 128, device="cuda", dtype=torch.bfloat16)
    slots = torch.randperm(B * T, device="cuda").int().view(B, T)
    first = torch.randint(1, T + 1, (B,), dtype=torch.int32, device="cuda")
    parameters = torch.zeros(2, HV, device="cuda")
    k, v, a, b = given
    called = [
        lambda: mine.verify(0, q, own.k, own.v, own.gate, own.b, rows, output=out),
        lambda: mine.verify(0, q, *given, rows, output=out),
        lambda: mine.commit(rows, accepted),
        lambda: gdntune.gated_delta_rule_decode(
            q, k, v, a=a, b=b, A_log=parameters[0], dt_bias=parameters[1], initial_state=pool,
            ssm_state_indices=slots, num_accepted_tokens=first, disable_state_update=True,
            output=out,
        ),
    ]  # fmt: skip
    return [captured(call) for call in called]


def captured(call):
    """Replays a call's kernels: eager launches of torch's small ones would wait for the host."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return lambda _: graph.replay()


def main() -> None:
    """One row a number of tokens and batch size."""
    device = arch.detect("cuda")
    session = Session(device, 0, Store(default_root(), environment.bundles()), Policy())
    print(f"{device.name}: medians in us a layer\n")
    print("| T | B | verify | with copies | commit / layer | window | a slot per token | ratio |")
    print("| ---: " * 8 + "|")
    for T in TOKENS:
        for B in SIZES:
            timed = session.timer.measure(calls(T, B), 60 if B < 256 else 30)
            verify, copies, commit, slot = (summary(x).median_us for x in timed)
            commit /= LAYERS
            total = verify + commit
            print(
                f"| {T} | {B} | {verify:.2f} | {copies:.2f} | {commit:.2f} | {total:.2f} |"
                f" {slot:.2f} | {slot / total:.2f} |",
                flush=True,
            )
            torch.cuda.empty_cache()


if __name__ == "__main__":
    if "--objects" in sys.argv:
        ahead.bundle(contracts(), sys.argv[sys.argv.index("--objects") + 1])
    else:
        main()
