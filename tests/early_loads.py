"""What stands before a state's loads in a kernel's machine code: sm_90's, of cubins.

    python tests/early_loads.py tables/nvidia-h200/*.json [--arch sm_90a]

Compiles what the tables choose, without a GPU, and prints for each the instructions before the first
of the state's loads, how many of them are arithmetic in fp32, and how often a warp has waited for
memory until then: once for the slot's index, or twice where the slot hangs on another index. ptxas may
put arithmetic that waits for the tokens' inputs ahead of the state's loads, so that they are a
memory's latency late; the kernel's source does not show it.

An instruction is 16 bytes: its opcode in the lowest 12 bits, a load's size in bits 73 to 75, and from
bit 105 on stall, yield, the barrier that a load sets, one more, and the barriers that are waited for.
"""

import argparse
import dataclasses
import importlib
import io
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

LOAD, COPY, BULK = 0x981, 0xFAE, 0x3BA
# by the lowest 9 bits, whatever their operands are: special functions; sum, product, both
SPECIAL, FLOATS = 0x108, (0x021, 0x020, 0x023)
# loads of one group are no more than so many instructions apart
APART = 10


class Instruction(NamedTuple):
    """opcode: 12 bits. size: of a load, 5 of 8 bytes, 6 of 16. sets: its barrier, 7 none. waits: bits."""

    opcode: int
    size: int
    sets: int
    waits: int


class Early(NamedTuple):
    """Of a kernel: instructions before the state's first load, those among them that are special
    functions or arithmetic in fp32, waits for memory, and the state's loads.
    """

    instructions: int
    special: int
    floats: int
    waits: int
    loads: int


def instructions(cubin: bytes) -> list[Instruction]:
    """The instructions of a cubin's kernel."""
    from elftools.elf.elffile import ELFFile

    (text,) = (
        section.data()
        for section in ELFFile(io.BytesIO(cubin)).iter_sections()
        if section.name.startswith(".text.")
    )
    found = []
    for at in range(0, len(text), 16):
        x = int.from_bytes(text[at : at + 16], "little")
        found.append(Instruction(x & 0xFFF, x >> 73 & 7, x >> 110 & 7, x >> 116 & 63))
    return found


def early(code: list[Instruction]) -> Early:
    """What stands before the state's loads: the largest group of loads of 8 or 16 bytes."""
    groups: list[list[int]] = []
    for at, x in enumerate(code):
        if (x.opcode == LOAD and x.size in (5, 6)) or x.opcode in (COPY, BULK):
            if not groups or at - groups[-1][-1] > APART:
                groups.append([])
            groups[-1].append(at)
    state = max(groups, key=len)
    waits, pending = 0, 0
    for x in code[: state[0]]:
        waits += bool(x.waits & pending)
        pending &= ~x.waits
        if x.opcode == LOAD and x.sets < 6:
            pending |= 1 << x.sets
    before = [x.opcode & 0x1FF for x in code[: state[0]]]
    return Early(
        state[0],
        before.count(SPECIAL),
        sum(before.count(opcode) for opcode in FLOATS),
        waits,
        len(state),
    )


def cubin(compiler: str, facts: dict[str, Any], knobs: Any, arch: str) -> bytes:
    """What a kernel's compiler makes of a setting. Of a process the first call decides the
    architecture.
    """
    from gdntune.objects.worker import cute_options

    module, function = compiler.split(":")
    compile = getattr(importlib.import_module(module), function)
    with tempfile.TemporaryDirectory() as folder:
        options = f"{cute_options(arch)} --keep-cubin --dump-dir {folder}"
        made: bytes = compile(facts, knobs, options, "kernel").__cubin__
    return made


def choices(paths: list[str]) -> Iterator[tuple[Any, Any, Any]]:
    """Kernel, contract and variant of each object that tables choose, once."""
    from gdntune import kernels
    from gdntune.results import table

    seen = set()
    for path in paths:
        found = table.load(Path(path))
        for rule in found.rules:
            for interval in rule.intervals:
                variant = found.variant(interval.variant)
                kernel = kernels.get(variant.kernel)
                facts = json.dumps(kernel.facts(rule.when), sort_keys=True, default=str)
                if (key := (variant.id, facts)) not in seen:
                    seen.add(key)
                    yield kernel, rule.when, variant


def main() -> None:
    """Prints a line for each object that tables choose."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--arch", default="sm_90a")
    asked = parser.parse_args()
    print(*("before", "special", "floats", "waits", "loads"), "variant, contract", sep="\t")
    for kernel, contract, variant in choices(asked.tables):
        knobs = variant.knobs
        if dataclasses.is_dataclass(knobs):
            knobs = dataclasses.asdict(knobs)  # type: ignore[arg-type]
        made = cubin(kernel.compiler, dict(kernel.facts(contract)), knobs, asked.arch)
        found = early(instructions(made))
        print(*found, f"{variant.id}, {contract.key()}", sep="\t", flush=True)


if __name__ == "__main__":
    sys.exit(main())
