"""What the compiled variants of configs take of a multiprocessor, from their manifests. Needs no
GPU.
"""

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from gdntune import kernels
from gdntune.device.arch import Device
from gdntune.device.occupancy import Occupancy, occupancy
from gdntune.errors import BuildError, UnsupportedProblem
from gdntune.kernels.spec import Block, Role, Variant
from gdntune.objects.build import Built
from gdntune.objects.store import object_spec
from gdntune.problem import Contract
from gdntune.tuning.config import Config
from gdntune.tuning.plan import sweep_plan


class Resource(NamedTuple):
    """One object. contract: the first that it serves; tokens: T of all. spill_bytes: a thread's
    stack, 0 where nothing spills.
    """

    role: Role
    contract: Contract
    tokens: tuple[int, ...]
    variant: Variant
    registers: int
    spill_bytes: int
    block: Block
    occupancy: Occupancy


class Range(NamedTuple):
    """The least, the median and the greatest of some numbers."""

    least: float
    median: float
    most: float


def range_of(numbers: Iterable[float]) -> Range:
    """Of at least one number; the median is one of them."""
    found = sorted(numbers)
    return Range(found[0], statistics.median_low(found), found[-1])


def resources(configs: Iterable[Config], device: Device, built: Iterable[Built]) -> list[Resource]:
    """What each object of the configs' decode variants and floors takes, in the order of the
    contracts and of the spaces.

    built: the outcome of each; those that failed are left out.
    Raises BuildError for an object that is not among them, UnsupportedProblem for a device that is
    no GPU, UnknownName for an arch whose SMs are not known.
    """
    if device.kind != "cuda":
        raise UnsupportedProblem(
            f"{device.arch}: registers and occupancy are of GPUs; expected a CUDA arch"
        )
    outcomes = {b.spec.key: b for b in built}
    found: dict[str, Resource] = {}
    for config in configs:
        for contract, variants in _variants(config, device).items():
            for variant in variants:
                kernel = kernels.get(variant.kernel)
                spec = object_spec(kernel, contract, variant, device)
                if spec.key in found:
                    # One object serves several token counts, or contracts that differ in what no
                    # code depends on.
                    known = found[spec.key]
                    tokens = tuple(sorted({*known.tokens, contract.tokens}))
                    found[spec.key] = known._replace(tokens=tokens)
                    continue
                outcome = outcomes.get(spec.key)
                if outcome is not None and not outcome.ok:
                    continue
                manifest = None if outcome is None else outcome.manifest
                if manifest is None or manifest.registers is None or kernel.block is None:
                    raise BuildError(
                        f"object {spec.name}: its registers are not known; compile it first"
                    )
                block = kernel.block(contract, kernel.setting(variant.knobs))
                found[spec.key] = Resource(
                    role=kernel.role,
                    contract=contract,
                    tokens=(contract.tokens,),
                    variant=variant,
                    registers=manifest.registers,
                    spill_bytes=manifest.spill_bytes or 0,
                    block=block,
                    occupancy=occupancy(
                        device.arch, block.threads, manifest.registers, block.shared_bytes
                    ),
                )
    return list(found.values())


def _variants(config: Config, device: Device) -> dict[Contract, list[Variant]]:
    """Of each contract what a sweep tries, and what of the default rule it leaves out."""
    plan = sweep_plan(config, device)
    found = {c: dict.fromkeys((*plan.tried[c], *plan.floors[c])) for c in plan.tried}
    for p in plan.problems:
        found[p.contract].setdefault(plan.default(p))
    return {contract: list(variants) for contract, variants in found.items()}
