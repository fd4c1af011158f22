"""Packages in layers: who may import whom, and how little `import gdntune` loads."""

import ast
import fnmatch
import functools
import subprocess
import sys

import pytest
import structure

# Heavy or special packages, and the only modules that may import them, inside functions included.
ONLY_IN = {
    "cutlass": ("kernels/*.py", "objects/worker.py"),
    "tvm_ffi": ("objects/store.py", "kernels/cpu_object.py", "runtime/headers.py"),
    "pandas": ("report/*.py", "results/baseline.py", "results/frame.py"),
    "typer": ("cli/*.py",),
    "rich": ("cli/*.py", "report/terminal.py", "report/report.py"),
    "matplotlib": ("report/figures.py",),
    "pynvml": ("device/nvml.py",),
    "cupti": ("device/cupti.py",),
    "ray": ("tuning/ray.py",),
    "yaml": ("tuning/config.py",),
    "transformers": ("engines/transformers.py",),
}
# What `import gdntune` and the runtime's first steps reach: without torch at import.
LIGHT = (
    "device.arch tuning.config results.derive results.journal kernels kernels.spec problem sol objects.store "
    "results.table timing"
)
# Arrows against the order that are still there. The list may only shrink.
BACK: set[tuple[str, str]] = set()
CIRCLES: set[tuple[str, str]] = set()


def test_every_package_has_its_place():
    """Nothing stands beside the packages of the order."""
    there = {structure.package(m) for m in structure.modules()} - {"__init__"}
    assert there == set(structure.ORDER)


def test_packages_import_one_way():
    """A package imports only from those before it in the order, in functions and for type checkers
    too.
    """
    place = structure.ORDER.index
    assert {(a, b) for a, b in structure.package_arrows() if place(b) >= place(a)} == BACK


def test_modules_have_no_circle():
    """No modules import one another in a circle, in functions and for type checkers too."""
    graph = {
        m: {o for o in others if (m, o) not in CIRCLES} for m, others in structure.arrows().items()
    }
    del graph[structure.FACADE]
    assert structure.circle(graph) == []


@pytest.mark.parametrize("package", ONLY_IN)
def test_packages_stay_in_their_place(package):
    """What is heavy, or stands for one job, is imported by that job's module alone."""
    users = {m for m, names in imported().items() if package in names}
    assert {
        m for m in users if not any(fnmatch.fnmatchcase(m, p) for p in ONLY_IN[package])
    } == set()
    assert users, f"nothing imports {package} any more: take it out of this table"


@functools.cache
def imported() -> dict[str, set[str]]:
    """The packages that each module imports."""
    return {
        m: {name.split(".")[0] for name in structure.imported(path)}
        for m, path in structure.modules().items()
    }


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=structure.ROOT
    )
    return done.stdout.strip()


def test_import_is_quick():
    """`import gdntune` takes under 0.2 s of CPU, in the least of five fresh interpreters: the wall
    clock says more of what else runs.
    """
    code = (
        "import time; start = time.process_time(); import gdntune;"
        " print(time.process_time() - start)"
    )
    assert min(float(python(code)) for _ in range(5)) < 0.2


def test_import_loads_nothing_heavy():
    """`import gdntune` loads none of torch, cutlass, pandas, typer."""
    code = "import sys, gdntune; print(sorted({m.split('.')[0] for m in sys.modules}))"
    loaded = set(ast.literal_eval(python(code)))
    assert loaded.isdisjoint(
        {"torch", "cutlass", "pandas", "typer", "tvm_ffi", "rich", "yaml", "numpy"}
    )


def test_light_modules_load_no_torch():
    """What describes problems, devices and tables can be imported without torch and cutlass."""
    names = ", ".join(f"gdntune.{m}" for m in LIGHT.split())
    code = f"import sys, {names}; print(sorted({{m.split('.')[0] for m in sys.modules}}))"
    assert set(ast.literal_eval(python(code))).isdisjoint(
        {"torch", "cutlass", "pandas", "typer", "tvm_ffi"}
    )


def test_public_names_are_there():
    """Every public name is loaded on first use, stands in dir(), and a wrong one lists the right
    ones.
    """
    import gdntune

    assert [name for name in gdntune.__all__ if getattr(gdntune, name, None) is None] == []
    assert set(gdntune.__all__) <= set(dir(gdntune))
    with pytest.raises(AttributeError, match="it has .*gated_delta_rule_decode"):
        _ = gdntune.no_such_name


def test_no_module_takes_a_public_name():
    """A module `plan.py`, once anything imported it, stood where the function `gdntune.plan` is."""
    import gdntune

    assert {p.stem for p in structure.PACKAGE.iterdir()} & set(gdntune.__all__) == set()
