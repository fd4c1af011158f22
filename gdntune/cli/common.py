"""What the commands share: options, refusals as one message, how they print. Parsing and printing
only.
"""

import contextlib
import errno
import functools
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup, TyperOption

from gdntune.errors import ConfigError, GdntuneError, UnsupportedProblem

if TYPE_CHECKING:
    from rich.console import Console

    from gdntune.device.arch import Device
    from gdntune.report.document import Document
    from gdntune.timing import Policy
    from gdntune.tuning.config import Config

F = TypeVar("F", bound=Callable[..., Any])


class _PlainTypes:
    """Of a command: a flag has no `<bool>` beside it, which reads as if it took a value; a list of
    choices breaks between two of them, not within one.
    """

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in found:
            if not isinstance(param, TyperOption) or param.metavar is not None:
                continue
            # Not in every release of typer: without it a page shows types as typer does.
            shown = getattr(param, "display_type_rich", lambda _: None)(ctx)
            if param.is_flag:
                param.metavar = ""
            elif shown:
                param.metavar = shown.replace("|", " | ")
        return found


class _Group(_PlainTypes, TyperGroup):
    pass


class _Command(_PlainTypes, TyperCommand):
    pass


class Program(typer.Typer):
    """A group of commands as this program shows them."""

    def __init__(self, **options: Any) -> None:
        super().__init__(cls=_Group, **options)

    def command(self, name: str | None = None, **options: Any) -> Callable[[F], F]:
        """As `typer.Typer.command`."""
        found: Callable[[F], F] = super().command(name, cls=_Command, **options)
        return found


FINDINGS, WRONG_USE, INTERRUPTED = 1, 2, 130

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG", help="A YAML file, or the name of a shipped config such as quickstart."
    ),
]
PartNames = Annotated[
    list[str] | None,
    typer.Option(
        "--part",
        help=(
            "Only this part of the config, or those of a pattern such as `verify-*`; may be"
            " repeated."
        ),
    ),
]
Batch = Annotated[
    str | None, typer.Option(metavar="B,...", help="Batch sizes instead of the config's: 1,8,64.")
]
Tokens = Annotated[
    str | None, typer.Option(metavar="T,...", help="Tokens per request instead of the config's.")
]
Heads = Annotated[
    str | None,
    typer.Option(
        metavar="H,HV", help="q/k and value heads instead of the config's and its shards."
    ),
]
OwnKernels = Annotated[
    list[str] | None,
    typer.Option(
        "--kernels",
        metavar="MODULE",
        help="A module of yours with a KERNEL, tried beside the others; may be repeated.",
    ),
]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Compiling processes; by default one per usable core.")
]
Index = Annotated[int, typer.Option(min=0, help="Which CUDA device, in torch's order.")]
Devices = Annotated[
    str | None,
    typer.Option(help="CUDA devices that share the cells, as 0,1,2, instead of --index."),
]
Where = Annotated[
    Literal["local", "ray"],
    typer.Option(help="Where cells are timed; ray: on all free devices of a Ray cluster."),
]
DeviceKind = Annotated[
    Literal["auto", "cpu", "cuda"] | None,
    typer.Option(
        help="Instead of the config's device; auto: CUDA where there is one, else the CPU."
    ),
]
Timer = Annotated[
    Literal["auto", "cupti", "events", "cpu", "graph"] | None,
    typer.Option(help="Instead of the config's timer."),
]
L2 = Annotated[
    Literal["cold-clean", "cold-dirty", "rotate", "warm", "chain"] | None,
    typer.Option(help="Instead of the config's L2 policy."),
]
Bundles = Annotated[
    list[Path] | None,
    typer.Option(help="Folder of compiled objects, from `gdntune compile`; may be repeated."),
]


def io_fault(e: OSError) -> str:
    """A fault of reading or writing in words: the place, where the system names one."""
    said = e.strerror or str(e)
    if e.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT):
        return f"{e.filename or 'standard output'}: {said}; write to another disk"
    if e.filename is None:
        return f"{said}; name a place that can be read, or written to"
    return f"{e.filename}: {said}; name a place that can be read, or written to"


def refusing(function: F) -> F:
    """A command whose gdntune errors are one message on stderr and exit code 2."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except GdntuneError as e:
            typer.echo(f"gdntune: {e}", err=True)
            raise typer.Exit(WRONG_USE) from None
        except BrokenPipeError:
            # What reads our output has enough, as `| head` has
            raise
        except OSError as e:
            typer.echo(f"gdntune: {io_fault(e)}", err=True)
            raise typer.Exit(WRONG_USE) from None
        except KeyboardInterrupt:
            # On a line of its own: the terminal has just shown ^C, perhaps behind a bar.
            typer.echo(
                "\ngdntune: interrupted; what was journalled stays, and the same command goes on"
                " from there",
                err=True,
            )
            raise typer.Exit(INTERRUPTED) from None

    return call  # type: ignore[return-value]


def indices(text: str | None, executor: str) -> tuple[int, ...]:
    """The device numbers of `--devices`; none where it was not given."""
    if text is None:
        return ()
    if executor != "local":
        raise UnsupportedProblem(
            f"--devices with --executor {executor}: Ray says which devices there are; leave one out"
        )
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and len(part) < 5 for part in parts) or len(set(parts)) < len(
        parts
    ):
        raise UnsupportedProblem(
            f"--devices {text!r}: expected device numbers in torch's order, each once, as 0,1,2"
        )
    return tuple(map(int, parts))


def devices_of(
    config: "Config", kind: str | None, index: int, devices: str | None, executor: str
) -> "tuple[tuple[int, ...], Device]":
    """The devices that share a run, none where `--devices` names none, and the first one's kind."""
    from gdntune.device import arch

    shared = indices(devices, executor)
    if index and (kind or config.device) == "cpu":
        raise UnsupportedProblem(f"--index {index} on a CPU: expected none, there is one CPU")
    if index and shared:
        raise UnsupportedProblem(
            f"--index {index} with --devices {devices}: expected one of them, both name the devices"
        )
    return shared, arch.detect(kind or config.device, shared[0] if shared else index)  # type: ignore[arg-type]


