"""Commands that judge journals anew: `replay`, `judge`, `compare`. No device is needed."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gdntune.cli.common import (
    FINDINGS,
    AsJson,
    Program,
    busy,
    print_json,
    print_page,
    refusing,
)
from gdntune.errors import UnsupportedProblem, counted

judging = Program()


@judging.command()
@refusing
def replay(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="A sweep's folder, or its journal (.jsonl or .jsonl.xz); with --minimax several.",
        ),
    ],
    regret: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=1,
            help="How much slower than a cell's best a choice may be; by default as the sweep.",
        ),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without-variants",
            help="A pattern such as `*.tv8.*`; what fits counts as never timed. May be repeated.",
        ),
    ] = None,
    without_contracts: Annotated[
        list[str] | None,
        typer.Option(
            help="A pattern of contracts' names, such as `*.tokens=6*`, that get no rule: the"
            " nearest one's serves them. May be repeated.",
        ),
    ] = None,
    keep_default: Annotated[
        bool,
        typer.Option(
            "--keep-default",
            help="Of equally small tables, that which leaves the default rule's choices at ties.",
        ),
    ] = False,
    several: Annotated[
        bool,
        typer.Option(
            "--minimax",
            help="One table of several cards' journals: each choice loses least on the card where"
            " it loses most.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Write the table to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Derive the table anew from a journal, without a device; with the sweep's settings it is the
    sweep's table, byte for byte. With --minimax, one table of several cards of a model.
    """
    from gdntune.report.judgements import replay_words
    from gdntune.results import judge, table
    from gdntune.results.minimax import minimax

    table.refuse_tables(runs)
    if several and (without or keep_default or without_contracts):
        raise UnsupportedProblem(
            "--minimax with --without-variants, --without-contracts or --keep-default: expected"
            " --regret alone"
        )
    if not several and len(runs) > 1:
        raise UnsupportedProblem(
            f"{len(runs)} journals without --minimax: expected one RUN; for one table of several"
            " cards' journals, add --minimax"
        )
    with busy("reading"):
        if several:
            found = minimax(runs, regret)
        else:
            found = judge.replay(
                runs[0],
                regret=regret,
                without=without or (),
                keep_default=keep_default,
                without_contracts=without_contracts or (),
            )
    if out is not None:
        table.save(found.table, out)
    if as_json:
        print_json(found.table)
        return
    typer.echo(replay_words(found))
    for note in found.notes:
        typer.echo(note)
    if out is not None:
        typer.echo(f"table: {out}")


@judging.command("judge")
@refusing
def judge_(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="[TABLE] JOURNAL",
            help=(
                "A table and a journal; the journal alone with --hold-out or --share, or where its"
                " sweep held cells out."
            ),
        ),
    ],
    hold_out: Annotated[
        Literal["every-second"] | None,
        typer.Option(
            help=(
                "Derive from every second work unit, judge on those between; then the other way"
                " round."
            )
        ),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            help=(
                "Derive from this share of the samples, by successive halving; judge on samples"
                " kept apart."
            )
        ),
    ] = None,
    limit: Annotated[
        float | None,
        typer.Option(min=0, help="The largest regret allowed, such as 0.03; 32 ns always are."),
    ] = None,
    mean_limit: Annotated[
        float | None, typer.Option(min=0, help="The largest mean regret allowed.")
    ] = None,
    details: Annotated[bool, typer.Option("--cells", help="Print every cell.")] = False,
    as_json: AsJson = False,
) -> None:
    """Judge a table by another journal's samples, or a sweep's own by its held-out cells: its
    regret, a cell and in all. Needs no device.

    Beside it stand the default rule's regret, and that of FlashInfer's thresholds applied to our
    variants.

    The exit code is 1 where a limit is given and the regret is above it, or a cell could not be
    judged.
    """
    from gdntune.report import judgements
    from gdntune.results import halving, journal, judge, table

    if hold_out is not None and share is not None:
        raise UnsupportedProblem("--hold-out with --share: give one or the other")
    if len(paths) > (1 if hold_out is not None or share is not None else 2):
        raise UnsupportedProblem(
            f"{len(paths)} files: expected TABLE JOURNAL, JOURNAL alone with --hold-out"
            " every-second or --share 0.25, or that of a sweep with held-out cells"
        )
    table.refuse_tables(paths[-1:])
    with busy("reading"):
        run, records = journal.read(paths[-1])
    if share is not None:
        cost = halving.cost(records, run, share)
        found, document = cost.table, judgements.cost_document(cost, str(paths[-1]))
        whole: Any = cost
    else:
        with busy("judging"):
            if hold_out:
                found = judge.hold_out_every_second(records, run)
            elif len(paths) == 1:
                found = judge.held_out(records, run)
            else:
                found = judge.judge(table.load(paths[0]), records, run, about=str(paths[0]))
        document = judgements.judgement_document(found, str(paths[-1]))
        whole = found
    if as_json:
        print_json(whole)
    else:
        print_page(document, details=details)
    above = found.above(limit) if limit is not None else []
    too_much = mean_limit is not None and (
        found.table.regret_mean is None or found.table.regret_mean > mean_limit
    )
    if above:
        cells = counted(len(above), "cell is", "cells are")
        typer.echo(f"{cells} above the limit of {limit:.2%}, or not judged", err=True)
    if too_much:
        typer.echo(f"the mean regret is above the limit of {mean_limit:.2%}", err=True)
    if above or too_much:
        raise typer.Exit(FINDINGS)


@judging.command("compare")
@refusing
def compare_(
    a: Annotated[
        Path, typer.Argument(metavar="A", help="The journal, or folder, to compare with.")
    ],
    b: Annotated[Path, typer.Argument(metavar="B", help="The journal, or folder, that is judged.")],
    variant: Annotated[
        str,
        typer.Option(help="A variant's id; chosen: at each cell what the journals' tables name."),
    ] = "chosen",
    details: Annotated[
        bool, typer.Option("--cells", help="Print every cell, not only those that are no TIE.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Say of each cell of two journals whether B is FASTER, SLOWER, a TIE or UNCLEAR; the exit
    code is 1 where one is SLOWER.
    """
    from gdntune.report.comparisons import comparison_document
    from gdntune.results import compare
    from gdntune.results.table import refuse_tables

    refuse_tables([a, b])
    with busy("reading"):
        found = compare.compare(a, b, variant)
    if as_json:
        print_json(found)
    else:
        print_page(comparison_document(found, f"{a}, {b}"), details=details)
    if found.counts["SLOWER"]:
        raise typer.Exit(FINDINGS)
