"""The sweep end to end on real CPU kernels, and what happens to variants that are wrong, crash or
hang.
"""

import dataclasses
import itertools
import json
import os
import re
import time
from pathlib import Path

import msgspec
import pytest
from sweeps import TINY, busy, run

from gdntune import kernels
from gdntune.device import arch
from gdntune.errors import (
    ConfigError,
    JournalError,
    Locked,
    ToolMissing,
    UnsupportedProblem,
)
from gdntune.results import derive, judge, table
from gdntune.results.journal import Journal, read
from gdntune.results.records import Build, Cell, Check, Trial
from gdntune.timing import Policy
from gdntune.tuning import attempts as trials
from gdntune.tuning import config, notes, worker
from gdntune.tuning import run as engine
from gdntune.tuning.plan import plan_objects, sweep_plan

SHIPPED = Path(__file__).parents[2] / "tables" / "nvidia-h200" / "gdn_decode.json"


def test_a_sweep_ends_in_a_table(swept):
    """Every object is journalled, every variant checked before it is timed, every cell timed, and
    the table is valid.
    """
    folder, outcome = swept
    header, records = read(folder)
    assert header.policy == {"timer": "cpu", "l2": "cold-clean"}
    assert all(r.status == "ok" for r in records), notes.failures(records)
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
    with pytest.raises(
        JournalError, match="of another sweep: content of the config: sha256 .* now"
    ):
        run(swept[0], store, TINY.replace("screen_rounds: 4", "screen_rounds: 3"))
    with pytest.raises(JournalError, match="of another sweep: rounds: 8 in the journal, 9 now"):
        run(swept[0], store, TINY.replace("final_rounds: 8", "final_rounds: 9"))


def test_a_place_is_looked_at_before_anything_is_compiled(swept, store, tmp_path, monkeypatch):
    """Fault: a folder in use, of another sweep, or that cannot be written was refused after minutes
    of compiling.
    """
    folder, outcome = swept
    monkeypatch.setattr(engine, "compile_objects", lambda *_, **__: pytest.fail("compiled"))
    with Journal.open(folder, outcome.run), pytest.raises(Locked, match=str(os.getpid())):
        run(folder, store)
    before = (folder / "journal.jsonl").read_bytes()
    with pytest.raises(JournalError, match="l2: cold-clean in the journal, warm now"):
        run(folder, store, policy=Policy(l2="warm"))
    assert (folder / "journal.jsonl").read_bytes() == before
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "sweep"):
        with pytest.raises(JournalError, match="cannot be written: .*choose a folder"):
            run(place, store)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "journal.jsonl").write_bytes(
        before.replace(b'"kind":"check"', b'"kind":"cheque"', 1)
    )
    with pytest.raises(JournalError, match=r"journal.jsonl: line \d+: .*restore the file"):
        run(tmp_path / "damaged", store)


def test_a_folder_is_locked_while_a_sweep_compiles(store, tmp_path, monkeypatch):
    """The second of two sweeps is refused while the first still compiles; when that ends without a
    journal the folder is free.
    """

    def compiling(*_, **__):
        with pytest.raises(Locked, match=str(os.getpid())):
            run(tmp_path, store)
        raise ToolMissing("no g++")

    monkeypatch.setattr(engine, "compile_objects", compiling)
    for _ in range(2):
        with pytest.raises(ToolMissing):
            run(tmp_path, store)
    assert not (tmp_path / "journal.jsonl").exists()


def test_the_header_says_how_many_cells_were_asked_for(swept):
    """A reader of the journal alone sees whether it is whole."""
    header, _ = read(swept[0])
    assert (header.cells, header.rounds) == (2, 8)


def test_a_timer_that_the_device_cannot_have_is_refused_first(store, tmp_path):
    """CUPTI on a CPU is refused before anything is compiled."""
    with pytest.raises(UnsupportedProblem, match="timer='cupti'"):
        run(tmp_path, store, policy=Policy(timer="cupti"))
    assert not (tmp_path / "journal.jsonl").exists()


