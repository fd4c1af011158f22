"""The L2 policy `chain`: what a call costs a model, timed in many layers that each do what a model
does around it.

On CUDA a time is that of the layers in a CUDA graph less that of the same layers without the call,
a layer: what the call leaves to those after it, modified lines in L2 above all, is in it.
"""

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gdntune import sol
from gdntune.checking.cases import Case, make_case
from gdntune.device import graphs
from gdntune.device.arch import Device
from gdntune.errors import MeasurementError, UnsupportedProblem
from gdntune.problem import ITEMSIZE, Problem
from gdntune.timing import Call, GraphTimer, Policy, Reader, Timer

# Layers, at most, and the bytes read between two, about the weights of a layer's linear attention
# in Qwen3.5.
CHAIN_LAYERS = {"cuda": 12, "cpu": 4}
WEIGHT_BYTES = 64 << 20
LEAST_LAYERS = 4
# What the layers' pools may take of the device's memory, and what the fewest layers may.
MEMORY_SHARE = 0.4
LARGEST_SHARE = 0.8
# Between the slots of a pool, as where an engine keeps the convolution's state beside them: 17
# cache lines, so that slots begin at no multiple of a page.
SLOT_GAP_BYTES = 17 * 128
# What a producer's kernel copies is a multiple of it.
ROW_BYTES = 4096
# Of each tensor that a producer writes, as torch's allocator gives it.
ALIGNMENT = 256

# Copies words from one tensor to another of the same size, in one kernel.
Copy = Callable[[Tensor, Tensor], Any]

PRODUCED = ("q", "k", "v", "a", "b", "output")
# Of a layer's step besides.
LAYER = ("output_gate", "mixed_qkv")
# For calls that take q, k and v in one tensor: written too, where one of them is timed.
PACKED = "mixed"


def layer_bytes(problem: Problem) -> int:
    """The most that a layer keeps: the kernels' states and those between tokens, the floor's own,
    and what flows, with its copy.
    """
    c = problem.contract
    # Twice: the kernels' states and the floor's own.
    states = 2 * (1 + (0 if c.intermediate == "none" else c.tokens))
    return states * sol.state_bytes(problem) + 2 * (
        sol.bytes_moved(problem) - sol.floor_bytes(problem)
    )


def layers_of(problem: Problem, device: Device) -> int:
    """How many layers a chain of this problem has: 12 (4 on the CPU), fewer where their pools would
    take 40% of the memory, at least 4.

    MeasurementError where four do not fit.
    """
    each = layer_bytes(problem)
    if LEAST_LAYERS * each > LARGEST_SHARE * device.memory_bytes:
        raise MeasurementError(
            f"{problem.key()} under chain: {LEAST_LAYERS} layers of {each / 2**30:.1f} GiB are more"
            f" than {LARGEST_SHARE:.0%} of the {device.memory_bytes / 2**30:.0f} GiB of"
            f" {device.name}; expected a smaller batch, or another L2 policy"
        )
    fit = min(CHAIN_LAYERS[device.kind], int(MEMORY_SHARE * device.memory_bytes / each))
    # Whole fours, so that the steps of a ring, 2 or 4, are spread evenly over the layers
    return max(LEAST_LAYERS, fit - fit % LEAST_LAYERS)


def _copied(source: Tensor, target: Tensor) -> None:
    """By an elementwise kernel, since torch's copy_ within a device is no kernel but a memcpy."""
    torch.bitwise_or(source, 0, out=target)


