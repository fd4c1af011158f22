"""What a table is worth: derived anew from journals, and judged on samples that it was not derived
from. Needs no device.
"""

import difflib
import fnmatch
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from gdntune.results import flashinfer_rule, journal
from gdntune import kernels
from gdntune.device.arch import Device
from gdntune.kernels.fingerprint import same_objects
from gdntune.results.derive import Timed, beyond, by_work_units, derive, marked, passes, timed_cells
from gdntune.errors import GdntuneError, UnsupportedProblem, counted
from gdntune.results.records import Record, Run, Trial, contract_of, noise_notes, policy_words
from gdntune.problem import Contract, Problem
from gdntune.results.table import TUNING, Table, ops_of, settings_of

Basis = Literal["final", "screen", "none"]


# -- replay


class Replayed(NamedTuple):
    """A table derived anew, its journal's header, and what a user should know."""

    table: Table
    run: Run
    notes: list[str]


def replay(
    path: str | os.PathLike[str],
    *,
    regret: float | None = None,
    without: Sequence[str] = (),
    keep_default: bool = False,
    without_contracts: Sequence[str] = (),
) -> Replayed:
    """The table that a journal gives, by file or folder: that which its sweep wrote.

    regret: instead of the header's; journals of older versions have none, and 1% counts.
    without: patterns of variants' ids that are taken as never timed.
    keep_default: a tie leaves the default rule's variant as installed, whatever the header says.
    without_contracts: patterns of contracts' names that get no rule: the nearest one's serves them.
    Raises UnsupportedProblem for a pattern that fits no variant or no contract, JournalError where
    no cell keeps a choice.
    """
    run, records = journal.read(path)
    notes = []
    if without_contracts:
        records, note = _of_other_contracts(records, without_contracts)
        notes.append(note)
    timed = {
        r.variant.id: r.variant for r in records if isinstance(r, Trial) and r.role == "decode"
    }
    for pattern in without:
        if not fnmatch.filter(timed, pattern):
            raise UnsupportedProblem(_fits_nothing(pattern, list(timed)))

    def admits(name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in without)

    if timed and not any(map(admits, timed)):
        raise UnsupportedProblem(
            f"without-variants {', '.join(without)}: these leave none of {len(timed)} variants to"
            " choose from; leave fewer out"
        )
    rule = (
        (lambda contract, work_units: default_id(contract, work_units, run.device) or "")
        if keep_default
        else None
    )
    table = derive(records, run, regret=regret, default=rule, admits=admits if without else None)
    if without:
        left_out = sum(not admits(name) for name in timed)
        lost = sum(map(len, by_work_units(timed_cells(records)).values())) - table.evidence.cells
        notes.append(f"{left_out} of {len(timed)} variants were left out")
        if lost:
            notes.append(
                f"{counted(lost, 'cell has', 'cells have')} no choice, since all leaders there were left"
                " out: the neighbours' holds there"
            )
    return Replayed(table, run, [*notes, *noise_notes(records)])


def _of_other_contracts(
    records: Sequence[Record], patterns: Sequence[str]
) -> tuple[list[Record], str]:
    """The records that are of no contract whose name fits a pattern, and what to say of it."""
    contracts = {c for r in records if (c := contract_of(r)) is not None}
    keys = {c: c.key() for c in contracts}
    for pattern in patterns:
        if not fnmatch.filter(keys.values(), pattern):
            some = ", ".join(sorted(keys.values())[:3])
            raise UnsupportedProblem(
                f"without-contracts {pattern!r} fits none of {counted(len(keys), 'contract')}: give"
                f" a pattern of whole names, such as '*.tokens=4*', of names such as {some}"
            )
    out = {c for c, key in keys.items() if any(fnmatch.fnmatchcase(key, p) for p in patterns)}
    if len(out) == len(keys):
        raise UnsupportedProblem(
            f"without-contracts {', '.join(patterns)}: these leave none of"
            f" {counted(len(keys), 'contract')}; leave fewer out"
        )
    kept = [r for r in records if contract_of(r) not in out]
    return kept, f"{len(out)} of {len(keys)} contracts were left out: the nearest rules serve them"


def _fits_nothing(pattern: str, names: Sequence[str]) -> str:
    """Why a pattern fits no id, and one that does."""
    # The usual slip: `tv8` for `*.tv8.*`.
    inside = len(fnmatch.filter(names, f"*{pattern}*"))
    if inside:
        do = f"a pattern fits whole ids: '*{pattern}*' fits {inside}"
    else:
        fitting: dict[str, str] = {}
        for name in sorted(names):
            kernel, *parts = name.split(".")
            fitting |= {kernel: f"'{kernel}*'", **{part: f"'*.{part}*'" for part in parts}}
        near = difflib.get_close_matches(pattern.strip("*."), fitting, n=3, cutoff=0.5)
        patterns = " or ".join(fitting[word] for word in near) or "one such as '*.tv8.*'"
        do = f"give {patterns}, of ids such as {', '.join(sorted(names)[:3])}"
    return f"without-variants {pattern!r} fits none of the {len(names)} variants timed: {do}"


# -- judge


