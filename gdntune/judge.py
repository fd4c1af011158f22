"""What a table is worth: derived anew from journals, and judged on samples that it was not derived from. Needs no device."""

import fnmatch
import math
import os
import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from gdntune import journal, kernels
from gdntune.arch import Device
from gdntune.derive import Timed, by_work_units, derive, passes, timed_cells
from gdntune.errors import GdntuneError, UnsupportedProblem
from gdntune.journal import Record, Run, Trial
from gdntune.problem import Contract, Problem
from gdntune.render.document import Block, Bullets, Document, Grid, Section, Text
from gdntune.table import TUNING, Table
from gdntune.timing import CUPTI_STEP_US, TIE_SHARE

# Cells that a printed judgement shows, those with the largest regret.
WORST = 10
# Variants that successive halving ends with; they share what is left of the budget.
LEADERS = 2

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
    regret: float = TIE_SHARE,
    without: Sequence[str] = (),
    keep_default: bool = False,
) -> Replayed:
    """The table that a journal gives, by file or folder; with a sweep's own `regret` the table that it wrote.

    without: patterns of variants' ids that are taken as never timed. keep_default: a tie leaves the default rule's variant.
    UnsupportedProblem for a pattern that fits no variant, JournalError where no cell keeps a choice.
    """
    run, records = journal.read(path)
    timed = {r.variant.id: r.variant for r in records if isinstance(r, Trial) and r.role == "decode"}
    for pattern in without:
        if not fnmatch.filter(timed, pattern):
            some = ", ".join(sorted(timed)[:3])
            raise UnsupportedProblem(
                f"without-variants {pattern!r} fits none of {len(timed)} variants: accepted are patterns such as *.tv8.* "
                f"of ids such as {some}"
            )

    def admits(name: str) -> bool:
        return not any(fnmatch.fnmatchcase(name, pattern) for pattern in without)

    rule = (lambda contract, work_units: _default(contract, work_units, run.device) or "") if keep_default else None
    table = derive(records, run, regret=regret, default=rule, admits=admits if without else None)
    notes = []
    if without:
        left_out = sum(not admits(name) for name in timed)
        lost = sum(map(len, by_work_units(timed_cells(records)).values())) - table.evidence.cells
        notes.append(f"{left_out} of {len(timed)} variants were left out")
        if lost:
            notes.append(
                f"{lost} cells have no choice, since all their leaders were left out: their neighbours' holds there"
            )
    return Replayed(table, run, notes)


# -- judge


class Choice(msgspec.Struct, frozen=True):
    """A choice at a cell and what it loses there. regret: None, with basis `none`, where the variant has no times there."""

    variant: str | None
    regret: float | None
    basis: Basis


class JudgedCell(msgspec.Struct, frozen=True):
    """A cell of the journal: its best variant with its mean, the table's choice, and the default rule's."""

    contract: str
    work_units: int
    best: str
    best_us: float
    table: Choice
    default: Choice


class Total(msgspec.Struct, frozen=True):
    """Choices at many cells. screened: judged by the screen alone. beyond_tie: regret above the larger of 1% and 32 ns."""

    cells: int
    judged: int
    screened: int
    beyond_tie: int
    regret_mean: float | None
    regret_max: float | None


class Judgement(msgspec.Struct, frozen=True):
    """A table, or what was derived, judged on a journal's cells. `about` says which table, and on what."""

    about: str
    table: Total
    default: Total
    cells: tuple[JudgedCell, ...]
    notes: tuple[str, ...] = ()

    def above(self, limit: float) -> list[JudgedCell]:
        """The cells whose regret is above the larger of `limit` and 32 ns, or that could not be judged."""
        return [c for c in self.cells if c.table.regret is None or beyond(c.best_us, c.table.regret, limit)]


def beyond(best_us: float, regret: float, limit: float = TIE_SHARE) -> bool:
    """Whether a regret is more than the larger of a share and the clock's step."""
    return regret * best_us > max(limit * best_us, CUPTI_STEP_US) + 1e-6


