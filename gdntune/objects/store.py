"""Compiled objects on disk: a content-keyed store, and bundles (many objects in one library) that
load without a compiler.

An object is keyed by what it was compiled from: kernel, facts, knobs, architecture, the kernel's
fingerprint and the toolchain. Loading checks architecture, versions and sha256, since nothing below
does: a wrong object would fail at its first launch.
"""

import contextlib
import ctypes
import dataclasses
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from gdntune import __version__, kernels, strict
from gdntune.device.arch import Device
from gdntune.errors import BuildError, ToolMissing
from gdntune.files import write_whole
from gdntune.kernels import cpu_object
from gdntune.kernels.fingerprint import believe, fingerprint, stamp
from gdntune.kernels.spec import Kernel, Variant
from gdntune.objects.inputs import unchanged
from gdntune.problem import Contract

# What CUDA objects are made with; another version is a change of its own (traps differ), so it is
# part of their keys. The versions listed compile every kernel to the same bytes and so share
# objects, under the name of one.
CUTE_DSL_VERSION = "4.8.1"
CUTE_DSL_VERSIONS = ("4.8.0", "4.8.1")
# The DSL compiles as its variables say (CUTE_DSL_LINEINFO, CUTE_DSL_COMPILER_OPT): all count but
# those that change no byte, or that the compiling process sets itself.
_DSL = "CUTE_DSL_"
_NO_BYTES = {
    _DSL + name
    for name in (
        "ARCH", "CACHE_DIR", "DISABLE_FILE_CACHING", "DUMP_DIR", "JIT_TIME_PROFILING", "LIBS",
        "LOG_LEVEL", "LOG_TO_CONSOLE", "LOG_TO_FILE", "NO_CACHE",
    )
}  # fmt: skip
BUNDLE_SCHEMA = "gdntune.bundle/1"


class ObjectSpec(msgspec.Struct, frozen=True):
    """What one object is compiled from."""

    kernel: str
    device: str
    facts: dict[str, Any]
    knobs: dict[str, Any]
    arch: str
    fingerprint: str
    toolchain: str
    label: str = ""

    @property
    def key(self) -> str:
        """sha256 of everything that decides the object's bytes."""
        # The label does not count here: where it makes another function it is among the facts.
        return self._hash("label")

    @property
    def source_key(self) -> str:
        """The key without the toolchain: a bundle's object serves whatever compiler made it, and
        where there is none.
        """
        return self._hash("label", "toolchain")

    def _hash(self, *without: str) -> str:
        fields = {f: getattr(self, f) for f in self.__struct_fields__ if f not in without}
        return hashlib.sha256(msgspec.json.encode(fields, order="deterministic")).hexdigest()

    @property
    def name(self) -> str:
        """The function's name, also in profilers."""
        return f"gdntune_{self.label.replace('.', '_') or self.kernel}_{self.key[:12]}"


class Manifest(msgspec.Struct, frozen=True):
    """What is known of one compiled object. inputs: the headers it was made of, by contents."""

    spec: ObjectSpec
    name: str
    sha256: str
    seconds: float
    registers: int | None = None
    spill_bytes: int | None = None
    shared_bytes: int | None = None
    inputs: dict[str, str] = {}


class Bundle(msgspec.Struct, frozen=True):
    """The manifest of a bundle: one library, its objects and what they need. gdntune: the version
    that wrote it. stamp: fingerprints of its kernels (`fingerprint.stamp`).
    """

    schema: str
    arch: str
    library: str
    sha256: str
    objects: dict[str, Manifest]
    gdntune: str = ""
    stamp: dict[str, str] = {}


def toolchain(device: str) -> str:
    """What makes and links objects here: the pinned CuTe DSL, or the C++ compiler by its version
    and the flags that CXX gives it, with tvm_ffi.
    """
    if device == "cuda":
        asked = {n: v for n, v in os.environ.items() if n.startswith(_DSL) and n not in _NO_BYTES}
        settings = [f"{name}={value}" for name, value in sorted(asked.items())]
        return " ".join([f"nvidia-cutlass-dsl {CUTE_DSL_VERSION}", *settings])
    command = cpu_object.command()
    return _cpp_toolchain(tuple(command), shutil.which(command[0]))


@cache
def _cpp_toolchain(command: tuple[str, ...], place: str | None) -> str:
    """place: where PATH leads now, since it may lead elsewhere later."""
    if place is None:
        return f"{command[0]} (none)"
    said = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    version = (said.stdout.splitlines() or [command[0]])[0]
    # Of a compiler its version counts, wherever it lies.
    flags = [*command[1:], "apache-tvm-ffi", importlib.metadata.version("apache-tvm-ffi")]
    return " ".join([version, *flags])


