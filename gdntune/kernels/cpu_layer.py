"""The CPU kernel of a layer: `cpu_recurrent`'s C++, and in cpu/layer.h what is around it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdntune.kernels import cpu_recurrent
from gdntune.kernels.cpu_object import object_of


def source(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str) -> str:
    """The C++ of one object: that of the delta rule, with a layer around it."""
    inner = cpu_recurrent.source(facts, knobs, name)
    return inner.replace('"decode.h"', '"layer.h"').replace(
        "Decode<Setting>",
        f"Layer<Setting, Norm::{facts['norm']}, Conv::{facts['conv']},"
        f" {str(facts.get('interleaved', False)).lower()}>",
    )


def compile(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Writes folder/NAME.o, which exports `name`; ToolMissing without a compiler, BuildError where
    it fails.
    """
    return object_of(source(facts, knobs, name), name, folder)
