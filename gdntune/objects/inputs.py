"""The files that an object was made of beyond its kernel's sources: headers, by their contents.

A compiler says itself what it read, so nothing is forgotten. Names are those of a package, not of
a place, so that two environments with the same headers share objects.
"""

import hashlib
import importlib.util
from collections.abc import Iterable, Mapping
from functools import cache, lru_cache
from pathlib import Path

# Packages whose headers kernels include.
PACKAGES = ("gdntune", "tvm_ffi")


@cache
def _folder(package: str) -> Path | None:
    # Found, not imported: tvm_ffi imports torch.
    spec = importlib.util.find_spec(package)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))).resolve() if places else None


# By time and size too, so that a header which changes within a process is read again.
@lru_cache(maxsize=4096)
def _sha256(path: Path, *status: int) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _hash(path: Path) -> str | None:
    """The contents' sha256, read once while the file stays; None where there is none."""
    try:
        s = path.stat()
        # Not st_mtime alone: files of reproducible wheels all have the same.
        return _sha256(path, s.st_ctime_ns, s.st_mtime_ns, s.st_ino, s.st_size)
    except OSError:
        return None


def _named(path: Path) -> str:
    path = path.resolve()
    for package in PACKAGES:
        folder = _folder(package)
        if folder and path.is_relative_to(folder):
            return f"{package}/{path.relative_to(folder).as_posix()}"
    return str(path)


def _place(name: str) -> Path:
    package, _, rest = name.partition("/")
    folder = _folder(package) if package in PACKAGES else None
    return folder / rest if folder else Path(name)


def hashed(paths: Iterable[Path]) -> dict[str, str]:
    """The contents' sha256 of files by name, as a manifest keeps them."""
    # A file that is gone by now hashes to nothing, which no file equals: the object is compiled
    # again.
    return {_named(p): _hash(p) or "" for p in sorted(paths)}


def unchanged(inputs: Mapping[str, str]) -> bool:
    """Whether the files that an object was made of are here as they were."""
    return all(_hash(_place(name)) == sha256 for name, sha256 in inputs.items())
