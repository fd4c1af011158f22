"""What a report says: from sweeps and their frame to sections. Plain words first, then the tables,
then how to get them again.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any

from gdntune.kernels.spec import FLOORS
from gdntune.problem import Contract
from gdntune.report import peers, workload
from gdntune.report.document import Block, Bullets, Document, Grid, Section, Text
from gdntune.report.reading import environment, knobs, reading, reproduce
from gdntune.report.rows import Letters, bases, of_contract, of_run
from gdntune.report.summary import failures, summary
from gdntune.report.tables import WITHOUT_LAUNCH, without_launch
from gdntune.report.words import (
    MISSING,
    bound_mark,
    contract_form,
    contract_rest,
    contract_short,
    contract_words,
    geometric_mean,
    marked,
    number,
    ranges,
    ratio,
    size_names,
)
from gdntune.results.baseline import Baseline
from gdntune.results.samples import LoadedRun

if TYPE_CHECKING:
    import pandas as pd


# From so many sections of contracts on they are numbered, a table leads to them, and the terminal
# shows that alone after a sweep.
MANY = 4
# Tables of B x T are split by T so that a line stays within document.WIDTH.
TOKENS_A_TABLE = 8


def document(
    sources: Sequence[LoadedRun],
    frame: "pd.DataFrame",
    letters: Letters,
    more: Sequence[Section] = (),
    baseline: Baseline | None = None,
    options: Sequence[str] = (),
) -> Document:
    """The whole report. letters: filled with the variants that its tables name. more: sections
    after the contracts'. options: what the command said beside the runs.
    """
    chosen = frame[frame["chosen"]]
    sections = [Section("Summary", tuple(summary(sources, frame, chosen, baseline)))]
    for source in sources:
        title = f"Peers of {source.name}" if len(sources) > 1 else "Peers"
        mine = of_run(frame, source)
        sections.append(Section(title, tuple(peers.blocks(mine, source.records))))
        if isinstance(source.run.workload, tuple):
            title = f"Workload of {source.name}" if len(sources) > 1 else "Workload"
            label = partial(peers.label, records=source.records)
            sections += workload.sections(
                source.run.workload,
                bases(source),
                mine[mine["chosen"]],
                peers.rivals(mine),
                label,
                title,
            )
    # Failures before the tables: they say what the tables lack.
    sections += failures(sources)
    subjects = [(source, base) for source in sources for base in bases(source)]
    numbered = len(subjects) >= MANY
    if numbered:
        sections.append(Section("Contracts", tuple(_contents(subjects, chosen))))
    for i, (source, base) in enumerate(subjects, 1):
        words = contract_words(base)
        title = (
            f"{f'{i}. ' if numbered else ''}{f'{source.name}: ' if len(sources) > 1 else ''}{words}"
        )
        part = of_contract(of_run(chosen, source), base)
        others = of_contract(peers.rivals(of_run(frame, source)), base)
        blocks = tuple(_contract_blocks(part, letters, others, baseline))
        sections.append(Section(title, blocks, detail=numbered, subject=(source.name, base.key())))
    for source in sources:
        title = f"{WITHOUT_LAUNCH} of {source.name}" if len(sources) > 1 else WITHOUT_LAUNCH
        if source.table:
            sections.append(without_launch(source.table, title, letters))
    sections += _differences(sources, chosen, letters)
    sections += more
    sections.append(Section("How to read the tables", tuple(reading(sources, chosen)), detail=True))
    sections.append(Section("What variants' ids say", tuple(knobs(sources, chosen)), detail=True))
    for source in sources:
        title = f"Environment of {source.name}" if len(sources) > 1 else "Environment"
        sections.append(Section(title, tuple(environment(source)), detail=True))
    sections.append(Section("How to reproduce", tuple(reproduce(sources, options)), detail=True))
    names = dict.fromkeys(s.name for s in sources)
    return Document(f"gdntune report: {', '.join(names)}", tuple(s for s in sections if s.blocks))


# -- contracts


def _contents(
    subjects: Sequence[tuple[LoadedRun, Contract]], chosen: "pd.DataFrame"
) -> Iterator[Block]:
    """A row a section of a contract, by its number: how many cells, how near to the floor."""
    rows, shades = [], []
    for i, (source, base) in enumerate(subjects, 1):
        mine = of_contract(of_run(chosen, source), base)
        over, share = mine["over_floor"].dropna(), mine["sol"].dropna()
        sol = float(share.median()) if len(share) else None
        rows.append(
            (
                str(i),
                contract_form(base),
                contract_rest(base),
                ranges(mine["tokens"]),
                str(len(mine)),
                ratio(geometric_mean(over)) if len(over) else MISSING,
                ratio(float(over.max())) if len(over) else MISSING,
                MISSING if sol is None else f"{100 * sol:.0f}",
            )
        )
        shades.append((*(None,) * 7, sol))
    headers = ("#", "contract", "and", "T", "cells", "floor", "worst", "SOL %")
    yield Text(
        "Time over the floor, in the geometric mean and at worst; share of the DRAM's peak in the"
        " median."
    )
    links = tuple((source.name, base.key()) for source, base in subjects)
    yield Grid("", headers, tuple(rows), tuple(shades), left=4, subjects=links)


def _contract_blocks(
    chosen: "pd.DataFrame", letters: Letters, others: "pd.DataFrame", baseline: Baseline | None
) -> Iterator[Block]:
    if not len(chosen):
        yield Text("No cell of this contract has a checked variant with final samples.")
        return
    cells = {
        (c["tokens"], c["work_units"], c["B"], c["HV"], c["H"]): c for _, c in chosen.iterrows()
    }
    yield from _grids(
        "Time, us (median of the chosen variant)", cells, lambda c: number(c["median_us"])
    )
    yield from _grids("Share of the DRAM's peak, %", cells, _share)
    if chosen["over_floor"].notna().any():
        # a small pool's floor is in order, also where an older journal's large ones are not
        which = ", or ".join(sorted(set(chosen["floor"]) - {MISSING}, key=FLOORS.index))
        yield from _grids(f"Time over the floor ({which})", cells, lambda c: ratio(c["over_floor"]))
    if chosen["speedup_over_default"].notna().any():
        yield from _grids(
            "Speed-up over the default rule", cells, lambda c: ratio(c["speedup_over_default"])
        )
    for kernel in peers.names(others):
        theirs = {_cell_of(r): r for _, r in others[others["kernel"] == kernel].iterrows()}

        def gain(c: Any, theirs: dict[tuple[Any, ...], Any] = theirs) -> str:
            found = theirs.get(_cell_of(c))
            return MISSING if found is None else ratio(found["chosen_speedup"])

        yield from _grids(f"Speed-up over {kernel.removeprefix(peers.PREFIX)}", cells, gain)
    if (
        baseline is not None
        and not baseline.shown
        and chosen["speedup_over_baseline"].notna().any()
    ):
        yield from _grids(
            f"Speed-up over {baseline.label}", cells, lambda c: ratio(c["speedup_over_baseline"])
        )
    yield from _grids("Which variant was chosen", cells, lambda c: letters[c["variant"]])
    counts = Counter(chosen["variant"])
    # Z before AA.
    legend = sorted(counts, key=lambda name: (len(letters[name]), letters[name]))
    yield Bullets(
        tuple(
            f"{letters[name]}: `{name}`, {counts[name]} cell{'s' * (counts[name] > 1)}"
            for name in legend
        )
    )


def _grids(
    caption: str, cells: dict[tuple[int, int, int, int, int], Any], show: Callable[[Any], str]
) -> Iterator[Grid]:
    """Tables of B x T: a row a B and heads, at most TOKENS_A_TABLE columns of T. cells: by T, work
    units, B, HV and H.
    """
    tokens = sorted({t for t, *_ in cells})
    rows = sorted({key[1:] for key in cells})
    names = size_names([(B, HV, H) for _, B, HV, H in rows])
    for first in range(0, len(tokens), TOKENS_A_TABLE):
        shown = tokens[first : first + TOKENS_A_TABLE]
        lines, shades = [], []
        for name, row in zip(names, rows, strict=True):
            found = [cells.get((t, *row)) for t in shown]
            lines.append(
                (name, str(row[0]), *(MISSING if c is None else marked(c, show(c)) for c in found))
            )
            shades.append(
                (
                    None,
                    None,
                    *(None if c is None or math.isnan(c["sol"]) else c["sol"] for c in found),
                )
            )
        yield Grid(
            caption,
            ("B x HV", "work units", *(f"T={t}" for t in shown)),
            tuple(lines),
            tuple(shades),
        )


def _share(cell: Any) -> str:
    if math.isnan(cell["sol"]):
        return MISSING
    return f"{100 * cell['sol']:.1f}{bound_mark(cell['bound'])}"


def _differences(
    sources: Sequence[LoadedRun], chosen: "pd.DataFrame", letters: Letters
) -> list[Section]:
    """Where two runs on one device, under different policies, choose differently."""
    sections = []
    for one, other in combinations(sources, 2):
        # Runs on two devices differ in everything; only a policy's own effect is of interest here.
        if one.run.device.name != other.run.device.name or one.run.policy == other.run.policy:
            continue
        left, right = (
            {_cell_of(c): c for _, c in of_run(chosen, s).iterrows()} for s in (one, other)
        )
        # In the first run's order, which is that of its tables.
        shared = [key for key in left if key in right]
        apart = [key for key in shared if left[key]["variant"] != right[key]["variant"]]
        if not shared:
            continue
        names = [f"{s.run.policy.get('timer')}/{s.run.policy.get('l2')}" for s in (one, other)]
        rows = tuple(
            (
                contract_short(left[key]),
                f"{left[key]['B']} x {left[key]['HV']}",
                letters[left[key]["variant"]],
                number(left[key]["median_us"]),
                letters[right[key]["variant"]],
                number(right[key]["median_us"]),
            )
            for key in apart
        )
        text = (
            f"{one.name} and {other.name} share {len(shared)} cells and choose differently at"
            f" {len(apart)}."
        )
        grid = Grid("", ("contract", "B x HV", names[0], "us", names[1], "us"), rows, left=3)
        sections.append(
            Section("Where the policies differ", (Text(text), *((grid,) if rows else ())))
        )
    return sections


# -- helpers


def _cell_of(row: Any) -> tuple[Any, ...]:
    return tuple(row[name] for name in (*Contract.__struct_fields__, "B", "H", "HV"))
