"""What a report says of published figures: their shares of their DRAM's peak beside ours of ours."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from gdntune.problem import Contract, Problem
from gdntune.published import Published, PublishedCell
from gdntune.render import words
from gdntune.render.document import Block, Bullets, Grid, Section, Text
from gdntune.render.figures import Line, curves
from gdntune.render.panels import Panel, Picture
from gdntune.render.words import MISSING

if TYPE_CHECKING:
    import pandas as pd

    from gdntune.report import Source

# Columns of T in one table: each has theirs and ours.
TOKENS_A_TABLE = 4
_NEAR = "final state alone"


class Pair(NamedTuple):
    """A published cell and our share at the same work units; None where this run has none. mark: as in the other tables."""

    theirs: PublishedCell
    ours: float | None
    mark: str = ""


def sections(sources: "Sequence[Source]", frame: "pd.DataFrame", publication: Published) -> Iterator[Section]:
    """A section a sweep. Its subject is `subject(...)`."""
    for source in sources:
        title = f"{source.name} against {publication.title}"
        mine = frame[(frame["run"] == source.name) & frame["chosen"] & frame["sol"].notna()]
        yield Section(title, tuple(_blocks(source, mine, publication)), subject=subject(source, publication))


def subject(source: "Source", publication: Published) -> tuple[str, str]:
    """What a section is about, by which its panel is found."""
    return source.name, publication.name


def panel(source: "Source", frame: "pd.DataFrame", publication: Published) -> Panel:
    """Shares over work units, theirs and ours, a picture a T."""
    mine = frame[(frame["run"] == source.name) & frame["chosen"] & frame["sol"].notna()]
    theirs_label, ours_label = _labels(source, publication)
    exact, near = _pairs(mine, publication)
    panels: dict[str, list[Line]] = {}
    for t, pairs in sorted({**exact, **near}.items()):
        printed = [(float(p.theirs.problem.work_units), p.theirs.sol) for p in pairs if p.theirs.sol is not None]
        lines = panels.setdefault(f"T={t}", [Line(theirs_label, *_columns(printed), colour=1)])
        found = [(float(p.theirs.problem.work_units), p.ours) for p in pairs if p.ours is not None]
        if found:
            label, colour = (ours_label, 0) if t in exact else (f"{ours_label}, {_NEAR}", 3)
            lines.append(Line(label, *_columns(found), colour=colour))
    caption = "Share of each GPU's own DRAM peak, %, against work units"
    title = f"{source.name}, {publication.name}: {caption}"
    return Panel((Picture(caption, curves(title, panels, "work units, B x HV", "%", percent=True), wide=True),))


def _columns(points: "list[tuple[float, Any]]") -> tuple[tuple[float, ...], tuple[float, ...]]:
    return tuple(x for x, _ in points), tuple(y for _, y in points)


def _labels(source: "Source", publication: Published) -> tuple[str, str]:
    return (
        f"{publication.gpu}, {publication.l2}",
        f"{source.run.device.name}, {source.run.policy.get('l2', MISSING)}",
    )


def _pairs(mine: "pd.DataFrame", publication: Published) -> tuple[dict[int, list[Pair]], dict[int, list[Pair]]]:
    """By T: those of the same contract; and, where this run has none, those beside ours that keep the final state alone."""
    ours = {(tuple(c[n] for n in Contract.__struct_fields__), c["work_units"]): c for _, c in mine.iterrows()}

    def pair(cell: PublishedCell, contract: Contract) -> Pair:
        fields = tuple(getattr(contract, n) for n in Contract.__struct_fields__)
        found = ours.get((fields, cell.problem.work_units))
        return Pair(cell, None) if found is None else Pair(cell, float(found["sol"]), words.bound_mark(found["bound"]))

    exact: dict[int, list[Pair]] = {}
    near: dict[int, list[Pair]] = {}
    for cell in publication.cells:
        contract = cell.problem.contract
        exact.setdefault(contract.tokens, []).append(pair(cell, contract))
        near.setdefault(contract.tokens, []).append(pair(cell, contract.replace(mode="update", intermediate="none")))
    apart = [t for t in exact if not _has_ours(exact[t]) and _has_ours(near[t])]
    return {t: pairs for t, pairs in exact.items() if t not in apart}, {t: near[t] for t in apart}


def _has_ours(pairs: list[Pair]) -> bool:
    return any(p.ours is not None for p in pairs)


def _blocks(source: "Source", mine: "pd.DataFrame", publication: Published) -> Iterator[Block]:
    theirs, ours = _labels(source, publication)
    peak = source.peak_gb_s
    policy = source.run.policy.get("l2")
    yield Text(
        f"Theirs: {theirs}, as printed in {publication.url}, of {publication.peak_gb_s:.0f} GB/s. "
        f"Ours: {ours}, of {'an unknown peak' if peak is None else f'{peak:.0f} GB/s'}. "
        "A share is bytes that must move over time, over the GPU's own peak: it says how well each GPU is used, not which is faster."
    )
    exact, near = _pairs(mine, publication)
    lines = [_line(t, pairs) for t, pairs in exact.items() if _has_ours(pairs)]
    if policy != publication.l2:
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
            f"At T={', '.join(map(str, near))} theirs writes the state after each token, and this run has no such cells. Here ours "
            "writes the final state alone: other bytes in another pattern, so these columns stand beside theirs for orientation."
        )
        yield from _grids(f"SOL %: theirs {theirs}; ours {ours}, {_NEAR}", near)


def _line(t: int, pairs: list[Pair]) -> str:
    both = [(p.theirs.sol, p.ours) for p in pairs if p.theirs.sol is not None and p.ours is not None]
    if not both:
        return f"T={t}: no cell has both."
    higher = sum(ours > theirs for theirs, ours in both)
    assisted = sum(p.mark.strip() == "c" for p in pairs)
    return (
        f"T={t}: over {len(both)} shared cells the median share is {median(t for t, _ in both):.1%} theirs, "
        f"{median(o for _, o in both):.1%} ours; ours is higher at {higher}"
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
                row += ["ERROR" if failed else _percent(values[0]), _percent(values[1]) + (pair.mark if pair else "")]
                shade += values  # type: ignore[arg-type]
            rows.append(tuple(row))
            shades.append(tuple(shade))
        headers = ("B x HV", *(h for t in shown for h in (f"T={t} theirs", "ours")))
        yield Grid(caption, headers, tuple(rows), tuple(shades))


def _percent(share: float | None) -> str:
    return MISSING if share is None else f"{100 * share:.1f}"
