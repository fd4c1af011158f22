"""Commands on what a sweep left: reports, tables, and journals judged anew. No device is needed."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from gdntune.cli.common import (
    FINDINGS,
    WRONG_USE,
    AsJson,
    Index,
    Program,
    busy,
    print_json,
    print_page,
    refusing,
    terminal,
)
from gdntune.errors import UnsupportedProblem, counted, no_folder

if TYPE_CHECKING:
    from gdntune.report.report import Report

tables = Program(help="Look at dispatch tables.", no_args_is_help=True)
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


@results.command()
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
            help="A pattern such as '*.tv8.*'; what fits counts as never timed. May be repeated.",
        ),
    ] = None,
    without_contracts: Annotated[
        list[str] | None,
        typer.Option(
            help="A pattern of contracts' names, such as '*.tokens=6*', that get no rule: the"
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


@results.command("judge")
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


@results.command("compare")
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


@results.command()
@refusing
def explain(
    work_units: Annotated[int | None, typer.Option(help="B*HV; instead of --B and --HV.")] = None,
    B: Annotated[int | None, typer.Option("--B", help="Batch size.")] = None,
    HV: Annotated[int | None, typer.Option("--HV", help="Value heads.")] = None,
    op: Annotated[
        Literal["gdn_decode", "kda_decode", "verify"],
        typer.Option(
            help="What is computed; verify: what drafts are expected to cost in each way,"
            " KDA's with --gate softplus or lower_bound."
        ),
    ] = "gdn_decode",
    tokens: Annotated[int, typer.Option(help="T, tokens a request and call.")] = 1,
    accept_rate: Annotated[
        float, typer.Option(help="verify: chance that a draft is accepted if the one before was.")
    ] = 0.7,
    layers: Annotated[int, typer.Option(help="verify: layers that one commit serves.")] = 36,
    K: Annotated[int, typer.Option("--K", help="Key head size.")] = 128,
    V: Annotated[int, typer.Option("--V", help="Value head size.")] = 128,
    layout: Annotated[
        Literal["k_last", "v_last"],
        typer.Option(help="States as slots x HV x V x K, or slots x HV x K x V."),
    ] = "k_last",
    state_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"], typer.Option(help="Of the state.")
    ] = "bf16",
    input_dtype: Annotated[
        Literal["bf16", "fp16", "fp32"], typer.Option(help="Of q, k, v and the output.")
    ] = "bf16",
    gate: Annotated[
        Literal["raw", "log", "softplus", "lower_bound"] | None,
        typer.Option(help="By default the op's first."),
    ] = None,
    beta: Annotated[
        Literal["logit", "given"], typer.Option(help="Whether a sigmoid is applied.")
    ] = "logit",
    mode: Annotated[
        Literal["update", "frozen"], typer.Option(help="Whether the final state is written.")
    ] = "update",
    intermediate: Annotated[
        Literal["none", "dense", "indexed", "slots"],
        typer.Option(help="Where the state after each token goes."),
    ] = "none",
    accepted: Annotated[
        bool, typer.Option("--accepted", help="With slots: num_accepted_tokens is given.")
    ] = False,
    pool: Annotated[
        bool, typer.Option(help="Whether the state is a pool of slots named by indices.")
    ] = True,
    ragged: Annotated[bool, typer.Option("--ragged", help="Packed rows with cu_seqlens.")] = False,
    norm: Annotated[
        Literal["none", "silu", "sigmoid"],
        typer.Option(help="The gated norm behind, in the same launch."),
    ] = "none",
    conv: Annotated[
        Literal["none", "identity", "silu"],
        typer.Option(help="The convolution ahead, of width 4, in the same launch."),
    ] = "none",
    table_path: Annotated[
        Path | None, typer.Option("--table", help="Ask this table instead of the one in use.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Whose table.")] = "auto",
    index: Index = 0,
    as_json: AsJson = False,
) -> None:
    """Say which variant the runtime calls for a contract at some work units, and why."""
    from gdntune.problem import GATES, Contract, check_contract
    from gdntune.runtime.explain import explanation

    if work_units is None:
        if B is None or HV is None:
            raise UnsupportedProblem(
                "work units are not given: expected --work-units N, or --B and --HV"
            )
        work_units = B * HV
    elif B is not None or HV is not None:
        raise UnsupportedProblem(
            "--work-units with --B or --HV: give one or the other, work units are B*HV"
        )
    kind: Literal["gdn_decode", "kda_decode"] = "gdn_decode"
    if op != "verify":
        kind = op
    elif gate is not None and gate not in GATES[kind]:
        kind = "kda_decode"
    contract = Contract(
        op=kind,
        tokens=tokens,
        K=K,
        V=V,
        layout=layout,
        state_dtype=state_dtype,
        input_dtype=input_dtype,
        gate=gate or GATES[kind][0],  # type: ignore[arg-type]
        beta=beta,
        mode=mode,
        intermediate=intermediate,
        accepted=accepted,
        pool=pool,
        ragged=ragged,
        norm=norm,
        conv=conv,
    )
    check_contract(contract)
    if op == "verify":
        _explain_verify(
            contract, work_units, accept_rate, layers, table_path, device, index, as_json
        )
        return
    said = explanation(contract, work_units, table_path, device, index)
    if as_json:
        print_json(said)
        return
    typer.echo(f"{said['contract']}, {work_units} work units, on {said['device']}")
    typer.echo(
        f"  table:   {said['table'] or 'none'}{said['origin'] and ' (' + said['origin'] + ')'}"
    )
    typer.echo(f"  variant: {said['variant'] or 'none'}")
    typer.echo(f"  why:     {said['reason']}")
    for warning in said["warnings"]:
        typer.echo(f"  note:    {warning}")


def _explain_verify(
    contract: Any,
    work_units: int,
    accept_rate: float,
    layers: int,
    table_path: Path | None,
    device: Literal["auto", "cpu", "cuda"],
    index: int,
    as_json: bool,
) -> None:
    from gdntune.results import drafts
    from gdntune.results.table import load
    from gdntune.runtime.explain import in_use

    table = load(table_path) if table_path else in_use(contract.op, device, index)
    if table is None:
        raise UnsupportedProblem(
            "no table for this device: nothing was measured; sweep, or name one by --table"
        )
    found = drafts.ways(table, contract, work_units, accept_rate, layers)
    if as_json:
        print_json(found)
        return
    typer.echo(
        f"T={contract.tokens}, {work_units} work units a layer, {layers} layers, each draft"
        f" accepted with {accept_rate:g}, on {table.device.name}; microseconds a layer"
    )
    for way in found:
        typer.echo(
            f"  {way.name}: {way.accepted_us:.2f} an accepted token, {way.step_us:.2f} a step"
        )
        for call in way.calls:
            typer.echo(f"    {call.time_us:.2f}  {call.contract}: {call.how}")
    for name, config in drafts.missing(contract.op, found):
        typer.echo(
            f"  {name}: the table has no cells of it; run `gdntune sweep {config}`, then `gdntune"
            " table merge` of its table and this one"
        )
