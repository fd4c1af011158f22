"""Operands: how an instruction reads and writes what it names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .program import SHARED_BASE, Program
from .values import Array, constant, kept, size, taken

if TYPE_CHECKING:
    from .grid import Grid
    from .threads import Threads

Reader = Callable[["Grid"], Array]
Writer = Callable[["Grid", Array, "Threads"], None]


@dataclass(frozen=True)
class Step:
    """What an instruction does to a grid. whole_warps: it is a warp's together."""

    run: Callable[["Grid", "Threads"], None]
    whole_warps: bool = False


def names(operand: str) -> list[str]:
    """The registers of `{%r1, %r2}`, or of `%r1`."""
    return [x.strip() for x in operand.strip("{}").split(",")]


def reader(operand: str, kind: str, program: Program) -> Reader:
    """Reads an operand as a type: [threads] or [1]."""
    if operand.startswith("%"):
        if "." in operand or operand == "%laneid":
            return lambda grid: taken(grid.special[operand], kind)
        return lambda grid: taken(grid.read(operand), kind)
    if operand in program.registers:
        return lambda grid: taken(grid.read(operand), kind)
    if operand in program.shared:
        value = np.full(1, SHARED_BASE + program.shared[operand], np.uint64)
        return lambda grid: taken(value, kind)
    fixed = constant(operand, kind)
    return lambda grid: fixed


def writer(operand: str, program: Program) -> Writer:
    """Writes a register; `_` is none."""
    if operand == "_":
        return lambda grid, value, threads: None
    kind = program.register_type(operand)
    return lambda grid, value, threads: grid.write(operand, kept(value, kind), threads)


def address(operand: str, program: Program) -> Reader:
    """Reads `[%rd1+8]`, or an array's name in place of the register, as 64-bit addresses."""
    base, _, offset = operand.strip("[] ").partition("+")
    if not offset and "-" in base[1:]:
        base, _, offset = base.partition("-")
        offset = f"-{offset}"
    shift = np.int64(int(offset or "0", 0))
    base = base.strip()
    if base.startswith("%"):
        kind = f"u{8 * size(program.register_type(base))}"
        get = reader(base, kind, program)
        return lambda grid: get(grid).astype(np.int64) + shift
    get = reader(base, "s64", program)
    return lambda grid: get(grid) + shift
