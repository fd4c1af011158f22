"""A chain's layers: pools of their own, what a producer writes and a use reads, how many fit; and
the timers of a chain.
"""

import dataclasses
import gc
import time
import weakref
from functools import partial

import msgspec
import pytest
import torch
from fakes import library
from fakes.recorder import FakeRecorder

from gdntune import kernels, sol
from gdntune.checking.cases import make_case
from gdntune.device import arch
from gdntune.errors import MeasurementError, UnsupportedProblem
from gdntune.peers import Bound, Entry
from gdntune.problem import ITEMSIZE, Contract, Problem
from gdntune.timing import Policy
from gdntune.tuning import chain, probe
from gdntune.tuning.chain import Chain, ChainTimer, layers_of, make_chain_timer
from gdntune.tuning.session import Calls

H100 = arch.target("sm_90a")
SMALL = {"K": 64, "V": 64}
CONTRACTS = [
    Contract(**SMALL),
    Contract(**SMALL, state_dtype="fp32", layout="v_last"),
    Contract(**SMALL, pool=False, gate="log", gate_dtype="fp32", beta="given"),
    Contract(**SMALL, op="kda_decode", gate="softplus", tokens=3, intermediate="dense"),
    Contract(**SMALL, tokens=4, intermediate="slots", accepted=True, ragged=True, mode="frozen"),
]


@pytest.fixture(params=CONTRACTS, ids=lambda c: c.key())
def made(request):
    """A chain of three layers."""
    return Chain(Problem(request.param, 5, 1, 3), "cpu", 3)


def test_layers_have_tensors_of_their_own(made):
    """No layer's call reads or writes what another's does; states begin alike, and slots lie at no
    multiple of a page.
    """
    for name in ("state", *chain.PRODUCED):
        assert len({getattr(c, name).data_ptr() for c in made.cases}) == 3
    first = made.cases[0]
    for case in made.cases:
        assert case.state.equal(first.state) and case.state.isfinite().all()
        assert all(getattr(case, name).is_contiguous() for name in chain.PRODUCED)
        assert all(
            getattr(case, name).data_ptr() % 64 == first.q.data_ptr() % 64
            for name in chain.PRODUCED
        )
    stride = first.state.stride(0) * first.state.element_size()
    assert stride % 4096 and stride % 128 == 0
    assert stride > first.state[0].numel() * first.state.element_size()
    if first.read_index is not None:
        assert len({tuple(c.read_index.tolist()) for c in made.cases}) > 1, (
            "slots are shuffled anew in each layer"
        )


def test_a_layer_has_its_inputs_from_the_producer():
    """The output's gate and the packed row that a convolution takes are written by the launch ahead,
    and q, k and v are views of that row.
    """
    made = Chain(Problem(Contract(**SMALL, norm="silu", conv="silu"), 5, 1, 3), "cpu", 3)
    case = made.cases[1]
    kept = {name: getattr(case, name).clone() for name in chain.LAYER}
    for name in chain.LAYER:
        getattr(case, name).fill_(float("nan"))
    made.produce(1)
    for name, x in kept.items():
        assert getattr(case, name).equal(x) and x.isfinite().all()
    assert case.q.data_ptr() == case.mixed_qkv.data_ptr()
    assert case.v.flatten(-2).equal(case.mixed_qkv[..., -3 * 64 :])


def test_the_producer_writes_and_the_use_reads(made):
    """The producer gives back inputs that are gone, and zeros the output; the use reads all of it;
    neither moves a tensor.
    """
    kept = {name: getattr(made.cases[1], name).clone() for name in chain.PRODUCED}
    assert all(x.isfinite().all() for x in kept.values()) and kept["q"].float().std() > 0.5
    places = [getattr(c, name).data_ptr() for c in made.cases for name in chain.PRODUCED]
    for name in chain.PRODUCED:
        getattr(made.cases[1], name).fill_(float("nan"))
    made.produce(1)
    for name, x in kept.items():
        assert getattr(made.cases[1], name).equal(x)
    made.cases[1].output.fill_(-3)
    made.use(1)
    used = made._use[1].keywords["out"]
    assert used.numel() == made.cases[1].output.numel() and (used == 3).all()
    assert places == [getattr(c, name).data_ptr() for c in made.cases for name in chain.PRODUCED]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.key())
def test_the_producer_writes_packed_rows_too(contract):
    """Where a call takes q, k and v in one tensor, each layer's producer writes that as well: a copy
    made once would be found in DRAM, where ours are found in L2.
    """
    made = Chain(Problem(contract, 5, 1, 3), "cpu", 2, packed=True)
    for layer, case in enumerate(made.cases):
        rows = case.q.shape[0] * case.q.shape[1]
        want = torch.cat([x.reshape(rows, -1) for x in (case.q, case.k, case.v)], dim=1)
        case.mixed.zero_()
        made.produce(layer)
        assert case.mixed.equal(want)
    assert Chain(Problem(contract, 5, 1, 3), "cpu", 2).cases[0].mixed is None


