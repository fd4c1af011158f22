"""A journal's header, and what two timing processes must have in common to share one."""

from collections.abc import Sequence

import msgspec

from gdntune import kernels
from gdntune.device.arch import Card, Device, software
from gdntune.results.journal import now
from gdntune.results.records import Run
from gdntune.timing import Policy
from gdntune.tuning.plan import Plan


def run_header(plan: Plan, policy: Policy, command: str) -> Run:
    """A journal's first line as far as it is known before anything runs; `resolved` completes it.

    Raises UnsupportedProblem for a timer that a CPU cannot have; on CUDA the timing process finds
    out.
    """
    config, device = plan.config, plan.device
    if device.kind == "cpu":
        policy, _ = policy.resolve(device)
    workload = config.search.workload
    return Run(
        config=config.name,
        config_sha256=config.sha256,
        device=device,
        software={**software(), **plan.origins},
        policy=_known(policy),
        kernels=kernels.fingerprints(device.kind),
        started=now(),
        command=command,
        workload=workload if isinstance(workload, tuple) else msgspec.UNSET,
        cells=len(plan.problems),
        rounds=config.search.final_rounds,
        placements=config.search.sets,
        **plan.header_fields(),
    )


def resolved(
    header: Run, policy: Policy, peaks: dict[str, float], cards: Sequence[Card] = ()
) -> Run:
    """A header with the policy in force, the measured peaks and the GPUs that time."""
    # A tenth of a GB/s: the digits beyond differ from run to run and say nothing.
    rounded = {name: round(value, 1) for name, value in peaks.items()}
    found = tuple(cards) or msgspec.UNSET
    return msgspec.structs.replace(header, policy=_known(policy), peaks=rounded, cards=found)


def _known(policy: Policy) -> dict[str, str]:
    # `auto` is not known yet: what is left out is compared with nothing.
    return {name: x for name, x in (("timer", policy.timer), ("l2", policy.l2)) if x != "auto"}


def identity(device: Device) -> dict[str, str]:
    """What must be equal for two processes to share a run, by name: device, software, kernels'
    code.
    """
    return {
        "device": (
            f"{device.name}, {device.arch}, {device.sm_count} SMs, {device.l2_bytes} bytes of L2"
        ),
        **software(),
        **{f"code of {name}": code for name, code in kernels.fingerprints(device.kind).items()},
    }
