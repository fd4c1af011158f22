"""What fewer samples would have chosen: successive halving replayed on a journal, judged on samples
kept apart. Needs no device.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from gdntune.results.derive import beyond, derive, passes, timed_cells
from gdntune.errors import UnsupportedProblem
from gdntune.results.records import Record, Run, Trial
from gdntune.results.judge import (
    JudgedCell,
    Judgement,
    default_id,
    flashinfers,
    judge,
    judged,
    judgement,
)
from gdntune.problem import Problem

# Variants that successive halving ends with; they share what is left of the budget.
LEADERS = 2
# Samples of each before the first halving, where that is half of the budget at most: a variant's
# first one meets a GPU that is cold to it, 30% slower at some cells of an H100, and a winner that is
# halved away on it alone never comes back.
FIRST_LOOK = 3


class Halved(NamedTuple):
    """Successive halving over given samples. leaders: best first. used: the samples drawn of each
    variant, in order.
    """

    leaders: list[str]
    used: dict[str, list[float]]

    @property
    def spent(self) -> int:
        """Samples drawn."""
        return sum(map(len, self.used.values()))


def halving(samples: Mapping[str, Sequence[float]], budget: int, leaders: int = LEADERS) -> Halved:
    """Successive halving: draws each variant's samples in their order, as a sweep with that budget
    would have taken them.

    All variants get a first look; the better half by median goes on, with an equal share of what is
    left for each halving, one sample at least, and so on to the leaders, who share the rest. A
    variant gives no more than it has. One sample of each is always drawn.
    """
    names = list(samples)
    first = FIRST_LOOK if 2 * FIRST_LOOK * len(names) <= budget else 1
    used = {name: list(samples[name][:first]) for name in names}
    spent = sum(map(len, used.values()))
    halvings = math.ceil(math.log2(max(1.0, len(names) / leaders)))
    for left in range(max(halvings, 1), 0, -1):
        names = sorted(names, key=lambda name: _median(used[name]))[
            : max(leaders, math.ceil(len(names) / 2))
        ]
        # To halve twice on the same single sample keeps whom an outlier favours: 10% of regret at
        # some cells of an H100.
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


class Behind(msgspec.Struct, frozen=True):
    """How one choice at each cell stands to another. beyond_tie: cells where it is slower by more
    than the larger of 1% and 32 ns.
    """

    cells: int
    mean: float
    max: float
    beyond_tie: int


class Cost(msgspec.Struct, frozen=True):
    """What fewer samples would have chosen. `all_samples`: the same judgement of all that could
    have been drawn.

    cells: each cell's winner of the halving. table: the table derived from the halving's samples.
        Judged on samples kept apart.
    behind: how much slower each cell's winner is than that of all samples, on the same samples:
        negative where it is faster.
    """

    share: float
    samples: int
    drawn: int
    cells: Judgement
    table: Judgement
    all_samples_cells: Judgement
    all_samples_table: Judgement
    behind: Behind


def cost(records: Sequence[Record], run: Run, share: float = 0.25) -> Cost:
    """Successive halving replayed on a journal with a share of each cell's decode samples, judged
    on samples apart.

    Of each leader's final samples the second half is kept apart to judge by, and the halving draws
    from the screen and the first half. Variants that the sweep did not bring to the end have their
    screen alone to draw.
    """
    if not 0 < share <= 1:
        raise UnsupportedProblem(
            f"a share of {share} of the samples: expected a number above 0, at most 1"
        )
    # Apart by halves of the final samples: judged on what it drew, every choice looks better than
    # it is.
    early = _with_finals(records, lambda samples: samples[: len(samples) // 2])
    late = _with_finals(records, lambda samples: samples[len(samples) // 2 :])
    # The budget is a share of what the sweep spent on the cell, screens included.
    budgets = {p: sum(map(len, found.values())) for p, found in _drawable(records).items()}
    samples = sum(budgets.values())
    halved = {p: halving(found, int(share * budgets[p])) for p, found in _drawable(early).items()}
    kept_apart = {c.problem: c for c in timed_cells(late)}
    whole = {c.problem: c.best for c in timed_cells(early)}

    def by_cell(choices: Mapping[Problem, str], about: str) -> Judgement:
        found = [
            JudgedCell(
                contract=p.contract.key(),
                work_units=p.work_units,
                best=cell.best,
                best_us=round(cell.best_us, 3),
                table=judged(cell, choices.get(p)),
                default=judged(cell, default_id(p.contract, p.work_units, run.device)),
                flashinfer=judged(cell, flashinfers(cell, run.device)),
            )
            for p, cell in sorted(kept_apart.items())
        ]
        return judgement(about, found)

    thin = derive(_with_halved(early, halved), run)
    drawn = sum(h.spent for h in halved.values())
    some = f"{drawn / samples if samples else 0:.1%} of the samples, by successive halving"
    winners = by_cell(
        {p: h.leaders[0] for p, h in halved.items()}, f"each cell's winner from {some}"
    )
    of_all = by_cell(whole, "each cell's winner from all samples but those judged by")
    return Cost(
        share=share,
        samples=samples,
        drawn=drawn,
        cells=winners,
        table=judge(thin, late, run, about=f"the table from {some}"),
        all_samples_cells=of_all,
        all_samples_table=judge(
            derive(early, run), late, run, about="the table from all samples but those judged by"
        ),
        behind=_behind(winners, of_all),
    )


def _drawable(records: Sequence[Record]) -> dict[Problem, dict[str, list[float]]]:
    """By cell, the samples of each decode variant in their order, screens first."""
    found: dict[Problem, dict[str, list[float]]] = {}
    for problem, trials in passes(records).items():
        for trial in trials:
            if trial.role == "decode" and trial.status == "ok":
                mine = found.setdefault(problem, {})
                mine.setdefault(trial.variant.id, []).extend(trial.samples_us)
    return found


def _behind(one: Judgement, other: Judgement) -> Behind:
    pairs = [
        (a.best_us, (1 + a.table.regret) / (1 + b.table.regret) - 1)
        for a, b in zip(one.cells, other.cells, strict=True)
        if a.table.regret is not None and b.table.regret is not None
    ]
    lost = [behind for _, behind in pairs]
    return Behind(
        cells=len(pairs),
        mean=round(statistics.fmean(lost), 6) if lost else 0.0,
        max=round(max(lost, default=0.0), 6),
        beyond_tie=sum(beyond(best_us, behind) for best_us, behind in pairs),
    )


def _with_finals(
    records: Iterable[Record], part: Callable[[list[float]], list[float]]
) -> list[Record]:
    """The records with a part of each final trial's samples."""
    return [
        (
            msgspec.structs.replace(r, samples_us=part(r.samples_us))
            if isinstance(r, Trial) and r.stage == "final"
            else r
        )
        for r in records
    ]


def _with_halved(records: Iterable[Record], halved: Mapping[Problem, Halved]) -> list[Record]:
    """The records as a sweep by successive halving would have left them: what each variant drew,
    and finals of the leaders alone.
    """
    found: list[Record] = []
    for r in records:
        if (
            not isinstance(r, Trial)
            or r.role != "decode"
            or r.status != "ok"
            or r.problem not in halved
        ):
            found.append(r)
        elif r.stage == "screen":
            h = halved[r.problem]
            screened = msgspec.structs.replace(r, samples_us=h.used[r.variant.id])
            found.append(screened)
            if r.variant.id in h.leaders:
                # The leaders' draws stand as final samples, since `derive` looks at no others.
                found.append(msgspec.structs.replace(screened, stage="final"))
    return found
