"""Lets tests that are written for CUDA run on a CPU: `torch.device("cuda")`, `device="cuda"` and
`.cuda()` mean the CPU, and what synchronises does nothing. For on_drop_ins.py.
"""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_DEVICE = torch.device


class _IsADevice(type):
    """torch.device cannot be subclassed: what stands in its place still knows its instances."""

    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, _DEVICE)


class Device(metaclass=_IsADevice):
    """Called as torch.device is."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return _DEVICE("cpu")


class OnCpu(TorchFunctionMode):
    """Tensors that are asked for on CUDA are made on the CPU."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if getattr(function, "__name__", "") == "cuda":
            return args[0]
        args = [_cpu(x) for x in args]
        return function(*args, **{name: _cpu(x) for name, x in (kwargs or {}).items()})


def _cpu(x: Any) -> Any:
    return "cpu" if isinstance(x, str) and x.split(":")[0] == "cuda" else x


def install(capability: tuple[int, int] = (9, 0)) -> None:
    """From now on and until the process ends, with a GPU of this capability to those who ask."""
    torch.device = Device  # type: ignore[misc]
    for name in ("synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_device"):
        setattr(torch.cuda, name, lambda *_, **__: None)
    torch.cuda.get_device_capability = lambda *_: capability
    OnCpu().__enter__()
