"""What a report says of a workload: the time that the choices save in a step, for each contract and
number of heads.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gdntune.report.document import Bullets, Grid, Section, Text
from gdntune.report.words import contract_form, contract_rest, number
from gdntune.results.workload import Load, Saved, saved

if TYPE_CHECKING:
    import pandas as pd

    from gdntune.problem import Contract

DEFAULT = "the default rule"
HEADERS = ("contract", "against", "HV", "steps %", "us", "chosen us", "saved us", "saved %")


def sections(
    loads: Sequence[Load],
    contracts: Sequence["Contract"],
    chosen: "pd.DataFrame",
    rivals: "pd.DataFrame",
    label: Callable[[str], str],
    title: str,
) -> Iterator[Section]:
    """The section of a run with a workload.

    contracts: the run's, without T. chosen: the rows of its choices. rivals: those of the fastest
        entry of each peer at each cell.
    label: a peer's name, by its kernel.
    """
    rows = tuple(_rows(loads, contracts, chosen, rivals, label))
    if not rows:
        yield Section(title, (Text("No step of the workload is between two measured cells."),))
        return
    total = sum(load.weight for load in loads)
    tokens = sorted({load.tokens for load in loads})
    parts = [
        f"{sum(x.weight for x in loads if x.tokens == t) / total:.0%} of the steps have T={t}"
        for t in tokens
    ]
    yield Section(
        title,
        (
            Text(
                "Microseconds that the table's choices save in a step, for each layer: means over"
                " the workload's steps, with times between two measured cells on a straight line."
            ),
            Bullets(
                (
                    (
                        f"{'; '.join(parts)}; batch sizes from {min(x.batch for x in loads)} to"
                        f" {max(x.batch for x in loads)}"
                    ),
                    (
                        "steps %: the steps that lie between measured cells of both; the others are"
                        " left out"
                    ),
                )
            ),
            Grid("", HEADERS, rows, left=2),
        ),
    )


def _rows(
    loads: Sequence[Load],
    contracts: Sequence["Contract"],
    chosen: "pd.DataFrame",
    rivals: "pd.DataFrame",
    label: Callable[[str], str],
) -> Iterator[tuple[str, ...]]:
    for base in contracts:
        mine, theirs = _of(chosen, base), _of(rivals, base)
        # The whole model first, then its shards.
        heads = sorted({int(HV) for HV in mine["HV"]}, reverse=True)
        # Whom, their rows and times, ours beside them.
        against = [(DEFAULT, mine[mine["default_mean_us"].notna()], "default_mean_us", "mean_us")]
        against += [
            (label(kernel), theirs[theirs["kernel"] == kernel], "median_us", "median_us")
            for kernel in sorted(set(theirs["kernel"]))
        ]
        words = " ".join(filter(None, (contract_form(base), contract_rest(base))))
        for whom, other, their_column, column in against:
            for HV in heads:
                found = saved(loads, HV, _times(mine, column, HV), _times(other, their_column, HV))
                if found is not None:
                    yield _row(words, whom, HV, found)


def _of(frame: "pd.DataFrame", base: "Contract") -> "pd.DataFrame":
    """The rows of a contract at any T."""
    kept = frame
    for field in base.__struct_fields__:
        if field != "tokens":
            kept = kept[kept[field] == getattr(base, field)]
    return kept


def _times(frame: "pd.DataFrame", column: str, HV: int) -> dict[int, dict[int, float]]:
    """Times by tokens and work units; of several cells of equal work units that with HV heads, else
    with the most.
    """
    found: dict[int, dict[int, float]] = {}
    ordered = frame.sort_values(["HV", "H"])
    # The exact heads last, so that they replace the others.
    for rows in (ordered[ordered["HV"] != HV], ordered[ordered["HV"] == HV]):
        for tokens, units, us in zip(rows["tokens"], rows["work_units"], rows[column], strict=True):
            found.setdefault(int(tokens), {})[int(units)] = float(us)
    return found


def _row(words: str, whom: str, HV: int, found: Saved) -> tuple[str, ...]:
    return (
        words,
        whom,
        str(HV),
        f"{100 * found.covered:.0f}",
        number(found.other_us),
        number(found.chosen_us),
        f"{found.saved_us:.2f}",
        f"{100 * found.saved_us / found.other_us:.1f}",
    )
