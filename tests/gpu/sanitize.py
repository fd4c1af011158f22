r"""Launches every variant and mode of the GPU tests on a small problem, for compute-sanitizer to
watch:

    compute-sanitizer --tool memcheck --kernel-regex kns=gdntune --error-exitcode 9 \
        python tests/gpu/sanitize.py [KERNEL ...]

and the same with --tool racecheck; KERNEL: only variants of these.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import torch
from objects import DIFFERENTIAL_CONTRACTS, differential_variants
from test_kernels_gpu import random_problem

from gdntune.checking.cases import make_case
from gdntune.runtime.dispatch import runtime


def main(*names: str) -> None:
    """Two launches a variant of these kernels, or of all."""
    pick = random.Random("sanitize")
    pairs = [pair for op in DIFFERENTIAL_CONTRACTS for pair in differential_variants(op)]
    pairs = [(c, v) for c, v in pairs if not names or v.kernel in names]
    launches = 0
    for contract, variant in pairs:
        function = runtime("cuda").functions(contract, [variant])[0]
        for seed in range(2):
            problem, options = random_problem(contract, pick)
            function(*make_case(problem, "cuda", seed, **options).arguments())
            launches += 1
        torch.cuda.synchronize()
    dependent = sum(v.knobs.get("pdl", "none") != "none" for _, v in pairs)
    print(f"{launches} launches of {len(pairs)} variants, {dependent} of dependent launch")


if __name__ == "__main__":
    main(*sys.argv[1:])
