"""What all tests share: caches of their own, and `gpu` tests only where there is a GPU."""

import functools
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import warm

_FOLDERS = pytest.StashKey[Path]()
_DESELECTED = pytest.StashKey[int]()


H100 = (
    Path(__file__).parent.parent
    / "docs"
    / "results"
    / "nvidia-h100-80gb-hbm3"
    / "qwen3.5-397b-a17b.jsonl.xz"
)
# The files that take longest, a minute and more each: they go first, so that in the end no core waits
# for one of them. Below tests/.
LONGEST = (
    "ptx/test_kernels.py", "kernels/test_kernels_cute.py", "device/test_occupancy.py",
    "results/test_judge.py", "tuning/test_executors.py", "tuning/test_search_shared.py",
    "ptx/test_mutants.py", "report/test_published_figures.py", "kernels/test_kernels_cpu.py",
    "kernels/test_layers_cpu.py", "kernels/test_ring_kernel.py", "test_docs.py", "test_walks.py",
)  # fmt: skip


@pytest.fixture(scope="session")
def h100():
    """A published sweep of an H100: its file, header and records, read once."""
    from gdntune.results import journal

    return H100, *journal.read(H100)


@functools.cache
def _compiled_ahead():
    """The contracts whose objects tests/gpu/objects.py compiles."""
    sys.path.append(str(Path(__file__).parent / "gpu"))
    import objects

    return frozenset(objects.contracts())


@pytest.fixture(scope="session", autouse=True)
def noise_guard():
    """Times of a machine that runs tests are noise, and mark every cell of a sweep: only tests of
    the noise guard see them so. Of the whole run, since fixtures of a module sweep too.
    """
    from gdntune.tuning import noise

    guard = noise.noise
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(noise, "noise", lambda device, timed: "")
        yield guard


@pytest.fixture(scope="session", autouse=True)
def choices_are_timed_once():
    """Sweeps of tests time their choices again only where a config asks for it."""
    from gdntune.tuning import cells

    fresh_rounds = cells.fresh_rounds
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(cells, "fresh_rounds", lambda search: search.fresh_rounds or 0)
        yield fresh_rounds


@pytest.fixture(scope="session", autouse=True)
def processes_are_warm():
    """Timing processes are forked from one that has imported torch, see `warm`: never for a GPU."""
    with pytest.MonkeyPatch.context() as patched:
        if not _has_gpu():
            warm.patch(patched)
        yield


@pytest.fixture(autouse=True)
def processes_are_cold(request, monkeypatch):
    """Tests marked `cold` start timing processes as a user's sweep does."""
    if request.node.get_closest_marker("cold"):
        monkeypatch.setattr("gdntune.tuning.program.subprocess", subprocess)


@pytest.fixture(autouse=True)
def noise_is_seen(request, monkeypatch, noise_guard):
    """Tests marked `noise` have the guard as it is."""
    if request.node.get_closest_marker("noise"):
        monkeypatch.setattr("gdntune.tuning.noise.noise", noise_guard)


@pytest.fixture(autouse=True)
def compiled_ahead(request, monkeypatch):
    """A test that runs on any device binds those contracts alone that are compiled ahead: a GPU
    machine need not have a compiler.

    Held on the CPU, where tests run before they run on a GPU.
    """
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("device") != "cpu":
        yield
        return
    from gdntune.runtime import call, dispatch

    bind, bound = dispatch.Runtime.bind, set()

    def recorded(self, contract, **options):
        bound.add(contract)
        return bind(self, contract, **options)

    monkeypatch.setattr(dispatch.Runtime, "bind", recorded)
    call.forget()
    yield
    missing = [c.key() for c in bound - _compiled_ahead()]
    assert not missing, (
        f"on a GPU machine there are no objects for {missing}: name them in CONTRACTS, for tests/gpu/objects.py"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Compiled objects and tables of the user have no part in a test, and a test leaves none
    behind.
    """
    if worker := getattr(config, "workerinput", None):
        # objects are compiled once for all of pytest-xdist's processes; tables are each one's own
        os.environ["XDG_DATA_HOME"] += worker["workerid"]
        _settings()
        return
    folder = Path(tempfile.mkdtemp(prefix="gdntune-tests-"))
    config.stash[_FOLDERS] = folder
    # GDNTUNE_TEST_CACHE keeps compiled objects from one run to the next, for whoever runs the tests
    # many times.
    os.environ["GDNTUNE_CACHE_DIR"] = os.environ.get("GDNTUNE_TEST_CACHE") or str(folder / "cache")
    os.environ["XDG_DATA_HOME"] = str(folder / "data")
    os.environ["TVM_FFI_CACHE_DIR"] = str(folder / "tvm-ffi")
    warm.place(folder)
    _settings()


def _settings() -> None:
    # no test is decided by how long one example took: the machine may be busy
    hypothesis.settings.register_profile("busy", deadline=None)
    hypothesis.settings.load_profile("busy")
    # Tests make millions of small objects beside the million of torch and its like: with Python's own
    # thresholds, looking for garbage took a tenth of the time.
    gc.set_threshold(100_000, 20, 100)
    # Threads that spin while they wait take the cores from what they wait for: beside other work
    # that was five times the CPU time. Read by OpenMP when torch is imported, and by children.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    # A virtual machine may report its host's 300 MiB, of which every cold sample flushes the double.
    os.environ["GDNTUNE_LLC_MIB"] = "8"
    for name in ("GDNTUNE_TABLE", "GDNTUNE_CHECK"):
        os.environ.pop(name, None)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the caches."""
    if folder := config.stash.get(_FOLDERS, None):
        shutil.rmtree(folder, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first. Deselects what needs a GPU where there is none; the closing summary
    says how many.
    """
    order = {Path(__file__).parent / name: i for i, name in enumerate(LONGEST)}
    if gone := [str(path) for path in order if not path.exists()]:
        raise pytest.UsageError(f"LONGEST names files that are not there: {', '.join(gone)}")
    items.sort(key=lambda item: order.get(item.path, len(order)))
    needing = [item for item in items if item.get_closest_marker("gpu")]
    if needing and not _has_gpu():
        config.hook.pytest_deselected(items=needing)
        config.stash[_DESELECTED] = len(needing)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process of pytest-xdist hands over what it left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash.get(_DESELECTED, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Each process collects all tests, and so leaves out the same."""
    node.config.stash[_DESELECTED] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Nobody should take these tests for passed."""
    if n := config.stash.get(_DESELECTED, 0):
        terminalreporter.write_line(f"{n} gpu tests were left out: no CUDA device is here")


@functools.cache
def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
