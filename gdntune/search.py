"""The sweep: finds the fastest variant for each cell of a config, and derives the table that says
which serves where.
"""

from collections.abc import Sequence
from pathlib import Path

from gdntune.device.arch import Device
from gdntune.objects.store import Store
from gdntune.results.table import Table
from gdntune.timing import Policy
from gdntune.tuning.config import Config
from gdntune.tuning.plan import sweep_plan
from gdntune.tuning.progress import Progress
from gdntune.tuning.run import Means, Outcome, run
from gdntune.tuning.team import Executor

__all__ = ["Outcome", "Progress", "sweep"]


def sweep(
    config: Config,
    folder: Path,
    *,
    device: Device,
    index: int = 0,
    devices: Sequence[int] = (),
    executor: Executor = "local",
    store: Store,
    jobs: int | None = None,
    policy: Policy | None = None,
    progress: Progress | None = None,
    command: str = "",
    judged: Sequence[Table] = (),
) -> Outcome:
    """Runs a config on a device: writes folder/journal.jsonl and folder/table.json, or resumes
    where the journal ends.

    devices: CUDA devices of this host, by torch's numbering, that share the cells, instead of
    `index` alone; on a CPU a process for each number. executor: where the workers are; `ray` has
    one for each device of the Ray cluster at hand. policy: instead of the config's. judged: tables
    whose choices are timed to the end at the config's cells, so that `judge` compares final
    samples; what of them the config does not time is in the notes. Raises GdntuneError for a
    journal of another sweep, a folder in use, devices that differ, a tool that is missing, a device
    that cannot hold its clocks.
    """
    policy = policy or config.policy
    means = Means(
        store,
        policy,
        tuple(devices) or (index,),
        executor,
        jobs,
        progress or Progress(),
        command,
    )
    return run(sweep_plan(config, device, judged, policy.l2), Path(folder), means)