class Choice(msgspec.Struct, frozen=True):
    """A choice at a cell and what it loses there. regret: None, with basis `none`, where the
    variant has no times there.
    """

    variant: str | None
    regret: float | None
    basis: Basis


NOT_TIMED = Choice(None, None, "none")


class JudgedCell(msgspec.Struct, frozen=True):
    """A cell of the journal: its best variant with its mean, and what the table, the default rule
    and FlashInfer's thresholds choose.
    """

    contract: str
    work_units: int
    best: str
    best_us: float
    table: Choice
    default: Choice
    flashinfer: Choice = NOT_TIMED


class Total(msgspec.Struct, frozen=True):
    """Choices at many cells. screened: judged by the screen alone. beyond_tie: regret above the
    larger of 1% and 32 ns.
    """

    cells: int
    judged: int
    screened: int
    beyond_tie: int
    regret_mean: float | None
    regret_max: float | None


class Judgement(msgspec.Struct, frozen=True):
    """A table, or what was derived, judged on those of a journal's cells that it has a rule for.
    `about` says which table, and on what.

    flashinfer: of our variants those that are nearest to what FlashInfer's thresholds name, see
        `flashinfer_rule`. without_rule: the journal's other cells, which the default rule serves.
    """

    about: str
    table: Total
    default: Total
    flashinfer: Total
    cells: tuple[JudgedCell, ...]
    notes: tuple[str, ...] = ()
    without_rule: int = 0

    def above(self, limit: float) -> list[JudgedCell]:
        """The cells whose regret is above the larger of `limit` and 32 ns, or that could not be
        judged.
        """
        return [
            c
            for c in self.cells
            if c.table.regret is None or beyond(c.best_us, c.table.regret, limit)
        ]


def judge(
    table: Table,
    records: Sequence[Record],
    run: Run,
    *,
    only: Collection[Problem] | None = None,
    about: str = "",
) -> Judgement:
    """The regret of a table, and of the default rule, at a journal's cells, or at those of `only`.

    At each cell the best is the least mean of the final samples there. A choice that was no leader
    is judged by the screen's medians against the best's, one that was not timed not at all, and
    both are counted. Contracts that the runtime would find no rule for are not judged: what serves
    them is the default rule, which is no word of the table's. Raises UnsupportedProblem where none
    is left, or the table is of another kind of device.
    """
    if table.device.kind != run.device.kind:
        raise UnsupportedProblem(
            f"{about or 'the table'} was measured on {table.device.name}, of kind"
            f" {table.device.kind}, the journal on {run.device.name}: expected a table of kind"
            f" {run.device.kind}"
        )
    # One cell a number of work units, as tables are keyed.
    cells = by_work_units(c for c in timed_cells(records) if only is None or c.problem in only)
    if not cells:
        raise UnsupportedProblem(
            "no cell to judge on: expected journals with final samples of checked variants"
        )
    found: list[JudgedCell] = []
    unserved: dict[Contract, int] = {}
    for contract, timed in sorted(cells.items()):
        at = _rule(table, contract, run.device)
        if at is None:
            unserved[contract] = len(timed)
            continue
        for cell in timed:
            default = default_id(contract, cell.work_units, run.device)
            found.append(
                JudgedCell(
                    contract=contract.key(),
                    work_units=cell.work_units,
                    best=cell.best,
                    best_us=round(cell.best_us, 3),
                    table=judged(cell, at(cell.work_units)),
                    default=judged(cell, default),
                    flashinfer=judged(cell, flashinfers(cell, run.device)),
                )
            )
    without = sum(unserved.values())
    if not found:
        raise UnsupportedProblem(
            f"{about or 'the table'} has no rule for any of the journal's {without} cells"
            f" ({_such_as(unserved)}): the default rule serves them, and there is nothing to judge;"
            f" expected a journal of its own contracts ({_such_as(r.when for r in table.rules)})"
        )
    notes = [*_notes(table, run, cells), *noise_notes(records)]
    if without:
        notes.append(
            f"the table has no rule for {without} of the journal's {without + len(found)} cells"
            f" ({_such_as(unserved)}): the default rule serves them, and they are not judged here"
        )
    return msgspec.structs.replace(judgement(about, found, notes), without_rule=without)


def _such_as(contracts: Iterable[Contract]) -> str:
    """How many contracts, and the first of them."""
    keys = [c.key() for c in contracts]
    return keys[0] if len(keys) == 1 else f"{len(keys)} contracts, such as {keys[0]}"


def held_out(records: Sequence[Record], run: Run) -> Judgement:
    """A journal's own table, judged at the cells that its sweep held out; UnsupportedProblem where
    it has none.
    """
    aside = set(marked(records))
    if not aside:
        raise UnsupportedProblem(
            f"{run.config}, {run.started}: this sweep held no cells out to judge its table by"
            " (search.held_out of its config). Judge another run's table on it (gdntune judge"
            " TABLE JOURNAL), or derive tables from a part of it: --hold-out every-second, or"
            " --share 0.25"
        )
    return judge(
        derive(records, run),
        records,
        run,
        only=aside,
        about="the table at the sweep's held-out cells",
    )


