"""The workers of a run: started, compared, and how jobs are shared out among them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Literal

from gdntune.device.arch import Device
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
    """The workers. Closed as a context manager."""

    def __init__(self, workers: Sequence[Worker], device: Device, executor: Executor):
        self.workers = list(workers)
        self._device, self._executor = device, executor

    @property
    def several(self) -> bool:
        """Whether cells are shared, so that the journal says which device timed which."""
        return len(self.workers) > 1

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


def start_team(
    device: Device,
    indices: Sequence[int],
    executor: Executor,
    store: Store,
    built: Mapping[str, Built],
    policy: Policy,
) -> Team:
    """A worker for each of a host's devices, or for each of a Ray cluster's."""
    bundles = tuple(str(path) for path, _ in store.bundles)
    starts = [worker.Start(device, i, str(store.root), bundles, policy) for i in indices]
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
    return Team(workers, device, executor)


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
