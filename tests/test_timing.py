"""Timers, their order, segments of records, statistics. CUPTI is a stand-in here; tests/gpu has the
real one.
"""

import gc
import statistics
import sys
import types

import pytest
from fakes.recorder import FakeRecorder
from hypothesis import given
from hypothesis import strategies as st

from gdntune import timing
from gdntune.device import arch, graphs
from gdntune.device import cupti as cupti_records
from gdntune.device.cupti import segments_us
from gdntune.errors import MeasurementError, ToolMissing, UnsupportedProblem
from gdntune.timing import Policy, summary, tie

H100 = arch.target("sm_90a")
CPU = arch.Device("cpu", "CPU", "x86_64", 2, 32 << 20, 1 << 34)
MARK = "void gdntune_flush_kernel<int>"

microseconds = st.floats(0, 1e6, allow_nan=False)


class FakeGpu:
    """A device whose kernels take stated times, and a source of the records that CUPTI would give
    of them.
    """

    def __init__(self):
        self.now, self.records, self.log, self.recording = 1000, [], [], False

    def launch(self, name, us):
        if self.recording:
            self.records.append((self.now, self.now + round(us * 1000), name))
        self.now += round(us * 1000) + 500

    def start(self):
        self.log.append("start")
        self.recording, self.records = True, []

    def stop(self):
        self.log.append(f"stop {len(self.records)}")
        self.recording = False
        return self.records[::-1]  # buffers come back in any order

    def synchronize(self):
        self.log.append("sync")


class FakeCupti(types.SimpleNamespace):
    """The functions of cupti-python that are used; `pending` is delivered at the next flush."""

    class cuptiError(Exception):
        pass

    def __init__(self, enable_error=None):
        super().__init__(
            ActivityKind=types.SimpleNamespace(CONCURRENT_KERNEL=10, MEMCPY=1, MEMSET=2)
        )
        self.pending, self.enabled, self.completed, self.enable_error = (
            [],
            set(),
            None,
            enable_error,
        )

    def activity_register_callbacks(self, requested, completed):
        assert self.completed is None, "CUPTI takes callbacks once a process"
        assert requested() == (8 << 20, 0)
        self.completed = completed

    def activity_enable(self, kind):
        if self.enable_error:
            raise self.enable_error
        self.enabled.add(kind)

    def activity_disable(self, kind):
        self.enabled.discard(kind)

    def activity_flush_all(self, flag):
        assert flag == 1
        self.completed(self.pending)
        self.pending = []


def activity(kind, start, end, **fields):
    """A CUPTI record."""
    return types.SimpleNamespace(kind=kind, start=start, end=end, **fields)


@pytest.fixture
def fake_cupti(monkeypatch):
    """Installs a FakeCupti as cupti-python, and a probe that leaves one record in it."""

    def install(cupti, probed=1):
        package = None if cupti is None else types.SimpleNamespace(cupti=cupti)
        monkeypatch.setitem(sys.modules, "cupti", package)
        monkeypatch.setattr(cupti_records, "_recorder", None)
        records = [activity(10, 5, 9, name="probe")] * probed
        monkeypatch.setattr(cupti_records, "_probe", lambda: cupti.pending.extend(records))
        return cupti

    return install


