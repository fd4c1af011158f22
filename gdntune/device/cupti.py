"""CUPTI's activity records: this process' recorder, why there is none where there is none, and
times from records.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from gdntune.errors import MeasurementError

# Start and end in ns, the kernel's name.
Record = tuple[int, int, str]

FLUSH = "gdntune_flush"

_REMEDY = {
    "INSUFFICIENT_PRIVILEGES": (
        "load the driver with NVreg_RestrictProfilingToAdminUsers=0, or run with CAP_SYS_ADMIN"
    ),
    "ImportError": "pip install 'cupti-python>=13.0.1,<14'",
    "MULTIPLE_SUBSCRIBERS": "end the other profiler (torch.profiler, nsys, ncu) of this process",
}


class RecordSource(Protocol):
    """Where the CUPTI timer's records come from."""

    def start(self) -> None: ...

    def stop(self) -> list[Record]: ...


class Recorder:
    """Records kernels, copies and fills. CUPTI takes callbacks once a process: there is one of
    these, `recorder()`.
    """

    def __init__(self) -> None:
        from cupti import cupti

        self._cupti: Any = cupti
        self._records: list[Record] = []
        kinds = cupti.ActivityKind
        self._kinds = (kinds.CONCURRENT_KERNEL, kinds.MEMCPY, kinds.MEMSET)
        # 8 MiB a buffer, as many records as fit: each buffer that fills up is a callback while
        # calls are being timed.
        cupti.activity_register_callbacks(lambda: (8 << 20, 0), self._completed)

    def _completed(self, activities: Any) -> None:
        # The records lie in a buffer that CUPTI takes back: copy them now.
        for a in activities:
            if a.kind in self._kinds:
                self._records.append((a.start, a.end, getattr(a, "name", None) or ""))

    def start(self) -> None:
        """Begins a recording; records of earlier work are dropped."""
        self._cupti.activity_flush_all(1)
        self._records.clear()
        for kind in self._kinds:
            self._cupti.activity_enable(kind)

    def stop(self) -> list[Record]:
        """Ends the recording. The caller has synchronised the device."""
        self._cupti.activity_flush_all(1)
        for kind in self._kinds:
            self._cupti.activity_disable(kind)
        return self._records.copy()


# One a process: CUPTI takes callbacks once.
_recorder: Recorder | None = None


def recorder() -> Recorder:
    """The process' recorder, made at first use; raises what cupti-python raises."""
    global _recorder
    if _recorder is None:
        _recorder = Recorder()
    return _recorder


def fault() -> str | None:
    """Why CUPTI gives no records here and what to do about it; None where it gives them. Launches
    one tiny kernel.
    """
    try:
        source = recorder()
        source.start()
        try:
            _probe()
        finally:
            records = source.stop()
        # A recorder that starts without an error and yet records nothing: another subscriber has
        # the activities.
        if records:
            return None
        reason = "CUPTI gave no record of a kernel: MULTIPLE_SUBSCRIBERS"
    except ImportError as error:
        reason = f"CUPTI's Python binding cannot be imported (ImportError: {error})"
    except Exception as error:  # noqa: BLE001  cupti-python's own error class has moved between its versions
        reason = f"CUPTI cannot be used ({type(error).__name__}: {error})"
    remedies = [text for key, text in _REMEDY.items() if key in reason]
    versions = "see that driver, CUDA and cupti-python are of one major version"
    return f"{reason}; {remedies[0] if remedies else versions}"


def _probe() -> None:
    import torch

    torch.zeros(1, device="cuda").add_(1)
    torch.cuda.synchronize()


def segments_us(records: Sequence[Record], calls: int, markers: int = 1) -> list[float]:
    """The microseconds of `calls` calls, each from its first start to its last end, in the order of
    time.

    records: in any order; those named FLUSH are markers, `markers` a call, the last of them right
        before it. What follows the others is the flush's own work.
    Raises MeasurementError where a marker or a call left no record.
    """
    found: list[tuple[int, int] | None] = []
    # Buffers come back in any order; on one stream, times order the work.
    for start, end, name in sorted(records):
        if FLUSH in name:
            found.append(None)
        elif not 0 < start <= end:
            raise MeasurementError(
                f"CUPTI gave {name!r} the times {start} to {end} ns, so it could not time it; use"
                " --timer events"
            )
        elif found:
            segment = found[-1]
            found[-1] = (segment[0], max(segment[1], end)) if segment else (start, end)
    if len(found) != calls * markers:
        raise MeasurementError(
            f"CUPTI gave {len(found)} records of {FLUSH} where {calls * markers} were launched,"
            f" {len(records)} in all: end any other profiler in this process; the reader must"
            f" launch one kernel, with {FLUSH} in its name"
        )
    # Of several markers a call only the last starts it: between them lies the fill of `cold-dirty`.
    timed = found[markers - 1 :: markers]
    if None in timed:
        raise MeasurementError(
            f"call {timed.index(None)} of {calls} left no CUPTI record between its flush and the"
            " next: it launched nothing, or not on the current stream; time calls that launch"
            " kernels there"
        )
    return [(segment[1] - segment[0]) / 1e3 for segment in timed if segment]
