"""What a sweep will take, said before it starts: cells, variants, objects, minutes."""

from collections.abc import Sequence

import msgspec

from gdntune import kernels, sol
from gdntune.device.arch import Device, cpu_threads
from gdntune.kernels.spec import Variant
from gdntune.objects.store import Store
from gdntune.problem import Problem
from gdntune.timing import L2
from gdntune.tuning import cells
from gdntune.tuning.config import Config
from gdntune.tuning.plan import sweep_plan

# Seconds, by kind of device, on the machines of docs/measured.md: an object on one core; a check;
# what a timing process takes to start; what a sample takes beside its call and its flush.
_OBJECT_S = {"cuda": 0.6, "cpu": 0.6}
_CHECK_S = {"cuda": 0.015, "cpu": 0.4}
_START_S = {"cuda": 8.0, "cpu": 6.0}
_SAMPLE_S = {"cuda": 60e-6, "cpu": 150e-6}
# A cell's tensors, their fill, its records.
_CELL_S = {"cuda": 0.06, "cpu": 0.5}
# GB/s where no datasheet says: of one CPU thread, and of all of them at most.
_THREAD_GB_S, _HOST_GB_S = 4.0, 100.0


class Estimate(msgspec.Struct, frozen=True):
    """A sweep's size. missing: objects that the store has not. minutes: expected; the cells that
    `bisect` adds are not in it.
    """

    cells: int
    contracts: int
    variants: int
    objects: int
    missing: int
    minutes: float

    def words(self) -> str:
        """One line for the terminal."""
        about = (
            f"{self.minutes:.0f}"
            if self.minutes >= 1.5
            else "1"
            if self.minutes > 0.5
            else "less than 1"
        )
        plural = "" if about in ("1", "less than 1") else "s"
        return (
            f"{self.cells} cells of {self.contracts} contracts, {self.variants} variants,"
            f" {self.objects} objects ({self.missing} to compile): about {about} minute{plural}"
        )


def estimate(
    config: Config,
    device: Device,
    store: Store,
    jobs: int | None = None,
    workers: int = 1,
    l2: L2 | None = None,
) -> Estimate:
    """Expects a sweep of a config on a device: objects over compiling processes, checks and cells
    over timing processes.

    l2: instead of the config's L2 policy.
    """
    plan = sweep_plan(config, device, l2=l2)
    objects = plan.objects()
    missing = sum(store.find(spec) is None for spec, _ in objects)
    problems = [*plan.problems, *cells.held_out(config, ())]
    kind = device.kind
    checks = sum(map(len, plan.tried.values()))
    compiling = missing * _OBJECT_S[kind] / max(1, jobs or cpu_threads())
    timing = sum(
        cell_s(config, p, device, plan.tried[p.contract], plan.floors[p.contract]) for p in problems
    )
    seconds = compiling + _START_S[kind] + (checks * _CHECK_S[kind] + timing) / workers
    return Estimate(
        len(problems),
        len(plan.tried),
        len({v.id for variants in plan.tried.values() for v in variants}),
        len(objects),
        missing,
        round(seconds / 60, 2),
    )


def cell_s(
    config: Config,
    problem: Problem,
    device: Device,
    decode: Sequence[Variant],
    floors: Sequence[Variant],
) -> float:
    """The seconds that a cell is expected to take, of these variants and floors."""
    search = cells.effort(config, problem)
    gb_s = device.peak_gb_s or min(_HOST_GB_S, _THREAD_GB_S * device.sm_count)
    # Before each sample a buffer of twice the cache is read, see `timing.flush_bytes`.
    flushed = 0 if config.policy.l2 == "warm" else 2 * max(device.l2_bytes, 32 << 20)
    call = 1.3 * sol.bytes_moved(problem) / (gb_s * 1e9)
    sample = call + flushed / (gb_s * 1e9) + _SAMPLE_S[device.kind]
    tried = len(decode) + len(kernels.at(problem, device, floors))
    # All take half of the screen's samples, the better third the rest
    screened = tried * search.screen_rounds * 2 / 3
    leaders = 2 * min(search.keep, len(decode))
    spent = (screened + leaders * search.final_rounds) * sample
    return _CELL_S[device.kind] + min(spent, search.max_cell_seconds)
