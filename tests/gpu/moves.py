r"""How long a GPU takes to move what a call must, where nothing is computed: KDA's final state of eight tokens, fp32, HV=32, a pool of
shuffled slots. The least of many ways to move it is what no kernel of ours can be expected to beat.

    python tests/gpu/moves.py [FILE.json]

Times are CUPTI's under cold-clean, medians of 40. moves.cu says what the ways are. Compiled by NVRTC, through torch.
"""

import itertools
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from gdntune.device import arch
from gdntune.timing import Policy, make_timer

SOURCE = Path(__file__).with_suffix(".cu").read_text()
REQUESTS = (16, 64, 256)
HEADS, TOKENS, KEYS = 32, 8, 128
WHAT = {
    "states, read": {"TOKENS": 0, "WRITE": 0},
    "states, written": {"TOKENS": 0, "READ": 0},
    "states, updated in place": {"TOKENS": 0},
    "states and tokens": {},
}
# `wy_block`'s: 64 rows by 128 threads, four blocks a multiprocessor
OURS = {"CHUNK": 32768, "THREADS": 128, "BLOCKS": 4}


def ways() -> Iterator[tuple[str, dict[str, int]]]:
    """What is moved, and how."""
    for what, given in WHAT.items():
        for chunk, threads, ahead in itertools.product(
            (16384, 32768, 65536), (256, 512), (0, 32, 64, 128, 256)
        ):
            if chunk // 16 // threads in (4, 8):
                way = {"CHUNK": chunk, "THREADS": threads, "AHEAD": ahead}
                yield what, {**way, "BLOCKS": 1, "TAKEN": 0, **given}
    for taken, ahead in itertools.product((0, 1, 2), (0, 128, 256)):
        yield "states and tokens, by blocks of `wy_block`", {**OURS, "TAKEN": taken, "AHEAD": ahead}


def compiled(name: str, way: dict[str, int]) -> Any:
    """A kernel of moves.cu."""
    given = {"READ": 1, "WRITE": 1, "TOKENS": 1, **way}
    options = [f"-D{key}={value}" for key, value in given.items()]
    return torch.cuda._compile_kernel(SOURCE, name, nvcc_options=options)


def main(to: str | None = None) -> None:
    """Prints of each kind the best and the strongest form; all to a file, if one is named."""
    device = arch.detect("cuda")
    flush = compiled("gdntune_flush", {**OURS, "TAKEN": 0, "AHEAD": 0})
    spare = torch.zeros(1, dtype=torch.int32, device="cuda")

    def reader(x: torch.Tensor) -> None:
        n = x.numel() // 4
        flush((min(1056, -(-n // 512)), 1, 1), (512, 1, 1), [x, n, spare])

    timer = make_timer(device, Policy("cupti", "cold-clean"), reader)
    most = max(REQUESTS)
    slots = 2 * most
    pool = torch.zeros(slots, HEADS, KEYS, KEYS, device="cuda")
    shape = (most, TOKENS, HEADS, KEYS)
    tokens = torch.zeros(4, *shape, dtype=torch.bfloat16, device="cuda")
    outputs = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
    kernels = [(what, way, compiled("moves", way)) for what, way in ways()]
    found = []
    for B in REQUESTS:
        index = torch.randperm(slots, generator=torch.Generator().manual_seed(B))[:B].int().cuda()

        def call(_: int, kernel: Any, way: dict[str, int], B: int = B, index: Any = index) -> None:
            grid = (B * HEADS * KEYS * KEYS * 4 // way["CHUNK"], 1, 1)
            kernel(grid, (way["THREADS"], 1, 1), [pool, index, tokens, outputs, B, 0])

        calls = [lambda i, k=k, w=w, call=call: call(i, k, w) for _, w, k in kernels]
        for (what, way, _), samples in zip(kernels, timer.measure(calls, 40), strict=True):
            found.append({"what": what, "way": way, "B": B, "us": statistics.median(samples)})
    card = torch.cuda.get_device_properties(0)
    print(card.name, card.uuid)
    for what in dict.fromkeys(x["what"] for x in found):
        for B in REQUESTS:
            best = min(
                (x for x in found if (x["what"], x["B"]) == (what, B)), key=lambda x: x["us"]
            )
            print(f"{what}, B={B}: {best['us']:.1f} us by {best['way']}")
    if to:
        Path(to).write_text(
            json.dumps({"gpu": card.name, "uuid": str(card.uuid), "times": found}, indent=1)
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
