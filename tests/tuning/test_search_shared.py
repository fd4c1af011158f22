"""Sweeps that add cells of their own, and sweeps whose cells several workers share; real CPU
kernels, real processes.
"""

import json
import os
import signal
import sys
import threading
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from fakes.tasks import Start, broken, hang, pid, refuse

from gdntune import search
from gdntune.device import arch
from gdntune.errors import MeasurementError, ToolMissing, UnsupportedProblem
from gdntune.objects import build
from gdntune.objects.store import Store
from gdntune.report.report import report
from gdntune.results import derive, journal, judge, table
from gdntune.results.journal import FILE, read
from gdntune.results.records import Cell, Check, Trial
from gdntune.tuning import config, team, worker
from gdntune.tuning.executors import Crashed
from gdntune.tuning.plan import plan_objects, sweep_plan

CONFIG = """
name: shared
device: cpu
model: {H: 1, HV: 2, K: 64, V: 64}
batch: [1, 8, 64]
tokens: [1]
contracts: [{state_dtype: fp32}]
kernels: {cpu_recurrent: {vec: [8, 16], tile_v: [16, 32], ilp: [2]}}
policy: {l2: warm}
search: {screen_rounds: 3, keep: 99, final_rounds: 6, max_cell_seconds: 30, bisect: 1.5, extra_cells: 2, held_out: 2}
"""


@pytest.fixture(scope="module")
def store():
    """Compiled objects, kept for all tests."""
    return Store()


def sweep(folder, store, text=CONFIG, **options):
    """A sweep of a config's text on this CPU."""
    return search.sweep(
        config.parse(text), folder, device=arch.detect("cpu"), store=store, **options
    )


def made_up(start, problem, decode, floor, effort, always_final=(), *rest):
    """`worker.time_task` with times from a formula: one variant is the fastest below 37 work
    units, another above.
    """
    got = honest_time_task(start, problem, decode, floor, effort, always_final, *rest)

    def us(variant):
        if "tv16" in variant.id and "vec8" in variant.id:
            return 10.0 + problem.work_units
        return 47.0 if "tv32" in variant.id and "vec16" in variant.id else 200.0

    timed = [
        t
        if t.role == "floor"
        else t._replace(screen_us=[us(t.variant)] * 3, final_us=[us(t.variant)] * 6)
        for t in got.timed
    ]
    return got._replace(timed=timed)


honest_time_task = worker.time_task


@pytest.fixture
def crossing(monkeypatch):
    """Times with a crossover at 37 work units."""
    monkeypatch.setattr(worker, "time_task", made_up)


@pytest.fixture(scope="module")
def added(tmp_path_factory, store):
    """A finished sweep that added cells: its folder and outcome."""
    folder = tmp_path_factory.mktemp("added")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(worker, "time_task", made_up)
        return folder, sweep(folder, store)


def purposes(records):
    """How many cells there are for each purpose."""
    return Counter(r.purpose or "own" for r in records if isinstance(r, Cell))


