"""Knobs of `cpu_ring`: one setting, as no speed is asked of it."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.kernels import cpu_recurrent_config
from gdntune.kernels.spec import Facts, Kernel, knob
from gdntune.problem import Contract


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Its setting."""

    vec: int = knob("vec", "fp32 lanes of a vector")


def facts(c: Contract) -> Facts:
    """What an object is compiled for; the dtype of u its tensor tells."""
    return {**cpu_recurrent_config.facts(c), "ring": c.ring, "ring_rounding": c.ring_rounding}


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    return None if s.vec == 8 else f"vec={s.vec}: expected 8"


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying."""
    return (Knobs(8),)


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """The setting."""
    return Knobs(8)


KERNEL = Kernel(
    name="cpu_ring",
    device="cpu",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="gdntune.kernels.cpu_ring:compile",
    sources=("gdntune.kernels.cpu_ring", "kernels/cpu/ring.h"),
    ring=True,
)
