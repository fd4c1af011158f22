"""What the runtime calls for a contract at some work units, and why, as plain values."""

import contextlib
from pathlib import Path
from typing import Any, Literal

from gdntune import kernels
from gdntune.device import arch
from gdntune.kernels.dependent_launch import tried
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract, Op
from gdntune.results import table
from gdntune.runtime import dispatch


def explanation(
    contract: Contract,
    work_units: int,
    table_path: Path | None = None,
    kind: Literal["auto", "cpu", "cuda"] = "auto",
    index: int = 0,
    dependent_launch: bool = False,
) -> dict[str, Any]:
    """`Table.explain` of the table in use, or of the one given, with `table`, `origin` and
    `warnings`, for calls that allow dependent launch or do not.

    `variant` is the default rule's choice where no rule is near. Without a given table it is what
    the runtime calls on the device at hand. `otherwise`: what the other kind of call gets; None
    where that is the same.
    """
    table.check_work_units(work_units)

    given = None if table_path is None else table.load(table_path)

    def of(allowed: bool) -> dict[str, Any]:
        if table_path is not None and given is not None:
            return _by_table(contract, work_units, given, table_path, allowed)
        return _in_use(contract, work_units, kind, index, allowed)

    said, other = of(dependent_launch), of(not dependent_launch)
    names = ("variant", "kernel", "knobs", "reason")
    otherwise = (
        {name: other[name] for name in names} if said["variant"] != other["variant"] else None
    )
    return {**said, "dependent_launch": dependent_launch, "otherwise": otherwise}


def _by_table(
    contract: Contract, work_units: int, found: table.Table, path: Path, dependent_launch: bool
) -> dict[str, Any]:
    """By a table that was given, whatever device is at hand."""
    kernels.check_names(map(found.variant, found.variants), str(path))
    said = _said(found, contract, work_units, found.device, dependent_launch)
    return {**said, "table": str(path), "origin": "given", "warnings": _stale(found)}


def _in_use(
    contract: Contract,
    work_units: int,
    kind: Literal["auto", "cpu", "cuda"],
    index: int,
    dependent_launch: bool,
) -> dict[str, Any]:
    """By the table in use on the device at hand."""
    runtime = dispatch.runtime(arch.detect(kind, index).kind, index)
    source = runtime.source(contract.op)
    choices = runtime.choices(contract, dependent_launch)
    choice = next(c for c in reversed(choices) if c.first <= work_units)
    if source is None:
        said = {
            "contract": contract.key(),
            "work_units": work_units,
            "device": runtime.device.name,
            "match": "none",
        }
        said |= _of(choice.variant)
        return {**said, "reason": choice.why, "table": None, "origin": "", "warnings": []}
    said = _said(source.table, contract, work_units, runtime.device, dependent_launch)
    warnings = _stale(source.table)
    if source.table.device.name != runtime.device.name:
        warnings.append(f"the table was measured on {source.table.device.name}")
    if said["variant"] != choice.variant.id:
        # The nearest rule's variants may be of no use to this contract; the runtime goes on to the
        # next.
        said |= _of(choice.variant)
        said["reason"] = choice.why
    said["device"] = runtime.device.name
    return {**said, "table": str(source.path), "origin": source.why, "warnings": warnings}


def in_use(op: Op, kind: Literal["auto", "cpu", "cuda"], index: int) -> table.Table | None:
    """The table that the runtime uses for an op on the device at hand."""
    source = dispatch.runtime(arch.detect(kind, index).kind, index).source(op)
    return None if source is None else source.table


def _of(variant: Variant) -> dict[str, Any]:
    return {"variant": variant.id, "kernel": variant.kernel, "knobs": dict(variant.knobs)}


def _said(
    found: table.Table,
    contract: Contract,
    work_units: int,
    device: arch.Device,
    dependent_launch: bool,
) -> dict[str, Any]:
    """What a table says of a contract, or the default rule of a device where it has no rule near,
    in the form that calls take; as the table names it where this version has no such variant.
    """
    said = found.explain(contract, work_units, dependent_launch=dependent_launch)
    weighed = False
    if said["variant"] is None:
        said |= _of(kernels.default(contract, work_units, device))
    else:
        weighed = tried(said["knobs"], said["policy"])
    named = Variant(said["kernel"], said["variant"], said["knobs"])
    choice = dispatch.Choice(1, named, said["reason"], weighed)
    with contextlib.suppress(LookupError):
        choice = dispatch.launched(contract, choice, dependent_launch)
    return {**said, **_of(choice.variant), "reason": choice.why}


def _stale(found: table.Table) -> list[str]:
    names = table.stale(found, kernels.fingerprints(found.device.kind))
    return (
        [f"{', '.join(names)} is installed with other code than was measured: the table is stale"]
        if names
        else []
    )
