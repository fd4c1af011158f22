"""Cells that are timed again: after a moved clock, heat, noise, a lost record or a crash."""

import os
import time
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import synthetic
from sweeps import TINY, run

from gdntune import search
from gdntune.device import arch
from gdntune.errors import (
    MeasurementError,
)
from gdntune.kernels import dependent_launch
from gdntune.objects.build import Built
from gdntune.report.report import report
from gdntune.results import derive
from gdntune.results.journal import read
from gdntune.results.records import Cell, Trial
from gdntune.tuning import attempts as trials
from gdntune.tuning import cells, config, worker
from gdntune.tuning import run as engine
from gdntune.tuning.executors import Crashed
from gdntune.tuning.measure import CellResult, CellTiming
from gdntune.tuning.throttling import Throttling


def lost_records(start, problem, decode, floor, effort, *rest):
    """A timer that lost its records at one cell; runs in the timing process."""
    from gdntune.errors import MeasurementError

    if problem.B == 8:
        raise MeasurementError("3 of 12 segments have no record")
    return honest_time_task(start, problem, decode, floor, effort, *rest)


honest_time_task = worker.time_task


def test_a_cell_that_cannot_be_measured_does_not_end_the_sweep(monkeypatch, store, tmp_path):
    """Times that cannot be true fail their cell, after a second attempt, with the reason; the
    others are measured.
    """
    monkeypatch.setattr(worker, "time_task", lost_records)
    outcome = run(tmp_path, store)
    cells = {r.problem.B: (r.status, r.reason) for r in outcome.records if isinstance(r, Cell)}
    assert cells[8] == ("failed", "3 of 12 segments have no record")
    assert cells[1][0] == "ok"
    assert outcome.table is not None


def no_memory(start, problem, decode, floor, effort, *rest):
    """A machine that others fill at one cell; runs in the timing process."""
    if problem.B == 8:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return honest_time_task(start, problem, decode, floor, effort, *rest)


def hot(start, problem, decode, floor, effort, *rest):
    """A device whose clocks heat holds down; runs in the timing process."""
    got = honest_time_task(start, problem, decode, floor, effort, *rest)
    now = arch.Clocks(sm_mhz=990, temperature_c=87, event_reasons=("sw_thermal_slowdown",))
    return got._replace(timing=got.timing._replace(after=now))


def hot_at_eight(start, problem, *rest):
    """As `hot`, at one cell."""
    return (hot if problem.B == 8 else honest_time_task)(start, problem, *rest)


def power_limited(start, problem, *rest):
    """A device whose clock falls at its power limit, as a file says: in so many attempts; runs in
    the timing process.
    """
    got = honest_time_task(start, problem, *rest)
    with open(os.environ["GDNTUNE_TEST_ATTEMPTS"], "a+") as f:
        f.seek(0)
        left, asked = int(f.readline()), len(f.readlines())
        f.write("asked\n")
    before, after = arch.Clocks(sm_mhz=1980), arch.Clocks(sm_mhz=1620 if asked < left else 1965)
    return got._replace(timing=got.timing._replace(before=before, after=after))


@pytest.mark.parametrize(
    ("attempts", "asked", "reason"),
    [(0, 2, ""), (1, 3, ""), (9, 4, "clocks moved: SMs from 1980 to 1620 MHz")],
)
def test_a_cell_is_timed_again_when_a_clock_moved(
    attempts, asked, reason, monkeypatch, store, tmp_path
):
    """Once more; and kept where it moves again, with what it did, since a device at its power limit
    is at its own clocks.
    """
    count = tmp_path / "attempts"
    count.write_text(f"{attempts}\n")
    monkeypatch.setenv("GDNTUNE_TEST_ATTEMPTS", str(count))
    monkeypatch.setattr(worker, "time_task", power_limited)
    outcome = run(tmp_path / "sweep", store)
    assert len(count.read_text().splitlines()) - 1 == asked
    assert [(r.status, r.reason) for r in outcome.records if isinstance(r, Cell)] == [
        ("ok", reason)
    ] * 2
    assert outcome.table.evidence.cells == 2


class Attempt(NamedTuple):
    """What a timing process returned of a cell, as far as `attempts` looks."""

    number: int
    timing: CellTiming


