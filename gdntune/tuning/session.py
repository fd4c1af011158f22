"""One device in a timing process: its checker, its timer, compiled functions, and a cell's tensors.
Knows no kernel by name.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gdntune import kernels, sol
from gdntune.checking.check import Checker
from gdntune.device import cupti
from gdntune.device.arch import Device, settled
from gdntune.errors import UnsupportedProblem
from gdntune.kernels.spec import Variant
from gdntune.objects.store import Store, object_spec
from gdntune.problem import Contract, Problem
from gdntune.timing import TURNS, Policy, Timer, make_timer, measured_peaks
from gdntune.tuning import rings

if TYPE_CHECKING:
    from gdntune.tuning.chain import Chained


class Calls(NamedTuple):
    """What a cell's variants are called through: each callable takes the turn, or under `chain` the
    layer.

    cases: what they share, one case for each turn of a walk through a pool, or for each layer of a
        chain; none for the floor.
    kept: the state of the first, as it was made, and as that of all others was.
    cycle: calls until what one does comes again; behind a ring each of `cases` is a step of it.
    """

    calls: list[Callable[[int], Any]]
    cases: list[Any]
    kept: Any
    cycle: int = 1

    @property
    def case(self) -> Any:
        """The first case, or None."""
        return self.cases[0] if self.cases else None

    def _each(self, name: str) -> list[Any]:
        """The cases' tensors of a name, those that share an address once."""
        found = {getattr(case, name).data_ptr(): getattr(case, name) for case in self.cases}
        return list(found.values())

    def restore(self) -> None:
        """Puts the states back to what they were before anything was timed."""
        for state in self._each("state"):
            state.copy_(self.kept)

    def finite(self) -> bool:
        """Whether the outputs of the last call, and the states, are numbers."""
        import torch

        # A sum, since isfinite() of a state needs as much memory again
        sums = [state.sum(dtype=torch.float32) for state in self._each("state")]
        return all(bool(x.isfinite().all()) for x in (*sums, *self._each("output")))


def _call(
    function: Callable[..., Any], arguments: list[tuple[Any, ...]], n: int
) -> Callable[[int], Any]:
    if n == 1:
        only = arguments[0]
        return lambda _: function(*only)
    return lambda r: function(*arguments[r % n])


