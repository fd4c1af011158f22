"""The sweep end to end on real CPU kernels, and what happens to variants that are wrong, crash or hang."""

import dataclasses
import json
import os
import re
import time

import pytest

from gdntune import arch, config, kernels, search, session, table, trials
from gdntune.errors import JournalError, Locked, UnsupportedProblem
from gdntune.journal import Build, Cell, Check, Trial, read
from gdntune.store import Store
from gdntune.timing import Policy

TINY = """
name: tiny
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [1, 8]
tokens: [1]
contracts: [{state_dtype: fp32}]
kernels: {cpu_recurrent: {vec: [8, 16], tile_v: [16, 32], ilp: [2]}}
search: {screen_rounds: 4, keep: 2, final_rounds: 8, max_cell_seconds: 5}
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Compiled objects, kept for the module."""
    return Store(tmp_path_factory.mktemp("objects"))


@pytest.fixture(scope="module")
def swept(tmp_path_factory, store):
    """One finished sweep that several tests look at."""
    folder = tmp_path_factory.mktemp("sweep")
    return folder, run(folder, store)


def run(folder, store, text=TINY, **options):
    """A sweep of a config's text on this CPU."""
    return search.sweep(config.parse(text), folder, device=arch.detect("cpu"), store=store, **options)


def test_a_sweep_ends_in_a_table(swept):
    """Every object is journalled, every variant checked before it is timed, every cell timed, and the table is valid."""
    folder, outcome = swept
    header, records = read(folder)
    assert header.policy == {"timer": "cpu", "l2": "cold-clean"}
    assert all(r.status == "ok" for r in records), search.failures(records)
    assert {Build, Check, Trial, Cell} == {type(r) for r in records}
    checked, timed = set(), set()
    for r in records:
        if isinstance(r, Check):
            checked.add(r.variant)
        if isinstance(r, Trial) and r.role == "decode":
            assert r.variant.id in checked, "timed before it was checked"
            timed.add(r.variant.id)
    assert len(timed) >= 4
    loaded = table.load(folder / "table.json")
    assert loaded == outcome.table
    assert table.stale(loaded, kernels.fingerprints("cpu")) == []
    assert loaded.evidence.cells == 2


def test_a_finished_sweep_does_nothing_again(swept, store):
    """Resuming repeats nothing that is journalled, and the table is the same to the byte."""
    folder, _ = swept
    before, rules = (folder / "journal.jsonl").read_bytes(), (folder / "table.json").read_bytes()
    run(folder, store)
    assert (folder / "journal.jsonl").read_bytes() == before
    assert (folder / "table.json").read_bytes() == rules