def judge(
    table: Table, records: Sequence[Record], run: Run, *, only: Collection[Problem] | None = None, about: str = ""
) -> Judgement:
    """The regret of a table, and of the default rule, at a journal's cells, or at those of `only`.

    At each cell the best is the least mean of the final samples there. A choice that was no leader is judged by the screen's
    medians against the best's, one that was not timed not at all, and both are counted. Where no rule serves a contract the table's
    choice is the default rule's, as at run time.
    """
    cells = [c for c in timed_cells(records) if only is None or c.problem in only]
    found: list[JudgedCell] = []
    for contract, timed in sorted(by_work_units(cells).items()):
        at = _rule(table, contract, run.device)
        for cell in timed:
            default = _default(contract, cell.work_units, run.device)
            found.append(
                JudgedCell(
                    contract=contract.key(),
                    work_units=cell.work_units,
                    best=cell.best,
                    best_us=round(cell.best_us, 3),
                    table=_judged(cell, at(cell.work_units) or default),
                    default=_judged(cell, default),
                )
            )
    if not found:
        raise UnsupportedProblem("no cell to judge on: accepted are journals with final samples of checked variants")
    return Judgement(about, total(found, "table"), total(found, "default"), tuple(found), tuple(_notes(table, run)))


def total(cells: Sequence[JudgedCell], whose: Literal["table", "default"]) -> Total:
    """Mean and largest regret of the table's or the default rule's choices."""
    pairs = [(cell.best_us, getattr(cell, whose)) for cell in cells]
    losses = [(best_us, c.regret) for best_us, c in pairs if c.regret is not None]
    return Total(
        cells=len(pairs),
        judged=len(losses),
        screened=sum(c.basis == "screen" for _, c in pairs),
        beyond_tie=sum(beyond(*loss) for loss in losses),
        regret_mean=round(statistics.fmean(r for _, r in losses), 6) if losses else None,
        regret_max=round(max(r for _, r in losses), 6) if losses else None,
    )


def _judged(cell: Timed, name: str | None) -> Choice:
    found = cell.judged(name) if name is not None else None
    return Choice(name, None, "none") if found is None else Choice(name, round(found[0], 6), found[1])


def _rule(table: Table, contract: Contract, device: Device) -> Callable[[int], str | None]:
    """What a table names at some work units, by the nearest rule whose variants can all serve the contract, as at run time."""
    for rule in table.ranked(contract):
        own = all(getattr(rule.when, name) == getattr(contract, name) for name in TUNING)
        if own or all(_serves(table, i.variant, contract, device) for i in rule.intervals):
            return lambda work_units, rule=rule: rule.at(work_units).variant  # type: ignore[misc]
    return lambda _: None


def _serves(table: Table, name: str, contract: Contract, device: Device) -> bool:
    variant = table.variant(name)
    try:
        return kernels.get(variant.kernel).device == device.kind and not kernels.refuse(contract, variant)
    except LookupError:
        return False


def _default(contract: Contract, work_units: int, device: Device) -> str | None:
    try:
        return kernels.default(contract, work_units, device).id
    except GdntuneError:
        return None


def _notes(table: Table, run: Run) -> list[str]:
    """In what table and journal differ, so that a regret is read rightly."""
    notes = []
    if table.device.name != run.device.name:
        notes.append(f"the table is of {table.device.name}, the samples of {run.device.name}")
    if table.policy != run.policy:
        policies = (", ".join(f"{k} {v}" for k, v in sorted(p.items())) for p in (table.policy, run.policy))
        notes.append("the table was made under {}, the samples under {}".format(*policies))
    if changed := sorted(name for name, was in table.kernels.items() if run.kernels.get(name) != was):
        notes.append(f"the code of {', '.join(changed)} is not the same for table and samples")
    return notes


# -- held-out cells


def hold_out_every_second(records: Sequence[Record], run: Run) -> Judgement:
    """Each cell judged by a table that was derived without it.

    Of a contract's cells, by work units, every second one is left out, a table is derived from the others, and judged on those left
    out; then the same with the other half. The first and the last cell always stay, so that nothing is judged beyond what was tuned.
    The tables have half the cells that the sweep's has, so they lose more in between than the sweep's own does.
    """
    cells = by_work_units(timed_cells(records))
    found: list[JudgedCell] = []
    for parity in (1, 0):
        held = {
            (contract, cell.work_units)
            for contract, timed in cells.items()
            for i, cell in enumerate(timed)
            if 0 < i < len(timed) - 1 and i % 2 == parity
        }
        problems = {p for p in passes(records) if (p.contract, p.work_units) in held}
        if problems:
            table = derive(records, run, held_out=problems)
            found += judge(table, records, run, only=problems).cells
    if not found:
        raise UnsupportedProblem("no contract has three cells or more: every second one cannot be held out")
    found.sort(key=lambda c: (c.contract, c.work_units))
    about = "tables derived from every second work unit, judged on those between"
    return Judgement(about, total(found, "table"), total(found, "default"), tuple(found))


