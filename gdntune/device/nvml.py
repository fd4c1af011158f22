"""NVML through pynvml, where it is: every question may go unanswered, and no answer is an error."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def opened() -> Iterator[Any]:
    """pynvml, initialised; None without pynvml, without a driver (its library comes with it), or
    without permission.
    """
    try:
        import pynvml  # type: ignore[import-untyped]
    except ImportError:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def query(lib: Any, names: str, *arguments: Any) -> Any:
    """The value of the first of NVML's functions `names` that exists; None where this GPU or driver
    refuses.
    """
    call = next((getattr(lib, name) for name in names.split() if hasattr(lib, name)), None)
    try:
        return call and call(*arguments)
    except lib.NVMLError:
        return None


def device(lib: Any, index: int) -> Any:
    """NVML's handle of torch's CUDA device `index`, or None."""
    # NVML numbers all GPUs by bus; torch those of CUDA_VISIBLE_DEVICES, fastest first. The UUID is
    # the same in both.
    import torch

    if torch.cuda.is_available() and index < torch.cuda.device_count():
        uuid = getattr(torch.cuda.get_device_properties(index), "uuid", None)
        if uuid is not None:
            return query(lib, "nvmlDeviceGetHandleByUUID", f"GPU-{uuid}")
    return query(lib, "nvmlDeviceGetHandleByIndex", index)
