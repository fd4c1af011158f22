"""Pictures as SVG, by matplotlib. Knows numbers and labels alone; colours that differ by theme are
the page's CSS variables.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from gdntune.errors import ToolMissing

# Stand-ins for colours of the page, which matplotlib writes as they are: they become CSS variables
# afterwards.
INK, FAINT, *LINES = (f"#01fe{i:02x}" for i in range(8))
_THEME = {
    INK: "var(--ink)",
    FAINT: "var(--faint)",
    **{c: f"var(--line{i})" for i, c in enumerate(LINES)},
}
# Of areas with a letter in black on them.
AREAS = (
    "#8dd3c7 #ffffb3 #bebada #fb8072 #80b1d3 #fdb462 #b3de69 #fccde5 #d9d9d9 #ccebc5 #ffed6f"
    " #aec7e8 #ffbb78 #98df8a #ff9896 #c5b0d5 #c49c94 #dbdb8d #9edae5 #e7969c"
).split()
# A point is a pixel at the figures' own size.
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 11,
    "axes.titlesize": 11,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": FAINT,
    "grid.linewidth": 0.5,
    "grid.alpha": 0.45,
    "axes.grid": False,
    "legend.frameon": False,
    "figure.dpi": 72,
}


LEGEND_ACROSS = 5
# Of the numbers where an interval begins, in pixels.
NUMBER_HEIGHT = 9


class Line(NamedTuple):
    """A curve. colour: an index of LINES; None: the ink's. dashed: no measured kernel of ours."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    colour: int | None = 0
    dashed: bool = False


class Band(NamedTuple):
    """A part of a column of the map of winners, in work units, without its end; None: no end."""

    column: int
    first: float
    end: float | None
    letter: str
    area: int
    title: str


def curves(
    title: str,
    panels: Mapping[str, Sequence[Line]],
    x_label: str,
    y_label: str,
    *,
    percent: bool = False,
) -> str:
    """A panel a name, all of one scale: log-log, or with shares as percents on a linear axis."""
    # Two at least: a single panel of the page's width would be stretched.
    across = min(4, max(2, len(panels)))
    down = math.ceil(len(panels) / across)
    # The legend's lines stand above the panels' titles.
    top = 30 + 16 * max(
        1,
        math.ceil(len({line.label for lines in panels.values() for line in lines}) / LEGEND_ACROSS),
    )
    width, height = 1180, 215 * down + 18 + top

    def draw(matplotlib: Any, figure: Any) -> None:
        # One scale for all, so that panels are compared by eye.
        grid = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False)
        figure.subplots_adjust(
            left=62 / width,
            right=1 - 8 / width,
            top=1 - top / height,
            bottom=44 / height,
            wspace=0.05,
            hspace=0.16,
        )
        handles: dict[str, Any] = {}
        for (name, lines), axes in zip(panels.items(), grid.flat, strict=False):
            for line in lines:
                y = [100 * v for v in line.y] if percent else line.y
                (handle,) = axes.plot(
                    line.x,
                    y,
                    color=INK if line.colour is None else LINES[line.colour % len(LINES)],
                    linestyle="--" if line.dashed else "-",
                    linewidth=1.2 if line.dashed else 1.7,
                    marker="" if line.dashed else "o",
                    markersize=3,
                )
                # One entry of the legend for each label: a line comes again in every panel.
                handles.setdefault(line.label, handle)
            axes.set_title(name, pad=4)
            axes.set_xscale("log")
            axes.grid(True)
            if not percent:
                axes.set_yscale("log")
            axes.minorticks_off()
        for axes in list(grid.flat)[len(panels) :]:
            axes.set_visible(False)
        if percent:
            grid[0][0].set_ylim(bottom=0)
        figure.supxlabel(x_label, fontsize=11, y=4 / height)
        figure.supylabel(y_label, fontsize=11, x=4 / width)
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="upper left",
            ncols=max(1, min(LEGEND_ACROSS, len(handles))),
            fontsize=11,
        )

    return _svg(title, width, height, draw)


