"""The registry of kernels: a new one is a module, its config and a line here. Nothing else knows
kernels by name.
"""

import os
from collections.abc import Iterable

from gdntune.device.arch import Device
from gdntune.errors import TableError, UnknownName, UnsupportedProblem, listed
from gdntune.kernels import (
    cpu_layer_config,
    cpu_recurrent_config,
    cpu_ring_config,
    cpu_ring_norm_config,
    cpu_stream_config,
    layer_config,
    recurrent_config,
    ring_config,
    ring_kda_config,
    ring_norm_config,
    stream_config,
    wy_block_config,
    wy_config,
    wy_lanes_config,
    wy_quads_config,
)
from gdntune.kernels.outside import VARIABLE, kernels_of, named
from gdntune.kernels.spec import Kernel, Role, Variant
from gdntune.kernels.stream_config import flush, producer
from gdntune.problem import Contract, Problem

__all__ = [
    "KERNELS",
    "at",
    "check_names",
    "default",
    "elsewhere",
    "fingerprints",
    "flush",
    "get",
    "producer",
    "refuse",
    "serving",
    "use",
    "variants",
]

KERNELS: dict[str, Kernel] = {
    k.name: k
    for k in (
        recurrent_config.KERNEL,
        wy_config.KERNEL,
        wy_block_config.KERNEL,
        wy_lanes_config.KERNEL,
        wy_quads_config.KERNEL,
        layer_config.KERNEL,
        ring_config.KERNEL,
        ring_kda_config.KERNEL,
        ring_norm_config.KERNEL,
        stream_config.KERNEL,
        cpu_recurrent_config.KERNEL,
        cpu_stream_config.KERNEL,
        cpu_layer_config.KERNEL,
        cpu_ring_config.KERNEL,
        cpu_ring_norm_config.KERNEL,
    )
}


def use(modules: Iterable[str]) -> None:
    """Adds the kernels of modules outside the package, here and in worker processes; UnknownName
    where one cannot be imported, has no kernel or takes a name that there is.
    """
    wanted = list(dict.fromkeys([*named(), *modules]))
    for module in wanted:
        for kernel in kernels_of(module):
            if KERNELS.setdefault(kernel.name, kernel) is not kernel:
                raise UnknownName(
                    f"{module}: its kernel {kernel.name!r} has the name of another; give it one"
                    " of its own"
                )
    if wanted:
        # workers are processes of their own: they inherit it
        os.environ[VARIABLE] = ",".join(wanted)


def get(name: str) -> Kernel:
    """The kernel of a name; UnknownName lists those that are."""
    if name not in KERNELS:
        raise UnknownName(f"no kernel is called {name!r}: there are {listed(KERNELS)}")
    return KERNELS[name]


def serving(device: Device, role: Role) -> tuple[Kernel, ...]:
    """The kernels of a role that run on a device."""
    return tuple(k for k in KERNELS.values() if k.device == device.kind and k.role == role)


def variants(
    contract: Contract, device: Device, role: Role = "decode", l2: str = "cold-clean"
) -> tuple[Variant, ...]:
    """Every variant worth trying for a contract on a device under an L2 policy, kernel by kernel,
    simplest first.
    """
    return tuple(v for k in serving(device, role) for v in k.variants(contract, device, l2))


def at(problem: Problem, device: Device, found: Iterable[Variant]) -> list[Variant]:
    """Those of a contract's variants that are timed at a problem's cell."""
    return [v for v in found if get(v.kernel).at(problem, device, get(v.kernel).setting(v.knobs))]


def refuse(contract: Contract, variant: Variant) -> str | None:
    """Why a variant cannot serve a contract, or None."""
    kernel = get(variant.kernel)
    return kernel.fault(contract, kernel.setting(variant.knobs))


def elsewhere(contract: Contract, variant: Variant, device: Device) -> Variant:
    """What a variant that another architecture's table chose becomes on a device."""
    kernel = get(variant.kernel)
    return kernel.variant(kernel.elsewhere(contract, kernel.setting(variant.knobs), device))


def check_names(found: Iterable[Variant], source: str) -> None:
    """TableError for a variant of a table whose id says of a knob what its value does not."""
    for v in found:
        if v.kernel in KERNELS and (named := KERNELS[v.kernel].named(v)):
            raise TableError(
                f"{source}: $.variants[{v.id!r}].knobs are those of {named}: expected the id"
                " that knobs have; write it wherever the other stands, or take the table that"
                " `gdntune sweep` wrote"
            )


def default(contract: Contract, work_units: int, device: Device, role: Role = "decode") -> Variant:
    """The variant used where no table speaks: of the kernel that leads for the contract, else of
    the device's first of the role.
    """
    found = [k for k in serving(device, role) if k.takes(contract)]
    if not found:
        raise UnsupportedProblem(
            f"no {role} kernel for {contract.key()} runs on {device.kind} ({device.name}): there"
            f" are {listed(KERNELS)}"
        )
    kernel = next((k for k in found if k.leads(contract)), found[0])
    return kernel.variant(kernel.default(contract, work_units, device))


def fingerprints(device_kind: str) -> dict[str, str]:
    """The fingerprint of each kernel that runs on a kind of device."""
    from gdntune.kernels.fingerprint import fingerprint

    return {k.name: fingerprint(k.sources) for k in KERNELS.values() if k.device == device_kind}


use(())
