"""A document as Markdown that GitHub renders and that reads as plain text."""

import textwrap
from collections.abc import Iterator

from gdntune.report.document import WIDTH, Block, Bullets, Code, Document, Grid, Text


def markdown(document: Document) -> str:
    """The document's text; equal documents give equal bytes."""
    lines = [f"# {document.title}", ""]
    for i, section in enumerate(document.sections):
        if i:
            lines += [f"## {section.title}", ""]
        for block in section.blocks:
            lines += [*_block(block), ""]
    return "\n".join(lines)


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield from textwrap.wrap(block.text, WIDTH, break_long_words=False, break_on_hyphens=False)
    elif isinstance(block, Bullets):
        for item in block.items:
            yield from textwrap.wrap(
                item,
                WIDTH,
                initial_indent="- ",
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
    elif isinstance(block, Code):
        yield from ("```sh", block.text, "```")
    else:
        yield from _grid(block)


def _grid(grid: Grid) -> Iterator[str]:
    def escaped(row: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(cell.replace("|", "\\|") for cell in row)

    # Escaped first, so that what the bars cost is counted.
    grid = grid._replace(
        headers=escaped(grid.headers), rows=tuple(map(escaped, grid.rows))
    ).fitted()
    widths = [max(3, *map(len, column)) for column in zip(grid.headers, *grid.rows, strict=True)]

    def line(row: tuple[str, ...]) -> str:
        cells = (
            c.ljust(w) if i < grid.left else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return f"| {' | '.join(cells)} |"

    if grid.caption:
        yield from (f"**{grid.caption}**", "")
    yield line(grid.headers)
    # A colon at the end aligns numbers to the right.
    yield line(
        tuple("-" * w if i < grid.left else "-" * (w - 1) + ":" for i, w in enumerate(widths))
    )
    yield from map(line, grid.rows)