class Session:
    """One device's checker, timer and loaded functions."""

    def __init__(self, device: Device, index: int, store: Store, policy: Policy):
        self.device, self.index, self.store = device, index, store
        if device.kind == "cuda":
            import torch

            torch.cuda.set_device(index)
        self.place = f"cuda:{index}" if device.kind == "cuda" else "cpu"
        reader = self._reader() if device.kind == "cuda" else None
        self.chained: Chained | None = None
        if policy.l2 == "chain":
            from gdntune.tuning.chain import make_chain_timer

            self.timer: Timer = (chained := make_chain_timer(device, policy, reader))
            self.chained = chained
        else:
            self.timer = make_timer(device, policy, reader)
        self._checkers: dict[Contract, Checker] = {}

    def _reader(self) -> Callable[[Any], Any]:
        """The kernel that reads the flush buffer: the floor's read form under a name of its own."""
        import torch

        contract, variant = kernels.flush()
        function = self.function(contract, variant, label="flush")
        sink = torch.zeros(1, device=self.place)
        # Views, no tensors of their own: a graph may be captured at the first call.
        views: dict[int, tuple[Any, Any]] = {}

        def read(buffer: Any) -> None:
            view = views.get(buffer.data_ptr())
            if view is None:
                rows = buffer.view(torch.float32).view(-1, variant.knobs["tile"])
                # It takes all rows in order: of the slots only their number is looked at.
                view = views[buffer.data_ptr()] = rows, buffer.view(torch.int32)[: len(rows)]
            function(*view, None, 1.0, sink)

        return read

    def _producer(self) -> Callable[[Any, Any], Any]:
        """The kernel that writes a chained call's inputs, and lets it start before it ends."""
        import torch

        function = self.function(*kernels.producer(), label="producer")
        # the one row's slot
        zero = torch.zeros(1, dtype=torch.int32, device=self.place)
        sink = torch.zeros(1, device=self.place)

        def copy(source: Any, target: Any) -> None:
            row = source.view(torch.float32).view(1, -1)
            function(row, zero, target.view(torch.float32).view(1, 1, -1), 1.0, sink)

        return copy

    def function(
        self, contract: Contract, variant: Variant, label: str | None = None
    ) -> Callable[..., Any]:
        """A variant's compiled function."""
        spec = object_spec(kernels.get(variant.kernel), contract, variant, self.device, label=label)
        return self.store.load([spec])[spec.key]

    def load(self, contract: Contract, variants: Sequence[Variant]) -> None:
        """Loads many functions at once, which links those of the store into one library."""
        self.store.load(
            object_spec(kernels.get(v.kernel), contract, v, self.device) for v in variants
        )

    def synchronize(self) -> None:
        """Waits for the device; an illegal access of an earlier launch is raised here."""
        if self.device.kind == "cuda":
            import torch

            torch.cuda.synchronize()

    def check(self, contract: Contract, variant: Variant) -> tuple[bool, str, float | None]:
        """Whether a variant agrees with the fp64 reference, the worst coordinate where it does not,
        and its error.
        """
        checker = self._checkers.get(contract)
        if checker is None:
            # One contract's truths at a time: in fp64 they are many times the cell's own tensors.
            self._checkers.clear()
            checker = self._checkers[contract] = Checker(contract, self.place)
        verdict = checker.check(self.function(contract, variant))
        self.synchronize()
        return verdict.ok, verdict.worst, verdict.error

    def launched(self, call: Callable[[int], Any]) -> tuple[str, ...] | None:
        """The names of what one more call launches, in order; None where the timer is not CUPTI's:
        to begin its recordings amid graphs or events might change what these measure.
        """
        if self.timer.policy.timer != "cupti":
            return None
        source = cupti.recorder()
        self.synchronize()
        source.start()
        try:
            call(0)
            self.synchronize()
        finally:
            records = source.stop()
        return tuple(name for _, _, name in sorted(records))

    def calls(
        self,
        problem: Problem,
        role: str,
        variants: Sequence[Variant],
        packed: bool = False,
        seed: int = 0,
    ) -> Calls:
        """Callables of a cell's variants over one shared set of tensors. Under `chain` the decode
        role's come first. packed: whether something reads q, k and v from one tensor.
        """
        turns = 1
        if self.chained is not None:
            from gdntune.tuning.chain import layers_of

            turns = layers_of(problem, self.device)
        elif self.timer.policy.l2 == "rotate":
            turns = self._turns(problem)
        cases = [] if role == "floor" else self._cases(problem, turns, packed, seed)
        # Under `chain` all layers begin with the same values, and under `rotate` they are one pool.
        kept = cases[0].state.clone() if cases else None
        arguments = [c.arguments() for c in cases] or _floor_arguments(
            problem, turns, self.place, seed
        )
        functions = [self.function(problem.contract, v) for v in variants]
        calls: list[Callable[[int], Any]]
        if len(cases) > turns:
            calls = [rings.in_turns([partial(f, *x) for x in arguments]) for f in functions]
            return Calls(calls, cases, kept, cycle=len(cases))
        calls = [_call(f, arguments, turns) for f in functions]
        return Calls(calls, cases, kept)

    def _cases(self, problem: Problem, turns: int, packed: bool, seed: int) -> list[Any]:
        """A cell's case; under `rotate` one a turn, of one pool; under `chain` one a layer, in what
        the timer times. Behind a ring one a step of its cycle, under `chain` a layer at each.
        """
        from gdntune.checking.cases import make_case

        if self.chained is not None:
            from gdntune.tuning.chain import Chain

            # The last cell's pools go before this one's are made.
            self.chained.chain = None
            copy = self._producer() if self.device.kind == "cuda" else None
            self.chained.chain = chain = Chain(problem, self.place, turns, packed, seed, copy)
            return rings.spread(chain.cases) if problem.contract.ring else chain.cases
        if turns == 1:
            case = make_case(problem, self.place, seed, settled=False)
            return rings.steps(case) if problem.contract.ring else [case]
        return _rotated(
            make_case(problem, self.place, seed, slots=problem.B * turns, settled=False)
        )

    def _turns(self, problem: Problem) -> int:
        """Turns of a walk through a pool so large that what a turn touched has left L2 before it
        comes again: a power of two.
        """
        if not problem.contract.reads_index or problem.contract.ring:
            raise UnsupportedProblem(
                f"l2='rotate' with {problem.contract.key()}: it walks through the slots of a pool"
                " by initial_state_indices; expected a contract with pool=True, no"
                " ssm_state_indices and no ring, or another L2 policy"
            )
        # Four times L2 in all, as the buffer of `cold-dirty`.
        least = -(-4 * self.device.l2_bytes // sol.state_bytes(problem))
        return min(TURNS, max(2, 1 << (least - 1).bit_length()))

    @property
    def gpu(self) -> int | None:
        """The device as `arch.clocks` takes it: torch's number of a GPU, None of a CPU."""
        return self.index if self.device.kind == "cuda" else None

    def peaks(self) -> dict[str, float]:
        """The DRAM's bandwidth by source, GB/s."""
        # A throttled clock would give a peak that is too low.
        settled(self.gpu)
        return measured_peaks(self.device, self.index)


def _rotated(case: Any) -> list[Any]:
    """The case with the slots of each turn of a walk through its pool; indices are tensors of their
    own, thus aligned.
    """
    import torch

    # Shuffled over the whole pool: slots in order would be read as one stream.
    order = torch.randperm(case.state.shape[0], device=case.state.device, dtype=torch.int32)
    indices = [index.clone() for index in order.split(case.problem.B)]
    return [
        dataclasses.replace(
            case, read_index=index, write_index=None if case.write_index is None else index
        )
        for index in indices
    ]


def _floor_arguments(
    problem: Problem, turns: int, place: str, seed: int = 0
) -> list[tuple[Any, ...]]:
    """A floor kernel's arguments for each turn, over states of their own. Its factor is 1: it
    writes back what it read.
    """
    from gdntune.checking.cases import floor_case

    whole = msgspec.structs.replace(problem, B=problem.B * turns)
    form = sol.floor_form(problem.contract)
    state, slots, buffer, factor, sink = floor_case(whole, form, place, seed)
    buffers = [None] * turns if buffer is None else buffer.split(problem.B)
    # A turn's slots are those of its own part of the states, shuffled
    named = [slots[slots // problem.B == turn] % problem.B for turn in range(turns)]
    return [
        (part, *x, factor, sink)
        for part, *x in zip(state.split(problem.B), named, buffers, strict=True)
    ]