WELL, HOT, MOVED = (
    arch.Clocks(sm_mhz=1980),
    arch.Clocks(sm_mhz=990, event_reasons=("hw_slowdown",)),
    arch.Clocks(sm_mhz=1620),
)


@pytest.mark.parametrize(
    ("outcomes", "asked", "found"),
    [
        ("o", 1, 0),
        ("to", 2, 1),
        ("tt", 2, 1),
        ("mo", 2, 1),
        ("mm", 2, 1),
        ("mto", 3, 2),
        ("mtt", 3, 0),
        ("tmm", 3, 2),
        ("uo", 2, 1),
        ("uu", 2, MeasurementError),
        ("utt", 3, 2),
        ("muu", 3, 0),
        ("tc", 2, Crashed),
        ("c", 1, Crashed),
    ],
)
def test_attempts(outcomes, asked, found):
    """Fault: a cell that was disturbed in two ways, once each, failed, and times that could be kept
    were thrown away.

    o: undisturbed, t: throttled, m: a clock moved, u: times that cannot be true, c: a crash.
    """
    made = []

    def measure():
        made.append(kind := outcomes[len(made)])
        if kind == "u":
            raise MeasurementError("lost records")
        after = {"t": HOT, "m": MOVED}.get(kind, WELL)
        return (
            Crashed("crashed", "")
            if kind == "c"
            else Attempt(len(made) - 1, CellTiming("", 1.0, WELL, after))
        )

    got = trials.attempts(measure)
    assert len(made) == asked
    assert isinstance(got, found) if isinstance(found, type) else got.number == found


def test_choices_are_timed_again(store, tmp_path, monkeypatch):
    """Fault: a winner was shown on the samples that chose it, on one set of tensors. Each choice is
    timed again with what it is compared with; the table's evidence is of that, and its choices are
    those of a sweep without. Resumed, the sweep has nothing left.
    """
    text = TINY.replace("final_rounds: 8", "final_rounds: 8, fresh_rounds: 24, precision: 1.0")
    text = text.replace("max_cell_seconds: 5", "max_cell_seconds: 600")
    monkeypatch.setattr(cells, "FRESH_SECONDS", 600.0)
    outcome = run(tmp_path, store, text)
    fresh = [r for r in outcome.records if isinstance(r, Trial) and r.stage == "evidence"]
    closed = [r for r in outcome.records if isinstance(r, Cell) and r.purpose == "evidence"]
    assert len(closed) == 2 and all("intervals within" in c.stop for c in closed)
    assert {r.role for r in fresh} == {"decode", "floor"}
    assert all(len(r.samples_us) >= 24 for r in fresh)
    rules = outcome.table.rules
    shown = [e for rule in rules for i in rule.intervals for e in i.evidence]
    assert len(shown) == 2 and all(e.fresh and e.samples >= 24 for e in shown)
    first = [r for r in outcome.records if r not in fresh and r not in closed]
    chosen = [(i.first, i.last, i.variant) for i in rules[0].intervals]
    without = derive.derive(first, outcome.run).rules[0].intervals
    assert [(i.first, i.last, i.variant) for i in without] == chosen
    # what a report shows of the choice are the samples taken after it
    frame = report([tmp_path]).frame
    assert set(frame.loc[frame["chosen"], "stage"]) == {"evidence"}
    assert len(run(tmp_path, store, text).records) == len(outcome.records)


def test_throttled_cells_are_counted_a_device():
    """A cell between that was well starts anew, and one of another device does not."""
    cell = synthetic.records(synthetic.run())[-1]
    bad = msgspec.structs.replace(
        cell, status="failed", reason="throttled by hw_slowdown", timed_on="cuda:1"
    )
    for good, fit in (("cuda:0", False), ("cuda:1", True)):
        seen = Throttling()
        for records in ([bad], [bad], [msgspec.structs.replace(cell, timed_on=good)], [bad]):
            seen.see(records)
        assert seen.fit("cuda:1") == fit and seen.fit("cuda:0") and seen.fit()


