"""Makes a wheel of compiled kernels: `python -m gdntune.tuning.kernel_wheel ARCH FOLDER
[TABLE...]`.

It holds what the shipped tables of an architecture (or those given) can choose for their own
contracts, as a bundle in a package that the runtime finds by its name: gdntune-kernels-sm90a.
Compiling needs `gdntune[sweep]` and no GPU; a machine that installs the wheel needs no compiler.
"""

import argparse
import base64
import hashlib
import sysconfig
import tempfile
import zipfile
from pathlib import Path

from gdntune import __version__
from gdntune.device import arch
from gdntune.errors import BuildError, UnsupportedProblem
from gdntune.files import write_whole
from gdntune.objects.build import compile_objects
from gdntune.objects.store import Store, kernel_package, write_bundle
from gdntune.results import table
from gdntune.runtime.dispatch import shipped_tables
from gdntune.tuning.chosen import chosen_objects, contracts_of

# The library that compiled CUDA objects call comes with it.
CUDA_NEEDS = "nvidia-cutlass-dsl[cu13]>=4.8.0,<4.8.2"


def shipped_for(device: arch.Device) -> list[Path]:
    """The shipped tables that were measured on an architecture."""
    there = sorted(shipped_tables().glob("*/*.json"))
    return [p for p in there if table.device_of(p).arch == device.arch]


def make_wheel(
    device: arch.Device, tables: list[Path], folder: Path, store: Store, jobs: int | None = None
) -> Path:
    """Compiles, bundles and packs; returns the wheel. BuildError where an object does not
    compile.
    """
    if not tables:
        raise UnsupportedProblem(
            f"no shipped table was measured on {device.arch}: name the tables to compile for"
        )
    objects = chosen_objects(contracts_of(tables), tables, device)
    failed = [b for b in compile_objects(objects, store, jobs=jobs) if not b.ok]
    if failed:
        raise BuildError(f"{failed[0].spec.name} does not compile: {failed[0].reason}")
    with tempfile.TemporaryDirectory() as made:
        bundle = write_bundle(store, [spec for spec, _ in objects], Path(made))
        about = f"Compiled kernels of gdntune {__version__} for {device.arch}."
        files = {
            "__init__.py": f'"""{about}"""\n'.encode(),
            "bundle.json": (Path(made) / "bundle.json").read_bytes(),
            bundle.library: (Path(made) / bundle.library).read_bytes(),
        }
    return _pack(kernel_package(device.arch), device, files, folder)


def _pack(package: str, device: arch.Device, files: dict[str, bytes], folder: Path) -> Path:
    """A wheel of one package: its files, what it is, and their hashes."""
    name = package.replace("_", "-")
    tag = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
    needs = [f"gdntune=={__version__}", *([CUDA_NEEDS] if device.kind == "cuda" else [])]
    about = f"{package}-{__version__}.dist-info"
    metadata = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {__version__}\n"
        f"Summary: Compiled Gated DeltaNet and KDA decode kernels for {device.arch}.\n"
        "License: Apache-2.0\n" + "".join(f"Requires-Dist: {n}\n" for n in needs)
    )
    wheel = f"Wheel-Version: 1.0\nGenerator: gdntune\nRoot-Is-Purelib: false\nTag: {tag}\n"
    content = {f"{package}/{file}": data for file, data in files.items()}
    content |= {f"{about}/METADATA": metadata.encode(), f"{about}/WHEEL": wheel.encode()}
    rows = []
    for path, data in content.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        rows.append(f"{path},sha256={digest},{len(data)}\n")
    content[f"{about}/RECORD"] = ("".join(rows) + f"{about}/RECORD,,\n").encode()
    with tempfile.TemporaryFile() as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            for path, data in content.items():
                # one date, so that the same kernels are the same wheel
                archive.writestr(zipfile.ZipInfo(path, (1980, 1, 1, 0, 0, 0)), data)
        file.seek(0)
        target = folder / f"{package}-{__version__}-{tag}.whl"
        write_whole(target, file.read())
    return target


def main() -> None:
    """As a program."""
    parser = argparse.ArgumentParser(description="Makes a wheel of compiled kernels.")
    parser.add_argument("arch", help="sm_90a, sm_100a, ..., or cpu: this CPU")
    parser.add_argument("folder", type=Path, help="where the wheel is written")
    parser.add_argument("table", type=Path, nargs="*", help="tables, instead of the shipped ones")
    parser.add_argument("--jobs", type=int, default=None, help="compiling processes")
    given = parser.parse_args()
    device = arch.detect("cpu") if given.arch == "cpu" else arch.target(given.arch)
    tables = given.table or shipped_for(device)
    print(make_wheel(device, tables, given.folder, Store(), given.jobs))  # noqa: T201


if __name__ == "__main__":
    main()