def broken(monkeypatch, kind):
    """Plants a fault in one variant of the timing process, through its environment."""
    monkeypatch.setenv("GDNTUNE_TEST_FAULT", f"{kind}:tv16.ilp2.vec8")
    monkeypatch.setattr(worker, "check_task", faulty_check_task)
    if kind == "hang":
        # what hangs is found soon; what does not has its two minutes, whatever else runs here
        monkeypatch.setattr(
            trials,
            "check_limit",
            lambda variants: 1.0 if any("tv16.ilp2.vec8" in v.id for v in variants) else 120.0,
        )


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
        time.sleep(10**4)


def faulty_check_task(start, contract, variants):
    """`worker.check_task` with the fault that the environment names; runs in the timing process."""
    kind, victim = os.environ["GDNTUNE_TEST_FAULT"].split(":")
    current = worker.current(start)
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


honest_check_task = worker.check_task


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
    """A variant broken on purpose is a journalled failure with its worst coordinate or its end; the
    others are timed.
    """
    broken(monkeypatch, kind)
    text = TINY.replace("batch: [1, 8]", "batch: [2]")
    outcome = run(tmp_path, store, text)
    failed = [r for r in outcome.records if isinstance(r, Check) and r.status != "ok"]
    assert failed and all("tv16.ilp2.vec8" in r.variant and r.status == status for r in failed)
    assert all(re.search(reason, r.reason) for r in failed), [r.reason for r in failed]
    assert not any("tv16.ilp2.vec8" in name for name in outcome.table.variants)
    assert not any(
        isinstance(r, Trial) and "tv16.ilp2.vec8" in r.variant.id and r.role == "decode"
        for r in outcome.records
    )
    assert any("did not pass the check" in note for note in outcome.notes)


def test_plan_objects_covers_a_sweep(store):
    """`gdntune compile` makes what a sweep loads: variants, floors, and the default rule's choices,
    each once.
    """
    device = arch.target("sm_90a")
    cfg = config.parse(
        TINY.replace("device: cpu", "device: cuda")
        .replace("K: 64, V: 64", "K: 128, V: 128")
        .split("kernels:")[0]
    )
    objects = plan_objects(cfg, device)
    names = {(spec.kernel, spec.label) for spec, _ in objects}
    assert len({spec.key for spec, _ in objects}) == len(objects)
    assert ("stream", "flush") in names
    for contract in cfg.all_contracts():
        assert {("recurrent", v.id) for v in kernels.variants(contract, device)} <= names
        assert ("recurrent", kernels.default(contract, 2, device).id) in names


def test_what_is_tried_follows_the_policy_in_force():
    """Under chain a plan has dependent launch, and the kernel that lets it start: also where the
    command line names the policy and not the config, else a bundle lacks what the sweep loads.
    """
    device = arch.target("sm_90a")
    cfg = config.parse(
        TINY.replace("device: cpu", "device: cuda")
        .replace("K: 64, V: 64", "K: 128, V: 128")
        .split("kernels:")[0]
    )
    chained = msgspec.structs.replace(cfg, policy=Policy(l2="chain"))

    def made(cfg, l2):
        objects = [spec for spec, _ in sweep_plan(cfg, device, l2=l2).objects()]
        producer = any(spec.label == "producer" for spec in objects)
        return {spec.knobs.get("pdl", "none") for spec in objects}, producer

    every = {"none", "first", "state"}
    assert made(cfg, None) == made(chained, "cold-clean") == ({"none"}, False)
    assert made(cfg, "chain") == made(chained, None) == (every, True)


def test_kernels_are_data(store):
    """The registry holds dataclasses: knobs of a variant survive the way through a table's JSON."""
    device = arch.detect("cpu")
    for contract in config.parse(TINY).all_contracts():
        for v in kernels.variants(contract, device):
            kernel = kernels.get(v.kernel)
            again = json.loads(json.dumps(v.knobs))
            assert kernel.variant(kernel.setting(again)) == v
            assert dataclasses.is_dataclass(kernel.knobs)


AGAIN = """
name: again
device: cpu
model: {H: 2, HV: 4, K: 64, V: 64}
batch: [64, 256]
tokens: [1, 4]
contracts: [{state_dtype: fp32}]
kernels: {cpu_recurrent: {tile_v: [16, 64]}}
search: {screen_rounds: 4, keep: 99, final_rounds: 40, max_cell_seconds: 5}
"""


