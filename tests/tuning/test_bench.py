"""gdntune/tuning/bench.py: peers beside our choice, the default and the floor; what fails is a row that
says so.
"""

import csv
import io
import json
import os
import pathlib
import sys

import msgspec
import pytest
from fakes import compiling
from typer.testing import CliRunner

from gdntune import kernels
from gdntune.cli.app import app
from gdntune.device import arch
from gdntune.errors import JournalError, Locked, MeasurementError, UnknownName
from gdntune.kernels.spec import Variant
from gdntune.objects.store import Store
from gdntune.problem import Contract, Problem
from gdntune.report.peers import compared
from gdntune.report.report import report
from gdntune.report.words import ratio
from gdntune.results import judge, table
from gdntune.results.derive import derive
from gdntune.results.journal import Journal, digest, read
from gdntune.results.records import Build, Cell, Check, Trial
from gdntune.results.table import Interval, Rule, TableVariant
from gdntune.timing import Policy
from gdntune.tuning import bench, config, plan, worker
from gdntune.tuning import run as engine

TINY = """
name: tiny
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [1, 3]
tokens: [1, 2]
contracts: [{state_dtype: fp32}]
policy: {timer: auto, l2: warm}
search: {final_rounds: 6, max_cell_seconds: 5}
"""
ONE = TINY.replace("[1, 3]", "[2]").replace("[1, 2]", "[1]")
# Four work units in three ways, eight in one.
HEADS = """
name: heads
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [2, 4]
contracts: [{state_dtype: fp32}]
policy: {timer: auto, l2: warm}
search: {final_rounds: 6, max_cell_seconds: 5}
parts:
  - {name: two}
  - {name: two-of-two, model: {H: 2, HV: 2, K: 64, V: 64}, batch: [2]}
  - {name: one, model: {H: 1, HV: 1, K: 64, V: 64}, batch: [4]}
"""
SIZES = [(2, 1, 2), (2, 2, 2), (4, 1, 1), (4, 1, 2)]


@pytest.fixture(scope="module")
def store():
    """Compiled objects, kept for all tests."""
    return Store()


def run(folder, store, *names, text=TINY, **options):
    """A bench of a config's text on this CPU."""
    return bench.bench(
        config.parse(text),
        folder,
        peer_names=names,
        device=arch.detect("cpu"),
        store=store,
        **options,
    )


@pytest.fixture(scope="module")
def benched(tmp_path_factory, store):
    """One finished bench against a library whose entries fail in several ways."""
    folder = tmp_path_factory.mktemp("bench")
    return folder, run(folder, store, "fakes.library")


def rows(records, problem):
    """The trials of a problem by the last part of their variants' ids."""
    return {
        r.variant.id.rpartition(".")[2]: r
        for r in records
        if isinstance(r, Trial) and r.problem == problem
    }


def test_every_entry_is_a_row(benched):
    """Each entry of a peer has a trial at each cell it was asked for: times, or the reason why
    there are none.
    """
    _, outcome = benched
    for problem in config.parse(TINY).problems():
        found = rows([r for r in outcome.records if getattr(r, "role", "") == "peer"], problem)
        if problem.contract.tokens > 1:
            assert list(found) == ["peer:library"]
            lost = found["peer:library"]
            assert (
                lost.status == "failed"
                and "right, wrong, raises: tokens=2, expected 1" in lost.reason
            )
            assert "picky: V=64" in lost.reason
            continue
        assert set(found) == {"right", "wrong", "raises"}
        assert found["right"].status == "ok" and len(found["right"].samples_us) == 6
        assert (
            "check failed: state of request" in found["wrong"].reason
            and "expected at most 0.002" in found["wrong"].reason
        )
        assert found["raises"].reason == "AssertionError: K must be 4096, got K=64"
        assert {found[name].status for name in ("wrong", "raises")} == {"failed"}
        assert {r.stage for r in found.values()} == {"final"}


