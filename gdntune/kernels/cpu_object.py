"""How an object is made of a CPU kernel's C++, and by which compiler."""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

from gdntune.errors import BuildError, ToolMissing

HEADERS = Path(__file__).parent / "cpu"

# The CPU at hand decides the instructions, so its name belongs in an object's key. Never
# -ffast-math: it drops NaN and signed zeros, and linked into a library it flushes denormals in the
# whole process. The note silenced is about vectors passed between objects; none are.
FLAGS = (
    "-std=c++17",
    "-fPIC",
    "-O2",
    "-march=native",
    "-fopenmp",
    "-fno-math-errno",
    "-Wno-psabi",
)

STATES = {"fp32": "float", "bf16": "Bf16", "fp16": "Half"}


def command() -> list[str]:
    """The C++ compiler and the user's own flags: CXX, as a shell would split it, or g++."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def _libinfo() -> ModuleType:
    """tvm_ffi's own account of where its headers are.

    By itself: the package imports torch, which takes longer than a compilation.
    """
    package = importlib.util.find_spec("tvm_ffi")
    if package is None or package.origin is None:
        raise ToolMissing("tvm_ffi is not installed: pip install 'apache-tvm-ffi>=0.1.10,<0.2'")
    path = Path(package.origin).parent / "libinfo.py"
    spec = importlib.util.spec_from_file_location("_tvm_ffi_libinfo", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def object_of(source: str, name: str, folder: Path) -> Path:
    """Compiles C++ `source` to folder/NAME.o and gives its path; beside it folder/NAME.d, the
    compiler's own list of the headers that it read.

    ToolMissing without a compiler, BuildError where it fails.
    """
    compiler = command()
    if not shutil.which(compiler[0]):
        raise ToolMissing(
            f"the C++ compiler {compiler[0]} was not found on PATH: CPU kernels need g++ 11 or"
            " newer with OpenMP; install it (apt-get install g++, dnf install gcc-c++) or name"
            " another in CXX"
        )
    file, target = folder / f"{name}.cpp", folder / f"{name}.o"
    file.write_text(source)
    libinfo = _libinfo()
    includes = [HEADERS, libinfo.find_include_path(), libinfo.find_dlpack_include_path()]
    options = [*FLAGS, *(f"-I{path}" for path in includes)]
    done = subprocess.run(
        [*compiler, "-c", str(file), "-o", str(target), "-MMD", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        lines = (done.stderr or done.stdout).splitlines()
        faults = [line for line in lines if "error: " in line]
        raise BuildError("\n".join([f"{name}.cpp does not compile:", *(faults[:3] or lines[-12:])]))
    return target


def headers_read(target: Path) -> list[Path]:
    """The headers that the compiler read for an object, in its own words (-MMD: all but the
    system's); empty for what was made otherwise.
    """
    listed = target.with_suffix(".d")
    if not listed.exists():
        return []
    # make's syntax: `x.o: a b \`, with a backslash before a blank in a name
    _, _, names = listed.read_text().replace("\\\n", " ").partition(": ")
    found = [Path(n.replace("\\ ", " ")) for n in re.split(r"(?<!\\)\s+", names.strip())]
    return [p for p in found if p.parent != target.parent]
