"""A document in the terminal, its cells coloured by their share of the DRAM's speed of light."""

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as Styled

from gdntune.report.document import Bullets, Code, Document, Grid, Text
from gdntune.report.words import SHARE_MARKS

# From a share of the peak on: a streaming kernel reaches 0.9 of it on an H100.
SHADES = ((0.85, "green"), (0.7, "yellow"), (0.5, "dark_orange"), (0.0, "red"))


# To so many columns of text a column of words may shrink: to the second where the first has no
# room.
FOLDED, NARROW = 16, 11


def shade(share: float | None) -> str:
    """The colour of a share of the peak; none where it is unknown."""
    return "" if share is None else next((colour for least, colour in SHADES if share >= least), "")


def print_document(
    document: Document, console: Console, *, details: bool = False, folds: bool = True
) -> None:
    """Prints a document; its detail sections only where `details` asks for them.

    folds: whether words of a table go on in the next line where the console has no room. Where not,
        an id is found and copied whole.
    """
    width = console.width
    console.print(Styled(document.title, "bold"))
    for i, section in enumerate(s for s in document.sections if details or not s.detail):
        console.print()
        if i:
            console.print(Styled(section.title, "bold"))
        for block in section.blocks:
            if isinstance(block, Text):
                console.print(_plain(block.text))
            elif isinstance(block, Bullets):
                for item in block.items:
                    console.print(Padding(_plain(item), (0, 0, 0, 2), expand=False))
            elif isinstance(block, Code):
                console.print(Padding(Styled(block.text), (0, 0, 0, 2), expand=False))
            else:
                if block.caption:
                    console.print(Styled(block.caption, "italic"))
                table, least = _table(block, width if folds else None)
                # A console gives no print more than its own width, and a table without room loses
                # columns.
                console.width = max(least, width)
                console.print(table, crop=False)
                console.width = width
                console.print()
    shown = [s for s in document.sections if details or not s.detail]
    shares = [g for s in shown for g in s.blocks if isinstance(g, Grid) and g.shades]
    for words in _marks(shares):
        console.print(_plain(words))
    coloured = console.color_system is not None and not console.no_color
    if coloured and any(
        g.shades for s in document.sections for g in s.blocks if isinstance(g, Grid)
    ):
        console.print()
        console.print(_legend())


def _marks(shares: Sequence[Grid]) -> list[str]:
    """What the letters behind shares mean, of those that are there."""
    cells = [cell for grid in shares for row in grid.rows for cell in row]
    return [
        words for mark, words in SHARE_MARKS.items() if any(x.endswith(f" {mark}") for x in cells)
    ]


def _plain(text: str) -> Styled:
    return Styled(text.replace("`", ""))


def _table(grid: Grid, width: int | None) -> tuple[Table, int]:
    """A grid, and the columns of text that it needs. Where `width` has no room, words go on in the
    next line, in headers too; numbers are never cut. width: None where nothing is folded.
    """
    table = Table(box=None, pad_edge=False)
    headers, least = grid.headers, _widths(grid.headers, grid, None)
    if width is not None:
        least = _widths(headers, grid, FOLDED)
        for folded in (FOLDED, NARROW):
            if _whole(least) > width:
                headers = tuple(h.replace(" ", "\n") for h in grid.headers)
                least = _widths(headers, grid, folded)
    for i, header in enumerate(headers):
        if i < grid.left:
            table.add_column(
                Styled(header), overflow="fold", no_wrap=width is None, min_width=least[i]
            )
        else:
            table.add_column(Styled(header), justify="right", no_wrap=True, min_width=least[i])
    for i, row in enumerate(grid.rows):
        shades = grid.shades[i] if grid.shades else (None,) * len(row)
        table.add_row(
            *(Styled(cell.replace("`", ""), shade(s)) for cell, s in zip(row, shades, strict=True))
        )
    return table, _whole(least)


def _widths(headers: Sequence[str], grid: Grid, folded: int | None) -> list[int]:
    """The least columns of text of each column; of one of words at most `folded`."""
    lines = ([max(map(len, h.split("\n"))) for h in headers], *(map(len, r) for r in grid.rows))
    widths = [max(column) for column in zip(*lines, strict=True)]
    return [w if folded is None or i >= grid.left else min(w, folded) for i, w in enumerate(widths)]


def _whole(widths: Sequence[int]) -> int:
    """A line's columns of text, with two between its cells."""
    return sum(widths) + 2 * (len(widths) - 1)


def _legend() -> Styled:
    legend = Styled("Share of the DRAM's peak: ")
    above: float | None = None
    for least, colour in SHADES:
        words = (
            f"{least:.0%} and more"
            if above is None
            else f"below {above:.0%}"
            if not least
            else f"{least:.0%} to {above:.0%}"
        )
        legend.append(words, colour).append("  ")
        above = least
    return legend
