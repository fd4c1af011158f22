"""The host code of a compiled object, run without a GPU: what it launches, and with what.

A linked object holds `host.c` in place of CuTe DSL's runtime. It takes tensors as a CUDA device's
would be, at addresses of this process, and hands its launch to Python.
"""

import ctypes
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import tvm_ffi

from gdntune.runtime.headers import DLTensor

from .faults import Unmodelled
from .grid import Launch
from .program import Program

_CUDA = 2
# kind and bits, as DLPack numbers them
_DTYPES = {
    torch.bfloat16: (4, 16),
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.int32: (0, 32),
}
# cudaLaunchAttributeClusterDimension and -ProgrammaticStreamSerialization; bytes of an attribute
_CLUSTER, _DEPENDENT, _ATTRIBUTE = 4, 6, 72


class _Config(ctypes.Structure):
    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint32),
    )


class _ManagedTensor(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_LAUNCHED = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Config), ctypes.POINTER(ctypes.c_void_p))
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class DeviceTensor:
    """A tensor's shape and dtype at an address, handed over by DLPack as a CUDA tensor."""

    def __init__(self, x: torch.Tensor, address: int, strides_in_elements: Sequence[int]):
        shape = (ctypes.c_int64 * x.ndim)(*x.shape)
        strides = (ctypes.c_int64 * x.ndim)(*strides_in_elements)
        kind, bits = _DTYPES[x.dtype]
        tensor = DLTensor(address, _CUDA, 0, x.ndim, kind, bits, 1, shape, strides, 0)
        self._kept = shape, strides, _ManagedTensor(tensor, None, None)

    def __dlpack__(self, **_: Any) -> Any:
        return _capsule(ctypes.addressof(self._kept[2]), b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return _CUDA, 0


def link(object_file: Path, library: Path) -> None:
    """Links an object with `host.c` into a library."""
    source = Path(__file__).with_name("host.c")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-Wl,-Bsymbolic", "-o"]
    subprocess.run([*command, str(library), str(source), str(object_file)], check=True)


@cache
def _loaded(library: Path) -> tuple[ctypes.CDLL, Any]:
    return ctypes.CDLL(str(library)), tvm_ffi.load_module(str(library))


def launch_of(library: Path, function: str, arguments: Sequence[Any], program: Program) -> Launch:
    """What an object's function launches when it is called; an exception of its own passes."""
    found: list[Launch] = []

    def launched(config: Any, parameters: Any) -> None:
        c = config.contents
        raw = [ctypes.string_at(parameters[n], p.size) for n, p in enumerate(program.parameters)]
        dependent = any(first for (first, *_) in _attributes(c, _DEPENDENT))
        shape = tuple(c.grid), tuple(c.block)
        found.append(Launch(*shape, c.shared_bytes, tuple(raw), _cluster(c), dependent))

    symbols, module = _loaded(library)
    callback: Callable[..., None] = _LAUNCHED(launched)
    symbols.ptx_on_launch(callback)
    module[function](*arguments)
    if len(found) != 1:
        raise Unmodelled(f"{function} launched {len(found)} kernels: expected one")
    return found[0]


def _attributes(config: _Config, kind: int) -> Iterator[list[int]]:
    """The first three words of each of a launch's attributes of one kind."""
    for n in range(config.attribute_count):
        at = config.attributes + n * _ATTRIBUTE
        if ctypes.c_uint32.from_address(at).value == kind:
            yield list((ctypes.c_uint32 * 3).from_address(at + 8))


def _cluster(config: _Config) -> int:
    """Blocks of a cluster; Unmodelled where they are not neighbours in the order x, y."""
    for x, y, z in _attributes(config, _CLUSTER):
        if z > 1 or (y > 1 and x != config.grid[0]):
            raise Unmodelled(f"clusters of {x}, {y}, {z} blocks")
        return x * y
    return 1
