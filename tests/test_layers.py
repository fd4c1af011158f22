"""The layers of CONTRIBUTING.md: who may import whom, and how little `import gdntune` loads."""

import ast
import fnmatch
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "gdntune"
MODULES = {p.relative_to(PACKAGE).as_posix(): p for p in sorted(PACKAGE.rglob("*.py"))}

# Heavy or special packages, and the only modules that may import them, inside functions included.
ONLY_IN = {
    "cutlass": ("kernels/*.py", "build.py"),
    "tvm_ffi": ("store.py", "kernels/cpu_object.py"),
    "pandas": ("report.py",),
    "typer": ("cli.py", "cli_common.py", "cli_results.py"),
    "rich": ("cli.py", "progress.py", "render/terminal.py", "cli_common.py"),
    "matplotlib": ("render/figures.py",),
    "pynvml": ("nvml.py",),
    "cupti": ("cupti_records.py",),
    "pebble": ("build.py", "executors.py"),
    "ray": ("ray_executor.py",),
    "yaml": ("config.py",),
}
# What `import gdntune` and the runtime's first steps reach: without torch at import.
LIGHT = "arch config derive journal kernels kernels.spec problem sol store table timing"


def layers() -> dict[str, int]:
    """The layer of each pattern of modules, from the table in CONTRIBUTING.md."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    found: dict[str, int] = {}
    for names, layer in re.findall(r"^\| (`.*?`) \|.*\| +(\d+) \|$", text, re.M):
        found |= {name: int(layer) for name in re.findall(r"`(.*?)`", names)}
    return found


LAYERS = layers()


def layer(module: str) -> int:
    """A module's layer: by its own name, else by the longest pattern that fits."""
    fitting = sorted((p for p in LAYERS if fnmatch.fnmatchcase(module, p)), key=lambda p: (p == module, len(p)))
    assert fitting, (
        f"gdntune/{module} is not in the table of layers in CONTRIBUTING.md: add a row that says its one job"
    )
    return LAYERS[fitting[-1]]


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at the top or inside functions, but for what only type checkers see."""
    found: set[str] = set()

    class Visitor(ast.NodeVisitor):
        def visit_If(self, node: ast.If) -> None:
            if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
                for statement in node.orelse:
                    self.visit(statement)
            else:
                self.generic_visit(node)

        def visit_Import(self, node: ast.Import) -> None:
            found.update(alias.name for alias in node.names)

        def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
            assert node.level == 0, f"{path}: relative imports are not used here"
            assert node.module
            found.update(f"{node.module}.{alias.name}" for alias in node.names)

    Visitor().visit(ast.parse(path.read_text()))
    return found


def own(name: str) -> str | None:
    """The file of an imported name of gdntune: of the module, or of the one that has the name."""
    parts = name.split(".")
    if parts[0] != "gdntune":
        return None
    for end in (len(parts), len(parts) - 1):
        stem = "/".join(parts[1:end])
        for file in (f"{stem}.py", f"{stem}/__init__.py".lstrip("/")):
            if file in MODULES:
                return file
    raise AssertionError(f"{name} is imported and not there")


@pytest.mark.parametrize("module", MODULES)
def test_imports_go_down(module):
    """A module imports only from lower layers."""
    for name in imports(MODULES[module]):
        below = own(name)
        if below is not None and below != module:
            assert layer(below) < layer(module), (
                f"gdntune/{module} (layer {layer(module)}) imports {below} ({layer(below)})"
            )


@pytest.mark.parametrize("package", ONLY_IN)
def test_packages_stay_in_their_place(package):
    """What is heavy, or stands for one job, is imported by that job's module alone."""
    users = {m for m, path in MODULES.items() if any(n.split(".")[0] == package for n in imports(path))}
    assert users <= {m for m in MODULES for pattern in ONLY_IN[package] if fnmatch.fnmatchcase(m, pattern)}
    assert users, f"nothing imports {package} any more: take it out of this table"


def test_the_table_names_what_is_there():
    """No row of the table is about a module that is gone."""
    assert [p for p in LAYERS if not any(fnmatch.fnmatchcase(m, p) for m in MODULES)] == []


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return done.stdout.strip()


def test_import_is_quick():
    """`import gdntune` takes under 0.2 s, in the median of five fresh interpreters."""
    code = "import time; start = time.perf_counter(); import gdntune; print(time.perf_counter() - start)"
    assert statistics.median(float(python(code)) for _ in range(5)) < 0.2


def test_import_loads_nothing_heavy():
    """`import gdntune` loads none of torch, cutlass, pandas, typer."""
    code = "import sys, gdntune; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(ast.literal_eval(python(code)))
    assert loaded.isdisjoint({"torch", "cutlass", "pandas", "typer", "tvm_ffi", "rich", "yaml", "numpy"})


def test_light_modules_load_no_torch():
    """What describes problems, devices and tables can be imported without torch and cutlass."""
    names = ", ".join(f"gdntune.{m}" for m in LIGHT.split())
    code = f"import sys, {names}; print(sorted({{m.split('.')[0] for m in sys.modules}}))"
    assert set(ast.literal_eval(python(code))).isdisjoint({"torch", "cutlass", "pandas", "typer", "tvm_ffi"})


def test_public_names_are_there():
    """Every public name is loaded on first use, stands in dir(), and a wrong one lists the right ones."""
    import gdntune

    assert [name for name in gdntune.__all__ if getattr(gdntune, name, None) is None] == []
    assert set(gdntune.__all__) <= set(dir(gdntune))
    with pytest.raises(AttributeError, match="it has .*gated_delta_rule_decode"):
        _ = gdntune.no_such_name


def test_no_module_takes_a_public_name():
    """A module `plan.py`, once anything imported it, stood where the function `gdntune.plan` is."""
    import gdntune

    assert {p.stem for p in PACKAGE.iterdir()} & set(gdntune.__all__) == set()