# -- cost


class Halved(NamedTuple):
    """Successive halving over given samples. leaders: best first. used: the samples drawn of each variant, in order."""

    leaders: list[str]
    used: dict[str, list[float]]

    @property
    def spent(self) -> int:
        """Samples drawn."""
        return sum(map(len, self.used.values()))


def halving(samples: Mapping[str, Sequence[float]], budget: int, leaders: int = LEADERS) -> Halved:
    """Successive halving: draws each variant's samples in their order, as a sweep with that budget would have taken them.

    All variants get a sample; the better half by median goes on, with an equal share of what is left for each halving, one sample
    at least, and so on to the leaders, who share the rest. A variant gives no more than it has. One sample of each is always drawn.
    """
    names = list(samples)
    used = {name: list(samples[name][:1]) for name in names}
    spent = sum(map(len, used.values()))
    halvings = math.ceil(math.log2(max(1.0, len(names) / leaders)))
    for left in range(max(halvings, 1), 0, -1):
        names = sorted(names, key=lambda name: _median(used[name]))[: max(leaders, math.ceil(len(names) / 2))]
        # To halve twice on the same single sample keeps whom an outlier favours: 10% of regret at some cells of an H100.
        each = max((budget - spent) // left // len(names), 1) if spent + len(names) <= budget else 0
        for name in names:
            more = samples[name][len(used[name]) : len(used[name]) + each]
            used[name] += more
            spent += len(more)
    return Halved(sorted(names, key=lambda name: _mean(used[name])), used)


def _median(samples: Sequence[float]) -> float:
    return statistics.median(samples) if samples else math.inf


def _mean(samples: Sequence[float]) -> float:
    return statistics.fmean(samples) if samples else math.inf


class Cost(msgspec.Struct, frozen=True):
    """What fewer samples would have chosen. `all_samples`: the same judgement of all that could have been drawn.

    cells: each cell's winner of the halving. table: the table derived from the halving's samples. Judged on samples kept apart.
    """

    share: float
    samples: int
    drawn: int
    cells: Judgement
    table: Judgement
    all_samples_cells: Judgement
    all_samples_table: Judgement


def cost(records: Sequence[Record], run: Run, share: float = 0.25) -> Cost:
    """Successive halving replayed on a journal with a share of each cell's decode samples, judged on samples apart.

    Of each leader's final samples the second half is kept apart to judge by, and the halving draws from the screen and the first
    half. Variants that the sweep did not bring to the end have their screen alone to draw.
    """
    if not 0 < share <= 1:
        raise UnsupportedProblem(f"a share of {share} of the samples: accepted are numbers above 0, to 1")
    early = _with_finals(records, lambda samples: samples[: len(samples) // 2])
    late = _with_finals(records, lambda samples: samples[len(samples) // 2 :])
    counted: dict[Problem, dict[str, list[float]]] = {}
    samples = 0
    for problem, trials in passes(early).items():
        for trial in trials:
            if trial.role == "decode" and trial.status == "ok":
                counted.setdefault(problem, {}).setdefault(trial.variant.id, []).extend(trial.samples_us)
    budgets: dict[Problem, int] = {}
    for problem, trials in passes(records).items():
        budgets[problem] = sum(len(t.samples_us) for t in trials if t.role == "decode" and t.status == "ok")
        samples += budgets[problem]
    halved = {p: halving(found, int(share * budgets[p])) for p, found in counted.items()}
    judged = {c.problem: c for c in timed_cells(late)}
    whole = {c.problem: c.best for c in timed_cells(early)}

    def by_cell(choices: Mapping[Problem, str], about: str) -> Judgement:
        found = [
            JudgedCell(
                contract=p.contract.key(),
                work_units=p.work_units,
                best=cell.best,
                best_us=round(cell.best_us, 3),
                table=_judged(cell, choices.get(p)),
                default=_judged(cell, _default(p.contract, p.work_units, run.device)),
            )
            for p, cell in sorted(judged.items())
        ]
        return Judgement(about, total(found, "table"), total(found, "default"), tuple(found))

    thin = derive(_with_halved(early, halved), run)
    some = f"{share:.0%} of the samples, by successive halving"
    return Cost(
        share=share,
        samples=samples,
        drawn=sum(h.spent for h in halved.values()),
        cells=by_cell({p: h.leaders[0] for p, h in halved.items()}, f"each cell's winner from {some}"),
        table=judge(thin, late, run, about=f"the table from {some}"),
        all_samples_cells=by_cell(whole, "each cell's winner from all samples but those judged by"),
        all_samples_table=judge(derive(early, run), late, run, about="the table from all samples but those judged by"),
    )


def _with_finals(records: Iterable[Record], part: Callable[[list[float]], list[float]]) -> list[Record]:
    """The records with a part of each final trial's samples."""
    return [
        msgspec.structs.replace(r, samples_us=part(r.samples_us)) if isinstance(r, Trial) and r.stage == "final" else r
        for r in records
    ]


def _with_halved(records: Iterable[Record], halved: Mapping[Problem, Halved]) -> list[Record]:
    """The records as a sweep by successive halving would have left them: what each variant drew, and finals of the leaders alone."""
    found: list[Record] = []
    for r in records:
        if not isinstance(r, Trial) or r.role != "decode" or r.status != "ok" or r.problem not in halved:
            found.append(r)
        elif r.stage == "screen":
            h = halved[r.problem]
            screened = msgspec.structs.replace(r, samples_us=h.used[r.variant.id])
            found.append(screened)
            if r.variant.id in h.leaders:
                found.append(msgspec.structs.replace(screened, stage="final"))
    return found


# -- what is printed


def replay_words(found: Replayed) -> str:
    """A replayed table in a line."""
    e = found.table.evidence
    return (
        f"{e.config}, {e.started}: {len(found.table.rules)} rules, "
        f"{sum(len(r.intervals) for r in found.table.rules)} intervals, {len(found.table.variants)} variants; "
        f"regret {e.regret_mean:.2%} on average, {e.regret_max:.2%} at most at {e.cells} cells"
    )


def judgement_document(found: Judgement, source: str) -> Document:
    """A judgement: the totals, a row a contract, the worst cells, and as detail all of them."""
    contracts: dict[str, list[JudgedCell]] = {}
    for cell in found.cells:
        contracts.setdefault(cell.contract, []).append(cell)
    rows = [(name, *_total_row(cells)) for name, cells in contracts.items()]
    rows.append(("all", *_total_row(found.cells)))
    worst = sorted(found.cells, key=lambda c: -(c.table.regret if c.table.regret is not None else math.inf))
    blocks: list[Block] = [
        Text(f"Regret of {found.about} and of the default rule, in % of the best mean at each cell."),
        Bullets((*_caveats(found), *found.notes)),
        Grid("", ("contract", "cells", "mean", "max", "beyond tie", "default: mean", "max", "beyond tie"), tuple(rows)),
    ]
    return Document(
        source,
        (
            Section("Summary", tuple(blocks)),
            Section(f"The {min(WORST, len(worst))} largest", (_cells_grid(worst[:WORST]),)),
            Section("All cells", (_cells_grid(found.cells),), detail=True),
        ),
    )


def cost_document(found: Cost, source: str) -> Document:
    """What fewer samples would have chosen, beside what all of them choose."""
    rows = tuple(
        (j.about, str(j.table.cells), str(j.table.screened), *_losses(j.table))
        for j in (found.cells, found.all_samples_cells, found.table, found.all_samples_table)
    )
    text = (
        f"Successive halving would have drawn {found.drawn} of {found.samples} decode samples "
        f"({found.drawn / found.samples:.1%}). Regret in %, on the second half of the final samples, which none of these saw."
    )
    grid = Grid("", ("choices", "cells", "by screen", "mean", "max", "beyond tie"), rows)
    return Document(source, (Section("Summary", (Text(text), grid)),))


def _caveats(found: Judgement) -> list[str]:
    said = ["beyond tie: cells whose regret is above the larger of 1% and 32 ns"]
    for whose, t in (("the table's choice", found.table), ("the default rule's", found.default)):
        if t.screened:
            said.append(f"{t.screened} cells where {whose} was no leader are judged by the screen's few samples")
        if t.judged < t.cells:
            said.append(f"{t.cells - t.judged} cells where {whose} was not timed are not judged")
    return said


def _total_row(cells: Sequence[JudgedCell]) -> tuple[str, ...]:
    return (str(len(cells)), *_losses(total(cells, "table")), *_losses(total(cells, "default")))


def _losses(t: Total) -> tuple[str, str, str]:
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
        )
        for c in cells
    )
    return Grid("", ("contract", "choice", "work units", "best us", "regret %", "by", "default %"), rows, left=2)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.2f}"
