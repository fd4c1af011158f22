"""A document as one HTML file: its tables, and beside them pictures and samples. Opens from disk;
asks nothing of a network.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from gdntune.report.document import Block, Bullets, Code, Document, Grid, Section, Text
from gdntune.report.panels import Fact, Panel, Picture

# The browser itself refuses whatever would go out: a report may hold what others wrote, such as a
# compiler's message.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
_HERE = Path(__file__).parent
_NO_ANCHORS: Mapping[tuple[str, str], str] = {}


def html(document: Document, facts: Sequence[Fact], panels: Mapping[tuple[str, str], Panel]) -> str:
    """The page. panels: by a section's subject; such a section's tables are folded away below its
    pictures.
    """
    summary, *rest = document.sections
    anchors = {s.subject: _anchor(i) for i, s in enumerate(rest) if s.subject}
    # What a table of contents leads to need not stand in the line of links too.
    listed = {
        subject for s in rest for b in s.blocks if isinstance(b, Grid) for subject in b.subjects
    }
    links = [
        f"<a href=#{_anchor(i)}>{escape(s.title)}</a>"
        for i, s in enumerate(rest)
        if s.subject not in listed
    ]
    samples = {
        _anchor(i): p.samples
        for i, s in enumerate(rest)
        if s.subject and (p := panels.get(s.subject)) and p.samples
    }
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        f"<title>{escape(document.title)}</title>",
        f"<style>\n{(_HERE / 'page.css').read_text(encoding='utf-8')}</style>",
        "</head>",
        "<body>",
        f"<header><h1>{escape(document.title)}</h1>",
        f"<dl>{''.join(map(_fact, facts))}</dl>",
        *(part for block in summary.blocks for part in _block(block)),
        f"<nav>{''.join(links)}</nav></header>",
        "<main>",
        *(part for i, s in enumerate(rest) for part in _section(s, _anchor(i), panels, anchors)),
        "</main>",
        f'<script type="application/json" id="samples">{_json(samples)}</script>',
        f"<script>\n{(_HERE / 'page.js').read_text(encoding='utf-8')}</script>",
        "</body>",
        "</html>",
    ]
    return "\n".join(parts) + "\n"


def _fact(fact: Fact) -> str:
    return f"<div><dd>{_text(fact.value)}</dd><dt>{_text(fact.what)}</dt></div>"


def _anchor(i: int) -> str:
    return f"s{i + 1}"


def _json(value: object) -> str:
    # No text in it can end the element that it stands in.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True).replace("<", "\\u003c")


def _section(
    section: Section,
    anchor: str,
    panels: Mapping[tuple[str, str], Panel],
    anchors: Mapping[tuple[str, str], str],
) -> Iterator[str]:
    yield f'<section id="{anchor}"><h2>{escape(section.title)}</h2>'
    panel = panels.get(section.subject) if section.subject else None
    blocks = [part for block in section.blocks for part in _block(block, anchors)]
    if panel and panel.pictures:
        # What is said before the first table stays in sight.
        first = next(
            (i for i, b in enumerate(section.blocks) if isinstance(b, Grid)), len(section.blocks)
        )
        blocks = [part for block in section.blocks[first:] for part in _block(block)]
        yield from (part for block in section.blocks[:first] for part in _block(block))
        maps = [p for p in panel.pictures if p.is_map]
        # A box of its own: the samples stay in view along the maps, and no further.
        yield f"<div>{panel.above}"
        yield from _pictures(sorted(maps, key=lambda p: p.wide))
        yield _SAMPLES if panel.samples else ""
        yield "</div>"
        yield from _pictures([p for p in panel.pictures if not p.is_map])
        if blocks:
            # The pictures say the same; the tables stay for search and for copying.
            blocks = ["<details><summary>The same as tables</summary>", *blocks, "</details>"]
    yield from blocks
    yield "</section>"


def _pictures(pictures: Sequence[Picture]) -> Iterator[str]:
    yield '<div class="pictures">'
    for picture in pictures:
        kind = ' class="wide"' if picture.wide else ""
        yield (
            f"<figure{kind}><figcaption>{_text(picture.caption)}</figcaption>{picture.body}"
            f"{_legend(picture)}</figure>"
        )
    yield "</div>"


_SAMPLES = (
    '<div class="samples" hidden><h3>Samples of a cell</h3><p>Click a cell in a map, walk there'
    ' with Tab and the arrow keys, or choose: <label>T <select name="tokens"></select></label>'
    ' <label>work units <select name="units"></select></label> <label><input type="checkbox"'
    ' name="own"> a scale a row</label> <label><input type="checkbox" name="all"> all rows</label>'
    ' <output></output></p><div class="plot"></div></div>'
)


def _legend(picture: Picture) -> str:
    return (
        f'<ul class="legend">{"".join(f"<li>{_text(i)}</li>" for i in picture.legend)}</ul>'
        if picture.legend
        else ""
    )


def _block(block: Block, anchors: Mapping[tuple[str, str], str] = _NO_ANCHORS) -> Iterator[str]:
    if isinstance(block, Text):
        yield f"<p>{_text(block.text)}</p>"
    elif isinstance(block, Bullets):
        yield f"<ul>{''.join(f'<li>{_text(item)}</li>' for item in block.items)}</ul>"
    elif isinstance(block, Code):
        yield f"<pre>{escape(block.text)}</pre>"
    else:
        yield from _grid(block, anchors)


def _grid(grid: Grid, anchors: Mapping[tuple[str, str], str]) -> Iterator[str]:
    def cell(
        text: str, i: int, share: float | None, tag: str = "td", anchor: str | None = None
    ) -> str:
        left = "" if i < grid.left else ' class="n"'
        # A tenth of a shade more for each tenth of the peak.
        shade = "" if share is None else f' style="--share:{min(max(share, 0), 1):.2f}"'
        said = _text(text) if anchor is None or i > 1 else f"<a href=#{anchor}>{_text(text)}</a>"
        return f"<{tag}{left}{shade}>{said}</{tag}>"

    yield '<div class="scroll"><table>'
    if grid.caption:
        yield f"<caption>{_text(grid.caption)}</caption>"
    heads = "".join(cell(h, i, None, "th") for i, h in enumerate(grid.headers))
    yield f"<thead><tr>{heads}</tr></thead><tbody>"
    for i, row in enumerate(grid.rows):
        shades = grid.shades[i] if grid.shades else (None,) * len(row)
        to = anchors.get(grid.subjects[i]) if grid.subjects else None
        pairs = enumerate(zip(row, shades, strict=True))
        yield f"<tr>{''.join(cell(c, j, s, anchor=to) for j, (c, s) in pairs)}</tr>"
    yield "</tbody></table></div>"


def _text(text: str) -> str:
    # Escaped first: reasons and ids hold what others wrote.
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
