"""What a sweep will take, said before it starts: cells, variants, objects, minutes."""

from collections import Counter
from collections.abc import Sequence

import msgspec

from gdntune import kernels, sol
from gdntune.device.arch import Device, cpu_threads
from gdntune.errors import counted
from gdntune.kernels.spec import Variant, floor_name
from gdntune.objects.store import Store
from gdntune.problem import Problem
from gdntune.timing import GRAPH_CALLS, L2, TURNS, flush_bytes
from gdntune.tuning import cells
from gdntune.tuning.config import Config
from gdntune.tuning.measure import (
    FIRST_LOOK_KEEPS,
    FIRST_LOOK_ROUNDS,
    FLOOR_LEADERS,
    LEAST_KEPT,
    LEAST_ROUNDS,
    PACE_ROUNDS,
    apart,
)
from gdntune.tuning.plan import sweep_plan

# Seconds, by kind of device where they differ, on the machines of docs/measured.md. By role, an
# object on one of the cores while all of them compile; a check; what the first process takes to
# start and to say what it times by; what a sample takes beside its call and its flush; a cell's
# tensors, their fill, its records.
_OBJECT_S = {"decode": 1.5, "floor": 0.4}
_CHECK_S = {"cuda": 0.015, "cpu": 0.05}
_START_S = {"cuda": 8.0, "cpu": 5.0}
_SAMPLE_S = {"cuda": 20e-6, "cpu": 150e-6}
_CELL_S = {"cuda": 0.03, "cpu": 0.3}
# GB/s where no datasheet says: of one CPU thread, and of all of them at most.
_THREAD_GB_S, _HOST_GB_S = 10.0, 100.0
# Of the cells that are timed again on a GPU the share whose noise asks for all the time there is; a
# CPU's times spread by more than `precision` in all.
_NOISY = {"cuda": 0.1, "cpu": 1.0}
# Units of what is expected, in minutes.
_UNITS = ((24 * 60, "day"), (60, "hour"), (1, "minute"))


