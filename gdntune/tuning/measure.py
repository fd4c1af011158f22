"""Times one cell in a timing process: the first look at what there is to choose among, then the
final samples of the leaders.
"""

import math
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

from gdntune import sol
from gdntune.device import graphs
from gdntune.device.arch import Clocks, clocks, settled, shift, slowdown, throttled
from gdntune.errors import MeasurementError
from gdntune.kernels import dependent_launch
from gdntune.kernels.spec import FLOORS, Variant, floor_name
from gdntune.problem import Problem
from gdntune.results.bootstrap import widest_interval
from gdntune.timing import Timer, summary
from gdntune.tuning import probe
from gdntune.tuning.config import Search
from gdntune.tuning.probe import Named
from gdntune.tuning.session import Calls, Session

# A screen in two looks: all variants half as often as the config says, but so often at least, then
# the better third as often as it says.
FIRST_LOOK_ROUNDS = 3
FIRST_LOOK_KEEPS = 3
LEAST_KEPT = 8
FLOOR_LEADERS = 2
# Rounds of the leaders, launches of other libraries included, by which the time of a round is
# known.
PACE_ROUNDS = 3
LEAST_ROUNDS = 20

Role = Literal["decode", "floor", "peer", "partner"]


class TimedVariant(NamedTuple):
    """A variant's samples at a cell, in microseconds. screen_us: empty where nothing was to be
    chosen. final_us: empty where it was not among the leaders. kernels: what one call of a peer
    launches, where the device can tell.
    """

    variant: Variant
    role: Role
    screen_us: list[float]
    final_us: list[float]
    kernels: tuple[str, ...] | None = None


class CellTiming(NamedTuple):
    """How timing one cell went: the rule that ended it, its seconds, the clocks before and after.

    noise: why its times cannot be believed, see `noise.noise`. interval: half the width of the
    widest interval of a ratio to the choice, over the ratio, where that ended it.
    """

    stop: str
    seconds: float
    before: Clocks
    after: Clocks
    noise: str = ""
    interval: float | None = None

    @property
    def capped(self) -> bool:
        """Whether the device was at its power limit."""
        return "sw_power_cap" in {*self.before.event_reasons, *self.after.event_reasons}

    @property
    def throttled(self) -> str | None:
        """What held the clocks down, see `arch.slowdown`."""
        return slowdown(self.before, self.after)

    @property
    def shifted(self) -> str | None:
        """How a clock moved meanwhile, see `arch.shift`."""
        return shift(self.before, self.after)


class CellResult(NamedTuple):
    """What timing one cell gave."""

    timed: list[TimedVariant]
    timing: CellTiming


class CellTensors(NamedTuple):
    """A set of a cell's tensors: what our variants are called through, and all that is timed on
    them: ours first, then the floors, then peers' entries, with the cycle of each.
    """

    calls: Calls
    everything: list[Callable[[int], Any]]
    cycles: list[int]


