"""What a kernel's objects depend on, as a hash: its sources and what they import from
`gdntune.kernels`, without comments and docstrings.

Text, not syntax trees, is hashed, so that Pythons of different versions agree.
"""

import ast
import hashlib
import io
import re
import tokenize
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parent.parent


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


def _path(source: str) -> Path:
    if source.startswith("gdntune."):
        return PACKAGE.parent / (source.replace(".", "/") + ".py")
    return PACKAGE / source


def closure(sources: tuple[str, ...]) -> list[str]:
    """The sources and all that they import from gdntune.kernels, sorted."""
    todo, seen = list(sources), set()
    while todo:
        source = todo.pop()
        if source in seen:
            continue
        seen.add(source)
        if source.startswith("gdntune."):
            todo.extend(_imports(_path(source).read_text()))
    return sorted(seen)


@cache
def fingerprint(sources: tuple[str, ...]) -> str:
    """A short hash of the sources' code: modules (`gdntune.kernels.recurrent`) or files below
    gdntune/ (`kernels/cpu/decode.h`).
    """
    digest = hashlib.sha256()
    for source in closure(sources):
        text = _path(source).read_text()
        digest.update(source.encode() + b"\0")
        digest.update(
            (
                stripped_python(text) if source.startswith("gdntune.") else stripped_cpp(text)
            ).encode()
            + b"\0"
        )
    return digest.hexdigest()[:16]
