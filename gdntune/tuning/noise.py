"""The noise guard: times that nobody could believe are taken again, then marked.

A cell is marked by the reason of its `Cell`, which ends well: its times are kept, and whoever reads
them sees what they are worth.
"""

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gdntune.device.arch import Device, cpu_threads
from gdntune.timing import CUPTI_STEP_US, summary

if TYPE_CHECKING:
    from gdntune.tuning.measure import TimedVariant

# No kernel of 2,365 published cells of an H100 was more than 0.4% below its floor.
BELOW_FLOOR = 0.05
# The quartiles' distance over the median: 0.092 at most in the same cells, 0.204 of 1,900 times of
# other libraries' kernels (fla's KDA at B=256).
SPREAD = 0.25
# A call of a microsecond is measured in steps of the clock, which are no noise.
STEPS = 4
# Processes that want to run, over the cores: ours keeps them busy itself.
LOAD = 1.5


def load_of(device: Device) -> str:
    """Why a CPU's times are disturbed by others, by the load of the last minute; empty where they
    are not, and on a GPU.
    """
    if device.kind != "cpu" or not hasattr(os, "getloadavg"):
        return ""
    load, cores = os.getloadavg()[0], cpu_threads()
    return f"the load is {load:.1f} on {cores} cores" if load > LOAD * cores + 1 else ""


def noise(device: Device, timed: Iterable["TimedVariant"]) -> str:
    """Why a cell's final samples cannot be believed; empty where they can."""
    finals = [t for t in timed if t.final_us]
    ours, floors = ([t.final_us for t in finals if t.role == role] for role in ("decode", "floor"))
    others = [
        _spread([t.final_us], t.variant.id) for t in finals if t.role in ("peer", "partner")
    ]  # fmt: skip
    said = (_below(ours, floors), _spread(ours, "the best kernel"), *others, load_of(device))
    return "; ".join(filter(None, said))


def _below(ours: Sequence[list[float]], floors: Sequence[list[float]]) -> str:
    if not ours or not floors:
        return ""
    # Medians: one lucky sample of either is no ground to doubt a cell.
    best, floor = (min(summary(us).median_us for us in of) for of in (ours, floors))
    if best >= (1 - BELOW_FLOOR) * floor or floor - best <= CUPTI_STEP_US:
        return ""
    # Three digits, and no exponent: 6770, not 6.77e+03.
    times = " of ".join(f"{float(f'{us:.3g}'):g}" for us in (best, floor))
    return f"the best kernel takes {best / floor:.2f} of its floor ({times} us)"


def _spread(samples: Sequence[list[float]], whose: str) -> str:
    if not samples:
        return ""
    # Only the best's spread decides anything; a slow variant may be as noisy as it likes.
    best = min(map(summary, samples), key=lambda s: s.median_us)
    spread = best.q3_us - best.q1_us
    if spread <= max(SPREAD * best.median_us, STEPS * CUPTI_STEP_US):
        return ""
    return (
        f"the middle half of {whose}'s samples spans {spread / best.median_us:.0%} of their median"
    )