class Recorded:
    """A recorder that says which of its recordings were replayed."""

    def __init__(self):
        self.replayed = []

    def record(self, works):
        """What calls each and says so."""

        def replay(i, work):
            self.replayed.append(i)
            work()

        return [partial(replay, i, work) for i, work in enumerate(works)]


def test_entries_of_peers_in_layers(monkeypatch):
    """Each layer has its own call, all of them made once beforehand; a ring's steps are spread over
    the layers, so that one sample is of a whole cycle; an entry behind ours comes after it.
    """
    log = []

    def entry(name, **fields):
        def bind(case):
            layer = cases.index(case)
            steps = tuple(partial(log.append, (name, layer, i)) for i in range(2))
            call = partial(log.append, (name, layer, "next"))
            return Bound(call, lambda x: x, cycle=2, steps=steps if name == "ring" else ())

        return Entry(name, lambda p: None, bind, "as it comes", **fields)

    entries = (entry("ring"), entry("after", follows_ours=True))
    monkeypatch.setattr(library, "PEER", dataclasses.replace(library.PEER, entries=entries))
    cases = [object() for _ in range(4)]
    ours = lambda turn: log.append(("ours", turn))  # noqa: E731
    named = [("fakes.library", "ring"), ("fakes.library", "after")]
    bound = probe.bind(named, Calls([ours], cases, None))
    assert log[:4] == [("ring", i, i % 2) for i in range(4)] and bound.cycles == [1, 2]
    assert probe.packed(named) is False and [probe.role(n) for n in named] == ["peer", "partner"]
    log.clear()
    for layer in (1, 2):
        for call in bound.calls:
            call(layer)
    assert log == [("ring", 1, 1), ("ours", 1), ("after", 1, "next"),
                   ("ring", 2, 0), ("ours", 2), ("after", 2, "next")]  # fmt: skip
    log.clear()
    # Fault: the two launches of an entry behind ours were timed with up to 400 us of the host between.
    graphs = Recorded()
    (after,) = probe.bind(named[1:], Calls([ours], cases[:2], None), graphs).calls
    log.clear()
    after(3)
    assert graphs.replayed == [1] and log == [("ours", 1), ("after", 1, "next")]
    # one case: its calls go on from step to step
    assert probe.bind(named[:1], Calls([ours], cases[:1], None)).cycles == [2]


def test_a_graph_keeps_what_its_calls_were_bound_to(monkeypatch):
    """Fault: a peer of several kernels that had made tensors of its own was replayed after these
    were freed: an illegal access, or half of the samples took 4 us of 54.
    """

    class Forgetful:
        """As a CUDA graph, which holds addresses, not tensors."""

        def record(self, works):
            return [lambda: None for _ in works]

    made = []

    def bind(case):
        tensor = torch.zeros(4)
        made.append(weakref.ref(tensor))
        return Bound(partial(torch.Tensor.add_, tensor, 1), lambda x: x)

    entry = Entry("two", lambda p: None, bind, "as it comes", several=True)
    monkeypatch.setattr(library, "PEER", dataclasses.replace(library.PEER, entries=(entry,)))
    bound = probe.bind([("fakes.library", "two")], Calls([], [object()], None), Forgetful())
    gc.collect()
    bound.calls[0](0)
    assert made[0]() is not None
    # and no longer: a placement's tensors go before the next one's are made
    del bound
    gc.collect()
    assert made[0]() is None


def test_a_kernel_may_write_the_inputs():
    """What a chain's producer writes is rows of whole tiles of the kernel that copies them."""
    contract, variant = kernels.producer()
    tile = variant.knobs["tile"] * ITEMSIZE[contract.state_dtype]
    copied = []

    def copy(source, target):
        assert source.numel() * source.element_size() % tile == 0
        copied.append(target.copy_(source))

    made = Chain(Problem(CONTRACTS[0], 5, 1, 3), "cpu", 3, copy=copy)
    before = made.cases[2].q.clone()
    made.cases[2].q.zero_()
    made.produce(2)
    assert len(copied) == 1 and made.cases[2].q.equal(before)


def test_rows_of_heads_side_by_side():
    """Bug: a and b were views of a tensor of other dimensions, so that a layer's gates were others'."""
    contract = Contract(norm="silu", conv="silu", conv_input="interleaved")
    made = Chain(Problem(contract, 3, 2, 6), "cpu", 3)
    made.produce(2)
    names = ("mixed_qkv", "a", "b", "output_gate")
    gap = chain.SLOT_GAP_BYTES // ITEMSIZE[contract.state_dtype]
    want = make_case(Problem(contract, 3, 2, 6), settled=False, slot_stride_pad=gap)
    for name in names:
        got, kept = getattr(made.cases[2], name), getattr(want, name)
        assert got.shape == kept.shape and got.stride() == kept.stride()
        assert torch.equal(got, kept), name


