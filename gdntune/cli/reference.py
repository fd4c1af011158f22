"""docs/reference.md, from the code: commands, config keys, kernels and knobs, environment, the
public functions and classes.

python -m gdntune.cli.reference > docs/reference.md
"""

import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import msgspec

HEAD = """\
# Reference

Generated: `python -m gdntune.cli.reference > docs/reference.md`.
"""

ENVIRONMENT = {
    "GDNTUNE_TABLE": "a table's file that the runtime uses instead of installed and shipped ones",
    "GDNTUNE_BUNDLE": "folders of compiled objects, separated by `:`, so that nothing is compiled",
    "GDNTUNE_CACHE_DIR": "where compiled objects are kept; by default the user's cache folder",
    "GDNTUNE_CHECK": "1: calls check indices and counts on the host, which synchronises",
    "GDNTUNE_LOG": "debug, info, warning or error: gdntune's log goes to stderr from that level",
    "GDNTUNE_VLLM": "1: vLLM's layers decode by gdntune, by its plug-in",
    "GDNTUNE_SGLANG": "1: SGLang's dispatchers decode by gdntune, by its plug-in",
    "GDNTUNE_LLC_MIB": "the CPU's last-level cache, where a virtual machine reports its host's",
    "GDNTUNE_KERNELS": "modules with kernels of your own, separated by commas, as `--kernels`",
    "CXX": "the C++ compiler of the CPU's kernels; by default g++",
}

KEYS: Mapping[str, Mapping[str, str]] = {
    "The file": {
        "name": "names the folder results/NAME; lower case letters, digits, `.`, `_` and `-`",
        "about": "one line for reports",
        "device": "what is tuned",
        "model": "the whole model's heads, see below",
        "batch": "batch sizes B",
        "tokens": "T, tokens per request and call, 1 to 16; each is a contract of its own",
        "shards": "tensor-parallel sizes; size s has H/s and HV/s heads",
        "contracts": "what is computed, see below",
        "kernels": "if given, only these kernels, and only the listed values of the listed knobs;"
        " floors are named likewise; with eight decode variants or fewer a few are timed",
        "policy": "timer and L2 policy, see below",
        "search": "how much is spent per cell, see below",
        "parts": "sets of cells in one file, each with a `name`; keys above are their defaults",
    },
    "`model`": {
        "H": "q/k heads",
        "HV": "value heads, a multiple of H",
        "K": "key head size: 64, 96, 128 or 256",
        "V": "value head size",
    },
    "`contracts`, each": {
        "op": "GDN, one decay per head, or KDA, one per key dimension",
        "layout": "of the state: [slots, HV, V, K] or [slots, HV, K, V]",
        "input_dtype": "of q, k, v and the output",
        "state_dtype": "of the state and the intermediate states",
        "gate_dtype": "of a (GDN) or g (KDA)",
        "beta_dtype": "of b or beta",
        "A_log_dtype": "of the parameter",
        "dt_bias_dtype": "of the parameter",
        "gate": "GDN: raw or log; KDA: softplus, lower_bound or log",
        "beta": "logit: sigmoid is applied; given: it is not",
        "mode": "update writes the final state, frozen does not",
        "intermediate": "where the state after each token goes",
        "accepted": "with slots: num_accepted_tokens names the column to start from",
        "pool": "states in slots named by indices; else row n is request n's",
        "ragged": "packed rows with cu_seqlens",
        "norm": "gated RMSNorm over V in the same launch, its gate silu or sigmoid; none: no norm;"
        " with a ring of GDN alone",
        "norm_weight_dtype": "of the norm's weight",
        "conv": "the convolution ahead in the same launch, with silu or nothing (identity) behind"
        " it; none: no convolution",
        "conv_width": "its taps, 2 to 4",
        "conv_bias": "whether it has a bias",
        "conv_window": "a ring of rows, or rows that are shifted, a channel's side by side or not",
        "conv_input": "its rows: q, k and v packed, or interleaved by q/k head with the gates",
        "ring": "corrections that are kept at most before the state is written: 16 or 32; 0: no"
        " ring, the state is written at once; with a convolution 0",
        "ring_dtype": "of the corrections, fp32 or bf16",
        "ring_rounding": "of a state where a ring is folded into it: nearest, or stochastic by a"
        " seed",
    },
    "`policy`": {
        "timer": "how a call is timed; auto is CUPTI on CUDA where it works, else CUDA events",
        "l2": "what is done to the last-level cache before each call",
    },
    "`search`": {
        "screen_rounds": "samples by which the leaders are found",
        "keep": "leaders timed again",
        "final_rounds": "samples of each leader",
        "placements": "sets of tensors, elsewhere in memory, that share the final rounds",
        "fresh_rounds": "samples of choices and rivals afterwards: the table's evidence; 0: none",
        "precision": "fresh rounds go on until 95% intervals of ratios are this narrow; 0: not",
        "max_cell_seconds": "a cell's timing ends here",
        "regret": "what the choice may lose for one interval or variant less",
        "bisect": "refines crossovers until neighbours' work units are within this ratio",
        "extra_cells": "cells per contract that bisect may add",
        "held_out": "cells that judge the table, no part of it: a number per contract, or a list",
        "workload": "steps of a serving engine (a list or a CSV), by which cells share the samples",
    },
}


