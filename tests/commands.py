"""The command line as tests call it: in this process, or as a program."""

import re
from pathlib import Path

import yaml
from typer.testing import CliRunner

from gdntune.cli.app import app

ROOT = Path(__file__).parents[1]


TINY = {
    "name": "tiny",
    "device": "cpu",
    "model": {"H": 2, "HV": 4, "K": 128, "V": 128},
    "batch": [1, 8],
    "contracts": [{"op": "gdn_decode", "state_dtype": "fp32"}],
    "kernels": {"cpu_recurrent": {"tile_v": [16], "ilp": [8]}},
    "policy": {"timer": "auto", "l2": "warm"},
    "search": {"screen_rounds": 2, "keep": 2, "final_rounds": 5, "max_cell_seconds": 2},
}


def run(*arguments, **options):
    """The command line, in this process."""
    return CliRunner().invoke(app, [str(a) for a in arguments], **options)


def config(folder, **changes):
    """A file of the tiny config with some keys changed."""
    path = folder / "tiny.yaml"
    path.write_text(yaml.safe_dump({**TINY, **changes}))
    return path


def refused(result, *parts):
    """Whether a run ended with one message that says all `parts`, without a traceback, and exit
    code 2.
    """
    assert result.exit_code == 2, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    # a sweep says its size before
    assert re.search("^gdntune: ", result.stderr, re.MULTILINE)
    for part in parts:
        assert part in result.stderr
    return True