def policy_of(config: "Config", timer: str | None, l2: str | None) -> "Policy":
    """A config's timing policy, with what the options name in its place."""
    import msgspec

    asked = {name: x for name, x in (("timer", timer), ("l2", l2)) if x is not None}
    return msgspec.structs.replace(config.policy, **asked)


def config_of(
    path: Path,
    parts: list[str] | None = None,
    own_kernels: list[str] | None = None,
    *,
    batch: str | None = None,
    tokens: str | None = None,
    heads: str | None = None,
) -> "Config":
    """The config in a file, or the one that goes by a name; only the parts that are named, where
    some are, at other sizes, where some are given. It may name the kernels of the user's modules.
    """
    from gdntune import kernels
    from gdntune.problem import MAX_TOKENS
    from gdntune.tuning import config, models

    kernels.use(own_kernels or ())
    source = _named(path)
    found = config.load(source) if isinstance(source, Path) else config.parse(source, path.name)
    found = found.only(parts) if parts else found
    # H may equal HV, so the two need not be distinct.
    pair = numbers("--heads", heads, distinct=False)
    if heads is not None and (len(pair) != 2 or pair[1] % pair[0]):
        raise UnsupportedProblem(
            f"--heads {heads!r}: expected H,HV with HV a multiple of H, as 16,64"
        )
    return models.overridden(
        found,
        numbers("--batch", batch),
        numbers("--tokens", tokens, most=MAX_TOKENS),
        (pair[0], pair[1]) if pair else None,
    )


def shipped_configs() -> dict[str, Path]:
    """The configs that come as files, by name."""
    inside = Path(__file__).parent.parent / "configs"
    folder = inside if inside.exists() else Path(__file__).parent.parent.parent / "configs"
    return {p.stem: p for p in sorted(folder.glob("*.yaml"))}


def config_text_of(name: str) -> str:
    """The text of a config that goes by name."""
    source = _named(Path(name))
    return source.read_text() if isinstance(source, Path) else source


def _named(path: Path) -> Path | str:
    """The file that a user named, or that ships by this name; or the text of a model's preset."""
    from gdntune import strict
    from gdntune.tuning.models import PRESETS, config_text

    # A name may have a dot, as qwen3.5-397b-a17b.
    if path.suffix in (".yaml", ".yml") or path.exists():
        return path
    shipped, name = shipped_configs(), str(path)
    if name in shipped:
        return shipped[name]
    if name in PRESETS:
        return config_text(PRESETS[name])
    names = [*shipped, *sorted(PRESETS.keys() - shipped.keys())]
    raise ConfigError(
        f"{path}: no such file or named config{strict.near(path.name, names)}; expected a YAML file"
        f" or one of {', '.join(names)}"
    )


def numbers(
    option: str, text: str | None, *, distinct: bool = True, most: int = 2**31 - 1
) -> tuple[int, ...]:
    """The whole numbers of an option such as `--batch 1,4,16`; none where it was not given."""
    if text is None:
        return ()
    parts = [part.strip() for part in text.split(",")]
    twice = distinct and len(set(parts)) < len(parts)
    # Of 5,000 digits Python makes no number.
    whole = all(part.isdecimal() and len(part) < 20 and 1 <= int(part) <= most for part in parts)
    if twice or not whole:
        raise UnsupportedProblem(
            f"{option} {text!r}: expected whole numbers from 1 to {most}, each once, as 1,4,16"
        )
    return tuple(map(int, parts))


def target_of(name: str) -> "Device":
    """The device to compile or plan for: by its arch, or a GPU by its name."""
    from gdntune.device import arch, gpus

    if name in ("cpu", "native"):
        return arch.detect("cpu" if name == "cpu" else "auto")
    # `sm_91` is a mistyped arch, not a GPU's name
    return arch.target(name) if name.lower().startswith("sm_") else gpus.named(name)


def terminal() -> "Console":
    """Standard output; where it is no terminal, without colours and as wide as a page."""
    from rich.console import Console

    from gdntune.report.document import WIDTH

    # Rich takes 80 columns where there is no terminal, and our tables are made for a page.
    return Console(width=None if sys.stdout.isatty() else WIDTH, highlight=False)


@contextlib.contextmanager
def busy(doing: str) -> Iterator[None]:
    """A sign of life while something takes seconds, where stderr is a terminal: to read a long
    journal takes three, and its page as many more.
    """
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    # Of the spinners one that every encoding has.
    with Console(stderr=True).status(doing, spinner="line"):
        yield


def print_hanging(text: str, indent: int) -> None:
    """A line on standard output. In a terminal that it is too long for, further lines are indented;
    where there is no terminal, it stays one.
    """
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
        text = textwrap.fill(
            text,
            width,
            subsequent_indent=" " * indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        )
    typer.echo(text)


def print_page(document: "Document", *, details: bool = False) -> None:
    """A document on standard output; where it is no terminal, its tables are as wide as what they
    hold.
    """
    from gdntune.report.terminal import print_document

    print_document(document, terminal(), details=details, folds=sys.stdout.isatty())


def print_json(value: Any) -> None:
    """One JSON document on standard output."""
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))
