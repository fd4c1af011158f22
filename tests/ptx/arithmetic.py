"""Instructions that compute a register from registers: tables from a name to a numpy function.

ex2, lg2, rcp, sqrt, rsqrt, tanh, sin and cos are exact here, whatever the precision that PTX
grants them; `fma` is computed in fp64 and rounded, so it may differ in a last bit of 2^29.
"""

from collections.abc import Callable

import numpy as np

from .faults import Unmodelled
from .program import Instruction
from .values import (
    TYPES,
    Array,
    from_bf16,
    from_fp16,
    halves,
    joined,
    size,
    to_bf16,
    to_fp16,
    truncated_bf16,
)

Function = Callable[..., Array]

# Parts of a name that say how to round or what to flush, which numpy does by itself, or which
# change nothing that can be seen here.
_MANNERS = {"rn", "ftz", "approx", "full", "lo", "sat", "NaN", "xorsign", "uni"}

FLOATS: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "neg": np.negative,
    "abs": np.abs,
    "min": np.fmin,
    "max": np.fmax,
    "rcp": lambda x: 1 / x,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "ex2": np.exp2,
    "lg2": np.log2,
    "tanh": np.tanh,
    "sin": np.sin,
    "cos": np.cos,
    "copysign": lambda a, b: np.copysign(b, a),
}


def _fma(a: Array, b: Array, c: Array) -> Array:
    return a.astype(np.float64) * b.astype(np.float64) + c


FLOATS["fma"] = FLOATS["mad"] = _fma


def _quotient(a: Array, b: Array) -> Array:
    # towards zero, as C; a division by zero gives all ones on a GPU
    if a.dtype.kind == "u":
        return np.where(b == 0, ~np.zeros_like(b), a // np.where(b == 0, 1, b))
    exact = np.abs(a.astype(np.int64)) // np.maximum(np.abs(b.astype(np.int64)), 1)
    return np.where(b == 0, -1, np.sign(a) * np.sign(b) * exact).astype(a.dtype)


def _shifted(a: Array, n: Array, left: bool) -> Array:
    """A shift; one by all bits or more leaves nothing but the sign."""
    bits = 8 * a.dtype.itemsize
    n = n.astype(np.uint32)
    inside = np.minimum(n, bits - 1).astype(a.dtype)
    if left:
        return np.where(n >= bits, a.dtype.type(0), a << inside)
    filled = a >> inside
    return filled if a.dtype.kind == "i" else np.where(n >= bits, a.dtype.type(0), filled)


def _extracted(a: Array, start: Array, length: Array) -> Array:
    """bfe, for fields that lie within the word."""
    bits = 8 * a.dtype.itemsize
    start, length = start & 0xFF, length & 0xFF
    raised = _shifted(a, np.maximum(bits - start.astype(np.int64) - length, 0), left=True)
    return np.where(length == 0, a.dtype.type(0), _shifted(raised, bits - length, left=False))


def _chosen_bytes(a: Array, b: Array, selector: Array) -> Array:
    """prmt in its plain mode."""
    both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
    out = np.zeros(np.broadcast_shapes(both.shape, selector.shape), np.uint32)
    for i in range(4):
        nibble = (selector >> np.uint32(4 * i)) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (nibble & np.uint32(7)))) & np.uint64(0xFF)
        byte = np.where(nibble & np.uint32(8), np.where(byte & np.uint64(0x80), 0xFF, 0), byte)
        out |= byte.astype(np.uint32) << np.uint32(8 * i)
    return out