def page() -> str:
    """The whole page, as Markdown."""
    text = "\n".join([HEAD, *_commands(), *_config(), *_kernels(), *_environment(), *_python()])
    return re.sub(r"\n{3,}", "\n\n", text) + "\n"


def _commands() -> Iterator[str]:
    import typer.main

    from gdntune.cli.app import app

    yield "## Commands\n"
    yield from _command("gdntune", typer.main.get_command(app))


def _command(path: str, command: Any) -> Iterator[str]:
    below = getattr(command, "commands", None)
    if below is None:
        arguments = [p for p in command.params if p.param_type_name == "argument"]
        usage = " ".join([path, *(p.metavar or p.name.upper() for p in arguments)])
        yield f"### `{usage}`\n"
        yield " ".join((command.help or "").split()) + "\n"
        rows = [_row(p) for p in command.params if p.name != "help"]
        if rows:
            yield "| | |\n| --- | --- |"
            yield "\n".join(rows) + "\n"
    else:
        for name in sorted(below):
            yield from _command(f"{path} {name}", below[name])


def _row(parameter: Any) -> str:
    choices = _words(parameter.type_descriptor.annotation)
    names = (
        ", ".join((*parameter.opts, *parameter.secondary_opts))
        if parameter.param_type_name == "option"
        else (parameter.metavar or parameter.name.upper())
    )
    values = f" ({', '.join(map(str, choices))})" if choices else ""
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    return f"| `{names}` | {text}{values} |"


def _config() -> Iterator[str]:
    from gdntune.timing import Policy
    from gdntune.tuning.config import Config, ContractPart, Model, Search

    structs: dict[str, Any] = dict(
        zip(KEYS, (Config, Model, ContractPart, Policy, Search), strict=True)
    )
    yield "## Config keys\n"
    yield (
        "A wrong key or value is refused; the message says where (`$` is the whole file) and what"
        " is expected.\n"
    )
    for title, texts in KEYS.items():
        fields = {f.name: f for f in msgspec.structs.fields(structs[title])}
        # A key without a line, or a line of a key that is gone, stops the page and its test.
        if fields.keys() != texts.keys():
            raise LookupError(f"{title}: KEYS and the code differ: {fields.keys() ^ texts.keys()}")
        yield f"### {title}\n"
        yield "| key | default | meaning |\n| --- | --- | --- |"
        for name, text in texts.items():
            yield f"| `{name}` | {_default(fields[name])} | {text}{_values(fields[name])} |"
        yield ""