class Chain:
    """The layers of a problem: each with a pool of its own, in shuffled slots, and with its own q,
    k, v, a, b and output.

    produce(layer) writes these in one kernel, and, where `packed`, q, k and v in one tensor
    besides, from a source that is the same for all layers; the output too, which a model's
    allocator would have handed out again and which is otherwise found in L2 only by a chain with
    the call. use(layer) reads the output and writes as much elsewhere, as a gated norm does. All
    states begin with the same values.
    """

    def __init__(
        self,
        problem: Problem,
        place: str,
        layers: int,
        packed: bool = False,
        seed: int = 0,
        copy: Copy | None = None,
    ) -> None:
        self.layers = layers
        gap = SLOT_GAP_BYTES // ITEMSIZE[problem.contract.state_dtype]
        made = [
            make_case(
                problem,
                place,
                seed=seed * CHAIN_LAYERS["cuda"] + layer,
                slot_stride_pad=gap,
                settled=False,
            )
            for layer in range(layers)
        ]
        first = made[0]
        # A floor writes no output; what it leaves there must pass as finite.
        first.output.zero_()
        # of a convolution q, k and v are one tensor
        produced = PRODUCED if first.mixed_qkv is None else PRODUCED[3:]
        flowing = {name: getattr(first, name) for name in produced}
        for name in LAYER:
            if (x := getattr(first, name)) is not None:
                flowing[name] = x
        if problem.contract.conv_input == "interleaved":
            # a and b are one tensor, and the output's gate is beside q, k and v
            flowing = {n: flowing[n] for n in ("output", "mixed_qkv")}
            b = first.b
            flowing["beside"] = b.as_strided((*b.shape[:2], 2 * b.shape[2]), b.stride())
        if packed:
            rows = [x.reshape(-1, x.shape[2] * x.shape[3]) for x in (first.q, first.k, first.v)]
            flowing[PACKED] = torch.cat(rows, dim=1)
        starts, size = {}, 0
        for name, x in flowing.items():
            starts[name] = size
            size += -(-x.numel() * x.element_size() // ALIGNMENT) * ALIGNMENT
        size = -(-size // ROW_BYTES) * ROW_BYTES
        buffers = torch.zeros(1 + layers, size // 4, dtype=torch.int32, device=place)

        def views(row: Tensor) -> dict[str, Any]:
            data = row.view(torch.uint8)
            return {
                name: data[start : start + x.numel() * x.element_size()].view(x.dtype).view(x.shape)
                for (name, x), start in zip(flowing.items(), starts.values(), strict=True)
            }

        for name, x in views(buffers[0]).items():
            x.copy_(flowing[name])
        self.cases: list[Case] = []
        for case, row in zip(made, buffers[1:], strict=True):
            row.copy_(buffers[0])
            self.cases.append(case.with_inputs(**views(row)))
            if case is not first:
                # Equal states, so that one copy kept aside restores them all.
                case.state.copy_(first.state)
        used = torch.empty_like(first.output)
        copy = copy or _copied
        self._produce: list[Callable[[], Any]] = [
            functools.partial(copy, buffers[0], row) for row in buffers[1:]
        ]
        self._use: list[Callable[[], Any]] = [
            functools.partial(torch.neg, c.output, out=used) for c in self.cases
        ]

    def produce(self, layer: int) -> None:
        """Writes q, k, v, a, b and, with zeros, the output of a layer."""
        self._produce[layer]()

    def use(self, layer: int) -> None:
        """Reads a layer's output."""
        self._use[layer]()


class Chained:
    """What the timers of a chain share: the chain around the calls, set before they are measured. A
    call's argument is its layer.
    """

    chain: Chain | None = None
    weights: Call

    def around(self) -> Chain:
        """The chain; UnsupportedProblem where none is set."""
        if self.chain is None:
            raise UnsupportedProblem(
                "l2='chain' without layers: set the timer's `chain` to those around the calls"
            )
        return self.chain

    @property
    def calls_a_sample(self) -> int:
        """The layers."""
        return self.around().layers


class ChainTimer(Chained, GraphTimer):
    """A graph of layers, each of producer, call, use of its output and a read of weights, less one
    without the calls, a layer.
    """

    def __init__(
        self, policy: Policy, weights: Call, recorder: graphs.Recorder, note: str | None = None
    ) -> None:
        super().__init__(policy, None, recorder, note=note)
        self.weights = weights

    def _body(self, call: Call | None) -> None:
        chain = self.around()
        for layer in range(chain.layers):
            chain.produce(layer)
            if call is not None:
                call(layer)
            chain.use(layer)
            self.weights(layer)


class CpuChainTimer(Chained, Timer):
    """The host's clock around the calls in the layers of a chain, a layer.

    Not a difference: on a CPU two runs of the same chain differ by more than what a call costs
    those after it.
    """

    def __init__(self, policy: Policy, weights: Call, note: str | None = None) -> None:
        super().__init__(policy, None, note)
        self.weights = weights

    def _times(self, calls: Sequence[Call], order: Sequence[int], first: int) -> list[float]:
        chain, clock = self.around(), time.perf_counter_ns
        times = [0.0] * len(order)
        for position, i in enumerate(order):
            call, spent = calls[i], 0
            for layer in range(chain.layers):
                chain.produce(layer)
                start = clock()
                call(layer)
                spent += clock() - start
                chain.use(layer)
                self.weights(layer)
            times[position] = spent / 1e3 / chain.layers
        return times


def make_chain_timer(
    device: Device, policy: Policy, reader: Reader | None = None
) -> ChainTimer | CpuChainTimer:
    """The timer of a policy whose L2 policy is `chain`, with weights for its layers on the current
    device.

    reader: as for `timing.make_timer`, needed on CUDA. Raises what `Policy.resolve` raises.
    """
    resolved, note = policy.resolve(device)
    if device.kind == "cuda" and reader is None:
        raise UnsupportedProblem("reader=None with l2=chain: give a kernel that reads a tensor")
    layers = CHAIN_LAYERS[device.kind]
    if reader is not None and device.kind == "cuda":
        rows = torch.zeros(layers, WEIGHT_BYTES // 4, dtype=torch.int32, device="cuda")
        return ChainTimer(resolved, lambda layer: reader(rows[layer]), graphs.GraphRecorder(), note)
    # Twice the last-level cache in all, in whole MiB. Ones, not zeros: pages of calloc are all one
    # page until they are written.
    size = -(-2 * device.l2_bytes // layers >> 20) << 20
    ones = torch.ones(layers, size // 4, dtype=torch.float32)
    return CpuChainTimer(resolved, lambda layer: ones[layer].sum(), note)
