"""Judgements, the cost of fewer samples, and replayed tables, as documents and lines."""

import math
from collections.abc import Iterator, Sequence

from gdntune.errors import counted
from gdntune.report.document import Block, Bullets, Document, Grid, Section, Text
from gdntune.results.halving import Cost
from gdntune.results.judge import JudgedCell, Judgement, Replayed, Total, total

# Cells that a printed judgement shows, those with the largest regret.
WORST = 10


def replay_words(found: Replayed) -> str:
    """A replayed table in a line."""
    e = found.table.evidence
    return (
        f"{e.config}, {e.started}: {counted(len(found.table.rules), 'rule')},"
        f" {counted(sum(len(r.intervals) for r in found.table.rules), 'interval')},"
        f" {counted(len(found.table.variants), 'variant')}; regret {e.regret_mean:.2%} on average,"
        f" {e.regret_max:.2%} at most at {counted(e.cells, 'cell')}"
    )


def judgement_document(found: Judgement, source: str) -> Document:
    """A judgement: the totals, a row a contract, the worst cells, and as detail all of them."""
    contracts: dict[str, list[JudgedCell]] = {}
    for cell in found.cells:
        contracts.setdefault(cell.contract, []).append(cell)
    rows = [(name, *_total_row(cells)) for name, cells in contracts.items()]
    rows.append(("all", *_total_row(found.cells)))
    # What could not be judged comes first: nobody knows that it is good.
    worst = sorted(
        found.cells, key=lambda c: -(c.table.regret if c.table.regret is not None else math.inf)
    )
    blocks: list[Block] = [
        Text(f"Regret of {found.about}, in % of the best mean at each cell."),
        Grid("", ("choices", "cells", "mean", "max", "beyond tie"), tuple(_rules(found))),
        Bullets((*_caveats(found), *found.notes)),
        Grid(
            "",
            (
                "contract",
                "cells",
                "mean",
                "max",
                "beyond tie",
                "default: mean",
                "max",
                "beyond tie",
            ),
            tuple(rows),
        ),
    ]
    return Document(
        source,
        (
            Section("Summary", tuple(blocks)),
            Section(f"The {min(WORST, len(worst))} largest", (_cells_grid(worst[:WORST]),)),
            Section("All cells", (_cells_grid(found.cells),), detail=True),
        ),
    )


def _rules(found: Judgement) -> Iterator[tuple[str, ...]]:
    """A row for each rule that chose."""
    yield ("the table", str(found.table.judged), *losses(found.table))
    yield ("the default rule", str(found.default.judged), *losses(found.default))
    if found.flashinfer.cells:
        yield ("FlashInfer's thresholds", str(found.flashinfer.judged), *losses(found.flashinfer))


def _caveats(found: Judgement) -> list[str]:
    said = ["beyond tie: cells whose regret is above the larger of 1% and 32 ns"]
    if found.flashinfer.cells:
        said.append(
            "FlashInfer's thresholds: of the variants timed here the one nearest to the knobs that"
            " FlashInfer 0.7.2 would take"
        )
    for whose, t in (
        ("the table's choice", found.table),
        ("the default rule's", found.default),
        ("that of FlashInfer's thresholds", found.flashinfer),
    ):
        if t.screened:
            said.append(
                f"{counted(t.screened, 'cell')} where {whose} was no leader: judged by the screen's"
                " few samples"
            )
        if t.judged < t.cells:
            left = counted(t.cells - t.judged, "cell")
            said.append(f"{left} where {whose} was not timed: not judged")
    return said


def _total_row(cells: Sequence[JudgedCell]) -> tuple[str, ...]:
    return (str(len(cells)), *losses(total(cells, "table")), *losses(total(cells, "default")))


def losses(t: Total) -> tuple[str, str, str]:
    """Mean and largest regret in %, and how many are beyond a tie."""
    return (_percent(t.regret_mean), _percent(t.regret_max), str(t.beyond_tie))


def _cells_grid(cells: Sequence[JudgedCell]) -> Grid:
    rows = tuple(
        (
            c.contract,
            c.table.variant or "-",
            str(c.work_units),
            f"{c.best_us:.2f}",
            _percent(c.table.regret),
            c.table.basis,
            _percent(c.default.regret),
            _percent(c.flashinfer.regret),
        )
        for c in cells
    )
    headers = (
        "contract",
        "choice",
        "work units",
        "best us",
        "regret %",
        "by",
        "default %",
        "FlashInfer's %",
    )
    return Grid("", headers, rows, left=2)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"


def cost_document(found: Cost, source: str) -> Document:
    """What fewer samples would have chosen, beside what all of them choose."""
    rows = tuple(
        (j.about, str(j.table.cells), str(j.table.screened), *losses(j.table))
        for j in (found.cells, found.all_samples_cells, found.table, found.all_samples_table)
    )
    text = (
        f"Successive halving would have drawn {found.drawn} of {found.samples} decode samples"
        f" ({found.drawn / found.samples:.1%}). Regret in %, on the second half of the final"
        " samples, which none of these saw."
    )
    b = found.behind
    against = (
        f"Its winner's time is that of all samples' winner {100 * b.mean:+.2f}% in the mean of"
        f" {b.cells} cells, {100 * b.max:+.2f}% at most; it is slower by more than the larger of 1%"
        f" and 32 ns at {b.beyond_tie}."
    )
    grid = Grid("", ("choices", "cells", "by screen", "mean", "max", "beyond tie"), rows)
    return Document(source, (Section("Summary", (Text(text), grid, Text(against))),))
