"""Memory as an interpreted kernel sees it: bytes at addresses, of which some may be touched.

Each byte says whether it may be read or written, so that an access beyond a tensor, or into the
gap between its rows, is a fault and not a neighbour's value. What is in gaps, and in shared memory
that nobody wrote, is 0xFF: NaN as a float, and far outside as an index.
"""

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .faults import Fault
from .races import Races
from .values import UNSIGNED, Array

READ, WRITE, AHEAD = 1, 2, 4
# Bytes between two tensors, and the multiple that each begins at: what allocators promise.
GUARD = 256
PLAIN_BASE = 1 << 40
SPREAD_BASE, SPREAD_ROOM = 1 << 46, 1 << 44


class Memory:
    """Bytes at addresses, with what may be done to each.

    base: the address of the first byte. races: who is told of accesses, from byte `watched` on.
    """

    def __init__(self, name: str, base: int, size: int):
        self.name, self.base = name, base
        # one element of 16 bytes more than asked for, so that any view of it is whole
        self.bytes = np.full(-(-size // 16) * 16 + 16, 0xFF, np.uint8)
        self.allowed = np.zeros(self.bytes.size, np.uint8)
        self.races: Races | None = None
        self.watched = 0

    def describe(self, address: int) -> str:
        """Where an address lies, in words."""
        return f"byte {address - self.base} of {self.name} memory"

    def written_ahead(self, addresses: Array) -> Array:
        """Whether the kernel ahead writes what lies at addresses."""
        offset = self._offsets(addresses)
        inside = (offset >= 0) & (offset < self.bytes.size)
        return inside & (self.allowed[np.where(inside, offset, 0)] & AHEAD != 0)

    def _offsets(self, addresses: Array) -> Array:
        """Where addresses lie in `bytes`; outside of them where they are none of ours."""
        return addresses - self.base

    def _elements(self, x: Array, width: int) -> Array:
        """Bytes as elements of `width`; of 16 as pairs of 8."""
        return x.view(np.uint64).reshape(-1, 2) if width == 16 else x.view(UNSIGNED[width])

    def _places(
        self, addresses: Array, width: int, need: int, where: Callable[[int], str]
    ) -> Array:
        """Indices of elements of `width` bytes; a fault where one may not be touched so."""
        offset = self._offsets(addresses)
        wrong = (offset < 0) | (offset > self.bytes.size - width) | (offset & (width - 1) != 0)
        if not wrong.any():
            places = offset >> (width.bit_length() - 1)
            full = UNSIGNED[min(width, 8)](int.from_bytes(bytes([need]) * min(width, 8), "little"))
            missing = (self._elements(self.allowed, width)[places] & full) != full
            wrong = missing.any(1) if width == 16 else missing
        if wrong.any():
            at = int(wrong.argmax())
            deed = "load" if need == READ else "store"
            why = "misaligned, " if offset[at] > 0 and offset[at] % width else ""
            place = self.describe(int(addresses[at]))
            raise Fault(f"{deed} of {width} bytes {where(at)}: {why}{place}")
        return places

    def load(
        self, addresses: Array, width: int, lanes: Array, where: Callable[[int], str]
    ) -> Array:
        """[n, width] bytes at n addresses. lanes: the thread of each; where: says who and which."""
        places = self._places(addresses, width, READ, where)
        if self.races is not None and (at := self._units(places, width)) is not None:
            self.races.read(at, lanes, where)
        return self._elements(self.bytes, width)[places].view(np.uint8).reshape(-1, width)

    def require(self, addresses: Array, width: int, where: Callable[[int], str]) -> None:
        """A fault where `width` bytes at an address may not be read; nobody's race."""
        self._places(addresses, width, READ, where)

    def store(
        self, addresses: Array, values: Array, lanes: Array, where: Callable[[int], str]
    ) -> None:
        """Writes [n, width] bytes at n addresses."""
        width = values.shape[1]
        places = self._places(addresses, width, WRITE, where)
        elements = self._elements(self.bytes, width)
        new = np.ascontiguousarray(values).view(np.uint64 if width == 16 else UNSIGNED[width])
        new = new if width == 16 else new[:, 0]
        changed = elements[places] != new
        elements[places] = new
        lost = elements[places] != new
        if width == 16:
            changed, lost = changed.any(1), lost.any(1)
        if lost.any():
            at = int(lost.argmax())
            text = f"other threads store something else there at once, {self.describe(int(addresses[at]))}"
            raise Fault(f"store of {width} bytes {where(at)}: {text}")
        if self.races is not None and (at := self._units(places, width)) is not None:
            self.races.write(at, lanes, changed, where)

    def _units(self, places: Array, width: int) -> Array | None:
        """[n, k] watched units of elements; None where none of them is watched."""
        assert self.races is not None
        first = places * width - self.watched
        if not (first >= 0).any():
            return None
        unit = self.races.unit
        return first[:, None] // unit + np.arange(max(1, width // unit))


class Shared(Memory):
    """Shared memory of all blocks of a grid, one after another; all of it may be read and written."""

    def __init__(self, base: int, size: int, blocks: int):
        self.block_bytes = -(-size // GUARD) * GUARD + GUARD
        super().__init__("shared", base, self.block_bytes * blocks)
        self.size = size
        rows = self.allowed[: self.block_bytes * blocks].reshape(blocks, self.block_bytes)
        rows[:, :size] = READ | WRITE

    def describe(self, address: int) -> str:
        offset = (address - self.base) % self.block_bytes
        return f"byte {offset} of the {self.size} of shared memory"


class _Spread(NamedTuple):
    """A tensor at addresses of its own, whose `dimension` has a stride far beyond 32 bits."""

    base: int
    stride: int  # bytes, as the kernel is told
    first: int  # where it is in our bytes
    real_stride: int
    row: int  # bytes that belong to one index of the dimension
    size: int  # of the dimension


class Global(Memory):
    """Global memory: copies of tensors' storages, which keep their strides and gaps.

    Tensors that share a storage share its copy. A byte may be read where an element of a tensor
    lies, and written where the tensor is among `writable`. Those among `spread` are shown to the
    kernel with 2^32 elements and more between neighbours along their first dimension (of one that
    has size 1, the second), so that an offset that was cut to 32 bits is seen. Those `ahead` are
    written by the kernel before this one.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        writable: Iterable[str],
        spread: Iterable[str],
        ahead: Iterable[str] = (),
    ):
        writable, ahead = set(writable), set(ahead)
        # those that may be written lie last, so that one number says what is watched for races
        names = sorted(tensors, key=lambda n: n in writable)
        self._storages: dict[int, tuple[int, torch.Tensor]] = {}
        top, watched = GUARD, 0
        for name in names:
            x = tensors[name]
            watched = watched or (top if name in writable else 0)
            if _key(x) not in self._storages:
                self._storages[_key(x)] = (top, x)
                top += -(-x.untyped_storage().nbytes() // GUARD) * GUARD + GUARD
        super().__init__("global", PLAIN_BASE, top)
        self.watched = watched or self.bytes.size
        self._ends: list[tuple[int, int, str]] = []
        self._spread: dict[str, _Spread] = {}
        for first, x in self._storages.values():
            raw = _raw(x)
            self.bytes[first : first + raw.size] = raw
        for name in names:
            how = READ | (WRITE if name in writable else 0) | (AHEAD if name in ahead else 0)
            self._allow(name, tensors[name], how)
        for name in sorted(set(spread) & tensors.keys()):
            self._spread[name] = self._spread_out(tensors[name])
        self._columns = np.array(list(self._spread.values()), np.int64).reshape(-1, 6).T

    def _allow(self, name: str, x: torch.Tensor, how: int) -> None:
        first = self._first(x)
        shape = (*x.shape, x.element_size())
        strides = (*(s * x.element_size() for s in x.stride()), 1)
        view = np.lib.stride_tricks.as_strided(self.allowed[first:], shape, strides)
        view |= how
        self._ends.append((first, first + _reach(shape, strides), name))

    def _first(self, x: torch.Tensor) -> int:
        """Where a tensor begins in our bytes."""
        return self._storages[_key(x)][0] + x.storage_offset() * x.element_size()

    def _spread_out(self, x: torch.Tensor) -> _Spread:
        dimension, size = _spread_dimension(x), x.element_size()
        row = [n for d, n in enumerate(x.shape) if d != dimension]
        strides = [n * size for d, n in enumerate(x.stride()) if d != dimension]
        real = x.stride(dimension) * size
        base = SPREAD_BASE + len(self._spread) * SPREAD_ROOM
        far = (1 << 32) * size + real
        reach = _reach((*row, size), (*strides, 1))
        return _Spread(base, far, self._first(x), real, reach, x.shape[dimension])

    def shown(self, name: str, x: torch.Tensor) -> tuple[int, tuple[int, ...]]:
        """The address and the strides, in elements, that a kernel is told of a tensor."""
        strides = list(x.stride())
        if name not in self._spread:
            return self.base + self._first(x), tuple(strides)
        found = self._spread[name]
        strides[_spread_dimension(x)] = found.stride // x.element_size()
        return found.base, tuple(strides)

    def write_back(self) -> None:
        """The storages' bytes to the tensors that they came from."""
        for first, x in self._storages.values():
            raw = _raw(x)
            raw[:] = self.bytes[first : first + raw.size]

    def _offsets(self, addresses: Array) -> Array:
        which = (addresses - SPREAD_BASE) // SPREAD_ROOM
        if (which < 0).all():
            return addresses - self.base
        known = (which >= 0) & (which < len(self._spread))
        base, stride, first, real, row, size = self._columns[:, np.where(known, which, 0)]
        index, rest = np.divmod(addresses - base, stride)
        # an index beyond the dimension is not a place of the next tensor
        ours = known & (rest < row) & (index >= 0) & (index < size)
        spread = np.where(ours, first + index * real + rest, -1)
        return np.where(which < 0, addresses - self.base, spread)

    def describe(self, address: int) -> str:
        for name, x in self._spread.items():
            if x.base - SPREAD_ROOM // 2 <= address < x.base + SPREAD_ROOM // 2:
                index, rest = divmod(address - x.base, x.stride)
                return f"byte {rest} of index {index} of {name}, which has {x.row} an index, of {x.size}"
        offset = address - self.base
        for first, end, name in self._ends:
            if first <= offset < end:
                read = self.allowed[offset] & READ
                return f"byte {offset - first} of {name}, {'to be read alone' if read else 'a gap'}"
        first, end, name = min(
            self._ends, key=lambda e: min(abs(offset - e[0]), abs(offset - e[1]))
        )
        if offset < first:
            return f"{first - offset} bytes before {name}"
        return f"{offset - end} bytes beyond the end of {name}"


def _spread_dimension(x: torch.Tensor) -> int:
    return 0 if x.shape[0] != 1 or x.ndim == 1 else 1


def _reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Bytes from the first to behind the last element."""
    if 0 in shape:
        return 0
    return sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) + 1


def _key(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _raw(x: torch.Tensor) -> Any:
    """A storage's bytes, shared."""
    storage = x.untyped_storage()
    if not storage.nbytes():
        return np.zeros(0, np.uint8)
    return np.ctypeslib.as_array(
        ctypes.cast(storage.data_ptr(), ctypes.POINTER(ctypes.c_uint8)), (storage.nbytes(),)
    )
