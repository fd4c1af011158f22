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
) -> dict[str, Any]:
    """`Table.explain` of the table in use, or of the one given, with `table`, `origin` and
    `warnings`.

    `variant` is the default rule's choice where no rule is near. Without a given table it is what
    the runtime calls on the device at hand.
    """
    table.check_work_units(work_units)
    if table_path is not None:
        found = table.load(table_path)
        kernels.check_names(map(found.variant, found.variants), str(table_path))
        said = found.explain(contract, work_units)
        if said["variant"] is None:
            said |= _of(kernels.default(contract, work_units, found.device))
        return {**said, "table": str(table_path), "origin": "given", "warnings": _stale(found)}
    runtime = dispatch.runtime(arch.detect(kind, index).kind, index)
    source = runtime.source(contract.op)
    choice = next(c for c in reversed(runtime.choices(contract)) if c.first <= work_units)
    if source is None:
        said = {
            "contract": contract.key(),
            "work_units": work_units,
            "device": runtime.device.name,
            "match": "none",
        }
        said |= _of(choice.variant)
        return {**said, "reason": choice.why, "table": None, "origin": "", "warnings": []}
    said = source.table.explain(contract, work_units)
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


def _stale(found: table.Table) -> list[str]:
    names = table.stale(found, kernels.fingerprints(found.device.kind))
    return (
        [f"{', '.join(names)} is installed with other code than was measured: the table is stale"]
        if names
        else []
    )
