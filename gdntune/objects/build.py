"""Compiles objects in worker processes and keeps them in the store; reads registers and spills from
what was compiled.

Processes, never threads: four threads compiling with CuTe DSL crashed. A worker that dies costs its
    own object alone (pebble).
"""

import importlib
import io
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import msgspec
from pebble import ProcessExpired, ProcessPool

from gdntune.device.arch import cpu_threads
from gdntune.errors import GdntuneError, ToolMissing
from gdntune.objects.processes import SPAWN, hidden_main
from gdntune.objects.store import CUTE_DSL_VERSION, Manifest, ObjectSpec, Store, file_sha256

COMPILE_TIMEOUT_S = 300.0
# Spills beyond this are dropped before timing; a stack of 8 bytes was one store and two loads, and
# cost nothing.
SPILL_LIMIT_BYTES = 64


class Built(msgspec.Struct, frozen=True):
    """The outcome of one object: its manifest, or the reason why there is none."""

    spec: ObjectSpec
    manifest: Manifest | None
    reason: str = ""
    cached: bool = False

    @property
    def ok(self) -> bool:
        return self.manifest is not None


def resources(cubin: bytes) -> dict[str, int]:
    """Registers, stack frame and static shared memory of a cubin's kernel, from its .nv.info."""
    from elftools.elf.elffile import ELFFile

    found = {"registers": 0, "spill_bytes": 0, "shared_bytes": 0}
    tags = {0x2F: "registers", 0x11: "spill_bytes"}
    for section in ELFFile(io.BytesIO(cubin)).iter_sections():
        if section.name.startswith(".nv.shared"):
            found["shared_bytes"] = max(found["shared_bytes"], section["sh_size"])
        if not section.name.startswith(".nv.info"):
            continue
        data, at = section.data(), 0
        while at + 4 <= len(data):
            form, tag, size = (
                data[at],
                data[at + 1],
                int.from_bytes(data[at + 2 : at + 4], "little"),
            )
            # form 4 has `size` bytes of value, the others keep it in the size field
            if form == 4 and tag in tags and size >= 8:
                found[tags[tag]] = max(
                    found[tags[tag]], int.from_bytes(data[at + 8 : at + 12], "little")
                )
            at += 4 + (size if form == 4 else 0)
    return found


def _compiler(path: str) -> Callable[..., Any]:
    module, function = path.split(":")
    return getattr(importlib.import_module(module), function)


def _compile_cute(spec: ObjectSpec, compiler: str, folder: Path) -> tuple[Path, dict[str, int]]:
    os.environ["CUTE_DSL_ARCH"] = spec.arch  # read once, when cutlass is imported
    try:
        import cutlass
    except ImportError as e:
        raise ToolMissing(
            f"cannot import cutlass ({e}): pip install"
            f" 'nvidia-cutlass-dsl[cu13]=={CUTE_DSL_VERSION}'"
        ) from None
    if cutlass.__version__ != CUTE_DSL_VERSION:
        raise ToolMissing(
            f"nvidia-cutlass-dsl {cutlass.__version__} is installed, objects are made with"
            f" {CUTE_DSL_VERSION}: install that"
        )
    function = _compiler(compiler)
    compiled = function(
        spec.facts, spec.knobs, options=f"--keep-cubin --dump-dir {folder}", prefix=spec.name
    )
    path = folder / f"{spec.name}.o"
    compiled.export_to_c(str(path), function_name=spec.name)
    return path, resources(compiled.__cubin__)


def _compile(spec: ObjectSpec, compiler: str, root: Path) -> Manifest:
    """Compiles one object into the store; runs in a worker process."""
    store = Store(root)
    with store.lock(spec):
        found = store.find(spec)
        if found is not None:
            return found
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="gdntune-") as temporary:
            folder = Path(temporary)
            if spec.device == "cuda":
                path, used = _compile_cute(spec, compiler, folder)
            else:
                path, used = _compiler(compiler)(spec.facts, spec.knobs, spec.name, folder), {}
            manifest = Manifest(
                spec, spec.name, file_sha256(path), round(time.perf_counter() - start, 3), **used
            )
            store.put(manifest, path)
    return manifest


def _start_worker(arch: str | None) -> None:
    if arch:
        os.environ["CUTE_DSL_ARCH"] = arch
    # a worker compiles only: it must not hold a context on the device that is being timed
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def compile_objects(
    specs: Iterable[tuple[ObjectSpec, str]],
    store: Store,
    *,
    jobs: int | None = None,
    on_done: Callable[[Built], None] | None = None,
) -> list[Built]:
    """Compiles what the store lacks, in the order given; one failed object is a value, not an
    exception.

    specs: pairs of an object and its kernel's compiler (`module:function`).
    """
    unique = {spec.key: (spec, compiler) for spec, compiler in specs}
    done: dict[str, Built] = {}
    todo = []

    def finish(built: Built) -> None:
        done[built.spec.key] = built
        if on_done:
            on_done(built)

    for spec, compiler in unique.values():
        found = store.find(spec)
        if found is not None:
            finish(Built(spec, found, cached=True))
        else:
            todo.append((spec, compiler))
    if todo:
        for built in _farm(todo, store.root, jobs or cpu_threads()):
            finish(built)
    return [done[key] for key in unique]


def _farm(todo: list[tuple[ObjectSpec, str]], root: Path, jobs: int) -> Iterator[Built]:
    archs = {spec.arch for spec, _ in todo if spec.device == "cuda"}
    if len(archs) > 1:
        raise GdntuneError(f"one call compiles for one architecture, these are {sorted(archs)}")
    pool = ProcessPool(
        max_workers=min(jobs, len(todo)),
        context=SPAWN,
        initializer=_start_worker,
        initargs=[next(iter(archs), None)],
    )
    with hidden_main(), pool:
        futures = [
            pool.schedule(_compile, args=[spec, compiler, root], timeout=COMPILE_TIMEOUT_S)
            for spec, compiler in todo
        ]
        try:
            for (spec, _), future in zip(todo, futures, strict=True):
                yield _outcome(spec, future)
        except BaseException:
            pool.stop()
            raise


def _outcome(spec: ObjectSpec, future: Any) -> Built:
    try:
        return Built(spec, future.result())
    except FutureTimeout:
        return Built(spec, None, f"compiling took more than {COMPILE_TIMEOUT_S:.0f} s")
    except ProcessExpired as e:
        return Built(spec, None, f"the compiler's process died (exit code {e.exitcode})")
    except ToolMissing:
        raise
    except Exception as e:  # noqa: BLE001  a compiler's failure, of whatever class, is the object's outcome
        return Built(spec, None, f"{type(e).__name__}: {str(e)[-1500:]}")
