"""The command line: parses, calls one function, prints. What a command needs is imported when it
runs.
"""

import io
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gdntune import __version__
from gdntune.cli import ahead, explain, install, judging, results, tables
from gdntune.cli import configs as cli_configs
from gdntune.cli.common import (
    FINDINGS,
    L2,
    WRONG_USE,
    AsJson,
    Batch,
    Bundles,
    ConfigFile,
    DeviceKind,
    Devices,
    Heads,
    Index,
    Jobs,
    OwnKernels,
    PartNames,
    Program,
    Timer,
    Tokens,
    Where,
    config_of,
    devices_of,
    indices,
    io_fault,
    policy_of,
    print_json,
    refusing,
    target_of,
    terminal,
)
from gdntune.errors import ToolMissing, UnsupportedProblem

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from gdntune.report.report import Report
    from gdntune.results.table import Table

app = Program(
    name="gdntune",
    help=(
        "Compiles, checks and times variants of Gated DeltaNet and KDA decode kernels on the GPU or"
        " CPU at hand, and writes a table that says which one to call. Exit codes: 0 done, 1 "
        "findings, 2 wrong use or something missing."
    ),
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    # Single newlines are spaces: texts reflow at any width.
    rich_markup_mode="markdown",
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and stop."
        ),
    ] = False,
) -> None:
    """What stands before a command."""


@app.command()
@refusing
def sweep(
    config: ConfigFile,
    part: PartNames = None,
    batch: Batch = None,
    tokens: Tokens = None,
    heads: Heads = None,
    own_kernels: OwnKernels = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what the sweep would take, and stop.")
    ] = False,
    arch: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run: for a GPU that is not here, as h20, 'H100 PCIe', sm_90a."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for journal, table and report; default results/NAME."),
    ] = None,
    device: DeviceKind = None,
    index: Index = 0,
    devices: Devices = None,
    executor: Where = "local",
    table: Annotated[
        list[Path] | None,
        typer.Option(
            help="Time this table's choices to the end too, for `gdntune judge`; may be repeated."
        ),
    ] = None,
    jobs: Jobs = None,
    timer: Timer = None,
    l2: L2 = None,
    bundle: Bundles = None,
    as_json: AsJson = False,
) -> None:
    """Compile, check and time every variant of a config; write journal, table and report to a
    folder.

    Several devices share the cells; a cell's variants are all timed on one. A sweep that was
    stopped is resumed by the same command. Variants that fail are counted; the exit code is 0 where
    a table was made, else 1.
    """
    from gdntune.cli.progress import shown

    with shown() as bar:
        import msgspec

        from gdntune import search
        from gdntune.objects.store import Store
        from gdntune.results.table import load
        from gdntune.tuning.estimate import estimate

        wanted = config_of(config, part, own_kernels, batch=batch, tokens=tokens, heads=heads)
        judged = [load(path) for path in table or ()]
        if arch and not dry_run:
            raise UnsupportedProblem(
                f"--arch {arch} without --dry-run: a sweep times the device that is here; add"
                " --dry-run, or compile for it: `gdntune compile CONFIG --arch NAME`"
            )
        if arch:
            shared, found = indices(devices, executor), target_of(arch)
        else:
            try:
                shared, found = devices_of(wanted, device, index, devices, executor)
            except ToolMissing as e:
                if not dry_run:
                    raise
                raise ToolMissing(f"{e}; --arch names a GPU that is not here, as h200") from None
        folder = out or Path("results") / wanted.name
        store = Store(bundles=bundle or ())
        # Before anything runs, and to stderr: a sweep may take hours, and its JSON is one document.
        size = estimate(wanted, found, store, jobs, max(1, len(shared)), l2)
        said = f"{wanted.name} on {found.name}: {size.words()}"
        if dry_run:
            about = {"config": wanted.name, "device": found, "folder": str(folder)}
            if as_json:
                print_json({**about, **msgspec.structs.asdict(size)})
            else:
                typer.echo(said)
            return
        typer.echo(said, err=True)
        outcome = search.sweep(
            wanted,
            folder,
            device=found,
            index=index,
            devices=shared,
            executor=executor,
            store=store,
            jobs=jobs,
            policy=policy_of(wanted, timer, l2),
            progress=bar,
            command=shlex.join(["gdntune", *sys.argv[1:]]),
            judged=judged,
        )
    made, files, note = _written(folder)
    outcome.notes.extend(note)
    if as_json:
        chosen = made.frame[made.frame["chosen"]]
        over = chosen["over_floor"]
        print_json(
            {
                "config": wanted.name,
                "device": found,
                "folder": str(folder),
                "files": files,
                "table": outcome.table is not None,
                "cells": len(wanted.problems()),
                "chosen": len(chosen),
                "over_floor_max": None if over.isna().all() else float(over.max()),
                "notes": outcome.notes,
            }
        )
    else:
        _print_summary(made, outcome.notes, folder, files)
        if outcome.table is not None:
            _print_use(outcome.table, folder)
    if outcome.table is None:
        raise typer.Exit(FINDINGS)


