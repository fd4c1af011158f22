"""`gdntune table`: dispatch tables, looked at and merged. No device is needed."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gdntune.cli.common import (
    FINDINGS,
    WRONG_USE,
    AsJson,
    Program,
    print_json,
    print_page,
    refusing,
)
from gdntune.errors import counted

tables = Program(
    help="Show, check, compare, merge, install and export dispatch tables.", no_args_is_help=True
)


@tables.command("show")
@refusing
def table_show(
    path: Annotated[Path, typer.Argument(help="A table, as `gdntune sweep` writes it.")],
    as_json: AsJson = False,
) -> None:
    """Print a table: where it comes from, and each rule's intervals with their evidence."""
    from gdntune import kernels
    from gdntune.report.tables import table_document
    from gdntune.results import table

    found = table.load(path)
    if as_json:
        print_json(found)
        return
    old = table.stale(found, kernels.fingerprints(found.device.kind))
    print_page(table_document(found, str(path), old))


@tables.command("validate")
@refusing
def table_validate(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Tables to look at."),
    ],
    as_json: AsJson = False,
) -> None:
    """Say whether tables can be trusted; the exit code is 1 where one cannot. A stale one is said
    to be, and is no fault. Where a file is missing the exit code is 2, and the others are judged
    all the same.
    """
    from gdntune import kernels
    from gdntune.errors import TableError
    from gdntune.results import table

    results: list[dict[str, Any]] = []
    for path in paths:
        try:
            found = table.load(path)
            kernels.check_names(map(found.variant, found.variants), str(path))
        except TableError as e:
            results.append({"path": str(path), "fault": str(e), "stale": [], "noise": ""})
        else:
            old = table.stale(found, kernels.fingerprints(found.device.kind))
            noise = table.noise_words(found.evidence)
            results.append({"path": str(path), "fault": None, "stale": old, "noise": noise})
    if as_json:
        print_json(results)
    else:
        for r in results:
            note = (
                f", stale: {', '.join(r['stale'])} was measured with other code"
                if r["stale"]
                else ""
            )
            note += f", noisy: {r['noise']}" if r["noise"] else ""
            typer.echo(r["fault"] or f"{r['path']}: valid{note}")
    # Wrong use goes before findings: a script must not take a misspelt path for a bad table.
    if not all(path.is_file() for path in paths):
        raise typer.Exit(WRONG_USE)
    if any(r["fault"] for r in results):
        raise typer.Exit(FINDINGS)


@tables.command("diff")
@refusing
def table_diff(
    a: Annotated[Path, typer.Argument(metavar="A", help="A table.")],
    b: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
    as_json: AsJson = False,
) -> None:
    """Show the work units at which two tables differ in their choices; the exit code is 1 where
    there are any.
    """
    from gdntune.report.comparisons import diff_document
    from gdntune.results import merge, table

    found = merge.diff(table.load(a), table.load(b))
    if as_json:
        print_json(found)
    else:
        print_page(diff_document(found, f"{a}, {b}"))
    if found.choices:
        raise typer.Exit(FINDINGS)


@tables.command("merge")
@refusing
def table_merge(
    a: Annotated[Path, typer.Argument(metavar="A", help="A table.")],
    b: Annotated[
        Path,
        typer.Argument(
            metavar="B",
            help="Another, of the same device and kernels; of another policy where no contract can"
            " choose between their rules.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the merged table goes.")],
    prefer: Annotated[
        Literal["first", "second"] | None,
        typer.Option(help="Which table's rule is kept where the choices differ."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make one table of two: all rules of both; where their choices differ it is refused, unless
    --prefer says which to keep.
    """
    from gdntune.results import merge, table

    made = merge.merge(table.load(a), table.load(b), prefer)
    table.save(made, out)
    if as_json:
        print_json({"out": str(out), "rules": len(made.rules), "variants": list(made.variants)})
        return
    typer.echo(
        f"{out}: {counted(len(made.rules), 'rule')}, {counted(len(made.variants), 'variant')}"
    )
