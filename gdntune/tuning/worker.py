"""What runs in a timing process: checks variants and times the variants of a cell on one device.
Holds the only CUDA context of a sweep.

The process may be killed at any time by its parent (an illegal access, a hang); it writes nothing
to disk.
"""

import dataclasses
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from gdntune import kernels, sol
from gdntune.checking.check import Checker
from gdntune.device.arch import (
    Clocks,
    Device,
    clocks,
    detect,
    settled,
    shift,
    slowdown,
    software,
    throttled,
)
from gdntune.errors import MeasurementError, UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.objects.processes import limit_memory
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract, Problem
from gdntune.timing import TURNS, Policy, Timer, make_timer, measured_peaks, summary
from gdntune.tuning.config import Search

if TYPE_CHECKING:
    from gdntune.tuning.chain import Chained

# A screen in two looks: all variants half as often as the config says, but so often at least, then
# the better third as often as it says.
FIRST_LOOK_ROUNDS = 3
FIRST_LOOK_KEEPS = 3
LEAST_KEPT = 8
FLOOR_LEADERS = 2


class Timed(NamedTuple):
    """A variant's samples at a cell, in microseconds; `samples_us` of `final` is empty where it was
    not among the leaders.
    """

    variant: Variant
    role: Literal["decode", "floor"]
    screen_us: list[float]
    final_us: list[float]


class Took(NamedTuple):
    """How timing one cell went: the rule that ended it, its seconds, the clocks before and after."""

    stop: str
    seconds: float
    before: Clocks
    after: Clocks

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

    timed: list[Timed]
    took: Took


class Calls(NamedTuple):
    """What a cell's variants are called through: each callable takes the turn, or under `chain` the
    layer.

    cases: what they share, one case for each turn of a walk through a pool, or for each layer of a
        chain; none for the floor.
    kept: the state of the first, as it was made, and as that of all others was.
    """

    calls: list[Callable[[int], Any]]
    cases: list[Any]
    kept: Any

    @property
    def case(self) -> Any:
        """The first case, or None."""
        return self.cases[0] if self.cases else None

    def _each(self, name: str) -> list[Any]:
        """The cases' tensors of a name, those that share an address once."""
        found = {getattr(case, name).data_ptr(): getattr(case, name) for case in self.cases}
        return list(found.values())

    def restore(self) -> None:
        """Puts the states back to what they were before anything was timed."""
        for state in self._each("state"):
            state.copy_(self.kept)

    def finite(self) -> bool:
        """Whether the outputs of the last call, and the states, are numbers."""
        import torch

        # a sum, since isfinite() of a state needs as much memory again
        sums = [state.sum(dtype=torch.float32) for state in self._each("state")]
        return all(bool(x.isfinite().all()) for x in (*sums, *self._each("output")))


class LaidOut(NamedTuple):
    """A set of a cell's tensors: what our variants are called through, and all that is timed on
    them, theirs first.
    """

    calls: Calls
    everything: list[Callable[[int], Any]]


def _call(
    function: Callable[..., Any], arguments: list[tuple[Any, ...]], n: int
) -> Callable[[int], Any]:
    if n == 1:
        only = arguments[0]
        return lambda _: function(*only)
    return lambda r: function(*arguments[r % n])


