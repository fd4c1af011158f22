"""What runs in the timing process: shared tensors, turns of a walk through the pool, leaders, time
limits.
"""

import gc
import itertools
import random
import weakref

import msgspec
import pytest
import torch

from gdntune import kernels
from gdntune.device import arch, graphs
from gdntune.errors import MeasurementError, UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.objects import build
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract, Problem
from gdntune.timing import Policy
from gdntune.tuning import attempts as trials
from gdntune.tuning import chain, measure, session, worker
from gdntune.tuning.config import Search
from gdntune.tuning.executors import Crashed
from gdntune.tuning.measure import CellResult, CellTiming, time_cell
from gdntune.tuning.session import Calls, Session

CONTRACT = Contract(K=64, V=64, state_dtype="fp32")
PROBLEM = Problem(CONTRACT, 3, 1, 2)
SEARCH = Search(screen_rounds=4, keep=2, final_rounds=12, max_cell_seconds=5.0)


@pytest.fixture(scope="module")
def variants():
    """A store with four decode variants and two floors of a small contract."""
    device, store = arch.detect("cpu"), Store()
    decode = kernels.variants(CONTRACT, device)[:4]
    floor = kernels.variants(CONTRACT, device, "floor")[:2]
    objects = [
        (object_spec(kernels.get(v.kernel), CONTRACT, v, device), kernels.get(v.kernel).compiler)
        for v in (*decode, *floor)
    ]
    assert all(b.ok for b in build.compile_objects(objects, store))
    return store, list(decode), list(floor)


@pytest.fixture(scope="module")
def twelve():
    """A store with twelve decode variants of one kernel."""
    device, store = arch.detect("cpu"), Store()
    kernel = kernels.get(kernels.variants(CONTRACT, device)[0].kernel)
    decode = [v for v in kernels.variants(CONTRACT, device) if v.kernel == kernel.name][:12]
    pairs = [(object_spec(kernel, CONTRACT, v, device), kernel.compiler) for v in decode]
    assert all(b.ok for b in build.compile_objects(pairs, store))
    return store, decode


def a_session(store, l2="warm"):
    """A session on this CPU."""
    return Session(arch.detect("cpu"), 0, store, Policy(l2=l2))


def test_a_cell_keeps_its_leaders_and_its_default(variants):
    """All variants are screened, the leaders and decode[0], the default's choice, are timed to the
    end, floors beside them.
    """
    store, decode, floor = variants
    result = time_cell(a_session(store), PROBLEM, decode, floor, SEARCH, {decode[0].id})
    finals = [t for t in result.timed if t.final_us]
    assert all(len(t.screen_us) >= 3 for t in result.timed)
    assert {len(t.final_us) for t in finals} == {12}
    assert {t.variant.id for t in finals if t.role == "floor"} == {v.id for v in floor}
    assert decode[0].id in {t.variant.id for t in finals}
    assert 2 <= sum(t.role == "decode" for t in finals) <= 3
    assert result.timing.stop == "12 final rounds"


def test_what_is_judged_is_timed_to_the_end(variants):
    """The variants of `always` have final samples, however slow they look."""
    store, decode, floor = variants
    one = msgspec.structs.replace(SEARCH, keep=1)
    always = {v.id for v in decode[-3:]}
    result = time_cell(a_session(store), PROBLEM, decode, floor, one, always)
    finals = {t.variant.id for t in result.timed if t.final_us and t.role == "decode"}
    assert always <= finals


def test_all_are_timed_to_the_end_where_as_many_are_kept(twelve):
    """Fault: `keep` of more than a third of the variants kept that third, so a sweep meant to be
    exhaustive was none.
    """
    store, decode = twelve
    every = msgspec.structs.replace(SEARCH, screen_rounds=5, keep=99)
    result = time_cell(a_session(store), PROBLEM, decode, [], every)
    assert {len(t.final_us) for t in result.timed} == {12}


@pytest.mark.parametrize(("rounds", "looks"), [(2, {2}), (4, {3, 4}), (6, {3, 6}), (11, {6, 11})])
def test_the_screen_has_two_looks(twelve, rounds, looks):
    """All variants have half of the screen's samples, three at least; those that go on have all of
    them.
    """
    store, decode = twelve
    result = time_cell(
        a_session(store), PROBLEM, decode, [], msgspec.structs.replace(SEARCH, screen_rounds=rounds)
    )
    assert {len(t.screen_us) for t in result.timed} == looks
    assert all(len(t.screen_us) == rounds for t in result.timed if t.final_us)


