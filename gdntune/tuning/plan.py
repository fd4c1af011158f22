"""What a sweep of a config compiles and tries: variants of each contract, objects. Knows no kernel
by name.
"""

from gdntune import kernels
from gdntune.device.arch import Device
from gdntune.kernels.spec import Variant
from gdntune.objects.store import ObjectSpec, object_spec
from gdntune.problem import Contract
from gdntune.tuning.config import Config


def plan(
    config: Config, device: Device
) -> dict[Contract, tuple[tuple[Variant, ...], tuple[Variant, ...]]]:
    """For each contract of a config the decode variants that it admits, and the floor's."""
    return {
        c: (
            config.admitted(c, kernels.variants(c, device)),
            kernels.variants(c, device, "floor"),
        )
        for c in config.all_contracts()
    }


def plan_objects(config: Config, device: Device) -> list[tuple[ObjectSpec, str]]:
    """Every object that a sweep of a config needs, with its kernel's compiler, each once."""
    found: dict[str, tuple[ObjectSpec, str]] = {}

    def add(contract: Contract, variant: Variant, label: str | None = None) -> None:
        kernel = kernels.get(variant.kernel)
        spec = object_spec(kernel, contract, variant, device, label=label)
        found.setdefault(spec.key, (spec, kernel.compiler))

    if device.kind == "cuda":
        add(*kernels.flush(), label="flush")
    for problem in config.problems():
        add(problem.contract, kernels.default(problem.contract, problem.work_units, device))
    for contract, (decode, floor) in plan(config, device).items():
        for variant in (*decode, *floor):
            add(contract, variant)
    return list(found.values())
