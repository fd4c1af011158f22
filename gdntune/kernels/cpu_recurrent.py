"""The CPU decode kernel: C++ whose one template, cpu/decode.h, serves every contract. This writes
its setting and compiles it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdntune.kernels.cpu_object import STATES, object_of

SOURCE = """\
#include "decode.h"

namespace {{
struct Setting {{
  using State = {state};
  static constexpr bool k_last = {k_last};
  static constexpr int K = {K}, tile_v = {tile_v}, ilp = {ilp}, vec = {vec}, tokens = {tokens};
  static constexpr bool ahead = {ahead}, around = {around}, beta_logit = {beta_logit}, lower_bound = {lower_bound};
  static constexpr Writes writes = Writes::{writes};
}};
}}  // namespace

extern "C" TVM_FFI_DLL_EXPORT int __tvm_ffi_{name}(void*, const TVMFFIAny* arguments, int32_t count, TVMFFIAny* result) {{
  return Decode<Setting>::call(arguments, count, result);
}}
"""


def _cpp(value: bool) -> str:
    return "true" if value else "false"


def source(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str) -> str:
    """The C++ of one object: the setting, and the function that tvm_ffi finds as `name`."""
    return SOURCE.format(
        name=name,
        state=STATES[facts["state_dtype"]],
        k_last=_cpp(facts["layout"] == "k_last"),
        K=facts["K"],
        tokens=facts["tokens"],
        beta_logit=_cpp(facts["beta"] == "logit"),
        lower_bound=_cpp(facts["gate"] == "lower_bound"),
        writes=facts["writes"],
        tile_v=knobs["tile_v"],
        ilp=knobs["ilp"],
        vec=knobs["vec"],
        ahead=_cpp(knobs["ahead"]),
        around=_cpp(knobs["around"]),
    )


def compile(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Writes folder/NAME.o, which exports `name`; ToolMissing without a compiler, BuildError where
    it fails.
    """
    return object_of(source(facts, knobs, name), name, folder)
