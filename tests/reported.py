"""Reports that tests look at."""

import io
import tempfile
from pathlib import Path

import synthetic
from rich.console import Console

from gdntune.report.report import report
from gdntune.results.records import Build

FAILED = (
    Build(
        kernel="recurrent",
        variant="recurrent.tv9",
        object_key="x",
        status="failed",
        reason="tile_v=9 | no\nsuch tile",
    ),
    Build(
        kernel="recurrent",
        variant="recurrent.tv7",
        object_key="y",
        status="failed",
        reason="tile_v=7 | no\nsuch tile",
    ),
)


def terminal(made, **options):
    """What is printed where there is no terminal."""
    out = io.StringIO()
    made.terminal(Console(file=out, width=100), **options)
    return out.getvalue()


def report_of(header, found):
    """The report of records, by way of a folder."""
    with tempfile.TemporaryDirectory() as temporary:
        return report([synthetic.write(Path(temporary), header, found, with_table=False)])


def text_of(*made):
    """Its Markdown as one line."""
    return " ".join(report_of(*made).markdown().split())
