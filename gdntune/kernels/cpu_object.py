"""How an object is made of a CPU kernel's C++."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from gdntune.errors import BuildError, ToolMissing

HEADERS = Path(__file__).parent / "cpu"

# The CPU at hand decides the instructions, so its name belongs in an object's key. Never
# -ffast-math: it drops NaN and
# signed zeros, and linked into a library it flushes denormals in the whole process. The note
# silenced is about vectors
# passed between objects; none are.
FLAGS = ("-O2", "-march=native", "-fopenmp", "-fno-math-errno", "-Wno-psabi")

STATES = {"fp32": "float", "bf16": "Bf16", "fp16": "Half"}


@contextlib.contextmanager
def _tools() -> Iterator[None]:
    """An environment in which a C++ compiler and ninja are found; ToolMissing where there are none."""
    before = {name: os.environ.get(name) for name in ("PATH", "CXX")}
    # PyPI's ninja lies beside the interpreter, which is not on the PATH of a virtual environment
    # that is not activated.
    os.environ["PATH"] = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)]
    )
    compiler = os.environ.setdefault("CXX", "g++")
    try:
        if not shutil.which(compiler.split()[0]):
            raise ToolMissing(
                f"the C++ compiler {compiler} was not found on PATH: CPU kernels need g++ 11 or"
                " newer with OpenMP; install it (apt-get install g++, dnf install gcc-c++) or name"
                " another in CXX"
            )
        if not shutil.which("ninja"):
            raise ToolMissing(
                "ninja was not found on PATH or beside the interpreter: run `pip install ninja`"
            )
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def object_of(source: str, name: str, folder: Path) -> Path:
    """Compiles C++ `source` to folder/NAME.o and gives its path; ToolMissing without a compiler,
    BuildError where it fails.
    """
    import tvm_ffi.cpp

    scratch = folder / f"{name}.build"
    scratch.mkdir(parents=True, exist_ok=True)
    file = scratch / f"{name}.cpp"
    file.write_text(source)
    with _tools():
        try:
            built = tvm_ffi.cpp.build(
                name,
                cpp_files=[str(file)],
                extra_cflags=FLAGS,
                extra_include_paths=[str(HEADERS)],
                build_directory=str(scratch),
                output=f"{name}.o",
            )
        except RuntimeError as error:
            # ninja repeats the command, which is longer than what the compiler has to say
            lines = [line for line in str(error).splitlines() if " -MMD " not in line]
            faults = [line for line in lines if "error: " in line]
            raise BuildError(
                "\n".join([f"{name}.cpp does not compile:", *(faults[:3] or lines[-12:])])
            ) from error
    target = folder / f"{name}.o"
    os.replace(built, target)
    shutil.rmtree(scratch, ignore_errors=True)
    return target
