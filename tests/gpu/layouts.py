"""How much slower V-last is than K-last, from a pool, T=1, HV=64: `python tests/gpu/layouts.py
[BUNDLE ...]`.

Times the choices of the tables in use for both layouts at each batch size, and the choices at the
batch sizes beside it, in one measurement, interleaved, under cold-clean; prints Markdown. Objects
are those of the bundles, else they are compiled.
"""

import sys
from pathlib import Path

from gdntune.device import arch
from gdntune.objects.store import Store, default_root
from gdntune.problem import Contract, Problem
from gdntune.runtime.dispatch import runtime
from gdntune.timing import Policy, summary
from gdntune.tuning.session import Session

SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def main(bundles: list[Path]) -> None:
    """One row a batch size and state dtype; a layout's time is the least mean of its choices."""
    device = arch.detect("cuda")
    session = Session(device, 0, Store(default_root(), bundles), Policy())
    print(
        f"{device.name}: means in us\n\n| state | B | K-last | V-last | ratio | V-last's variant |\n| --- | ---: | ---: | ---: | ---: | --- |"
    )
    for dtype in ("bf16", "fp32"):
        for B in SIZES:
            found = []
            for layout in ("k_last", "v_last"):
                contract = Contract(state_dtype=dtype, layout=layout)
                problem = Problem(contract, B, 16, 64)
                bound = runtime("cuda").bind(contract)
                chosen = {
                    c.id: c for b in (B // 2, B, 2 * B) if b for c in [bound.choice(b * 64).variant]
                }
                calls = session.calls(problem, "decode", list(chosen.values()))
                found.append((list(chosen), calls))
            samples = session.timer.measure(
                [f for _, calls in found for f in calls.calls], 200 if B < 256 else 100
            )
            means = [summary(x).mean_us for x in samples]
            n = len(found[0][0])
            k, v = min(means[:n]), min(means[n:])
            best = found[1][0][means[n:].index(v)].removeprefix("recurrent.")
            print(f"| {dtype} | {B} | {k:.2f} | {v:.2f} | {v / k:.3f} | `{best}` |", flush=True)


if __name__ == "__main__":
    main([Path(x) for x in sys.argv[1:]])
