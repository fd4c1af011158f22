"""What a report says, apart from how it looks: sections of blocks. Text may hold `code` in
backticks, and no other markup.
"""

from typing import NamedTuple

# Of a table's line in Markdown and of everything in the terminal: fits a side-by-side diff and a
# page of GitHub.
WIDTH = 100


class Text(NamedTuple):
    """A paragraph."""

    text: str


class Bullets(NamedTuple):
    """A list of short lines."""

    items: tuple[str, ...]


class Code(NamedTuple):
    """Commands to copy."""

    text: str


class Grid(NamedTuple):
    """A table. The first `left` columns are text, the others numbers. shades: a cell's share of the
    DRAM's peak, where it has one.

    subjects: a row's section by its subject, where rows stand for sections; a page leads there.
    """

    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    shades: tuple[tuple[float | None, ...], ...] = ()
    left: int = 1
    subjects: tuple[tuple[str, str], ...] = ()

    def fitted(self, width: int = WIDTH) -> "Grid":
        """This grid with its longest cells cut until its lines in Markdown, with ` | ` between
        cells and `| ` at the edges, fit `width`.
        """
        columns = list(zip(self.headers, *self.rows, strict=True))
        widths = [max(3, *map(len, column)) for column in columns]
        # The longest column gives first: ids and reasons read well when cut, numbers never get that
        # far.
        while sum(widths) + 3 * (len(widths) - 1) + 4 > width and max(widths) > 8:
            widths[widths.index(max(widths))] -= 1

        def cut(row: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(
                c if len(c) <= w else c[: w - 3] + "..." for c, w in zip(row, widths, strict=True)
            )

        return self._replace(headers=cut(self.headers), rows=tuple(map(cut, self.rows)))


Block = Text | Bullets | Code | Grid


class Section(NamedTuple):
    """A heading and its blocks. detail: left out where there is little room.

    subject: the run, and the contract without T or the publication, where a page has pictures of
        it.
    """

    title: str
    blocks: tuple[Block, ...]
    detail: bool = False
    subject: tuple[str, str] | None = None


class Document(NamedTuple):
    """A report. The first section is its summary, under the document's own title."""

    title: str
    sections: tuple[Section, ...]
