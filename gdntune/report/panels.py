"""A contract's pictures and samples: from a run's frame and trials to what the page of a report
shows beside its tables.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from gdntune.errors import counted
from gdntune.problem import Contract, Problem
from gdntune.report import figures, maps, peers
from gdntune.report.figures import Band, Line
from gdntune.report.maps import Kind, Tile
from gdntune.report.words import (
    SHARE_MARKS,
    bound_mark,
    cell_words,
    geometric_mean,
    is_noisy,
    marked,
    number,
    ratio,
    size_names,
)
from gdntune.results.baseline import Baseline
from gdntune.results.records import NOISY, Trial

if TYPE_CHECKING:
    import pandas as pd

    from gdntune.results.table import Table

_DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


class Fact(NamedTuple):
    """A number at the top of the page, with what it is."""

    value: str
    what: str


class Picture(NamedTuple):
    """A picture, as HTML or SVG, under its caption, above its legend. wide: takes the page's width.
    is_map: stands before the samples, whose cells its tiles choose.
    """

    caption: str
    body: str
    wide: bool = False
    legend: tuple[str, ...] = ()
    is_map: bool = False


class Panel(NamedTuple):
    """What a section of a report shows beside its tables. samples: what the page's script draws;
    None where there are none. above: what stands over the pictures, as HTML.
    """

    pictures: tuple[Picture, ...]
    samples: dict[str, Any] | None = None
    above: str = ""


def panel(
    title: str,
    frame: "pd.DataFrame",
    trials: Sequence[tuple[Problem, Trial]],
    table: "Table | None",
    letters: Mapping[str, str],
    default: Callable[[Problem], str | None],
    baseline: Baseline | None = None,
) -> Panel:
    """The panel of a contract but for T, in one run. frame, trials: that run's rows and counted
    trials of it.
    """
    chosen = frame[frame["chosen"]].sort_values(["tokens", "work_units", "B"])
    if not len(chosen):
        return Panel(())
    rivals = peers.rivals(frame)
    chart = _Maps(title, chosen, letters)
    pictures = [
        *_maps(chart, rivals, baseline),
        _times(title, chosen, _defaults(frame, trials, default), rivals),
    ]
    if table is not None:
        pictures.append(_winners(title, chosen, table, letters))
    samples = _samples(frame, trials, default)
    return Panel(tuple(pictures), samples, maps.fold_box(chart.folded))


# -- pictures


class _Maps:
    """What the maps of a section share: the chosen rows by their places, and those in between."""

    def __init__(self, title: str, chosen: "pd.DataFrame", letters: Mapping[str, str]) -> None:
        self.title = title
        # Of a frame's rows, plain dicts are read ten times as fast.
        self.cells = cast("list[dict[str, Any]]", chosen.to_dict("records"))
        self.tokens = sorted({c["tokens"] for c in self.cells})
        sizes = sorted({_size(c) for c in self.cells})
        shown = size_names([(B, HV, H) for _, B, HV, H in sizes])
        self.names = [f"{w} ({size})" for (w, *_), size in zip(sizes, shown, strict=True)]
        columns = {t: i for i, t in enumerate(self.tokens)}
        rows = {size: i for i, size in enumerate(sizes)}
        self.places = [(columns[c["tokens"]], rows[_size(c)]) for c in self.cells]
        self.folded = maps.in_between([row for _, row in self.places])
        self.letters = letters

    def picture(
        self,
        caption: str,
        kind: Kind,
        values: Callable[[Any], float],
        show: Callable[[Any, float], str],
        legend: Mapping[str, str] | None = None,
        titled: bool = False,
    ) -> Iterable[Picture]:
        """A map of a value of each cell; none where no cell has it. legend: by a text's last
        letter. titled: whether its tiles say what was chosen.
        """
        tiles = []
        for c, (column, row) in zip(self.cells, self.places, strict=True):
            value = values(c)
            # A cell without a peak or a default has no tile: an empty one would read as zero.
            if math.isnan(value):
                continue
            said = self._title(c) if titled else ""
            tiles.append(Tile(column, row, _key(c), value, marked(c, show(c, value)), said))
        if not tiles:
            return
        marks = {t.text[-1] for t in tiles}
        yield Picture(
            caption,
            maps.map_table(
                f"{self.title}: {caption}",
                kind,
                [f"T={t}" for t in self.tokens],
                self.names,
                tiles,
                self.folded,
            ),
            # more columns than half a page has room for
            wide=len(self.tokens) > 9,
            legend=tuple(words for mark, words in (legend or {}).items() if mark in marks),
            is_map=True,
        )

    def _title(self, c: Mapping[str, Any]) -> str:
        letter = self.letters.get(c["variant"], "")
        return f"{cell_words(c)}: {number(c['median_us'])} us, {letter} {c['variant']}"


def _maps(chart: _Maps, rivals: "pd.DataFrame", baseline: Baseline | None) -> Iterable[Picture]:
    caption = "Time of the chosen variant, us, over work units (B x HV) and T"
    yield from chart.picture(
        caption, "time", lambda c: c["median_us"], lambda _, v: number(v), titled=True
    )
    yield from chart.picture(
        "Share of the DRAM's peak, %",
        "share",
        lambda c: c["sol"],
        lambda c, v: f"{100 * v:.0f}{bound_mark(c['bound']).rstrip()}",
        SHARE_MARKS,
    )

    def over(name: str, values: Callable[[Any], float], blue: str) -> Iterable[Picture]:
        caption = f"Speed-up over {name} (blue: {blue})"
        return chart.picture(caption, "ratio", values, lambda _, v: ratio(v))

    yield from over("the default rule", lambda c: c["speedup_over_default"], "faster")
    for kernel in peers.names(rivals):
        mine = rivals[rivals["kernel"] == kernel]
        theirs = dict(zip(_keys(mine), mine["chosen_speedup"], strict=True))
        yield from over(
            kernel.removeprefix(peers.PREFIX),
            lambda c, theirs=theirs: theirs.get(_key(c), math.nan),  # type: ignore[misc]
            "ours is faster",
        )
    if baseline is not None and not baseline.shown:
        yield from over(baseline.label, lambda c: c["speedup_over_baseline"], "ours is faster")


def _defaults(
    frame: "pd.DataFrame",
    trials: Sequence[tuple[Problem, Trial]],
    default: Callable[[Problem], str | None],
) -> "pd.DataFrame":
    """The default rule's rows: their medians stand beside those of the choices, where
    `default_mean_us` are means.
    """
    ids = {_key_of(p): default(p) for p in dict.fromkeys(p for p, _ in trials)}
    # Few rows are of any default: to name the cells of all takes a while.
    decode = frame[(frame["role"] == "decode") & frame["variant"].isin(set(ids.values()))]
    its = [v == ids.get(k) for k, v in zip(_keys(decode), decode["variant"], strict=True)]
    # By loc: an empty list alone would take no columns.
    return decode.loc[its]


def _times(
    title: str, chosen: "pd.DataFrame", defaults: "pd.DataFrame", rivals: "pd.DataFrame"
) -> Picture:
    panels: dict[str, list[Line]] = {}
    kernels = peers.names(rivals)
    for t in sorted(set(chosen["tokens"])):
        mine = chosen[chosen["tokens"] == t]
        lines = [_line("chosen variant", mine, "median_us", 0)]
        usual = defaults[defaults["tokens"] == t]
        if usual["median_us"].notna().any():
            lines.append(_line("default rule", usual, "median_us", 1, dashed=True))
        if mine["floor_us"].notna().any():
            lines.append(
                _line("floor: moves the same state bytes", mine, "floor_us", None, dashed=True)
            )
        for i, kernel in enumerate(kernels):
            theirs = rivals[(rivals["tokens"] == t) & (rivals["kernel"] == kernel)]
            if len(theirs):
                lines.append(_line(kernel.removeprefix(peers.PREFIX), theirs, "median_us", 2 + i))
        panels[f"T={t}"] = lines
    caption = "Time against work units, us"
    return Picture(
        caption,
        figures.curves(f"{title}: {caption}", panels, "work units, B x HV", "us"),
        wide=True,
    )


def _line(
    label: str, rows: "pd.DataFrame", column: str, colour: int | None, *, dashed: bool = False
) -> Line:
    rows = rows[rows[column].notna()].sort_values(["work_units", "B"])
    return Line(
        label,
        tuple(map(float, rows["work_units"])),
        tuple(map(float, rows[column])),
        colour,
        dashed,
    )


def _winners(
    title: str, chosen: "pd.DataFrame", table: "Table", letters: Mapping[str, str]
) -> Picture:
    tokens = sorted(set(chosen["tokens"]))
    fields = (chosen[name] for name in Contract.__struct_fields__)
    contracts = dict(zip(zip(*fields, strict=True), chosen["tokens"], strict=True))
    bands: list[Band] = []
    order: dict[str, int] = {}
    for rule in sorted(table.rules, key=lambda r: r.when):
        t = contracts.get(tuple(getattr(rule.when, name) for name in Contract.__struct_fields__))
        for i in rule.intervals if t is not None else ():
            end = None if i.last is None else i.last + 1
            span = f"from {i.first} on" if i.last is None else f"from {i.first} to {i.last}"
            letter = letters.get(i.variant, "")
            # Colours in the order of the map, so that neighbours differ; letters are the tables'.
            area = order.setdefault(i.variant, len(order))
            bands.append(
                Band(
                    tokens.index(t),
                    i.first,
                    end,
                    letter,
                    area,
                    f"T={t}, {span}: {letter} {i.variant}",
                )
            )
    measured = {
        i: [float(w) for w in sorted(set(chosen[chosen["tokens"] == t]["work_units"]))]
        for i, t in enumerate(tokens)
    }
    caption = (
        "Which variant is called at which work units (letters as in the tables; numbers: where an"
        " interval begins, if there is room; dots: measured)"
    )
    svg = figures.winner_map(
        f"{title}: winners", [f"T={t}" for t in tokens], bands, measured, "work units, B x HV"
    )
    legend = sorted(
        ((letters.get(name, ""), name) for name in order), key=lambda pair: (len(pair[0]), pair)
    )
    return Picture(
        caption, svg, wide=True, legend=tuple(f"{letter}: `{name}`" for letter, name in legend)
    )


def _key(row: Any) -> str:
    """A cell's name in the page: T:B:HV:H."""
    return f"{row['tokens']}:{row['B']}:{row['HV']}:{row['H']}"


