"""The command line: parses, calls one function, prints. What a command needs is imported when it
runs.
"""

import io
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdntune import __version__
from gdntune.cli import configs as cli_configs
from gdntune.cli import install
from gdntune.cli import results as cli_results
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
from gdntune.errors import UnsupportedProblem, counted, no_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from rich.console import Console
    from rich.text import Text

    from gdntune.device.arch import Device
    from gdntune.objects.build import Built
    from gdntune.objects.store import ObjectSpec
    from gdntune.report.report import Report
    from gdntune.results.table import Table
    from gdntune.tuning.config import Config

app = Program(
    name="gdntune",
    help=(
        "Finds, verifies and ships the fastest Gated DeltaNet and KDA decode kernels for the GPU at"
        " hand. Exit codes: 0 done, 1 findings, 2 wrong use or something missing."
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
    """Finds, verifies and ships the fastest Gated DeltaNet and KDA decode kernels for the GPU at
    hand.
    """


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
            shared, found = devices_of(wanted, device, index, devices, executor)
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

        wanted = config_of(config, part, own_kernels)
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
    """Prints how a sweep's table is put to use; of one with noisy cells, why it should not be."""
    from gdntune.cli.doctor import put_to_use
    from gdntune.results.table import noise_words

    if noise := noise_words(table.evidence):
        typer.echo(f"The table is marked: {noise}.", err=True)
    else:
        typer.echo(f"To use the table, {put_to_use(folder / 'table.json')}.")


def _print_summary(made: "Report", notes: list[str], folder: Path, files: list[str]) -> None:
    """Prints a report, what else a user should know, and where it is."""
    made.terminal(terminal())
    for note in notes:
        typer.echo(note)
    typer.echo(f"\n{folder}: {', '.join(files)}")


@app.command("compile")
@refusing
def compile_(
    config: ConfigFile,
    arch: Annotated[
        str,
        typer.Option(
            help="sm_90a, sm_100a, ..., or a GPU's name, as h20; cpu: this CPU; native: the device"
            " at hand."
        ),
    ],
    part: PartNames = None,
    own_kernels: OwnKernels = None,
    table: Annotated[
        list[Path] | None,
        typer.Option(
            help="Compile just what this table can choose for the config's contracts; one an op."
        ),
    ] = None,
    of_bench: Annotated[
        bool,
        typer.Option(
            "--bench",
            help="Compile just what a bench of the config needs: what the tables in use, or"
            " --table, choose there, the default rule's choices and the floors.",
        ),
    ] = False,
    dependent: Annotated[
        bool,
        typer.Option(
            "--dependent-launch",
            help="With --table: also what calls with dependent_launch=True take.",
        ),
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Folder to link all objects into, for a machine without a compiler."),
    ] = None,
    l2: L2 = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Compile every object that a sweep of a config needs, or just what tables can choose for it,
    and say how many each part needs. Needs no GPU.

    The exit code is 1 where one does not compile.
    """
    import msgspec

    from gdntune.cli.progress import stage
    from gdntune.objects.build import compile_objects
    from gdntune.objects.store import Store, write_bundle

    wanted = config_of(config, part, own_kernels)
    if l2 is not None:
        policy = msgspec.structs.replace(wanted.policy, l2=l2)
        wanted = msgspec.structs.replace(wanted, policy=policy)
    device = target_of(arch)
    # Before minutes of compiling, which a file at that place would make worthless.
    if bundle and (fault := no_folder(bundle)):
        raise UnsupportedProblem(f"--bundle {bundle}: {fault}; choose another place")
    if dependent and not table:
        raise UnsupportedProblem("--dependent-launch without --table: expected both")

    def needs(config: "Config") -> "list[tuple[ObjectSpec, str]]":
        return _objects(config, device, table, of_bench, dependent)

    objects = needs(wanted)
    if not objects:
        raise UnsupportedProblem(
            f"{wanted.name} needs no object on {device.arch}: no kernel serves its contracts there"
        )
    store = Store()
    with stage("compile", len(objects)) as shown:
        built = compile_objects(objects, store, jobs=jobs, on_done=lambda _: shown.step())
    failed = [b for b in built if not b.ok]
    manifests = [b.manifest for b in built if b.manifest]
    if bundle and manifests:
        write_bundle(store, [m.spec for m in manifests], bundle)
    bundle_bytes = sum(f.stat().st_size for f in bundle.iterdir()) if bundle and manifests else None
    parts = _parts(wanted, needs)
    if as_json:
        print_json(
            {
                "config": wanted.name,
                "arch": device.arch,
                "objects": len(built),
                "cached": sum(b.cached for b in built),
                "failed": [{"name": b.spec.name, "reason": b.reason} for b in failed],
                "manifests": manifests,
                "bundle": str(bundle) if bundle and manifests else None,
                "bundle_bytes": bundle_bytes,
                "parts": parts,
            }
        )
    else:
        _print_compiled(built, parts, device)
        typer.echo(
            f"bundle: {bundle}, {bundle_bytes:,} bytes"
            if bundle and manifests
            else f"store: {store.root}"
        )
    if failed:
        raise typer.Exit(FINDINGS)


def _objects(
    config: "Config", device: "Device", tables: list[Path] | None, of_bench: bool, dependent: bool
) -> "list[tuple[ObjectSpec, str]]":
    """What a sweep of a config needs, or a bench, or just what tables can choose for it."""
    from gdntune.tuning.chosen import chosen_objects
    from gdntune.tuning.plan import bench_objects, plan_objects

    if of_bench:
        return bench_objects(config, device, tables or ())
    if tables:
        return chosen_objects(config.all_contracts(), tables, device, dependent)
    return plan_objects(config, device)


def _parts(
    config: "Config", needs: "Callable[[Config], list[tuple[ObjectSpec, str]]]"
) -> list[dict[str, Any]]:
    """What each part of a config needs by itself; objects that parts share count in each."""
    rows: list[dict[str, Any]] = []
    for part in config.parts:
        alone = config.only([part.name])
        numbers = {"contracts": len(alone.all_contracts()), "cells": len(alone.problems())}
        rows.append(
            {
                "name": part.name,
                **numbers,
                "objects": len(needs(alone)),
            }
        )
    return rows


def _print_compiled(
    built: "Sequence[Built]", parts: list[dict[str, Any]], device: "Device"
) -> None:
    """Prints what was compiled: how many and how long, registers and spills, parts, failures."""
    made = [(b, b.manifest) for b in built if b.manifest]
    seconds = sum(m.seconds for b, m in made if not b.cached)
    typer.echo(
        f"{len(made)} of {len(built)} objects for {device.arch}:"
        f" {sum(b.cached for b in built)} were there, the others took {seconds:.1f} s of compiling"
    )
    # A CPU's compiler says nothing of registers.
    worst = max((m for _, m in made), key=lambda m: m.registers or 0, default=None)
    if worst and worst.registers:
        spills = [m.spill_bytes for _, m in made if m.spill_bytes]
        typer.echo(
            f"registers: {worst.registers} at most ({worst.name}); {len(spills)} spill, "
            f"{max(spills, default=0)} bytes at most"
        )
    for row in parts:
        typer.echo(
            f"part {row['name']}: {counted(row['contracts'], 'contract')},"
            f" {counted(row['cells'], 'cell')}, {counted(row['objects'], 'object')}"
        )
    for b in built:
        if not b.ok:
            typer.echo(f"failed: {b.spec.name}: {b.reason}", err=True)


@app.command()
@refusing
def expect(
    configs: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG...", help="YAML files, or names of shipped configs: what to compile."
        ),
    ],
    arch: Annotated[
        str, typer.Option(help="The GPU that is not here: sm_100a, sm_103a, ..., or its name.")
    ],
    journal: Annotated[
        list[Path],
        typer.Option(
            help="Folder or journal of a sweep or bench of a GPU that was here; may be repeated."
        ),
    ],
    against: Annotated[
        list[str] | None,
        typer.Option(
            help="Others' figures to stand beside: published:flashinfer-pr-3127; may be repeated."
        ),
    ] = None,
    own_kernels: OwnKernels = None,
    out: Annotated[
        Path | None, typer.Option(help="Write to this Markdown file instead of the terminal.")
    ] = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Estimate a GPU that is not here: registers and occupancy of every variant, and times by a
    model.

    Registers, spills, shared memory and occupancy are the compiler's; times are carried over from
    journals of another GPU and marked as expected, not measured. The exit code is 1 where a variant
    does not compile or spills.
    """
    from gdntune.cli.progress import stage
    from gdntune.objects.build import compile_objects
    from gdntune.objects.store import Store, atomic_write
    from gdntune.report.expect import expectations
    from gdntune.report.markdown import markdown
    from gdntune.results import journal as journals
    from gdntune.results.expect import Model, expected_times
    from gdntune.results.published import published
    from gdntune.results.table import refuse_tables
    from gdntune.tuning.plan import plan_objects
    from gdntune.tuning.resources import resources

    refuse_tables(journal)
    publications = [published(name) for name in dict.fromkeys(against or ())]
    wanted = [config_of(path, None, own_kernels) for path in configs]
    target = target_of(arch)
    model = Model([journals.read(path) for path in journal], target)
    objects = [o for config in wanted for o in plan_objects(config, target)]
    with stage("compile", len({spec.key for spec, _ in objects})) as shown:
        built = compile_objects(objects, Store(), jobs=jobs, on_done=lambda _: shown.step())
    found = resources(wanted, target, built)
    failed = [b for b in built if not b.ok]
    page = expectations(
        model,
        found,
        [b.spec.name for b in failed],
        publications,
        [p for config in wanted for p in config.problems()],
        _expect_command(configs, arch, journal, against or [], out),
    )
    text = markdown(page)
    if out:
        atomic_write(out, text.encode())
    if as_json:
        print_json(
            {
                "device": target,
                "from": model.source,
                "objects": [
                    {
                        "variant": r.variant.id,
                        "contract": r.contract.key(),
                        "registers": r.registers,
                        "spill_bytes": r.spill_bytes,
                        "occupancy": r.occupancy._asdict(),
                    }
                    for r in found
                ],
                "failed": [{"name": b.spec.name, "reason": b.reason} for b in failed],
                "expected": expected_times(model, [p for c in wanted for p in c.problems()]),
            }
        )
    elif out:
        typer.echo(
            f"{counted(len(found), 'object')} for {target.arch}, {len(failed)} failed: {out}"
        )
    else:
        typer.echo(text)
    for b in failed:
        typer.echo(f"failed: {b.spec.name}: {b.reason}", err=True)
    spilling = [r for r in found if r.spill_bytes]
    for r in spilling:
        typer.echo(f"spills {r.spill_bytes} bytes: {r.variant.id}, {r.contract.key()}", err=True)
    if failed or spilling:
        raise typer.Exit(FINDINGS)


def _expect_command(
    configs: list[Path], arch: str, journals: list[Path], against: list[str], out: Path | None
) -> str:
    """The command that makes the page, an option a line, as the page quotes it."""
    options = [("--journal", str(j)) for j in journals] + [("--against", a) for a in against]
    if out:
        options.append(("--out", str(out)))
    lines = [["gdntune", "expect", *map(str, configs), "--arch", arch], *map(list, options)]
    return " \\\n    ".join(map(shlex.join, lines))


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


app.add_typer(cli_results.results)
install.register(cli_results.tables)
app.add_typer(cli_results.tables, name="table")
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
