"""An object's key and inputs: whatever changes its bytes makes it another, and nothing else does."""

import ctypes
import os
import shutil
import subprocess
import sys

import msgspec
import pytest

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels import cpu_object, fingerprint
from gdntune.objects import build, inputs, store
from gdntune.objects.store import Store, object_spec, write_bundle
from gdntune.problem import Contract

DEVICE, FLOOR = arch.detect("cpu"), kernels.get("cpu_stream")
CONTRACT = Contract(state_dtype="fp32")


def wanted():
    """An object of the CPU's floor kernel, the quickest to compile."""
    return object_spec(FLOOR, CONTRACT, kernels.variants(CONTRACT, DEVICE, "floor")[0], DEVICE)


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store with one object, and its manifest."""
    found = Store(tmp_path_factory.mktemp("store"))
    (made,) = build.compile_objects([(wanted(), FLOOR.compiler)], found)
    assert made.ok, made.reason
    return found, made.manifest


def test_what_is_included_counts():
    """Fault: a constant changed in cpu/call.h left the fingerprint, and the old object ran."""
    found = fingerprint.closure(kernels.get("cpu_recurrent").sources)
    others = {"stream.h", "layer.h", "ring.h", "ring_norm.h"}
    assert {p.name for p in cpu_object.HEADERS.glob("*.h")} - others == {
        name.rsplit("/", 1)[1] for name in found if name.endswith(".h")
    }


def test_a_manifest_has_what_the_compiler_read(built):
    """The compiler's own list: ours, and tvm_ffi's, by contents and by names of no place."""
    read = built[1].inputs
    assert {"gdntune/kernels/cpu/stream.h", "gdntune/kernels/cpu/vectors.h"} <= read.keys()
    assert "tvm_ffi/include/tvm/ffi/c_api.h" in read
    assert all(len(sha256) == 64 for sha256 in read.values())
    assert inputs.unchanged(read)


def test_a_changed_header_is_another_object(built, monkeypatch, tmp_path):
    """Fault: an object made with another version of a header was found and ran."""
    found, manifest = built
    headers = shutil.copytree(inputs._folder("tvm_ffi") / "include", tmp_path / "tvm_ffi/include")
    folders = {"tvm_ffi": tmp_path / "tvm_ffi", "gdntune": inputs._folder("gdntune")}
    monkeypatch.setattr(inputs, "_folder", folders.get)
    assert found.find(manifest.spec)
    with open(headers / "tvm/ffi/c_api.h", "a") as f:
        f.write("\n#define ANOTHER 1\n")
    assert found.find(manifest.spec) is None


def test_an_object_made_anew_is_linked_anew(built, tmp_path):
    """A library is named by the contents of its objects: the same key with other bytes is another."""
    found, manifest = built
    shutil.copytree(found.root, tmp_path / "copy")
    other = Store(tmp_path / "copy")
    other.load([manifest.spec])
    (first,) = (other.root / "linked").iterdir()
    path = other.object_file(manifest.spec.key)
    path.write_bytes(path.read_bytes() + b"\0")
    changed = msgspec.structs.replace(manifest, sha256=store.file_sha256(path))
    other.put(changed, path)
    Store(other.root).load([manifest.spec])
    assert len([p for p in (other.root / "linked").iterdir() if p != first]) == 1


@pytest.mark.parametrize("cxx", ["g++ -O0", "g++ -DX", "g++ -DX=1"])
def test_flags_of_the_compiler_count(monkeypatch, cxx):
    """Fault: `CXX="g++ -O0"` and `CXX="g++ -DX"` shared a key."""
    monkeypatch.setenv("CXX", "g++")
    plain = store.toolchain("cpu")
    monkeypatch.setenv("CXX", cxx)
    assert store.toolchain("cpu") == plain.replace(" apache", f" {cxx[4:]} apache")


def test_the_compilers_place_does_not_count(monkeypatch):
    """A compiler is its version: the same by its whole path finds the same objects."""
    monkeypatch.setenv("CXX", "g++")
    named = store.toolchain("cpu")
    monkeypatch.setenv("CXX", shutil.which("g++"))
    assert store.toolchain("cpu") == named


def test_tvm_ffi_counts(monkeypatch):
    """Fault: the version of tvm_ffi, whose headers an object has, was not in its key."""
    before = wanted().key
    store._cpp_toolchain.cache_clear()
    monkeypatch.setattr(store.importlib.metadata, "version", lambda package: "0.1.99")
    assert wanted().key != before
    store._cpp_toolchain.cache_clear()


def test_a_bundle_loads_without_a_compiler(built, monkeypatch, tmp_path):
    """Fault: a CPU object's key had the version of the g++ at hand, so that a machine without one
    found nothing in a bundle.
    """
    found, manifest = built
    write_bundle(found, [manifest.spec], tmp_path / "bundle")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    store._cpp_toolchain.cache_clear()
    spec = wanted()
    store._cpp_toolchain.cache_clear()
    assert spec.toolchain == "g++ (none)" and spec.key != manifest.spec.key
    other = Store(tmp_path / "empty", [tmp_path / "bundle"])
    assert other.find(spec) == manifest
    assert callable(other.load([spec])[spec.key])


def test_both_versions_of_the_dsl_find_the_same_objects():
    """4.8.0, which vLLM and SGLang pin, and 4.8.1 compile to the same bytes: one name for both."""
    assert store.toolchain("cuda") == "nvidia-cutlass-dsl 4.8.1"
    assert store.CUTE_DSL_VERSIONS == ("4.8.0", "4.8.1")


@pytest.mark.parametrize("name", ["CUTE_DSL_LINEINFO", "CUTE_DSL_COMPILER_OPT"])
def test_the_dsls_variables_count(monkeypatch, name):
    """Fault: an object that was compiled under CUTE_DSL_LINEINFO=1 had the key of one that was not,
    and other bytes.
    """
    plain = store.toolchain("cuda")
    monkeypatch.setenv("CUTE_DSL_ARCH", "sm_90a")
    monkeypatch.setenv("CUTE_DSL_LOG_LEVEL", "20")
    assert store.toolchain("cuda") == plain
    monkeypatch.setenv(name, "1")
    assert store.toolchain("cuda") == f"{plain} {name}=1"


def test_the_compiler_that_made_them_links(monkeypatch, tmp_path):
    """Fault: where CXX names the one compiler that is here, objects were made and never linked."""
    (tmp_path / "my-g++").symlink_to(shutil.which("g++"))
    monkeypatch.setenv("CXX", f"{tmp_path / 'my-g++'} -DX")
    for program in ("as", "ld", "collect2"):
        if found := shutil.which(program):
            (tmp_path / program).symlink_to(found)
    monkeypatch.setenv("PATH", str(tmp_path))
    source = tmp_path / "a.cpp"
    source.write_text("int a() { return 1; }")
    compiler = cpu_object.command()
    subprocess.run([*compiler, "-fPIC", "-c", source, "-o", tmp_path / "a.o"], check=True)
    store.link([tmp_path / "a.o"], tmp_path / "a.so", "cpu")
    assert ctypes.CDLL(str(tmp_path / "a.so"))._Z1av() == 1


def test_compiling_for_a_cpu_needs_no_torch(tmp_path):
    """tvm_ffi imports torch, which took a compiling process 2.6 s where g++ took 1.6."""
    code = (
        "import sys; from pathlib import Path; from gdntune.kernels.cpu_object import object_of;"
        "object_of('#include \"arguments.h\"', 'one', Path(sys.argv[1]));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)


def test_a_compiler_that_appears_later_is_seen(monkeypatch, tmp_path):
    """Fault: a process that asked once while PATH led to no compiler had "g++ (none)" in its keys from
    then on.
    """
    path = os.environ["PATH"]
    monkeypatch.setenv("PATH", str(tmp_path))
    assert store.toolchain("cpu").endswith("(none)")
    monkeypatch.setenv("PATH", path)
    assert "(none)" not in store.toolchain("cpu")


def test_a_file_of_the_same_time_and_size_is_read_again(tmp_path):
    """Fault: a header was taken for unchanged by its time and size, which files of reproducible wheels
    share.
    """
    header = tmp_path / "a.h"
    header.write_text("int x = 1;")
    known = inputs.hashed([header])
    time_ns = header.stat().st_mtime_ns
    header.write_text("int x = 2;")
    os.utime(header, ns=(time_ns, time_ns))
    assert not inputs.unchanged(known)
