"""Compiles, without a GPU, what the GPU tests call: `python tests/gpu/objects.py DIR [ARCH]`, then GDNTUNE_BUNDLE=DIR pytest -m gpu.

The tests also run without it where CuTe DSL is installed; a bundle is for machines that have a GPU and no compiler.
"""

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import test_faults
import test_kda
import test_properties
from test_ops import CONTRACTS

from gdntune import arch, kernels
from gdntune.build import compile_objects
from gdntune.dispatch import Runtime
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, contract_fault
from gdntune.store import Store, object_spec, write_bundle

DIFFERENTIAL_CONTRACTS = {"gdn_decode": 110, "kda_decode": 60}


def random_contract(op: str, pick: random.Random) -> Contract:
    """A legal contract, every field drawn; sizes that models use are drawn more often."""
    while True:
        intermediate = pick.choice(["none", "none", "dense", "indexed", "slots"])
        floats = ["bf16", "fp16", "fp32"]
        contract = Contract(
            op=op,  # type: ignore[arg-type]
            tokens=pick.choice([1, 1, 1, 2, 3, 4, 5, 8, 8, 12, 16]),
            K=pick.choice([64, 96, 128, 128, 128, 256]) if op == "gdn_decode" else pick.choice([64, 128]),
            V=pick.choice([32, 64, 96, 128, 128, 128, 192, 256, 512]) if op == "gdn_decode" else pick.choice([64, 128]),
            layout=pick.choice(["k_last", "v_last"]),
            input_dtype=pick.choice(["bf16", "bf16", "fp16"]),
            state_dtype=pick.choice(floats),
            gate_dtype=pick.choice(floats),
            beta_dtype=pick.choice(floats),
            A_log_dtype=pick.choice(floats),
            dt_bias_dtype=pick.choice(floats),
            gate=pick.choice(["raw", "raw", "log"] if op == "gdn_decode" else ["log", "softplus", "lower_bound"]),
            beta=pick.choice(["logit", "given"]),
            mode=pick.choice(["update", "frozen"]),
            intermediate=intermediate,
            accepted=intermediate == "slots" and pick.random() < 0.7,
            pool=intermediate == "slots" or pick.random() < 0.7,
            ragged=pick.random() < 0.3,
        )
        if contract_fault(contract) is None:
            return contract


def differential_variants(op: str) -> list[tuple[Contract, Variant]]:
    """Contracts drawn from the whole space, each with a variant drawn from its own: always the same ones."""
    pick = random.Random(f"gdntune {op}")
    device = arch.target("sm_90a")
    found = []
    while len(found) < DIFFERENTIAL_CONTRACTS[op]:
        contract = random_contract(op, pick)
        variants = kernels.variants(contract, device)
        if variants:
            found.append((contract, pick.choice(variants)))
    return found


def choices(contract: Contract, device: arch.Device) -> list[Variant]:
    """Every variant that the runtime can choose for a contract on a device, by its table or the default rule."""
    return list({c.variant.id: c.variant for c in Runtime(device).choices(contract)}.values())


def main(folder: Path, target: str = "sm_90a") -> None:
    """Compiles and bundles them."""
    device = arch.target(target)
    tested = [*CONTRACTS.values(), *test_faults.CONTRACTS, *test_properties.CONTRACTS, *test_kda.CONTRACTS]
    wanted = [*tested, Contract(), Contract(tokens=4), Contract(tokens=8, intermediate="dense")]
    pairs = [(c, v) for c in wanted for v in choices(c, device)]
    for op in DIFFERENTIAL_CONTRACTS:
        pairs += differential_variants(op)
    objects = [(object_spec(kernels.get(v.kernel), c, v, device), kernels.get(v.kernel).compiler) for c, v in pairs]
    flush = kernels.flush()
    objects.append(
        (
            object_spec(kernels.get(flush[1].kernel), *flush, device, label="flush"),
            kernels.get(flush[1].kernel).compiler,
        )
    )
    store = Store()
    failed = [b for b in compile_objects(objects, store) if not b.ok]
    for b in failed:
        print(b.spec.name, b.reason, file=sys.stderr)
    if failed:
        sys.exit(1)
    bundle = write_bundle(store, [spec for spec, _ in objects], folder)
    print(f"{len(bundle.objects)} objects in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:3])