def test_a_sweep_adds_cells_and_replays(added, tmp_path):
    """Bisection narrows the crossover, held-out cells come last and have no part in choosing, the
    replay is the table to the byte.
    """
    folder, outcome = added
    cells = [r for r in outcome.records if isinstance(r, Cell)]
    order = [r.purpose or "own" for r in cells]
    assert order == ["own"] * 3 + ["bisection"] * 2 + ["held-out"] * 2
    assert len({r.problem for r in cells}) == len(cells)
    for rule in outcome.table.rules:
        assert len(rule.intervals) == 2
        assert 28 <= rule.intervals[0].last <= 46
        assert sum(len(i.evidence) for i in rule.intervals) == 5
    e = outcome.table.evidence
    assert (e.cells, e.held_out_cells) == (5, 2)
    assert e.held_out_regret_mean <= e.held_out_regret_max
    table.save(judge.replay(folder).table, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (folder / "table.json").read_bytes()
    found = judge.held_out(outcome.records, outcome.run)
    assert (found.table.cells, found.table.regret_max) == (2, e.held_out_regret_max)
    assert (outcome.run.regret, outcome.run.keeps_default) == (0.01, True)


def stingy(start, problem, decode, floor, effort, always_final=(), *rest):
    """`made_up`, where at held-out cells only what must be is timed to the end."""
    got = made_up(start, problem, decode, floor, effort, always_final, *rest)
    if len(always_final) < 2:
        return got
    return got._replace(
        timed=[
            t if t.role == "floor" or t.variant.id in always_final else t._replace(final_us=[])
            for t in got.timed
        ]
    )


def test_the_judged_choice_has_final_samples(monkeypatch, store, tmp_path):
    """At held-out cells the table's choice and the default rule's are timed to the end, and nothing
    else need be.
    """
    monkeypatch.setattr(worker, "time_task", stingy)
    outcome = sweep(tmp_path, store)
    rules = {rule.when: rule for rule in outcome.table.rules}
    apart = 0
    for cell in (r for r in outcome.records if isinstance(r, Cell) and r.purpose == "held-out"):
        choice = rules[cell.problem.contract].at(cell.problem.work_units).variant
        finals = [
            r
            for r in outcome.records
            if isinstance(r, Trial) and (r.problem, r.stage) == (cell.problem, "final")
        ]
        timed = {r.variant.id for r in finals if r.role == "decode"}
        assert choice in timed
        if choice != cell.default_variant:
            # where the default's alone was asked for, all are timed
            assert timed == {choice, cell.default_variant}
            apart += 1
    assert apart
    assert {c.table.basis for c in judge.held_out(outcome.records, outcome.run).cells} == {"final"}


@pytest.mark.usefixtures("crossing")
def test_a_sweep_with_added_cells_is_resumed(added, store, tmp_path):
    """Cut after any cell, its own or an added one, the sweep ends with the same cells for the same
    purposes, each once.
    """
    folder, whole = added
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    ends = [i for i, line in enumerate(lines) if line.startswith(b'{"kind":"cell"')]
    for end in (ends[2], ends[5]):
        # with half of the next cell's trials, as a kill leaves them
        (tmp_path / FILE).write_bytes(b"".join(lines[: end + 3]) + lines[end + 3][:40])
        outcome = sweep(tmp_path, store)
        assert purposes(outcome.records) == purposes(whole.records)
        cells = [[r.problem for r in o.records if isinstance(r, Cell)] for o in (outcome, whole)]
        assert cells[0] == cells[1]


def lost(start, problem, decode, floor, effort, always_final=(), *rest):
    """`made_up`, with no times at cells that the sweep adds; runs in the timing process."""
    if problem.B not in (1, 8, 64):
        raise MeasurementError("3 of 12 segments have no record")
    return made_up(start, problem, decode, floor, effort, always_final, *rest)


def test_added_cells_that_failed_are_tried_again(monkeypatch, store, tmp_path):
    """Fault: cells between two, and held-out ones, were never timed again once they had failed.
    They keep their purpose.
    """
    with monkeypatch.context() as patched:
        patched.setattr(worker, "time_task", lost)
        first = sweep(tmp_path, store)
    # where a cell between two failed, no other is tried
    assert purposes(first.records) == {"own": 3, "bisection": 1, "held-out": 2}
    monkeypatch.setattr(worker, "time_task", made_up)
    outcome = sweep(tmp_path, store)
    cells = {}
    for r in outcome.records:
        if isinstance(r, Cell):
            cells.setdefault((r.problem, r.purpose), []).append(r.status)
    assert Counter(map(tuple, cells.values())) == {("ok",): 4, ("failed", "ok"): 3}
    assert len({problem for problem, _ in cells}) == len(cells)
    assert outcome.table.evidence.cells == 5 and outcome.table.evidence.held_out_cells == 2
    assert (tmp_path / FILE).read_bytes().count(b"\n") == 1 + len(sweep(tmp_path, store).records)


def test_an_older_journal_keeps_its_way(added, store, tmp_path):
    """A journal whose header does not say how its table is derived goes on without, and its table
    is derived as it was.
    """
    folder, whole = added
    later = ("regret", "keeps_default", "cells", "rounds")
    old = msgspec.structs.replace(whole.run, **dict.fromkeys(later, msgspec.UNSET))
    rest = (folder / FILE).read_bytes().partition(b"\n")[2]
    (tmp_path / FILE).write_bytes(journal.encode(old) + rest)
    outcome = sweep(tmp_path, store)
    assert outcome.run == old and outcome.records == whole.records
    assert outcome.table == derive.derive(whole.records, old, regret=0.01)


# -- several workers


def assert_whole(outcome, folder):
    """All checks and cells are there, each once, and the journal is what the sweep says."""
    c = config.parse(CONFIG)
    cells = [r for r in outcome.records if isinstance(r, Cell)]
    assert {r.problem for r in cells} >= set(c.problems()) and len(
        {r.problem for r in cells}
    ) == len(cells)
    checks = Counter((r.contract, r.variant) for r in outcome.records if isinstance(r, Check))
    assert set(checks.values()) == {1}
    assert read(folder)[1] == outcome.records
    table.save(judge.replay(folder).table, folder / "again.json")
    assert (folder / "again.json").read_bytes() == (folder / "table.json").read_bytes()


def test_two_processes_share_a_sweep(store, tmp_path):
    """Cells are timed by both, each cell by one alone; the journal says by which, and a note that a
    CPU's times are disturbed.
    """
    outcome = sweep(tmp_path, store, devices=(0, 1))
    assert_whole(outcome, tmp_path)
    assert {r.timed_on for r in outcome.records if isinstance(r, Cell)} == {"cpu:0", "cpu:1"}
    assert any("2 processes timed on one CPU at once" in note for note in outcome.notes)
    # a cell's trials stand together, before its Cell
    waiting = set()
    for r in outcome.records:
        if isinstance(r, Trial):
            waiting.add(r.problem)
            assert len(waiting) == 1
        elif isinstance(r, Cell):
            waiting.clear()
    # another number of devices goes on with the same journal, and one says nothing of devices
    (tmp_path / FILE).write_bytes(
        b"".join((tmp_path / FILE).read_bytes().splitlines(keepends=True)[:-3])
    )
    again = sweep(tmp_path, store)
    assert_whole(again, tmp_path)
    assert [r.timed_on for r in again.records if isinstance(r, Cell)].count(msgspec.UNSET) == 1


def fragile(start, problem, decode, floor, effort, always_final=(), *rest):
    """`worker.time_task` that ends its process at one cell where one variant is called; runs in
    the timing process.
    """
    if problem.B == 8 and any("tv16.ilp2.vec8" in v.id for v in decode):
        os.abort()
    return honest_time_task(start, problem, decode, floor, effort, always_final, *rest)


def test_a_crash_on_one_of_two(monkeypatch, store, tmp_path):
    """The variant that takes one worker down is a failed trial there and left out later; the other
    worker's cells are timed.
    """
    monkeypatch.setattr(worker, "time_task", fragile)
    text = CONFIG.replace(", held_out: 2", "")
    outcome = sweep(tmp_path, store, text, devices=(0, 1))
    failed = {
        (r.problem.B, r.variant.id)
        for r in outcome.records
        if isinstance(r, Trial) and r.status == "crashed"
    }
    assert (
        failed
        and {B for B, _ in failed} == {8}
        and all("tv16.ilp2.vec8" in name for _, name in failed)
    )
    assert all(r.status == "ok" for r in outcome.records if isinstance(r, Cell))
    assert not any("tv16.ilp2.vec8" in name for name in outcome.table.variants)


def test_a_worker_of_another_kind_is_refused(monkeypatch, store, tmp_path):
    """Devices or software that differ may not share a journal: the refusal says what differs, and
    nothing is journalled.
    """
    asked = team.identified

    def other(one):
        found = asked(one)
        return {**found, "torch": "1.0"} if one.name == "cpu:1" else found

    monkeypatch.setattr(team, "identified", other)
    with pytest.raises(
        UnsupportedProblem,
        match=r"cpu:1 cannot share this run: torch: .* here, 1\.0 there; expected devices",
    ):
        sweep(tmp_path, store, devices=(0, 1))
    assert not (tmp_path / FILE).exists()


# -- Ray


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A Ray cluster of two nodes on this machine, each with one CPU and a store of its own: the
    folder that is given.
    """
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    from gdntune.tuning import ray as ray_executor

    # An actor's first import of torch took two minutes beside compilers on two cores.
    ray_executor.GRANT_TIMEOUT_S, usual = 900.0, ray_executor.GRANT_TIMEOUT_S
    cache = tmp_path_factory.mktemp("host")
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    made.add_node(num_cpus=1)
    here = Path(__file__).parent
    path = os.pathsep.join([str(here), str(here.parent), os.environ.get("PYTHONPATH", "")])
    environment = {"PYTHONPATH": path, "GDNTUNE_CACHE_DIR": str(cache)}
    ray.init(address=made.address, log_to_driver=False, runtime_env={"env_vars": environment})
    yield cache
    ray.shutdown()
    made.shutdown()
    ray_executor.GRANT_TIMEOUT_S = usual


@pytest.mark.usefixtures("cluster")
def test_ray_shares_a_sweep(monkeypatch, store, tmp_path):
    """Two nodes share the cells; a variant that takes an actor down is a journalled failure, and
    the sweep goes on to its table.
    """
    monkeypatch.setattr(worker, "time_task", fragile)
    outcome = sweep(tmp_path, store, executor="ray")
    assert_whole(outcome, tmp_path)
    assert {
        r.problem.B for r in outcome.records if isinstance(r, Trial) and r.status == "crashed"
    } == {8}
    assert all(r.status == "ok" and r.timed_on for r in outcome.records if isinstance(r, Cell))


def test_a_host_without_the_files_gets_them(cluster, store, tmp_path):
    """An actor whose host has not the store's files writes them into its own store, and finds its
    objects there.
    """
    from gdntune.tuning import ray as ray_executor

    text = CONFIG
    device = arch.detect("cpu")
    c = config.parse(text)
    built = build.compile_objects(plan_objects(c, device), store)
    keys = [b.spec.key for b in built]
    start = worker.Start(device, 0, str(tmp_path / "not here"), (), c.policy)
    workers = ray_executor.ray_workers(start, keys, store)
    try:
        (contract,) = c.all_contracts()
        variants = list(sweep_plan(c, device).tried[contract])
        got = workers[0].run(worker.check_task, contract, variants, timeout=120)
        assert [ok for ok, *_ in got] == [True] * len(variants)
        assert not (tmp_path / "not here").exists()
        assert len(list(cluster.glob("objects/*/*/object.o"))) == len(keys)
    finally:
        for one in workers:
            one.close()


@pytest.mark.usefixtures("cluster")
def test_a_killed_actor_is_replaced(store, tmp_path):
    """kill -9, a hang and a fault are values, a refusal is raised; after each the next task has an
    actor. A closed worker has none.
    """
    from gdntune.tuning import ray as ray_executor

    start = Start(arch.detect("cpu"), 0, str(store.root))
    workers = ray_executor.ray_workers(start, [], store)
    try:
        actor = workers[0]
        first = actor.run(pid, timeout=60)
        threading.Timer(0.5, os.kill, (first, signal.SIGKILL)).start()
        got = actor.run(hang, timeout=600)
        assert isinstance(got, Crashed) and got.status == "crashed" and "process died" in got.reason
        second = actor.run(pid, timeout=60)
        assert second != first
        got = actor.run(hang, timeout=1)
        assert got == Crashed("timeout", "no answer within 1 s")
        got = actor.run(broken, timeout=60)
        assert isinstance(got, Crashed) and "ZeroDivisionError: x / 0" in got.reason
        with pytest.raises(MeasurementError, match="no such time"):
            actor.run(refuse, timeout=60)
        assert actor.run(pid, timeout=60) not in (first, second)
    finally:
        for actor in workers:
            actor.close()
    # fault: its process, told to end, answered first
    assert actor.run(pid, timeout=5) == Crashed("crashed", "the worker was closed")


def test_without_ray(monkeypatch, store, tmp_path):
    """Ray that is not installed is said, with how to get it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ToolMissing, match=r"pip install 'gdntune\[ray\]'"):
        sweep(tmp_path, store, executor="ray")


