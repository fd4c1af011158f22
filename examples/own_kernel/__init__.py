"""A kernel from outside the package: `gdntune sweep --kernels own_kernel CONFIG`.

`KERNEL` is what gdntune looks for. It says which settings are legal, which are worth trying and how
an object is compiled; the sweep compiles, checks and times it like those of the package.
"""

import dataclasses
from pathlib import Path

from gdntune.device.arch import Device
from gdntune.kernels.spec import Facts, Kernel, knob
from gdntune.problem import Contract

# All that this kernel serves; what a contract leaves out is as in `gdntune.Contract`.
SERVED = Contract(op="gdn_decode", tokens=1, state_dtype="fp32")
ROWS = (4, 8, 16)


@dataclasses.dataclass(frozen=True)
class Knobs:
    """One setting. A knob changes the speed and not the result; its tag stands in variants' ids."""

    rows: int = knob("rw", "rows of V in flight")


def refuse(contract: Contract, setting: Knobs) -> str | None:
    """Why a setting cannot serve a contract, or None: the kernel's one legality function."""
    if contract.replace(K=SERVED.K, V=SERVED.V) != SERVED:
        return f"{contract.key()}: own_kernel serves {SERVED.key()} alone"
    if setting.rows not in ROWS:
        return f"rows={setting.rows}: expected one of {', '.join(map(str, ROWS))}"
    if contract.V % setting.rows:
        return f"V={contract.V} is not a multiple of rows={setting.rows}"
    return None


def space(contract: Contract, device: Device) -> tuple[Knobs, ...]:
    """The settings worth trying, simplest first."""
    return tuple(s for rows in ROWS if not refuse(contract, s := Knobs(rows)))


def default(contract: Contract, work_units: int, device: Device) -> Knobs:
    """The setting used where no table speaks."""
    return Knobs(8)


def facts(contract: Contract) -> Facts:
    """What an object is compiled for: contracts with equal facts share objects."""
    return {"K": contract.K}


KERNEL = Kernel(
    name="own_kernel",
    device="cpu",
    role="decode",
    knobs=Knobs,
    space=space,
    refuse=refuse,
    default=default,
    facts=facts,
    compiler="own_kernel.compiler:compile",
    # Their text is the kernel's fingerprint: a table says that it is stale when one has changed.
    sources=("own_kernel.compiler", str(Path(__file__).with_name("decode.cpp"))),
)
