"""The command line: parses, calls one function, prints. What a command needs is imported when it runs."""

import functools
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from gdntune import __version__
from gdntune.errors import ConfigError, GdntuneError, UnsupportedProblem

if TYPE_CHECKING:
    from rich.console import Console

    from gdntune.arch import Device
    from gdntune.config import Config

F = TypeVar("F", bound=Callable[..., Any])

FINDINGS, WRONG_USE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    name="gdntune",
    help="Finds, proves and ships the fastest Gated DeltaNet and KDA decode kernels for the GPU at hand. "
    "Exit codes: 0 done, 1 findings, 2 wrong use or something missing.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
tables = typer.Typer(help="Look at dispatch tables.", no_args_is_help=True)
app.add_typer(tables, name="table")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
ConfigFile = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a shipped config such as quickstart.")
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Compiling processes; by default one a usable core.")]
Index = Annotated[int, typer.Option(min=0, help="Which CUDA device, by torch's numbering.")]
DeviceKind = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(help="Instead of the config's device; auto is CUDA where it is."),
]


def refusing(function: F) -> F:
    """A command whose gdntune errors are one message on stderr and exit code 2."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except GdntuneError as e:
            typer.echo(f"gdntune: {e}", err=True)
            raise typer.Exit(WRONG_USE) from None
        except KeyboardInterrupt:
            typer.echo("gdntune: interrupted; what was journalled stays, and the same command goes on there", err=True)
            raise typer.Exit(INTERRUPTED) from None

    return call  # type: ignore[return-value]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Finds, proves and ships the fastest Gated DeltaNet and KDA decode kernels for the GPU at hand."""