def test_the_command_line_on_such_sweeps(added):
    """`judge` of a sweep with held-out cells needs no table, the report has their regret,
    `--devices` and `--executor` are looked at.
    """
    from typer.testing import CliRunner

    from gdntune.cli.app import app

    folder, outcome = added

    def run(*args):
        return CliRunner().invoke(app, [str(a) for a in args])

    said = run("judge", folder)
    assert said.exit_code == 0 and "the table at the sweep's held-out cells" in said.stdout
    assert json.loads(run("judge", folder, "--json").stdout)["table"]["cells"] == 2
    assert (
        f"At {outcome.table.evidence.held_out_cells} held-out cells" in report([folder]).markdown()
    )
    assert "at 2 held-out cells" in " ".join(
        run("table", "show", folder / "table.json").stdout.split()
    )
    for args, message in (
        (("--devices", "0,x"), "'0,x': expected device numbers"),
        (("--devices", "1,1"), "each once"),
        (("--devices", "0", "--executor", "ray"), "Ray says which devices there are"),
    ):
        refused = run("sweep", "quickstart", "--out", folder, *args)
        assert refused.exit_code == 2 and message in refused.stderr


def bare(start, problem, decode, floor, effort, always_final=(), *rest):
    """`made_up`, where nothing but what must be is timed to the end."""
    got = made_up(start, problem, decode, floor, effort, always_final, *rest)
    return got._replace(
        timed=[t if t.variant.id in always_final else t._replace(final_us=[]) for t in got.timed]
    )


