"""Work recorded in CUDA graphs: times of replays, and what one takes more than another."""

import contextlib
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from gdntune.errors import MeasurementError

Work = Callable[[], Any]

# About 100 us of an H100: what the host needs to queue a graph of 200 nodes between two events.
# Without it the start event of a short graph is over before the graph is queued, and the wait is in
# its time.
SPIN_CYCLES = 200_000
# Timed replays between two of the recording that they are compared with.
BASE_EVERY = 8


class Recorder(Protocol):
    """Records pieces of work and times their replays."""

    def record(self, works: Sequence[Work]) -> list[Work]:
        """What replays each piece of work. Each has run before, so that nothing is loaded or
        compiled while it is recorded.
        """
        ...

    def times_us(self, replays: Sequence[Work]) -> list[float]:
        """Microseconds of each replay, one after the other in this order."""
        ...


# Kept: torch's allocator goes on asking a graph whose capture failed.
_FAILED: list[Any] = []


def memory_can_be_emptied() -> bool:
    """Whether torch's cached memory of this process may go back to the device: not once a capture
    failed.
    """
    return not _FAILED


class GraphRecorder:
    """CUDA graphs on the current device, timed by events around their launch."""

    def __init__(self) -> None:
        import torch

        self._stream = torch.cuda.Stream()
        self._events: list[tuple[Any, Any]] = []

    def record(self, works: Sequence[Work]) -> list[Work]:
        """One graph a piece of work; the graphs share a pool for what is allocated in them, since
        they never run at once.

        MeasurementError for work that cannot be captured, after which torch's memory of this
        process is not to be emptied; a device that is lost raises its own error.
        """
        import torch

        # A new one each time: torch refuses a pool whose graphs are all gone.
        pool = torch.cuda.graph_pool_handle()
        replays: list[Work] = []
        for i, work in enumerate(works):
            torch.cuda.synchronize()
            try:
                replays.append(self._captured(work, pool).replay)
            except Exception as e:
                # Raises where the device is lost, which is no fault of the capture.
                torch.cuda.synchronize()
                raise MeasurementError(
                    f"work {i} of {len(works)} cannot be captured in a CUDA graph"
                    f" ({type(e).__name__}: {str(e)[:200]}): expected calls that only launch"
                    " kernels, on the current stream; use the timer cupti or events"
                ) from e
        return replays

    def _captured(self, work: Work, pool: Any) -> Any:
        import torch

        # Not torch.cuda.graph: it returns torch's cached memory to the device first, for each of
        # hundreds of graphs.
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # Thread-local: another thread's allocation must not spoil this capture.
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            _FAILED.append(graph)
            try:
                work()
            except BaseException:
                # What the work raised says more.
                with contextlib.suppress(Exception):
                    graph.capture_end()
                raise
            graph.capture_end()
            _FAILED.pop()
        return graph

    def times_us(self, replays: Sequence[Work]) -> list[float]:
        """Microseconds between events right before and after each launch, on the current stream;
        the launch's gaps are included.
        """
        import torch

        while len(self._events) < len(replays):
            self._events.append(
                (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            )
            for event in self._events[-1]:
                # torch makes an event at its first record.
                event.record()
        events = self._events[: len(replays)]
        torch.cuda.synchronize()
        for replay, (start, end) in zip(replays, events, strict=True):
            torch.cuda._sleep(SPIN_CYCLES)
            start.record()
            replay()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in events]


class Difference:
    """What some recordings take more than another, whose replays lie among theirs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._base: list[Work] = []
        self._works: list[Work] = []

    @contextlib.contextmanager
    def between(self, base: Work, works: Sequence[Work]) -> Iterator[None]:
        """Records what is compared, and lets go of it at the end."""
        try:
            first, *self._works = self._recorder.record([base, *works])
            self._base = [first]
            yield
        finally:
            self._base, self._works = [], []

    def times_us(self, order: Sequence[int]) -> list[float]:
        """Microseconds of a replay of each work that `order` names, less the median of the base's;
        below 0 within their noise.

        The last replay is of the last work named.
        """
        # The first is not counted: it finds the device as anyone left it.
        replays = [*self._base]
        timed: list[int] = []
        bases: list[int] = []
        # Amid those that it is subtracted from, so that a drift cancels.
        middle = min(BASE_EVERY, len(order)) // 2
        for position, i in enumerate(order):
            if position % BASE_EVERY == middle:
                bases.append(len(replays))
                replays += self._base
            timed.append(len(replays))
            replays.append(self._works[i])
        times = self._recorder.times_us(replays)
        # The median: one replay that was interrupted would shift all differences alike.
        base = statistics.median(times[i] for i in bases)
        return [times[i] - base for i in timed]