@given(n=st.integers(0, 12), rounds=st.integers(0, 9))
def test_mirrored(n, rounds):
    """Each call has each round once; over a pair of rounds all calls stand at the same mean
    position.
    """
    order = list(timing.mirrored(n, rounds))
    assert sorted(order) == [(i, r) for i in range(n) for r in range(rounds)]
    assert [r for _, r in order] == sorted(r for _, r in order)
    for pair in range(rounds // 2):
        position = dict.fromkeys(range(n), 0)
        for place, (i, _) in enumerate(order[2 * pair * n : 2 * (pair + 1) * n]):
            position[i] += place
        assert len(set(position.values())) <= 1


def test_segments_of_several_kernels():
    """A call's time is its first start to its last end, also where kernels overlap and records come
    in disorder.
    """
    records = [
        (100, 200, MARK),
        (300, 900, "a"),
        (500, 700, "b"),
        (1000, 1100, MARK),
        (1200, 1300, "a"),
        (1400, 3200, "c"),
    ]
    assert segments_us(records, 2) == segments_us(records[::-1], 2) == [0.6, 2.0]


def test_segments_leave_out_the_fill():
    """With two markers a call, what runs between the first and the second (the fill) counts to no
    call.
    """
    records = [
        *[(100, 200, MARK), (300, 90_000, "fill"), (90_100, 90_200, MARK), (91_000, 92_000, "a")],
        *[
            (93_000, 93_100, MARK),
            (93_200, 180_000, "fill"),
            (180_100, 180_200, MARK),
            (181_000, 184_000, "fill"),
        ],
    ]
    assert segments_us(records, 2, markers=2) == [1.0, 3.0]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], "gave 0 records of gdntune_flush where 2 were launched"),
        ([(100, 200, MARK), (300, 400, "a")], "gave 1 records"),
        (
            [
                (100, 200, MARK),
                (300, 400, "a"),
                (500, 600, MARK),
                (700, 800, MARK),
                (900, 950, "a"),
            ],
            "gave 3 records",
        ),
        ([(100, 200, MARK), (300, 400, "a"), (500, 600, MARK)], "call 1 of 2 left no CUPTI record"),
        ([(100, 200, MARK), (500, 600, MARK), (700, 800, "a")], "call 0 of 2 left no CUPTI record"),
        (
            [(100, 200, MARK), (400, 300, "a"), (500, 600, MARK), (700, 800, "a")],
            "'a' the times 400 to 300",
        ),
        ([(0, 0, "a"), (100, 200, MARK), (500, 600, MARK), (700, 800, "a")], "could not time it"),
    ],
    ids=[
        "nothing",
        "lost marker",
        "extra marker",
        "empty last",
        "empty first",
        "end before start",
        "zero",
    ],
)
def test_segments_refuse(records, said):
    """Lost, extra and impossible records are errors, never times."""
    with pytest.raises(MeasurementError, match=said):
        segments_us(records, 2)


