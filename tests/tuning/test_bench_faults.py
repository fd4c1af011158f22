"""gdntune/tuning/bench.py: what fails costs the peer, the cell or the bench, as it should."""

import os
import pathlib

import msgspec
import pytest
from benches import ONE, rows, run, write_table

from gdntune import kernels
from gdntune.device import arch
from gdntune.errors import MeasurementError, UnknownName
from gdntune.results.journal import read
from gdntune.results.records import Build, Cell, Trial
from gdntune.tuning import config, worker
from gdntune.tuning import run as engine


def lost_records(start, problem, *rest):
    """A timer that lost its records at one cell; runs in the timing process."""
    if (problem.B, problem.contract.tokens) == (3, 1):
        raise MeasurementError("3 of 12 segments have no record")
    return honest_time_task(start, problem, *rest)


honest_time_task = worker.time_task


def test_a_failed_cell_is_tried_again(monkeypatch, store, tmp_path):
    """Fault: a cell that failed counted as done. The same bench times it once more, and that alone."""
    with monkeypatch.context() as patched:
        patched.setattr(worker, "time_task", lost_records)
        first = run(tmp_path, store)
    assert first.timed == 3 and any("1 cell has no times" in note for note in first.notes)
    again = run(tmp_path, store)
    assert {r.problem.B for r in again.records[len(first.records) :]} == {3}
    assert [r.status for r in again.records if isinstance(r, Cell)].count("ok") == again.timed == 4
    assert again.notes == [] and again.run.cells == 4
    assert run(tmp_path, store).records == again.records


def lost_once(start, problem, *rest):
    """A timer that lost its records once; runs in the timing process."""
    path = pathlib.Path(os.environ["GDNTUNE_TEST_LOST"])
    if not path.exists():
        path.write_text("")
        raise MeasurementError("CUPTI lost 1 record")
    return honest_time_task(start, problem, *rest)


def test_a_peer_is_not_blamed_for_what_the_timer_lost(monkeypatch, store, tmp_path):
    """Fault: times that could not be true were not taken again, and cost the peers that were timed
    there their row.
    """
    monkeypatch.setenv("GDNTUNE_TEST_LOST", str(tmp_path / "lost"))
    monkeypatch.setattr(worker, "time_task", lost_once)
    outcome = run(tmp_path / "bench", store, "fakes.library", text=ONE)
    assert (tmp_path / "lost").exists() and outcome.timed == 1
    reasons = {
        r.reason
        for r in outcome.records
        if isinstance(r, Trial) and r.role == "peer" and r.status != "ok"
    }
    assert not any("CUPTI" in reason for reason in reasons), reasons
    assert any(
        r.role == "peer" and r.status == "ok" for r in outcome.records if isinstance(r, Trial)
    )


def hot(start, problem, *rest):
    """A device whose power brake is on; runs in the timing process."""
    got = honest_time_task(start, problem, *rest)
    return got._replace(
        timing=got.timing._replace(before=arch.Clocks(event_reasons=("hw_power_brake_slowdown",)))
    )


def test_a_device_that_cannot_hold_its_clocks_ends_the_bench(monkeypatch, store, tmp_path):
    """Three throttled cells in a row are enough: none is a comparison; the same command goes on
    elsewhere.
    """
    with monkeypatch.context() as patched:
        patched.setattr(worker, "time_task", hot)
        with pytest.raises(
            MeasurementError,
            match="last 3 cells were throttled by hw_power_brake_slowdown, and so when timed again:",
        ):
            run(tmp_path, store)
    _, records = read(tmp_path / "journal.jsonl")
    assert [r.status for r in records if isinstance(r, Cell)] == ["failed"] * 3
    again = run(tmp_path, store)
    assert again.timed == 4 and again.notes == []


@pytest.mark.slow
def test_a_crash_costs_the_peer_alone(tmp_path, store):
    """An entry that dies when it is checked, and one that dies when it is timed, are rows; the cell
    is timed without them.
    """
    outcome = run(tmp_path, store, "fakes.crashing", "fakes.library", text=ONE)
    [problem] = config.parse(ONE).problems()
    found = rows(outcome.records, problem)
    for name in ("at_once", "later"):
        assert found[name].status == "crashed" and "process died" in found[name].reason
    assert found["right"].status == "ok"
    assert outcome.timed == 1
    assert [r.status for r in outcome.records if isinstance(r, Cell)] == ["ok"]


@pytest.fixture
def chosen(tmp_path, store):
    """A problem, the default rule's choice there, another variant, and a table that names that."""
    [problem] = config.parse(ONE).problems()
    device = arch.detect("cpu")
    default = kernels.default(problem.contract, problem.work_units, device)
    other = next(v for v in kernels.variants(problem.contract, device) if v.id != default.id)
    path = tmp_path / "mine.json"
    write_table(path, problem, other, tmp_path / "source", store)
    return problem, default, other, path


def test_what_spills_is_not_benched(chosen, monkeypatch, store, tmp_path):
    """Fault: the sweep left out what spills more than 64 bytes a thread, and the bench timed it."""
    _, default, other, path = chosen
    compile_objects = engine.compile_objects

    def spilling(objects, store, **options):
        return [
            msgspec.structs.replace(
                b, manifest=msgspec.structs.replace(b.manifest, spill_bytes=200)
            )
            if b.spec.label == other.id
            else b
            for b in compile_objects(objects, store, **options)
        ]

    monkeypatch.setattr(engine, "compile_objects", spilling)
    outcome = run(tmp_path / "bench", store, text=ONE, table=path, rounds=3)
    ours = [r for r in outcome.records if isinstance(r, Trial) and r.role == "decode"]
    assert [r.variant.id for r in ours] == [default.id]
    [lost] = [r for r in outcome.records if isinstance(r, Build) and r.status == "failed"]
    assert lost.variant == other.id and "spills 200 bytes a thread" in lost.reason
    assert outcome.timed == 0 and any("1 did not compile" in note for note in outcome.notes)


def fragile(start, problem, decode, *rest):
    """Ends its process where the variant that the environment names is timed."""
    if any(v.id == os.environ["GDNTUNE_TEST_FRAGILE"] for v in decode):
        os.abort()
    return honest_time_task(start, problem, decode, *rest)


def test_a_variant_of_ours_that_crashes_is_found(chosen, monkeypatch, store, tmp_path):
    """Fault: a bench whose own variant took the process down failed the whole cell. The variant is
    a row, and the peers are not blamed.
    """
    problem, default, other, path = chosen
    monkeypatch.setenv("GDNTUNE_TEST_FRAGILE", other.id)
    monkeypatch.setattr(worker, "time_task", fragile)
    outcome = run(tmp_path / "bench", store, "fakes.library", text=ONE, table=path, rounds=3)
    ours = {r.variant.id: r for r in outcome.records if getattr(r, "role", "") == "decode"}
    assert ours[other.id].status == "crashed" and "process died" in ours[other.id].reason
    assert ours[default.id].status == "ok"
    assert rows(outcome.records, problem)["right"].status == "ok"


def test_unknown_peers_are_refused(tmp_path, store):
    """A name that is in no registry is refused before anything runs, and nothing is written."""
    with pytest.raises(UnknownName, match="there are flashinfer, fla, sglang, vllm"):
        run(tmp_path / "x", store, "flashinfre")
    with pytest.raises(UnknownName, match="has no PEER"):
        run(tmp_path / "x", store, "gdntune.errors")
    assert not (tmp_path / "x").exists()
