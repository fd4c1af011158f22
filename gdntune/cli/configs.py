"""Commands on configs: what ships, one of a model, one of a transformers config.json."""

from pathlib import Path
from typing import Annotated

import typer

from gdntune.cli.common import AsJson, Program, print_hanging, print_json, refusing, shipped_configs
from gdntune.errors import ConfigError, UnsupportedProblem

configs = Program()
config = Program(help="Show a config, or make one for a model.", no_args_is_help=True)


@configs.command("configs")
@refusing
def configs_(as_json: AsJson = False) -> None:
    """List the configs that go by name: those that ship as files, and presets of models."""
    from gdntune.tuning import config as reader
    from gdntune.tuning.models import PRESETS, config_text

    rows: list[dict[str, str | None]] = []
    for name, path in shipped_configs().items():
        found = reader.load(path)
        rows.append({"name": name, "about": found.about, "file": str(path)})
    for name in sorted(PRESETS.keys() - shipped_configs().keys()):
        found = reader.parse(config_text(PRESETS[name]), name)
        heads = f"H={found.model.H}, HV={found.model.HV}"
        rows.append({"name": name, "about": f"preset: {found.about}, {heads}", "file": None})
    if as_json:
        print_json(rows)
        return
    width = max(len(str(row["name"])) for row in rows)
    for row in rows:
        print_hanging(f"{row['name']:{width}}  {row['about']}", width + 2)
    typer.echo("\ngdntune config show NAME prints one; -o FILE keeps it, to be changed")


Out = Annotated[
    Path | None, typer.Option("--out", "-o", help="Write to this file instead of the terminal.")
]


@config.command("show")
@refusing
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="One of `gdntune configs`.")],
    out: Out = None,
) -> None:
    """Print a config that goes by name."""
    from gdntune.cli.common import config_text_of

    _put(config_text_of(name), out)


@config.command("from-hf")
@refusing
def from_hf(
    path: Annotated[
        Path,
        typer.Argument(metavar="CONFIG.JSON", help="A model's config.json, or the folder with it."),
    ],
    out: Out = None,
    name: Annotated[
        str | None, typer.Option(help="The config's name; by default the model folder's.")
    ] = None,
) -> None:
    """Make a config from a transformers config.json: heads, head sizes, gate and tensor-parallel
    sizes of its GDN or KDA layers.
    """
    import dataclasses

    from gdntune.tuning import config as reader
    from gdntune.tuning.models import config_text, read_hf

    found = read_hf(path)
    if name:
        found = dataclasses.replace(found, name=name)
    text = config_text(found)
    try:
        # Read back at once: a config that no sweep takes must not be handed out.
        reader.parse(text, found.name)
    except ConfigError as e:
        raise UnsupportedProblem(f"{path}: no kernel serves this model: {e}") from None
    _put(text, out)


def _put(text: str, out: Path | None) -> None:
    if out is None:
        typer.echo(text, nl=False)
        return
    from gdntune.objects.store import atomic_write

    atomic_write(out, text.encode())
    typer.echo(f"{out}: gdntune sweep {out} --dry-run says what it takes")