@app.command()
@refusing
def sweep(
    config: ConfigFile,
    out: Annotated[
        Path | None, typer.Option(help="Folder for journal, table and report; default results/NAME.")
    ] = None,
    device: DeviceKind = None,
    index: Index = 0,
    jobs: Jobs = None,
    timer: Annotated[
        Literal["auto", "cupti", "events", "cpu"] | None, typer.Option(help="Instead of the config's timer.")
    ] = None,
    l2: Annotated[
        Literal["cold-clean", "cold-dirty", "rotate", "warm"] | None,
        typer.Option(help="Instead of the config's L2 policy."),
    ] = None,
    bundle: Annotated[
        list[Path] | None, typer.Option(help="Folder of compiled objects, from `gdntune compile`; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compile, check and time every variant of a config; write journal, table and report to a folder.

    A sweep that was stopped goes on where it ended. Variants that fail are counted; the exit code is 0 where a table was made, else 1.
    """
    import msgspec

    from gdntune import arch, search
    from gdntune.progress import progress
    from gdntune.report import report
    from gdntune.store import Store, atomic_write

    wanted = _config(config)
    found = arch.detect(device or wanted.device, index)
    folder = out or Path("results") / wanted.name
    changes = {name: value for name, value in (("timer", timer), ("l2", l2)) if value is not None}
    outcome = search.sweep(
        wanted,
        folder,
        device=found,
        index=index,
        store=Store(bundles=bundle or ()),
        jobs=jobs,
        policy=msgspec.structs.replace(wanted.policy, **changes),
        progress=progress(),
        command=shlex.join(["gdntune", *sys.argv[1:]]),
    )
    made = report([folder])
    atomic_write(folder / "report.md", made.markdown().encode())
    atomic_write(folder / "report.csv", made.csv().encode())
    files = [name for name in ("journal.jsonl", "table.json", "report.md", "report.csv") if (folder / name).exists()]
    if as_json:
        chosen = made.frame[made.frame["chosen"]]
        _json(
            {
                "config": wanted.name,
                "device": found,
                "folder": str(folder),
                "files": files,
                "table": outcome.table is not None,
                "cells": len(wanted.problems()),
                "chosen": len(chosen),
                "over_floor_max": None if chosen["over_floor"].isna().all() else float(chosen["over_floor"].max()),
                "notes": outcome.notes,
            }
        )
    else:
        made.terminal(_console())
        for note in outcome.notes:
            typer.echo(note)
        typer.echo(f"\n{folder}: {', '.join(files)}")
    if outcome.table is None:
        raise typer.Exit(FINDINGS)


@app.command("compile")
@refusing
def compile_(
    config: ConfigFile,
    arch: Annotated[str, typer.Option(help="sm_90a, sm_100a, ...; cpu: this CPU; native: the device at hand.")],
    bundle: Annotated[
        Path | None, typer.Option(help="Folder to link all objects into, for a machine without a compiler.")
    ] = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
) -> None:
    """Compile every object that a sweep of a config needs. Needs no GPU. The exit code is 1 where one does not compile."""
    from gdntune.build import compile_objects
    from gdntune.progress import progress
    from gdntune.search import plan_objects
    from gdntune.store import Store, write_bundle

    wanted = _config(config)
    device = _target(arch)
    objects = plan_objects(wanted, device)
    if not objects:
        raise UnsupportedProblem(
            f"{wanted.name} needs no object on {device.arch}: no kernel serves its contracts there"
        )
    store = Store()
    stage = progress()
    stage.start("compile", len(objects))
    built = compile_objects(objects, store, jobs=jobs, on_done=lambda _: stage.step())
    stage.end()
    failed = [b for b in built if not b.ok]
    manifests = [b.manifest for b in built if b.manifest]
    if bundle and manifests:
        write_bundle(store, [m.spec for m in manifests], bundle)
    worst = max(manifests, key=lambda m: m.registers or 0, default=None)
    spilling = [m for m in manifests if m.spill_bytes]
    if as_json:
        _json(
            {
                "config": wanted.name,
                "arch": device.arch,
                "objects": len(built),
                "cached": sum(b.cached for b in built),
                "failed": [{"name": b.spec.name, "reason": b.reason} for b in failed],
                "manifests": manifests,
                "bundle": str(bundle) if bundle and manifests else None,
            }
        )
    else:
        seconds = sum(m.seconds for m, b in zip(manifests, (b for b in built if b.ok), strict=True) if not b.cached)
        typer.echo(
            f"{len(manifests)} of {len(built)} objects for {device.arch}: {sum(b.cached for b in built)} were there, "
            f"the others took {seconds:.1f} s of compiling"
        )
        if worst and worst.registers:
            typer.echo(
                f"registers: {worst.registers} at most ({worst.name}); {len(spilling)} spill, "
                f"{max((m.spill_bytes or 0 for m in spilling), default=0)} bytes at most"
            )
        for b in failed:
            typer.echo(f"failed: {b.spec.name}: {b.reason}", err=True)
        typer.echo(f"bundle: {bundle}" if bundle and manifests else f"store: {store.root}")
    if failed:
        raise typer.Exit(FINDINGS)


@app.command("report")
@refusing
def report_(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders that `gdntune sweep` wrote, or journals.")
    ],
    form: Annotated[
        Literal["md", "csv", "terminal"] | None,
        typer.Option("--format", help="By default what --out's name ends in, else terminal."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of the terminal.")] = None,
) -> None:
    """Show what sweeps found: times, share of the DRAM's peak, time over the floor, which variant was chosen."""
    from gdntune.report import report
    from gdntune.store import atomic_write

    made = report(runs)
    suffix = {".md": "md", ".csv": "csv"}.get(out.suffix if out else "", "terminal")
    form = form or suffix  # type: ignore[assignment]
    if form == "terminal":
        if out is None:
            made.terminal(_console(), details=True)
            return
        raise UnsupportedProblem(
            f"--out {out} as terminal: accepted are files of md and csv; name one, or give --format"
        )
    text = made.markdown() if form == "md" else made.csv()
    if out is None:
        typer.echo(text, nl=False)
    else:
        try:
            atomic_write(out, text.encode())
        except OSError as e:
            raise UnsupportedProblem(f"--out {out}: cannot be written: {e.strerror or e}") from None


@tables.command("show")
@refusing
def table_show(
    path: Annotated[Path, typer.Argument(help="A table, as `gdntune sweep` writes it.")], as_json: AsJson = False
) -> None:
    """Print a table: where it comes from, and each rule's intervals with their evidence."""
    from gdntune import kernels, table
    from gdntune.render.tables import table_document
    from gdntune.render.terminal import print_document

    found = table.load(path)
    if as_json:
        _json(found)
        return
    old = table.stale(found, kernels.fingerprints(found.device.kind))
    print_document(table_document(found, str(path), old), _console())


@tables.command("validate")
@refusing
def table_validate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", exists=True, dir_okay=False, help="Tables to look at.")
    ],
    as_json: AsJson = False,
) -> None:
    """Say whether tables can be trusted; the exit code is 1 where one cannot. A stale one is said to be, and is no fault."""
    from gdntune import kernels, table
    from gdntune.errors import TableError

    results: list[dict[str, Any]] = []
    for path in paths:
        try:
            found = table.load(path)
        except TableError as e:
            results.append({"path": str(path), "fault": str(e), "stale": []})
        else:
            old = table.stale(found, kernels.fingerprints(found.device.kind))
            results.append({"path": str(path), "fault": None, "stale": old})
    if as_json:
        _json(results)
    else:
        for r in results:
            note = f", stale: {', '.join(r['stale'])} was measured with other code" if r["stale"] else ""
            typer.echo(r["fault"] or f"{r['path']}: valid{note}")
    if any(r["fault"] for r in results):
        raise typer.Exit(FINDINGS)


@app.command()
@refusing
def explain(
    work_units: Annotated[int | None, typer.Option(help="B*HV; instead of --B and --HV.")] = None,
    B: Annotated[int | None, typer.Option("--B", help="Batch size.")] = None,
    HV: Annotated[int | None, typer.Option("--HV", help="Value heads.")] = None,
    op: Annotated[Literal["gdn_decode", "kda_decode"], typer.Option(help="What is computed.")] = "gdn_decode",
    tokens: Annotated[int, typer.Option(help="T, tokens a request and call.")] = 1,
    K: Annotated[int, typer.Option("--K", help="Key head size.")] = 128,
    V: Annotated[int, typer.Option("--V", help="Value head size.")] = 128,
    layout: Annotated[
        Literal["k_last", "v_last"], typer.Option(help="[slots, HV, V, K] or [slots, HV, K, V].")
    ] = "k_last",
    state_dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Of the state.")] = "bf16",
    input_dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Of q, k, v and the output.")] = "bf16",
    gate: Annotated[
        Literal["raw", "log", "softplus", "lower_bound"] | None, typer.Option(help="By default the op's first.")
    ] = None,
    beta: Annotated[Literal["logit", "given"], typer.Option(help="Whether a sigmoid is applied.")] = "logit",
    mode: Annotated[Literal["update", "frozen"], typer.Option(help="Whether the final state is written.")] = "update",
    intermediate: Annotated[
        Literal["none", "dense", "indexed", "slots"], typer.Option(help="Where the state after each token goes.")
    ] = "none",
    accepted: Annotated[bool, typer.Option("--accepted", help="With slots: num_accepted_tokens is given.")] = False,
    pool: Annotated[bool, typer.Option(help="Whether the state is a pool of slots named by indices.")] = True,
    ragged: Annotated[bool, typer.Option("--ragged", help="Packed rows with cu_seqlens.")] = False,
    table_path: Annotated[
        Path | None, typer.Option("--table", help="Ask this table instead of the one in use.")
    ] = None,
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Whose table.")] = "auto",
    index: Index = 0,
    as_json: AsJson = False,
) -> None:
    """Say which variant the runtime calls for a contract at some work units, and why."""
    from gdntune.explain import explanation
    from gdntune.problem import GATES, Contract, check_contract

    if work_units is None:
        if B is None or HV is None:
            raise UnsupportedProblem("work units are not given: accepted are --work-units N, or --B and --HV")
        work_units = B * HV
    elif B is not None or HV is not None:
        raise UnsupportedProblem("--work-units with --B or --HV: give one or the other, work units are B*HV")
    contract = Contract(
        op=op,
        tokens=tokens,
        K=K,
        V=V,
        layout=layout,
        state_dtype=state_dtype,
        input_dtype=input_dtype,
        gate=gate or GATES[op][0],  # type: ignore[arg-type]
        beta=beta,
        mode=mode,
        intermediate=intermediate,
        accepted=accepted,
        pool=pool,
        ragged=ragged,
    )
    said = explanation(check_contract(contract), work_units, table_path, device, index)
    if as_json:
        _json(said)
        return
    typer.echo(f"{said['contract']}, {work_units} work units, on {said['device']}")
    typer.echo(f"  table:   {said['table'] or 'none'}{said['origin'] and ' (' + said['origin'] + ')'}")
    typer.echo(f"  variant: {said['variant'] or 'none'}")
    typer.echo(f"  why:     {said['reason']}")
    for warning in said["warnings"]:
        typer.echo(f"  note:    {warning}")


@app.command()
@refusing
def doctor(index: Index = 0, as_json: AsJson = False) -> None:
    """Say what is here, what it means, and what to do where something lacks; the exit code is 1 where a sweep could not run."""
    from rich.text import Text

    from gdntune.doctor import examine

    findings = examine(index)
    if as_json:
        _json(findings)
    else:
        console = _console()
        for f in findings:
            colour = {"ok": "green", "note": "yellow", "hinders": "red"}[f.status]
            console.print(Text.assemble((f"{f.status:8}", colour), (f"{f.name:9}", "bold"), f.value), soft_wrap=True)
            if f.status != "ok":
                console.print(Text(f"{'':17}for: {f.meaning}\n{'':17}do:  {f.remedy}"), soft_wrap=True)
        bad = [f.name for f in findings if f.status == "hinders"]
        console.print(Text(f"A sweep cannot run here: see {', '.join(bad)}." if bad else "A sweep can run here."))
    if any(f.status == "hinders" for f in findings):
        raise typer.Exit(FINDINGS)


def _config(path: Path) -> "Config":
    """The config in a file, or the shipped one of a name."""
    from gdntune import config

    if not path.suffix and not path.exists():
        inside = Path(__file__).parent / "configs"
        folder = inside if inside.exists() else Path(__file__).parent.parent / "configs"
        shipped = {p.stem: p for p in sorted(folder.glob("*.yaml"))}
        named = shipped.get(path.name) if path.name == str(path) else None
        if named is None:
            raise ConfigError(
                f"{path}: no such file or shipped config; accepted are a YAML file and {', '.join(shipped)}"
            )
        path = named
    return config.load(path)


def _target(name: str) -> "Device":
    """The device to compile for."""
    from gdntune import arch

    if name in ("cpu", "native"):
        return arch.detect("cpu" if name == "cpu" else "auto")
    return arch.target(name)


def _console() -> "Console":
    """Standard output; where it is no terminal, without colours and wide enough for every table."""
    from rich.console import Console

    from gdntune.render.document import WIDTH

    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


def _json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