def test_a_device_that_stays_throttled_times_nothing(variants, monkeypatch):
    """Fault: a cell whose times could not count was timed to the end. It says what the clocks were."""
    hot = arch.Clocks(sm_mhz=990, event_reasons=("sw_thermal_slowdown",))
    store, decode, floor = variants
    monkeypatch.setattr(measure, "settled", lambda index: hot)
    result = time_cell(a_session(store), PROBLEM, decode, floor, SEARCH)
    assert result == CellResult([], CellTiming("throttled", 0.0, hot, hot))
    assert result.timing.throttled == "sw_thermal_slowdown (SMs at 990 MHz)"


def test_a_cell_ends_with_its_time(variants):
    """max_cell_seconds leaves fewer rounds, and the stop rule says so."""
    store, decode, floor = variants
    result = time_cell(
        a_session(store),
        PROBLEM,
        decode,
        floor,
        msgspec.structs.replace(SEARCH, final_rounds=10**6, max_cell_seconds=0.2),
    )
    assert result.timing.stop == "max_cell_seconds=0.2"
    assert 20 <= max(len(t.final_us) for t in result.timed) < 10**6


@pytest.mark.parametrize("room", [True, False])
def test_final_rounds_on_several_sets_of_tensors(variants, monkeypatch, room):
    """Rounds are shared out among placements, each with tensors elsewhere while there is room to
    hold the earlier ones.
    """
    store, decode, floor = variants
    mine = a_session(store)
    if not room:
        mine.device = msgspec.structs.replace(mine.device, memory_bytes=1)
    held, addresses = [], []
    calls = mine.calls

    def watched(problem, role, found, **options):
        made = calls(problem, role, found, **options)
        if role == "decode":
            held.append(weakref.ref(made.case))
            addresses.append(made.case.state.data_ptr())
        return made

    monkeypatch.setattr(mine, "calls", watched)
    placed = msgspec.structs.replace(SEARCH, placements=5)
    result = time_cell(mine, PROBLEM, decode, floor, placed)
    assert len(addresses) == 5 and (not room or len(set(addresses)) == 5)
    assert {len(t.final_us) for t in result.timed} == {0, 12}
    gc.collect()
    assert all(case() is None for case in held)


def test_more_placements_than_rounds():
    """Each has a round at least, and none is lost."""
    assert (
        measure._shares(12, 5) == [2, 2, 3, 2, 3]
        and measure._shares(3, 8) == [1, 1, 1]
        and measure._shares(7, 1) == [7]
    )


def test_rotate_walks_through_the_pool(variants):
    """Fault: one buffer timed again and again is the cache: under rotate each round takes other
    slots, kernels and floors alike.
    """
    store, decode, _floor = variants
    mine = a_session(store, "rotate")
    calls = mine.calls(PROBLEM, "decode", decode[:1])
    turns = calls.case.state.shape[0] // PROBLEM.B
    assert turns > 1
    changed = []
    for r in range(turns):
        before = calls.case.state.clone()
        calls.calls[0](r)
        changed.append(
            frozenset((calls.case.state != before).flatten(1).any(1).nonzero().flatten().tolist())
        )
    assert sorted(slot for turn in changed for slot in turn) == list(
        range(calls.case.state.shape[0])
    )
    states = {a[0].data_ptr() for a in session._floor_arguments(PROBLEM, turns, "cpu")}
    assert len(states) == turns
    # a CUDA graph of 64 calls then walks through the whole pool a whole number of times
    assert 64 % turns == 0


def test_rotate_gives_each_timed_call_other_slots(variants):
    """Fault: in a round all variants took the same slots, so that all but the first found their
    states in the cache.
    """
    store, decode, _floor = variants
    mine = a_session(store, "rotate")
    calls = mine.calls(PROBLEM, "decode", decode[:3])
    seen = []

    def watched(call):
        def run(turn):
            before = calls.case.state.clone()
            call(turn)
            seen.append(
                frozenset(
                    (calls.case.state != before).flatten(1).any(1).nonzero().flatten().tolist()
                )
            )

        return run

    turns = len(calls.cases)
    mine.timer.measure([watched(call) for call in calls.calls], rounds=turns, warmup=0)
    assert len(seen) == 3 * turns
    assert all(len(set(seen[i : i + turns])) == turns for i in range(2 * turns))


