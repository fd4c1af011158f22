"""Compiles, without a GPU, what the GPU tests call: `python tests/gpu/objects.py DIR [ARCH]`, then
GDNTUNE_BUNDLE=DIR pytest -m gpu.

The tests also run without it where CuTe DSL is installed; a bundle is for machines that have a GPU
and no compiler. `--list` for DIR prints the objects instead, one a line. `differential` behind ARCH:
those of the differential run and of sanitize.py alone, a third of all. tests/conftest.py holds
the tests to `contracts()`: one that would call another on a GPU fails on the CPU too.
GDNTUNE_TEST_HAVING=copied,lines, then and when the tests run: the differential run draws settings
that have these knobs set alone.
"""

import functools
import os
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import drift
import host_gpu
import test_drafts
import test_faults
import test_faults_gpu
import test_kda
import test_ops
import test_properties
import test_rings

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels.spec import Variant
from gdntune.objects.build import compile_objects
from gdntune.objects.store import ObjectSpec, Store, object_spec, write_bundle
from gdntune.problem import Contract, contract_fault
from gdntune.runtime.dispatch import Runtime
from gdntune.tuning import config
from gdntune.tuning.plan import plan_objects

DIFFERENTIAL_CONTRACTS = {"gdn_decode": 110, "kda_decode": 80}
LEAST_OF_A_KERNEL = 24
INTERPRETED_OF_A_KERNEL = 3
# of the tests of the runtime in test_kernels_gpu.py
RUNTIME_CONTRACTS = [Contract(), Contract(tokens=4), Contract(tokens=8, intermediate="dense")]
# of the calls that start before the kernel ahead of them ends
DEPENDENT_CONTRACTS = [Contract(), Contract(tokens=4)]
FLOOR_CONTRACTS = [
    Contract(),
    Contract(mode="frozen"),
    Contract(tokens=3, mode="frozen", intermediate="dense"),
    Contract(state_dtype="fp32", tokens=3, intermediate="slots"),
]


def random_contract(op: str, pick: random.Random) -> Contract:
    """A legal contract, every field drawn; sizes that models use are drawn more often."""
    while True:
        intermediate = pick.choice(["none", "none", "dense", "indexed", "slots"])
        floats = ["bf16", "fp16", "fp32"]
        contract = Contract(
            op=op,  # type: ignore[arg-type]
            tokens=pick.choice([1, 1, 1, 2, 3, 4, 5, 8, 8, 12, 16]),
            K=pick.choice([64, 96, 128, 128, 128, 256])
            if op == "gdn_decode"
            else pick.choice([64, 128]),
            V=pick.choice([32, 64, 96, 128, 128, 128, 192, 256, 512])
            if op == "gdn_decode"
            else pick.choice([64, 128]),
            layout=pick.choice(["k_last", "v_last"]),
            input_dtype=pick.choice(["bf16", "bf16", "fp16"]),
            state_dtype=pick.choice(floats),
            gate_dtype=pick.choice(floats),
            beta_dtype=pick.choice(floats),
            A_log_dtype=pick.choice(floats),
            dt_bias_dtype=pick.choice(floats),
            gate=pick.choice(
                ["raw", "raw", "log"] if op == "gdn_decode" else ["log", "softplus", "lower_bound"]
            ),
            beta=pick.choice(["logit", "given"]),
            mode=pick.choice(["update", "frozen"]),
            intermediate=intermediate,
            accepted=intermediate == "slots" and pick.random() < 0.7,
            pool=intermediate == "slots" or pick.random() < 0.7,
            ragged=pick.random() < 0.3,
            **(layer_fields(pick) if pick.random() < 0.3 else {}),
        )
        if contract_fault(contract) is None:
            return contract


def layer_fields(pick: random.Random) -> dict[str, Any]:
    """What a layer's step has around the delta rule. Of windows rings alone: shifted ones are served
    by some ratios of heads.
    """
    found: dict[str, Any] = {"norm": pick.choice(["none", "silu", "sigmoid"])}
    if found["norm"] != "none":
        found["norm_weight_dtype"] = pick.choice(["bf16", "fp16", "fp32"])
    if pick.random() < 0.8:
        found |= {
            "conv": pick.choice(["identity", "silu"]),
            "conv_width": pick.choice([2, 3, 4]),
            "conv_bias": pick.random() < 0.5,
        }
    return found


