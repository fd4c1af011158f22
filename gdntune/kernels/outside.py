"""Kernels from outside the package: modules that have a `KERNEL`, or several in `KERNELS`."""

import importlib
import os

from gdntune.errors import UnknownName
from gdntune.kernels.spec import Kernel

VARIABLE = "GDNTUNE_KERNELS"


def named() -> list[str]:
    """The modules that the environment names, separated by commas."""
    return [name for part in os.environ.get(VARIABLE, "").split(",") if (name := part.strip())]


def kernels_of(module: str) -> tuple[Kernel, ...]:
    """The kernels of an importable module."""
    try:
        found = importlib.import_module(module)
    except ImportError as e:
        raise UnknownName(
            f"kernels {module}: it cannot be imported: {e}; expected a module on Python's path"
            " (PYTHONPATH=folder) with a KERNEL"
        ) from e
    kernels = getattr(found, "KERNELS", None) or (getattr(found, "KERNEL", None),)
    if not all(isinstance(k, Kernel) for k in kernels):
        raise UnknownName(
            f"kernels {module}: it has no KERNEL, an instance of gdntune.kernels.spec.Kernel, nor"
            " KERNELS, several of them"
        )
    return tuple(kernels)
