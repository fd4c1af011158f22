"""What a kernel's objects depend on, as a hash: its sources and what they import from
`gdntune.kernels` or include from their own folder, without comments and docstrings.

Text, not syntax trees, is hashed, so that Pythons of different versions agree.
"""

import ast
import hashlib
import importlib.util
import io
import json
import re
import tokenize
from collections.abc import Collection, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from gdntune.errors import UnknownName

PACKAGE = Path(__file__).parent.parent
# Fingerprints whose objects were compared and are the same: see `same_objects`.
IDENTICAL = Path(__file__).with_name("identical.json")


def _docstring_lines(tree: ast.Module) -> set[int]:
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                lines.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def stripped_python(text: str) -> str:
    """Python source without comments, docstrings and blank lines."""
    dropped = _docstring_lines(ast.parse(text))
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    kept = (line.rstrip() for number, line in enumerate(lines, 1) if number not in dropped)
    return "\n".join(line for line in kept if line)


def stripped_cpp(text: str) -> str:
    """C++ source without comments and blank lines."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    text = re.sub(r"//[^\n]*", "", text)
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip())


def _imports(text: str) -> set[str]:
    """The modules of gdntune.kernels that a kernel's source imports."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("gdntune.kernels")
        ):
            for name in node.names:
                candidate = f"{node.module}.{name.name}"
                found.add(candidate if _path(candidate).exists() else node.module)
        elif isinstance(node, ast.Import):
            found.update(n.name for n in node.names if n.name.startswith("gdntune.kernels"))
    return {f for f in found if f != "gdntune.kernels"}


def _includes(source: str) -> set[str]:
    """The files beside a C++ source that it includes in quotes."""
    names = re.findall(r'^\s*#\s*include\s*"([^"]+)"', _text(source), re.MULTILINE)
    beside = {str(Path(source).parent / name) for name in names}
    return {b for b in beside if _path(b).exists()}


def _is_file(source: str) -> bool:
    return "/" in source


def _path(source: str) -> Path:
    if _is_file(source):
        return PACKAGE / source
    if source.startswith("gdntune."):
        return PACKAGE.parent / (source.replace(".", "/") + ".py")
    # of a kernel from outside
    spec = importlib.util.find_spec(source)
    if spec is None or spec.origin is None:
        raise UnknownName(
            f"source {source!r} of a kernel: no such module; expected one on Python's path"
        )
    return Path(spec.origin)


def _name(source: str) -> str:
    """What is hashed beside the text: of a file outside the package its name alone, so that
    checkouts in two places agree.
    """
    return Path(source).name if Path(source).is_absolute() else source


def closure(sources: tuple[str, ...]) -> list[str]:
    """The sources and all that they import from gdntune.kernels or include, sorted."""
    todo, seen = list(sources), set()
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        if _is_file(source):
            todo.extend(_includes(source))
        else:
            todo.extend(_imports(_text(source)))
    return sorted(seen, key=_name)


@cache
def digest() -> str:
    """A hash of all files of gdntune.kernels as they are, comments and all: in 2 ms, where
    fingerprints take 300.
    """
    found = hashlib.sha256()
    folder = PACKAGE / "kernels"
    for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".h", ".cpp")):
        found.update(path.relative_to(folder).as_posix().encode() + b"\0")
        found.update(path.read_bytes() + b"\0")
    return found.hexdigest()


# Fingerprints by `_key`, of the files at hand: what a bundle says of the kernels that made it.
_STAMPED: dict[str, str] = {}


def _key(sources: tuple[str, ...]) -> str:
    return " ".join(sources)


def stamp(kernels: Iterable[tuple[str, ...]]) -> dict[str, str]:
    """The fingerprints of kernels by their sources, as far as those are gdntune's own, and under
    `digest` what `believe` goes by.
    """
    own = [k for k in kernels if not any(Path(s).is_absolute() for s in k)]
    own = [k for k in own if all(_is_file(s) or s.startswith("gdntune.") for s in k)]
    return {"digest": digest(), **{_key(k): fingerprint(k) for k in own}}


def believe(stamped: Mapping[str, str]) -> None:
    """Takes fingerprints that were stamped from these very files; others are left alone."""
    if stamped.get("digest") == digest():
        _STAMPED.update(stamped)


@cache
def fingerprint(sources: tuple[str, ...]) -> str:
    """A short hash of the sources' code: modules (`gdntune.kernels.recurrent`), files below
    gdntune/ (`kernels/cpu/decode.h`), or files elsewhere by their absolute path.

    Names count beside contents, since imports and includes go by them: two modules that changed
    places are another kernel.
    """
    return _STAMPED.get(_key(sources)) or _computed(sources)


def _computed(sources: tuple[str, ...]) -> str:
    found = hashlib.sha256()
    # in this order, files of one name from two folders have one hash in every process and place
    for name, code in sorted((_name(s), _code(s)) for s in closure(sources)):
        found.update(name.encode() + b"\0")
        found.update(code.encode() + b"\0")
    return found.hexdigest()[:16]


def _code(source: str) -> str:
    text = _text(source)
    return stripped_cpp(text) if _is_file(source) else stripped_python(text)


def _text(source: str) -> str:
    return _path(source).read_text(encoding="utf-8")


@cache
def _identical() -> tuple[tuple[str, str, str, str, str], ...]:
    entries = json.loads(IDENTICAL.read_text())
    keys = ("kernel", "measured", "code", "op", "without")
    return tuple(tuple(e.get(key, "") for key in keys) for e in entries)


def same_objects(
    kernel: str,
    measured: str,
    code: str | None,
    ops: Collection[str],
    settings: Collection[Mapping[str, Any]] = (),
) -> bool:
    """Whether code of one fingerprint was seen to compile to what that of another did, byte for
    byte, in all that the shipped tables and the default rules choose; at once or step by step, each
    step seen. ops: those that matter; what was compared for one op says nothing of the other. settings: the kernel's
    knobs that matter; what was compared without a knob says nothing where one of them has it set.

    `python tests/same_objects.py OLD --record` compares, and alone writes these entries.
    """
    if code is None or code == measured:
        return False
    on = {knob for knobs in settings for knob, value in knobs.items() if value}
    return all(code in _reached(kernel, measured, op, on) for op in ops)


def _reached(kernel: str, measured: str, op: str, on: Collection[str]) -> set[str]:
    """The fingerprints whose objects of an op, and of settings with no knobs but these set, are those of `measured`."""
    known, found = {measured}, {measured}
    while found:
        found = {
            new
            for k, old, new, of, without in _identical()
            if k == kernel and old in found and of in ("", op) and without not in on
        } - known
        known |= found
    return known
