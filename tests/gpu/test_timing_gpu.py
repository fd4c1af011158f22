"""The timers on a real GPU: CUPTI's times are plausible, agree with events' and graphs', and the L2
policies do what they say.
"""

import subprocess
import sys

import pytest

from gdntune import timing
from gdntune.device import arch
from gdntune.errors import UnsupportedProblem
from gdntune.problem import Contract, Problem
from gdntune.timing import Policy, make_timer, summary
from gdntune.tuning.chain import Chain, make_chain_timer

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = pytest.mark.gpu
if arch.cuda_fault() is not None:
    pytest.skip(f"{arch.cuda_fault()}", allow_module_level=True)

MIB = 1 << 20
BLOCK = 4096
SUM_THAT_NEVER_IS = 123456789


@triton.jit
def gdntune_flush(p, sink, n, never, BLOCK: tl.constexpr):
    """Reads n integers."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(p + offsets, mask=offsets < n, other=0), 0)
    if total == never:  # so that the loads are not optimised away
        tl.store(sink, total)


@triton.jit
def read_only(p, sink, n, never, BLOCK: tl.constexpr):
    """Reads n integers, under a name that is no marker."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(tl.load(p + offsets, mask=offsets < n, other=0), 0)
    if total == never:
        tl.store(sink, total)


@pytest.fixture(scope="module")
def device():
    """The GPU at hand."""
    return arch.detect("cuda")


@pytest.fixture(scope="module")
def reader():
    """Reads a whole int32 tensor in one kernel that the timers know by its name."""
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")

    def read(tensor):
        n = tensor.numel()
        gdntune_flush[(triton.cdiv(n, BLOCK),)](tensor, sink, n, SUM_THAT_NEVER_IS, BLOCK=BLOCK)

    return read


