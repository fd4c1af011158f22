"""The family of exceptions. Each has a builtin parent, so callers can catch either."""

from collections.abc import Iterable
from numbers import Real
from pathlib import Path


class GdntuneError(Exception):
    """Anything gdntune refuses or fails at; the message says what was given, what is expected and
    what to do.
    """


class UnsupportedProblem(GdntuneError, ValueError):
    """A problem, or an argument of a public function, that no kernel serves."""


class ConfigError(GdntuneError, ValueError):
    """A config that cannot be read: names file, key, value and what is expected."""


class TableError(GdntuneError, ValueError):
    """A table that cannot be trusted: names file, JSON path, value and what is expected."""


class JournalError(GdntuneError, ValueError):
    """A journal that cannot be read or does not belong to the sweep at hand."""


class UnknownName(GdntuneError, LookupError):
    """A name that is not in a registry; the message lists those that are."""


class ToolMissing(GdntuneError, RuntimeError):
    """A compiler, library, device or permission that is not here, and how to get it."""


class BuildError(GdntuneError, RuntimeError):
    """A variant that does not compile, or an object that does not load."""


class CaptureError(GdntuneError, RuntimeError):
    """A call in a CUDA graph's capture that would load or compile; `gdntune.prepare` does it
    before.
    """


class CheckFailed(GdntuneError, ArithmeticError):
    """A kernel whose result differs from the reference; names the worst coordinate."""


class MeasurementError(GdntuneError, RuntimeError):
    """Times that cannot be true, or that the timer did not deliver."""


class Locked(GdntuneError, RuntimeError):
    """A folder that another process is writing to; names the holder."""


def listed(names: Iterable[object]) -> str:
    """`a, b, c`: how a message lists what is expected."""
    return ", ".join(str(n) for n in names) or "none"


def counted(n: int, one: str, several: str = "") -> str:
    """A number of things, one of them in the singular. several: where it is not `one` with an s."""
    return f"{n} {one if n == 1 else several or f'{one}s'}"


def one_of(names: Iterable[object]) -> str:
    """`one of a, b, c`, or `a` where that is all: what a message says was expected."""
    texts = [str(n) for n in names]
    return f"one of {listed(texts)}" if len(texts) > 1 else listed(texts)


def shown(name: str, x: object) -> str:
    """How a message says what an argument is: by its value where that is short, else by its type.
    Never by what a device holds.
    """
    # No tensor: its repr would copy from the device, and wait for it.
    if x is None or isinstance(x, str | Real):
        return f"{name}={x!r}"
    return f"{name} is of type {type(x).__name__}"


def no_folder(path: Path) -> str | None:
    """Why a path cannot be a folder: it is a file, or lies in one. None where nothing is in the
    way.
    """
    there = next((p for p in (path, *path.parents) if p.exists()), None)
    if there is None or there.is_dir():
        return None
    return f"{'it' if there == path else there} is a file, and a folder is wanted"