def object_spec(
    kernel: Kernel,
    contract: Contract,
    variant: Variant,
    device: Device,
    *,
    label: str | None = None,
) -> ObjectSpec:
    """The object that serves a contract with a variant on a device.

    label: a name for profilers other than the variant's; such an object is one of its own, so that
        no other shows under that name.
    """
    return ObjectSpec(
        kernel=kernel.name,
        device=kernel.device,
        facts={**kernel.facts(contract), **({} if label is None else {"label": label})},
        # a table or journal of an older version names fewer knobs: the others are at their defaults
        knobs=dataclasses.asdict(kernel.setting(variant.knobs)),
        arch=device.arch,
        fingerprint=fingerprint(kernel.sources),
        toolchain=toolchain(kernel.device),
        label=variant.id if label is None else label,
    )


# Where nothing is and nothing can be: the place of a store for a user without a home folder.
NOWHERE = Path(os.devnull)


def default_root() -> Path:
    """Where objects are kept: GDNTUNE_CACHE_DIR, else the user's cache folder. A user without a
    home has none, and needs none where a bundle has all.
    """
    import platformdirs

    given = os.environ.get("GDNTUNE_CACHE_DIR")
    try:
        return Path(given or platformdirs.user_cache_dir("gdntune")) / "objects"
    # What platformdirs raises for a user id without an entry in passwd, as containers have them.
    except (RuntimeError, KeyError):
        return NOWHERE / "objects"


def file_sha256(path: Path) -> str:
    """The sha256 of a file, as manifests hold it."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def scratch_folder(instead: Path | None = None) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder, in `instead` where the system has no place; ToolMissing without."""
    try:
        return tempfile.TemporaryDirectory(prefix="gdntune-", ignore_cleanup_errors=True)
    except FileNotFoundError as e:
        if instead is not None:
            return tempfile.TemporaryDirectory(prefix=".gdntune-", dir=instead)
        raise ToolMissing(
            f"{e.strerror}: set TMPDIR, or GDNTUNE_CACHE_DIR, to a folder that can be written"
        ) from None


def atomic_write(path: Path, data: bytes) -> None:
    """As `files.write_whole`."""
    write_whole(path, data)


class OpenBundle:
    """A bundle that is in use. by_source: its objects by `source_key`; module: its library, once
    anything of it was asked for.
    """

    def __init__(self, folder: Path, manifest: Bundle):
        self.folder, self.manifest = folder, manifest
        self.by_source = {m.spec.source_key: m for m in manifest.objects.values()}
        self.module: Any = None


