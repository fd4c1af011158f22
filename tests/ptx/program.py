"""From PTX's text to a program: parameters, registers, shared memory, instructions, labels."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

_STATEMENT = re.compile(r"\s*(?:(\$\w+|\w+):|(.*?);)", re.DOTALL)
_GUARD = re.compile(r"@(!?)(%?\w+)\s+(.*)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+((?:\.\w+\s+(?:\d+\s+)?)+)(\w+)(?:\[(\d+)\])?")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)")
_SHARED = re.compile(r"(?:\.extern\s+)?\.shared\s+\.align\s+(\d+)\s+\.b8\s+(\w+)\[(\d*)\]")
_SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
# Where shared memory begins: what is below belongs to the system, so no address of ours is zero.
SHARED_BASE = 1024


@dataclass(frozen=True)
class Instruction:
    """One instruction; `parts` are those of its name between the dots."""

    parts: tuple[str, ...]
    operands: tuple[str, ...]
    guard: str | None
    negated: bool
    line: int
    text: str

    @property
    def name(self) -> str:
        return ".".join(self.parts)


@dataclass(frozen=True)
class Parameter:
    """A kernel parameter and its bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Program:
    """One entry of a PTX module.

    registers: the type of the registers whose names begin so, `{"%rd": "b64"}`. shared: where
    each shared array begins, counted from SHARED_BASE; static_shared: bytes of those whose size is
    known; an array without one begins behind them.
    """

    name: str
    parameters: tuple[Parameter, ...]
    registers: dict[str, str]
    shared: dict[str, int]
    static_shared: int
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def register_type(self, name: str) -> str:
        """The declared type of a register, `b32`."""
        kind = self.registers.get(name) or self.registers.get(name.rstrip("0123456789"))
        if kind is None:
            raise ValueError(f"register {name} is not declared in {self.name}")
        return kind


def operands(text: str) -> tuple[str, ...]:
    """Operands at the top level: `{%r1, %r2}, [%rd1+8]` are two."""
    found, depth, start = [], 0, 0
    for i, c in enumerate(text):
        depth += (c in "{[(") - (c in "}])")
        if c == "," and not depth:
            found.append(text[start:i].strip())
            start = i + 1
    last = text[start:].strip()
    return (*found, last) if last else tuple(found)


def _without_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: "\n" * m.group().count("\n"), text, flags=re.DOTALL)
    return re.sub(r"//[^\n]*", "", text)


def _statements(text: str, start: int) -> Iterator[tuple[str, str, int]]:
    """(label, statement, line) of a body, where a label or a statement is empty."""
    position, line = start, text.count("\n", 0, start) + 1
    while m := _STATEMENT.match(text, position):
        body = m.group(2) or ""
        # braces that open or close a scope stand alone: they hold no operands
        body = re.sub(r"^[{}\s]+", "", body)
        at = m.end() - 1 - len(m.group(2) or "") if body else m.start()
        yield m.group(1) or "", " ".join(body.split()), line + text.count("\n", position, at)
        line += text.count("\n", position, m.end())
        position = m.end()


def _own_labels(text: str) -> str:
    """Labels of inner scopes renamed, since two scopes may have the same: each wait for an mbarrier is
    one with a LAB_WAIT.
    """
    scopes = itertools.count()

    def renamed(scope: re.Match) -> str:
        n, inside = next(scopes), scope.group()
        for label in re.findall(r"^\s*(\w+):(?!:)", inside, re.MULTILINE):
            inside = re.sub(rf"\b{label}\b", f"{label}_{n}", inside)
        return inside

    return re.sub(r"\{[^{}]*\}", renamed, text)


def _shared(text: str) -> tuple[dict[str, int], int]:
    """Where shared arrays begin, and the bytes of those that say their size."""
    places, top, unsized = {}, 0, []
    for align, name, size in _SHARED.findall(text):
        if not size:
            unsized.append((int(align), name))
            continue
        top = -(-top // int(align)) * int(align)
        places[name] = top
        top += int(size)
    for align, name in unsized:
        top = -(-top // align) * align
        places[name] = top
    return places, top


def _parameter(kinds: str, name: str, count: str) -> Parameter:
    size = _SIZES[re.findall(r"\.[bfsu](\d+)", kinds)[0]]
    return Parameter(name, size * int(count or 1))


def parse(text: str) -> Program:
    """The program of the first entry of a module."""
    text = _own_labels(_without_comments(text))
    entry = text.index(".entry")
    body = text.index("{", entry)
    head = text[entry:body]
    registers: dict[str, str] = {}
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for label, statement, line in _statements(text, body + 1):
        if label:
            labels[label] = len(instructions)
        elif m := _REGISTERS.match(statement):
            for name in operands(m.group(2)):
                registers[name.split("<")[0]] = m.group(1)
        elif statement and not statement.startswith("."):
            guard = _GUARD.match(statement)
            plain = guard.group(3) if guard else statement
            name, _, rest = plain.partition(" ")
            instructions.append(
                Instruction(
                    parts=tuple(name.replace("::", "_").split(".")),
                    operands=operands(rest),
                    guard=guard.group(2) if guard else None,
                    negated=bool(guard and guard.group(1)),
                    line=line,
                    text=statement,
                )
            )
    shared, static = _shared(text)
    return Program(
        name=re.findall(r"\.entry\s+(\w+)", text)[0],
        parameters=tuple(_parameter(*m) for m in _PARAMETER.findall(head)),
        registers=registers,
        shared=shared,
        static_shared=static,
        instructions=tuple(instructions),
        labels=labels,
    )
