"""Two journals, cell by cell: FASTER, SLOWER, TIE or UNCLEAR, by bootstrap intervals of the ratio
of means. Needs no device.
"""

import difflib
import os
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gdntune.results import journal
from gdntune.results.bootstrap import LEAST_SAMPLES, RatioInterval, Verdict, ratio_of_means, verdict
from gdntune import strict
from gdntune.results.derive import Final, Timed, by_work_units, derive, timed_cells
from gdntune.errors import JournalError, UnknownName, UnsupportedProblem, listed
from gdntune.results.records import Run, noise_notes, policy_words
from gdntune.problem import Contract

CHOSEN = "chosen"
# So many variants at most does a refusal list.
LISTED = 20


class Compared(msgspec.Struct, frozen=True):
    """B against A at a cell. ratio: B's mean over A's, with its interval low to high; None where a
    side has too few samples.
    """

    contract: str
    work_units: int
    verdict: Verdict
    a: str
    b: str
    a_us: float | None
    b_us: float | None
    ratio: float | None
    low: float | None
    high: float | None
    reason: str = ""


class Comparison(msgspec.Struct, frozen=True):
    """All cells that both journals have. only_a, only_b: cells of one alone. counts: by verdict."""

    variant: str
    counts: dict[str, int]
    cells: tuple[Compared, ...]
    only_a: int
    only_b: int
    notes: tuple[str, ...]


def compare(
    a: str | os.PathLike[str], b: str | os.PathLike[str], variant: str = CHOSEN
) -> Comparison:
    """Journal `b` against journal `a`, each given by file or folder.

    variant: an id, timed in both; or `chosen`: at each cell what the table of either journal names
        there.
    The intervals are of the samples within a run: what two runs differ in as a whole (clocks,
    addresses) is not in them.
    Raises JournalError where the timing policies differ, UnsupportedProblem where no cell is in
    both, UnknownName for a variant that neither timed.
    """
    mine, theirs = _Side.read(a, "A"), _Side.read(b, "B")
    if mine.run.policy != theirs.run.policy:
        one, other = (policy_words(s.run.policy) for s in (mine, theirs))
        raise JournalError(
            f"{a} ({one}), {b} ({other}): times under two policies are not compared; time both"
            " under one"
        )
    # Refused before any bootstrap: a misspelt id would make every cell UNCLEAR.
    if variant != CHOSEN:
        timed = {
            name for side in (mine, theirs) for cell in side.cells.values() for name in cell.finals
        }
        if variant not in timed:
            names = sorted(timed)
            shown = (
                names
                if len(names) <= LISTED
                else difflib.get_close_matches(variant, names, n=LISTED, cutoff=0)
            )
            raise UnknownName(
                f"variant {variant!r}{strict.near(variant, names)}: expected {CHOSEN} or one"
                f" of the {len(names)} timed to the end:"
                f" {listed(shown)}{' and others less like it' if len(names) > LISTED else ''}"
            )
    common = sorted(mine.cells.keys() & theirs.cells.keys())
    if not common:
        raise UnsupportedProblem(
            f"{a} and {b} have no cell in common: a cell is a contract at some work units; sweep"
            " the same config twice"
        )
    cells = tuple(_compared(key, mine, theirs, variant) for key in common)
    counts = Counter(c.verdict for c in cells)
    return Comparison(
        variant=variant,
        counts={name: counts[name] for name in ("FASTER", "SLOWER", "TIE", "UNCLEAR")},
        cells=cells,
        only_a=len(mine.cells) - len(common),
        only_b=len(theirs.cells) - len(common),
        notes=(*_notes(mine.run, theirs.run), *mine.noise, *theirs.noise),
    )


class _Side(NamedTuple):
    """A journal's cells by contract and work units, and what its table chooses there."""

    run: Run
    cells: dict[tuple[Contract, int], Timed]
    chosen: dict[tuple[Contract, int], str]
    noise: list[str]

    @classmethod
    def read(cls, path: str | os.PathLike[str], name: str) -> "_Side":
        run, records = journal.read(path)
        cells = {
            (c, cell.work_units): cell
            for c, timed in by_work_units(timed_cells(records)).items()
            for cell in timed
        }
        # Derived anew, not read: a table beside the journal may be of another.
        rules = {rule.when: rule for rule in derive(records, run).rules}
        chosen = {(c, w): rules[c].at(w).variant for c, w in cells if c in rules}
        return cls(run, cells, chosen, noise_notes(records, f" of {name}"))


def _compared(key: tuple[Contract, int], mine: _Side, theirs: _Side, variant: str) -> Compared:
    contract, work_units = key
    names = [side.chosen.get(key, "") if variant == CHOSEN else variant for side in (mine, theirs)]
    finals = [
        side.cells[key].finals.get(name) for side, name in zip((mine, theirs), names, strict=True)
    ]
    means = [None if f is None else round(f.stats.mean_us, 3) for f in finals]
    reason = _too_few(finals)
    interval: RatioInterval | None = None
    said: Verdict = "UNCLEAR"
    first, second = finals
    if not reason and first is not None and second is not None:
        # The cell is the seed, so that the same comparison says the same every time.
        interval = ratio_of_means(first.samples, second.samples, f"{contract.key()}.{work_units}")
        said = verdict(first.stats.mean_us, interval)
    ratio, low, high = (None, None, None) if interval is None else (round(x, 5) for x in interval)
    return Compared(
        contract.key(),
        work_units,
        said,
        names[0],
        names[1],
        means[0],
        means[1],
        ratio,
        low,
        high,
        reason,
    )


def _too_few(finals: Sequence[Final | None]) -> str:
    for side, final in zip("AB", finals, strict=True):
        if final is None:
            return f"not timed to the end in {side}"
        if final.stats.count < LEAST_SAMPLES:
            return f"{final.stats.count} samples in {side}: fewer than {LEAST_SAMPLES}"
    return ""


def _notes(a: Run, b: Run) -> list[str]:
    """In what the two runs differ beside their samples."""
    notes = []
    if a.device.name != b.device.name:
        notes.append(f"A ran on {a.device.name}, B on {b.device.name}")
    if changed := sorted(
        k for k in a.kernels.keys() | b.kernels.keys() if a.kernels.get(k) != b.kernels.get(k)
    ):
        notes.append(f"the code of {', '.join(changed)} differs")
    versions = sorted(
        k for k in a.software.keys() | b.software.keys() if a.software.get(k) != b.software.get(k)
    )
    if versions:
        notes.append(
            "; ".join(
                f"{k}: {a.software.get(k, 'none')}, then {b.software.get(k, 'none')}"
                for k in versions
            )
        )
    return notes
