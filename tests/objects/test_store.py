"""The object store, bundles and the compile farm, on CPU objects."""

import os
import pwd
import shutil
import tempfile

import msgspec
import pytest
import torch

import gdntune
from gdntune import kernels
from gdntune.device import arch
from gdntune.errors import BuildError, ToolMissing
from gdntune.objects import build, store
from gdntune.objects.store import Store, object_spec, read_bundle, write_bundle
from gdntune.problem import Contract
from gdntune.runtime import dispatch
from gdntune.sol import floor_form

CONTRACT = Contract(state_dtype="fp32", mode="update")


def floor_objects(count=2):
    """Objects of the CPU's floor kernel, the quickest to compile."""
    device, kernel = arch.detect("cpu"), kernels.get("cpu_stream")
    variants = kernels.variants(CONTRACT, device, "floor")[:count]
    return [(object_spec(kernel, CONTRACT, v, device), kernel.compiler) for v in variants]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store with two compiled objects."""
    found = Store(tmp_path_factory.mktemp("store"))
    objects = floor_objects()
    assert all(b.ok and not b.cached for b in build.compile_objects(objects, found))
    return found, objects


def works(function):
    """Whether a loaded floor function runs: with factor 2 it doubles a state."""
    assert floor_form(CONTRACT).writes == 1
    state = torch.full((2, 2 * 128 * 128), 1.5)
    function(state, torch.arange(len(state), dtype=torch.int32), None, 2.0, torch.zeros(1))
    return bool((state == 3.0).all())


def test_objects_are_compiled_once(built):
    """What the store holds is not compiled again."""
    found, objects = built
    assert all(b.ok and b.cached for b in build.compile_objects(objects, found))


def test_loose_objects_load_and_run(built):
    """Objects of the store are linked into one library and called through tvm_ffi."""
    found, objects = built
    functions = Store(found.root).load([spec for spec, _ in objects])
    assert len(functions) == 2
    assert all(works(f) for f in functions.values())


def test_a_bundle_loads_without_the_store(built, tmp_path):
    """A bundle made on one machine is all that another needs."""
    found, objects = built
    write_bundle(found, [spec for spec, _ in objects], tmp_path / "bundle")
    other = Store(tmp_path / "empty", [tmp_path / "bundle"])
    assert all(works(f) for f in other.load([spec for spec, _ in objects]).values())
    assert not (tmp_path / "empty").exists() or not list((tmp_path / "empty").rglob("*.so"))


def test_a_damaged_bundle_is_refused(built, tmp_path):
    """Nothing below checks what it loads: a library that is not the manifest's is refused."""
    found, objects = built
    write_bundle(found, [spec for spec, _ in objects], tmp_path)
    with open(tmp_path / "libgdntune.so", "ab") as f:
        f.write(b"x")
    with pytest.raises(BuildError, match="sha256"):
        Store(tmp_path / "none", [tmp_path]).load([objects[0][0]])


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "does not exist"),
        (b"{", "not a bundle's manifest"),
        (b'{"schema": "x", "arch": "", "library": "", "sha256": "", "objects": {}}', "schema"),
    ],
)
def test_a_folder_that_is_no_bundle_is_refused(content, match, tmp_path):
    """One clear message for a missing, broken or older manifest."""
    if content is not None:
        (tmp_path / "bundle.json").write_bytes(content)
    with pytest.raises(BuildError, match=match):
        read_bundle(tmp_path)


def test_a_damaged_object_is_refused(built, tmp_path):
    """An object file that changed on the disk is not linked."""
    found, objects = built
    shutil.copytree(found.root, tmp_path / "copy")
    other = Store(tmp_path / "copy")
    path = other.object_file(objects[0][0].key)
    path.write_bytes(path.read_bytes() + b"x")
    with pytest.raises(BuildError, match="damaged"):
        other.load([objects[0][0]])


def test_a_missing_object_is_named(tmp_path):
    """Loading what was never compiled says so."""
    with pytest.raises(BuildError, match="compile it first"):
        Store(tmp_path).load([floor_objects(1)[0][0]])


def test_the_key_is_all_that_decides_the_bytes(built):
    """Facts, knobs, architecture, fingerprint and toolchain change the key; the label does not."""
    spec = built[1][0][0]
    changes = [
        {"facts": {**spec.facts, "x": 1}},
        {"knobs": {**spec.knobs, "x": 1}},
        {"arch": "y"},
        {"fingerprint": "z"},
        {"toolchain": "t"},
    ]
    keys = {msgspec.structs.replace(spec, **c).key for c in changes}
    assert len(keys) == len(changes) and spec.key not in keys
    assert msgspec.structs.replace(spec, label="other").key == spec.key


def test_atomic_write_leaves_no_half_file(tmp_path, monkeypatch):
    """A failed write leaves what stood there, and no temporary file."""
    path = tmp_path / "file"
    store.atomic_write(path, b"old")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        store.atomic_write(path, b"new")
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]


def broken_compiler(facts, knobs, name, folder):
    """A compiler that dies, fails or works, by a knob."""
    if knobs["vec"] == 1:
        os.abort()
    raise ValueError("no such instruction")


