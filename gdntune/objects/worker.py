"""A compiling process: reads tasks from its standard input, one JSON line each, and answers each
with one on its standard output.

Started as a plain program (`farm.py`), so nothing of the caller's is borrowed: no multiprocessing,
no fork, no second import of its main module.
"""

import importlib
import io
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from gdntune.errors import GdntuneError, ToolMissing, listed
from gdntune.kernels.cpu_object import headers_read
from gdntune.objects.inputs import hashed
from gdntune.objects.store import (
    CUTE_DSL_VERSIONS,
    Manifest,
    ObjectSpec,
    Store,
    file_sha256,
)


class Task(msgspec.Struct, frozen=True):
    """What to compile. compiler: `module:function`; scratch: a folder that the caller removes."""

    spec: ObjectSpec
    compiler: str
    root: str
    scratch: str


class Answer(msgspec.Struct, frozen=True):
    """A manifest, or why there is none. fatal: a missing tool, which fails every other task too."""

    manifest: Manifest | None = None
    reason: str = ""
    fatal: bool = False


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack frame and static shared memory of a cubin's kernel, from its .nv.info."""
    from elftools.elf.elffile import ELFFile

    found = {"registers": 0, "spill_bytes": 0, "shared_bytes": 0}
    # EIATTR_REGCOUNT and EIATTR_FRAME_SIZE.
    tags = {0x2F: "registers", 0x11: "spill_bytes"}
    for section in ELFFile(io.BytesIO(cubin)).iter_sections():
        if section.name.startswith(".nv.shared"):
            found["shared_bytes"] = max(found["shared_bytes"], section["sh_size"])
        if not section.name.startswith(".nv.info"):
            continue
        data, at = section.data(), 0
        while at + 4 <= len(data):
            form, tag = data[at], data[at + 1]
            size = int.from_bytes(data[at + 2 : at + 4], "little")
            # Form 4 has `size` bytes of value, the others keep it in the size field.
            if form == 4 and tag in tags and size >= 8:
                value = int.from_bytes(data[at + 8 : at + 12], "little")
                found[tags[tag]] = max(found[tags[tag]], value)
            at += 4 + (size if form == 4 else 0)
    return found


def _compiler(path: str) -> Callable[..., Any]:
    module, function = path.split(":")
    return getattr(importlib.import_module(module), function)


def cute_options(arch: str) -> str:
    """CuTe DSL's options to compile for `arch` and no more. Called before cutlass is imported: it
    sets CUTE_DSL_ARCH, which the DSL reads once.

    Of what this process could run, the DSL also makes a function, for which it compiles the host
    code twice more: 0.4 to 1.5 s an object. So the process is said to have another GPU; the bytes
    are the same.
    """
    os.environ["CUTE_DSL_ARCH"] = "sm_100a" if arch.startswith("sm_9") else "sm_90a"
    return f"--gpu-arch {arch}"


def _compile_cute(spec: ObjectSpec, compiler: str, folder: Path) -> tuple[Path, dict[str, int]]:
    arch = cute_options(spec.arch)
    try:
        import cutlass

        # Read here and not after the compile: an engine's environment may have the DSL alone.
        import elftools.elf.elffile  # noqa: F401
    except ImportError as e:
        name = "cutlass, which compiles CUDA kernels"
        if (e.name or "").startswith("elftools"):
            name = "elftools, which reads what was compiled"
        raise ToolMissing(
            f"cannot import {name} ({e}): pip install 'gdntune[sweep]', or load a bundle that was"
            " compiled elsewhere (GDNTUNE_BUNDLE)"
        ) from None
    if cutlass.__version__ not in CUTE_DSL_VERSIONS:
        raise ToolMissing(
            f"nvidia-cutlass-dsl {cutlass.__version__} is installed, and objects are made with one"
            f" of {listed(CUTE_DSL_VERSIONS)}: pip install 'gdntune[sweep]', or load a bundle"
        )
    compiled = _compiler(compiler)(
        spec.facts,
        spec.knobs,
        options=f"{arch} --keep-cubin --dump-dir {folder}",
        prefix=spec.name,
    )
    path = folder / f"{spec.name}.o"
    compiled.export_to_c(str(path), function_name=spec.name)
    return path, resources(compiled.__cubin__)


def compile_one(spec: ObjectSpec, compiler: str, root: Path, scratch: Path) -> Manifest:
    """Compiles one object into the store at `root`, unless another process did meanwhile."""
    store = Store(root)
    with store.lock(spec):
        # Another process may have compiled it while this one waited for the lock.
        found = store.find(spec)
        if found is not None:
            return found
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(dir=scratch) as temporary:
            folder = Path(temporary)
            if spec.device == "cuda":
                path, used = _compile_cute(spec, compiler, folder)
            else:
                # A CPU's object tells neither registers nor spills; nothing is dropped for them
                # there.
                path, used = _compiler(compiler)(spec.facts, spec.knobs, spec.name, folder), {}
            manifest = Manifest(
                spec,
                spec.name,
                file_sha256(path),
                round(time.perf_counter() - start, 3),
                inputs=hashed(headers_read(path)),
                **used,
            )
            store.put(manifest, path)
    return manifest


def answer(task: Task) -> Answer:
    """What became of a task; a compiler's failure, of whatever class, is an answer too."""
    try:
        made = compile_one(task.spec, task.compiler, Path(task.root), Path(task.scratch))
        return Answer(made)
    except ToolMissing as e:
        return Answer(reason=str(e), fatal=True)
    except GdntuneError as e:
        return Answer(reason=f"{type(e).__name__}: {str(e)[-1500:]}")
    except Exception as e:  # noqa: BLE001
        # To standard error, whose tail the farm quotes where the process dies of what follows.
        traceback.print_exc()
        return Answer(reason=f"{type(e).__name__}: {str(e)[-1500:]}")


def serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    """Answers tasks until there are no more."""
    for line in tasks:
        made = answer(msgspec.json.decode(line, type=Task))
        answers.write(msgspec.json.encode(made) + b"\n")
        answers.flush()


def main() -> None:
    """Serves on the standard streams; what a compiler prints goes to standard error instead."""
    # Ctrl-C reaches the whole group; the caller decides, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Compilers print to standard output as they like; what the farm reads there must be answers
    # alone.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with answers:
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