def test_a_device_that_cannot_hold_its_clocks_ends_the_sweep(monkeypatch, store, tmp_path):
    """Three throttled cells in a row are enough: no time of theirs is kept, and the same command
    times them, and the rest, elsewhere.
    """
    text = TINY.replace("batch: [1, 8]", "batch: [1, 2, 4, 8, 16]")
    assert text != TINY
    with monkeypatch.context() as patched:
        patched.setattr(worker, "time_task", hot)
        with pytest.raises(
            MeasurementError,
            match="the last 3 cells were throttled by sw_thermal_slowdown .SMs at 990 MHz, 87 C.*cooling",
        ):
            run(tmp_path, store, text)
    _, records = read(tmp_path / "journal.jsonl")
    cells = [r for r in records if isinstance(r, Cell)]
    assert [(r.problem.B, r.status) for r in cells] == [(1, "failed"), (2, "failed"), (4, "failed")]
    assert cells[0].clocks_after["temperature_c"] == 87
    assert not [r for r in records if isinstance(r, Trial)]
    assert not (tmp_path / "table.json").exists()
    # those that had no turn come first, so that cells that throttle the device do not bar the way
    with monkeypatch.context() as patched:
        patched.setattr(worker, "time_task", hot)
        with pytest.raises(MeasurementError):
            run(tmp_path, store, text)
    _, records = read(tmp_path / "journal.jsonl")
    assert [r.problem.B for r in records if isinstance(r, Cell)] == [1, 2, 4, 8, 16, 1]
    again = run(tmp_path, store, text)
    assert again.table.evidence.cells == 5 and again.notes == []
    assert again.records[: len(records)] == records
    assert "Failures" not in report([tmp_path]).markdown()


def hot_there(start, problem, *rest):
    """Two devices of which one cannot hold its clocks; the other waits until that has failed three
    cells, twice each.
    """
    asked = Path(os.environ["GDNTUNE_TEST_ATTEMPTS"])
    if start.index == 1:
        with asked.open("a") as f:
            f.write("asked\n")
        return hot(start, problem, *rest)
    until = time.monotonic() + 100
    while len(asked.read_text().splitlines()) < 6 and time.monotonic() < until:
        time.sleep(0.01)
    return honest_time_task(start, problem, *rest)


def test_a_device_that_cannot_hold_its_clocks_leaves_its_cells_to_the_others(
    monkeypatch, store, tmp_path
):
    """Fault: one throttled GPU of several ended the sweep, and what the others were at was lost."""
    text = TINY.replace("batch: [1, 8]", "batch: [1, 2, 3, 4, 5, 6, 7, 8]")
    monkeypatch.setattr(worker, "time_task", hot_there)
    (tmp_path / "attempts").touch()
    monkeypatch.setenv("GDNTUNE_TEST_ATTEMPTS", str(tmp_path / "attempts"))
    outcome = run(tmp_path / "sweep", store, text, devices=(0, 1))
    assert outcome.table.evidence.cells == 8
    cells = [r for r in outcome.records if isinstance(r, Cell)]
    assert {(r.timed_on, r.status) for r in cells} <= {("cpu:0", "ok"), ("cpu:1", "failed")}
    assert len([r for r in cells if r.status == "failed"]) == 3
    assert any(
        "cpu:1 was left out when its last 3 cells were throttled" in note for note in outcome.notes
    )


def test_a_cell_larger_than_memory_is_not_tried(store, tmp_path):
    """Fault: each variant was tried alone, in a process of its own, at a cell that no variant has
    room for.
    """
    outcome = run(tmp_path, store, TINY.replace("batch: [1, 8]", "batch: [1, 99999999]"))
    cells = {r.problem.B: r for r in outcome.records if isinstance(r, Cell)}
    assert (
        cells[99999999].status == "failed"
        and "its states take 3051.8 GiB of the device's" in cells[99999999].reason
    )
    assert cells[1].status == "ok" and outcome.table is not None


def test_a_device_that_does_not_say_its_memory_is_swept(store, tmp_path):
    """0 bytes are no limit: some systems do not say."""
    silent = msgspec.structs.replace(arch.detect("cpu"), memory_bytes=0)
    outcome = search.sweep(config.parse(TINY), tmp_path, device=silent, store=store)
    assert outcome.table.evidence.cells == 2 and outcome.notes == []