class Group(NamedTuple):
    """Neighbours among a cell's calls, of which the best `keep` and `always` have final samples.
    open: whether there is anything to choose; else all have them. cycle: of each call. apart: those
    of them among which is chosen by themselves too: the best `keep` of these have final samples.
    """

    indices: Sequence[int]
    keep: int
    always: list[int]
    open: bool
    cycle: int = 1
    apart: Sequence[int] = ()

    def best(
        self, samples: list[list[float]], least: int, keeps: int = 0, at_least: int = 0
    ) -> list[int]:
        """The `least` fastest, and one in `keeps` where that is more; of those apart as many. Only
        of those with `at_least` samples, if there are any.
        """
        found: list[int] = []
        for some in filter(len, (self.indices, self.apart)):
            found += _best(samples, some, max(least, len(some) // keeps if keeps else 0), at_least)
        return list(dict.fromkeys(found))


def apart(decode: Sequence[Variant]) -> list[int]:
    """The indices of the variants that do not use dependent launch, where others do: calls that do
    not allow it choose among them.
    """
    found = [i for i, v in enumerate(decode) if not dependent_launch.uses(v.knobs)]
    return found if len(found) < len(decode) else []


def time_cell(
    session: Session,
    problem: Problem,
    decode: Sequence[Variant],
    floors: Sequence[Variant],
    search: Search,
    always_final: Collection[str] = (),
    entries: Sequence[Named] = (),
    seed: int = 0,
    narrow: bool = False,
) -> CellResult:
    """Times a cell: all variants in quick mirrored rounds, the better third again, then the leaders
    on fresh samples.

    always_final: ids of `decode` that are always among the leaders: the default rule's choice,
        which a tuned one must beat, what is judged here, such as the table's choice at a held-out
        cell, and all of a bench's; where it is all of them there is no screen. entries: of peers,
        timed with the leaders, in whole cycles. seed: of the tensors. narrow: rounds go on until
        the ratios to the first of `decode`, the choice, are known to `search.precision`.
        MeasurementError for times that cannot be true.
    """
    before = settled(session.gpu)
    # Nothing is timed: the caller tries again, or gives the cell to another device.
    if throttled(before):
        return CellResult([], CellTiming("throttled", 0.0, before, before))
    began = time.perf_counter()
    session.load(problem.contract, [*decode, *floors])

    def lay_out() -> CellTensors:
        # A convolution's inputs are packed as they are.
        packed = problem.contract.conv == "none" and probe.packed(entries)
        made = session.calls(problem, "decode", decode, packed=packed, seed=seed)
        # The decode role first: under `chain` the floors are timed among its layers.
        floor_calls = session.calls(problem, "floor", floors, seed=seed).calls if floors else []
        # On a GPU; a chain is one graph as it is.
        alone = session.timer.policy.timer in ("cupti", "events")
        recorder = graphs.GraphRecorder() if alone and any(map(probe.several, entries)) else None
        bound = probe.bind(entries, made, recorder)
        cycles = [made.cycle] * len(decode) + [1] * len(floors) + bound.cycles
        return CellTensors(made, [*made.calls, *floor_calls, *bound.calls], cycles)

    sets = [lay_out()]
    n, m = len(decode), len(decode) + len(floors)
    always = [i for i in range(n) if decode[i].id in always_final]
    # A bench chooses nothing, so there is nothing to screen.
    screens = len(always) < n
    groups = [Group(range(n), search.keep, always, screens, sets[0].calls.cycle, apart(decode))]
    # Each floor is tuned by itself.
    for name in FLOORS:
        mine = [i for i, v in enumerate(floors, n) if floor_name(v) == name]
        groups.append(Group(mine, FLOOR_LEADERS, [], screens or len(mine) > FLOOR_LEADERS))
    screen = _screened(session.timer, sets[0].everything, groups, search)
    full = _in_cycles(search.screen_rounds, groups)
    leaders = [i for group in groups for i in _leaders(group, screen, full // group.cycle)]
    leaders += range(m, m + len(entries))
    rounds, stop = _rounds(session, sets[0], leaders, search, began)

    def more() -> list[list[float]]:
        del sets[1:]
        found = final(session, problem, sets, lay_out, leaders, rounds, search.sets)
        return [_whole_cycles(us, sets[-1].cycles[i]) for i, us in zip(leaders, found, strict=True)]

    finals, interval = more(), None
    if narrow and search.precision and 0 in leaders[:n]:
        ends = began + search.max_cell_seconds
        finals, interval, said = _narrowed(finals, leaders.index(0), search.precision, more, ends)
        stop = f"{stop}; {said}"
    samples = dict(zip(leaders, finals, strict=True))
    # Right after the last sample, before anything that lets the device idle.
    after = clocks(session.gpu)
    # After the timing: CUPTI's recorder must not run while a graph or an event timer does.
    launched = [session.launched(sets[-1].everything[m + i]) for i in range(len(entries))]
    what: list[tuple[Variant, Role]] = [
        *((v, "decode") for v in decode),
        *((v, "floor") for v in floors),
        *((probe.recorded(entry, problem), probe.role(entry)) for entry in entries),
    ]
    kernels = [*[None] * m, *launched]
    timed = [
        TimedVariant(v, role, screen[i], samples.get(i, []), kernels[i])
        for i, (v, role) in enumerate(what)
        if screen[i] or i in samples
    ]
    seconds = time.perf_counter() - began
    return CellResult(timed, CellTiming(stop, seconds, before, after, interval=interval))


def _narrowed(
    finals: list[list[float]],
    choice: int,
    precision: float,
    more: Callable[[], list[list[float]]],
    ends: float,
) -> tuple[list[list[float]], float | None, str]:
    """Samples with as many more as narrow the intervals of all ratios to the choice's, or fit
    before `ends`; the widest interval, and what ended it. more: samples of another turn of rounds.
    """
    turn, each = 0.0, len(finals[choice])
    while True:
        widest = widest_interval(finals[choice], finals[:choice] + finals[choice + 1 :])
        rounds = len(finals[choice])
        if widest is None:
            return finals, None, f"{rounds} samples are too few for intervals"
        if widest <= precision:
            return finals, widest, f"intervals within {precision:.1%} after {rounds} samples"
        began = time.perf_counter()
        # a turn that would end beyond the cell's time is not begun
        if began + turn >= ends:
            said = f"intervals within {widest:.1%} when the cell's time ended"
            return finals, widest, f"{said}, after {rounds} samples"
        for _ in range(_turns(rounds, each, widest / precision)):
            finals = [mine + its for mine, its in zip(finals, more(), strict=True)]
            now = time.perf_counter()
            turn, began = now - began, now
            if now + turn >= ends:
                break


def _turns(samples: int, each: int, over: float) -> int:
    """How many turns of `each` samples to take before intervals, `over` times too wide with
    `samples`, are worked out again, while a GPU waits. They narrow with the root of the samples;
    four fifths of what that asks for, since an interval is itself uncertain, and at most as many as
    there are.
    """
    return max(1, int(samples * min(0.8 * (over**2 - 1), 1.0) / each))


def _screened(
    timer: Timer, calls: Sequence[Callable[[int], Any]], groups: Sequence[Group], search: Search
) -> list[list[float]]:
    """The screen's samples by call, means of whole cycles; none of what is not to be chosen
    among.
    """
    screen: list[list[float]] = [[] for _ in calls]
    cycles = {i: group.cycle for group in groups for i in group.indices}

    def look(at: Sequence[int], rounds: int, warmup: int) -> None:
        if at and rounds > 0:
            samples = timer.measure([calls[i] for i in at], rounds, warmup=warmup)
            for i, more in zip(at, samples, strict=True):
                screen[i] += _whole_cycles(more, cycles[i])

    wanted = [group for group in groups if group.open]
    first = min(search.screen_rounds, max(FIRST_LOOK_ROUNDS, -(-search.screen_rounds // 2)))
    every, first = (_in_cycles(rounds, groups) for rounds in (search.screen_rounds, first))
    look([i for group in wanted for i in group.indices], first, 1)
    better: list[int] = []
    for group in wanted:
        least = LEAST_KEPT if group is groups[0] else FLOOR_LEADERS
        # The worse two thirds are out after half the samples: a screen's time is mostly theirs.
        better += group.best(screen, max(least, group.keep), keeps=FIRST_LOOK_KEEPS)
    look(better, every - first, 0)
    return screen


def _in_cycles(rounds: int, groups: Sequence[Group]) -> int:
    """Rounds, and so many more that they end whole cycles."""
    return rounds + -rounds % math.lcm(*(group.cycle for group in groups))


def _leaders(group: Group, screen: list[list[float]], full: int) -> list[int]:
    """Those of a group that have final samples. full: the samples of a whole screen."""
    if not group.open:
        return list(group.indices)
    best = group.best(screen, group.keep, at_least=full)
    return best + [i for i in group.always if i not in best]


def _best(
    samples: list[list[float]], among: Sequence[int], count: int, at_least: int = 0
) -> list[int]:
    """The `count` fastest by median, of those with enough samples."""
    # A variant with half the samples may have been lucky; it leads only where all have half.
    enough = [i for i in among if len(samples[i]) >= at_least] or list(among)
    return sorted(enough, key=lambda i: (summary(samples[i]).median_us, i))[:count]


def _rounds(
    session: Session, tensors: CellTensors, leaders: Sequence[int], search: Search, began: float
) -> tuple[int, str]:
    """How many final rounds fit into the cell's time, and the rule that ends it: whole cycles on
    each set of tensors.
    """
    calls = [tensors.everything[i] for i in leaders]
    # Untimed: peers' first calls compile, and would make a round look longer than it is.
    session.timer.measure(calls, 1)
    session.synchronize()
    look = time.perf_counter()
    session.timer.measure(calls, PACE_ROUNDS, warmup=0)
    one_round = (time.perf_counter() - look) / PACE_ROUNDS
    fit = int((search.max_cell_seconds - (time.perf_counter() - began)) / max(one_round, 1e-9))
    rounds, stop = search.final_rounds, f"{search.final_rounds} final rounds"
    if fit < rounds:
        # Fewer than these decide nothing; then the cell takes longer than it was given.
        rounds = max(min(rounds, LEAST_ROUNDS), fit)
        stop = f"max_cell_seconds={search.max_cell_seconds:g}"
    cycle = math.lcm(*(tensors.cycles[i] for i in leaders))
    if more := -rounds % (cycle * (search.sets if cycle > 1 else 1)):
        rounds, stop = rounds + more, f"{stop}, and {more} to end whole cycles"
    return rounds, stop


def final(
    session: Session,
    problem: Problem,
    sets: list[CellTensors],
    lay_out: Callable[[], CellTensors],
    among: Sequence[int],
    rounds: int,
    placements: int,
) -> list[list[float]]:
    """`rounds` samples of each of the calls `among`, interleaved, shared out among so many sets of
    tensors, each elsewhere in memory.

    sets: the first one; its states are put back before. The earlier ones are held while later ones
    are made, as long as there is room for that. MeasurementError where a call left what is not a
    number.
    """
    found: list[list[float]] = [[] for _ in among]
    # The screen has updated the states many times; final samples begin with states as they were
    # made.
    sets[0].calls.restore()
    for place, count in enumerate(_shares(rounds, placements)):
        if place:
            needed = (len(sets) + 1) * 2 * sol.bytes_moved(problem)
            if session.chained is not None or needed > session.device.memory_bytes // 4:
                # Freed first where two sets do not fit; the allocator may then give the same place
                # again, which is the lesser evil.
                sets.clear()
            sets.append(lay_out())
        everything = sets[-1].everything
        samples = session.timer.measure([everything[i] for i in among], count)
        for mine, more in zip(found, samples, strict=True):
            mine += more
        # The callables hold the tensors: without this, sets that were cleared would live on.
        del everything
        session.synchronize()
        if not sets[-1].calls.finite():
            raise MeasurementError(
                f"{problem.key()}: the output is not finite after {rounds} rounds: a variant"
                " that passed its check broke"
            )
    return found


def _shares(rounds: int, parts: int) -> list[int]:
    """Rounds in as many parts, or fewer where there are fewer rounds, equal to one."""
    parts = min(rounds, parts)
    return [rounds * (i + 1) // parts - rounds * i // parts for i in range(parts)]


def _whole_cycles(samples: Sequence[float], cycle: int) -> list[float]:
    """The means of `cycle` samples in a row: of whole cycles, wherever they begin."""
    if cycle == 1:
        return list(samples)
    return [math.fsum(samples[i : i + cycle]) / cycle for i in range(0, len(samples), cycle)]