class Session:
    """One device's checker, timer and loaded functions."""

    def __init__(self, device: Device, index: int, store: Store, policy: Policy):
        self.device, self.index, self.store = device, index, store
        if device.kind == "cuda":
            import torch

            torch.cuda.set_device(index)
        self.place = f"cuda:{index}" if device.kind == "cuda" else "cpu"
        reader = self._reader() if device.kind == "cuda" else None
        self.chained: Chained | None = None
        if policy.l2 == "chain":
            from gdntune.tuning.chain import make_chain_timer

            self.timer: Timer = (chained := make_chain_timer(device, policy, reader))
            self.chained = chained
        else:
            self.timer = make_timer(device, policy, reader)
        self._checkers: dict[Contract, Checker] = {}
        self._overheads_us: dict[int, float] = {}

    def _reader(self) -> Callable[[Any], Any]:
        """The kernel that reads the flush buffer: the floor's read form under a name of its own."""
        import torch

        contract, variant = kernels.flush()
        function = self.function(contract, variant, label="flush")
        sink = torch.zeros(1, device=self.place)
        views: dict[
            int, tuple[Any, Any]
        ] = {}  # no tensors of their own: a graph may be captured at the first call

        def read(buffer: Any) -> None:
            view = views.get(buffer.data_ptr())
            if view is None:
                rows = buffer.view(torch.float32).view(-1, variant.knobs["tile"])
                # it takes all rows in order: of the slots only their number is looked at
                view = views[buffer.data_ptr()] = rows, buffer.view(torch.int32)[: len(rows)]
            function(*view, None, 1.0, sink)

        return read

    def function(
        self, contract: Contract, variant: Variant, label: str | None = None
    ) -> Callable[..., Any]:
        """A variant's compiled function."""
        spec = object_spec(kernels.get(variant.kernel), contract, variant, self.device, label=label)
        return self.store.load([spec])[spec.key]

    def load(self, contract: Contract, variants: Sequence[Variant]) -> None:
        """Loads many functions at once, which links those of the store into one library."""
        self.store.load(
            object_spec(kernels.get(v.kernel), contract, v, self.device) for v in variants
        )

    def synchronize(self) -> None:
        """Waits for the device; an illegal access of an earlier launch is raised here."""
        if self.device.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    def check(self, contract: Contract, variant: Variant) -> tuple[bool, str, float | None]:
        """Whether a variant agrees with the fp64 reference, the worst coordinate where it does not,
        and its error.
        """
        checker = self._checkers.get(contract)
        if checker is None:
            self._checkers.clear()
            checker = self._checkers[contract] = Checker(contract, self.place)
        verdict = checker.check(self.function(contract, variant))
        self.synchronize()
        return verdict.ok, verdict.worst, verdict.error

    def calls(self, problem: Problem, role: str, variants: Sequence[Variant]) -> "Calls":
        """Callables of a cell's variants over one shared set of tensors. Under `chain` the decode
        role's come first.
        """
        turns = 1
        if self.chained is not None:
            from gdntune.tuning.chain import layers_of

            turns = layers_of(problem, self.device)
        elif self.timer.policy.l2 == "rotate":
            turns = self._turns(problem)
        cases = [] if role == "floor" else self._cases(problem, turns)
        kept = cases[0].state.clone() if cases else None
        arguments = [c.arguments() for c in cases] or _floor_arguments(problem, turns, self.place)
        functions = [self.function(problem.contract, v) for v in variants]
        calls: list[Callable[[int], Any]] = [_call(f, arguments, turns) for f in functions]
        return Calls(calls, cases, kept)

    def _cases(self, problem: Problem, turns: int) -> list[Any]:
        """A cell's case; under `rotate` one a turn, of one pool; under `chain` one a layer, in what
        the timer times.
        """
        from gdntune.checking.cases import make_case

        if self.chained is not None:
            from gdntune.tuning.chain import Chain

            self.chained.chain = None  # the last cell's pools go before this one's are made
            self.chained.chain = chain = Chain(problem, self.place, turns)
            return chain.cases
        if turns == 1:
            return [make_case(problem, self.place)]
        return _rotated(make_case(problem, self.place, slots=problem.B * turns))

    def _turns(self, problem: Problem) -> int:
        """Turns of a walk through a pool so large that what a turn touched has left L2 before it
        comes again: a power of two.
        """
        if not problem.contract.reads_index:
            raise UnsupportedProblem(
                f"l2='rotate' with {problem.contract.key()}: it walks through the slots of a pool"
                " by initial_state_indices; accepted are contracts with pool=True and no"
                " ssm_state_indices, or another L2 policy"
            )
        least = -(-4 * self.device.l2_bytes // sol.state_bytes(problem))
        return min(TURNS, max(2, 1 << (least - 1).bit_length()))

    def time_cell(
        self,
        problem: Problem,
        decode: Sequence[Variant],
        floor: Sequence[Variant],
        search: Search,
        sure: Collection[str] = (),
    ) -> CellResult:
        """Times a cell: all variants in quick mirrored rounds, the better third again, then the
        leaders on fresh samples.

        sure: ids of `decode` that are always among the leaders: the default rule's choice, which a
            tuned one must beat, and those
        that are judged here, such as the table's at a held-out cell.
        """
        before = settled(self.gpu)
        if throttled(before):
            return CellResult([], Took("throttled", 0.0, before, before))
        start = time.perf_counter()
        self.load(problem.contract, [*decode, *floor])

        def lay_out() -> LaidOut:
            """A cell's tensors, and the callables of all variants on them, the decode role's first."""
            made = self.calls(problem, "decode", decode)
            return LaidOut(made, [*made.calls, *self.calls(problem, "floor", floor).calls])

        sets = [lay_out()]
        everything = sets[0].everything
        first = min(search.screen_rounds, max(FIRST_LOOK_ROUNDS, -(-search.screen_rounds // 2)))
        screen: list[list[float]] = self.timer.measure(everything, first)
        n = len(decode)
        more = search.screen_rounds - first
        if more > 0:
            kept = _best(screen, range(n), max(LEAST_KEPT, search.keep, n // FIRST_LOOK_KEEPS))
            kept += _best(
                screen,
                range(n, len(everything)),
                max(FLOOR_LEADERS, len(floor) // FIRST_LOOK_KEEPS),
            )
            for i, samples in zip(
                kept, self.timer.measure([everything[i] for i in kept], more, warmup=0), strict=True
            ):
                screen[i] += samples
        leaders = _best(screen, range(n), search.keep, at_least=search.screen_rounds)
        leaders += [i for i in range(n) if decode[i].id in sure and i not in leaders]
        leaders += _best(
            screen, range(n, len(everything)), FLOOR_LEADERS, at_least=search.screen_rounds
        )
        rounds, stop = self._rounds(screen, leaders, search, time.perf_counter() - start)
        del everything
        final = dict(
            zip(
                leaders,
                self.final(problem, sets, lay_out, leaders, rounds, search.placements),
                strict=True,
            )
        )
        after = clocks(self.gpu)
        timed = [
            Timed(v, "decode" if i < n else "floor", screen[i], final.get(i, []))
            for i, v in enumerate([*decode, *floor])
        ]
        return CellResult(timed, Took(stop, time.perf_counter() - start, before, after))

    def final(
        self,
        problem: Problem,
        sets: list[LaidOut],
        lay_out: Callable[[], LaidOut],
        among: Sequence[int],
        rounds: int,
        placements: int,
    ) -> list[list[float]]:
        """`rounds` samples of each of the calls `among`, interleaved, shared out among so many sets
        of tensors, each elsewhere in memory.

        sets: the first one; its states are put back before. The earlier ones are held while later
            ones are made, as long as there is
        room for that. MeasurementError where a call left what is not a number.
        """
        found: list[list[float]] = [[] for _ in among]
        sets[0].calls.restore()
        for place, count in enumerate(_shares(rounds, placements)):
            if place:
                needed = (len(sets) + 1) * 2 * sol.bytes_moved(problem)
                if self.chained is not None or needed > self.device.memory_bytes // 4:
                    sets.clear()
                sets.append(lay_out())
            everything = sets[-1].everything
            for samples, more in zip(
                found, self.timer.measure([everything[i] for i in among], count), strict=True
            ):
                samples += more
            del everything
            self.synchronize()
            if not sets[-1].calls.finite():
                raise MeasurementError(
                    f"{problem.key()}: the output is not finite after {rounds} rounds: a variant"
                    " that passed its check broke"
                )
        return found

    def _rounds(
        self, screen: list[list[float]], leaders: list[int], search: Search, spent: float
    ) -> tuple[int, str]:
        """How many final rounds fit into the cell's time, and the stop rule that this is."""
        calls = self.timer.calls_a_sample
        one_round = (
            sum(calls * summary(screen[i]).median_us + self.overhead_us for i in leaders) * 1e-6
        )
        fit = int((search.max_cell_seconds - spent) / max(one_round, 1e-9))
        least = min(search.final_rounds, 20)
        if fit >= search.final_rounds:
            return search.final_rounds, f"{search.final_rounds} final rounds"
        return max(least, fit), f"max_cell_seconds={search.max_cell_seconds:g}"

    @property
    def overhead_us(self) -> float:
        """What a sample costs beside the calls in it: the flush or the chain, and the launches;
        measured once for each number of calls.
        """
        calls = self.timer.calls_a_sample
        if calls not in self._overheads_us:
            self._overheads_us[calls] = self.timer.pace_us(self._empty_call())
        return self._overheads_us[calls]

    def _empty_call(self) -> Callable[[int], Any]:
        if self.device.kind == "cpu":
            return lambda _: None
        import torch

        x = torch.zeros(1, device=self.place)
        return lambda _: x.add_(1)

    @property
    def gpu(self) -> int | None:
        """The device as `arch.clocks` takes it: torch's number of a GPU, None of a CPU."""
        return self.index if self.device.kind == "cuda" else None

    def peaks(self) -> dict[str, float]:
        """The DRAM's bandwidth by source, GB/s."""
        settled(self.gpu)
        return measured_peaks(self.device, self.index)


def _shares(rounds: int, parts: int) -> list[int]:
    """Rounds in as many parts, or fewer where there are fewer rounds, equal to one."""
    parts = min(rounds, parts)
    return [rounds * (i + 1) // parts - rounds * i // parts for i in range(parts)]


def _best(
    samples: list[list[float]], among: Sequence[int], count: int, at_least: int = 0
) -> list[int]:
    """The `count` fastest by median, of those with enough samples."""
    enough = [i for i in among if len(samples[i]) >= at_least] or list(among)
    return sorted(enough, key=lambda i: (summary(samples[i]).median_us, i))[:count]


def _rotated(case: Any) -> list[Any]:
    """The case with the slots of each turn of a walk through its pool; indices are tensors of their
    own, thus aligned.
    """
    import torch

    order = torch.randperm(case.state.shape[0], device=case.state.device, dtype=torch.int32)
    indices = [index.clone() for index in order.split(case.problem.B)]
    return [
        dataclasses.replace(
            case, read_index=index, write_index=None if case.write_index is None else index
        )
        for index in indices
    ]


def _floor_arguments(problem: Problem, turns: int, place: str) -> list[tuple[Any, ...]]:
    """A floor kernel's arguments for each turn, over states of their own. Its factor is 1: it
    writes back what it read.
    """
    from gdntune.checking.cases import floor_case

    whole = msgspec.structs.replace(problem, B=problem.B * turns)
    state, slots, buffer, factor, sink = floor_case(whole, sol.floor_form(problem.contract), place)
    buffers = [None] * turns if buffer is None else buffer.split(problem.B)
    # a turn's slots are those of its own part of the states, shuffled
    named = [slots[slots // problem.B == turn] % problem.B for turn in range(turns)]
    return [
        (part, *x, factor, sink)
        for part, *x in zip(state.split(problem.B), named, buffers, strict=True)
    ]


# One session a process, made by its initializer.
_SESSION: list[Session] = []


class Start(msgspec.Struct, frozen=True):
    """What a timing process is started with."""

    device: Device
    index: int
    root: str
    bundles: tuple[str, ...]
    policy: Policy


def current(start: Start) -> Session:
    """This process's session, made at the first task: an initializer that fails would be retried
    for ever.
    """
    if not _SESSION:
        from pathlib import Path

        if start.device.kind == "cpu":
            limit_memory()
        store = Store(Path(start.root), [Path(b) for b in start.bundles])
        _SESSION.append(Session(start.device, start.index, store, start.policy))
    return _SESSION[0]


def begin_task(start: Start) -> None:
    """Makes this process's session, before its first task."""
    current(start)


def resolve_task(start: Start, measure: bool) -> tuple[Policy, str | None, dict[str, float]]:
    """The policy as it is in force, its note, and, where asked for, the measured peaks."""
    session = current(start)
    return session.timer.policy, session.timer.note, session.peaks() if measure else {}


def identity(device: Device) -> dict[str, str]:
    """What must be equal for two processes to share a sweep, by name: device, software, kernels'
    code.
    """
    return {
        "device": (
            f"{device.name}, {device.arch}, {device.sm_count} SMs, {device.l2_bytes} bytes of L2"
        ),
        **software(),
        **{f"code of {name}": code for name, code in kernels.fingerprints(device.kind).items()},
    }


def identity_task(start: Start) -> dict[str, str]:
    """The identity of this process."""
    return identity(detect(start.device.kind, start.index))


def check_task(
    start: Start, contract: Contract, variants: list[Variant]
) -> list[tuple[bool, str, float | None, float]]:
    """Checks variants one after the other: ok, worst coordinate, error, seconds."""
    session = current(start)
    session.load(contract, variants)
    results = []
    for v in variants:
        began = time.perf_counter()
        results.append((*session.check(contract, v), time.perf_counter() - began))
    return results


def time_task(
    start: Start,
    problem: Problem,
    decode: list[Variant],
    floor: list[Variant],
    search: Search,
    sure: Collection[str] = (),
) -> CellResult:
    """Times one cell, see `Session.time_cell`."""
    try:
        return current(start).time_cell(problem, decode, floor, search, sure)
    except Exception as e:
        # Whoever sends the error on holds its traceback, and with it this cell's tensors, while the
        # next cell makes its own.
        traceback.clear_frames(e.__traceback__)
        raise