class Store:
    """Objects and bundles on disk, and the functions loaded from them in this process."""

    def __init__(self, root: Path | None = None, bundles: Iterable[Path] = ()):
        self.root = Path(root) if root else default_root()
        self.bundles = [(Path(b), read_bundle(Path(b))) for b in bundles]
        self._opened = [OpenBundle(*b) for b in self.bundles]
        for _, manifest in self.bundles:
            believe(manifest.stamp)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._modules: list[Any] = []

    def folder(self, key: str) -> Path:
        # Two letters a level: a store has tens of thousands of objects, and folders that large are
        # slow to list.
        return self.root / key[:2] / key

    def find(self, spec: ObjectSpec) -> Manifest | None:
        """The manifest of an object that is here, in a bundle or the store."""
        if self._opened:
            key = spec.source_key
            for bundle in self._opened:
                if key in bundle.by_source:
                    return bundle.by_source[key]
        path = self.folder(spec.key) / "manifest.json"
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Manifest)
        except (OSError, msgspec.DecodeError):
            return None
        # A header that changed since: the kernel's fingerprint covers its own sources alone.
        return found if unchanged(found.inputs) else None

    def require_writable(self) -> None:
        """ToolMissing where nothing can be kept: it names what to set."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            # Tried, not asked: os.access knows nothing of read-only mounts and quotas.
            with tempfile.TemporaryFile(dir=self.root):
                return
        except OSError as e:
            place = "this user has no home folder"
            if not self.root.is_relative_to(NOWHERE):
                place = f"{self.root} cannot be written ({e.strerror or e})"
            raise ToolMissing(
                f"there is no place for compiled objects, {place}: set GDNTUNE_CACHE_DIR to a"
                " folder that can be written, or GDNTUNE_BUNDLE to a bundle that has them all"
            ) from None

    @contextmanager
    def lock(self, spec: ObjectSpec) -> Iterator[None]:
        """Held while an object is compiled, so that two processes do not compile it twice."""
        from filelock import FileLock

        folder = self.folder(spec.key).parent
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{spec.key}.lock"):
            yield

    def put(self, manifest: Manifest, object_file: Path) -> None:
        """Adds an object; the manifest comes last, so that what has one is whole."""
        folder = self.folder(manifest.spec.key)
        atomic_write(folder / "object.o", object_file.read_bytes())
        atomic_write(folder / "manifest.json", msgspec.json.encode(manifest))

    def object_file(self, key: str) -> Path:
        return self.folder(key) / "object.o"

    def load(self, specs: Iterable[ObjectSpec]) -> dict[str, Callable[..., Any]]:
        """The functions of objects that are here, by key; those of the store are linked into one
        library first.
        """
        wanted = {s.key: s for s in specs}
        loose: dict[str, Manifest] = {}
        for key, spec in wanted.items():
            if key in self._functions:
                continue
            manifest = self.find(spec)
            if manifest is None:
                raise BuildError(
                    f"object {spec.name} ({key[:12]}) is neither in {self.root} nor in a bundle:"
                    " compile it first"
                )
            if not self._from_bundle(spec):
                loose[key] = manifest
        if loose:
            self._load_loose(loose)
        return {key: self._functions[key] for key in wanted}

    def _from_bundle(self, spec: ObjectSpec) -> bool:
        source_key = spec.source_key
        for bundle in self._opened:
            if source_key in bundle.by_source:
                module = bundle.module or self._open(bundle)
                self._functions[spec.key] = module[bundle.by_source[source_key].name]
                return True
        return False

    def _open(self, bundle: "OpenBundle") -> Any:
        library = bundle.folder / bundle.manifest.library
        # The loader takes any library; a truncated one would crash at its first call.
        if file_sha256(library) != bundle.manifest.sha256:
            raise BuildError(
                f"{library} is not the library that {bundle.folder / 'bundle.json'} names (sha256"
                " differs): make the bundle anew"
            )
        device = next(iter(bundle.by_source.values())).spec.device
        # At the first call, not when the bundle is opened: loading takes what an engine waits for
        # at its start.
        bundle.module = self._module(library, device)
        return bundle.module

    def _load_loose(self, manifests: dict[str, Manifest]) -> None:
        for key, m in manifests.items():
            if file_sha256(self.object_file(key)) != m.sha256:
                raise BuildError(
                    f"{self.object_file(key)} is damaged (sha256 differs): remove its folder and"
                    " compile again"
                )
        # By contents: the same objects are linked once, whoever asks, and in whatever order.
        contents = sorted(m.sha256 for m in manifests.values())
        digest = hashlib.sha256("".join(contents).encode()).hexdigest()
        device = next(iter(manifests.values())).spec.device
        library = self.root / "linked" / f"{digest[:24]}.so"
        objects = [self.object_file(k) for k in sorted(manifests)]
        with contextlib.ExitStack() as stack:
            if not library.exists():
                try:
                    link(objects, library, device)
                except OSError:
                    # A store that is complete need not be one that can be written.
                    folder = stack.enter_context(scratch_folder())
                    library = Path(folder) / library.name
                    link(objects, library, device)
            module = self._module(library, device)
        for key, m in manifests.items():
            self._functions[key] = module[m.name]

    def _module(self, library: Path, device: str) -> Any:
        import tvm_ffi

        if device == "cuda":
            preload_cute_runtime()
        module = tvm_ffi.load_module(str(library))
        # Kept for the process' life: a function of a library that was unloaded crashes.
        self._modules.append(module)
        return module


def link(objects: list[Path], library: Path, device: str) -> None:
    """Links objects into one shared library, whole or not at all."""
    compiler = _linker(device)
    openmp = ["-fopenmp"] if device == "cpu" else []
    library.parent.mkdir(parents=True, exist_ok=True)
    # Beside the library: where that can be written, nowhere else need be.
    with tempfile.TemporaryDirectory(prefix=".gdntune-", dir=library.parent) as temporary:
        # A file of arguments: hundreds of paths would pass the limit of a command line.
        arguments, linked = Path(temporary, "arguments"), Path(temporary, library.name)
        arguments.write_text("\n".join(_quoted(o) for o in objects))
        done = subprocess.run(
            [*compiler, "-shared", *openmp, "-o", str(linked), f"@{arguments}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise BuildError(f"linking {len(objects)} objects failed:\n{done.stderr[-2000:]}")
        write_whole(library, linked.read_bytes())


def _linker(device: str) -> list[str]:
    """The compiler that links: of the CPU's objects the one that made them, with the user's flags
    (a sanitizer's, say), since these name the libraries that the objects need.
    """
    own = [cpu_object.command()] if device == "cpu" else []
    for command in (*own, ["gcc"] if device == "cuda" else ["g++"], ["g++"]):
        if shutil.which(command[0]):
            return command
    raise ToolMissing(
        "no gcc or g++ to link compiled kernels: install one (apt install g++), or load a bundle"
        " made elsewhere"
    )


def _quoted(path: Path) -> str:
    """A path in a file of a compiler's arguments, which blanks, quotes and backslashes divide."""
    return re.sub(r"([\s'\"\\])", r"\\\1", str(path))


def write_bundle(store: Store, specs: Iterable[ObjectSpec], folder: Path) -> Bundle:
    """Links objects of the store into folder/libgdntune.so with folder/bundle.json."""
    manifests = {}
    for spec in specs:
        manifest = store.find(spec)
        if manifest is None:
            raise BuildError(f"object {spec.name} is not in {store.root}: compile it first")
        manifests[spec.key] = manifest
    if not manifests:
        raise BuildError("a bundle of no objects: nothing was compiled")
    archs = {(m.spec.device, m.spec.arch) for m in manifests.values()}
    if len(archs) > 1:
        # The others' code would fail at its first call, on another machine than this.
        raise BuildError(f"a bundle holds one architecture, these are {sorted(archs)}")
    library = folder / "libgdntune.so"
    link([store.object_file(k) for k in sorted(manifests)], library, next(iter(archs))[0])
    bundle = Bundle(
        BUNDLE_SCHEMA,
        next(iter(archs))[1],
        library.name,
        file_sha256(library),
        dict(sorted(manifests.items())),
        __version__,
        stamp(k.sources for k in kernels.KERNELS.values()),
    )
    atomic_write(folder / "bundle.json", msgspec.json.format(msgspec.json.encode(bundle), indent=1))
    return bundle


def kernel_package(arch: str) -> str:
    """The package that holds a bundle for an architecture: gdntune_kernels_sm90a."""
    return "gdntune_kernels_" + re.sub(r"[^a-z0-9]+", "_", arch.lower().replace("sm_", "sm"))


def installed_bundle(arch: str) -> Path | None:
    """The bundle of an installed package, found by its name: to ask all distributions for entry
    points takes tens of ms. None where there is none.
    """
    spec = importlib.util.find_spec(kernel_package(arch))
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def read_bundle(folder: Path) -> Bundle:
    """A bundle's manifest; BuildError says what is wrong with it."""
    path = folder / "bundle.json"
    try:
        data = path.read_bytes()
        strict.refuse_newer(data, BUNDLE_SCHEMA, str(path), BuildError)
        bundle = msgspec.json.decode(data, type=Bundle)
    except FileNotFoundError:
        raise BuildError(
            f"{path} does not exist: `gdntune compile CONFIG --arch ARCH --bundle {folder}`"
            " makes it"
        ) from None
    except OSError as e:
        raise BuildError(f"{path}: {e.strerror or e}; expected a bundle's manifest") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        newer = strict.newer_writer(data) or "make the bundle anew"
        raise BuildError(f"{path} is not a bundle's manifest: {e}; {newer}") from None
    if bundle.schema != BUNDLE_SCHEMA:
        raise BuildError(
            f"{path}: schema {bundle.schema!r}, expected {BUNDLE_SCHEMA!r}: make the bundle anew"
        )
    return bundle


def _cute_runtime() -> Path | None:
    name = "libcute_dsl_runtime.so"
    found = importlib.util.find_spec("nvidia_cutlass_dsl")
    roots = list(found.submodule_search_locations or []) if found else []
    roots += [os.path.join(p, "nvidia_cutlass_dsl") for p in sys.path]
    folders = [Path(r) / "cu13" / "lib" for r in roots] + [
        Path(p) for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p
    ]
    return next((f / name for f in folders if (f / name).exists()), None)


_PRELOADED: list[Any] = []


def preload_cute_runtime() -> None:
    """Loads the library that compiled CUDA objects call; ToolMissing where it is not installed."""
    if _PRELOADED:
        return
    path = _cute_runtime()
    if path is None:
        raise ToolMissing(
            "libcute_dsl_runtime.so is not here, and compiled CUDA kernels call it: pip install"
            " 'gdntune[sweep]', which has nvidia-cutlass-dsl[cu13], or put the library's folder on"
            " LD_LIBRARY_PATH"
        )
    _PRELOADED.append(ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL))
