"""Tuning within a budget, checking a table against the device, and tables of several ranks."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_chosen import CONTRACT, given  # noqa: F401

import gdntune
from gdntune import kernels
from gdntune.device import arch
from gdntune.errors import ToolMissing, UnsupportedProblem
from gdntune.problem import Contract, Problem
from gdntune.results import table
from gdntune.results.judge import Replayed
from gdntune.results.vllm_json import vllm_json
from gdntune.runtime import dispatch
from gdntune.tuning import config, measure, table_check, tune

PROBLEMS = [Problem(CONTRACT, B, 1, 1) for B in (1, 4)]


def test_a_tuning_sweeps_few_variants_and_the_default():
    """On a CPU some of the space, on a GPU what shipped tables choose; the default rule's always,
    since no choice may be slower.
    """
    for device, contract in ((arch.detect("cpu"), CONTRACT), (arch.target("sm_90a"), Contract())):
        problems = [Problem(contract, B, 1, 1) for B in (1, 4)]
        made = config.parse(json.dumps(tune.config_of(problems, device, 60.0)))
        assert set(made.problems()) == set(problems) and made.search.regret == 0
        space = kernels.variants(contract, device)
        tried = made.admitted(contract, space)
        assert 1 < len(tried) < len(space)
        assert {kernels.default(contract, n, device) for n in (1, 4)} <= set(tried)


@pytest.fixture
def own_runtime(tmp_path, monkeypatch):
    """A runtime of this test alone, whose user has no tables yet."""
    monkeypatch.setattr(dispatch, "user_tables", lambda: tmp_path / "tables")
    found = dispatch.Runtime(arch.detect("cpu"))
    monkeypatch.setattr(dispatch, "runtime", lambda kind, index=0: found)
    return found


def test_a_tuning_is_kept_and_used(given, own_runtime, monkeypatch):  # noqa: F811
    """Its table serves this process and the next; the rules of the one before stay, and that one
    stands beside it.
    """
    made = table.load(given)
    other = Contract(K=64, V=64, state_dtype="fp32")
    before = dispatch.user_tables() / own_runtime.device.slug / "gdn_decode.json"
    rule = made.rules[0]
    table.save(gdntune_replace(made, rules=(gdntune_replace(rule, when=other),)), before)
    monkeypatch.setattr(tune, "COMMAND", (sys.executable, "-c", ""))
    monkeypatch.setattr(tune.judge, "replay", lambda run, keep_default: replayed(made))
    found = gdntune.tune([CONTRACT], [1, 4], heads=(1, 1), device="cpu", budget_s=30)
    assert found.tables == (before,) and (found.timed, found.wanted) == (2, 2)
    assert {r.when for r in table.load(before).rules} == {CONTRACT, other}
    assert [r.when for r in table.load(f"{before}.before").rules] == [other]
    assert "given table" in own_runtime.bind(CONTRACT).choice(1).why
    assert "user's table" in dispatch.Runtime(own_runtime.device).bind(CONTRACT).choice(1).why


def gdntune_replace(value, **changes):
    """A copy of a struct."""
    import msgspec

    return msgspec.structs.replace(value, **changes)


def replayed(made):
    """What replaying a journal gives, of which only the table counts here."""
    from unittest import mock

    return mock.create_autospec(Replayed, instance=True, table=made)


def test_a_budget_ends_the_sweep(own_runtime, monkeypatch, tmp_path, request):
    """A sweep that is at it when the budget ends is told to stop, and nothing of it is left; where
    no cell was timed the error says what it was at. Fault: a host that ignores SIGINT, as what a
    script starts in the background does, had a sweep that ignored it too, and waited in vain.
    """
    mark = tmp_path / "ended"
    code = tune.HEEDS_SIGINT + (
        "import pathlib, sys, time\nprint('compiling', flush=True)\n"
        f"try:\n    time.sleep(600)\nexcept KeyboardInterrupt:\n    pathlib.Path({str(mark)!r}).touch()"
    )
    monkeypatch.setattr(tune, "COMMAND", (sys.executable, "-c", code))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    started = time.monotonic()
    with pytest.raises(ToolMissing, match="no cell was timed within 10 s: compiling"):
        gdntune.tune([CONTRACT], [1], heads=(1, 1), device="cpu", budget_s=10)
    assert mark.exists() and time.monotonic() - started < 300
    with pytest.raises(UnsupportedProblem, match="HV must be a multiple of H"):
        gdntune.tune([CONTRACT], [1], heads=(2, 3), device="cpu")
    with pytest.raises(UnsupportedProblem, match="0 cells in 60.0 s"):
        gdntune.tune([], [1], heads=(1, 1), device="cpu")


@pytest.mark.parametrize(
    "now, default, status",
    [(10.5, 11, "OK"), (9.5, 9.4, "OK"), (12, 13, "DRIFT"), (8, 9, "DRIFT"), (10, 9, "REGRESSED")],
)
def test_what_a_cell_is_called(now, default, status):
    """Off the table's time by more than 10% it drifted; beaten by the default by more than 3% it
    regressed.
    """
    cell = table_check.CellCheck(
        "UNTIMED", PROBLEMS[0], "a", 10.0, now, "b", default, {"timer": "graph", "l2": "chain"}
    )
    found = table_check.judged(cell)
    assert found.status == status
    at = f"{status}: {PROBLEMS[0].key()}, l2 chain, timer graph"
    assert str(found).startswith(f"{at}: a takes {now:.4g} us")


def test_a_table_is_checked_by_its_cells(given, own_runtime):  # noqa: F811
    """A few of the cells that a table has evidence of are timed, compiled first where they are not;
    without a table, or evidence, it is said. Fault: "compile it first", in a process that had not.
    """
    with pytest.raises(UnsupportedProblem, match="no table for gdn_decode"):
        gdntune.check_table("cpu")
    own_runtime.use(given)
    with pytest.raises(UnsupportedProblem, match="which has evidence of 0"):
        gdntune.check_table("cpu")
    made = table.load(given)
    rule = made.rules[0]
    seen = table.Evidence(4, 5.0, 5.0, 4.0, 6.0, 9, 0.0)
    intervals = (gdntune_replace(rule.intervals[0], evidence=(seen,)), rule.intervals[1])
    table.save(gdntune_replace(made, rules=(gdntune_replace(rule, intervals=intervals),)), given)
    own_runtime.use(given)
    (found,) = gdntune.check_table("cpu", cells=3)
    assert found.problem == Problem(CONTRACT, 1, 1, 4) and found.table_us == 5.0
    assert found.variant == rule.intervals[0].variant and min(found.now_us, found.default_us) > 0
    assert found.policy == made.policy


def test_a_tables_cells_are_timed_as_their_rules_were(given, own_runtime, monkeypatch):  # noqa: F811
    """Each under its rule's own policy, in a session of that; one that cannot be had is not judged.
    What calls without dependent launch take is among them. Fault: all by the table's policy, which
    said DRIFT of a chain's times.
    """
    made = table.load(given)
    first, last = made.variants
    policies = (
        {"timer": "cpu", "l2": "chain"}, {"timer": "graph", "l2": "chain"}, {"timer": "sundial"},
    )  # fmt: skip

    def interval(variant, us):
        return table.Interval(1, None, variant, (table.Evidence(4, us, us, us, us, 9, 0.0),))

    rules = [
        table.Rule(CONTRACT.replace(V=V), (interval(first, 5.0),), policy=policy)
        for V, policy in zip((32, 64, 96), policies, strict=True)
    ]
    rules.append(
        table.Rule(CONTRACT.replace(mode="frozen"), (interval(first, 5.0),), alone=(interval(last, 6.0),))
    )  # fmt: skip
    table.save(gdntune_replace(made, rules=tuple(rules)), given)
    own_runtime.use(given)
    timed, real = [], table_check.time_cell

    def time_cell(session, problem, *given, **named):
        timed.append((problem.contract, session.timer.policy.l2, session.chained is not None))
        return real(session, problem, *given, **named)

    monkeypatch.setattr(table_check, "time_cell", time_cell)
    found = gdntune.check_table("cpu", cells=9)
    frozen = CONTRACT.replace(mode="frozen")
    assert sorted(timed, key=str) == sorted(
        [(frozen, "cold-clean", False)] * 2 + [(CONTRACT, "chain", True)], key=str
    )
    chosen = [(c.problem.contract, c.variant, c.table_us) for c in found if c.policy == made.policy]
    assert chosen == [(frozen, first, 5.0), (frozen, last, 6.0)]
    by_contract = {c.problem.contract.V: c for c in found if c.policy != made.policy}
    assert [by_contract[V].policy for V in (32, 64, 96)] == list(policies)
    assert by_contract[32].status != "UNTIMED" and "l2 chain, timer cpu" in str(by_contract[32])
    for V, why in ((64, "timer='graph' on cpu"), (96, "Invalid enum value 'sundial'")):
        cell = by_contract[V]
        assert (cell.status, cell.now_us, cell.default_us) == ("UNTIMED", None, None)
        assert why in cell.reason and str(cell).endswith(cell.reason)


def test_a_throttled_device_leaves_cells_untimed(given, own_runtime, monkeypatch):  # noqa: F811
    """Its times would say DRIFT of a table that is right."""
    made = table.load(given)
    seen = table.Evidence(4, 5.0, 5.0, 4.0, 6.0, 9, 0.0)
    rule = made.rules[0]
    intervals = (gdntune_replace(rule.intervals[0], evidence=(seen,)), rule.intervals[1])
    table.save(gdntune_replace(made, rules=(gdntune_replace(rule, intervals=intervals),)), given)
    own_runtime.use(given)
    monkeypatch.setattr(measure, "throttled", lambda clocks: True)
    (found,) = gdntune.check_table("cpu")
    assert found.status == "UNTIMED" and found.reason == "nothing could be timed: throttled"


RANK = """
import sys, torch.distributed as dist, gdntune
rank, port, table = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{port}", rank=rank, world_size=2)
if table:
    gdntune.load_table(table)