def _keys(frame: "pd.DataFrame") -> list[str]:
    """The cells' names of a frame's rows; of 100,000 rows `iterrows` would take half a minute."""
    columns = (frame[name] for name in ("tokens", "B", "HV", "H"))
    return [":".join(map(str, place)) for place in zip(*columns, strict=True)]


def _key_of(problem: Problem) -> str:
    return f"{problem.contract.tokens}:{problem.B}:{problem.HV}:{problem.H}"


def _size(row: Any) -> tuple[int, int, int, int]:
    """A cell but for T, in the order of a map's rows: work units, B, HV, H."""
    return row["work_units"], row["B"], row["HV"], row["H"]


# -- samples


def _samples(
    frame: "pd.DataFrame",
    trials: Iterable[tuple[Problem, Trial]],
    default: Callable[[Problem], str | None],
) -> dict[str, Any]:
    """By cell, the final samples of each implementation: [index of its name, role, mark, verified,
    packed samples].
    """
    timed = frame[(frame["stage"] != "screen") & (frame["status"] == "ok")]
    names_of = ("variant", "chosen", "verified", "mean_us", "reason")
    columns = (timed[name] for name in names_of)
    known = {(key, variant): row for key, variant, *row in zip(_keys(timed), *columns, strict=True)}
    # One lookup of the default rule a cell, not one a sample's row.
    usual = functools.cache(default)
    names: dict[str, int] = {}
    cells: dict[str, list[Any]] = {}
    units: dict[str, int] = {}
    for problem, trial in trials:
        if not trial.to_the_end:
            continue
        key = _key_of(problem)
        row = known.get((key, trial.variant.id))
        if row is None:
            continue
        chosen, verified, mean_us, reason = row
        noisy = reason.startswith(NOISY)
        is_default = trial.variant.id == usual(problem)
        words = (("chosen", chosen), ("default", is_default), ("noisy", noisy))
        marks = [w for w, is_so in words if is_so]
        index = names.setdefault(trial.variant.id, len(names))
        rows = cells.setdefault(key, [])
        rows.append(
            [
                index,
                trial.role,
                marks,
                verified,
                *packed(trial.samples_us),
                float(mean_us),
            ]
        )
        units[key] = problem.work_units
    for rows in cells.values():
        # The choice first, then the others from fast to slow, floors and peers last.
        rows.sort(
            key=lambda r: (
                "decode peer partner floor".split().index(r[1]),
                "chosen" not in r[2],
                r[-1],
            )
        )
        for r in rows:
            r.pop()
    over = frame[frame["chosen"] & frame["over_floor"].notna()]
    # The page opens on the cell that is farthest from its floor: that is where a reader would look
    # first.
    worst = _key(over.loc[over["over_floor"].idxmax()]) if len(over) else next(iter(cells), "")
    return {"names": list(names), "cells": cells, "units": units, "first": worst}


