"""Values of registers: PTX's types as numpy's, constants, and the 16-bit floats.

A register is an array of unsigned integers, one element a thread, or one element in all where the
threads have the same value. What an instruction takes it for is a view.
"""

import struct

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]

TYPES: dict[str, type] = {
    "pred": np.bool_,
    "b8": np.uint8,
    "u8": np.uint8,
    "s8": np.int8,
    "b16": np.uint16,
    "u16": np.uint16,
    "s16": np.int16,
    "f16": np.uint16,
    "bf16": np.uint16,
    "b32": np.uint32,
    "u32": np.uint32,
    "s32": np.int32,
    "f32": np.float32,
    "f16x2": np.uint32,
    "bf16x2": np.uint32,
    "b64": np.uint64,
    "u64": np.uint64,
    "s64": np.int64,
    "f64": np.float64,
    "f32x2": np.uint64,
}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def size(kind: str) -> int:
    """Bytes of a type."""
    return np.dtype(TYPES[kind]).itemsize


def poison(kind: str) -> Array:
    """What a register holds before it is written: NaN as a float, far outside as an address."""
    if kind == "pred":
        return np.zeros(1, np.bool_)
    return np.full(1, np.iinfo(UNSIGNED[size(kind)]).max, UNSIGNED[size(kind)])


def taken(x: Array, kind: str) -> Array:
    """A register's array as a type; of a wider register the low bytes."""
    wanted = np.dtype(TYPES[kind])
    if x.dtype.itemsize != wanted.itemsize:
        x = x.astype(UNSIGNED[wanted.itemsize])
    return x if x.dtype == wanted else x.view(wanted)


def kept(x: Array, register: str) -> Array:
    """A result as a register of the declared type holds it; a signed one is extended by its sign."""
    wanted = np.dtype(TYPES[register])
    if x.dtype.itemsize != wanted.itemsize:
        x = x.astype(np.int64 if x.dtype.kind == "i" else np.uint64).astype(
            UNSIGNED[wanted.itemsize]
        )
    unsigned = UNSIGNED[wanted.itemsize] if register != "pred" else np.bool_
    return x if x.dtype == unsigned else x.view(unsigned)


def constant(text: str, kind: str) -> Array:
    """A constant operand, one element."""
    if text[:2] in ("0f", "0F"):
        return np.full(1, int(text[2:], 16), np.uint32).view(np.float32)
    if text[:2] in ("0d", "0D"):
        return np.full(1, int(text[2:], 16), np.uint64).view(np.float64)
    if kind in ("f32", "f64"):
        return np.full(1, float(text), TYPES[kind])
    if kind == "pred":
        return np.full(1, int(text, 0) != 0)
    bits = int(text.rstrip("U"), 0) & (2 ** (8 * size(kind)) - 1)
    return np.full(1, bits, UNSIGNED[size(kind)]).view(TYPES[kind])


def from_bf16(x: Array) -> Array:
    """fp32 of bf16's bits."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_bf16(x: Array) -> Array:
    """bf16's bits, rounded to nearest even; a NaN is the one that hardware makes."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded.astype(np.uint16))


def truncated_bf16(x: Array) -> Array:
    """bf16's bits, rounded towards zero."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), bits.astype(np.uint16))


def from_fp16(x: Array) -> Array:
    """fp32 of fp16's bits."""
    return x.view(np.float16).astype(np.float32)


def to_fp16(x: Array) -> Array:
    """fp16's bits, rounded to nearest even; a NaN is the one that hardware makes."""
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def halves(x: Array) -> tuple[Array, Array]:
    """The low and the high 16 bits of 32."""
    return (x & np.uint32(0xFFFF)).astype(np.uint16), (x >> np.uint32(16)).astype(np.uint16)


def joined(low: Array, high: Array) -> Array:
    """32 bits of two times 16."""
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def bits_of(value: float) -> str:
    """A fp32 constant as PTX writes it."""
    return "0f" + struct.pack(">f", value).hex().upper()
