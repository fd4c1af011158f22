"""The packages and their imports: `python tests/structure.py` prints them, test_layers.py holds
them.

Every import counts: at the top, inside functions, and under TYPE_CHECKING.
"""

import ast
import functools
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gdntune"
# From the ground up: what stands in a row imports only from rows before it, and from its own.
ORDER = (
    "errors",
    "files",
    "strict",
    "problem",
    "device",
    "sol",
    "timing",
    "kernels",
    "objects",
    "checking",
    "results",
    "runtime",
    "engines",
    "peers",
    "tuning",
    "search",
    "report",
    "cli",
    "__main__",
)
# Public names are loaded on first use, so it may name any module.
FACADE = "__init__.py"


def modules() -> dict[str, Path]:
    """Each module of the package by its path below gdntune/."""
    return {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}


@functools.cache
def imported(path: Path) -> set[str]:
    """Dotted names that a file imports, wherever the statement stands."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}: relative imports are not used here"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def own(name: str, known: Iterable[str]) -> str | None:
    """The file of an imported name of gdntune: of the module, or of the one that has the name."""
    parts = name.split(".")
    if parts[0] != "gdntune":
        return None
    for end in (len(parts), len(parts) - 1):
        stem = "/".join(parts[1:end])
        for file in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
            if file in known:
                return file
    raise AssertionError(f"{name} is imported and not there")


def arrows() -> dict[str, set[str]]:
    """Which modules each module imports."""
    files = modules()
    return {
        module: {file for name in imported(path) if (file := own(name, files)) and file != module}
        for module, path in files.items()
    }


def package(module: str) -> str:
    """The package of a module, or the module itself at the top level."""
    return module.split("/")[0].removesuffix(".py")


def package_arrows() -> Counter[tuple[str, str]]:
    """How many imports lead from one package to another."""
    return Counter(
        (package(m), package(other))
        for m, others in arrows().items()
        if m != FACADE
        for other in others
        if package(other) != package(m) and other != FACADE
    )


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Modules that import one another in a circle, in order; empty where there is none."""
    done: set[str] = set()

    def walk(node: str, path: list[str]) -> list[str]:
        if node in path:
            return [*path[path.index(node) :], node]
        if node not in done:
            for other in sorted(graph.get(node, ())):
                if found := walk(other, [*path, node]):
                    return found
            done.add(node)
        return []

    return next((found for node in sorted(graph) if (found := walk(node, []))), [])


def functions() -> Iterator[tuple[str, int, int]]:
    """Each function of the package: where it is, its lines, its parameters."""
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                a = node.args
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                yield f"{module}:{node.name}", lines, len(a.posonlyargs + a.args + a.kwonlyargs)


def summary() -> str:
    """The structure in a page: packages, arrows, circles, and the sizes that say how a file reads."""
    files = modules()
    lines = [line for p in files.values() for line in p.read_text().splitlines() if line.strip()]
    folders = defaultdict(list)
    for m in files:
        folders[package(m) if "/" in m else "(top)"].append(m)
    found = package_arrows()
    back = [f"{a} -> {b}" for a, b in found if ORDER.index(b) >= ORDER.index(a)]
    sizes = sorted(functions(), key=lambda f: -f[1])
    wide = [f for f in sizes if f[2] > 8]
    rows = [f"{name:10} {len(inside):3} modules" for name, inside in folders.items()]
    for name in ORDER:
        to = ", ".join(f"{b} {n}" for (a, b), n in sorted(found.items()) if a == name)
        rows.append(f"{name:10} -> {to or 'nothing'}")
    rows += [
        f"arrows between packages: {len(found)} ({sum(found.values())} imports); back: {back or 'none'}",
        f"circles of modules: {circle(arrows()) or 'none'}",
        f"longest functions: {', '.join(f'{name} {n}' for name, n, _ in sizes[:3])}",
        f"functions with more than 8 parameters: {len(wide)} of {len(sizes)}",
        f"width of lines, p95: {round(statistics.quantiles([len(x) for x in lines], n=20)[18])}",
        f"comments a hundred lines: {100 * sum(x.lstrip().startswith('#') for x in lines) / len(lines):.1f}",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    print(summary())
