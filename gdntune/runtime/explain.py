"""What the runtime calls for a contract at some work units, and why, as plain values."""

from pathlib import Path
from typing import Any, Literal

from gdntune import kernels
from gdntune.device import arch
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

    def of(allowed: bool) -> dict[str, Any]:
        if table_path is not None:
            return _by_table(contract, work_units, table_path, allowed)
        return _in_use(contract, work_units, kind, index, allowed)

    said, other = of(dependent_launch), of(not dependent_launch)
    names = ("variant", "kernel", "knobs", "reason")
    otherwise = (
        {name: other[name] for name in names} if said["variant"] != other["variant"] else None
    )
    return {**said, "dependent_launch": dependent_launch, "otherwise": otherwise}


def _by_table(
    contract: Contract, work_units: int, path: Path, dependent_launch: bool
) -> dict[str, Any]:
    """By a table that was given, whatever device is at hand."""
    found = table.load(path)
    kernels.check_names(map(found.variant, found.variants), str(path))
    said = found.explain(contract, work_units, dependent_launch=dependent_launch)
    if said["variant"] is None:
        said |= _of(kernels.default(contract, work_units, found.device))
    said |= _as_called(contract, said, dependent_launch)
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
    said = source.table.explain(contract, work_units, dependent_launch=dependent_launch)
    said |= _as_called(contract, said, dependent_launch)
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


def _as_called(contract: Contract, said: dict[str, Any], dependent_launch: bool) -> dict[str, Any]:
    """What changes where calls take another form of the variant that is named than it was timed
    in; nothing where they do not, or this version has no such variant.
    """
    named = Variant(said["kernel"], said["variant"], said["knobs"])
    try:
        choice = dispatch.launched(contract, dispatch.Choice(1, named, ""), dependent_launch)
    except LookupError:
        return {}
    called = choice.variant
    if called.id == named.id:
        return {}
    how = "with" if dependent_launch else "without"
    reason = f"{said['reason']}; that is of {named.id}, called in its form {how} dependent launch"
    return {**_of(called), "reason": reason}


def _stale(found: table.Table) -> list[str]:
    names = table.stale(found, kernels.fingerprints(found.device.kind))
    return (
        [f"{', '.join(names)} is installed with other code than was measured: the table is stale"]
        if names
        else []
    )
