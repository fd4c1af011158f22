"""What is here: device, permissions, compilers, versions, tables; what each means for a sweep, and
the remedy where one is lacking.
"""

import contextlib
import importlib.metadata
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from gdntune import kernels, peers
from gdntune.device import arch, cupti, nvml
from gdntune.errors import TableError, ToolMissing
from gdntune.kernels import cpu_object
from gdntune.objects import store
from gdntune.problem import GATES
from gdntune.results import table
from gdntune.runtime import dispatch

# What pyproject.toml asks for: an engine's environment may have been made without it.
LEAST_TORCH = (2, 11)


class Finding(msgspec.Struct, frozen=True):
    """One thing looked at. status: `ok`; `note`, worth knowing; `hinders`, a sweep on this
    machine's device cannot run.

    meaning: what it is for. remedy: what to do, empty where it is ok.
    """

    name: str
    status: Literal["ok", "note", "hinders"]
    value: str
    meaning: str
    remedy: str = ""


def examine(index: int = 0) -> list[Finding]:
    """Everything that a sweep, the runtime and a compile for another machine need, in the order to
    put it right.
    """
    # Asked once: it decides what every later look means.
    fault = arch.cuda_fault(index)
    on_gpu = fault is None
    looks: list[Callable[[], Finding]] = [
        _python,
        _torch,
        lambda: _gpu(index, fault),
        lambda: _nvml(on_gpu),
        lambda: _cupti(on_gpu),
        lambda: _gxx(on_gpu),
        lambda: _cutlass(on_gpu),
        _tvm_ffi,
        _cache,
    ]
    return [look() for look in looks] + _peers() + _tables(index)