@app.command()
@refusing
def bench(
    config: ConfigFile,
    part: PartNames = None,
    batch: Batch = None,
    tokens: Tokens = None,
    heads: Heads = None,
    own_kernels: OwnKernels = None,
    peers: Annotated[
        str,
        typer.Option(
            help=(
                "Of flashinfer, fla, sglang, vllm and apart (a layer's step of ours in three"
                " launches), separated by commas; package.module: one of your own with a PEER."
            )
        ),
    ] = "flashinfer,fla,sglang",
    table: Annotated[
        Path | None,
        typer.Option(help="Time this table's choices instead of those of the table in use."),
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of each, instead of the config's search.final_rounds."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for journal, table and report; default results/NAME-bench."),
    ] = None,
    without: Annotated[
        list[Path] | None,
        typer.Option(
            help="A journal of this bench, or its folder: cells with times there are left out."
            " May be given again."
        ),
    ] = None,
    dependent_launch: Annotated[
        bool | None,
        typer.Option(
            "--dependent-launch/--no-dependent-launch",
            help="Time what calls with dependent_launch=True get, or what calls without it get."
            " Default: under chain what the table chose, else what calls without it get.",
        ),
    ] = None,
    device: DeviceKind = None,
    index: Index = 0,
    devices: Devices = None,
    workers_per_device: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes a GPU: while one of them times, the others compile peers' kernels."
            " Default: half of the cores, at most 8, under chain 3; 1 on a CPU.",
        ),
    ] = None,
    executor: Where = "local",
    jobs: Jobs = None,
    timer: Timer = None,
    l2: L2 = None,
    bundle: Bundles = None,
    as_json: AsJson = False,
) -> None:
    """Time other libraries' kernels beside the tuned choice, the default and the floor; write
    journal and report to a folder.

    A peer that is not installed, does not serve a problem, fails its check or crashes is a row that
    says so. Several devices share the cells. A bench that was stopped is resumed. The exit code is
    0 where all cells of ours were timed, else 1.
    """
    from gdntune.cli.progress import shown

    with shown() as bar:
        from gdntune.objects.store import Store
        from gdntune.tuning import bench

        wanted = config_of(config, part, own_kernels, batch=batch, tokens=tokens, heads=heads)
        shared, found = devices_of(wanted, device, index, devices, executor)
        folder = out or Path("results") / f"{wanted.name}-bench"
        outcome = bench.bench(
            wanted,
            folder,
            peer_names=[name for part in peers.split(",") if (name := part.strip())],
            device=found,
            index=index,
            devices=shared,
            executor=executor,
            store=Store(bundles=bundle or ()),
            table=table,
            rounds=rounds,
            jobs=jobs,
            policy=policy_of(wanted, timer, l2),
            progress=bar,
            command=shlex.join(["gdntune", *sys.argv[1:]]),
            workers_per_device=workers_per_device,
            without=without or (),
            dependent_launch=dependent_launch,
        )
    made, files, note = _written(folder)
    outcome.notes.extend(note)
    # Without those that other journals have.
    asked = outcome.run.cells
    cells = asked if isinstance(asked, int) else len(wanted.all_problems())
    if as_json:
        print_json(
            {
                "config": wanted.name,
                "device": found,
                "folder": str(folder),
                "files": files,
                "cells": cells,
                "timed": outcome.timed,
                "peers": made.peers(),
                "notes": outcome.notes,
            }
        )
    else:
        _print_summary(made, outcome.notes, folder, files)
    if outcome.timed < cells:
        raise typer.Exit(FINDINGS)