def test_a_crashed_worker_costs_its_own_object_alone(built, tmp_path):
    """One object's compiler crashes, another's raises: both are values with a reason, the third
    compiles.
    """
    good, compiler = built[1][0]
    crash = msgspec.structs.replace(good, knobs={**good.knobs, "vec": 1})
    error = msgspec.structs.replace(good, knobs={**good.knobs, "vec": 2})
    broken = "test_store:broken_compiler"
    outcome = build.compile_objects(
        [(crash, broken), (good, compiler), (error, broken)], Store(tmp_path), jobs=2
    )
    assert [b.ok for b in outcome] == [False, True, False]
    assert "died" in outcome[0].reason and "no such instruction" in outcome[2].reason


def test_no_linker_is_one_clear_message(built, monkeypatch, tmp_path):
    """Without gcc or g++ the message says what to install, or to load a bundle."""
    monkeypatch.setattr(shutil, "which", lambda *_: None)
    with pytest.raises(ToolMissing, match="bundle"):
        store.link([built[0].object_file(built[1][0][0].key)], tmp_path / "x.so", "cpu")


def test_a_complete_store_need_not_be_written(built, tmp_path):
    """Fault: a store with every object, which could not be written, was of no use: linking wrote
    into it.
    """
    found, objects = built
    shutil.copytree(found.root, tmp_path / "copy", ignore=shutil.ignore_patterns("linked"))
    (tmp_path / "copy" / "linked").touch()  # root may write anywhere, but not below a file
    other = Store(tmp_path / "copy")
    assert all(works(f) for f in other.load([spec for spec, _ in objects]).values())


def test_no_place_to_write_is_one_clear_message(tmp_path):
    """Fault: with a home that cannot be written an object "did not compile: PermissionError"."""
    (tmp_path / "file").touch()
    with pytest.raises(ToolMissing, match=r"cannot be written .*GDNTUNE_CACHE_DIR.*GDNTUNE_BUNDLE"):
        build.compile_objects(floor_objects(1), Store(tmp_path / "file" / "objects"))


def test_a_user_without_a_home_has_a_store(built, monkeypatch, tmp_path):
    """Fault: a uid without passwd entry and HOME could not even look into a bundle."""
    found, objects = built
    write_bundle(found, [objects[0][0]], tmp_path)
    for name in ("GDNTUNE_CACHE_DIR", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def unknown(*_):
        raise KeyError("uid not found")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert not dispatch.user_tables().exists()
    homeless = Store(bundles=[tmp_path])
    assert works(homeless.load([objects[0][0]])[objects[0][0].key])
    with pytest.raises(ToolMissing, match="no home folder: set GDNTUNE_CACHE_DIR"):
        build.compile_objects([objects[1]], homeless)


def test_places_with_blanks_and_quotes(built, tmp_path):
    """Fault: a store whose path had a blank could not be linked, since the linker read two names."""
    found, objects = built
    place = tmp_path / "my 'own' \\ \"cache\""
    shutil.copytree(found.root, place, ignore=shutil.ignore_patterns("linked"))
    other = Store(place)
    assert all(works(f) for f in other.load([spec for spec, _ in objects]).values())
    write_bundle(other, [spec for spec, _ in objects], tmp_path / "a bundle")
    assert Store(tmp_path / "none", [tmp_path / "a bundle"]).load([objects[0][0]])


def test_a_bundles_library_may_be_a_link(built, tmp_path):
    """Fault: a link was replaced by a file, and what it named stayed as it was."""
    found, objects = built
    bundle, real = tmp_path / "bundle", tmp_path / "real.so"
    bundle.mkdir()
    real.write_bytes(b"old")
    (bundle / "libgdntune.so").symlink_to(real)
    write_bundle(found, [objects[0][0]], bundle)
    assert (bundle / "libgdntune.so").is_symlink() and real.read_bytes() != b"old"
    assert works(Store(tmp_path / "none", [bundle]).load([objects[0][0]])[objects[0][0].key])


def test_a_newer_bundle_is_named(built, tmp_path):
    """Fault: a later version's bundle was to be made anew, by a version that cannot read it."""
    found, objects = built
    made = write_bundle(found, [objects[0][0]], tmp_path)
    assert made.gdntune == gdntune.__version__
    path = tmp_path / "bundle.json"
    text = path.read_text().replace(gdntune.__version__, "7.5")
    path.write_text(text.replace("gdntune.bundle/1", "gdntune.bundle/2"))
    with pytest.raises(BuildError, match=r"bundle/2 was written by gdntune 7\.5.*pip install -U"):
        Store(tmp_path / "none", [tmp_path])
    path.write_text(text.replace('"arch"', '"archs"', 1))
    with pytest.raises(BuildError, match=r"gdntune 7\.5 wrote it"):
        Store(tmp_path / "none", [tmp_path])


def test_no_place_for_temporary_files(built, monkeypatch, tmp_path):
    """Fault: a container whose store alone can be written compiled nothing; and where that cannot be
    either, the message named no variable.
    """
    found, objects = built

    def nowhere():
        raise FileNotFoundError(2, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", nowhere)
    own = Store(tmp_path / "own")
    (made,) = build.compile_objects(objects[:1], own)
    assert made.ok and works(own.load([objects[0][0]])[objects[0][0].key])
    assert {p.name for p in own.root.iterdir()} == {objects[0][0].key[:2], "linked"}
    shutil.copytree(found.root, tmp_path / "copy", ignore=shutil.ignore_patterns("linked"))
    (tmp_path / "copy" / "linked").touch()
    with pytest.raises(ToolMissing, match="No usable temporary directory .*set TMPDIR"):
        Store(tmp_path / "copy").load([objects[0][0]])