# What a choice may lose by another sweep's samples on a CPU, at a cell and in the mean: on an idle
# one it was 4% and 1%, beside other tests up to 33% and 9%. The slowest variant loses 50 to 110%.
LOSES, LOSES_IN_THE_MEAN = 0.4, 0.15


@pytest.mark.slow
def test_sweeps_repeat_each_other(store, tmp_path):
    """Three sweeps of one config, each one's table judged on each other's samples: by regret, never
    by time.

    Up to two more sweeps are made, and three in a row must agree. Where other processes want the
    cores too, no times repeat each other, and nothing is judged.
    """
    made = []
    for n in range(5):
        if busy():
            pytest.skip("other processes want these cores: times repeat on an idle machine alone")
        made.append(run(tmp_path / str(n), store, AGAIN))
        pairs = itertools.permutations(made[-3:], 2)
        found = (
            [judge.judge(of.table, by.records, by.run).table for of, by in pairs] if n >= 2 else []
        )
        within = [t.regret_max <= LOSES and t.regret_mean <= LOSES_IN_THE_MEAN for t in found]
        if found and all(within):
            break
    assert len(found) == 6 and (all(within) or busy()), found
    assert all((t.cells, t.screened) == (4, 0) for t in found)
    # so small a regret is no matter of course
    cells = derive.timed_cells(made[-1].records)
    means = [[f.stats.mean_us for f in cell.finals.values()] for cell in cells]
    assert max(max(us) / min(us) - 1 for us in means) > LOSES


def test_judged_choices_of_cells_that_are_done_are_said(swept, store, tmp_path):
    """Fault: a sweep that went on with --table said nothing where its cells had been timed before,
    without final samples of the choices.
    """
    folder, outcome = swept
    (tmp_path / "journal.jsonl").write_bytes((folder / "journal.jsonl").read_bytes())
    finals = {
        (r.problem, r.variant.id)
        for r in outcome.records
        if isinstance(r, Trial) and r.stage == "final"
    }
    best = outcome.table
    assert not run(tmp_path, store, judged=[best]).notes
    problems = {r.problem for r in outcome.records if isinstance(r, Cell)}
    timed = {
        r.variant.id: r.variant
        for r in outcome.records
        if isinstance(r, Trial) and r.role == "decode"
    }
    late = next(v for v in timed.values() if not any((p, v.id) in finals for p in problems))
    [rule] = best.rules
    other = msgspec.structs.replace(
        best,
        variants={late.id: table.TableVariant(late.kernel, late.knobs)},
        rules=[
            msgspec.structs.replace(
                rule,
                intervals=[
                    msgspec.structs.replace(rule.intervals[0], first=1, last=None, variant=late.id)
                ],
            )
        ],
    )
    assert any(
        n.startswith("2 choices of the judged tables have no final samples")
        for n in run(tmp_path, store, judged=[other]).notes
    )


def test_a_table_of_another_kind_of_device_is_refused(store, tmp_path):
    """Fault: its choices were counted as variants that the config does not time."""
    shipped = table.load(SHIPPED)
    with pytest.raises(
        UnsupportedProblem,
        match=r"a table of NVIDIA H200 \(cuda\) to be judged on .*expected a table of the same kind",
    ):
        run(tmp_path, store, judged=[shipped])


def test_values_of_knobs_are_looked_at(store, tmp_path):
    """Fault: a value that no variant has was dropped without a word. What is legal and tried
    nowhere is said when the sweep ends.
    """
    with pytest.raises(
        ConfigError, match=r"\$.kernels.cpu_recurrent.ilp lists 3, .*expected one of 2, 4, 8"
    ):
        run(tmp_path, store, TINY.replace("ilp: [2]", "ilp: [2, 3]"))
    assert not (tmp_path / "journal.jsonl").exists()
    # one row in flight is legal, and slow everywhere
    outcome = run(tmp_path, store, TINY.replace("ilp: [2]", "ilp: [1, 2]"))
    assert outcome.notes == [
        "1 values of the config's kernels are tried nowhere: cpu_recurrent.ilp=1"
    ]