def test_a_torn_journal_is_resumed(swept, store, tmp_path):
    """A journal cut in the middle of a record: what is whole is kept, the rest is measured again."""
    folder, _ = swept
    data = (folder / "journal.jsonl").read_bytes()
    (tmp_path / "journal.jsonl").write_bytes(data[: len(data) * 2 // 3 - 7])
    outcome = run(tmp_path, store)
    assert outcome.table is not None
    cells = [r.problem for r in outcome.records if isinstance(r, Cell)]
    assert len(cells) == len(set(cells)) == 2


def test_another_config_is_refused(swept, store):
    """A folder holds one sweep: another config is refused with what differs."""
    with pytest.raises(JournalError, match="config"):
        run(swept[0], store, TINY.replace("final_rounds: 8", "final_rounds: 9"))


def test_a_second_sweep_is_refused(swept, store):
    """Two sweeps in one folder: the second names the first."""
    from gdntune.journal import Journal

    folder, outcome = swept
    with Journal.open(folder, outcome.run), pytest.raises(Locked, match=str(os.getpid())):
        run(folder, store)


def test_a_timer_that_the_device_cannot_have_is_refused_first(store, tmp_path):
    """CUPTI on a CPU is refused before anything is compiled."""
    with pytest.raises(UnsupportedProblem, match="timer='cupti'"):
        run(tmp_path, store, policy=Policy(timer="cupti"))
    assert not (tmp_path / "journal.jsonl").exists()


def broken(monkeypatch, kind):
    """Plants a fault in one variant of the timing process, through its environment."""
    monkeypatch.setenv("GDNTUNE_TEST_FAULT", f"{kind}:tv16.ilp2.vec8")
    monkeypatch.setattr(session, "check_task", faulty_check_task)
    monkeypatch.setattr(trials, "CHECK_TIMEOUT_S", 5.0)
    monkeypatch.setattr(trials, "CHECK_EACH_S", 0.2)


def faulty_check_task(start, contract, variants):
    """`session.check_task` with the fault that the environment names; runs in the timing process."""
    kind, victim = os.environ["GDNTUNE_TEST_FAULT"].split(":")
    current = session.current(start)
    honest = current.function

    def function(contract, variant, label=None):
        inner = honest(contract, variant, label)
        if victim not in variant.id:
            return inner
        return lambda *arguments: fault(kind, inner, arguments)

    current.function = function
    try:
        return honest_check_task(start, contract, variants)
    finally:
        current.function = honest


def fault(kind, inner, arguments):
    """One call of the broken variant."""
    inner(*arguments)
    state, output = arguments[0], arguments[14]
    if kind == "wrong":
        output[0, 0, 0, 3] += 0.01
    elif kind == "nan":
        output[0, 0, 0, 3] = float("nan")
    elif kind == "touches":
        state[-1, 0, 0, 0] += 1
    elif kind == "crash":
        os.abort()
    elif kind == "hang":
        time.sleep(60)


honest_check_task = session.check_task


@pytest.mark.parametrize(
    ("kind", "status", "reason"),
    [
        ("wrong", "failed", r"output\["),
        ("nan", "failed", r"output\["),
        ("crash", "crashed", "process died"),
        ("hang", "timeout", "no answer"),
    ],
)
def test_a_broken_variant_never_reaches_a_table(kind, status, reason, monkeypatch, store, tmp_path):
    """A variant broken on purpose is a journalled failure with its worst coordinate or its end; the others are timed."""
    broken(monkeypatch, kind)
    text = TINY.replace("batch: [1, 8]", "batch: [2]")
    outcome = run(tmp_path, store, text)
    failed = [r for r in outcome.records if isinstance(r, Check) and r.status != "ok"]
    assert failed and all("tv16.ilp2.vec8" in r.variant and r.status == status for r in failed)
    assert all(re.search(reason, r.reason) for r in failed), [r.reason for r in failed]
    assert not any("tv16.ilp2.vec8" in name for name in outcome.table.variants)
    assert not any(
        isinstance(r, Trial) and "tv16.ilp2.vec8" in r.variant.id and r.role == "decode" for r in outcome.records
    )
    assert any("did not pass the check" in note for note in outcome.notes)


def test_plan_objects_covers_a_sweep(store):
    """`gdntune compile` makes what a sweep loads: variants, floors, and the default rule's choices, each once."""
    device = arch.target("sm_90a")
    cfg = config.parse(
        TINY.replace("device: cpu", "device: cuda").replace("K: 64, V: 64", "K: 128, V: 128").split("kernels:")[0]
    )
    objects = search.plan_objects(cfg, device)
    names = {(spec.kernel, spec.label) for spec, _ in objects}
    assert len({spec.key for spec, _ in objects}) == len(objects)
    assert ("stream", "flush") in names
    for contract in cfg.all_contracts():
        assert {("recurrent", v.id) for v in kernels.variants(contract, device)} <= names
        assert ("recurrent", kernels.default(contract, 2, device).id) in names


def test_kernels_are_data(store):
    """The registry holds dataclasses: knobs of a variant survive the way through a table's JSON."""
    device = arch.detect("cpu")
    for contract in config.parse(TINY).all_contracts():
        for v in kernels.variants(contract, device):
            kernel = kernels.get(v.kernel)
            again = json.loads(json.dumps(v.knobs))
            assert kernel.variant(kernel.setting(again)) == v
            assert dataclasses.is_dataclass(kernel.knobs)


def lost_records(start, problem, decode, floor, effort, sure=()):
    """A timer that lost its records at one cell; runs in the timing process."""
    from gdntune.errors import MeasurementError

    if problem.B == 8:
        raise MeasurementError("3 of 12 segments have no record")
    return honest_time_task(start, problem, decode, floor, effort, sure)


honest_time_task = session.time_task


def test_a_cell_that_cannot_be_measured_does_not_end_the_sweep(monkeypatch, store, tmp_path):
    """Times that cannot be true fail their cell, after a second attempt, with the reason; the others are measured."""
    monkeypatch.setattr(session, "time_task", lost_records)
    outcome = run(tmp_path, store)
    cells = {r.problem.B: (r.status, r.reason) for r in outcome.records if isinstance(r, Cell)}
    assert cells[8] == ("failed", "3 of 12 segments have no record")
    assert cells[1][0] == "ok"
    assert outcome.table is not None