class Full:
    """A worker that finds no memory where one of some variants is timed; counts what it was asked
    for.
    """

    name = "cpu:0"

    def __init__(self, greedy):
        self.greedy, self.asked = set(greedy), 0

    def run(self, function, problem, decode, *args, timeout):
        """A result without samples, or the crash."""
        self.asked += 1
        if self.greedy & {v.id for v in decode}:
            return Crashed(
                "crashed", "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB"
            )
        return CellResult([], CellTiming("", 0.1, WELL, WELL))


@pytest.mark.parametrize("greedy", ["all", "first"])
def test_a_cell_without_room(greedy, swept):
    """Fault: every variant was tried alone, each in a process of its own. Two that find no memory
    are enough; one alone is to blame.
    """
    cell = next(r for r in swept[1].records if isinstance(r, Cell))
    screened = [
        r
        for r in swept[1].records
        if isinstance(r, Trial) and (r.stage, r.role) == ("screen", "decode")
    ]
    variants = [r.variant for r in screened if r.problem == cell.problem]
    full = Full(v.id for v in (variants if greedy == "all" else variants[:1]))
    *blamed, record = trials.time(
        full, trials.CellJob(cell.problem, variants, [], config.parse(TINY).search)
    )
    if greedy == "all":
        assert (record.status, blamed) == ("failed", []) and "out of memory" in record.reason
        assert full.asked == 3 < len(variants)
    else:
        assert record.status == "ok" and [r.variant for r in blamed] == variants[:1]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (lost_records, "segments have no record"),
        (no_memory, "out of memory"),
        (hot_at_eight, "throttled by"),
    ],
    ids=["lost", "memory", "hot"],
)
def test_a_failed_cell_is_tried_again(fault, reason, monkeypatch, store, tmp_path):
    """Fault: a cell that failed counted as done. The same sweep times it once more, and that alone;
    then nothing is left to do.
    """
    with monkeypatch.context() as patched:
        patched.setattr(worker, "time_task", fault)
        outcome = run(tmp_path, store)
    assert [e.work_units for i in outcome.table.rules[0].intervals for e in i.evidence] == [2]
    assert any(
        "1 cell has no times; the first:" in note and reason in note for note in outcome.notes
    )
    # no variant is to blame, so none is left out
    assert not [r for r in outcome.records if isinstance(r, Trial) and r.status != "ok"]
    again = run(tmp_path, store)
    new = again.records[len(outcome.records) :]
    assert {r.problem.B for r in new} == {8} and {type(r) for r in new} == {Trial, Cell}
    assert [(r.problem.B, r.status) for r in again.records if isinstance(r, Cell)] == [
        (1, "ok"),
        (8, "failed"),
        (8, "ok"),
    ]
    assert sorted(e.work_units for i in again.table.rules[0].intervals for e in i.evidence) == [
        2,
        16,
    ]
    assert again.notes == []
    before = (tmp_path / "journal.jsonl").read_bytes()
    assert run(tmp_path, store).records == again.records
    assert (tmp_path / "journal.jsonl").read_bytes() == before


def test_noisy_cells_are_timed_again(monkeypatch, store, tmp_path):
    """Fault: a cell that was marked as noisy counted as done, so that the same command, given on a
    quiet machine, left its times in the table. It alone is timed once more.
    """
    from gdntune.tuning import noise

    load = "the load is 8.0 on 2 cores"
    with monkeypatch.context() as busy:
        busy.setattr(noise, "noise", lambda device, timed: load if seen() else "")
        problems = iter([1, 8, 8])
        seen = lambda: next(problems) == 8  # noqa: E731  the second cell, and once more
        first = run(tmp_path, store)
    assert [r.reason for r in first.records if isinstance(r, Cell)] == ["", f"noisy: {load}"]
    assert first.table.evidence.failures["noisy"] == 1 and "1 cell is noisy" in str(first.notes)
    again = run(tmp_path, store)
    assert [r.problem.B for r in again.records if isinstance(r, Cell)] == [1, 8, 8]
    assert "noisy" not in again.table.evidence.failures and "noisy" not in str(again.notes)
    assert len(run(tmp_path, store).records) == len(again.records)


