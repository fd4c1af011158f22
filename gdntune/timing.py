"""Times callables: CUPTI's kernel records, CUDA events, CUDA graphs or the CPU's clock, under a
stated L2. Knows no kernels.

A time of `cupti` is the device's first start to last end; of `events`, that and the launch gaps
around it, in steps of 0.5 us; of `graph`, what the call adds to a CUDA graph: the gap between two
kernels, and what the next one waits since the call left modified lines in L2, are in it; of `cpu`,
the host's clock around the call.
"""

import bisect
import contextlib
import functools
import gc
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast, get_args

import msgspec

from gdntune.device import arch, cupti, graphs
from gdntune.device.arch import Device
from gdntune.errors import MeasurementError, ToolMissing, UnsupportedProblem, listed

TimerName = Literal["auto", "cupti", "events", "cpu", "graph"]
L2 = Literal["cold-clean", "cold-dirty", "rotate", "warm", "chain"]
# Its argument is the turn, how many timed calls came before, so that `rotate` can walk slots; under
# `chain` the layer.
Call = Callable[[int], Any]
# Reads a whole tensor in one kernel whose name contains cupti.FLUSH.
Reader = Callable[[Any], Any]

TIE_SHARE = 0.01
# CUPTI's clock on an H100 ticks every 32 ns: 1% of 3 us.
CUPTI_STEP_US = 0.032
# Calls between two synchronisations: bounds CUPTI's buffers and the events kept.
BATCH = 1024
MARKER_BYTES = 16 << 10
# Calls in a graph: their flushes, 45 us each on an H100, differ by half a microsecond, the mean of
# 10 by a sixth of one.
GRAPH_CALLS = 10
# Turns of a walk under `rotate`, at most; a graph holds that many calls, so that each of its
# replays walks through the whole pool.
TURNS = 64


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How times are taken; part of every key, since the winners differ.

    l2, before each call: `cold-clean` reads a buffer of at least twice L2, `cold-dirty` zeroes one,
    `rotate` leaves it to the call to walk through slots, `warm` does nothing. `chain` is what a
    call adds to a chain of layers, each with what a model does around it; on CUDA the chain is a
    CUDA graph, so its timer is `graph`. On the CPU it is the clock around the call in such a chain.
    """

    timer: TimerName = "auto"
    l2: L2 = "cold-clean"

    def resolve(self, device: Device) -> tuple["Policy", str | None]:
        """This policy with `auto` replaced, and a note where the replacement is second best.

        Raises UnsupportedProblem for a timer that the device cannot have, ToolMissing where CUPTI
        is asked for and does not work.
        """
        if self.l2 not in get_args(L2):
            raise UnsupportedProblem(f"l2={self.l2!r}: expected one of {listed(get_args(L2))}")
        accepted: tuple[TimerName, ...] = (
            ("cpu",) if device.kind == "cpu" else ("cupti", "events", "graph")
        )
        under = ""
        if self.l2 == "chain" and device.kind == "cuda":
            accepted, under = ("graph",), " under l2='chain'"
        if self.timer not in ("auto", *accepted):
            raise UnsupportedProblem(
                f"timer={self.timer!r} on {device.kind} ({device.name}){under}: expected one of"
                f" auto, {listed(accepted)}"
            )
        if len(accepted) == 1 or self.timer in ("events", "graph"):
            return (
                msgspec.structs.replace(
                    self, timer=accepted[0] if self.timer == "auto" else self.timer
                ),
                None,
            )
        fault = cupti.fault()
        if fault is None:
            return msgspec.structs.replace(self, timer="cupti"), None
        if self.timer == "cupti":
            raise ToolMissing(f"{fault}, or use --timer events")
        return (
            msgspec.structs.replace(self, timer="events"),
            f"timed by CUDA events, launch gaps included: {fault}",
        )


def mirrored(n: int, rounds: int) -> Iterator[tuple[int, int]]:
    """(call, round) of n calls: 0..n-1 in even rounds, n-1..0 in odd ones, so that a steady drift
    is alike for all.
    """
    for r in range(rounds):
        for i in range(n):
            # A GPU that warms up slows steadily: in one order alone, the last call of each round
            # would look slower than the first.
            yield (i if r % 2 == 0 else n - 1 - i), r


class Timer:
    """Times calls, interleaved. `policy` is resolved; `note` says where it is second best. Made by
    `make_timer`.
    """

    def __init__(
        self, policy: Policy, before: Callable[[], Any] | None, note: str | None = None
    ) -> None:
        self.policy = policy
        self.note = note
        self._before = before or _nothing

    @property
    def calls_a_sample(self) -> int:
        """The calls whose mean a sample is."""
        return 1

    def measure(self, calls: Sequence[Call], rounds: int, warmup: int = 1) -> list[list[float]]:
        """Microseconds, [call][round]. Each call is first run `warmup` times untimed, as turn or
        layer 0.

        The order is mirrored every other round and the L2 policy is applied before each timed call.
        The calls run on the current stream and bring their own tensors; what they raise is raised.
        MeasurementError for a time below 0, which is a difference of two within their noise.
        """
        if rounds < 1:
            raise UnsupportedProblem(f"rounds={rounds}: expected an integer from 1")
        for call in calls:
            for _ in range(warmup):
                call(0)
        order = list(mirrored(len(calls), rounds))
        samples = [[math.nan] * rounds for _ in calls]
        # All calls are warm by now: what runs first loads its code, and a capture may load none.
        with _no_collection(), self._ready(calls):
            for first in range(0, len(order), BATCH):
                batch = order[first : first + BATCH]
                for (i, r), us in zip(
                    batch, self._times(calls, [i for i, _ in batch], first), strict=True
                ):
                    # Only a difference can be negative (`graph`); cut off at 0 it would win every
                    # comparison.
                    if us < 0:
                        raise MeasurementError(
                            f"call {i} of {len(calls)} took {us:.3f} us in round {r}, by timer"
                            f" {self.policy.timer} under {self.policy.l2}: less than what was"
                            " measured without it varies by; time it again, or a larger problem"
                        )
                    samples[i][r] = us
        return samples

    def pace_us(self, call: Call, rounds: int = 20) -> float:
        """Microseconds of the host's clock that a sample of this call takes, what the L2 policy
        does included.
        """
        call(0)
        with self._ready([call]):
            # What a budget of seconds is planned by, so the host's clock counts here, flushes and
            # all.
            start = time.perf_counter()
            self._times([call], [0] * rounds, 0)
            return (time.perf_counter() - start) * 1e6 / rounds

    def _ready(self, calls: Sequence[Call]) -> contextlib.AbstractContextManager[None]:
        """Around all timing of these calls."""
        return contextlib.nullcontext()

    def _times(self, calls: Sequence[Call], order: Sequence[int], first: int) -> list[float]:
        """Microseconds of the calls that `order` names; the first of them is turn `first`."""
        raise NotImplementedError


class CuptiTimer(Timer):
    """First kernel's start to last kernel's end, by CUPTI's records; `before` ends with `markers`
    flush kernels.
    """

    def __init__(
        self,
        policy: Policy,
        before: Callable[[], Any],
        source: cupti.RecordSource,
        synchronize: Callable[[], Any],
        markers: int = 1,
    ) -> None:
        super().__init__(policy, before)
        self._source, self._synchronize, self._markers = source, synchronize, markers

    def _times(self, calls: Sequence[Call], order: Sequence[int], first: int) -> list[float]:
        before = self._before
        self._synchronize()
        self._source.start()
        try:
            for turn, i in enumerate(order, first):
                before()
                calls[i](turn)
            self._synchronize()
        finally:
            # Also where a call raised: a recording that stays open slows all that follows.
            records = self._source.stop()
        return cupti.segments_us(records, len(order), self._markers)


class EventTimer(Timer):
    """CUDA events right before and after the call: its launch gaps are included."""

    def __init__(
        self, policy: Policy, before: Callable[[], Any] | None, note: str | None = None
    ) -> None:
        super().__init__(policy, before, note)
        self._events: list[tuple[Any, Any]] = []

    def _times(self, calls: Sequence[Call], order: Sequence[int], first: int) -> list[float]:
        import torch

        before = self._before
        while len(self._events) < len(order):
            self._events.append(
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            )
            for event in self._events[-1]:
                # torch makes an event at its first record: not between a call and its end
                event.record()
        events = self._events[: len(order)]
        torch.cuda.synchronize()
        for turn, (i, (start, end)) in enumerate(zip(order, events, strict=True), first):
            before()
            start.record()
            calls[i](turn)
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]


class CpuTimer(Timer):
    """The host's clock around the call."""

    def _times(self, calls: Sequence[Call], order: Sequence[int], first: int) -> list[float]:
        before, clock = self._before, time.perf_counter_ns
        times = [0.0] * len(order)
        for position, i in enumerate(order):
            call, turn = calls[i], first + position
            before()
            start = clock()
            call(turn)
            times[position] = (clock() - start) / 1e3
        return times