def copy_of(size):
    """A call that copies `size` bytes within the device; torch does it by a memcpy, not a kernel."""
    source, goal = (torch.ones(size // 4, dtype=torch.float32, device="cuda") for _ in range(2))
    return lambda _: goal.copy_(source)


def median_us(timer, call, rounds=30):
    """The median of a call's samples."""
    return summary(timer.measure([call], rounds)[0]).median_us


def test_auto_is_cupti(device, reader):
    """CUPTI works on the GPU machine: a fallback there would go unnoticed in tables."""
    timer = make_timer(device, Policy(), reader)
    assert (timer.policy.timer, timer.note) == ("cupti", None)


def test_copy_takes_what_the_peak_says(device, reader):
    """256 MiB copied take 0.9 to 1.3 of the peak's time: an H100's copy reaches 90% of it."""
    if device.peak_gb_s is None:
        pytest.skip(f"no peak is known of {device.name}")
    at_peak_us = 2 * 256 * MIB / device.peak_gb_s / 1e3
    got = median_us(make_timer(device, Policy("cupti", "cold-clean"), reader), copy_of(256 * MIB))
    assert 0.9 < got / at_peak_us < 1.3


@pytest.mark.parametrize("l2", ["cold-clean", "cold-dirty", "rotate", "warm"])
def test_events_agree_with_cupti(device, reader, l2):
    """On a kernel of 100 us and more, events say the same within 10% and 5 us of launch gaps."""
    x = torch.ones(128 * MIB, dtype=torch.float32, device="cuda")
    cupti, events = (
        median_us(make_timer(device, Policy(timer, l2), reader), lambda _: x.neg_())
        for timer in ("cupti", "events")
    )
    assert cupti >= 100
    assert abs(events - cupti) <= 0.1 * cupti + 5


# What each timer adds to the device's own time, on an H100: events the gaps on both sides of a
# launch, 1 to 3 us, and their steps of
# 0.5 us; a graph the gap between two of its kernels, about 1 us, and a tenth of two events' steps.
# Less: a kernel's start overlaps the
# end of the one before, by up to the 0.86 us that an empty kernel takes. A long kernel's times
# differ by clocks and refresh: 5%.
EVENTS_ADD_US, GRAPH_ADDS_US, LESS_US, SHARE = 5.0, 2.5, 0.9, 0.05


@pytest.mark.parametrize("l2", ["cold-clean", "warm"])
@pytest.mark.parametrize(
    "size", [MIB // 64, 8 * MIB, 512 * MIB], ids=["16 KiB", "8 MiB", "512 MiB"]
)
def test_three_timers_agree(device, reader, size, l2):
    """A kernel that only reads, so leaves nothing to write back: events and graphs say what CUPTI
    says and the gaps they include.

    Under warm alone the host may be slower than a short kernel, and events then show the host:
        graphs still agree.
    """
    x = torch.zeros(size // 4, dtype=torch.int32, device="cuda")
    sink = torch.zeros(1, dtype=torch.int32, device="cuda")
    grid = (triton.cdiv(x.numel(), BLOCK),)

    def call(_):
        read_only[grid](x, sink, x.numel(), SUM_THAT_NEVER_IS, BLOCK=BLOCK)

    us = {
        name: median_us(make_timer(device, Policy(name, l2), reader), call)
        for name in ("cupti", "events", "graph")
    }
    least, most = us["cupti"] * (1 - SHARE) - LESS_US, us["cupti"] * (1 + SHARE)
    assert least <= us["graph"] <= most + GRAPH_ADDS_US, us
    assert least <= us["events"], us
    if l2 == "cold-clean":
        assert us["events"] <= most + EVENTS_ADD_US, us


def test_a_graph_counts_what_a_call_leaves(device, reader):
    """A kernel that writes 16 MiB, which stay in L2, costs the next one their writing back: a graph
    says so, CUPTI does not.
    """
    if device.peak_gb_s is None:
        pytest.skip(f"no peak is known of {device.name}")
    x = torch.ones(4 * MIB, dtype=torch.float32, device="cuda")
    cupti, graph = (
        median_us(make_timer(device, Policy(name, "cold-clean"), reader), lambda _: x.neg_())
        for name in ("cupti", "graph")
    )
    written_back_us = 16 * MIB / device.peak_gb_s / 1e3
    assert (
        cupti - LESS_US <= graph <= (cupti + 1.5 * written_back_us) * (1 + SHARE) + GRAPH_ADDS_US
    ), (cupti, graph)


@pytest.mark.parametrize("l2", ["cold-clean", "cold-dirty", "rotate", "warm"])
def test_graphs_under_each_policy(device, reader, l2):
    """Interleaved graphs tell a call from one of three kernels, and what the L2 policy does is in
    neither.
    """
    x = torch.ones(MIB, dtype=torch.float32, device="cuda")
    turns = []

    def three(turn):
        turns.append(turn)
        x.neg_()
        x.abs_()
        x.neg_()

    timer = make_timer(device, Policy("graph", l2), reader)
    assert (timer.policy, timer.note) == (Policy("graph", l2), None)
    one, more = timer.measure([lambda _: x.neg_(), three], 20)
    assert summary(more).median_us > 1.5 * summary(one).median_us
    assert summary(one).median_us < 30
    assert turns == [0, *range(timing.TURNS if l2 == "rotate" else timing.GRAPH_CALLS)]


FAILING_CAPTURE = """
import torch
from gdntune.device import arch
from gdntune.errors import MeasurementError
from gdntune.timing import Policy, make_timer, summary
x = torch.ones(1024, device="cuda")
timer = make_timer(arch.detect("cuda"), Policy("graph", "warm"))
try:
    timer.measure([lambda _: x.neg_(), lambda _: x.sum().item()], 3)
except MeasurementError as e:
    print(e)
torch.cuda.synchronize()
assert summary(timer.measure([lambda _: x.neg_()], 5)[0]).median_us < 20
print("serves on", x.abs().sum().item())
"""


def test_a_call_that_cannot_be_captured():
    """A call that synchronises is refused with what to do, and timer and device serve on. In a
    process of its own, for torch's sake.
    """
    done = subprocess.run(
        [sys.executable, "-c", FAILING_CAPTURE],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        "work 2 of 3 cannot be captured in a CUDA graph" in done.stdout
        and "cupti or events" in done.stdout
    )
    assert "serves on 1024.0" in done.stdout


@pytest.mark.parametrize(("B", "noise_us"), [(1, 2.0), (32, 5.0)])
def test_a_chain(device, reader, B, noise_us):
    """A stand-in that rewrites a layer's pool costs a chain what CUPTI says under cold-clean, the
    gap and the writing back, no more.

    Its states, unlike a kernel's, are read in memory order. Twice the same call in a layer takes
    twice as long.
    """
    if device.peak_gb_s is None:
        pytest.skip(f"no peak is known of {device.name}")
    chain = Chain(Problem(Contract(), B, 16, 64), "cuda", 6)
    timer = make_chain_timer(device, Policy(l2="chain"), reader)
    assert timer.policy == Policy("graph", "chain")
    with pytest.raises(UnsupportedProblem, match="without layers"):
        timer.measure([print], 1, warmup=0)
    timer.chain = chain
    states = [case.state for case in chain.cases]

    def twice(layer):
        states[layer].neg_()
        states[layer - 1].neg_()

    once_us, twice_us = (
        summary(s).median_us for s in timer.measure([lambda layer: states[layer].neg_(), twice], 30)
    )
    cupti_us = median_us(
        make_timer(device, Policy("cupti", "cold-clean"), reader),
        lambda turn: states[turn % 6].neg_(),
    )
    written_back_us = states[0].numel() * 2 / device.peak_gb_s / 1e3
    bounds = (
        cupti_us * (1 - SHARE) - noise_us,
        (cupti_us + 1.5 * written_back_us) * (1 + SHARE) + GRAPH_ADDS_US + noise_us,
    )
    assert bounds[0] <= once_us <= bounds[1], (once_us, cupti_us)
    assert 1.5 < twice_us / once_us < 2.5, (once_us, twice_us)
    assert all(bool(state.isfinite().all()) for state in states)
    assert all(bool((case.output == 0).all()) for case in chain.cases), "the producer's zeros"


@pytest.mark.parametrize("l2", ["cold-clean", "cold-dirty", "rotate", "warm"])
def test_segments(device, reader, l2):
    """Calls of one and of three kernels are told apart under each policy, also beyond one batch."""
    x = torch.ones(4 * MIB, dtype=torch.float32, device="cuda")

    def three(_):
        x.neg_()
        x.abs_()
        x.neg_()

    rounds = timing.BATCH // 2 + 50 if l2 == "warm" else 40
    one, more = make_timer(device, Policy("cupti", l2), reader).measure(
        [lambda _: x.neg_(), three], rounds
    )
    assert len(one) == len(more) == rounds
    assert summary(more).median_us > 1.5 * summary(one).median_us


def test_graphs_are_timed(device, reader):
    """A CUDA graph of three kernels is one call, from its first start to its last end."""
    x = torch.ones(4 * MIB, dtype=torch.float32, device="cuda")
    x.neg_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            x.neg_()
    timer = make_timer(device, Policy("cupti", "warm"), reader)
    one, three = timer.measure([lambda _: x.neg_(), lambda _: graph.replay()], 30)
    assert 2 < summary(three).median_us / summary(one).median_us < 6


def test_the_fill_is_not_timed(device, reader):
    """Under cold-dirty a tiny kernel takes its own time, not that of zeroing 256 MiB (80 us on an
    H100).
    """
    x = torch.ones(256, dtype=torch.float32, device="cuda")
    assert (
        median_us(make_timer(device, Policy("cupti", "cold-dirty"), reader), lambda _: x.neg_())
        < 20
    )


def test_cold_is_not_faster_than_warm(device, reader):
    """A copy of 8 MiB, which fits L2, takes longer where L2 holds other data, and longer yet where
    that is modified.
    """
    copy = copy_of(8 * MIB)
    warm, clean, dirty = (
        median_us(make_timer(device, Policy("cupti", l2), reader), copy)
        for l2 in ("warm", "cold-clean", "cold-dirty")
    )
    assert warm <= clean
    assert clean <= 1.05 * dirty


def test_peaks_agree(device):
    """Datasheet, NVML and a measured copy agree."""
    peaks = timing.measured_peaks(device)
    assert peaks["measured"] > 0
    assert arch.peak_disagreement(peaks) is None, peaks


def test_clocks_are_read():
    """NVML gives clocks, temperature and power of the device under test."""
    now = arch.clocks()
    assert now.sm_mhz and now.memory_mhz and now.temperature_c and now.power_w