def test_a_cell_holds_ours_the_floor_and_the_peer(benched):
    """All of a cell is timed in one measurement, ours after a passed check, and the cell is closed."""
    folder, outcome = benched
    header, records = read(folder)
    assert outcome.timed == 4 and outcome.notes == []
    checked = {r.variant for r in records if isinstance(r, Check) and r.status == "ok"}
    for problem in config.parse(TINY).problems():
        every = [
            r for r in records if isinstance(r, Trial) and r.problem == problem and r.status == "ok"
        ]
        # of many floors the best have final samples; ours and the peers' are not chosen among
        assert {r.role for r in every if r.stage == "screen"} == {"floor"}
        timed = [r for r in every if r.stage == "final"]
        roles = [r.role for r in timed]
        assert roles.count("decode") == 1 and roles.count("floor") == 2
        assert all(r.variant.id in checked for r in timed if r.role != "floor")
        assert {len(r.samples_us) for r in timed} == {6}
    cells = [r for r in records if isinstance(r, Cell)]
    assert [c.status for c in cells] == ["ok"] * 4
    assert cells[0].stop == "6 final rounds; 6 samples are too few for intervals"
    assert header.software["peer library"] == arch.software()["torch"]
    assert header.software["table for gdn_decode"] == "none: the default rule"


def test_a_finished_bench_does_nothing_again(benched, store):
    """Resuming repeats nothing that is journalled; other peers or rounds want a folder of their
    own.
    """
    folder, _ = benched
    before = (folder / "journal.jsonl").read_bytes()
    assert run(folder, store, "fakes.library").timed == 4
    assert (folder / "journal.jsonl").read_bytes() == before
    with pytest.raises(
        JournalError,
        match=r"another bench: peer fla: none in the journal, .* now \(--peers, .*--out",
    ):
        run(folder, store, "fakes.library", "fla")
    with pytest.raises(
        JournalError, match=r"another bench: rounds: 6 in the journal, 7 now \(--rounds, .*--out"
    ):
        run(folder, store, "fakes.library", rounds=7)
    with pytest.raises(
        JournalError, match=r"another bench: l2: warm in the journal, cold-clean now \(--l2, "
    ):
        run(folder, store, "fakes.library", policy=Policy())


