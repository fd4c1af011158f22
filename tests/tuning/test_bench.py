"""gdntune/tuning/bench.py and `gdntune bench`: what is timed, and what is said of it."""

import csv
import io
import json
import pathlib
import sys

import dependent
import msgspec
import pytest
from benches import ONE, TINY, rows, run, write_table
from typer.testing import CliRunner

from gdntune import kernels
from gdntune.cli.app import app
from gdntune.device import arch
from gdntune.errors import JournalError, Locked
from gdntune.objects.store import Store
from gdntune.problem import Contract
from gdntune.report.peers import compared
from gdntune.report.report import report
from gdntune.results import judge, table
from gdntune.results.derive import derive
from gdntune.results.journal import Journal, digest, read, require_same
from gdntune.results.records import LAUNCH, Cell, Check, Trial
from gdntune.runtime.dispatch import Runtime
from gdntune.timing import Policy
from gdntune.tuning import config, plan
from gdntune.tuning import run as engine
from gdntune.tuning.header import run_header


@pytest.fixture(scope="module")
def benched(tmp_path_factory, store):
    """One finished bench against a library whose entries fail in several ways."""
    folder = tmp_path_factory.mktemp("bench")
    return folder, run(folder, store, "fakes.library")


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


def test_a_bench_times_what_calls_get(tmp_path):
    """In a chain what the table chose, elsewhere what calls without dependent launch get; or what
    is asked for, which makes it another bench. What is compiled ahead is the same.
    """
    made = dependent.write(tmp_path / "apart.json")
    wanted = config.parse(
        "{name: one, device: cuda, model: {H: 16, HV: 64, K: 128, V: 128}, batch: [1],"
        " contracts: [{op: gdn_decode}]}"
    )
    runtime = Runtime(made.device, Store(tmp_path / "store"))
    runtime.use(made.path)
    (problem,) = wanted.all_problems()
    assert problem.work_units == 64
    early, alone = made.early[1], made.alone

    def header(l2, allowed):
        found = plan.bench_plan(wanted, made.device, runtime, {}, l2, allowed)
        chained = msgspec.structs.replace(wanted, policy=Policy(l2=l2))
        labels = {
            spec.label for spec, _ in plan.bench_objects(chained, made.device, [made.path], allowed)
        }
        assert labels == {spec.label for spec, _ in found.objects()}
        return found.choices[problem], run_header(found, Policy(l2=l2), "gdntune bench")

    said = {}
    for l2, allowed, choice, word in (
        ("chain", None, early, None),
        ("chain", True, early, None),
        ("chain", False, alone, "not allowed"),
        ("cold-clean", None, alone, "not allowed"),
        ("cold-clean", False, alone, "not allowed"),
        ("cold-clean", True, early, None),
    ):
        found, said[l2, allowed] = header(l2, allowed)
        assert (found, said[l2, allowed].software.get(LAUNCH)) == (choice, word)
    with pytest.raises(
        JournalError, match=r"dependent launch: none in the journal, not allowed now"
    ):
        require_same(tmp_path, said["chain", None], said["chain", False], ())
    assert require_same(tmp_path, said["chain", None], said["chain", True], ()) == []


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
