"""The commands for a GPU that need not be here: `compile` and `expect`."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from gdntune.cli.common import (
    FINDINGS,
    L2,
    AsJson,
    ConfigFile,
    Jobs,
    OwnKernels,
    PartNames,
    Program,
    config_of,
    print_json,
    refusing,
    target_of,
)
from gdntune.errors import UnsupportedProblem, counted, no_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from gdntune.device.arch import Device
    from gdntune.objects.build import Built
    from gdntune.objects.store import ObjectSpec
    from gdntune.tuning.config import Config

ahead = Program()


@ahead.command("compile")
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
            help="Compile just what this table can choose for the config's contracts; may be"
            " repeated, with one table for each op."
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
        bool | None,
        typer.Option(
            "--dependent-launch/--no-dependent-launch",
            help="With --table: also what calls with dependent_launch=True take. With --bench: what"
            " `gdntune bench` needs when it is given the same.",
        ),
    ] = None,
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
    if dependent is not None and not (table or of_bench):
        name = "--dependent-launch" if dependent else "--no-dependent-launch"
        raise UnsupportedProblem(
            f"{name} without --table or --bench: expected one, a sweep's objects are of both kinds"
        )

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
    config: "Config",
    device: "Device",
    tables: list[Path] | None,
    of_bench: bool,
    dependent: bool | None,
) -> "list[tuple[ObjectSpec, str]]":
    """What a sweep of a config needs, or a bench, or just what tables can choose for it."""
    from gdntune.tuning.chosen import chosen_objects
    from gdntune.tuning.plan import bench_objects, plan_objects

    if of_bench:
        return bench_objects(config, device, tables or (), dependent)
    if tables:
        return chosen_objects(config.all_contracts(), tables, device, dependent is True)
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


@ahead.command()
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
