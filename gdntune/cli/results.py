"""`gdntune report`: what sweeps and benches found, in each form. No device is needed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gdntune.cli.common import (
    AsJson,
    Program,
    busy,
    print_json,
    refusing,
    terminal,
)
from gdntune.errors import UnsupportedProblem, counted, no_folder

if TYPE_CHECKING:
    from gdntune.report.report import Report

results = Program()


@results.command("report")
@refusing
def report_(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Folders that `gdntune sweep` wrote, or journals."),
    ],
    form: Annotated[
        Literal["md", "csv", "html", "terminal", "kernel-tuner", "flashinfer-bench"] | None,
        typer.Option(
            "--format",
            help=(
                "By default what --out's name ends in, else terminal. The last two are folders:"
                " Kernel Tuner's T4 files, "
                "flashinfer-bench's traces."
            ),
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Write to this file, or folder, instead of the terminal; html and folders go beside"
                " RUN where that is a sweep's folder, else into the current one."
            )
        ),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Also speed-ups over this: a peer or PEER.ENTRY, a variant's id, default, or"
                " another RUN's name."
            ),
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "Others' figures to stand beside ours: published:flashinfer-pr-3127; may be"
                " repeated."
            )
        ),
    ] = None,
    regret: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="Show the choices of `gdntune replay --regret` instead of the sweep's table.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show what sweeps found: times, share of the DRAM's peak, time over the floor, which variant
    was chosen.

    html is one file with pictures and samples, which opens without a network. It needs matplotlib:
    pip install 'gdntune\\[report]'.
    """
    from gdntune.objects.store import atomic_write
    from gdntune.report.report import report
    from gdntune.results.published import published
    from gdntune.results.table import refuse_tables

    refuse_tables(runs)
    if as_json and (form or out or against):
        raise UnsupportedProblem(
            "--json with --format, --out or --against: it is one document on standard output;"
            " leave them out"
        )
    chosen = _form(form, out, against, baseline)
    others = [published(name) for name in dict.fromkeys(against or ())]
    with busy("reading"):
        made = report(runs, others, baseline, regret)
    _refuse_empty(runs, made)
    if as_json:
        print_json(made.values())
        return
    if chosen in ("kernel-tuner", "flashinfer-bench"):
        _export(made, chosen, out or _beside(runs[0], f"-{chosen}"))
        return
    if chosen == "terminal":
        made.terminal(terminal(), details=True)
        return
    if chosen == "html" and out is None:
        # A page is of no use in a terminal.
        out = _beside(runs[0], ".html")
        typer.echo(f"{out}")
    with busy("writing"):
        text = {"md": made.markdown, "csv": made.csv, "html": made.html}[chosen]()
    if out is None:
        typer.echo(text, nl=False)
    else:
        try:
            atomic_write(out, text.encode())
        except OSError as e:
            raise UnsupportedProblem(f"--out {out}: cannot be written: {e.strerror or e}") from None


def _form(
    form: str | None, out: Path | None, against: list[str] | None, baseline: str | None
) -> str:
    """The form of a report: the one asked for, else what the file's name ends in, else terminal.
    Raises UnsupportedProblem for options that it has no place for.
    """
    suffix = out.suffix if out else ""
    found = form or {".md": "md", ".csv": "csv", ".html": "html"}.get(suffix, "terminal")
    # A row of others' figures would be taken for one of our measurements.
    if found == "csv" and against:
        raise UnsupportedProblem(
            "--against with csv: expected md, html or the terminal; a CSV holds our measurements"
        )
    if found in ("kernel-tuner", "flashinfer-bench") and (against or baseline):
        raise UnsupportedProblem(
            f"--against or --baseline with {found}: it holds measurements as they are; leave"
            " them out"
        )
    if found == "terminal" and out:
        raise UnsupportedProblem(
            f"--out {out} as terminal: expected a file of md, csv or html; name one, or give"
            " --format"
        )
    return found


def _refuse_empty(runs: list[Path], made: "Report") -> None:
    """JournalError for a run of which there is nothing to say: no cell was tried, and nothing
    failed.
    """
    from gdntune.errors import JournalError
    from gdntune.results.records import Cell, Trial

    for path, source in zip(runs, made.sources, strict=True):
        if not any(isinstance(r, (Cell, Trial)) or r.status != "ok" for r in source.records):
            raise JournalError(
                f"{path}: no cell was timed yet: there is nothing to report; start the same command"
                " again: it is resumed" + (f": {source.run.command}" if source.run.command else "")
            )


def _beside(run: Path, suffix: str) -> Path:
    """In a sweep's folder, else in the current one: where a single journal lies (a checkout, a
    download) is no place for reports.
    """
    from gdntune.results.journal import FILE

    if run.is_dir() or run.name == FILE:
        folder = run if run.is_dir() else run.parent
        return folder / (f"report{suffix}" if suffix.startswith(".") else suffix.removeprefix("-"))
    return Path(f"{run.name.partition('.jsonl')[0]}{suffix}")


def _export(made: "Report", form: str, folder: Path) -> None:
    """Writes a run's files for another tool, and says where, how many, and what was left out."""
    from gdntune.objects.store import atomic_write
    from gdntune.results import exports

    found = (exports.kernel_tuner if form == "kernel-tuner" else exports.flashinfer_bench)(
        made.sources
    )
    try:
        for name, data in found.files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_write(folder / name, data)
    except OSError as e:
        raise UnsupportedProblem(
            f"--out {folder}: cannot be written: {no_folder(folder) or e.strerror or e}"
        ) from None
    typer.echo(f"{folder}: {counted(len(found.files), 'file')}")
    for note in found.notes:
        typer.echo(note, err=True)