def test_rotate_needs_a_pool(variants):
    """Without slots there is nothing to walk through, and a warm time would be reported as cold."""
    store, decode, _ = variants
    problem = msgspec.structs.replace(PROBLEM, contract=CONTRACT.replace(pool=False))
    with pytest.raises(UnsupportedProblem, match="rotate.*pool=True"):
        a_session(store, "rotate").calls(problem, "decode", decode[:1])


def test_states_are_restored_before_the_final_rounds(variants):
    """The samples that decide start from the state that was made, not from one that the screen
    decayed.
    """
    store, decode, _ = variants
    calls = a_session(store).calls(PROBLEM, "decode", decode[:1])
    kept = calls.case.state.clone()
    for r in range(5):
        calls.calls[0](r)
    assert not torch.equal(calls.case.state, kept)
    calls.restore()
    assert torch.equal(calls.case.state, kept)
    assert calls.finite()


def test_a_chain_has_layers_of_its_own(variants):
    """Under chain a call's argument is its layer, kernels and floors alike; restore and finite see
    every layer.
    """
    store, decode, floor = variants
    mine = a_session(store, "chain")
    calls = mine.calls(PROBLEM, "decode", decode[:1])
    assert len(calls.cases) == 4
    for layer in range(4):
        before = [c.state.clone() for c in calls.cases]
        calls.calls[0](layer)
        assert [c.state.equal(kept) for c, kept in zip(calls.cases, before, strict=True)] == [
            i != layer for i in range(4)
        ]
        calls.cases[layer].state.fill_(float("nan"))
        assert not calls.finite()
        calls.restore()
        assert all(c.state.equal(calls.kept) for c in calls.cases)
        assert calls.finite()
    calls.cases[2].output.fill_(float("inf"))
    assert not calls.finite()
    held = {a[0].data_ptr() for a in session._floor_arguments(PROBLEM, 4, "cpu")}
    assert len(held) == 4
    assert len(mine.calls(PROBLEM, "floor", floor).calls) == len(floor)
    assert mine.chained.chain.cases is calls.cases, "the floor stands in the same chain"


def test_a_cell_in_a_chain(variants, monkeypatch):
    """All stages of a cell work under chain, and the next cell lets go of this one's pools first."""
    monkeypatch.setattr(measure, "LEAST_KEPT", 2)
    store, decode, floor = variants
    mine = a_session(store, "chain")
    result = time_cell(mine, PROBLEM, decode, floor, SEARCH, {decode[0].id})
    finals = {t.variant.id: t.final_us for t in result.timed if t.final_us}
    assert decode[0].id in finals and {v.id for v in floor} <= finals.keys()
    assert {len(us) for us in finals.values()} == {12}
    first = weakref.ref(mine.chained.chain)
    seen = []
    made = chain.Chain.__init__

    def watched(self, *args):
        gc.collect()
        seen.append(first())
        made(self, *args)

    monkeypatch.setattr(chain.Chain, "__init__", watched)
    mine.calls(PROBLEM, "decode", decode[:1])
    assert seen == [None]


def test_a_cell_that_fails_lets_go_of_its_tensors(variants, monkeypatch):
    """Fault: who sends the error on holds its traceback, which kept the pools of a cell, up to 40%
    of a GPU, while it was timed again.
    """
    store, decode, floor = variants
    mine = a_session(store, "chain")
    monkeypatch.setattr(worker, "_SESSION", [mine])
    start = worker.Start(mine.device, 0, str(store.root), (), mine.timer.policy)
    monkeypatch.setattr(Calls, "finite", lambda self: False)
    with pytest.raises(MeasurementError, match="not finite") as held:
        worker.time_task(start, PROBLEM, decode, floor, SEARCH)
    first = weakref.ref(mine.chained.chain)
    mine.chained.chain = None
    assert first() is None, held.value


