"""Two journals, and two tables, side by side: as documents."""

from collections.abc import Sequence

from gdntune.errors import counted
from gdntune.report.document import Block, Bullets, Document, Grid, Section, Text
from gdntune.results.bootstrap import CONFIDENCE
from gdntune.results.compare import Compared, Comparison
from gdntune.results.merge import Difference, Differences
from gdntune.timing import CUPTI_STEP_US, TIE_SHARE


def comparison_document(found: Comparison, title: str) -> Document:
    """A comparison: the counts, the cells that are no TIE, and as detail the others."""
    counts = ", ".join(f"{n} {name}" for name, n in found.counts.items())
    notes = [
        f"{counted(len(found.cells), 'cell')}: {counts}",
        (
            f"{CONFIDENCE:.0%} bootstrap intervals of B's mean over A's; TIE: within the larger of"
            f" {TIE_SHARE:.0%} and {1e3 * CUPTI_STEP_US:.0f} ns; FASTER, SLOWER: all of the"
            " interval beyond that; UNCLEAR: neither"
        ),
        *found.notes,
    ]
    if found.only_a or found.only_b:
        notes.append(f"cells of A alone: {found.only_a}, of B alone: {found.only_b}")
    sections = [Section("Summary", (Text("B against A"), Bullets(tuple(notes))))]
    same = [c for c in found.cells if c.verdict == "TIE"]
    differing = [c for c in found.cells if c.verdict != "TIE"]
    if differing:
        sections.append(Section("Cells that are no TIE", (_grid(differing),)))
    if same:
        sections.append(Section("Cells that are a TIE", (_grid(same),), detail=True))
    return Document(title, tuple(sections))


def _grid(cells: Sequence[Compared]) -> Grid:
    def plain(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    rows = tuple(
        (
            c.contract,
            c.reason or (c.b if c.a == c.b else f"{c.a} -> {c.b}"),
            c.verdict,
            str(c.work_units),
            plain(c.a_us, 2),
            plain(c.b_us, 2),
            plain(c.ratio, 3),
            plain(c.low, 3),
            plain(c.high, 3),
        )
        for c in cells
    )
    headers = (
        "contract",
        "variant",
        "verdict",
        "work units",
        "A us",
        "B us",
        "ratio",
        "low",
        "high",
    )
    return Grid("", headers, rows, left=3)


def _whose(d: Difference) -> str:
    """The contract, and which of its calls choose otherwise where it is not all."""
    return f"{d.contract}, without dependent launch" if d.alone else d.contract


def diff_document(found: Differences, title: str) -> Document:
    """Where the choices of two tables differ, and what else does."""
    n = len(found.choices)
    contracts = len({d.contract for d in found.choices})
    text = (
        f"{counted(n, 'span')} of work units in {counted(contracts, 'contract')}: choices differ."
        if n
        else "The choices are equal."
    )
    blocks: list[Block] = [Text(text)]
    if found.about:
        blocks.append(Bullets(found.about))
    if n:
        rows = tuple(
            (
                # said once a contract
                _whose(d) if i == 0 or _whose(d) != _whose(found.choices[i - 1]) else "",
                d.a or "no rule",
                d.b or "no rule",
                f"{d.first} on" if d.last is None else f"{d.first} to {d.last}",
            )
            for i, d in enumerate(found.choices)
        )
        blocks.append(Grid("", ("contract", "A", "B", "work units"), rows, left=3))
    return Document(title, (Section("Summary", tuple(blocks)),))
