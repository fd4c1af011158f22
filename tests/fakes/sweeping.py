"""A sweep in a process of its own, which a test may kill: `python -m fakes.sweeping CONFIG FOLDER
STORE [LARGEST]`.

LARGEST: bytes that a file may have, as on a disk that is full. Prints `table` or the error, whose
    exit code is the command line's.
"""

import resource
import sys
from pathlib import Path

from gdntune import search
from gdntune.device import arch
from gdntune.errors import GdntuneError
from gdntune.objects.store import Store
from gdntune.tuning import cells, config, noise

if __name__ == "__main__":
    # As in the tests' own process: a busy machine would mark every cell, to be timed again, and
    # choices are timed once.
    noise.noise = lambda device, timed: ""
    cells.fresh_rounds = lambda search: search.fresh_rounds or 0
    text, folder, store, *largest = sys.argv[1:]
    if largest:
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest[0]), resource.RLIM_INFINITY))
    try:
        outcome = search.sweep(
            config.load(text), Path(folder), device=arch.detect("cpu"), store=Store(Path(store))
        )
    except GdntuneError as e:
        print(f"{type(e).__name__}: {e}")
        sys.exit(2)
    print("table" if outcome.table else "no table")
