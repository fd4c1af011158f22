"""Commands that put a table to use, and say which one a GPU gets."""

import os
import shlex
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gdntune.cli.common import AsJson, io_fault, print_hanging, print_json, refusing
from gdntune.errors import TableError, ToolMissing, UnsupportedProblem, counted, listed


@refusing
def table_install(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A sweep's folder, or a table's file.")
    ],
) -> None:
    """Put a sweep's table where the runtime looks for it, for the device that it was measured on.

    A table that is there is kept beside it as NAME.json.before.
    """
    from gdntune import kernels
    from gdntune.files import write_whole
    from gdntune.objects.store import NOWHERE
    from gdntune.results import table
    from gdntune.runtime import dispatch

    path = run / "table.json" if run.is_dir() else run
    if run.is_dir() and not path.exists():
        raise UnsupportedProblem(
            f"{run}: it has no table.json; expected a folder that `gdntune sweep` has finished"
        )
    found = table.load(path)
    kernels.check_names(map(found.variant, found.variants), str(path))
    instead = f"GDNTUNE_TABLE={shlex.quote(str(path.resolve()))}, which needs no folder"
    for op in sorted({rule.when.op for rule in found.rules}):
        target = dispatch.user_tables() / found.device.slug / f"{op}.json"
        if target.is_relative_to(NOWHERE):
            raise ToolMissing(f"this user has no home folder: set {instead}")
        try:
            if os.path.isfile(target):
                before = target.with_name(target.name + ".before")
                write_whole(before, target.read_bytes())
                typer.echo(f"the one that was there is now {before}")
            table.save(found, target)
        except OSError as e:
            raise ToolMissing(f"{io_fault(e)}, or set {instead}") from None
        except TableError as e:
            raise ToolMissing(f"{e}; set {instead}") from None
        typer.echo(f"{target}: in use for {op} on {found.device.name}, from the next process on")
    if noise := table.noise_words(found.evidence):
        typer.echo(f"WARNING: the table is noisy: {noise}", err=True)


@refusing
def table_which(
    gpu: Annotated[
        str | None,
        typer.Option(help="A GPU by name, as 'NVIDIA L40S' or h20; by default the device here."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say which table a GPU gets, and how far it can be trusted there. Needs no GPU."""
    import logging
    import typing

    from gdntune.device import arch, gpus
    from gdntune.problem import Op
    from gdntune.runtime.dispatch import Runtime

    device = gpus.named(gpu) if gpu else arch.detect()
    runtime = Runtime(device)
    log = logging.getLogger("gdntune")
    level = log.level
    # what the runtime warns of stands in the rows
    log.setLevel(logging.ERROR)
    try:
        rows = [_which(op, device, runtime.source(op)) for op in typing.get_args(Op)]
    finally:
        log.setLevel(level)
    if as_json:
        print_json({"device": device, "tables": rows})
        return
    units = "threads" if device.kind == "cpu" else "SMs"
    typer.echo(f"{device.name}: {device.arch}, {device.sm_count} {units}")
    for row in rows:
        typer.echo(f"  {row['op']}: {row['table'] or 'none'}")
        print_hanging(f"    {row['why']}", 4)
        for warning in row["warnings"]:
            print_hanging(f"    WARNING: {warning}", 6)


def _which(op: str, device: Any, source: Any) -> dict[str, Any]:
    from gdntune import kernels
    from gdntune.device import gpus
    from gdntune.results.table import noise_words, stale

    if source is None:
        why = "no table of this kind of device: each kernel's default rule is used; sweep"
        return {"op": op, "table": None, "why": why, "warnings": []}
    of = source.table.device
    warnings = []
    if names := stale(source.table, kernels.fingerprints(device.kind)):
        warnings.append(f"stale: measured with other code of {listed(names)}; sweep again")
    if noise := noise_words(source.table.evidence):
        warnings.append(f"noisy: {noise}")
    if of.kind == "cuda" and gpus.memory_class(of.name) != gpus.memory_class(device.name):
        warnings.append(
            f"measured on {of.name}, which has {gpus.memory_class(of.name)} and not"
            f" {gpus.memory_class(device.name)}: results are right, choices may be far from the"
            " best; sweep before you rely on speed"
        )
    if of.arch != device.arch:
        warnings.append(f"measured on {of.arch}; on {device.arch} nothing of it was timed")
    if (share := _balance(device, of)) and max(share, 1 / share) > 1.25:
        warnings.append(
            f"an SM has {share:.1f} times the DRAM bandwidth that it has on the {of.name}: results"
            " are right, choices may be far from the best; sweep before you rely on speed"
        )
    why = {
        "nearest": f"shipped for {of.name}, nearest by SMs and bandwidth; a sweep makes your own",
        "shipped": f"shipped for {of.name}",
        "the user's": "installed by you",
    }.get(source.why, f"named by {source.why}")
    return {"op": op, "table": str(source.path), "why": why, "warnings": warnings}


def _balance(device: Any, of: Any) -> float | None:
    """The DRAM bandwidth of one SM over that of another GPU; None where a peak is not known."""
    if device.kind != "cuda" or not device.peak_gb_s or not of.peak_gb_s:
        return None
    return (device.peak_gb_s / device.sm_count) / (of.peak_gb_s / of.sm_count)


@refusing
def table_export(
    path: Annotated[Path, typer.Argument(metavar="TABLE", help="A table's file.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the files.")],
    heads: Annotated[
        int, typer.Option(min=1, help="Value heads of a rank, by which work units are batch sizes.")
    ],
    form: Annotated[Literal["vllm-json"], typer.Option("--format", help="The form.")] = "vllm-json",
) -> None:
    """Write a table in another project's form: as vLLM keeps tuned configurations, a JSON file a
    contract with a configuration by batch size.
    """
    from gdntune.files import write_whole
    from gdntune.results import table
    from gdntune.results.vllm_json import vllm_json

    assert form == "vllm-json"
    files = vllm_json(table.load(path), heads)
    for name, text in files.items():
        write_whole(out / name, text.encode())
    typer.echo(f"{out}: {counted(len(files), 'file')}")


def register(tables: typer.Typer) -> None:
    """Adds these commands to `gdntune table`."""
    tables.command("install")(table_install)
    tables.command("which")(table_which)
    tables.command("export")(table_export)
