"""Worker processes that start afresh and do not run the caller's program again."""

import contextlib
import multiprocessing
import sys
from collections.abc import Iterator

# Never fork: the caller may hold a CUDA context, and threads that hold locks.
SPAWN = multiprocessing.get_context("spawn")


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """While workers start, hides the caller's main module from them.

    A spawned process imports the main module again, to find what was defined there. Workers need nothing of it, and a script without
    `if __name__ == "__main__"`, an engine's for instance, would run once more in each.
    """
    main = sys.modules["__main__"]
    kept: dict[str, object] = {name: main.__dict__[name] for name in ("__file__", "__spec__") if name in main.__dict__}
    main.__dict__.pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        main.__dict__.update(kept)
