"""Worker processes: what they are started by, and that they take no more memory than there is."""

import contextlib
import sys
from pathlib import Path

from gdntune.errors import ToolMissing


def interpreter() -> str:
    """The Python to start a process with; ToolMissing where it does not know its own place."""
    if not sys.executable:
        raise ToolMissing(
            "this Python does not know its own executable (sys.executable is empty), so no process"
            " can be started: compile ahead with `gdntune compile --bundle DIR` and set"
            " GDNTUNE_BUNDLE; sweep by `python -m gdntune`"
        )
    return sys.executable


def free_memory() -> int | None:
    """Bytes that this process may still take: what the system has free, or its control group; None
    where Linux does not say.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        # Absent, or `max`, where there is no limit.
        with contextlib.suppress(OSError, ValueError):
            free.append(int((group / limit).read_text()) - int((group / used).read_text()))
    # A control group may be over its soft limit for a moment: less than none is none.
    return max(min(free), 0) if free else None


def limit_memory(share: float = 0.9) -> None:
    """Lets this process take at most a share of the memory that is free now, where Linux can.

    What leaks then fails by itself, and the system ends no other process for it.
    """
    free = free_memory()
    if free is None:
        return
    import resource

    # Data in pages: private memory that can be written, which is what RLIMIT_DATA counts. Not
    # RLIMIT_AS: CUDA reserves more addresses than there is memory.
    data = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    resource.setrlimit(
        resource.RLIMIT_DATA,
        (data + int(share * free), resource.getrlimit(resource.RLIMIT_DATA)[1]),
    )
