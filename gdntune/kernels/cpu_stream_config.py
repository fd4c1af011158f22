"""Knobs of `cpu_stream`, the floor on CPUs: it has every memory knob that `cpu_recurrent` has."""

import dataclasses

from gdntune.device.arch import Device
from gdntune.kernels.spec import Facts, Kernel, knob
from gdntune.problem import Contract

BLOCKS = (4, 16, 64, 256)
WIDTHS = (4, 8, 16)
FLIGHTS = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting of the streaming kernel."""

    block: int = knob("kb", "KiB of a slot that a task moves")
    ilp: int = knob("ilp", "accesses in flight")
    vec: int = knob("vec", "fp32 lanes of a vector; 16 is one AVX-512 register")
    ahead: bool = knob("ahead", "the next block is fetched into the cache meanwhile", default=False)
    around: bool = knob(
        "around", "states after a token go around the cache to memory", default=False
    )


def facts(c: Contract) -> Facts:
    """What an object is compiled for; the size of a slot, and whether and how many intermediate
    states are written, are dynamic.
    """
    return {"state_dtype": c.state_dtype, "write": c.always_writes}


def refuse(c: Contract, s: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    for name, accepted in (("block", BLOCKS), ("vec", WIDTHS), ("ilp", FLIGHTS)):
        if getattr(s, name) not in accepted:
            return f"{name}={getattr(s, name)}: expected one of {', '.join(map(str, accepted))}"
    if s.around and c.intermediate == "none":
        return (
            "around=True without intermediate states: the state is stored where it was read, in the"
            " cache"
        )
    return None


def space(c: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    vec = 16 if "avx512" in device.arch else 8 if "avx" in device.arch else 4
    arounds = (False,) if c.intermediate == "none" else (False, True)
    return tuple(
        Knobs(block, ilp, vec, ahead, around)
        for around in arounds
        for ahead in (False, True)
        for ilp in (1, 4)
        for block in (4, 16, 64)
    )


def default(c: Contract, work_units: int, device: Device) -> Knobs:
    """A rule for where no table speaks."""
    vec = 16 if "avx512" in device.arch else 8 if "avx" in device.arch else 4
    return Knobs(block=16, ilp=1, vec=vec, ahead=True, around=c.intermediate != "none")


KERNEL = Kernel(
    name="cpu_stream",
    device="cpu",
    role="floor",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="gdntune.kernels.cpu_stream:compile",
    sources=("gdntune.kernels.cpu_stream", "kernels/cpu/stream.h"),
)