class Estimate(msgspec.Struct, frozen=True):
    """A sweep's size. missing: objects that the store has not. minutes: expected; the cells that
    `bisect` adds are not in it. too_large: cells whose states are more than the device's memory,
    which will fail; they are among the cells.
    """

    cells: int
    contracts: int
    variants: int
    objects: int
    missing: int
    minutes: float
    too_large: int = 0

    def words(self) -> str:
        """One line for the terminal."""
        # In the largest unit of which there are two.
        size, unit = next(
            ((size, unit) for size, unit in _UNITS if self.minutes >= 2 * size), _UNITS[-1]
        )
        about = (
            "less than a minute"
            if self.minutes <= 0.5
            else f"about {counted(max(1, round(self.minutes / size)), unit)}"
        )
        lost = counted(self.too_large, "cell")
        return (
            f"{counted(self.cells, 'cell')} of {counted(self.contracts, 'contract')},"
            f" {counted(self.variants, 'variant')}, {counted(self.objects, 'object')}"
            f" ({self.missing} to compile): {about}"
            + (f"; {lost} will fail, with states beyond its memory" if self.too_large else "")
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
    missing = [spec for spec, _ in objects if store.find(spec) is None]
    problems = [*plan.problems, *cells.held_out(config, ())]
    fitting = [p for p in problems if not cells.too_large(p, device)]
    kind = device.kind
    checks = sum(map(len, plan.tried.values()))
    compiling = sum(_OBJECT_S[kernels.get(spec.kernel).role] for spec in missing)
    timing = 0.0
    for p in fitting:
        tried = plan.tried[p.contract], plan.floors[p.contract]
        timing += cell_s(config, p, device, *tried, plan.l2) + again_s(
            config, p, device, *tried, plan.l2
        )
    seconds = compiling / max(1, min(jobs or cpu_threads(), len(missing)))
    seconds += _START_S[kind] + _peaks_s(device) + (checks * _CHECK_S[kind] + timing) / workers
    return Estimate(
        len(problems),
        len(plan.tried),
        len({v.id for variants in plan.tried.values() for v in variants}),
        len(objects),
        len(missing),
        round(seconds / 60, 2),
        len(problems) - len(fitting),
    )


def cell_s(
    config: Config,
    problem: Problem,
    device: Device,
    decode: Sequence[Variant],
    floors: Sequence[Variant],
    l2: L2 | None = None,
) -> float:
    """The seconds that a cell is expected to take, of these variants and floors; as
    `measure.time_cell` spends them.
    """
    search = cells.effort(config, problem)
    forms = _forms(problem, device, floors)
    tried = len(decode) + sum(forms)
    first = min(search.screen_rounds, max(FIRST_LOOK_ROUNDS, -(-search.screen_rounds // 2)))
    # Of those without dependent launch as many more, where there are others: mostly others.
    kinds = [n for n in (len(decode), len(apart(decode))) if n]
    better = [min(max(LEAST_KEPT, search.keep, n // FIRST_LOOK_KEEPS), n) for n in kinds]
    again = min(sum(better), len(decode)) + sum(min(n, FLOOR_LEADERS) for n in forms)
    screened = tried * first + again * (search.screen_rounds - first)
    # The default rule's choice is seldom among the others.
    leaders = min(len(kinds) * search.keep + 1, len(decode))
    leaders += sum(min(n, FLOOR_LEADERS) for n in forms)
    sample = _sample_s(config, problem, device, l2 or config.policy.l2)
    spent = _timed_s(
        screened * sample, leaders * sample, search.final_rounds, search.max_cell_seconds
    )
    return _CELL_S[device.kind] + spent


def again_s(
    config: Config,
    problem: Problem,
    device: Device,
    decode: Sequence[Variant],
    floors: Sequence[Variant],
    l2: L2 | None = None,
) -> float:
    """The seconds that a cell is expected to take once more, after its choice was made: what the
    choice is compared with, until the ratios to it are known.
    """
    search = cells.effort(config, problem)
    rounds = cells.fresh_rounds(search)
    if not rounds:
        return 0.0
    # The choice, which is mostly the best, the next best, the default rule's
    kinds = 2 if apart(decode) else 1
    few = min(1 + kinds * cells.RUNNERS_UP, len(decode))
    few += sum(min(n, FLOOR_LEADERS) for n in _forms(problem, device, floors))
    one_round = few * _sample_s(config, problem, device, l2 or config.policy.l2)
    ends = min(search.max_cell_seconds, cells.FRESH_SECONDS)
    spent = _timed_s(0.0, one_round, rounds, ends)
    # Turns of rounds go on while another would end in time.
    noisy = _NOISY[device.kind] * max(0.0, ends - spent) if search.precision else 0.0
    return _CELL_S[device.kind] + spent + noisy


def _forms(problem: Problem, device: Device, floors: Sequence[Variant]) -> list[int]:
    """How many variants each form of the floor has at a cell: each is tuned by itself."""
    return list(Counter(floor_name(v) for v in kernels.at(problem, device, floors)).values())


def _timed_s(before: float, one_round: float, rounds: int, ends: float) -> float:
    """Seconds of a cell that has as many rounds as fit before it ends, or the fewest that decide
    anything.
    """
    before += (1 + PACE_ROUNDS) * one_round
    fit = int(max(0.0, ends - before) / one_round)
    return before + min(rounds, max(LEAST_ROUNDS, fit)) * one_round


def _gb_s(device: Device) -> float:
    return device.peak_gb_s or min(_HOST_GB_S, _THREAD_GB_S * device.sm_count)


def _sample_s(config: Config, problem: Problem, device: Device, l2: L2) -> float:
    """Seconds of one sample: its calls, and before each what the L2 policy does."""
    call = (1.3 * sol.bytes_moved(problem) + flush_bytes(device, l2)) / (_gb_s(device) * 1e9)
    if device.kind == "cuda" and l2 == "chain":
        from gdntune.tuning.chain import layers_of

        # A graph of all layers, and one of all that is around them.
        return 2 * layers_of(problem, device) * (call + _SAMPLE_S["cuda"])
    turns = TURNS if l2 == "rotate" else GRAPH_CALLS
    return (turns if config.policy.timer == "graph" else 1) * call + _SAMPLE_S[device.kind]


def _peaks_s(device: Device) -> float:
    """Seconds in which `timing.measured_peaks` moves two buffers: filled, then read and written 11
    times in each of two ways.
    """
    if device.kind == "cuda":
        return 1.0
    size = min(max(256 << 20, 8 * device.l2_bytes), max(1 << 20, device.memory_bytes // 8))
    return (2 * 3 + 2 * 2 * 11) * size / (_gb_s(device) * 1e9)