class GraphTimer(Timer):
    """A graph of some calls, each after the L2 policy's work, less a graph of that work alone, over
    the calls.

    What a call costs those after it is in its time: under cold-clean and cold-dirty the flush that
    follows waits until the lines that the call modified are written back.
    """

    def __init__(
        self,
        policy: Policy,
        before: Callable[[], Any] | None,
        recorder: graphs.Recorder,
        calls: int = GRAPH_CALLS,
        note: str | None = None,
    ) -> None:
        super().__init__(policy, before, note)
        self._calls, self._difference = calls, graphs.Difference(recorder)

    @property
    def calls_a_sample(self) -> int:
        return self._calls

    def _body(self, call: Call | None) -> None:
        """What a graph holds; None: without the calls."""
        for turn in range(self._calls):
            self._before()
            if call is not None:
                call(turn)

    @contextlib.contextmanager
    def _ready(self, calls: Sequence[Call]) -> Iterator[None]:
        base, *works = (functools.partial(self._body, call) for call in (None, *calls))
        # A capture may load no kernel; the calls have run, the base has not.
        base()
        with self._difference.between(base, works):
            yield

    def _times(self, calls: Sequence[Call], order: Sequence[int], first: int) -> list[float]:
        return [us / self.calls_a_sample for us in self._difference.times_us(order)]


