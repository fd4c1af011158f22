"""What a report says of published figures: shares of their DRAM's peak beside ours of ours."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from gdntune.problem import Contract, Problem
from gdntune.report import peers, words
from gdntune.report.document import Block, Bullets, Grid, Section, Text
from gdntune.report.figures import Line, curves
from gdntune.report.panels import Panel, Picture
from gdntune.report.words import MISSING
from gdntune.results.baseline import Baseline
from gdntune.results.published import Published, PublishedCell
from gdntune.results.samples import LoadedRun

if TYPE_CHECKING:
    import pandas as pd


# Columns of T in one table: each has theirs and ours.
TOKENS_A_TABLE = 4
_NEAR = "final state alone"
_AUTHORS = f"{peers.PREFIX}flashinfer"


class Pair(NamedTuple):
    """A published cell and our share at the same work units; None where this run has none. mark: as
    in the other tables.
    """

    theirs: PublishedCell
    ours: float | None
    mark: str = ""


def sections(
    sources: Sequence[LoadedRun],
    frame: "pd.DataFrame",
    publication: Published,
    baseline: Baseline | None = None,
) -> Iterator[Section]:
    """A section a sweep. Its subject is `subject(...)`."""
    for source in sources:
        title = f"{source.name} against {publication.title}"
        rows = frame[frame["run"] == source.name]
        mine = rows[rows["chosen"] & rows["sol"].notna()]
        blocks = (
            *_blocks(source, mine, publication),
            *_in_their_form(source, rows, publication, baseline),
        )
        yield Section(title, blocks, subject=subject(source, publication))


def subject(source: LoadedRun, publication: Published) -> tuple[str, str]:
    """What a section is about, by which its panel is found."""
    return source.name, publication.name


def panel(source: LoadedRun, frame: "pd.DataFrame", publication: Published) -> Panel:
    """Shares over work units, theirs and ours, a picture a T."""
    mine = frame[(frame["run"] == source.name) & frame["chosen"] & frame["sol"].notna()]
    theirs_label, ours_label = _labels(source, publication)
    exact, near = _pairs(mine, publication)
    panels: dict[str, list[Line]] = {}
    for t, pairs in sorted({**exact, **near}.items()):
        printed = [
            (float(p.theirs.problem.work_units), p.theirs.sol)
            for p in pairs
            if p.theirs.sol is not None
        ]
        lines = panels.setdefault(f"T={t}", [Line(theirs_label, *_columns(printed), colour=1)])
        found = [(float(p.theirs.problem.work_units), p.ours) for p in pairs if p.ours is not None]
        if found:
            label, colour = (ours_label, 0) if t in exact else (f"{ours_label}, {_NEAR}", 3)
            lines.append(Line(label, *_columns(found), colour=colour))
    caption = "Share of each GPU's own DRAM peak, %, against work units"
    title = f"{source.name}, {publication.name}: {caption}"
    return Panel(
        (
            Picture(
                caption, curves(title, panels, "work units, B x HV", "%", percent=True), wide=True
            ),
        )
    )


def _columns(points: "list[tuple[float, Any]]") -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(x for x, _ in points), tuple(y for _, y in points)


def _labels(source: LoadedRun, publication: Published) -> tuple[str, str]:
    return (
        f"{publication.gpu}, {publication.l2}",
        f"{source.run.device.name}, {source.run.policy.get('l2', MISSING)}",
    )


def _pairs(
    mine: "pd.DataFrame", publication: Published
) -> tuple[dict[int, list[Pair]], dict[int, list[Pair]]]:
    """By T: those of the same contract; and, where this run has none, those beside ours that keep
    the final state alone.
    """
    # Of several cells of equal work units that with the most heads, as in a table.
    ours = {(_fields(c), c["work_units"]): c for _, c in mine.sort_values(["HV", "H"]).iterrows()}

    def pair(cell: PublishedCell, contract: Contract) -> Pair:
        found = ours.get((_fields(contract), cell.problem.work_units))
        return (
            Pair(cell, None)
            if found is None
            else Pair(cell, float(found["sol"]), words.bound_mark(found["bound"]))
        )

    exact: dict[int, list[Pair]] = {}
    near: dict[int, list[Pair]] = {}
    for cell in publication.cells:
        contract = cell.problem.contract
        exact.setdefault(contract.tokens, []).append(pair(cell, contract))
        near.setdefault(contract.tokens, []).append(
            pair(cell, contract.replace(mode="update", intermediate="none"))
        )
    # The near column stands in only where a T would be empty: two columns of other bytes side by
    # side invite a wrong comparison.
    apart = [t for t in exact if not _has_ours(exact[t]) and _has_ours(near[t])]
    return {t: pairs for t, pairs in exact.items() if t not in apart}, {t: near[t] for t in apart}


def _has_ours(pairs: list[Pair]) -> bool:
    return any(p.ours is not None for p in pairs)


def _blocks(source: LoadedRun, mine: "pd.DataFrame", publication: Published) -> Iterator[Block]:
    theirs, ours = _labels(source, publication)
    peak = source.peak_gb_s
    policy = source.run.policy.get("l2")
    yield Text(
        f"Theirs: {theirs}, as printed in {publication.url}, of {publication.peak_gb_s:.0f} GB/s."
        f" Ours: {ours}, of {'an unknown peak' if peak is None else f'{peak:.0f} GB/s'}. A share is"
        " bytes that must move over time, over the GPU's own peak: it says how well each GPU is"
        " used, not which is faster."
    )
    exact, near = _pairs(mine, publication)
    lines = [_line(t, pairs) for t, pairs in exact.items() if _has_ours(pairs)]
    if policy != publication.l2:
        # First: it decides how every line below is read.
        lines.insert(0, f"The L2 policies differ: theirs is {publication.l2}, ours {policy}.")
    lost = sum(c.sol is None for c in publication.cells)
    if lost:
        lines.append(f"{lost} of their cells are printed as ERROR.")
    none = [str(t) for t, pairs in exact.items() if not _has_ours(pairs)]
    if none:
        lines.append(f"This run has no cell to stand beside theirs at T={', '.join(none)}.")
    yield Bullets(tuple(lines))
    yield from _grids(f"SOL %: theirs {theirs}; ours {ours}", exact)
    if near:
        yield Text(
            f"At T={', '.join(map(str, near))} theirs writes the state after each token, and this"
            " run has no such cells. Here ours writes the final state alone: other bytes in"
            " another pattern, so these columns stand beside theirs for orientation."
        )
        yield from _grids(f"SOL %: theirs {theirs}; ours {ours}, {_NEAR}", near)


def _in_their_form(
    source: LoadedRun, rows: "pd.DataFrame", publication: Published, baseline: Baseline | None
) -> Iterator[Block]:
    """Our times, shares and speed-ups in tables laid out as theirs: a row a batch, a column a T; of
    their contracts alone.
    """
    wanted = {
        (_fields(c.problem.contract), c.problem.B, c.problem.HV): c.problem
        for c in publication.cells
    }
    keys = [(_fields(row), row["B"], row["HV"]) for _, row in rows.iterrows()]
    # Asked for: a row of any kind, also a failed one. What this run never asked for is a dash, not
    # an ERROR.
    asked = {wanted[key] for key in keys if key in wanted}
    if not asked:
        return
    chosen = {
        wanted[k]: row
        for k, (_, row) in zip(keys, rows.iterrows(), strict=True)
        if k in wanted and row["chosen"]
    }
    yield Text(
        f"Ours in the form of their tables: {_labels(source, publication)[1]}, HV=64; T=1 writes"
        " the final state, T of 2 and more the state after each token. ERROR would be a cell that"
        " was asked for and has no time of a checked variant."
    )
    for caption, show in _columns_shown(source, rows, chosen, baseline):
        yield _their_grid(caption, show, publication, list(wanted.values()), asked, chosen)


def _columns_shown(
    source: LoadedRun,
    rows: "pd.DataFrame",
    chosen: dict[Problem, Any],
    baseline: Baseline | None,
) -> Iterator[tuple[str, Callable[[Problem], str]]]:
    """What there is a table of, and how a cell of it is written."""
    rivals = {
        (_fields(r), r["B"], r["HV"]): r
        for _, r in peers.rivals(rows).iterrows()
        if r["kernel"] == _AUTHORS
    }

    def share(p: Problem) -> str:
        return _percent(_known(chosen[p]["sol"])) + words.bound_mark(chosen[p]["bound"])

    def over(column: str) -> Callable[[Problem], str]:
        return lambda p: words.ratio(chosen[p][column])

    def over_authors(p: Problem) -> str:
        found = rivals.get((_fields(p.contract), p.B, p.HV))
        return MISSING if found is None else words.ratio(found["chosen_speedup"])

    yield "Time, us", lambda p: words.number(chosen[p]["median_us"])
    yield f"DRAM SOL %, of {source.peak_gb_s or math.nan:.0f} GB/s", share
    if rivals:
        yield "Speed-up over FlashInfer in this run", over_authors
    if baseline is not None and baseline.name not in ("default", "flashinfer"):
        yield f"Speed-up over {baseline.label}", over("speedup_over_baseline")
    if any(_known(c["speedup_over_default"]) for c in chosen.values()):
        yield "Speed-up over the default rule", over("speedup_over_default")


def _their_grid(
    caption: str,
    show: Callable[[Problem], str],
    publication: Published,
    problems: Sequence[Problem],
    asked: Collection[Problem],
    chosen: dict[Problem, Any],
) -> Grid:
    """A row a batch, a column a T. asked: the problems that this run was to time."""
    tokens = sorted({c.problem.contract.tokens for c in publication.cells})
    lines, shades = [], []
    for B in sorted({c.problem.B for c in publication.cells}):
        row, shade = [str(B)], [None]
        for t in tokens:
            p = next(q for q in problems if (q.B, q.contract.tokens) == (B, t))
            row.append(show(p) if p in chosen else "ERROR" if p in asked else MISSING)
            shade.append(_known(chosen[p]["sol"]) if p in chosen else None)  # type: ignore[arg-type]
        lines.append(tuple(row))
        shades.append(tuple(shade))
    return Grid(caption, ("B", *(f"T={t}" for t in tokens)), tuple(lines), tuple(shades))


def _fields(contract: Any) -> tuple[Any, ...]:
    """A contract's fields, of itself or of a frame's row."""
    if isinstance(contract, Contract):
        return tuple(getattr(contract, n) for n in Contract.__struct_fields__)
    return tuple(contract[n] for n in Contract.__struct_fields__)


def _known(value: float) -> float | None:
    return None if math.isnan(value) else float(value)


def _line(t: int, pairs: list[Pair]) -> str:
    both = [
        (p.theirs.sol, p.ours) for p in pairs if p.theirs.sol is not None and p.ours is not None
    ]
    if not both:
        return f"T={t}: no cell has both."
    higher = sum(ours > theirs for theirs, ours in both)
    # Of ours alone: under cold-dirty, theirs, the cache helps nobody.
    assisted = sum(p.mark.strip() == "c" for p in pairs)
    return (
        f"T={t}: over {len(both)} shared cells the median share is {median(t for t, _ in both):.1%}"
        f" theirs, {median(o for _, o in both):.1%} ours; ours is higher at {higher}"
        + (f" ({assisted} of ours are L2-assisted)." if assisted else ".")
    )


def _grids(caption: str, pairs: dict[int, list[Pair]]) -> Iterator[Grid]:
    tokens = list(pairs)
    for start in range(0, len(tokens), TOKENS_A_TABLE):
        shown = tokens[start : start + TOKENS_A_TABLE]
        by_problem: dict[tuple[int, int], dict[int, Pair]] = {}
        for t in shown:
            for p in pairs[t]:
                problem: Problem = p.theirs.problem
                by_problem.setdefault((problem.B, problem.HV), {})[t] = p
        rows, shades = [], []
        for (B, HV), found in sorted(by_problem.items()):
            row, shade = [f"{B} x {HV}"], [None]
            for t in shown:
                pair = found.get(t)
                values = (None, None) if pair is None else (pair.theirs.sol, pair.ours)
                failed = pair is not None and pair.theirs.sol is None
                row += [
                    "ERROR" if failed else _percent(values[0]),
                    _percent(values[1]) + (pair.mark if pair else ""),
                ]
                shade += values  # type: ignore[arg-type]
            rows.append(tuple(row))
            shades.append(tuple(shade))
        headers = ("B x HV", *(h for t in shown for h in (f"T={t} theirs", "ours")))
        yield Grid(caption, headers, tuple(rows), tuple(shades))


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}"
