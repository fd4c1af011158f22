"""Makes an object of decode.cpp; imported in a worker process."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gdntune.kernels.cpu_object import object_of

SOURCE = Path(__file__).with_name("decode.cpp")


def compile(facts: Mapping[str, Any], knobs: Mapping[str, Any], name: str, folder: Path) -> Path:
    """Writes folder/NAME.o, which exports NAME; tvm_ffi finds it as `__tvm_ffi_NAME`."""
    defined = {"K_SIZE": facts["K"], "ROWS": knobs["rows"], "NAME": f"__tvm_ffi_{name}"}
    setting = "".join(f"#define {key} {value}\n" for key, value in defined.items())
    return object_of(setting + SOURCE.read_text(), name, folder)