def judgement(about: str, found: Sequence[JudgedCell], notes: Sequence[str] = ()) -> Judgement:
    """Judged cells with their totals."""
    return Judgement(
        about,
        total(found, "table"),
        total(found, "default"),
        total(found, "flashinfer"),
        tuple(found),
        tuple(notes),
    )


def total(cells: Sequence[JudgedCell], whose: Literal["table", "default", "flashinfer"]) -> Total:
    """Mean and largest regret of one rule's choices, at the cells where it has one."""
    pairs: list[tuple[float, Choice]] = [(cell.best_us, getattr(cell, whose)) for cell in cells]
    if whose == "flashinfer":
        pairs = [(best_us, c) for best_us, c in pairs if c.variant is not None]
    losses = [(best_us, c.regret) for best_us, c in pairs if c.regret is not None]
    return Total(
        cells=len(pairs),
        judged=len(losses),
        screened=sum(c.basis == "screen" for _, c in pairs),
        beyond_tie=sum(beyond(*loss) for loss in losses),
        regret_mean=round(statistics.fmean(r for _, r in losses), 6) if losses else None,
        regret_max=round(max(r for _, r in losses), 6) if losses else None,
    )


def flashinfers(cell: Timed, device: Device) -> str | None:
    """Of the variants that were timed at a cell the one that FlashInfer's thresholds come nearest
    to.
    """
    return flashinfer_rule.nearest(
        cell.problem.contract, cell.work_units, device.sm_count, cell.variants()
    )


def judged(cell: Timed, name: str | None) -> Choice:
    """A choice at a cell with what it loses there."""
    found = cell.judged(name) if name is not None else None
    return (
        Choice(name, None, "none") if found is None else Choice(name, round(found[0], 6), found[1])
    )


def _rule(table: Table, contract: Contract, device: Device) -> Callable[[int], str] | None:
    """What a table names at some work units, by the nearest rule whose variants can all serve the
    contract, as at run time.

    None where there is no such rule. The contract's own counts whatever is installed: it says what
    was chosen for these samples.
    """
    for rule in table.ranked(contract):
        own = all(getattr(rule.when, name) == getattr(contract, name) for name in TUNING)
        if own or all(_serves(table, i.variant, contract, device) for i in rule.intervals):
            return lambda work_units, rule=rule: rule.at(work_units).variant  # type: ignore[misc]
    return None


def _serves(table: Table, name: str, contract: Contract, device: Device) -> bool:
    variant = table.variant(name)
    try:
        return kernels.get(variant.kernel).device == device.kind and not kernels.refuse(
            contract, variant
        )
    except LookupError:
        return False


def default_id(contract: Contract, work_units: int, device: Device) -> str | None:
    """The default rule's choice as it is installed; None where it has none."""
    try:
        return kernels.default(contract, work_units, device).id
    except GdntuneError:
        return None


def _notes(table: Table, run: Run, contracts: Iterable[Contract]) -> list[str]:
    """In what table and journal differ, so that a regret is read rightly."""
    notes = []
    if table.device.name != run.device.name:
        notes.append(f"the table is of {table.device.name}, the samples of {run.device.name}")
    used = [table.policy_of(rule) for c in contracts for rule in table.ranked(c)[:1]]
    if other := next((policy for policy in used if policy != run.policy), None):
        policies = map(policy_words, (other, run.policy))
        notes.append("the table was made under {}, the samples under {}".format(*policies))
    if changed := sorted(
        name
        for name, was in table.kernels.items()
        if (now := run.kernels.get(name)) != was
        and not same_objects(name, was, now, ops_of(table), settings_of(table, name))
    ):
        notes.append(f"the code of {', '.join(changed)} is not the same for table and samples")
    return notes


# -- held-out cells


def hold_out_every_second(records: Sequence[Record], run: Run) -> Judgement:
    """Each cell judged by a table that was derived without it.

    Of a contract's cells, by work units, every second one is left out, a table is derived from the
    others, and judged on those left out; then the same with the other half. The first and the last
    cell always stay, so that nothing is judged beyond what was tuned. The tables have half the
    cells that the sweep's has, so they lose more in between than the sweep's own does.
    """
    aside = set(marked(records))
    cells = by_work_units(c for c in timed_cells(records) if c.problem not in aside)
    found: list[JudgedCell] = []
    for parity in (1, 0):
        held = {
            (contract, cell.work_units)
            for contract, timed in cells.items()
            for i, cell in enumerate(timed)
            if 0 < i < len(timed) - 1 and i % 2 == parity
        }
        problems = {
            p for p in passes(records) if p not in aside and (p.contract, p.work_units) in held
        }
        if problems:
            table = derive(records, run, held_out=problems)
            found += judge(table, records, run, only=problems).cells
    if not found:
        raise UnsupportedProblem(
            "no contract has three cells or more: every second one cannot be held out"
        )
    # Two tables judged alternate cells; here they are in one order again.
    found.sort(key=lambda c: (c.contract, c.work_units))
    about = "tables derived from every second work unit, judged on those between"
    return judgement(about, found, noise_notes(records))
