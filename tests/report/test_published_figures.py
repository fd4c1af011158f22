"""gdntune/report/published_figures.py: README and docs/results.md say what the journals say."""

from pathlib import Path

import pytest

from gdntune.report.published_figures import tables

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made():
    """The tables, made anew from the published journals."""
    return list(tables(ROOT / "docs" / "results"))


def rows(text):
    """A table's rows by their cells: how a page lays them out does not matter."""
    return [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.splitlines()
    ]


def test_figures_of_the_documents(made):
    """Every table is in its document, cell by cell: `python -m gdntune.report.published_figures`
    prints what has to stand there.
    """
    *full, short = made
    for name, parts in (("docs/results.md", full), ("README.md", [short])):
        page = rows((ROOT / name).read_text())
        for part in parts:
            header, _, *body = rows(part)
            assert header in page, f"{name} has no table with {header}"
            start = page.index(header) + 2
            assert page[start : start + len(body)] == body
            assert len(page[start + len(body)]) == 1, f"{name}: more rows than were made"
