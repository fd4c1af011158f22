"""The timers on a real GPU: CUPTI's times are plausible, agree with events', and the L2 policies do what they say."""

import pytest

from gdntune import arch, timing
from gdntune.timing import Policy, make_timer, summary

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
        median_us(make_timer(device, Policy(timer, l2), reader), lambda _: x.neg_()) for timer in ("cupti", "events")
    )
    assert cupti >= 100
    assert abs(events - cupti) <= 0.1 * cupti + 5


@pytest.mark.parametrize("l2", ["cold-clean", "cold-dirty", "rotate", "warm"])
def test_segments(device, reader, l2):
    """Calls of one and of three kernels are told apart under each policy, also beyond one batch."""
    x = torch.ones(4 * MIB, dtype=torch.float32, device="cuda")

    def three(_):
        x.neg_()
        x.abs_()
        x.neg_()

    rounds = timing.BATCH // 2 + 50 if l2 == "warm" else 40
    one, more = make_timer(device, Policy("cupti", l2), reader).measure([lambda _: x.neg_(), three], rounds)
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
    """Under cold-dirty a tiny kernel takes its own time, not that of zeroing 256 MiB (80 us on an H100)."""
    x = torch.ones(256, dtype=torch.float32, device="cuda")
    assert median_us(make_timer(device, Policy("cupti", "cold-dirty"), reader), lambda _: x.neg_()) < 20


def test_cold_is_not_faster_than_warm(device, reader):
    """A copy of 8 MiB, which fits L2, takes longer where L2 holds other data, and longer yet where that is modified."""
    copy = copy_of(8 * MIB)
    warm, clean, dirty = (
        median_us(make_timer(device, Policy("cupti", l2), reader), copy) for l2 in ("warm", "cold-clean", "cold-dirty")
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
