"""Maps of cells as HTML tables: a row a size, a column a T, a tile's colour by its value.

Tables, not pictures: their text scales, a keyboard walks them, and a page of 1,000 cells is written
in milliseconds.
"""

import math
from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Literal, NamedTuple

Kind = Literal["time", "share", "ratio"]


class Tile(NamedTuple):
    """A cell of a map. key: what the page calls it. value: what its colour stands for. text stands
    in it; title under the mouse, given once a page: the script lends it to the other maps.
    """

    column: int
    row: int
    key: str
    value: float
    text: str
    title: str = ""


def in_between(rows: Sequence[int]) -> frozenset[int]:
    """The rows of a map that were measured at few T, as those that a sweep adds to find crossovers:
    fewer than half as many tiles as the fullest. rows: each tile's row.
    """
    counts = Counter(rows)
    most = max(counts.values(), default=0)
    return frozenset(row for row, n in counts.items() if 2 * n < most)


def map_table(
    title: str,
    kind: Kind,
    columns: Sequence[str],
    rows: Sequence[str],
    tiles: Sequence[Tile],
    folded: frozenset[int] = frozenset(),
) -> str:
    """A map. kind: `time` in us, the longer the darker; `share` of 1; `ratio`, blue above 1 and red
    below. folded: the rows that are shown where the section's box is ticked.
    """
    by_place = {(t.row, t.column): t for t in tiles}
    logs = [math.log(t.value) for t in tiles] if kind == "time" else []
    low, span = (min(logs), max(max(logs) - min(logs), 1e-9)) if logs else (0.0, 1.0)

    def cell(tile: Tile | None) -> str:
        if tile is None:
            return "<td></td>"
        if kind == "share":
            strength = min(max(tile.value, 0.0), 1.0)
        elif kind == "time":
            strength = (math.log(tile.value) - low) / span
        else:
            # 1.5 and 1/1.5 are the strongest
            strength = min(abs(math.log(tile.value, 1.5)), 1.0)
        below = ' class="below"' if kind == "ratio" and tile.value < 1 else ""
        said = f' title="{escape(tile.title)}"' if tile.title else ""
        return (
            f'<td data-key="{escape(tile.key)}"{below} style="--v:{strength:.2f}"{said}>'
            f"{escape(tile.text)}</td>"
        )

    head = "".join(f"<th>{escape(c)}</th>" for c in columns)
    body = "".join(
        f"<tr{' class=between' if i in folded else ''}><th>{escape(name)}</th>"
        f"{''.join(cell(by_place.get((i, j))) for j in range(len(columns)))}</tr>\n"
        for i, name in enumerate(rows)
    )
    return (
        f'<div class="map scroll"><table class="{kind}" role="grid" aria-label="{escape(title)}">'
        f"<thead><tr><th>B x HV</th>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
    )


def fold_box(folded: frozenset[int]) -> str:
    """The box that shows a section's rows in between; empty where there are none."""
    if not folded:
        return ""
    rows = f"{len(folded)} row{'s' if len(folded) > 1 else ''}"
    return (
        f'<label class="fold"><input type="checkbox"> also {rows} in between, measured at few T'
        "</label>"
    )
