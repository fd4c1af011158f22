"""Tensors that are views of a caller's, as headers for a compiled function: an address, sizes and
strides, made once and aimed anew at each call.

torch makes a view in 0.5 us and hands it over in 0.1; to aim a header takes 0.05. tvm_ffi's tensors
are DLPack's headers behind an object's, which its C API lays down; `header` looks whether they are
where it says, and there are none where they are not.
"""

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

# TVMFFIObject, in front of a tensor's DLTensor: two counts, an index and a deleter.
_OBJECT_BYTES = 24
_CPU, _CUDA = 1, 2
# DLPack's kind and bits.
_DTYPES = {torch.bfloat16: (4, 16), torch.float16: (2, 16), torch.float32: (2, 32)}


class DLTensor(ctypes.Structure):
    """DLPack's tensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Header(NamedTuple):
    """tensor: what a compiled function takes; dl: its header, whose `data` is set before."""

    tensor: Any
    dl: DLTensor
    kept: Any


class _Exporter:
    def __init__(self, managed: _Managed):
        self._managed = managed

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = (
            ctypes.py_object,
            (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p),
        )
        return new(ctypes.addressof(self._managed), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._managed.tensor.device_type, self._managed.tensor.device_id


def header(x: torch.Tensor, shape: Sequence[int], strides: Sequence[int]) -> Header | None:
    """A header of tensors like `x` of a shape and strides; None where tvm_ffi's tensors are not
    what its C API says.
    """
    import tvm_ffi

    sizes = ((ctypes.c_int64 * len(n))(*n) for n in (shape, strides))
    kept = tuple(sizes)
    pointers = (ctypes.cast(n, ctypes.POINTER(ctypes.c_int64)) for n in kept)
    kind, bits = _DTYPES[x.dtype]
    on = _CPU if x.device.type == "cpu" else _CUDA
    managed = _Managed(
        DLTensor(x.data_ptr(), on, x.device.index or 0, len(shape), kind, bits, 1, *pointers, 0)
    )
    try:
        tensor = tvm_ffi.from_dlpack(_Exporter(managed))
        dl = DLTensor.from_address(tensor.__chandle__() + _OBJECT_BYTES)
        if _fields(dl) != _fields(managed.tensor):
            return None
        return Header(tensor, dl, (managed, kept))
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None


def _fields(dl: DLTensor) -> list[Any]:
    """A header's fields as numbers; those of another thing are read as safely, since an object of
    tvm_ffi is longer than its own header.
    """
    found = []
    for name, _ in DLTensor._fields_:
        value = getattr(dl, name)
        pointer = isinstance(value, ctypes._Pointer)
        found.append(ctypes.cast(value, ctypes.c_void_p).value if pointer else value)
    return found
