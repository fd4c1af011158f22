"""The CPU floor: C++, cpu/stream.h, that moves the state's bytes and computes next to nothing. This
writes its setting and compiles it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdntune.kernels.cpu_object import STATES, object_of

SOURCE = """\
#include "stream.h"

namespace {{
struct Setting {{
  using State = {state};
  static constexpr int block = {block}, ilp = {ilp}, vec = {vec};
  static constexpr bool write = {write}, ahead = {ahead}, around = {around};
}};
}}  // namespace

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_{name}(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {{
  return Stream<Setting>::call(arguments, count, result);
}}
"""


def source(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str) -> str:
    """The C++ of one object: the setting, and the function that tvm_ffi finds as `name`."""
    flags = {
        key: str(bool(value)).lower()
        for key, value in {**facts, **knobs}.items()
        if key in ("write", "ahead", "around")
    }
    return SOURCE.format(
        name=name,
        state=STATES[facts["state_dtype"]],
        block=knobs["block"],
        ilp=knobs["ilp"],
        vec=knobs["vec"],
        **flags,
    )


def compile(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Writes folder/NAME.o, which exports `name`; ToolMissing without a compiler, BuildError where
    it fails.
    """
    return object_of(source(facts, knobs, name), name, folder)
