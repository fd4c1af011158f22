"""The bench: other libraries' kernels beside ours, in one measurement a cell. A run like a sweep's,
whose choices were made beforehand; what fails is a row with its reason.
"""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from gdntune import peers
from gdntune.device.arch import Device
from gdntune.objects.store import Store
from gdntune.runtime.dispatch import Runtime
from gdntune.timing import Policy
from gdntune.tuning.config import Config
from gdntune.tuning.plan import bench_plan
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
) -> Outcome:
    """Times a config's cells, each B, H and HV: the table's choice, the default rule's, the floor
    and each peer, interleaved.

    table: instead of the one in use. rounds: instead of the config's final_rounds. The rest as of
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
    means = Means(
        store,
        policy,
        tuple(devices) or (index,),
        executor,
        jobs,
        progress or Progress(),
        command,
    )
    return run(bench_plan(config, device, runtime, named, policy.l2), Path(folder), means)