def test_a_cell_that_fails_again_stays_failed(monkeypatch, store, tmp_path):
    """Once more each time the sweep goes on, and counted as one cell."""
    monkeypatch.setattr(worker, "time_task", lost_records)
    outcomes = [run(tmp_path, store) for _ in range(2)]
    for times, outcome in enumerate(outcomes, 1):
        assert [r.status for r in outcome.records if isinstance(r, Cell) and r.problem.B == 8] == [
            "failed"
        ] * times
        assert any("1 cell has no times" in note for note in outcome.notes)


def test_a_cell_without_variants_is_tried_again(monkeypatch, store, tmp_path):
    """Fault: as above, where no variant compiled: when they do, they are checked and timed."""

    def failing(objects, store, **options):
        return [
            Built(spec, None, "g++: no") if spec.kernel == "cpu_recurrent" else b
            for (spec, _), b in honest(objects, store, options)
        ]

    def honest(objects, store, options):
        return zip(objects, compile_objects(objects, store, **options), strict=True)

    compile_objects = engine.compile_objects
    with monkeypatch.context() as patched:
        patched.setattr(engine, "compile_objects", failing)
        outcome = run(tmp_path, store)
    assert outcome.table is None
    assert {r.reason for r in outcome.records if isinstance(r, Cell)} == {
        "no variant compiled and passed its check"
    }
    again = run(tmp_path, store)
    assert again.table.evidence.cells == 2 and again.notes == []


def test_a_variant_that_keeps_memory_is_to_blame(monkeypatch, store, tmp_path):
    """Where some variants alone find no memory, it is they that fail, and the cell is timed without
    them.
    """
    monkeypatch.setattr(worker, "time_task", greedy)
    outcome = run(tmp_path, store)
    failed = {
        (r.problem.B, r.status)
        for r in outcome.records
        if isinstance(r, Trial)
        and "tv16.ilp2.vec8" in r.variant.id
        and r.role == "decode"
        and r.status != "ok"
    }
    assert failed == {(8, "crashed")}
    assert [r.status for r in outcome.records if isinstance(r, Cell)] == ["ok", "ok"]


def greedy(start, problem, decode, floor, effort, *rest):
    """One variant that takes all memory at one cell; runs in the timing process."""
    if any("tv16.ilp2.vec8" in v.id for v in decode):
        return no_memory(start, problem, decode, floor, effort, *rest)
    return honest_time_task(start, problem, decode, floor, effort, *rest)


def starts_early(knobs):
    """Whether a variant counts as one with dependent launch: all but two do."""
    return knobs["vec"] != 8


def quick_with_it(start, problem, *rest):
    """Times of which those without dependent launch are twice as long; runs in the timing
    process.
    """
    dependent_launch.uses = starts_early
    got = honest_time_task(start, problem, *rest)
    timed = [
        t
        if t.role != "decode" or starts_early(t.variant.knobs)
        else t._replace(
            screen_us=[2 * x for x in t.screen_us], final_us=[2 * x for x in t.final_us]
        )
        for t in got.timed
    ]
    return got._replace(timed=timed)


def test_a_sweep_chooses_for_calls_without_dependent_launch_too(monkeypatch, store, tmp_path):
    """Both kinds have leaders, both choices are timed again, and a sweep that goes on does nothing
    twice.
    """
    monkeypatch.setattr(dependent_launch, "uses", starts_early)
    monkeypatch.setattr(worker, "time_task", quick_with_it)
    text = TINY.replace("final_rounds: 8", "final_rounds: 8, fresh_rounds: 8, precision: 1.0")
    outcome = run(tmp_path, store, text)
    assert outcome.run.alone is True
    for problem, found in derive.passes(outcome.records).items():
        finals = [t.variant for t in found if (t.role, t.stage) == ("decode", "final")]
        assert sum(not starts_early(v.knobs) for v in finals) == 2, problem
    for rule in outcome.table.rules:
        chosen = [
            {starts_early(outcome.table.variants[i.variant].knobs) for i in of}
            for of in (rule.intervals, rule.alone)
        ]
        assert chosen == [{True}, {False}]
        assert all(e.fresh is True for i in rule.every for e in i.evidence)
    again = run(tmp_path, store, text)
    assert again.table == outcome.table and len(again.records) == len(outcome.records)
