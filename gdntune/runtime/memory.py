"""Whether a tensor is memory that a kernel can read: torch has many that are not."""

from collections.abc import Callable
from typing import Any

import torch

_KEYS = torch._C.DispatchKey
SUBCLASS, FUNCTIONAL = _KEYS.Python, _KEYS.Functionalize
# What such a tensor is to a reader, by the dispatch key that says so.
WRAPPERS = {
    _KEYS.Python: "a subclass with __torch_dispatch__, as FakeTensor and DTensor are",
    _KEYS.Negative: "a view that is negated when it is read (torch._neg_view)",
    _KEYS.Conjugate: "a view that is conjugated when it is read",
    _KEYS.ZeroTensor: "zeros without memory (torch._efficientzerotensor)",
    _KEYS.Functionalize: "a wrapper of torch.func.functionalize",
    _KEYS.FuncTorchBatched: "a wrapper of torch.vmap",
    _KEYS.FuncTorchGradWrapper: "a wrapper of torch.func.grad or jvp",
}
_LAZY = (_KEYS.Negative, _KEYS.Conjugate, _KEYS.ZeroTensor)


def _as_strided(x: Any, size: Any, stride: Any, ahead: int) -> Any:
    return x.as_strided(size, stride, x.storage_offset() + ahead)


# view(x, size, stride, ahead): x's memory from `ahead` elements on, as another dense tensor. By
# what torch.compile's own programs use where torch has it: half as long, past the dispatcher, so
# that x must be plain memory that no gradient is asked of.
view: Callable[..., Any] = getattr(torch._C._dynamo.guards, "_reinterpret_tensor", _as_strided)


def wrapper(x: Any) -> Any:
    """The dispatch key by which a tensor is something else than memory, or None."""
    keys = torch._C._dispatch_keys(x)
    return next((key for key in WRAPPERS if keys.has(key)), None)


def memory_fault(name: str, x: Any, inside: Any = None) -> str | None:
    """Why no operator of ours can handle a tensor; None where one may.

    inside: the dispatch key of a transform that is active, whose wrappers it handles.
    """
    key = wrapper(x)
    if key in _LAZY:
        return (
            f"{name} is {WRAPPERS[key]}: nothing is copied behind your back; give its .clone(), or"
            " .resolve_neg() of a negated view"
        )
    if key is not None and key not in (SUBCLASS, inside):
        return (
            f"{name} is {WRAPPERS[key]}, outside of its transform: expected a dense tensor with"
            " memory"
        )
    if key is None and x.device.type != "meta" and x.numel() and not x.data_ptr():
        return f"{name} has no memory: its storage was freed; give a tensor that has"
    return None
