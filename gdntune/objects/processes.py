"""Worker processes: they start afresh, do not run the caller's program again, and take no more
memory than there is.
"""

import contextlib
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

# Never fork: the caller may hold a CUDA context, and threads that hold locks.
SPAWN = multiprocessing.get_context("spawn")

# What hides the main module now, over all threads, and what the first of them took from it.
_HIDING = threading.Lock()
_HIDDEN: list[dict[str, object]] = []


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """While workers start, hides the caller's main module from them.

    A spawned process imports the main module again, to find what was defined there. Workers need
    nothing of it, and a script without `if __name__ == "__main__"`, an engine's for instance, would
    run once more in each. May be entered by several threads at a time: the module is back when the
    last of them has left.
    """
    main = sys.modules["__main__"]
    with _HIDING:
        _HIDDEN.append(
            {
                name: main.__dict__[name]
                for name in ("__file__", "__spec__")
                if name in main.__dict__
            }
        )
        main.__dict__.pop("__file__", None)
        main.__spec__ = None
    try:
        yield
    finally:
        with _HIDING:
            # The first one's is what was there; a later one's, what the first had left.
            last = _HIDDEN.pop()
            if not _HIDDEN:
                main.__dict__.update(last)


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