@pytest.mark.parametrize(
    ("B", "contract", "layers"),
    [
        (1, Contract(), 12),
        (256, Contract(state_dtype="fp32"), 12),
        (512, Contract(state_dtype="fp32"), 4),
        (512, Contract(tokens=4, intermediate="dense"), 4),
    ],
)
def test_layers_fit_the_memory(B, contract, layers):
    """Twelve, or as many fours as take 40% of an H100, but never fewer than four."""
    problem = Problem(contract, B, 16, 64)
    assert layers_of(problem, H100) == layers
    share = layers * chain.layer_bytes(problem) / H100.memory_bytes
    assert share < 0.4 or layers == 4


def test_a_chain_that_does_not_fit():
    """Where four layers do not fit the cell is refused with what they need, before anything is
    allocated.
    """
    problem = Problem(Contract(tokens=8, intermediate="dense"), 512, 16, 64)
    with pytest.raises(
        MeasurementError,
        match=r"4 layers of .* GiB are more than 80% of the 80 GiB.*a smaller batch",
    ):
        layers_of(problem, H100)
    assert layers_of(msgspec.structs.replace(problem, B=64), H100) == 12
    assert layers_of(Problem(Contract(**SMALL), 1, 1, 1), arch.detect("cpu")) == 4


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.key())
def test_layer_bytes_cover_what_is_allocated(contract):
    """The estimate is no less than the tensors of a layer, gaps apart, so that a chain which is
    begun fits.
    """
    problem = Problem(contract, 64, 2, 8)
    made = Chain(problem, "cpu", 2)
    case = made.cases[0]
    tensors = [case.state, *(getattr(case, name) for name in chain.PRODUCED)]
    if case.intermediate is not None:
        tensors.append(case.intermediate)
    own = sum(x.numel() * x.element_size() for x in tensors)
    assert own + sol.state_bytes(problem) <= 1.05 * chain.layer_bytes(problem)


class FakeChain:
    """Layers that say what they do."""

    def __init__(self, recorder, layers=3):
        self.layers, self.recorder = layers, recorder

    def produce(self, layer):
        self.recorder.spend(2, f"produce {layer}")

    def use(self, layer):
        self.recorder.spend(1, f"use {layer}")


def test_chain_timer():
    """Each layer has a producer, its call, a use and its weights in this order; a time is what the
    calls add, a layer.
    """
    recorder = FakeRecorder()
    timer = ChainTimer(
        Policy("graph", "chain"), lambda layer: recorder.spend(20, f"weights {layer}"), recorder
    )
    with pytest.raises(UnsupportedProblem, match="without layers.*set the timer's `chain`"):
        timer.measure([print], rounds=1, warmup=0)
    timer.chain = FakeChain(recorder)
    assert timer.calls_a_sample == 3
    samples = timer.measure([lambda layer: recorder.spend(6 + layer, f"call {layer}")], rounds=4)
    assert samples == [[7.0] * 4]
    names = [name for _, name in recorder.replayed[-1]]
    assert names == [
        f"{what} {i}" for i in range(3) for what in ("produce", "call", "use", "weights")
    ]
    assert [name for _, name in recorder.replayed[0]] == [
        n for n in names if not n.startswith("call")
    ]


def test_chain_on_the_cpu():
    """Without a GPU the same layers run one after the other, and the clock is around the calls
    alone.
    """
    device = arch.Device("cpu", "CPU", "x86_64", 2, 4 << 20, 1 << 34)
    timer = make_chain_timer(device, Policy(l2="chain"))
    assert (timer.policy, timer.note) == (Policy("cpu", "chain"), None)
    recorder = FakeRecorder()
    timer.chain = FakeChain(recorder, layers=2)
    read, weights = [], timer.weights
    timer.weights = lambda layer: (
        read.append(float(weights(layer))) or recorder.spend(20, f"weights {layer}")
    )
    calls = [lambda layer: recorder.spend(0, f"call {layer}"), lambda _: time.sleep(0.003)]
    quick, slow = timer.measure(calls, rounds=3)
    names = [name for _, name in recorder.tape]
    assert names[0] == "call 0", "the warm-up"
    assert names[1:9] == [
        f"{what} {i}" for i in range(2) for what in ("produce", "call", "use", "weights")
    ]
    assert set(read) == {(2 << 20) / 4}, "four layers' weights are twice the last-level cache"
    assert all(us >= 3000 for us in slow) and min(quick) < 3000
    assert timer.calls_a_sample == 2 and timer.pace_us(calls[0], 2) > 0


def test_a_chain_needs_a_reader():
    """On CUDA the weights are read by a kernel that is given; said before the device is touched."""
    with pytest.raises(UnsupportedProblem, match="reader=None with l2=chain"):
        make_chain_timer(arch.target("sm_90a"), Policy(l2="chain"))
