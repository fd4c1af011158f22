"""gdntune/errors.py: the family, its builtin parents, its way through processes."""

import builtins
import pickle

import pytest

from gdntune import errors

FAMILY = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, errors.GdntuneError)
]


def test_the_family_is_found():
    """The list below is not empty by accident."""
    assert len(FAMILY) > 5


@pytest.mark.parametrize("error", [e for e in FAMILY if e is not errors.GdntuneError])
def test_each_has_a_builtin_parent(error):
    """A caller who knows nothing of gdntune can catch it as ValueError, RuntimeError, ..."""
    parents = [
        p
        for p in error.__mro__
        if p.__module__ == builtins.__name__ and p not in (Exception, BaseException, object)
    ]
    assert parents
    assert error.__doc__


@pytest.mark.parametrize("error", FAMILY)
def test_each_crosses_processes(error):
    """A worker's error reaches its parent whole."""
    copy = pickle.loads(pickle.dumps(error("tile_v=9: expected one of 16, 32")))  # noqa: S301  made on the line itself
    assert type(copy) is error
    assert str(copy) == "tile_v=9: expected one of 16, 32"


def test_shown():
    """Short values are said, all else by its type: a tensor's values may lie on a device."""
    assert [errors.shown("x", x) for x in (None, "a", 1, 0.5)] == [
        "x=None",
        "x='a'",
        "x=1",
        "x=0.5",
    ]
    assert errors.shown("x", [1.0]) == "x is of type list"


def test_listed():
    """What is accepted reads as a list, whatever holds it."""
    assert errors.listed(["a", "b"]) == "a, b"
    assert errors.listed({1: "x", 2: "y"}) == "1, 2"
    assert errors.listed(()) == errors.one_of(()) == "none"


def test_one_of():
    """Where one thing alone is expected, that is what is said."""
    assert errors.one_of(["a", "b"]) == "one of a, b"
    assert errors.one_of({True: "x"}) == "True"