def winner_map(
    title: str,
    columns: Sequence[str],
    bands: Sequence[Band],
    measured: Mapping[int, Sequence[float]],
    y_label: str,
) -> str:
    """Which variant is called at which work units, a column a number of tokens; a dot where it was
    measured.
    """
    points = [w for found in measured.values() for w in found]
    # Room for the dots at the edges, and for the first interval's letter.
    low, high = min(points) / 1.35, max(points) * 1.6
    width, height = 1180, min(520, max(150, 22 * len(set(points)) + 80))

    def draw(matplotlib: Any, figure: Any) -> None:
        axes = figure.add_axes((62 / width, 8 / height, 1 - 70 / width, 1 - 38 / height))
        pixels = (height - 46) / math.log(high / low)
        axes.set_yscale("log", base=2)
        # By column, where the last number was written; nearer than its height no other is.
        written: dict[int, float] = {}
        for b in sorted(bands, key=lambda b: (b.column, b.first)):
            first, end = max(b.first, low), high if b.end is None else min(b.end, high)
            # An interval below the smallest cell has no height here.
            if first >= end:
                continue
            axes.add_patch(
                matplotlib.patches.Rectangle(
                    (b.column + 0.02, first),
                    0.96,
                    end - first,
                    facecolor=AREAS[b.area % len(AREAS)],
                    edgecolor="#00000055",
                    linewidth=0.6,
                    clip_on=False,
                    gid=f"band:{b.column}:{b.first:g}",
                )
            )
            if pixels * math.log(end / first) >= 9:
                axes.text(
                    b.column + 0.5,
                    math.sqrt(first * end),
                    b.letter,
                    ha="center",
                    va="center",
                    color="#000000",
                    fontsize=11,
                )
            if (
                b.first > low
                and pixels * math.log(b.first / written.get(b.column, 1e-9)) >= NUMBER_HEIGHT
            ):
                written[b.column] = b.first
                axes.text(
                    b.column + 0.05, first, f"{b.first:g}", va="top", color="#000000", fontsize=9
                )
        for column, found in measured.items():
            axes.plot(
                [column + 0.93] * len(found),
                found,
                linestyle="",
                marker="o",
                markersize=2.5,
                color="#000000",
            )
        axes.set_xlim(0, len(columns))
        axes.set_ylim(high, low)
        axes.set_xticks([i + 0.5 for i in range(len(columns))], columns)
        axes.xaxis.tick_top()
        axes.yaxis.set_major_formatter(lambda v, _: f"{v:g}")
        axes.minorticks_off()
        axes.tick_params(length=0)
        axes.set_ylabel(y_label)
        for spine in axes.spines.values():
            spine.set_visible(False)

    return _svg(
        title, width, height, draw, {f"band:{b.column}:{b.first:g}": b.title for b in bands}
    )


def _svg(
    title: str,
    width: float,
    height: float,
    draw: Callable[[Any, Any], None],
    titles: Mapping[str, str] | None = None,
) -> str:
    """A picture's element, ready for a page. Equal drawings give equal bytes."""
    try:
        import matplotlib
        import matplotlib.colors
        import matplotlib.figure
        import matplotlib.patches
    except ImportError as e:
        raise ToolMissing(
            f"matplotlib is not here, which draws a report's pictures ({e}): pip install"
            " 'gdntune[report]'"
        ) from e
    out = io.StringIO()
    with matplotlib.rc_context():
        # A user's own style would make other bytes.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "svg.hashsalt": title})
        figure = matplotlib.figure.Figure(figsize=(width / 72, height / 72))
        # The page's own background shows through, in both themes.
        figure.patch.set_visible(False)
        draw(matplotlib, figure)
        for axes in figure.axes:
            axes.patch.set_visible(False)
        figure.savefig(
            out, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
        )
    return _for_page(out.getvalue(), title, titles or {})


def _for_page(svg: str, title: str, titles: Mapping[str, str]) -> str:
    """Without prologue and needless names, in the page's font and colours; a part that has a key
    gets it, and its title.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(
        r"<svg [^>]*viewBox=\"([^\"]*)\"[^>]*>",
        rf'<svg viewBox="\1" role="img" aria-label="{escape(title)}">',
        svg,
        count=1,
    )
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)

    def named(match: "re.Match[str]") -> str:
        key = match[1]
        said = titles.get(key)
        return (
            f'<g data-key="{escape(key)}"><title>{escape(said)}</title>'
            if said is not None
            else "<g>"
        )

    svg = re.sub(r'<g id="([^"]*)">', named, svg)
    # The page's font, and no turn by nothing.
    svg = re.sub(
        r" font-family: [^;\"]*;|<style.*?</style>|<g id=\"[^\"]*\"/>| transform=\"rotate\(-?0"
        r" [^\"]*\"",
        "",
        svg,
        flags=re.S,
    )
    # A hundredth of a pixel is not seen, and the page is smaller without the rest.
    svg = re.sub(r"(\.\d\d)\d+", r"\1", svg)
    svg = svg.replace("xlink:href", "href").replace(
        ' xmlns:xlink="http://www.w3.org/1999/xlink"', ""
    )
    for stand_in, variable in _THEME.items():
        svg = svg.replace(stand_in, variable)
    return re.sub(r"\n\s*", "\n", svg).strip()