def _written(folder: Path) -> tuple["Report", list[str], list[str]]:
    """The report of a folder, after it was written there; the names of all that is there; what
    could not be written, and why.
    """
    from gdntune.errors import ToolMissing
    from gdntune.objects.store import atomic_write
    from gdntune.report.report import report

    made, notes = report([folder]), []
    atomic_write(folder / "report.md", made.markdown().encode())
    atomic_write(folder / "report.csv", made.csv().encode())
    try:
        atomic_write(folder / "report.html", made.html().encode())
    except ToolMissing as e:
        # A page of an earlier run would be taken for this one's.
        (folder / "report.html").unlink(missing_ok=True)
        notes.append(f"no report.html: {e}")
    names = ("journal.jsonl", "table.json", "report.md", "report.csv", "report.html")
    return made, [name for name in names if (folder / name).exists()], notes


def _print_use(table: "Table", folder: Path) -> None:
    """Prints how a sweep's table is put to use; of one with noisy cells, what to do before."""
    from gdntune.cli.doctor import put_to_use
    from gdntune.results.table import noise_words

    noise = noise_words(table.evidence)
    if noise:
        typer.echo(f"The table is marked as noisy: {noise}.", err=True)
    typer.echo(f"To use the table{noise and ' as it is'}, {put_to_use(folder / 'table.json')}.")


def _print_summary(made: "Report", notes: list[str], folder: Path, files: list[str]) -> None:
    """Prints a report, what else a user should know, and where it is."""
    made.terminal(terminal())
    for note in notes:
        typer.echo(note)
    typer.echo(f"\n{folder}: {', '.join(files)}")
    pictures = "; report.html shows them in pictures" * ("report.html" in files)
    typer.echo(f"report.md explains the tables and the variants' ids{pictures}.")


@app.command()
@refusing
def doctor(index: Index = 0, as_json: AsJson = False) -> None:
    """Check this machine: what is here, what each part is for, what to do about what is missing.

    The exit code is 1 where a sweep could not run.
    """
    from rich.text import Text

    from gdntune.cli.doctor import examine

    findings = examine(index)
    if as_json:
        print_json(findings)
    else:
        console = terminal()
        for f in findings:
            colour = {"ok": "green", "note": "yellow", "hinders": "red"}[f.status]
            head = Text.assemble((f"{f.status:8}", colour), (f"{f.name:9}", "bold"))
            _print_beside(console, head, f.value)
            if f.status != "ok":
                _print_beside(console, Text(f"{'':17}for: "), f.meaning)
                _print_beside(console, Text(f"{'':17}do:  "), f.remedy)
        bad = [f.name for f in findings if f.status == "hinders"]
        console.print(
            Text(
                f"A sweep cannot run here: see {', '.join(bad)}."
                if bad
                else "A sweep can run here."
            )
        )
    if any(f.status == "hinders" for f in findings):
        raise typer.Exit(FINDINGS)


def _print_beside(console: "Console", head: "Text", text: str) -> None:
    """A text behind its head: in a terminal folded beside it, elsewhere on one line."""
    from rich.table import Table as Grid
    from rich.text import Text

    if not sys.stdout.isatty():
        console.print(Text.assemble(head, text), soft_wrap=True)
        return
    grid = Grid.grid()
    grid.add_column(width=len(head))
    grid.add_column()
    grid.add_row(head, Text(text, overflow="fold"))
    console.print(grid)


app.add_typer(ahead.ahead)
app.add_typer(results.results)
app.add_typer(judging.judging)
app.add_typer(explain.explaining)
install.register(tables.tables)
app.add_typer(tables.tables, name="table")
app.add_typer(cli_configs.configs)
app.add_typer(cli_configs.config, name="config")


def entry() -> None:
    """The program: the commands, on output of any encoding, and one message where it is full."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A path may have letters that the terminal's encoding has not.
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            app(prog_name="gdntune")
        finally:
            # Here, where a full disk or a closed pipe can still be told; at exit Python prints a
            # traceback.
            sys.stdout.flush()
    except BrokenPipeError:
        _silence()
        sys.exit(1)
    except OSError as e:
        _silence()
        typer.echo(f"gdntune: {io_fault(e)}", err=True)
        sys.exit(WRONG_USE)


def _silence() -> None:
    """Drops what standard output still holds: writing it at exit would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