def test_a_place_is_looked_at_before_anything_is_compiled(benched, store, tmp_path, monkeypatch):
    """Fault: a folder of another bench, in use, or that cannot be written was refused after
    everything was compiled.
    """
    folder, outcome = benched
    monkeypatch.setattr(engine, "compile_objects", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(JournalError, match="rounds: 6 in the journal, 7 now"):
        run(folder, store, "fakes.library", rounds=7)
    with Journal.open(folder, outcome.run), pytest.raises(Locked):
        run(folder, store, "fakes.library")
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be written"):
        run(tmp_path / "file", store, "fakes.library")


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


def test_a_cell_that_was_done_again_counts_once(benched):
    """Fault: of a cell that failed and was timed again the peers' reasons of both passes were
    counted.
    """
    folder, outcome = benched
    frame = report([folder]).frame
    [found] = compared(frame, outcome.records)
    last = next(r for r in reversed(outcome.records) if isinstance(r, Cell))
    mine = [r for r in outcome.records if isinstance(r, Trial) and r.problem == last.problem]
    failed = msgspec.structs.replace(last, status="failed", reason="lost records")
    others = [r for r in outcome.records if r not in mine and r is not last]
    assert any(r.role == "peer" and r.status != "ok" for r in mine)
    for again in ([*mine, failed, *mine, last], [*mine, failed, *mine, failed]):
        [twice] = compared(frame, [*others, *again])
        assert twice["without_times"] == found["without_times"]


def test_the_report_compares(benched):
    """Speed-ups by cell, one line with geometric mean and worst cell, what each peer moved, and
    those without times.
    """
    folder, _ = benched
    made = report([folder])
    text = " ".join(made.markdown().split())
    assert "Speed-up over library" in text
    assert "Peers without a time" in text and "AssertionError: K must be 4096" in text
    [found] = made.peers()
    assert found["cells"] == 2 and found["peer"].startswith("library ")
    assert (
        f"Against {found['peer']}: {found['geometric_mean']:.3f} times as fast in the geometric mean of 2 cells"
        in text
    )
    assert sum(found["without_times"].values()) == 2 * 2 + 2
    f = made.frame
    peers = f[(f["role"] == "peer") & (f["status"] == "ok")]
    for _, row in peers.iterrows():
        chosen = f[f["chosen"] & (f["tokens"] == row["tokens"]) & (f["B"] == row["B"])].iloc[0]
        assert row["chosen_speedup"] == pytest.approx(
            row["median_us"] / chosen["median_us"], abs=1e-3
        )
        assert row["bytes_moved"] == chosen["bytes_moved"] + 1000 * row["B"]
    assert found["worst"] == pytest.approx(peers["chosen_speedup"].min())
    assert set(peers["verified"]) == {"ok"} and set(peers["kernel"]) == {"peer:library"}
    assert "objects compiled (0 failed)" in text and "timings (0 failed)" in text
    assert "Failures by reason" not in text
    assert len(list(csv.DictReader(io.StringIO(made.csv())))) == len(f)
    assert report([folder]).markdown() == made.markdown()


def test_behind_is_beyond_a_tie(benched):
    """Slower by medians is one thing, behind another: by means, and by more than the larger of 1%
    and 32 ns.
    """
    folder, outcome = benched
    frame = report([folder]).frame.copy()
    theirs = frame[(frame["role"] == "peer") & (frame["status"] == "ok")].index
    frame.loc[frame["chosen"], ["median_us", "mean_us"]] = 100.0
    for mean, behind in ((99.5, 0), (98.0, 1), (102.0, 0)):
        frame.loc[theirs, ["median_us", "mean_us", "chosen_speedup"]] = [120.0, 120.0, 1.2]
        frame.loc[theirs[0], ["median_us", "mean_us", "chosen_speedup"]] = [99.0, mean, 0.99]
        [found] = compared(frame, outcome.records)
        assert (found["slower"], found["behind"]) == (1, behind)


@pytest.fixture(scope="module")
def heads(tmp_path_factory, store):
    """A bench with cells of equal work units and other heads."""
    folder = tmp_path_factory.mktemp("heads")
    return folder, run(folder, store, "fakes.library", text=HEADS)


def test_equal_work_units_of_other_heads_are_cells_apart(heads):
    """Fault: of several cells with equal B*HV, of different parts, one was timed. The table has one
    of them, that with the most heads.
    """
    folder, outcome = heads
    cells = [r.problem for r in outcome.records if isinstance(r, Cell) and r.status == "ok"]
    assert [(p.B, p.H, p.HV) for p in cells] == SIZES and outcome.timed == 4
    for problem in cells:
        assert rows(outcome.records, problem)["right"].status == "ok"
    (interval,) = outcome.table.rules[0].intervals
    assert [e.work_units for e in interval.evidence] == [4, 8] and outcome.table.evidence.cells == 2
    (wide,) = (
        r.samples_us
        for r in outcome.records
        if isinstance(r, Trial)
        and r.role == "decode"
        and (r.problem.B, r.problem.H, r.problem.HV) == (2, 2, 2)
    )
    assert interval.evidence[0].mean_us == pytest.approx(sum(wide) / len(wide), abs=2e-3)
    # in whatever order they were timed
    header, records = read(folder)
    turned = [r for p in reversed(cells) for r in records if getattr(r, "problem", None) == p]
    turned = [r for r in records if not hasattr(r, "problem")] + turned
    assert derive(turned, header).rules == derive(records, header).rules == outcome.table.rules


def test_the_report_has_a_row_for_each_of_equal_work_units(heads):
    """Tables, the peers' summary, CSV and page have all four cells, each under its own B, HV and,
    where that does not tell, H.
    """
    folder, _ = heads
    made = report([folder])
    names = ["2 x 2, H=1", "2 x 2, H=2", "4 x 1", "4 x 2"]
    grids = {
        block.caption: block
        for s in made.document.sections
        for block in s.blocks
        if hasattr(block, "rows")
    }
    for caption in ("Time, us (median of the chosen variant)", "Speed-up over library"):
        by_size = {row[0]: row[1:] for row in grids[caption].rows}
        assert sorted(by_size) == names and [by_size[n][0] for n in names] == ["4", "4", "4", "8"]
        assert all(row[1] != "-" for row in by_size.values())
    [found] = made.peers()
    assert found["cells"] == 4 and "geometric mean of 4 cells" in " ".join(made.markdown().split())
    speedups = made.frame[made.frame["variant"].str.endswith(".right")].sort_values(
        ["HV", "B", "H"]
    )["chosen_speedup"]
    shown = {row[0]: row[2] for row in grids["Speed-up over library"].rows}
    by_size = dict(zip(["4 x 1", "2 x 2, H=1", "2 x 2, H=2", "4 x 2"], speedups, strict=True))
    assert shown == {name: ratio(value) for name, value in by_size.items()}
    table_of = csv.DictReader(io.StringIO(made.csv()))
    chosen = [(int(r["B"]), int(r["H"]), int(r["HV"])) for r in table_of if r["chosen"] == "True"]
    assert sorted(chosen) == SIZES
    page = made.html()
    for B, H, HV in SIZES:
        # times, shares, over the default, over the peer
        assert page.count(f'data-key="1:{B}:{HV}:{H}"') == 4
    assert "4 (2 x 2, H=1)" in page and "4 (4 x 1)" in page


def test_a_bench_goes_on_between_equal_work_units(heads, tmp_path, store):
    """A journal that ends after one of several cells with equal work units: the others are timed,
    and that one is not again.
    """
    folder, _ = heads
    lines = (folder / "journal.jsonl").read_bytes().splitlines(keepends=True)
    closing = [i for i, line in enumerate(lines) if b'"kind":"cell"' in line]
    (tmp_path / "journal.jsonl").write_bytes(b"".join(lines[: closing[1] + 1]))
    again = run(tmp_path, store, "fakes.library", text=HEADS)
    cells = [(r.problem.B, r.problem.H, r.problem.HV) for r in again.records if isinstance(r, Cell)]
    assert cells == SIZES and again.timed == 4
    assert (tmp_path / "journal.jsonl").read_bytes().startswith(b"".join(lines[: closing[1] + 1]))


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


def test_the_tables_choice_is_timed(tmp_path, store):
    """With --table its variant is timed beside the default and stays the choice, however the two
    compare.
    """
    device = arch.detect("cpu")
    [problem] = config.parse(ONE).problems()
    default = kernels.default(problem.contract, problem.work_units, device)
    other = next(v for v in kernels.variants(problem.contract, device) if v.id != default.id)
    path = tmp_path / "mine.json"
    write_table(path, problem, other, tmp_path / "source", store)
    folder = tmp_path / "bench"
    outcome = run(folder, store, "fakes.library", text=ONE, table=path, rounds=4)
    ours = [r for r in outcome.records if isinstance(r, Trial) and r.role == "decode"]
    assert [r.variant.id for r in ours] == [other.id, default.id]
    assert {len(r.samples_us) for r in ours} == {4}
    assert outcome.run.software["table for gdn_decode"].startswith("mine.json sha256 ")
    assert outcome.table.rules[0].at(problem.work_units).variant == other.id
    assert outcome.table.evidence.journal_sha256 == digest(*read(folder))
    frame = report([folder]).frame
    assert frame[frame["chosen"]]["variant"].tolist() == [other.id]
    (folder / "table.json").unlink()
    again = report([folder]).frame  # the journal alone says as much
    assert again[again["chosen"]]["variant"].tolist() == [other.id]
    # others that were timed beside it may still be judged
    header, records = read(folder)
    (cell,) = judge.judge(outcome.table, records, header).cells
    assert cell.default.regret is not None and cell.table.regret is not None
    assert min(cell.default.regret, cell.table.regret) == 0
    # a choice without times is not replaced by what was timed beside it
    lost = [r for r in records if not (isinstance(r, Trial) and r.variant.id == other.id)]
    with pytest.raises(JournalError, match="no cell has a checked variant"):
        derive(lost, header)


def write_table(path, problem: Problem, variant: Variant, folder, store):
    """A table that names one variant for a problem's contract."""
    made = run(folder, store, text=ONE).table
    rule = Rule(problem.contract, (Interval(1, None, variant.id),))
    changes = {
        "rules": (rule,),
        "variants": {variant.id: TableVariant(variant.kernel, variant.knobs)},
    }
    table.save(table.msgspec.structs.replace(made, **changes), path)


def test_samples_of_whole_cycles(tmp_path, store):
    """What a call does comes again after two: a sample is the mean of both, or the median would be
    that of the cheaper one.
    """
    text = ONE.replace("search: {", "search: {placements: 1, ")
    outcome = run(tmp_path, store, "fakes.ring", text=text, rounds=5)
    (cell,) = (r for r in outcome.records if isinstance(r, Cell))
    assert cell.stop.startswith("5 final rounds, and 1 to end whole cycles; ")
    found = {r.role: r.samples_us for r in outcome.records if isinstance(r, Trial)}
    assert len(found["decode"]) == 6 and len(found["peer"]) == 3
    assert min(found["peer"]) >= 1000


def test_a_bench_on_several_sets_of_tensors(tmp_path, store):
    """search.placements holds for a bench too: peers are bound to each set, and a ring's cycles end
    on it.
    """
    text = ONE.replace("search: {", "search: {placements: 3, ")
    outcome = run(tmp_path, store, "fakes.ring", "fakes.library", text=text, rounds=5)
    found = {
        r.variant.id: len(r.samples_us)
        for r in outcome.records
        if isinstance(r, Trial) and r.status == "ok" and r.stage == "final"
    }
    assert found.pop("peer:ring.in_turns") == 3 and set(found.values()) == {6}


def test_two_devices_share_a_bench(tmp_path):
    """Fault: a bench ran on one device, whatever there were. `--devices 0,1` on a CPU: both time
    cells, each cell with all its peers by one alone, and the journal says by which.
    """
    path = tmp_path / "tiny.yaml"
    path.write_text(TINY)
    out = tmp_path / "out"
    command = ["bench", str(path), "--peers", "fakes.library", "--rounds", "3", "--out", str(out)]
    result = CliRunner().invoke(app, [*command, "--devices", "0,1", "--json"])
    assert result.exit_code == 0, (result.output, result.exception)
    said = json.loads(result.stdout)
    assert said["timed"] == said["cells"] == 4
    assert any("2 processes timed on one CPU at once" in note for note in said["notes"])
    _, records = read(out)
    assert {r.timed_on for r in records if isinstance(r, Cell)} == {"cpu:0", "cpu:1"}
    for problem in config.parse(TINY).problems():
        found = rows([r for r in records if getattr(r, "role", "") == "peer"], problem)
        assert len(found) == (3 if problem.contract.tokens == 1 else 1)
    # another number of devices resumes the same journal
    lines = (out / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (out / "journal.jsonl").write_bytes(b"".join(lines[:-1]))
    again = CliRunner().invoke(app, [*command, "--json"])
    assert json.loads(again.stdout)["timed"] == 4
    assert [r.status for r in read(out)[1] if isinstance(r, Cell)] == ["ok"] * 4


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


def test_the_command_counts_cells_of_equal_work_units(tmp_path):
    """All cells were timed, so the exit code is 0: the table's cells, one for each number of work
    units, are not what is counted.
    """
    path = tmp_path / "heads.yaml"
    path.write_text(HEADS)
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["bench", str(path), "--peers", "", "--rounds", "3", "--out", str(out), "--json"]
    )
    assert result.exit_code == 0, (result.output, result.exception)
    said = json.loads(result.stdout)
    assert said["timed"] == said["cells"] == 4


def test_command_line_without_peers(tmp_path, monkeypatch):
    """On a machine without the peers each is a row `not installed` with a remedy, and the exit code
    is 0: ours were timed.
    """
    path = tmp_path / "tiny.yaml"
    path.write_text(ONE)
    out = tmp_path / "out"
    result = CliRunner().invoke(
        app, ["bench", str(path), "--rounds", "3", "--out", str(out), "--json"]
    )
    assert result.exit_code == 0, (result.output, result.exception)
    said = json.loads(result.stdout)
    assert said["timed"] == said["cells"] == 1
    assert [p["peer"] for p in said["peers"]] == ["fla", "flashinfer", "sglang"]
    for peer in said["peers"]:
        [reason] = peer["without_times"]
        assert "not installed: pip install" in reason and peer["cells"] == 0
    assert "not installed" in (out / "report.md").read_text()
    assert "report.html" in said["files"] and (out / "report.html").read_text().startswith(
        "<!doctype html>"
    )
    again = CliRunner().invoke(app, ["bench", str(path), "--rounds", "3", "--out", str(out)])
    assert again.exit_code == 0 and "Peers without a time" in again.stdout
    # Where there is no matplotlib, that is a note, and no page of an earlier run is left to be
    # taken for this one's.
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bare = CliRunner().invoke(
        app, ["bench", str(path), "--rounds", "3", "--out", str(out), "--json"]
    )
    said = json.loads(bare.stdout)
    assert (
        bare.exit_code == 0
        and "report.html" not in said["files"]
        and not (out / "report.html").exists()
    )
    assert any(
        "no report.html: " in note and "pip install 'gdntune[report]'" in note
        for note in said["notes"]
    )


def test_what_a_bench_needs_compiled():
    """`gdntune compile --bench`: the choices of the tables in use, the defaults and the floors, a
    tenth of what a sweep tries; by a table that is named, its choices.
    """
    device = arch.target("sm_90a")
    whole = config.load(pathlib.Path(__file__).parents[2] / "configs" / "bench-chain.yaml")
    found = {spec.label for spec, _ in plan.bench_objects(whole, device)}
    tables = pathlib.Path(__file__).parents[2] / "tables" / "nvidia-h200"
    named = [tables / "gdn_decode.json", tables / "kda_decode.json"]
    others = {spec.label for spec, _ in plan.bench_objects(whole, device, named)}
    chosen = table.load(named[0])
    rule = next(r for r in chosen.rules if r.when == Contract())
    assert rule.at(64).variant in others and {"flush"} <= found & others
    assert any(label.startswith("stream") for label in found)
    assert len(found) * 3 < len({spec.label for spec, _ in plan.plan_objects(whole, device)})


SEVERAL = TINY.replace("[1, 2]", "[1]").replace(
    "contracts: [{state_dtype: fp32}]",
    "contracts: [{state_dtype: fp32}, {state_dtype: fp32, input_dtype: fp32}]",
)


def test_workers_take_turns_on_a_device(monkeypatch, store, tmp_path):
    """Fault: a peer's compiler, up to 14 s a kernel, kept the GPU idle. Of two processes that share
    a device both compile at once, and no call of one falls between the timed calls of the other.
    """
    monkeypatch.setenv(compiling.LOG, str(tmp_path / "log"))
    outcome = run(tmp_path / "bench", store, "fakes.compiling", text=SEVERAL, workers_per_device=2)
    assert outcome.timed == 4 and any("2 processes took turns" in note for note in outcome.notes)
    seen = compiling.events()
    assert len({pid for pid, _, _ in seen}) == 2
    assert "alone" not in {what for _, _, what in seen}
    # One process has all of a contract's cells; only who has ended its own takes another's last one.
    assert [what for _, _, what in seen].count("compiles") in (2, 3)
    calls = [(pid, number) for pid, number, what in seen if what == "called"]
    for mine in set(calls):
        first = calls.index(mine)
        last = len(calls) - 1 - calls[::-1].index(mine)
        assert set(calls[first : last + 1]) == {mine}
    assert {r.timed_on for r in outcome.records if isinstance(r, Cell)} == {msgspec.UNSET}
    assert outcome.run.workers_per_device == 2


def test_a_bench_without_the_cells_of_another(benched, store, tmp_path):
    """Cells that a journal of the same bench has are left out, whatever card it was timed on; one
    of another bench is refused.
    """
    _, outcome = benched
    kept = [p for p in config.parse(TINY).problems() if p.contract.tokens == 1]
    records = [r for r in outcome.records if not isinstance(r, Cell) or r.problem in kept]
    header = msgspec.structs.replace(
        outcome.run,
        cards=(arch.Card(uuid="GPU-other"),),
        kernels={**outcome.run.kernels, "layer": "of another version"},
        software={**outcome.run.software, "torch": "0.1"},
    )
    with Journal.open(tmp_path / "half", header) as journal:
        journal.extend(records)
    rest = run(tmp_path / "rest", store, "fakes.library", without=[tmp_path / "half"])
    assert {r.problem.contract.tokens for r in rest.records if isinstance(r, Cell)} == {2}
    assert rest.timed == rest.run.cells == 2
    assert any("half is of torch 0.1, this is " in note for note in rest.notes)
    with pytest.raises(JournalError, match=r"half: of another bench: peer fakes|peer library: "):
        run(tmp_path / "others", store, "fakes.ring", without=[tmp_path / "half"])
    with pytest.raises(JournalError, match="half: of another bench: rounds: 6 in the journal, 7"):
        run(tmp_path / "rounds", store, "fakes.library", rounds=7, without=[tmp_path / "half"])


def test_a_ring_is_timed_in_whole_cycles(store, tmp_path):
    """A call that folds its ring takes longer than one that does not: a sample is the mean of a
    cycle's steps, of ours as of a peer's.
    """
    text = ONE.replace("tokens: [1]", "tokens: [4]").replace(
        "{state_dtype: fp32}", "{state_dtype: fp32, ring: 16}"
    )
    outcome = run(tmp_path, store, "fakes.ring_library", text=text)
    assert outcome.timed == 1
    found = {
        r.role: len(r.samples_us)
        for r in outcome.records
        if isinstance(r, Trial) and r.stage == "final" and r.status == "ok"
    }
    # 6 rounds, and 10 more to end a cycle of 4 steps on each of 4 sets of tensors
    assert found == {"decode": 4, "floor": 16, "peer": 4}