def _table(a: Array, b: Array, c: Array, table: Array) -> Array:
    """lop3: any function of three bits."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
    for i in range(8):
        if int(table[0]) >> i & 1:
            out |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return out


def _funnel(low: Array, high: Array, n: Array, left: bool, clamp: bool) -> Array:
    """shf: a shift of 64 bits, of which the high (left) or the low (right) half is kept."""
    n = np.minimum(n, 32) if clamp else n & np.uint32(31)
    both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
    if left:
        return ((both << n.astype(np.uint64)) >> np.uint64(32)).astype(np.uint32)
    return (both >> n.astype(np.uint64)).astype(np.uint32)


def _leading_zeros(a: Array) -> Array:
    bits = 8 * a.dtype.itemsize
    exponent = np.frexp(a.astype(np.longdouble))[1]
    return (bits - exponent).astype(np.uint32)


INTEGERS: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "div": _quotient,
    "rem": lambda a, b: a - _quotient(a, b) * b,
    "neg": np.negative,
    "abs": np.abs,
    "min": np.minimum,
    "max": np.maximum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.invert,
    "shl": lambda a, n: _shifted(a, n, left=True),
    "shr": lambda a, n: _shifted(a, n, left=False),
    "bfe": _extracted,
    "prmt": _chosen_bytes,
    "lop3": _table,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
    "clz": _leading_zeros,
}
PREDICATES: dict[str, Function] = {
    "and": np.logical_and,
    "or": np.logical_or,
    "xor": np.logical_xor,
    "not": np.logical_not,
    "mov": lambda a: a,
}
COMPARISONS: dict[str, Function] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "lo": np.less,
    "ls": np.less_equal,
    "hi": np.greater,
    "hs": np.greater_equal,
}
# One of them may be NaN: `ltu` is true then, `lt` is not.
_UNORDERED = {f"{name}u": f for name, f in COMPARISONS.items() if len(name) == 2}
# The operand that is of another type than the instruction.
_COUNTS = {"shl": (1,), "shr": (1,), "bfe": (1, 2)}


def comparison(i: Instruction) -> tuple[str, Function, Function | None]:
    """The type that a setp compares, how, and how its result meets a predicate."""
    how, kind = i.parts[1], i.parts[-1]
    join = PREDICATES.get(i.parts[2])
    if how in COMPARISONS:
        return kind, COMPARISONS[how], join
    if how == "num":
        return kind, lambda a, b: ~(np.isnan(a) | np.isnan(b)), join
    if how == "nan":
        return kind, lambda a, b: np.isnan(a) | np.isnan(b), join
    if how in _UNORDERED:
        f = _UNORDERED[how]
        return kind, lambda a, b: f(a, b) | np.isnan(a) | np.isnan(b), join
    raise Unmodelled(i.text)


def _product(i: Instruction, kind: str) -> Function:
    """mul and mad of integers that keep more, or other, bits than the low ones."""
    part = i.parts[1]
    wider = np.dtype(TYPES[kind]).kind + str(2 * size(kind)) if size(kind) < 8 else None
    if wider is None:
        raise Unmodelled(i.text)
    shift = 8 * size(kind)

    def full(a: Array, b: Array) -> Array:
        product = a.astype(wider) * b.astype(wider)
        return product if part == "wide" else (product >> shift).astype(a.dtype)

    if i.parts[0] == "mul":
        return full
    return lambda a, b, c: full(a, b) + c


def _flushing(f: Function, kind: str) -> Function:
    """Numbers below the normal ones are zero, before and after."""
    tiny = np.finfo(TYPES[kind]).tiny

    def flushed(x: Array) -> Array:
        return np.where(np.abs(x) < tiny, np.copysign(x.dtype.type(0), x), x)

    return lambda *x: flushed(f(*(flushed(y) for y in x)).astype(TYPES[kind]))


def _packed(f: Function, kind: str) -> Function:
    """The same of two numbers a register."""
    if kind == "f32x2":

        def both(*x: Array) -> Array:
            pairs = [np.broadcast_to(y, np.broadcast(*x).shape).copy().view(np.float32) for y in x]
            return f(*pairs).astype(np.float32).view(np.uint64)

        return both
    widen, narrow = (from_bf16, to_bf16) if kind == "bf16x2" else (from_fp16, to_fp16)

    def each(*x: Array) -> Array:
        split = [halves(y) for y in x]
        low, high = (narrow(f(*(widen(s[n]) for s in split)).astype(np.float32)) for n in (0, 1))
        return joined(low, high)

    return each


def computation(i: Instruction) -> tuple[str, tuple[str, ...], Function] | None:
    """(type of the result, types of the operands, function) of an arithmetic instruction, or None
    where the name is of no arithmetic here.
    """
    name, kind = i.parts[0], i.parts[-1]
    n = len(i.operands) - 1
    if kind == "pred" and name in PREDICATES:
        return "pred", ("pred",) * n, PREDICATES[name]
    if kind in ("f32x2", "f16x2", "bf16x2") and name in FLOATS:
        return kind, (kind,) * n, _packed(FLOATS[name], kind)
    if kind in ("f16", "bf16") and name in FLOATS:
        widen, narrow = (from_bf16, to_bf16) if kind == "bf16" else (from_fp16, to_fp16)
        f = FLOATS[name]
        return kind, (kind,) * n, lambda *x: narrow(f(*map(widen, x)).astype(np.float32))
    if kind in ("f32", "f64") and name in FLOATS:
        f = FLOATS[name]
        if name in ("min", "max") and "NaN" in i.parts:
            f = np.minimum if name == "min" else np.maximum
        if "sat" in i.parts or set(i.parts[1:-1]) - _MANNERS:
            raise Unmodelled(i.text)
        f = _flushing(f, kind) if "ftz" in i.parts else f
        return kind, (kind,) * n, f
    if name in INTEGERS and kind in TYPES and kind[0] in "bsu":
        if set(i.parts[1:-1]) - {"lo", "wide", "hi", "relu"}:
            raise Unmodelled(i.text)
        kinds = [kind] * n
        for at in _COUNTS.get(name, ()):
            kinds[at] = "u32"
        if name in ("mul", "mad") and i.parts[1] in ("wide", "hi"):
            result = f"{kind[0]}{2 * size(kind) * 8}" if i.parts[1] == "wide" else kind
            if name == "mad":
                kinds[2] = result
            return result, tuple(kinds), _product(i, kind)
        result = "u32" if name in ("popc", "clz") else kind
        f = INTEGERS[name]
        if "relu" in i.parts:
            return result, tuple(kinds), lambda *x: np.maximum(f(*x), 0)
        return result, tuple(kinds), f
    if name == "shf":
        left, clamp = i.parts[1] == "l", i.parts[2] == "clamp"
        return kind, ("b32", "b32", "u32"), lambda a, b, c: _funnel(a, b, c, left, clamp)
    if name == "cvt":
        return _conversion(i)
    return None


_WIDEN: dict[str, Function] = {"bf16": from_bf16, "f16": from_fp16}
_NARROW: dict[str, Function] = {"bf16": to_bf16, "f16": to_fp16}
_TO_INTEGER = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


def _conversion(i: Instruction) -> tuple[str, tuple[str, ...], Function]:
    """cvt: from a type to another. Sources beyond an integer's range end at its ends."""
    to, source, manner = i.parts[-2], i.parts[-1], set(i.parts[1:-2])
    if manner - {"rn", "rz", "ftz", *_TO_INTEGER}:
        raise Unmodelled(i.text)
    narrow = dict(_NARROW)
    if "rz" in manner:
        narrow = {"bf16": truncated_bf16}
    if to in ("bf16x2", "f16x2") and source == "f32" and to[:-2] in narrow:
        f = narrow[to[:-2]]
        return to, ("f32", "f32"), lambda high, low: joined(f(low), f(high))
    if to in narrow and source == "f32":
        return to, ("f32",), narrow[to]
    if to == "f32" and source in _WIDEN:
        return to, (source,), _WIDEN[source]
    floating = {"f32", "f64"}
    if to in floating and (source in floating or source[0] in "su"):
        return to, (source,), lambda x: x.astype(TYPES[to])
    if source in floating and to[0] in "su" and size(to) < 8:
        rounding = next((f for n, f in _TO_INTEGER.items() if n in manner), np.trunc)
        ends = np.iinfo(TYPES[to])

        def clamped(x: Array) -> Array:
            inside = np.clip(rounding(x.astype(np.float64)), float(ends.min), float(ends.max))
            return np.where(np.isnan(x), 0, inside).astype(TYPES[to])

        return to, (source,), clamped
    if to[0] in "su" and source[0] in "su":
        return to, (source,), lambda x: x.astype(TYPES[to])
    raise Unmodelled(i.text)
