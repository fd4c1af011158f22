"""The CPU kernel of rings: C++ of its own, cpu/ring.h, behind the arguments and gates of
`cpu_recurrent`'s.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdntune.kernels import cpu_recurrent
from gdntune.kernels.cpu_object import object_of

# What its loops do not have.
_UNUSED = {"tile_v": 32, "ilp": 1, "ahead": False, "around": False}


def source(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str) -> str:
    """The C++ of one object: the setting, and the function that tvm_ffi finds as `name`."""
    inner = cpu_recurrent.source(facts, {**knobs, **_UNUSED}, name)
    at_random = str(facts["ring_rounding"] == "stochastic").lower()
    return inner.replace('"decode.h"', '"ring.h"').replace(
        "Decode<Setting>", f"Ring<Setting, {facts['ring']}, {at_random}>"
    )


def compile(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Writes folder/NAME.o, which exports `name`; ToolMissing without a compiler, BuildError where
    it fails.
    """
    return object_of(source(facts, knobs, name), name, folder)