def test_a_judged_tables_choices_are_timed_to_the_end(monkeypatch, added, store, tmp_path):
    """A sweep told of a table has final samples of its choices, with the variants in no other
    order; what it cannot time it says.
    """
    monkeypatch.setattr(worker, "time_task", bare)
    other = added[1].table
    rules = {rule.when: rule for rule in other.rules}
    told = sweep(tmp_path / "told", store, judged=[other])
    untold = sweep(tmp_path / "untold", store)

    def trials(outcome, problem):
        return [
            r
            for r in outcome.records
            if isinstance(r, Trial) and r.problem == problem and r.role == "decode"
        ]

    more = 0
    for problem in config.parse(CONFIG).problems():
        choice = rules[problem.contract].at(problem.work_units).variant
        finals = [
            {r.variant.id for r in trials(o, problem) if r.stage == "final"} for o in (told, untold)
        ]
        assert finals[0] == finals[1] | {choice}
        more += choice not in finals[1]
        names = [
            list(dict.fromkeys(r.variant.id for r in trials(o, problem))) for o in (told, untold)
        ]
        assert names[0] == names[1]
    assert more
    assert not any("judged tables" in note for note in told.notes)
    gone = msgspec.structs.replace(
        other,
        variants={f"{name}.x": v for name, v in other.variants.items()},
        rules=tuple(
            msgspec.structs.replace(
                rule,
                intervals=tuple(
                    msgspec.structs.replace(i, variant=f"{i.variant}.x") for i in rule.intervals
                ),
            )
            for rule in other.rules
        ),
    )
    said = sweep(tmp_path / "gone", store, judged=[gone]).notes
    assert any("of the judged tables are not timed" in note and ".x" in note for note in said)