def _default(field: Any) -> str:
    value = field.default
    if value is msgspec.NODEFAULT or value is None or value == "" or value == ():
        return ""
    if isinstance(value, msgspec.Struct) or field.default_factory is not msgspec.NODEFAULT:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value) if isinstance(value, tuple) else value)


def _words(annotation: Any) -> list[str]:
    """The words that a Literal, or an optional one, lists."""
    inside = get_args(annotation)
    return [w for x in inside for w in ([x] if isinstance(x, str) else _words(x))]


def _values(field: Any) -> str:
    words = _words(field.type)
    return f"; one of {', '.join(words)}" if words else ""


def _kernels() -> Iterator[str]:
    from gdntune.kernels import KERNELS

    yield "## Kernels and knobs\n"
    yield (
        "What `kernels` of a config names, and what a variant's id says: the kernel, then a tag and"
        " a value for each knob that is not at its default (a tag alone where the value is true).\n"
    )
    # Kernels of one knobs dataclass share a table.
    sharing: dict[type, list[str]] = {}
    for kernel in KERNELS.values():
        about = f"`{kernel.name}` ({kernel.device}{', floor' * (kernel.role == 'floor')})"
        sharing.setdefault(kernel.knobs, []).append(about)
    for knobs, names in sharing.items():
        yield f"### {', '.join(names)}\n"
        yield "| knob | tag | default | meaning |\n| --- | --- | --- | --- |"
        for field in dataclasses.fields(knobs):
            default = "" if field.default is dataclasses.MISSING else str(field.default).lower()
            meaning = field.metadata["doc"].replace("|", "\\|")
            yield f"| `{field.name}` | `{field.metadata['tag']}` | {default} | {meaning} |"
        yield ""


def _environment() -> Iterator[str]:
    yield "## Environment\n"
    yield "| variable | meaning |\n| --- | --- |"
    yield "\n".join(f"| `{name}` | {text} |" for name, text in ENVIRONMENT.items())


def _python() -> Iterator[str]:
    """What `import gdntune` gives: each function and class by its docstring."""
    import gdntune

    yield "\n## Python\n"
    yield "What `import gdntune` gives, by the docstrings. Errors have a builtin parent each.\n"
    public = [(name, getattr(gdntune, name)) for name in gdntune.__all__ if name[0] != "_"]
    errors = [x for _, x in public if isinstance(x, type) and issubclass(x, Exception)]
    for name, thing in public:
        if thing in errors:
            continue
        yield f"### `gdntune.{name}`\n\n```text"
        yield from _documented(name, thing)
        # A struct's own members are what msgspec gives every one.
        for part, method in vars(thing).items() if isinstance(thing, type) else ():
            if part[0] != "_" and inspect.isfunction(inspect.unwrap(method)):
                yield ""
                yield from _documented(f"{name}.{part}", method)
        yield "```\n"
    yield "### Errors\n\n| error | is a | meaning |\n| --- | --- | --- |"
    for error in errors:
        parent = error.__bases__[-1].__name__
        yield f"| `{error.__name__}` | `{parent}` | {' '.join((error.__doc__ or '').split())} |"


def _documented(name: str, thing: Any) -> Iterator[str]:
    """A function's call and docstring; of a method without `self`."""
    shown: list[str] = []
    stars: dict[Any, str] = {
        inspect.Parameter.VAR_POSITIONAL: "*",
        inspect.Parameter.VAR_KEYWORD: "**",
    }
    for p in inspect.signature(thing).parameters.values():
        if p.name == "self":
            continue
        if p.kind is p.KEYWORD_ONLY and "*" not in shown:
            shown.append("*")
        shown.append(
            f"{stars.get(p.kind, '')}{p.name}{'' if p.default is p.empty else f'={p.default!r}'}"
        )
    yield from textwrap.wrap(f"{name}({', '.join(shown)})", 100, subsequent_indent="    ")
    if text := inspect.getdoc(thing):
        yield textwrap.indent(f"\n{text}", "    ")


if __name__ == "__main__":
    sys.stdout.write(page())
