"""Workers on the devices of a Ray cluster: an actor each, which is replaced when a task crashes it
or hangs. Knows no tasks.

Ray places them: it gives each actor a device, on this host or another. What was compiled here goes
with them.
"""

import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gdntune.errors import GdntuneError, ToolMissing, UnsupportedProblem
from gdntune.objects.store import Store, atomic_write, default_root
from gdntune.tuning.executors import Begun, Crashed, Worker, started

T = TypeVar("T")
# A device that the cluster lists and does not give within this time is another job's.
GRANT_TIMEOUT_S = 120.0


class _Actor:
    """What lives in the process of a device."""

    def __init__(self, start: Any, files: Mapping[str, bytes]):
        root = Path(start.root)
        if not all((root / name).is_file() for name in files):
            # Another host, without the first one's files: they go into its own store.
            root = default_root()
            for name, data in files.items():
                if not (root / name).is_file():
                    atomic_write(root / name, data)
        # Another host may have a bundle in the same place, as an image gives it; where it has none
        # its store serves.
        bundles = tuple(b for b in start.bundles if Path(b).is_dir())
        self._start = msgspec.structs.replace(start, root=str(root), bundles=bundles)

    def where(self) -> str:
        """The device, as a journal names it."""
        import ray

        context = ray.get_runtime_context()
        ids = context.get_accelerator_ids().get("GPU", [])
        return f"{socket.gethostname()} {f'cuda:{ids[0]}' if ids else 'cpu'}"

    def call(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """The task's result."""
        return function(self._start, *arguments)


class RayWorker(Begun):
    """An actor with one device; see `executors.Worker`. name: the host and the device that Ray gave
    it first.
    """

    def __init__(
        self,
        start: Any,
        files: Any,
        needs: Mapping[str, Any],
        begin: Callable[[Any], Any] = started,
    ):
        super().__init__("", begin)
        self._start, self._files, self._needs = start, files, dict(needs)
        self._actor: Any = None
        self.name = self._place()

    def _place(self) -> str:
        import ray

        self._actor = ray.remote(**self._needs)(_Actor).remote(self._start, self._files)
        try:
            return str(ray.get(self._actor.where.remote(), timeout=GRANT_TIMEOUT_S))
        except ray.exceptions.GetTimeoutError:
            self._end()
            raise UnsupportedProblem(
                f"Ray gave no {self._start.device.kind} device within {GRANT_TIMEOUT_S:.0f} s:"
                " expected a cluster with a free one; see `ray status`"
            ) from None

    def _end(self) -> None:
        import ray

        # At exit Ray may have gone before its workers are closed.
        if ray.is_initialized():
            ray.kill(self._actor)

    def _restart(self) -> None:
        self._begun = False
        if not self._closed:
            self.name = self._place()

    def _call(self, function: Callable[..., T], *args: Any, timeout: float) -> "T | Crashed":
        import ray

        if self._closed:
            # Its actor may not have ended yet, and would still answer.
            return Crashed("crashed", "the worker was closed")
        try:
            found: T = ray.get(self._actor.call.remote(function, args), timeout=timeout)
            return found
        except ray.exceptions.GetTimeoutError:
            self._end()
            crashed = Crashed("timeout", f"no answer within {timeout:.0f} s")
        except ray.exceptions.RayActorError as e:
            crashed = Crashed("crashed", f"the process died ({' '.join(str(e).split())[:300]})")
        except ray.exceptions.RayTaskError as e:
            if isinstance(e.cause, GdntuneError):
                # What gdntune itself raises, as a local worker does; Ray's wrapping says nothing
                # more.
                raise e.cause from None
            # After an illegal access every later call of the process fails too.
            self._end()
            crashed = Crashed("crashed", f"{type(e.cause).__name__}: {str(e.cause)[-500:]}")
        self._restart()
        return crashed

    def close(self) -> None:
        """See `executors.Worker`."""
        self._closed = True
        self._end()


def ray_workers(
    start: Any, keys: Sequence[str], store: Store, begin: Callable[[Any], Any] = started
) -> list[Worker]:
    """A worker for each free GPU, or each host's CPU, of the Ray cluster at hand, or of this host
    where none runs.

    start: what every task is called with first; its index is that of the only device which Ray
        shows an actor. keys: the objects that tasks load.
    Raises ToolMissing where Ray is not installed, UnsupportedProblem where the cluster has no such
    device.
    """
    try:
        import ray
    except ImportError:
        raise ToolMissing(
            "Ray is not installed: pip install 'gdntune[ray]', or use --executor local"
        ) from None
    if not ray.is_initialized():
        # Joins a cluster that RAY_ADDRESS names, or starts one on this host.
        ray.init(include_dashboard=False, log_to_driver=False, configure_logging=False)
    needs = _needs(start.device.kind)
    if not needs:
        raise UnsupportedProblem(
            f"Ray's cluster has no free {start.device.kind} device: expected one whose nodes"
            " were started with some; see `ray status`"
        )
    # Put once, and fetched by the hosts that lack the files.
    files = ray.put(_files(store, keys))
    start = msgspec.structs.replace(start, index=0)
    with ExitStack() as begun:
        workers: list[Worker] = []
        for one in needs:
            worker = RayWorker(start, files, one, begin)
            begun.callback(worker.close)
            workers.append(worker)
        # All were placed: from here on the caller closes them.
        begun.pop_all()
        return workers


def _needs(kind: str) -> list[dict[str, Any]]:
    """What to ask Ray for: each GPU that is free, or each host as a whole, since a CPU's kernels
    take all its threads.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    if kind == "cuda":
        return [{"num_gpus": 1, "num_cpus": 0}] * int(ray.available_resources().get("GPU", 0))
    hosts = [n for n in ray.nodes() if n["Alive"] and n["Resources"].get("CPU", 0) >= 1]
    return [
        {
            "num_cpus": int(n["Resources"]["CPU"]),
            "scheduling_strategy": NodeAffinitySchedulingStrategy(n["NodeID"], soft=False),
        }
        for n in sorted(hosts, key=lambda n: n["NodeID"])
    ]


def _files(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """The loose objects of a store, by their paths in it; those of a bundle are not: it lies where
    each host has it.
    """
    found = {}
    for key in keys:
        # In this order: what has a manifest is whole.
        for path in (store.object_file(key), store.folder(key) / "manifest.json"):
            if path.is_file():
                found[path.relative_to(store.root).as_posix()] = path.read_bytes()
    return found
