"""A compiled kernel as a function of tensors on the CPU, by the calling convention of kernels."""

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import torch

from gdntune.kernels.spec import FLOOR_ARGUMENTS, arguments_of
from gdntune.problem import Contract

from . import grid, host
from .build import Compiled
from .memory import Global
from .program import Program, parse

# What a model's kernel just before this one writes. Indices, states and parameters are older.
AHEAD = ("q", "k", "v", "a", "b", "mixed_qkv", "output_gate")


@cache
def program_of(ptx: str) -> Program:
    """A program, parsed once."""
    return parse(ptx)


class Interpreted:
    """Calls an object's host code and interprets what it launches.

    names: those of the arguments. writable: arguments that may be written to; a store into another
    one is a fault, as is any access beyond a tensor's elements. spread: arguments whose strides
    are 64-bit, and are made so large that they must be. ahead: those that the kernel before this
    one writes. ptx: in place of the object's own.
    """

    def __init__(
        self,
        compiled: Compiled,
        names: Sequence[str],
        writable: Iterable[str],
        spread: Iterable[str],
        ahead: Iterable[str] = (),
        ptx: str | None = None,
    ):
        self.compiled, self.names = compiled, names
        self.writable, self.spread = frozenset(writable), frozenset(spread)
        self.ahead = frozenset(ahead)
        self.program = program_of(ptx or compiled.ptx)

    def __call__(self, *arguments: Any) -> None:
        named = dict(zip(self.names, arguments, strict=True))
        tensors = {n: x for n, x in named.items() if isinstance(x, torch.Tensor)}
        memory = Global(tensors, self.writable & tensors.keys(), self.spread, self.ahead)
        handed = [
            host.DeviceTensor(x, *memory.shown(n, x)) if n in tensors else x
            for n, x in named.items()
        ]
        c = self.compiled
        launch = host.launch_of(c.library, c.function, handed, self.program)
        grid.run(self.program, launch, memory)
        memory.write_back()


def decode(compiled: Compiled, contract: Contract, ptx: str | None = None) -> Interpreted:
    """A decode kernel: it writes outputs, what is kept between tokens, and states where it may."""
    writes_state = contract.mode == "update" or contract.intermediate == "slots"
    writable = ["output", "intermediate", *(["state", "conv_state"] if writes_state else [])]
    if contract.ring:
        writable += ["ring_k", "ring_u", "ring_decay"]
    # GDN's a and b, and indices, are small: their strides are of 32 bits
    spread = ["state", "q", "k", "v", "output", "intermediate", "output_gate"]
    spread += ["mixed_qkv", "conv_state", "ring_k", "ring_u", "ring_decay"]
    if contract.op == "kda_decode":
        spread.append("a")
    return Interpreted(compiled, arguments_of(contract), writable, spread, AHEAD, ptx)


def floor(compiled: Compiled, contract: Contract, ptx: str | None = None) -> Interpreted:
    """A floor kernel."""
    writable = ["intermediate", "sink", *(["state"] if contract.mode == "update" else [])]
    return Interpreted(compiled, FLOOR_ARGUMENTS, writable, ["state", "intermediate"], ptx=ptx)
