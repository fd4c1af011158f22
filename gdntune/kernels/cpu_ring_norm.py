"""The CPU kernel of rings with a layer's norm behind them: `cpu_ring`'s C++, and cpu/layer.h's norm."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdntune.kernels import cpu_ring
from gdntune.kernels.cpu_object import object_of


def source(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str) -> str:
    """The C++ of one object: that of a ring, with a norm behind it."""
    inner = cpu_ring.source(facts, knobs, name)
    return inner.replace('"ring.h"', '"ring_norm.h"').replace(
        "Ring<Setting,", f"RingNorm<Setting, Norm::{facts['norm']},"
    )


def compile(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Writes folder/NAME.o, which exports `name`; ToolMissing without a compiler, BuildError where
    it fails.
    """
    return object_of(source(facts, knobs, name), name, folder)
