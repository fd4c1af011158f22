"""gdntune/doctor.py: each thing that can lack is said, with its meaning and its remedy."""

import dataclasses
import os

import pytest
import synthetic
from fakes import library

from gdntune.cli import doctor
from gdntune.device import arch
from gdntune.device import cupti as cupti_records
from gdntune.device.arch import target
from gdntune.objects import store
from gdntune.runtime import dispatch


@pytest.fixture
def here(monkeypatch, tmp_path):
    """A machine with everything but a GPU, whatever this one has."""
    monkeypatch.setattr(arch, "cuda_fault", lambda index=0: "no CUDA device: there is none")
    monkeypatch.setenv("GDNTUNE_CACHE_DIR", str(tmp_path))
    return monkeypatch


@pytest.fixture
def gpu(here):
    """The same with an H100 whose CUPTI and NVML answer."""
    device = target("sm_90a")
    here.setattr(arch, "cuda_fault", lambda index=0: None)
    here.setattr(arch, "detect", lambda kind="auto", index=0: device)
    here.setattr(cupti_records, "fault", lambda: None)
    return here


def finding(name):
    """What the doctor says of one thing."""
    found = [f for f in doctor.examine() if f.name == name]
    assert found, name
    return found[0]


def test_every_finding_says_what_it_means(here):
    """Each has a value and a meaning, and a remedy wherever it is not ok."""
    findings = doctor.examine()
    assert len({f.name for f in findings}) >= 10
    assert [f for f in findings if not (f.value and f.meaning)] == []
    assert [f for f in findings if f.status != "ok" and not f.remedy] == []


def test_no_gpu_hinders_nothing(here):
    """Without a GPU the CPU is tuned: that is a note."""
    assert finding("GPU").status == "note"
    assert finding("CUPTI").status == "ok"
    assert [f.name for f in doctor.examine() if f.status == "hinders"] == []


def test_no_compiler_hinders(here, tmp_path):
    """Without g++ nothing can be compiled: the remedy names the package."""
    here.setenv("PATH", str(tmp_path))
    found = finding("g++")
    assert found.status == "hinders"
    assert "apt install g++" in found.remedy


def test_cupti_without_permission(gpu):
    """CUPTI that may not be used is a note with the remedy: events are used instead."""
    gpu.setattr(
        cupti_records,
        "fault",
        lambda: "CUPTI cannot be used (INSUFFICIENT_PRIVILEGES); load the driver with ...",
    )
    found = finding("CUPTI")
    assert found.status == "note"
    assert "CUDA events" in found.value
    assert "load the driver with" in found.remedy


def test_the_gpu_is_described(gpu):
    """The GPU's name, architecture and peak are shown; one that nothing was compiled for is a note."""
    assert finding("GPU").status == "ok"
    assert "NVIDIA H100 80GB HBM3, sm_90a, 132 SMs, 3352 GB/s (datasheet)" in finding("GPU").value
    odd = arch.Device("cuda", "NVIDIA T4", "sm_75", 40, 4 << 20, 16 << 30)
    gpu.setattr(arch, "detect", lambda kind="auto", index=0: odd)
    assert finding("GPU").status == "note"


@pytest.mark.parametrize(
    "version, on_gpu, status",
    [(None, True, "hinders"), (None, False, "note"), ("4.7.0", True, "hinders")],
)
def test_cute_dsl_against_the_pin(here, version, on_gpu, status):
    """Another version than the pinned one, or none, hinders where there is a GPU to compile for."""
    here.setattr(doctor, "_version", lambda package: version)
    found = doctor._cutlass(on_gpu)
    assert found.status == status
    assert store.CUTE_DSL_VERSION in found.remedy


@pytest.mark.parametrize(
    "version, status",
    [("2.13.0+cpu", "ok"), ("2.9.1", "hinders"), (None, "hinders"), ("2.11.0a0", "ok")],
)
def test_torch_versions(here, version, status):
    """torch before 2.11, or none, hinders."""
    here.setattr(doctor, "_version", lambda package: version)
    assert doctor._torch().status == status