def _nothing() -> None:
    pass


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    # A collection between two clock reads is a millisecond in some call's sample.
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def flush_bytes(device: Device, l2: L2) -> int:
    """The flush buffer's bytes: at least twice the last-level cache, four times where it is zeroed;
    0: no buffer.

    On CUDA at least the 128 and 256 MiB that an H100's published figures were taken with, so that
    they compare. Whole MiB, so that a reader can cut the buffer into tiles.
    """
    if l2 not in ("cold-clean", "cold-dirty"):
        return 0
    times, least = (2, 128 << 20) if l2 == "cold-clean" else (4, 256 << 20)
    size = max(least // (1 if device.kind == "cuda" else 2), times * device.l2_bytes)
    return -(-size // (1 << 20)) << 20


def make_timer(device: Device, policy: Policy, reader: Reader | None = None) -> Timer:
    """The timer of a policy, with its flush buffer on the current device.

    reader(tensor) launches one kernel whose profiler name contains "gdntune_flush" and reads the
    whole of a contiguous 1-D int32 tensor (16 KiB, or whole MiB: the buffer) on the current stream,
    without hints that keep it out of L2. Needed on CUDA for the timer cupti and for cold-clean;
    unused on the CPU. Not for `chain`: see chain.make_chain_timer. Raises what `Policy.resolve`
    raises.
    """
    resolved, note = policy.resolve(device)
    size = flush_bytes(device, resolved.l2)
    if resolved.l2 == "chain":
        raise UnsupportedProblem(
            "l2='chain' has layers around the calls: chain.make_chain_timer makes its timer"
        )
    if device.kind == "cpu":
        return CpuTimer(resolved, _cpu_flush(resolved.l2, size), note)
    if reader is None and (resolved.timer == "cupti" or resolved.l2 == "cold-clean"):
        raise UnsupportedProblem(
            f"reader=None with timer={resolved.timer} and l2={resolved.l2}: give a kernel that"
            " reads a tensor"
        )
    import torch

    # In a graph one flush may follow another, and would find the lines that the same buffer left in
    # L2: it has two in turn.
    both = resolved.timer == "graph" and resolved.l2 == "cold-clean"
    buffers = [torch.zeros(size // 4, dtype=torch.int32, device="cuda") for _ in range(1 + both)]
    marker = torch.zeros(MARKER_BYTES // 4, dtype=torch.int32, device="cuda")
    # The marker's kernel is in the records whatever the L2 policy: it is where one call ends.
    mark: Callable[[], Any] = functools.partial(reader, marker) if reader else _nothing
    if reader is None and resolved.timer == "graph":
        # torch warns of a graph without a kernel.
        mark = functools.partial(marker.add_, 1)
    before, markers = mark, 1
    if resolved.l2 == "cold-clean":
        turn = itertools.cycle(buffers)

        def before() -> None:
            cast("Reader", reader)(next(turn))

    elif resolved.l2 == "cold-dirty":
        zero, markers = buffers[0].zero_, 2

        # The first marker ends the call before, so that the fill counts to none.
        def before() -> None:
            mark()
            zero()
            mark()

    # Compiles or loads the reader, so that no timed call does.
    before()
    if resolved.timer == "cupti":
        return CuptiTimer(resolved, before, cupti.recorder(), torch.cuda.synchronize, markers)
    if resolved.timer == "graph":
        # A replay walks the turns it recorded; fewer than TURNS would visit the same slots again,
        # warm.
        calls = TURNS if resolved.l2 == "rotate" else GRAPH_CALLS
        return GraphTimer(resolved, before, graphs.GraphRecorder(), calls, note)
    return EventTimer(resolved, before, note)


def _cpu_flush(l2: L2, size: int) -> Callable[[], Any] | None:
    if not size:
        return None
    import torch

    # Ones, not zeros: calloc's pages are all one page of zeros until they are written, and stay in
    # L1.
    buffer = torch.ones(size // 4, dtype=torch.float32)
    return buffer.sum if l2 == "cold-clean" else buffer.zero_


class Stats(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is reported of samples, in microseconds. outliers: those beyond 3 IQR of the quartiles,
    counted and kept.
    """

    median_us: float
    mean_us: float
    q1_us: float
    q3_us: float
    min_us: float
    count: int
    outliers: int


def _quartiles(ordered: Sequence[float]) -> tuple[float, float, float]:
    # As statistics.quantiles(method="inclusive"), whose rounding can put a quartile of equal
    # samples above all of them.
    last = len(ordered) - 1

    def at(quarters: int) -> float:
        low, rest = divmod(quarters * last, 4)
        return ordered[low] + (ordered[min(low + 1, last)] - ordered[low]) * (rest / 4)

    return at(1), at(2), at(3)


# No call takes eleven days.
MOST_US = 1e12


def summary(samples: Sequence[float]) -> Stats:
    """Stats of samples in microseconds. MeasurementError where there are none, or one is negative,
    not finite or longer than MOST_US.
    """
    if not samples:
        raise MeasurementError("no samples: nothing was timed")
    ordered = sorted(samples)
    try:
        mean = statistics.fmean(samples)
    except OverflowError:
        mean = math.inf
    # A report has 200,000 of these. NaN, which has no place in an order, makes the mean NaN.
    if not (ordered[0] >= 0 and mean < MOST_US):
        for i, sample in enumerate(samples):
            if not 0 <= sample < MOST_US:
                raise MeasurementError(
                    f"sample {i} of {len(samples)} is {sample} us: time it again"
                )
    q1, median, q3 = _quartiles(ordered)
    reach = 3 * (q3 - q1)
    beyond_high = len(ordered) - bisect.bisect_right(ordered, q3 + reach)
    outliers = bisect.bisect_left(ordered, q1 - reach) + beyond_high
    return Stats(median, mean, q1, q3, ordered[0], len(ordered), outliers)


def tie(a_mean_us: float, b_mean_us: float, step_us: float = CUPTI_STEP_US) -> bool:
    """Whether two means are the same: apart by no more than the larger of 1% of the lesser and the
    clock's step.
    """
    # The slack, a thousandth of a nanosecond, keeps one step a tie where binary fractions say
    # 0.0320000001.
    return abs(a_mean_us - b_mean_us) <= max(TIE_SHARE * min(a_mean_us, b_mean_us), step_us) + 1e-6


def measured_peaks(
    device: Device, index: int = 0, size: int | None = None, rounds: int = 10
) -> dict[str, float]:
    """The DRAM's bandwidth in GB/s by source: `measured`, and `datasheet` and `nvml` where known;
    see `arch.peak_disagreement`.

    measured: the best of `rounds` copies within the device's memory, bytes read and written; on the
        CPU also of updates in place, since a copy's stores there read their lines first. Each of
        two buffers has `size` bytes, by default 1 GiB (CPU: 256 MiB) and 8 times the last-level
        cache: no flush is needed, and the launch gaps are below 1%.
    """
    import torch

    # Eight times the cache: what it keeps of one copy is a small share of the next.
    least = max(1 << 30 if device.kind == "cuda" else 256 << 20, 8 * device.l2_bytes)
    elements = (size or min(least, max(1 << 20, device.memory_bytes // 8))) // 4
    with torch.cuda.device(index) if device.kind == "cuda" else contextlib.nullcontext():
        source, goal = (
            torch.ones(elements, dtype=torch.float32, device=device.kind) for _ in range(2)
        )
        calls: list[Call] = [lambda _: goal.copy_(source)]
        if device.kind == "cpu":
            # A copy on a CPU reads the lines that it stores to, three transfers where two are
            # counted; an update in place has two.
            calls.append(lambda _: goal.neg_())
        timer = make_timer(device, Policy("events" if device.kind == "cuda" else "cpu", "warm"))
        best_us = min(min(times) for times in timer.measure(calls, rounds))
    found = {
        "datasheet": arch.datasheet_gb_s(device.name),
        "nvml": arch.nvml_peak_gb_s(index) if device.kind == "cuda" else None,
        "measured": 2 * 4 * elements / best_us / 1e3,
    }
    return {name: value for name, value in found.items() if value is not None}
