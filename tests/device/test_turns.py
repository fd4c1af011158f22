"""gdntune/device/turns.py: one process at a time on a device, and compilers beside it."""

import contextlib
import sys
import types

import filelock
import pytest

from gdntune.device import turns


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A device's lock, and nothing wrapped yet."""
    monkeypatch.setattr(turns, "_WRAPPED", set())
    return str(tmp_path / "device")


def free(place):
    """Whether another process could take the turn now."""
    other = filelock.FileLock(place, thread_local=False)
    try:
        other.acquire(timeout=0)
    except filelock.Timeout:
        return False
    other.release()
    return True


def hold(place, **options):
    """The turn, with nothing to wait for."""
    options = {"waiting": contextlib.nullcontext, "leave": lambda: None, **options}
    return turns.held(place, **options)


def test_a_turn_is_given_back_while_something_compiles(place):
    """And only then; a compiler that calls another gives it back once."""
    left = []
    with hold(place, leave=lambda: left.append(free(place))):
        assert not free(place)
        with turns.aside(), turns.aside():
            assert free(place)
        assert not free(place)
    assert free(place)
    # What was launched is waited for before anybody else has the device.
    assert left == [False, False]


def test_a_whole_turn_is_not_given_back(place):
    """A cell's samples are taken within one turn, whatever compiles meanwhile."""
    with hold(place, whole=True), turns.aside():
        assert not free(place)
    with turns.aside():
        assert free(place)


def test_waiting_is_said_where_another_has_the_turn(place):
    """Of the time limit of a task it is no part."""
    said = []

    @contextlib.contextmanager
    def waiting():
        said.append("waits")
        other.release()
        yield
        said.append("has it")

    other = filelock.FileLock(place, thread_local=False)
    other.acquire()
    with hold(place, waiting=waiting):
        assert said == ["waits", "has it"]


def test_a_device_that_is_lost_leaves_the_turn_to_others(place):
    """Where what was launched faults, the fault is raised, and the lock is free."""

    def lost():
        raise RuntimeError("illegal memory access")

    with pytest.raises(RuntimeError, match="illegal"), hold(place, leave=lost), turns.aside():
        pytest.fail("compiled on a lost device")
    assert free(place)
    with hold(place):
        assert not free(place)


def test_libraries_compile_aside(place, monkeypatch):
    """CuTe DSL's and Triton's compilers give the turn back, of modules that are imported; once
    wrapped they stay so.
    """
    seen = []

    class CompileCallable:
        def _compile(self, function):
            seen.append((function, free(place)))
            return function

    cute = types.ModuleType("cutlass.base_dsl.compiler")
    cute.CompileCallable = CompileCallable
    triton = types.ModuleType("triton.compiler")
    triton.compile = lambda source: seen.append((source, free(place)))
    monkeypatch.setitem(sys.modules, cute.__name__, cute)
    monkeypatch.setitem(sys.modules, triton.__name__, triton)
    monkeypatch.setitem(sys.modules, "triton.compiler.compiler", None)
    turns.compile_aside()
    wrapped = triton.compile
    turns.compile_aside()
    assert triton.compile is wrapped
    with hold(place):
        assert CompileCallable()._compile("kernel") == "kernel"
        triton.compile("source")
    assert seen == [("kernel", True), ("source", True)]
