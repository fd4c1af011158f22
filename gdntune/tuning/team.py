"""The workers of a run: started, compared, and how jobs are shared out among them."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

from msgspec import UnsetType

from gdntune.device.arch import Card, Device
from gdntune.errors import MeasurementError, UnsupportedProblem
from gdntune.objects.build import Built
from gdntune.objects.store import Store
from gdntune.timing import Policy
from gdntune.tuning import executors, worker
from gdntune.tuning.attempts import CHECK_TIMEOUT_S
from gdntune.tuning.executors import Crashed, Worker
from gdntune.tuning.header import identity

Executor = Literal["local", "ray"]


class Team:
    """The workers. Closed as a context manager, which removes the folder of their turns."""

    def __init__(
        self,
        workers: Sequence[Worker],
        device: Device,
        executor: Executor,
        turns: "tempfile.TemporaryDirectory[str] | None" = None,
    ):
        self.workers = list(workers)
        self._device, self._executor, self._turns = device, executor, turns
        self._marked = False

    @property
    def devices(self) -> set[str]:
        """The names of the workers' devices."""
        return {worker.name for worker in self.workers}

    @property
    def count(self) -> int:
        """How many devices there are. Ray's workers have no names before they begin."""
        return len(self.devices) if self.in_turns else len(self.workers)

    @property
    def several(self) -> bool:
        """Whether devices share the journal's cells, so that it says which one timed which."""
        return self.count > 1 or self._marked

    @property
    def in_turns(self) -> bool:
        """Whether workers share a device, and prepare cells while one of them times."""
        return self._turns is not None

    def agreed(self, measure: bool) -> tuple[Policy, str | None, dict[str, float]]:
        """The policy in force, its note, and the peaks, measured where asked for, by the first
        worker. Raises UnsupportedProblem for others of another kind.
        """
        first, others = self.workers[0], self.workers[1:]
        policy, note, peaks = asked(first, worker.resolve_task, measure)
        if others or self._executor != "local":
            # Ray's one worker may be on another host than the plan, so it is compared too.
            here = {**identity(self._device), **_named(policy)}
            there = executors.on_each(self.workers, identified)
            for one, theirs in zip(self.workers, there, strict=True):
                _refuse_others(one.name, here, theirs)
        return policy, note, peaks

    def of_other_cards(
        self, there: tuple[Card, ...] | UnsetType, here: Sequence[Card]
    ) -> Iterator[str]:
        """Names workers by their GPU too, so that a journal says so of each cell, where it was
        begun on others of the model; a note of it. there: its header's. here: of this host, as
        the devices.
        """
        known = {card.uuid for card in there} if isinstance(there, tuple) else set()
        if not known or {card.uuid for card in here} <= known:
            return
        each = len(self.workers) // len(here)
        for n, one in enumerate(self.workers):
            one.name = f"{one.name} {here[n // each].uuid}"
        self._marked = True
        yield (
            "the journal was begun on another card of the model: its times may differ by some"
            " percent, and the cells of this run name theirs"
        )

    def share(
        self,
        jobs: Iterable[Callable[[Worker], Any]],
        fit: Callable[[Worker], bool] = lambda _: True,
    ) -> Iterator[Any]:
        """The jobs' results as they come from the workers that are fit."""
        with closing(executors.share_out(self.workers, iter(jobs), fit)) as results:  # type: ignore[type-var]
            yield from results

    def __enter__(self) -> "Team":
        return self

    def __exit__(self, *exception: object) -> None:
        for one in self.workers:
            one.close()
        if self._turns:
            self._turns.cleanup()


def start_team(
    device: Device,
    indices: Sequence[int],
    executor: Executor,
    store: Store,
    built: Mapping[str, Built],
    policy: Policy,
    workers_per_device: int = 1,
) -> Team:
    """A worker for each of a host's devices, or several that take turns on it; or one for each of a
    Ray cluster's.
    """
    bundles = tuple(str(path) for path, _ in store.bundles)
    folder = None
    if workers_per_device > 1:
        folder = tempfile.TemporaryDirectory(prefix="gdntune-", ignore_cleanup_errors=True)
    starts = [
        worker.Start(device, i, str(store.root), bundles, policy, _turn(folder, i))
        for i in indices
        for _ in range(workers_per_device)
    ]
    workers: Sequence[Worker]
    if executor == "ray":
        from gdntune.tuning.ray import ray_workers

        keys = [key for key, b in built.items() if b.ok]
        workers = ray_workers(starts[0], keys, store, worker.begin_task)
    else:
        workers = [
            executors.Child(start, f"{device.kind}:{start.index}", worker.begin_task)
            for start in starts
        ]
    return Team(workers, device, executor, folder)


def _turn(folder: "tempfile.TemporaryDirectory[str] | None", index: int) -> str:
    """The file by whose lock workers take turns on a device; empty where there is one alone."""
    return "" if folder is None else str(Path(folder.name) / f"device-{index}")


def asked(one: Worker, task: Callable[..., Any], *args: Any) -> Any:
    """What a worker answers before anything is timed; MeasurementError where it crashes."""
    got = one.run(task, *args, timeout=CHECK_TIMEOUT_S)
    if isinstance(got, Crashed):
        raise MeasurementError(f"the timing process of {one.name} does not start: {got.reason}")
    return got


def identified(one: Worker) -> dict[str, str]:
    """What a worker says it is, see `header.identity`."""
    policy, _, _ = asked(one, worker.resolve_task, False)
    return {**asked(one, worker.identity_task), **_named(policy)}


def _named(policy: Policy) -> dict[str, str]:
    return {"timing policy": f"{policy.timer}, {policy.l2}"}


def _refuse_others(name: str, here: Mapping[str, str], theirs: Mapping[str, str]) -> None:
    differing = sorted(n for n in {**here, **theirs} if here.get(n) != theirs.get(n))
    if differing:
        said = "; ".join(
            f"{n}: {here.get(n, 'none')} here, {theirs.get(n, 'none')} there" for n in differing
        )
        raise UnsupportedProblem(
            f"{name} cannot share this run: {said}; expected devices of one model with the same"
            " software: leave the others out, or sweep them by themselves"
        )
