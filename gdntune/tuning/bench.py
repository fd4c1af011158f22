"""The bench: other libraries' kernels beside ours, in one measurement a cell. A run like a sweep's,
whose choices were made beforehand; what fails is a row with its reason.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from gdntune import peers
from gdntune.device.arch import Device, cpu_threads
from gdntune.errors import UnsupportedProblem
from gdntune.objects.store import Store
from gdntune.problem import Problem
from gdntune.results.journal import read, require_same
from gdntune.results.records import timed
from gdntune.runtime.dispatch import Runtime
from gdntune.timing import L2, Policy
from gdntune.tuning.config import Config
from gdntune.tuning.header import run_header
from gdntune.tuning.plan import Plan, bench_plan
from gdntune.tuning.progress import Progress
from gdntune.tuning.run import Means, Outcome, run
from gdntune.tuning.team import Executor

__all__ = ["Outcome", "bench"]


def bench(
    config: Config,
    folder: Path,
    *,
    peer_names: Sequence[str],
    device: Device,
    index: int = 0,
    devices: Sequence[int] = (),
    executor: Executor = "local",
    store: Store,
    table: Path | None = None,
    rounds: int | None = None,
    jobs: int | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
    command: str = "",
    workers_per_device: int | None = None,
    without: Sequence[Path] = (),
    dependent_launch: bool | None = None,
) -> Outcome:
    """Times a config's cells, each B, H and HV: the table's choice, the default rule's, the floor
    and each peer, interleaved.

    table: instead of the one in use. rounds: instead of the config's final_rounds.
    workers_per_device: processes that take turns on a GPU, so that peers' kernels of other cells
    are compiled while one of them times; None: as `workers`. without: journals of this bench whose
    cells are not timed again, see `left`. dependent_launch: as of `plan.bench_plan`. The rest as of
    `search.sweep`. Writes folder/journal.jsonl and folder/table.json, or resumes where the journal
    ends. Raises GdntuneError for a peer that is not known, a journal of another bench, a folder in
    use, a device that cannot hold its clocks.
    """
    if rounds is not None:
        search = msgspec.structs.replace(config.search, final_rounds=rounds)
        config = msgspec.structs.replace(config, search=search)
    runtime = Runtime(device, store)
    if table is not None:
        runtime.use(table)
    policy = policy or config.policy
    # A peer named twice is one peer.
    named = {name: peers.get(name) for name in dict.fromkeys(peer_names)}
    shared = tuple(devices) or (index,)
    if workers_per_device is None:
        workers_per_device = workers(device, len(shared), executor, len(named), policy.l2)
    elif workers_per_device > 1 and executor == "ray":
        raise UnsupportedProblem(
            f"workers_per_device={workers_per_device} with executor=ray: expected 1 there, a"
            " process for each of the cluster's devices"
        )
    means = Means(
        store,
        policy,
        shared,
        executor,
        jobs,
        progress or Progress(),
        command,
        workers_per_device,
    )
    plan = bench_plan(config, device, runtime, named, policy.l2, dependent_launch)
    plan, notes = left(plan, policy, without)
    outcome = run(plan, Path(folder), means)
    outcome.notes.extend(notes)
    return outcome


# More than these wait for one another: a cell is timed in a second, and compiled in ten. Under
# chain each holds the pools of its layers, up to a fifth of an H200's memory.
MOST_WORKERS, MOST_CHAINED = 8, 3


def workers(device: Device, devices: int, executor: Executor, peers: int, l2: L2) -> int:
    """Processes a device that a bench has by default: half of the cores compile, at most 8
    processes a GPU, under chain 3; one on a CPU, whose times they would disturb, and where no peer
    is timed.
    """
    if device.kind == "cpu" or executor != "local" or not peers:
        return 1
    most = MOST_CHAINED if l2 == "chain" else MOST_WORKERS
    return max(1, min(most, cpu_threads() // (2 * devices)))


def left(plan: Plan, policy: Policy, journals: Sequence[Path]) -> tuple[Plan, list[str]]:
    """A plan without the cells that have times in journals of the same bench, and in what software
    these differ. Their cards may be others: a cell is timed on one, all of it.

    Raises JournalError for a journal of another one: other peers or versions of them, another
    table, rounds, policy, model of GPU, or other code of a kernel that has samples there.
    """
    header, notes = run_header(plan, policy, "gdntune bench"), list[str]()
    done: set[Problem] = set()
    for path in journals:
        there, records = read(path)
        notes += require_same(path, there, header, records)
        done |= timed(records)
    problems = tuple(p for p in plan.problems if p not in done)
    contracts = {p.contract for p in problems}
    rest = dataclasses.replace(
        plan,
        problems=problems,
        tried={c: v for c, v in plan.tried.items() if c in contracts},
        floors={c: v for c, v in plan.floors.items() if c in contracts},
    )
    return rest, notes