def test_a_cache_that_cannot_be_written(here, tmp_path):
    """A cache folder that is a file, or that refuses, hinders; the remedy names the variable."""
    (tmp_path / "file").touch()
    here.setenv("GDNTUNE_CACHE_DIR", str(tmp_path / "file"))
    found = finding("cache")
    assert found.status == "hinders"
    assert "GDNTUNE_CACHE_DIR" in found.remedy


def test_tables_are_found(gpu, tmp_path):
    """A table of this device is named; one made by other code is stale; a malformed one is said."""
    gpu.setattr(dispatch, "shipped_tables", lambda: tmp_path / "none")
    gpu.setattr(dispatch, "user_tables", lambda: tmp_path)
    assert "gdntune sweep" in finding("tables").remedy
    header = synthetic.run()
    folder = synthetic.write(tmp_path / "run", header, synthetic.records(header))
    place = tmp_path / target("sm_90a").slug
    place.mkdir()
    (folder / "table.json").rename(place / "gdn_decode.json")
    assert "is stale" in finding("table").value
    assert "recurrent was measured with other code" in finding("table").remedy
    gpu.setattr(doctor.kernels, "fingerprints", lambda kind: {"recurrent": "f1"})
    assert finding("table").status == "ok"
    (place / "gdn_decode.json").write_text("[]")
    assert "cannot be used" in finding("table").value


def test_how_a_table_is_put_to_use(gpu, tmp_path):
    """The command that installs it and the other two ways are said; a file there by another name is
    nobody's, and one of a CPU is refused. Fault: a user was told to copy it under another name.
    """
    gpu.setattr(dispatch, "shipped_tables", lambda: tmp_path / "none")
    gpu.setattr(dispatch, "user_tables", lambda: tmp_path)
    place = tmp_path / target("sm_90a").slug
    said = finding("your own")
    assert said.status == "ok"
    assert (
        "run `gdntune table install PATH`, or set GDNTUNE_TABLE=PATH, or call gdntune.load_table('PATH')"
        in said.value
    )
    words = doctor.put_to_use(tmp_path / "a b.json")
    assert f"install '{tmp_path}/a b.json'`, or set GDNTUNE_TABLE='{tmp_path}/a b.json'" in words
    header = synthetic.run(synthetic.cpu())
    folder = synthetic.write(tmp_path / "run", header, synthetic.records(header))
    place.mkdir()
    (place / "table.json").write_bytes((folder / "table.json").read_bytes())
    assert finding("tables").value.startswith("none for")
    assert finding("table").value == f"{place / 'table.json'} is not looked for"
    assert "name it OP.json" in finding("table").remedy
    gpu.setenv("GDNTUNE_TABLE", str(folder / "table.json"))
    assert "(gdn_decode) is of AMD EPYC 9B14, and refused here" in finding("table").value


def test_the_named_table_is_looked_at(here, tmp_path):
    """GDNTUNE_TABLE is among the tables, also where it does not exist."""
    here.setenv("GDNTUNE_TABLE", str(tmp_path / "nowhere.json"))
    assert "nowhere.json" in finding("table").value
    assert os.environ["GDNTUNE_TABLE"] in finding("table").remedy


def test_a_peer_of_another_version_is_a_note(monkeypatch):
    """An adapter that was written for another version than is installed: doctor says so."""
    peer = dataclasses.replace(library.PEER, written_for="0.1")
    monkeypatch.setattr("gdntune.peers.PEERS", {"library": "fakes.library"})
    monkeypatch.setattr(library, "PEER", peer)
    (found,) = doctor._peers()
    assert found.status == "note" and "written for 0.1" in found.remedy
    monkeypatch.setattr(library, "PEER", dataclasses.replace(peer, written_for=peer.version()))
    assert [f.status for f in doctor._peers()] == ["ok"]
    monkeypatch.setattr(library, "PEER", dataclasses.replace(peer, packages=("no_such",)))
    assert doctor._peers() == []