@pytest.mark.parametrize("markers", [1, 2])
@pytest.mark.parametrize("batch", [1024, 5])
def test_cupti_timer(monkeypatch, markers, batch):
    """Each sample lands at its call and round, whatever the order, the batches and the flush;
    warm-up leaves none.
    """
    gpu = FakeGpu()
    monkeypatch.setattr(timing, "BATCH", batch)

    def before():
        if markers == 2:
            gpu.launch(MARK, 1)
            gpu.launch("fill", 80)
        gpu.launch(MARK, 1)

    def call(i):
        def run(turn):
            gpu.launch(f"call {i}", 100 * i + turn + 1)
            if i == 2:
                gpu.launch("second kernel", 1)

        return run

    timer = timing.CuptiTimer(Policy("cupti", "warm"), before, gpu, gpu.synchronize, markers)
    samples = timer.measure([call(i) for i in range(3)], rounds=4)
    turn = {at: turn for turn, at in enumerate(timing.mirrored(3, 4))}
    assert samples == [
        [100 * i + turn[i, r] + 1 + (1.5 if i == 2 else 0) for r in range(4)] for i in range(3)
    ]
    # the device is idle when a recording starts and ends: nothing of before is in it, nothing of it
    # is missing
    steps = [word.split()[0] for word in gpu.log]
    assert steps == ["sync", "start", "sync", "stop"] * -(-12 // batch)


def test_cupti_timer_stops_recording_when_a_call_fails():
    """A call's own error comes through and recording ends."""
    gpu = FakeGpu()
    timer = timing.CuptiTimer(
        Policy("cupti", "warm"), lambda: gpu.launch(MARK, 1), gpu, gpu.synchronize
    )

    def call(r):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timer.measure([call], rounds=1, warmup=0)
    assert not gpu.recording and gc.isenabled()


def test_recorder(fake_cupti):
    """Kernels, copies and fills are recorded between start and stop, by callbacks registered once."""
    cupti = fake_cupti(FakeCupti())
    recorder = cupti_records.recorder()
    assert cupti_records.recorder() is recorder
    cupti.pending = [activity(10, 1, 2, name="of earlier work")]
    recorder.start()
    assert cupti.enabled == {10, 1, 2}
    cupti.pending = [
        activity(10, 3, 4, name="k"),
        activity(2, 5, 6),
        activity(99, 7, 8, name="other"),
        activity(1, 8, 9),
    ]
    assert recorder.stop() == [(3, 4, "k"), (5, 6, ""), (8, 9, "")]
    assert not cupti.enabled


def test_auto_is_cupti_where_it_works(fake_cupti):
    """On CUDA `auto` is CUPTI, without a note."""
    fake_cupti(FakeCupti())
    assert Policy().resolve(H100) == (Policy("cupti", "cold-clean"), None)
    assert Policy("cupti", "warm").resolve(H100) == (Policy("cupti", "warm"), None)


@pytest.mark.parametrize(
    ("cupti", "probed", "remedy"),
    [
        (
            FakeCupti(FakeCupti.cuptiError("ERROR_INSUFFICIENT_PRIVILEGES (35)")),
            1,
            "NVreg_RestrictProfilingToAdminUsers=0",
        ),
        (FakeCupti(FakeCupti.cuptiError("ERROR_INSUFFICIENT_PRIVILEGES (35)")), 1, "CAP_SYS_ADMIN"),
        (FakeCupti(RuntimeError("libcupti.so.13 not found")), 1, "of one major version"),
        (FakeCupti(), 0, "end the other profiler"),
        (None, 0, "pip install 'cupti-python"),
    ],
    ids=["no permission", "no permission: capability", "no library", "no records", "no binding"],
)
def test_without_cupti(fake_cupti, cupti, probed, remedy):
    """Without CUPTI `auto` takes events and says why; asked for by name, it is refused. Both name
    the remedy.
    """
    fake_cupti(cupti, probed)
    policy, note = Policy().resolve(H100)
    assert policy == Policy("events", "cold-clean")
    assert remedy in note and "launch gaps included" in note
    with pytest.raises(ToolMissing, match="or use --timer events") as error:
        Policy("cupti").resolve(H100)
    assert remedy in str(error.value)
    assert Policy("events").resolve(H100) == (Policy("events"), None)
    assert Policy("graph").resolve(H100) == (Policy("graph"), None)


def test_a_chain_is_a_graph(monkeypatch):
    """On CUDA a chain is timed by graphs alone and asks nothing of CUPTI; on the CPU by the host's
    clock.
    """
    monkeypatch.setattr(cupti_records, "fault", lambda: pytest.fail("CUPTI was asked"))
    for timer in ("auto", "graph"):
        assert Policy(timer, "chain").resolve(H100) == (Policy("graph", "chain"), None)
    assert Policy(l2="chain").resolve(CPU) == (Policy("cpu", "chain"), None)
    with pytest.raises(
        UnsupportedProblem,
        match="timer='cupti' on cuda.*under l2='chain': expected one of auto, graph$",
    ):
        Policy("cupti", "chain").resolve(H100)
    with pytest.raises(
        UnsupportedProblem, match="timer='graph' on cpu.*expected one of auto, cpu$"
    ):
        Policy("graph", "chain").resolve(CPU)
    for device in (H100, CPU):
        with pytest.raises(UnsupportedProblem, match="chain.make_chain_timer makes its timer"):
            timing.make_timer(device, Policy(l2="chain"))


def test_policy_refuses():
    """A timer that the device cannot have, and an unknown L2 policy, are refused with what is
    accepted.
    """
    assert Policy().resolve(CPU) == (Policy("cpu"), None)
    with pytest.raises(UnsupportedProblem, match="timer='cupti' on cpu.*expected one of auto, cpu"):
        Policy("cupti").resolve(CPU)
    with pytest.raises(UnsupportedProblem, match="expected one of auto, cupti, events, graph"):
        Policy("cpu").resolve(H100)
    with pytest.raises(UnsupportedProblem, match="cold-clean, cold-dirty, rotate, warm, chain"):
        Policy(l2="hot").resolve(CPU)


def test_reader_is_asked_for():
    """On CUDA a policy that needs a reader says so before it touches the device."""
    with pytest.raises(UnsupportedProblem, match="reader=None with timer=events and l2=cold-clean"):
        timing.make_timer(H100, Policy("events", "cold-clean"))


@pytest.mark.parametrize(
    ("device", "l2", "mib"),
    [
        *[
            (H100, "cold-clean", 128),
            (H100, "cold-dirty", 256),
            (H100, "rotate", 0),
            (H100, "warm", 0),
        ],
        *[(arch.target("sm_100a"), "cold-clean", 252), (arch.target("sm_100a"), "cold-dirty", 504)],
        (arch.Device("cuda", "odd", "sm_90a", 132, (80 << 20) + 1, 1 << 36), "cold-clean", 161),
        *[(CPU, "cold-clean", 64), (CPU, "cold-dirty", 128), (CPU, "warm", 0)],
    ],
)
def test_flush_bytes(device, l2, mib):
    """Buffers are twice and four times the last cache; on an H100 those of the published figures."""
    assert timing.flush_bytes(device, l2) == mib << 20


def test_cpu_timer_flushes_before_each_call():
    """The flush comes right before each timed call, in mirrored order, after the warm-up; garbage
    collection is off.

    Fault: a call got its round, so that under rotate the second variant of a round found the slots
        that the first had just read.
    """
    log = []
    calls = [lambda turn, i=i: log.append((i, turn, gc.isenabled())) for i in range(2)]
    samples = timing.CpuTimer(Policy("cpu"), lambda: log.append("flush")).measure(calls, rounds=2)
    assert log[:2] == [(0, 0, True), (1, 0, True)]
    assert log[2::2] == ["flush"] * 4
    assert log[3::2] == [(0, 0, False), (1, 1, False), (1, 2, False), (0, 3, False)]
    assert [len(s) for s in samples] == [2, 2] and all(us >= 0 for s in samples for us in s)
    assert gc.isenabled()


def graph_timer(recorder, n=10):
    """A timer whose flush takes 45 us."""
    return timing.GraphTimer(Policy("graph"), lambda: recorder.spend(45, "flush"), recorder, n)


@pytest.mark.parametrize("batch", [1024, 7])
def test_graph_timer(monkeypatch, batch):
    """A sample is a call's mean in its graph: neither flush nor launch is in it, whatever the
    batches; each graph is made once.
    """
    monkeypatch.setattr(timing, "BATCH", batch)
    recorder = FakeRecorder()
    calls = [lambda turn, i=i: recorder.spend(3 * i + turn, f"call {i}") for i in range(5)]
    samples = graph_timer(recorder).measure(calls, rounds=6)
    assert samples == [[3 * i + 4.5] * 6 for i in range(5)]
    assert recorder.recordings == 6
    names = [[name for _, name in replay] for replay in recorder.replayed]
    assert [n for n in names if "call 2" in n] == [["flush", "call 2"] * 10] * 6
    bases = [i for i, n in enumerate(names) if set(n) == {"flush"}]
    assert set(names[bases[0]]) == {"flush"} and len(names[bases[0]]) == 10
    # a batch begins with one that is not counted; then one amid every eight
    assert bases == ([0, 5, 14, 23, 32] if batch == 1024 else [0, 4, 9, 13, 18, 22, 27, 31, 36, 38])
    assert names[-1] != names[0], (
        "the last replay holds calls: their outputs are looked at afterwards"
    )


def test_graph_timer_drift_is_alike_for_all():
    """A device that slows down steadily gives equal calls nearly equal means."""
    recorder = FakeRecorder(drift=0.5)
    samples = graph_timer(recorder).measure([lambda turn: recorder.spend(9)] * 8, rounds=20)
    means = [statistics.fmean(s) for s in samples]
    assert max(means) - min(means) < 0.01 and abs(statistics.fmean(means) - 9) < 0.05


def test_graph_timer_refuses_a_negative_time():
    """A difference below 0 is noise, and no time: an error that says so, and the graphs are let go.
    Pacing needs no samples.
    """
    recorder = FakeRecorder()
    timer = graph_timer(recorder)
    with pytest.raises(
        MeasurementError,
        match=r"call 1 of 2 took -1.000 us in round 0, by timer graph under cold-clean.*time it",
    ):
        timer.measure([lambda turn: recorder.spend(1), lambda turn: recorder.spend(-1)], rounds=3)
    assert timer._difference._works == timer._difference._base == [] and gc.isenabled()
    assert timer.pace_us(lambda turn: recorder.spend(-1)) > 0
    assert timer._difference._works == []


class FakeCuda:
    """What GraphRecorder uses of torch.cuda. `lost`: every synchronisation fails."""

    def __init__(self, monkeypatch):
        import torch

        monkeypatch.setattr(graphs, "_FAILED", [])
        self.log, self.lost, self.pools, log = [], False, 0, []
        self.log = log
        fake = self

        class Graph:
            def capture_begin(self, pool, capture_error_mode):
                log.append(f"begin {pool} {capture_error_mode}")

            def capture_end(self):
                log.append("end")

            def replay(self):
                log.append("replay")

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                log.append("event")

            def elapsed_time(self, end):
                return 0.25

        class Stream:
            def __enter__(self):
                log.append("enter")

            def __exit__(self, *_):
                log.append("exit")

        def synchronize():
            log.append("sync")
            if fake.lost:
                raise RuntimeError("an illegal memory access was encountered")

        def pool():
            self.pools += 1
            return self.pools

        for name, value in {
            "CUDAGraph": Graph, "Event": Event, "Stream": Stream, "stream": lambda stream: stream, "synchronize": synchronize,
            "graph_pool_handle": pool, "_sleep": lambda cycles: log.append("spin"),
        }.items():  # fmt: skip
            monkeypatch.setattr(torch.cuda, name, value)


def test_graph_recorder(monkeypatch):
    """Each work is captured once on a stream of its own, in a pool of this recording; a replay is
    timed after a spin, between events.
    """
    cuda = FakeCuda(monkeypatch)
    recorder = graphs.GraphRecorder()
    replays = recorder.record([lambda: cuda.log.append("work")] * 2)
    assert cuda.log == ["sync", "enter", "begin 1 thread_local", "work", "end", "exit"] * 2
    recorder.record([lambda: None])
    assert graphs.memory_can_be_emptied()
    assert "begin 2 thread_local" in cuda.log, "torch refuses a pool whose graphs are gone"
    for _ in range(2):
        cuda.log.clear()
        assert recorder.times_us(replays) == [250.0, 250.0]
    assert cuda.log == ["sync", *["spin", "event", "replay", "event"] * 2, "sync"]


@pytest.mark.parametrize(
    "error", [RuntimeError("operation not permitted when stream is capturing"), KeyboardInterrupt()]
)
def test_graph_recorder_ends_a_capture_that_fails(monkeypatch, error):
    """The stream leaves capture mode and the error says which work and what to do; an interrupt
    stays one.
    """
    cuda = FakeCuda(monkeypatch)

    def work():
        raise error

    expected = MeasurementError if isinstance(error, RuntimeError) else KeyboardInterrupt
    with pytest.raises(expected) as raised:
        graphs.GraphRecorder().record([lambda: None, work])
    assert cuda.log[5:10] == ["sync", "enter", "begin 1 thread_local", "end", "exit"]
    if error.args:
        said = (
            "work 1 of 2 cannot be captured in a CUDA graph (RuntimeError: operation not permitted"
        )
        assert str(raised.value).startswith(said) and "the timer cupti or events" in str(
            raised.value
        )


def test_graph_recorder_on_a_lost_device(monkeypatch):
    """An illegal access is no fault of the capture: it is raised as it is, so that the sweep takes
    a fresh process.
    """
    cuda = FakeCuda(monkeypatch)

    def work():
        cuda.lost = True
        raise RuntimeError("capture failed")

    with pytest.raises(RuntimeError, match="illegal memory access") as raised:
        graphs.GraphRecorder().record([work])
    assert not isinstance(raised.value, MeasurementError)


@pytest.mark.parametrize(("l2", "after"), [("cold-clean", 1.0), ("cold-dirty", 0.0)])
def test_cpu_flush_buffer(l2, after):
    """The buffer is of written pages (unwritten ones are all one page, kept in L1); cold-dirty
    alone writes it.
    """
    flush = timing._cpu_flush(l2, 1 << 20)
    buffer = flush.__self__
    assert buffer.numel() * buffer.element_size() == 1 << 20 and buffer.min() == 1
    flush()
    assert buffer.min() == buffer.max() == after
    assert timing._cpu_flush("warm", 0) is None


def test_cpu_timer_times_torch():
    """A real timer on this CPU: the larger work takes longer, by the median."""
    import torch

    small, large = torch.ones(1 << 10), torch.ones(8 << 20)
    timer = timing.make_timer(arch.detect("cpu"), Policy(l2="warm"))
    assert (timer.policy, timer.note) == (Policy("cpu", "warm"), None)
    quick, slow = (
        summary(s)
        for s in timer.measure([lambda _: small.neg_(), lambda _: large.neg_()], rounds=5)
    )
    assert 0 < quick.median_us < slow.median_us
    with pytest.raises(UnsupportedProblem, match="rounds=0"):
        timer.measure([], rounds=0)


def test_measured_peaks():
    """On the CPU one figure is known: the one measured."""
    peaks = timing.measured_peaks(arch.detect("cpu"), size=4 << 20, rounds=3)
    assert list(peaks) == ["measured"] and 0.1 < peaks["measured"] < 1e5
    assert arch.peak_disagreement(peaks) is None


def test_summary():
    """Median, quartiles and count; a sample beyond 3 IQR is counted and kept in the mean."""
    stats = summary([1.0, 2.0, 3.0, 4.0, 100.0])
    assert stats == timing.Stats(
        median_us=3.0, mean_us=22.0, q1_us=2.0, q3_us=4.0, min_us=1.0, count=5, outliers=1
    )
    assert summary([7.0]) == timing.Stats(7.0, 7.0, 7.0, 7.0, 7.0, 1, 0)


@given(st.lists(microseconds, min_size=1, max_size=50))
def test_summary_is_ordered(samples):
    """Of any samples: min, quartiles and median stand in order, whatever the samples' order."""
    stats = summary(samples)
    assert stats.min_us <= stats.q1_us <= stats.median_us <= stats.q3_us <= max(samples)
    assert stats == summary(sorted(samples))
    if len(samples) > 1:
        quartiles = statistics.quantiles(samples, n=4, method="inclusive")
        assert [stats.q1_us, stats.median_us, stats.q3_us] == pytest.approx(quartiles)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")], [-0.5], [1e308] * 2])
def test_summary_refuses(samples):
    """No samples, and times that cannot be true, are errors. Fault: of 1e308 us an OverflowError."""
    with pytest.raises(MeasurementError):
        summary(samples)


@pytest.mark.parametrize(
    ("a", "b", "tied"),
    [
        (3.0, 3.032, True),
        (3.0, 3.033, False),
        (100.0, 101.0, True),
        (100.0, 101.1, False),
        (0.0, 0.032, True),
    ],
)
def test_tie(a, b, tied):
    """A tie is within the larger of 1% and 32 ns: one step of CUPTI's clock at 3 us, 1% at 100 us."""
    assert tie(a, b) is tied
    assert tie(b, a) is tied


def test_tie_of_another_clock():
    """A coarser clock's step can be given."""
    assert tie(3.0, 3.4, step_us=0.5) and not tie(3.0, 3.4)


@given(a=microseconds, b=microseconds)
def test_tie_is_symmetric(a, b):
    """Which of two is called first does not matter, and all tie with themselves."""
    assert tie(a, b) == tie(b, a)
    assert tie(a, a)
