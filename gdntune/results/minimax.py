"""One table of several cards' journals: at each cell the choice that loses least on the card where it
loses most. Needs no device.

Cards of one model differ: of five variants that tie within 0.05% on one H100, another took up to
4.5% longer for some (T=1, fp32 state, B=256).
"""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from gdntune.errors import JournalError, counted, listed
from gdntune.kernels.spec import Variant
from gdntune.problem import Contract
from gdntune.results import journal
from gdntune.results.derive import (
    Chosen,
    Timed,
    by_work_units,
    choose,
    derive,
    evidence_of,
    intervals,
    kept_default,
    marked,
    noted_defaults,
    ranks,
    rule_of,
    timed_again,
    timed_cells,
    without_dependent_launch,
)
from gdntune.results.records import Record, Run
from gdntune.results.judge import Replayed
from gdntune.results.merge import joined_origins
from gdntune.results.table import Evidence, Rule, Table, TableVariant
from gdntune.timing import CUPTI_STEP_US, TIE_SHARE

Basis = Literal["final", "screen"]


class Card(NamedTuple):
    """One journal's usable cells and its default rule's choices."""

    run: Run
    records: list[Record]
    cells: Mapping[Contract, list[Timed]]


class Several(NamedTuple):
    """One cell as each card timed it that did; cards: their numbers."""

    cells: tuple[Timed, ...]
    cards: tuple[int, ...]

    @property
    def work_units(self) -> int:
        return self.cells[0].work_units

    def judged(self, name: str) -> tuple[float, Basis] | None:
        """What a variant loses on the card where it loses most; None where one has no times of it."""
        found = [cell.judged(name) for cell in self.cells]
        known = [lost for lost in found if lost is not None]
        return max(known) if len(known) == len(found) else None

    def worst(self, name: str) -> int:
        """The position of the card where a variant with final samples on one loses most."""
        return max(
            (i for i, cell in enumerate(self.cells) if name in cell.finals),
            key=lambda i: self.cells[i].regret(name),
        )

    def acceptable(self, regret: float) -> dict[str, float]:
        """The worst regret of each variant that is as good as the least such regret, see
        `derive.derive`; final samples on one card at least.
        """
        names = dict.fromkeys(name for cell in self.cells for name in cell.finals)
        losses = {name: lost[0] for name in names if (lost := self.judged(name)) is not None}
        if not losses:
            return {}
        step = CUPTI_STEP_US * min(1.0, regret / TIE_SHARE) / max(c.best_us for c in self.cells)
        limit = min(losses.values()) + max(regret, step) + 1e-6
        return {name: loss for name, loss in losses.items() if loss <= limit}


def minimax(paths: Sequence[str | os.PathLike[str]], regret: float | None = None) -> Replayed:
    """The table of several journals of one model of device: at each cell, of the variants that all
    cards that timed it know, those whose worst regret is within `regret` of the least; of these the
    fewest intervals and variants, as `derive.derive` has it.

    regret: by default the first header's, else 1%. The evidence of a choice is that of the card
    where it loses most. JournalError where the journals differ in device, policy or kernels' code,
    or no cell has a choice.
    """
    cards = [_card(path) for path in paths]
    first = cards[0].run
    _refuse_others(paths, cards)
    if regret is None:
        regret = TIE_SHARE if first.regret is msgspec.UNSET else first.regret
    # The header of one that has no choice for such calls says that nothing was timed for it.
    apart = all(card.run.alone is True for card in cards)
    shown, shown_alone = _Shown(cards), _Shown(cards, alone=True)

    def chosen(cells: Sequence[Several], shown: _Shown) -> Chosen:
        rank = ranks(one for cell in cells for one in cell.cells)
        kept = [_kept(cards, cell) for cell in cells]
        choice = choose([cell.acceptable(regret) for cell in cells], rank, kept)
        found = intervals(cells, choice, first.device, regret, shown)
        named = zip(cells, choice, strict=True)
        return Chosen(
            found, {name: cell.cells[cell.worst(name)].finals[name].variant for cell, name in named}
        )

    rules: list[Rule] = []
    variants: dict[str, Variant] = {}
    single = lost = 0
    for contract in sorted({c for card in cards for c in card.cells}):
        every = _joined(cards, contract)
        cells = [cell for cell in every if cell.acceptable(regret)]
        lost += len(every) - len(cells)
        single += sum(len(cell.cells) == 1 for cell in cells)
        if not cells:
            continue
        found = chosen(cells, shown)
        alone = None
        if apart and found.uses_dependent_launch:
            others = [cell for cell in _alone(every) if cell.acceptable(regret)]
            alone = chosen(others, shown_alone) if others else None
        rules.append(rule_of(contract, found, alone))
        variants |= found.variants | (alone.variants if alone else {})
    if not rules:
        raise JournalError(
            f"no cell of {listed(map(str, paths))} has a variant that all cards timed to the end;"
            " sweep the same config on each"
        )
    origin = joined_origins(
        [derive(c.records, c.run, regret=regret).evidence for c in cards], rules
    )
    named = sorted({v.kernel for v in variants.values()})
    table = Table(
        schema="gdntune.table/1",
        device=first.device,
        software=first.software,
        kernels={name: first.kernels.get(name, "") for name in named},
        policy=first.policy,
        evidence=origin,
        variants={name: TableVariant(v.kernel, v.knobs) for name, v in sorted(variants.items())},
        rules=tuple(rules),
    )
    notes = [f"{len(paths)} journals; each choice loses least on the card where it loses most"]
    if single:
        notes.append(f"{counted(single, 'cell was', 'cells were')} timed on one card alone")
    if lost:
        without = counted(lost, "cell has", "cells have")
        notes.append(f"{without} no variant that was timed on every card of the cell")
    return Replayed(table, first, notes)