def test_rounds_go_on_until_the_ratios_are_known(monkeypatch):
    """Fault: rounds were as many as the config says, however wide the ratio's interval was. They go
    on until it is narrow or the cell's time ends, and that is said.
    """
    clock = itertools.count(step=1.0)
    monkeypatch.setattr(measure.time, "perf_counter", lambda: next(clock))
    chance = random.Random(0)

    def turn():
        return [[chance.gauss(us, 1.0) for _ in range(30)] for us in (10.0, 12.0)]

    found, widest, said = measure._narrowed(turn(), 0, 0.02, turn, 1e9)
    assert widest <= 0.02 and len(found[0]) == len(found[1]) > 30
    assert said == f"intervals within 2.0% after {len(found[0])} samples"
    found, widest, said = measure._narrowed(turn(), 0, 0.001, turn, next(clock) + 6.0)
    assert widest > 0.001 and 30 < len(found[0]) < 150
    assert said.startswith(f"intervals within {widest:.1%} when the cell's time ended")
    # A GPU waits while they are worked out: not after each turn, and 11 times here, not 149.
    looks = []
    of = measure.widest_interval
    monkeypatch.setattr(measure, "widest_interval", lambda *a: looks.append(0) or of(*a))
    found, widest, said = measure._narrowed(turn(), 0, 0.004, turn, 1e9)
    assert 0.003 < widest <= 0.004 and len(found[0]) > 30 * 20 and len(looks) <= 12
    few = [[1.0] * 3, [2.0] * 3]
    assert measure._narrowed(few, 0, 0.1, turn, 1e9) == (
        few, None, "3 samples are too few for intervals",
    )  # fmt: skip


def test_a_bench_narrows_and_a_sweeps_first_samples_do_not(monkeypatch):
    """Where the choice was made before, its ratios are what is asked for; what is timed again has
    tensors of its own.
    """
    asked = []

    class Worker:
        name = "cpu"

        def run(self, function, *arguments, timeout):
            asked.append(arguments[-2:])
            return Crashed("failed", "")

    for fields, want in (
        ({}, (0, False)),
        ({"choice": "a"}, (0, True)),
        ({"choice": "a", "purpose": "evidence"}, (trials.FRESH_SEED, True)),
    ):
        trials._measured(Worker(), trials.CellJob(PROBLEM, [], [], SEARCH, **fields))
        assert asked[-1] == want


def test_memory_of_others_is_left_alone_once_a_capture_failed(monkeypatch):
    """A worker gives its cached memory back with its turn; after a capture that failed torch would
    ask the graph that is gone.
    """
    did = []
    monkeypatch.setattr(graphs, "_FAILED", [])
    monkeypatch.setattr("torch.cuda.synchronize", lambda: did.append("waited"))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: did.append("emptied"))
    worker._leave()
    assert did == ["waited", "emptied"]
    monkeypatch.setattr(graphs, "_FAILED", [object()])
    worker._leave()
    assert did == ["waited", "emptied", "waited"]


class Steps:
    """A timer of calls that say themselves how long they take."""

    def measure(self, calls, rounds, warmup=1):
        return [[call(0) for _ in range(warmup + rounds)][warmup:] for call in calls]


def test_a_ring_is_screened_in_whole_cycles():
    """Fault: three rounds of a first look at rings of corrections were the three steps that fold
    nothing, and what is slow where it folds led.
    """
    folds = itertools.cycle((9.0, 1.0, 1.0, 1.0))
    calls = [lambda _: next(folds), lambda _: 2.0]
    search = Search(screen_rounds=6, keep=1)
    for cycle, leader, samples in ((4, 1, 2), (1, 0, 6)):
        groups = [measure.Group(range(2), 1, [], True, cycle)]
        screen = measure._screened(Steps(), calls, groups, search)
        assert [len(us) for us in screen] == [samples, samples]
        full = measure._in_cycles(search.screen_rounds, groups) // cycle
        assert measure._leaders(groups[0], screen, full) == [leader]


def test_those_without_dependent_launch_have_leaders_of_their_own():
    """Fault: the leaders of a chain were all with it, and what calls without it should take was
    nobody's choice. Where there is one kind alone, leaders are the best of all.
    """
    search = Search(screen_rounds=6, keep=2)
    mixed = [
        Variant("recurrent", str(i), {"pdl": "first" if i < 20 else "none"}) for i in range(40)
    ]
    assert measure.apart(mixed) == list(range(20, 40))
    assert measure.apart(mixed[:20]) == measure.apart(mixed[20:]) == []
    calls = [lambda _, us=float(i): us for i in range(40)]
    for variants, leaders, again in ((mixed, [0, 1, 20, 21], 21), (mixed[20:], [0, 1], 8)):
        n = len(variants)
        groups = [measure.Group(range(n), 2, [], True, apart=measure.apart(variants))]
        screen = measure._screened(Steps(), calls[:n], groups, search)
        assert sum(len(us) == 6 for us in screen) == again
        assert measure._leaders(groups[0], screen, 6) == leaders
