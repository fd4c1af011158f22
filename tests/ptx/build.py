"""Compiles kernels for the interpreter: their PTX, and their host code linked to hand over launches.

In worker processes, since CuTe DSL reads its architecture once a process. What is compiled is kept
under GDNTUNE_CACHE_DIR for as long as that is.
"""

import importlib
import multiprocessing
import os
import tempfile
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels.spec import Variant
from gdntune.objects.store import ObjectSpec, object_spec
from gdntune.objects.worker import cute_options
from gdntune.problem import Contract

from . import host

ARCH = "sm_90a"


@dataclass(frozen=True)
class Compiled:
    """A kernel's PTX, and the library whose `function` launches it."""

    ptx: str
    library: Path
    function: str


def spec_of(contract: Contract, variant: Variant) -> ObjectSpec:
    """The object that serves a contract with a variant."""
    return object_spec(kernels.get(variant.kernel), contract, variant, arch.target(ARCH))


def _folder(spec: ObjectSpec, root: Path) -> Path:
    return root / "ptx" / spec.key[:24]


def find(spec: ObjectSpec, root: Path) -> Compiled | None:
    """What was compiled under a root before."""
    folder = _folder(spec, root)
    try:
        ptx = (folder / "kernel.ptx").read_text()
    except FileNotFoundError:
        return None
    return Compiled(ptx, folder / "host.so", spec.name)


def compile_one(spec: ObjectSpec, compiler: str, root: Path) -> Compiled:
    """Compiles an object, unless it is there; to be run in a worker process."""
    if found := find(spec, root):
        return found
    arch = cute_options(spec.arch)
    module, function = compiler.split(":")
    compile = getattr(importlib.import_module(module), function)
    folder = _folder(spec, root)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        new = Path(temporary) / "new"
        new.mkdir()
        # what ptxas makes of it is not looked at
        options = f"{arch} --keep-ptx --ptxas-options '-O0' --dump-dir {temporary}"
        compiled = compile(spec.facts, spec.knobs, options=options, prefix=spec.name)
        object_file = Path(temporary) / "kernel.o"
        compiled.export_to_c(str(object_file), function_name=spec.name)
        host.link(object_file, new / "host.so")
        ptx = compiled.__ptx__
        (new / "kernel.ptx").write_text(ptx if isinstance(ptx, str) else ptx.decode())
        if not folder.exists():
            new.rename(folder)
    found = find(spec, root)
    assert found is not None
    return found


class Builder:
    """Compiles in the background, in the order asked for; each object once."""

    def __init__(self, root: Path | None = None, workers: int = 2):
        self.root = root or Path(os.environ["GDNTUNE_CACHE_DIR"])
        self._pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        self._futures: dict[str, Future[Any]] = {}

    def start(self, spec: ObjectSpec) -> "Future[Compiled]":
        """An object that will be there."""
        if spec.key not in self._futures:
            compiler = kernels.get(spec.kernel).compiler
            self._futures[spec.key] = self._pool.submit(compile_one, spec, compiler, self.root)
        return self._futures[spec.key]

    def get(self, contract: Contract, variant: Variant) -> Compiled:
        """An object, waited for."""
        return self.start(spec_of(contract, variant)).result()

    def close(self) -> None:
        """Ends the workers."""
        self._pool.shutdown(cancel_futures=True)
