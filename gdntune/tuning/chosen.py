"""The objects that tables can choose: what a runtime will call, and no more."""

from collections.abc import Iterable
from pathlib import Path

from gdntune import kernels
from gdntune.device.arch import Device
from gdntune.errors import UnsupportedProblem, listed
from gdntune.objects.store import ObjectSpec
from gdntune.problem import Contract
from gdntune.results import table
from gdntune.runtime.dispatch import Runtime
from gdntune.tuning.plan import session_objects


def contracts_of(paths: Iterable[Path]) -> list[Contract]:
    """The contracts that tables have rules for, each once."""
    return list(dict.fromkeys(rule.when for path in paths for rule in table.load(path).rules))


def chosen_objects(
    contracts: Iterable[Contract],
    paths: Iterable[Path],
    device: Device,
    dependent_launch: bool = False,
) -> list[tuple[ObjectSpec, str]]:
    """The objects that any of the tables can choose for contracts on a device, each once, with its
    compiler. A rule that cannot serve a contract is passed over, as the runtime does.

    dependent_launch: also what calls that allow it take.

    UnsupportedProblem for a contract of an op that no table has rules for, or a table of another
    kind of device.
    """
    wanted = list(contracts)
    found: dict[str, tuple[ObjectSpec, str]] = {}
    served: set[Contract] = set()
    timed_under: set[str] = set()
    for path in paths:
        runtime = Runtime(device)
        given = runtime.use(path)
        ops = {rule.when.op for rule in given.rules}
        timed_under |= {given.policy_of(rule).get("l2", "") for rule in given.rules}
        for contract in (c for c in wanted if c.op in ops):
            served.add(contract)
            for allowed in (False, True) if dependent_launch else (False,):
                for choice in runtime.choices(contract, allowed):
                    spec = runtime.spec(contract, choice.variant)
                    found[spec.key] = (spec, kernels.get(choice.variant.kernel).compiler)
    if left := {c.op for c in wanted if c not in served}:
        raise UnsupportedProblem(
            f"no given table has rules for {listed(sorted(left))}: give one for each op, or only"
            " parts of the config that the tables are of (--part)"
        )
    # what `gdntune.check_table` needs besides
    found |= {pair[0].key: pair for pair in session_objects(device, timed_under)}
    return list(found.values())