@functools.cache
def differential_variants(op: str) -> list[tuple[Contract, Variant]]:
    """Contracts drawn from the whole space, each with a variant drawn from its own: always the same
    ones. Then more for kernels that serve few.
    """
    pick = random.Random(f"gdntune {op}")
    device = arch.target("sm_90a")
    having = [name for name in os.environ.get("GDNTUNE_TEST_HAVING", "").split(",") if name]
    found: list[tuple[Contract, Variant]] = []
    drawn: Counter[str] = Counter()
    for _ in range(20 * DIFFERENTIAL_CONTRACTS[op]):
        contract, more = random_contract(op, pick), len(found) >= DIFFERENTIAL_CONTRACTS[op]
        wanted = [
            k
            for k in kernels.serving(device, "decode")
            if not more or drawn[k.name] < LEAST_OF_A_KERNEL
        ]
        if not wanted:
            break
        # Under this policy with every form of dependent launch. Settings: to make a variant of each
        # took most of the time.
        drawable = {
            k: [
                s
                for s in k.space(contract, device)
                if k.under(s, "chain") and all(getattr(s, name, False) for name in having)
            ]
            for k in wanted
            if k.takes(contract)
        }
        if by_kernel := [(k, settings) for k, settings in drawable.items() if settings]:
            kernel, settings = pick.choice(by_kernel)
            variant = kernel.variant(pick.choice(settings))
            found.append((contract, variant))
            drawn[variant.kernel] += 1
    if not found:
        # a run over nothing would pass
        raise SystemExit(
            f"GDNTUNE_TEST_HAVING={','.join(having)}: no setting has all of these knobs"
        )
    return found


def interpreted_variants() -> list[tuple[Contract, Variant]]:
    """A few of these of each kernel: what test_ptx_gpu.py runs on silicon and interprets."""
    drawn: Counter[tuple[str, str]] = Counter()
    found = []
    for op in DIFFERENTIAL_CONTRACTS:
        for contract, variant in differential_variants(op):
            drawn[op, variant.kernel] += 1
            if drawn[op, variant.kernel] <= INTERPRETED_OF_A_KERNEL:
                found.append((contract, variant))
    return found


def floors(contract: Contract, device: arch.Device) -> list[Variant]:
    """The default floor of a contract, and the first that takes its slots from an index."""
    found = kernels.variants(contract, device, "floor")
    return [
        kernels.default(contract, 64, device, "floor"),
        next(v for v in found if v.knobs["indexed"]),
    ]


def choices(
    contract: Contract, device: arch.Device, dependent_launch: bool | None = None
) -> list[Variant]:
    """Every variant that the runtime can choose for a contract on a device, by its table or the
    default rule; of calls with or without dependent launch, else as it is there.
    """
    bound = Runtime(device).bind(contract, dependent_launch=dependent_launch)
    return list({c.variant.id: c.variant for c in bound.choices}.values())


def contracts() -> list[Contract]:
    """Every contract that the tests of the public functions and of the runtime call, each once."""
    tested = [
        *test_ops.CONTRACTS.values(),
        *test_drafts.CONTRACTS,
        *test_rings.CONTRACTS,
        *test_faults.CONTRACTS,
        *test_properties.CONTRACTS,
        *test_kda.CONTRACTS,
        *RUNTIME_CONTRACTS,
        *drift.CONTRACTS,
        *host_gpu.CONTRACTS,
    ]
    return list(dict.fromkeys(tested))


def objects(device: arch.Device) -> list[tuple[ObjectSpec, str]]:
    """The objects of these contracts, of the differential run and of the sweeps of faulty kernels,
    each once, with its compiler.
    """
    pairs = [(c, v) for c in contracts() for v in choices(c, device)]
    pairs += [(c, v) for c in DEPENDENT_CONTRACTS for v in choices(c, device, True)]
    pairs += [(c, v) for c in FLOOR_CONTRACTS for v in floors(c, device)]
    pairs += differential()
    found = _objects(pairs, device)
    found += plan_objects(config.parse(test_faults_gpu.HONEST), device)
    return list({spec.key: (spec, compiler) for spec, compiler in found}.values())


def differential() -> list[tuple[Contract, Variant]]:
    """What the differential run and sanitize.py call."""
    return [pair for op in DIFFERENTIAL_CONTRACTS for pair in differential_variants(op)]


def _objects(
    pairs: list[tuple[Contract, Variant]], device: arch.Device
) -> list[tuple[ObjectSpec, str]]:
    return [
        (object_spec(kernels.get(v.kernel), c, v, device), kernels.get(v.kernel).compiler)
        for c, v in pairs
    ]


def main(folder: str, target: str = "sm_90a", what: str = "all") -> None:
    """Compiles and bundles them."""
    device = arch.target(target)
    wanted = _objects(differential(), device) if what == "differential" else objects(device)
    if folder == "--list":
        for spec, _ in wanted:
            print(spec.key, spec.kernel, spec.label, spec.facts)
        return
    store = Store()
    failed = [b for b in compile_objects(wanted, store) if not b.ok]
    for b in failed:
        print(b.spec.name, b.reason, file=sys.stderr)
    if failed:
        sys.exit(1)
    bundle = write_bundle(store, [spec for spec, _ in wanted], Path(folder))
    print(f"{len(bundle.objects)} objects in {folder}")
    import ptx.build

    if target == ptx.build.ARCH and what == "all":
        builder = ptx.build.Builder(Path(folder))
        for contract, variant in interpreted_variants():
            builder.get(contract, variant)
        builder.close()


if __name__ == "__main__":
    main(*sys.argv[1:4])