try:
    print(gdntune.check_ranks("cpu"))
except gdntune.UnsupportedProblem as e:
    print("differ:", e)
dist.destroy_process_group()
"""


@pytest.mark.parametrize("alike", [True, False])
def test_ranks_agree_on_their_tables(alike, given, tmp_path):  # noqa: F811
    """Two ranks of a process group: the same hash, or an error on each that names both."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(n), str(tmp_path / "port"), str(given) if alike or n else ""],
            stdout=subprocess.PIPE, text=True,
        )
        for n in range(2)
    ]  # fmt: skip
    said = [r.communicate(timeout=300)[0].strip() for r in ranks]
    assert said[0] == said[1]
    if alike:
        assert len(said[0]) == 16
    else:
        assert said[0].startswith("differ: the ranks' tables differ: rank 0 has ")


def test_vllms_form_of_a_table(given):  # noqa: F811
    """A file a contract; of each interval the first batch size in it."""
    made = table.load(given)
    ((name, text),) = vllm_json(made, 8).items()
    assert name.startswith("gdn_decode,tokens=1,K=64") and name.endswith(".json")
    found = json.loads(text)
    assert list(found) == ["1", "13"]  # 100 work units of 8 heads
    assert found["13"] == {"kernel": "cpu_recurrent", **list(made.variants.values())[1].knobs}
    assert Path(name).name == name


@pytest.mark.parametrize("name", ["tune", "check_table"])
def test_without_the_sweep_extra(name):
    """In an engine's install of the core, what tuning needs is named with the extra that has it."""
    code = (
        f"import sys; sys.modules['yaml'] = None\nimport gdntune\n"
        f"try:\n    gdntune.{name}\nexcept gdntune.ToolMissing as e:\n    print(e)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"gdntune.{name} needs yaml: pip install 'gdntune[sweep]'\n"