def _card(path: str | os.PathLike[str]) -> Card:
    run, records = journal.read(path)
    aside = set(marked(records))
    own = (cell for cell in timed_cells(records) if cell.problem not in aside)
    return Card(run, records, by_work_units(own))


def _refuse_others(paths: Sequence[str | os.PathLike[str]], cards: Sequence[Card]) -> None:
    """JournalError where a journal is not of the first one's device, policy and kernels."""
    one = cards[0].run
    for path, card in zip(paths[1:], cards[1:], strict=True):
        other = card.run
        faults = []
        if (one.device.name, one.device.arch) != (other.device.name, other.device.arch):
            faults.append(f"is of {other.device.name}, the first of {one.device.name}")
        if one.policy != other.policy:
            faults.append("was timed under another policy than the first")
        both = one.kernels.keys() & other.kernels.keys()
        differ = sorted(name for name in both if one.kernels[name] != other.kernels[name])
        if differ:
            faults.append(f"has other code of {listed(differ)} than the first")
        if faults:
            raise JournalError(
                f"{path}: {'; '.join(faults)}: expected journals of one model of device, one policy"
                " and the same kernels; sweep again, so that all are measured alike"
            )


def _joined(cards: Sequence[Card], contract: Contract) -> list[Several]:
    """A contract's cells by rising work units, each with the cards that timed it."""
    found: dict[int, list[tuple[int, Timed]]] = {}
    for n, card in enumerate(cards):
        for cell in card.cells.get(contract, ()):
            found.setdefault(cell.work_units, []).append((n, cell))
    return [
        Several(tuple(cell for _, cell in its), tuple(n for n, _ in its))
        for _, its in sorted(found.items())
    ]


def _alone(every: Sequence[Several]) -> list[Several]:
    """The cells without the final samples of variants that use dependent launch."""
    found = []
    for cell in every:
        pairs = zip(cell.cells, cell.cards, strict=True)
        kept = [(one, n) for all_, n in pairs for one in without_dependent_launch([all_])]
        if kept:
            found.append(Several(tuple(one for one, _ in kept), tuple(n for _, n in kept)))
    return found


def _kept(cards: Sequence[Card], cell: Several) -> str | None:
    """The default rule's variant where no tuned choice beats it beyond a tie on any card."""
    names = set()
    for n, one in zip(cell.cards, cell.cells, strict=True):
        name = noted_defaults(cards[n].records)(one.problem.contract, one.work_units)
        names.add(kept_default(one, name))
    return names.pop() if len(names) == 1 else None


class _Shown:
    """The evidence of a choice: of the card where it loses most. alone: among the variants that do
    not use dependent launch.
    """

    def __init__(self, cards: Sequence[Card], alone: bool = False) -> None:
        self._cards = cards
        again = [timed_again(card.records) for card in cards]
        self._again = [
            {c.problem: c for c in without_dependent_launch(of.values())} if alone else of
            for of in again
        ]

    def __call__(self, cell: Several, name: str) -> Evidence:
        at = cell.worst(name)
        one, n = cell.cells[at], cell.cards[at]
        return evidence_of(one, name, self._cards[n].run, self._again[n].get(one.problem))