def _version(package: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


def _python() -> Finding:
    return Finding(
        "Python", "ok", f"{platform.python_version()}, {sys.executable}", "3.10 or later"
    )


def _torch() -> Finding:
    meaning = "the tensors, the reference and the caches' flush"
    version = _version("torch")
    if version is None:
        return Finding("torch", "hinders", "not installed", meaning, "pip install 'torch>=2.11'")
    # `2.11.0+cu130`: the build's tag says nothing of the interface.
    numbers = tuple(int(n) for n in version.split("+")[0].split(".")[:2] if n.isdigit())
    if numbers < LEAST_TORCH:
        return Finding(
            "torch",
            "hinders",
            version,
            meaning,
            "pip install 'torch>=2.11': tvm_ffi exchanges tensors with it",
        )
    return Finding("torch", "ok", version, meaning)


def _gpu(index: int, fault: str | None) -> Finding:
    meaning = "what is tuned; without one everything runs on the CPU's own kernels"
    if fault is not None:
        return Finding("GPU", "note", "none", meaning, fault)
    device = arch.detect("cuda", index)
    driver = arch.software().get("driver", "unknown")
    peak = (
        f"{device.peak_gb_s:.0f} GB/s ({device.peak_source})"
        if device.peak_gb_s
        else "unknown peak"
    )
    value = f"{device.name}, {device.arch}, {device.sm_count} SMs, {peak}, driver {driver}"
    # Untried is no hindrance: kernels may well compile and run there.
    if device.arch not in arch.TARGETS:
        known = ", ".join(arch.TARGETS)
        return Finding(
            "GPU",
            "note",
            value,
            meaning,
            f"kernels were compiled for {known}; on {device.arch} they are untried",
        )
    return Finding("GPU", "ok", value, meaning)


def _nvml(on_gpu: bool) -> Finding:
    meaning = "clocks and throttling around each cell, the peak where no datasheet is known"
    with nvml.opened() as lib:
        if lib is not None:
            return Finding("NVML", "ok", "answers", meaning)
    if not on_gpu:
        # Without a GPU its absence is no finding to act on.
        return Finding("NVML", "ok", "not here, and not needed on the CPU", meaning)
    remedy = (
        "pip install nvidia-ml-py; in a container pass the driver's libraries in (the `utility`"
        " capability)"
    )
    return Finding("NVML", "note", "does not answer: clocks are not recorded", meaning, remedy)


def _cupti(on_gpu: bool) -> Finding:
    meaning = "the default timer on a GPU: a kernel's own time, in steps of 32 ns"
    if not on_gpu:
        return Finding("CUPTI", "ok", "not needed on the CPU", meaning)
    fault = cupti.fault()
    if fault is None:
        return Finding(
            "CUPTI", "ok", f"gives kernel records, cupti-python {_version('cupti-python')}", meaning
        )
    return Finding(
        "CUPTI",
        "note",
        "gives no records: sweeps fall back to CUDA events, launch gaps included",
        meaning,
        fault,
    )


def _gxx(on_gpu: bool) -> Finding:
    meaning = "links compiled kernels" if on_gpu else "compiles and links the CPU's kernels"
    name = cpu_object.command()[0]
    path = shutil.which(name)
    if path is None:
        remedy = "apt install g++ (or your system's package of GCC)" + (
            "; or load a bundle" if on_gpu else ""
        )
        return Finding("g++", "hinders", f"no {name} on PATH", meaning, remedy)
    return Finding("g++", "ok", f"{store.toolchain('cpu')}, {path}", meaning)


def _cutlass(on_gpu: bool) -> Finding:
    meaning = (
        "compiles CUDA kernels, for this GPU or, without one, for others; pinned to"
        f" {store.CUTE_DSL_VERSION}"
    )
    version = _version("nvidia-cutlass-dsl")
    if version in store.CUTE_DSL_VERSIONS:
        return Finding("CuTe DSL", "ok", f"nvidia-cutlass-dsl {version}", meaning)
    value = "not installed" if version is None else f"nvidia-cutlass-dsl {version}"
    remedy = f"pip install 'nvidia-cutlass-dsl[cu13]=={store.CUTE_DSL_VERSION}'"
    if on_gpu:
        remedy += "; objects of a bundle load without it"
    return Finding("CuTe DSL", "hinders" if on_gpu else "note", value, meaning, remedy)


def _tvm_ffi() -> Finding:
    meaning = "loads and calls compiled kernels"
    version = _version("apache-tvm-ffi")
    if version is None:
        return Finding(
            "tvm_ffi", "hinders", "not installed", meaning, "pip install 'apache-tvm-ffi[cpp]'"
        )
    return Finding("tvm_ffi", "ok", version, meaning)


def _cache() -> Finding:
    meaning = "where compiled objects are kept; GDNTUNE_CACHE_DIR names another folder"
    root = store.default_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        # Written, not asked for: a full disk and a read-only mount look like any folder.
        with tempfile.TemporaryFile(dir=root) as file:
            file.write(b"gdntune")
    except OSError as e:
        remedy = "set GDNTUNE_CACHE_DIR to a folder that you may write to"
        return Finding("cache", "hinders", f"{root}: {e.strerror or e}", meaning, remedy)
    return Finding("cache", "ok", str(root), meaning)


def _peers() -> list[Finding]:
    """The other libraries that are installed, each beside the version that its adapter is for."""
    meaning = "`gdntune bench` times it beside ours"
    found = []
    for name in peers.PEERS:
        peer = peers.get(name)
        # What is not installed is no finding: nobody need have every library.
        if peer.absent():
            continue
        differs = peer.differs()
        remedy = f"{'; '.join(differs)}: what moved has no times; {peer.remedy}" if differs else ""
        status: Literal["ok", "note"] = "note" if differs else "ok"
        found.append(Finding(f"peer {name}", status, peer.version(), meaning, remedy))
    return found


def put_to_use(path: Path | str) -> str:
    """What a user does so that the runtime chooses by a table, in words."""
    quoted = shlex.quote(str(path))
    # A user without a home has no folder to install into.
    homeless = dispatch.user_tables().is_relative_to(store.NOWHERE)
    install = "" if homeless else f"run `gdntune table install {quoted}`, or "
    return f"{install}set GDNTUNE_TABLE={quoted}, or call gdntune.load_table({str(path)!r})"


def _tables(index: int) -> list[Finding]:
    meaning = "what the runtime chooses by"
    try:
        device = arch.detect("auto", index)
    except ToolMissing as e:
        return [Finding("tables", "note", "no device to look for", meaning, str(e))]
    ops = ", ".join(GATES)
    # In the order in which the runtime looks for them.
    named = [Path(os.environ["GDNTUNE_TABLE"])] if os.environ.get("GDNTUNE_TABLE") else []
    own, shipped = (
        sorted((folder / device.slug).glob("*.json"))
        for folder in (dispatch.user_tables(), dispatch.shipped_tables())
    )
    found = [
        _table(path, device, meaning)
        for path in (*named, *(p for p in own if p.stem in GATES), *shipped)
    ]
    if not found:
        remedy = (
            "gdntune sweep CONFIG makes one; until then the nearest device's table or the kernels'"
            " default rule is used"
        )
        found.append(Finding("tables", "note", f"none for {device.name}", meaning, remedy))
    for path in own:
        if path.stem not in GATES:
            remedy = f"name it OP.json (OP: {ops}), or run `gdntune table install {path}`"
            found.append(Finding("table", "note", f"{path} is not looked for", meaning, remedy))
    use = f"to use a sweep's table.json, {put_to_use('PATH')}"
    return [
        *found,
        Finding("your own", "ok", use, "how the runtime comes to choose by a table of yours"),
    ]


def _table(path: Path, device: arch.Device, meaning: str) -> Finding:
    try:
        found = table.load(path)
        kernels.check_names(map(found.variant, found.variants), str(path))
    except TableError as e:
        return Finding("table", "note", f"{path} cannot be used", meaning, str(e))
    ops = ", ".join(sorted({rule.when.op for rule in found.rules}))
    if found.device.kind != device.kind:
        remedy = f"name one of {device.name}, or unset GDNTUNE_TABLE"
        return Finding(
            "table",
            "note",
            f"{path} ({ops}) is of {found.device.name}, and refused here",
            meaning,
            remedy,
        )
    old = table.stale(found, kernels.fingerprints(device.kind))
    if old:
        remedy = f"its {', '.join(old)} was measured with other code than is installed: sweep again"
        return Finding("table", "note", f"{path} ({ops}) is stale", meaning, remedy)
    return Finding("table", "ok", f"{path} ({ops})", meaning)