def packed(samples_us: Iterable[float]) -> tuple[int, str]:
    """Samples in a few characters: their step in ns, and, in steps, from each value to the next
    with how often it comes again.

    Each number is written in base 64, five bits a digit, the lowest first; a digit's sixth bit says
    that more follow.
    """
    import numpy as np

    ns = np.rint(1000 * np.fromiter(samples_us, np.float64)).astype(np.int64)
    # Equal samples are many on a clock with steps: each value once, with its count.
    values, times = np.unique(ns, return_counts=True)
    # CUPTI's clock ticks every 32 ns: in its steps most numbers are one digit.
    step = int(np.gcd.reduce(values)) or 1
    steps = (np.diff(values, prepend=0) // step).tolist()
    pairs = zip(steps, (times - 1).tolist(), strict=True)
    return step, "".join(_number(value) + _number(more) for value, more in pairs)


@functools.cache
def _number(value: int) -> str:
    digits = ""
    while value > 31:
        digits += _DIGITS[32 | value & 31]
        value >>= 5
    return digits + _DIGITS[value]


# -- numbers


def facts(
    name: str,
    frame: "pd.DataFrame",
    cells: int,
    checks: Mapping[str, int],
    references: Iterable[Mapping[str, Any]],
) -> Iterable[Fact]:
    """A run's numbers for the top of the page. name: said with each where there are several runs,
    else empty.

    cells: how many were asked for. checks: how many of each status. references: what
        `peers.compared` gives.
    """
    suffix = f", {name}" if name else ""
    chosen = frame[frame["chosen"]]
    failed = sum(n for status, n in checks.items() if status != "ok")
    yield Fact(
        f"{len(chosen)} of {cells}", f"cells have a time of the variant chosen for them{suffix}"
    )
    yield Fact(
        f"{int((chosen['verified'] == 'ok').sum())} of {len(chosen)}",
        f"choices agreed with the fp64 reference; {counted(checks.get('ok', 0), 'check')} passed,"
        f" {failed} failed{suffix}",
    )
    if noisy := sum(map(is_noisy, chosen.to_dict("records"))):
        yield Fact(
            f"{noisy} of {len(chosen)}", f"chosen times cannot be believed: noisy, marked ~{suffix}"
        )
    share = chosen["sol"].dropna()
    # What the cache assists, or a launch's cost bounds, says little of the memory.
    bound = share[chosen["bound"] == "DRAM-bound"]
    if len(bound):
        said = (
            f"of the DRAM's peak in the median of {len(bound)} DRAM-bound cells, {bound.max():.0%}"
            f" at most{suffix}"
        )
        yield Fact(f"{bound.median():.0%}", said)
    elif len(share):
        yield Fact(
            f"{share.median():.0%}",
            f"of the DRAM's peak in the median; no cell is DRAM-bound{suffix}",
        )
    over = chosen["over_floor"].dropna()
    if len(over):
        yield Fact(
            f"{geometric_mean(over):.2f} x",
            f"the floor's time in the geometric mean, {over.max():.2f} at worst{suffix}",
        )
    gain = chosen["speedup_over_default"].dropna()
    if len(gain):
        yield Fact(
            f"{geometric_mean(gain):.2f} x",
            f"as fast as the default rule in the geometric mean, {gain.min():.2f} at worst{suffix}",
        )
    for found in references:
        if found["cells"]:
            yield Fact(
                f"{found['geometric_mean']:.2f} x",
                f"as fast as {found['peer']} in the geometric mean of"
                f" {counted(found['cells'], 'cell')},"
                f" {found['worst']:.2f} at worst{suffix}",
            )
