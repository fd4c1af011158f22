"""From journals to a table: which variant for which work units. A pure function of the records, in
any order of the cells.
"""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar

import msgspec

from gdntune import sol
from gdntune.device.arch import Device
from gdntune.errors import JournalError, MeasurementError
from gdntune.results.journal import digest
from gdntune.results.records import Build, Cell, Check, Record, Run, Trial, noisy
from gdntune.kernels import dependent_launch as launch
from gdntune.kernels.spec import FLOORS, Variant, floor_name
from gdntune.problem import Contract, Problem
from gdntune.results.table import Evidence, Interval, Origin, Rule, Table, TableVariant
from gdntune.timing import CUPTI_STEP_US, TIE_SHARE, Stats, summary, tie

# States kept a cell in the search for the fewest variants. Real sweeps need tens; of more, only the
# best are followed.
_BEAM = 1000

# The id of the variant that the default rule names for a contract at some work units.
DefaultRule = Callable[[Contract, int], str]


def derive(
    records: Sequence[Record],
    run: Run,
    *,
    regret: float | None = None,
    held_out: Collection[Problem] = (),
    default: DefaultRule | None = None,
    admits: Callable[[str], bool] | None = None,
) -> Table:
    """The table of a sweep's records. With the header's own settings it is the sweep's.

    A variant may be chosen at a cell where its contract has a passed check and no failed one, it
    never crashed or hung at this contract, it has final samples at the cell, and their mean is
    within the larger of `regret` and the clock's step of the best such mean; the step is 32 ns at a
    regret of 1%, and less in proportion below it, since means resolve more. Of all such choices the
    one with the fewest intervals is taken, then the fewest variants, then the least regret, then
    the simplest variants (those that the cells' trials name first). Between two cells that differ
    lies the boundary of `last_unit`. Cells of `held_out`, and those that the journal marks as
    such, have no part in that; what the table loses there is in its evidence.

    regret: by default the header's, else 1%.
    default: the default rule, whose variant is replaced only beyond a tie: of choices with equally
        few intervals and variants the one is taken that leaves it at the fewest of the cells where
        its mean ties with the best. It comes after the intervals, since the rule has steps of its
        own, and a table that followed each of its ties would be cut at all of them. By default what
        the rule chose when the cells were timed, where the header says that this counts.
        A cell that names a choice made beforehand, a bench's, has that variant alone.
    The evidence is of the samples that were taken after the choice, where the journal has them.
    Where the header says so (`alone`), and a rule names a variant that uses dependent launch, calls
    without it get a choice of their own, made in the same way of the variants that do not use it.
    admits: by a variant's id; the others count as never timed, also where a cell's best is sought.
    Raises JournalError where no cell has such a variant, MeasurementError for a time that cannot be
    true.
    """
    if regret is None:
        regret = TIE_SHARE if run.regret is msgspec.UNSET else run.regret
    if default is None and run.keeps_default is True:
        default = noted_defaults(records)
    held_out = {*held_out, *marked(records)}
    timed = as_chosen(timed_cells(records, admits), records)
    judged = [c for c in timed if c.problem in held_out]
    by_contract = by_work_units(c for c in timed if c.problem not in held_out)
    if not by_contract:
        raise JournalError(
            f"no cell has a checked variant with final samples: {_failures_in_words(records)}; see"
            " their reasons in the journal"
        )

    again = timed_again(records, admits)

    def chosen(
        contract: Contract, cells: Sequence[Timed], again: Mapping[Problem, Timed]
    ) -> Chosen:
        # Within a contract: which variants are simple depends on what its kernel offers there.
        rank = ranks(cells)
        kept = [
            default and kept_default(cell, default(contract, cell.work_units)) for cell in cells
        ]
        choice = choose([_acceptable(cell, regret) for cell in cells], rank, kept)
        found = intervals(
            cells,
            choice,
            run.device,
            regret,
            lambda cell, name: evidence_of(cell, name, run, again.get(cell.problem)),
        )
        named = [cell.finals[name].variant for cell, name in zip(cells, choice, strict=True)]
        return Chosen(found, {v.id: v for v in named})

    again_alone = {c.problem: c for c in without_dependent_launch(again.values())}
    rules: list[Rule] = []
    variants: dict[str, Variant] = {}
    for contract, cells in sorted(by_contract.items()):
        found = chosen(contract, cells, again)
        alone = None
        if run.alone is True and found.uses_dependent_launch:
            if others := without_dependent_launch(cells):
                alone = chosen(contract, others, again_alone)
        rules.append(rule_of(contract, found, alone))
        variants |= found.variants | (alone.variants if alone else {})

    return Table(
        schema="gdntune.table/1",
        device=run.device,
        software=run.software,
        kernels={
            # A kernel that the header lacks gets an empty fingerprint, which no installed code has:
            # `stale` warns of it.
            name: run.kernels.get(name, "")
            for name in sorted({v.kernel for v in variants.values()})
        },
        policy=run.policy,
        evidence=_origin(records, run, rules, judged),
        variants={name: TableVariant(v.kernel, v.knobs) for name, v in sorted(variants.items())},
        rules=tuple(rules),
    )


class Chosen(NamedTuple):
    """What calls of a contract take, with the variants by id."""

    intervals: tuple[Interval, ...]
    variants: dict[str, Variant]

    @property
    def uses_dependent_launch(self) -> bool:
        """Whether any of the variants does."""
        return any(launch.uses(v.knobs) for v in self.variants.values())


def rule_of(contract: Contract, found: Chosen, alone: Chosen | None) -> Rule:
    """A contract's rule, with what calls without dependent launch take where that was chosen."""
    return Rule(contract, found.intervals, alone=alone.intervals if alone else msgspec.UNSET)


def without_dependent_launch(cells: Iterable["Timed"]) -> list["Timed"]:
    """The cells as if no variant that uses dependent launch had been brought to the end; those
    without another are left out.
    """
    found = []
    for cell in cells:
        finals = {n: f for n, f in cell.finals.items() if not launch.uses(f.variant.knobs)}
        if finals:
            found.append(cell._replace(finals=finals))
    return found


def marked(
    records: Iterable[Record], purpose: Literal["bisection", "held-out"] = "held-out"
) -> list[Problem]:
    """The problems that a journal's cells mark as timed for a purpose, each once."""
    return list(
        dict.fromkeys(r.problem for r in records if isinstance(r, Cell) and r.purpose == purpose)
    )


def noted_defaults(records: Iterable[Record]) -> DefaultRule:
    """What the default rule chose at a journal's cells when they were timed; an empty id where it
    chose none, or elsewhere.
    """
    found: dict[tuple[Contract, int], str] = {}
    for r in records:
        if isinstance(r, Cell) and isinstance(r.default_variant, str):
            found[r.problem.contract, r.problem.work_units] = r.default_variant
    return lambda contract, work_units: found.get((contract, work_units), "")


def beyond(best_us: float, regret: float, limit: float = TIE_SHARE) -> bool:
    """Whether a regret is more than the larger of a share and the clock's step."""
    return regret * best_us > max(limit * best_us, CUPTI_STEP_US) + 1e-6


def choose(
    cells: Sequence[Mapping[str, float]], rank: Mapping[str, int], kept: Sequence[str | None] = ()
) -> list[str]:
    """A variant for each cell, given the regret of those that are acceptable there, by the order
    that `derive` states.

    rank: distinct numbers, the simplest variant's the least. kept: for each cell the variant that a
        tie should not replace.
    The number of intervals is always the least; the rest is exact unless a cell leaves more than
    _BEAM states open.
    """
    names = {number: name for name, number in rank.items()}
    # What a variant chosen now may still save is only known by whether a later cell accepts it: the
    # others are forgotten.
    later: list[frozenset[str]] = [frozenset()] * len(cells)
    for i in range(len(cells) - 1, 0, -1):
        later[i - 1] = later[i] | frozenset(cells[i])
    # (variant here, variants used that may return) -> (intervals, variants, regret, ranks): each
    # addend hangs on the key alone.
    states: dict[tuple[str, frozenset[str]], _Cost] = {("", frozenset()): _Cost(0, 0, 0, 0, ())}
    for i, cell in enumerate(cells):
        here_kept = kept[i] if kept and kept[i] in cell else None
        following: dict[tuple[str, frozenset[str]], _Cost] = {}
        for (here, used), cost in states.items():
            for name, loss in cell.items():
                key = (name, (used | {name}) & later[i])
                new = _Cost(
                    cost.intervals + (name != here),
                    cost.variants + (name != here and name not in used),
                    cost.replaced + (here_kept is not None and name != here_kept),
                    # Whole numbers, so that equal sums are equal.
                    cost.regret + round(loss * 1e9),
                    (*cost.ranks, rank[name]),
                )
                if key not in following or new < following[key]:
                    following[key] = new
        # Any state can go on as another one does at the price of one more interval, so those
        # further behind cannot win.
        least = min(cost.intervals for cost in following.values())
        states = {}
        for name in cell:
            ends_here = [
                key
                for key, cost in following.items()
                if key[0] == name and cost.intervals <= least + 1
            ]
            # A share for each variant, so that the number of intervals stays exact whatever is left
            # out.
            # By cost and then by names, so that equal costs are cut off in the same way on every
            # machine.
            ends_here.sort(key=lambda key: (following[key], sorted(key[1])))
            states |= {key: following[key] for key in ends_here[: max(1, _BEAM // len(cell))]}
    return [names[number] for number in min(states.values()).ranks]


class _Cost(NamedTuple):
    intervals: int
    variants: int
    replaced: int
    regret: int
    ranks: tuple[int, ...]


class Final(NamedTuple):
    """A variant's final samples at a cell, in microseconds, and what they say."""

    variant: Variant
    stats: Stats
    samples: Sequence[float]


class Judges(Protocol):
    """A cell that says what a variant loses there, and what that rests on."""

    @property
    def work_units(self) -> int: ...

    def judged(self, name: str) -> tuple[float, Literal["final", "screen"]] | None: ...


At = TypeVar("At", bound=Judges)


class Timed(NamedTuple):
    """A cell's usable times, in microseconds; its variants passed their check.

    finals: of the leaders, which decide. screens: the first look's samples of all variants, a round
        each. order: the decode variants as the trials name them, the simplest first. known: those
        that are usable here, by id.
    """

    problem: Problem
    finals: dict[str, Final]
    screens: Mapping[str, Sequence[float]]
    floor: Stats | None
    order: tuple[str, ...]
    known: Mapping[str, Variant] = {}

    @property
    def work_units(self) -> int:
        return self.problem.work_units

    def variants(self) -> list[Variant]:
        """The variants with times here, the simplest first."""
        return [self.known[name] for name in self.order if name in self.known]

    @property
    def best_us(self) -> float:
        return min(final.stats.mean_us for final in self.finals.values())

    def regret(self, name: str) -> float:
        return self.finals[name].stats.mean_us / self.best_us - 1

    @property
    def best(self) -> str:
        """The variant with the least mean, of equal ones the first by id."""
        return min(self.finals, key=lambda name: (self.finals[name].stats.mean_us, name))

    def judged(self, name: str) -> tuple[float, Literal["final", "screen"]] | None:
        """A variant's regret and what it rests on; None where it has no times.

        `final`: means of the final samples. `screen`: it was no leader, so medians of the rounds
            that it shares with the best. Few samples, of a variant that lost by just these, so the
            regret is rather too large; but to leave it out would judge only choices that are nearly
            right.
        """
        if name in self.finals:
            return self.regret(name), "final"
        mine, best = self.screens.get(name, ()), self.screens.get(self.best, ())
        rounds = min(len(mine), len(best))
        if not rounds:
            return None
        least = statistics.median(best[:rounds])
        return (
            (max(0.0, statistics.median(mine[:rounds]) / least - 1), "screen")
            if least > 0
            else None
        )


def timed_cells(
    records: Iterable[Record], admits: Callable[[str], bool] | None = None
) -> list[Timed]:
    """The cells that have final samples of a variant that is right, in the journal's order; see
    `derive` for `admits`.
    """
    records = list(records)
    return _usable(records, passes(records), admits)


def timed_again(
    records: Iterable[Record], admits: Callable[[str], bool] | None = None
) -> dict[Problem, Timed]:
    """What was timed once the choices were made, on samples that had no part in them."""
    records = list(records)
    as_final = {
        problem: [msgspec.structs.replace(trial, stage="final") for trial in trials]
        for problem, trials in evidence_passes(records).items()
    }
    return {c.problem: c for c in _usable(records, as_final, admits)}


def _usable(
    records: Sequence[Record],
    trials: Mapping[Problem, list[Trial]],
    admits: Callable[[str], bool] | None,
) -> list[Timed]:
    checked = _checked(records)
    if admits is not None:
        checked = {
            contract: frozenset(filter(admits, names)) for contract, names in checked.items()
        }
    found = (_timed(p, its, checked.get(p.contract, frozenset())) for p, its in trials.items())
    return [cell for cell in found if cell.finals]


def as_chosen(timed: Iterable[Timed], records: Iterable[Record]) -> list[Timed]:
    """Cells that name a choice made beforehand with that variant's final samples alone; those that
    lack these are left out.
    """
    chosen = {
        r.problem: r.choice
        for r in records
        if isinstance(r, Cell) and r.chooses and r.choice is not msgspec.UNSET
    }
    found = []
    for cell in timed:
        name = chosen.get(cell.problem)
        finals = (
            cell.finals
            if name is None
            else {n: final for n, final in cell.finals.items() if n == name}
        )
        if finals:
            found.append(cell._replace(finals=finals))
    return found


def by_work_units(cells: Iterable[Timed]) -> dict[Contract, list[Timed]]:
    """Each contract's cells by rising work units, one for each: of several that with the most heads
    a request.
    """
    found: dict[Contract, dict[int, Timed]] = {}
    # Later ones replace earlier ones, so the most heads a request come last.
    for cell in sorted(cells, key=lambda c: (c.problem.HV, c.problem.H)):
        found.setdefault(cell.problem.contract, {})[cell.work_units] = cell
    return {contract: [best[w] for w in sorted(best)] for contract, best in found.items()}


def passes(records: Iterable[Record], failed: bool = False) -> dict[Problem, list[Trial]]:
    """The trials of each problem that count: of its last pass that a Cell closed as ok; all, where
    no Cell closed any.

    failed: where none was closed as ok, those of the last pass that failed, too.
    """
    return _passes((r for r in records if not _is_evidence(r)), failed)


def evidence_passes(records: Iterable[Record]) -> dict[Problem, list[Trial]]:
    """The same of what was timed once a choice was made."""
    return _passes((r for r in records if _is_evidence(r)), failed=False)


def _is_evidence(record: Record) -> bool:
    if isinstance(record, Trial):
        return record.stage == "evidence"
    return isinstance(record, Cell) and not record.chooses


def _passes(records: Iterable[Record], failed: bool) -> dict[Problem, list[Trial]]:
    is_open: dict[Problem, list[Trial]] = {}
    closed: dict[Problem, list[Trial]] = {}
    ok: set[Problem] = set()
    for record in records:
        if isinstance(record, Trial):
            # Trials without a Cell behind them are of a pass that a kill cut off, or of a journal
            # in the making.
            is_open.setdefault(record.problem, []).append(record)
        elif isinstance(record, Cell):
            trials = is_open.pop(record.problem, [])
            closed.setdefault(record.problem, [])
            # A failed pass does not void an earlier one that went well.
            if trials and (record.status == "ok" or (failed and record.problem not in ok)):
                closed[record.problem] = trials
            if record.status == "ok":
                ok.add(record.problem)
    return {**is_open, **closed}


def _checked(records: Iterable[Record]) -> dict[Contract, frozenset[str]]:
    """The variants of each contract that passed their checks, and that no trial of it crashed."""
    passed: dict[Contract, set[str]] = {}
    wrong: dict[Contract, set[str]] = {}
    for record in records:
        if isinstance(record, Check):
            (passed if record.status == "ok" else wrong).setdefault(record.contract, set()).add(
                record.variant
            )
        elif (
            isinstance(record, Trial)
            and record.status in ("crashed", "timeout")
            and record.role == "decode"
        ):
            # An illegal access at one size is a fault of the kernel, which its check did not meet;
            # none of its times count.
            wrong.setdefault(record.problem.contract, set()).add(record.variant.id)
    return {
        contract: frozenset(names - wrong.get(contract, set()))
        for contract, names in passed.items()
    }


def _timed(problem: Problem, trials: Iterable[Trial], checked: Collection[str]) -> Timed:
    last: dict[tuple[str, str, str], Trial] = {}
    order: dict[str, None] = {}
    for trial in trials:
        # A later attempt replaces an earlier one.
        last[trial.role, trial.stage, trial.variant.id] = trial
        if trial.role == "decode":
            order.setdefault(trial.variant.id)
    usable = {
        key: trial for key, trial in last.items() if trial.status == "ok" and trial.samples_us
    }
    finals = {
        name: Final(trial.variant, summary(trial.samples_us), trial.samples_us)
        for (role, stage, name), trial in usable.items()
        if (role, stage) == ("decode", "final") and name in checked
    }
    for name, final in finals.items():
        if not final.stats.mean_us > 0:
            raise MeasurementError(f"{problem.key()}, {name}: all samples are 0 us; time it again")
    screens = {
        name: trial.samples_us
        for (role, stage, name), trial in usable.items()
        if (role, stage) == ("decode", "screen") and name in checked
    }
    floor = _floor(usable)
    known = {
        name: t.variant
        for (role, _, name), t in usable.items()
        if role == "decode" and name in checked
    }
    return Timed(problem, finals, screens, floor, tuple(order), known)


def _floor(usable: Mapping[tuple[str, str, str], Trial]) -> Stats | None:
    """The fastest floor of the first name that has times, by its final samples where there are any:
    with one floor alone there was nothing to screen.
    """
    for name, wanted in itertools.product(FLOORS, ("final", "screen")):
        found = [
            summary(trial.samples_us)
            for (role, stage, _), trial in usable.items()
            if (role, stage) == ("floor", wanted) and floor_name(trial.variant) == name
        ]
        if found:
            return min(found, key=lambda s: s.median_us)
    return None


def ranks(cells: Iterable[Timed]) -> dict[str, int]:
    """A number for each variant by how early a cell's trials name it, so that the order of the
    cells does not matter.
    """
    early: dict[str, int] = {}
    for cell in cells:
        for position, name in enumerate(cell.order):
            # A variant that a later cell lacks, since it crashed, keeps its place.
            early[name] = min(position, early.get(name, position))
    return {name: i for i, name in enumerate(sorted(early, key=lambda name: (early[name], name)))}


def _acceptable(cell: Timed, regret: float) -> dict[str, float]:
    """The regret of each variant that is as good as the cell's best: `timing.tie` where regret is
    TIE_SHARE.

    Means of hundreds of samples resolve far less than the clock's step, so a smaller regret takes
    as much less of it.
    """
    best = cell.best_us
    limit = best + max(regret * best, CUPTI_STEP_US * min(1.0, regret / TIE_SHARE)) + 1e-6
    return {
        name: cell.regret(name)
        for name, final in cell.finals.items()
        if final.stats.mean_us <= limit
    }


def kept_default(cell: Timed, name: str) -> str | None:
    """The default rule's variant where no tuned choice beats it beyond a tie."""
    final = cell.finals.get(name)
    return name if final is not None and tie(final.stats.mean_us, cell.best_us) else None


def intervals(
    cells: Sequence[At],
    choice: Sequence[str],
    device: Device,
    regret: float,
    shown: Callable[[At, str], Evidence],
) -> tuple[Interval, ...]:
    """The intervals of a rule whose cells, by rising work units, have these choices. shown: the
    evidence of a choice at a cell.
    """
    found: list[Interval] = []
    first, evidence = 1, []
    for i, (cell, name) in enumerate(zip(cells, choice, strict=True)):
        evidence.append(shown(cell, name))
        if i + 1 == len(cells):
            found.append(Interval(first, None, name, tuple(evidence)))
        elif choice[i + 1] != name:
            last = last_unit(cell, cells[i + 1], name, choice[i + 1], device, regret)
            found.append(Interval(first, last, name, tuple(evidence)))
            first, evidence = last + 1, []
    return tuple(found)


def last_unit(a: Judges, b: Judges, lower: str, upper: str, device: Device, regret: float) -> int:
    """The last work unit that goes with cell a, of those from a's to b's, exclusive, where their
    variants are `lower` and `upper`.

    A variant that loses no more than twice `regret` at the other's cell is safe at all between
    them, so the one that loses less gets them. Where both lose more, a step lies between, and the
    boundary is where a wave of blocks is full.
    """
    loss_of_lower, loss_of_upper = (
        math.inf if lost is None else lost[0] for lost in (b.judged(lower), a.judged(upper))
    )
    if min(loss_of_lower, loss_of_upper) <= 2 * regret:
        return b.work_units - 1 if loss_of_lower <= loss_of_upper else a.work_units
    return _full_wave(a.work_units, b.work_units, device)


def _full_wave(a: int, b: int, device: Device) -> int:
    """The work unit from a to b, exclusive, at which a wave of a GPU's thread blocks is full, else
    the geometric mean.

    A kernel's blocks work on 1, 1/2, 1/4 or 1/8 of a head's rows and any number of them fits on an
    SM, so a further wave begins beyond multiples of these shares of the SM count, and with it the
    times step. The largest share that has a multiple there counts, since its multiples are those of
    the smaller ones too; of several multiples the nearest to the geometric mean.
    """
    # Geometric: neighbouring cells lie a factor apart, and a loss is a ratio too.
    middle = math.isqrt(a * b)
    for parts in (1, 2, 4, 8) if device.kind == "cuda" else ():
        # Its neighbours too: the nearest multiple of a share may lie outside of the two cells.
        nearest = middle * parts // device.sm_count
        full = [m * device.sm_count // parts for m in range(nearest - 1, nearest + 3)]
        between = [units for units in full if a <= units < b]
        if between:
            return min(between, key=lambda units: abs(math.log(units / middle)))
    return middle


def evidence_of(cell: Timed, name: str, run: Run, again: Timed | None) -> Evidence:
    """What a choice takes, by the samples taken after it where there are some of it."""
    fresh = again is not None and name in again.finals
    if again is not None and fresh:
        cell = again._replace(floor=again.floor or cell.floor)
    stats = cell.finals[name].stats
    others = {other: final.stats for other, final in cell.finals.items() if other != name}
    runner_up = min(others, key=lambda other: (others[other].mean_us, other), default=None)
    peak = run.device.peak_gb_s or run.peaks.get("measured")
    share = sol.sol(sol.bytes_moved(cell.problem), stats.median_us, peak) if peak else None
    return Evidence(
        work_units=cell.work_units,
        time_us=round(stats.median_us, 3),
        mean_us=round(stats.mean_us, 3),
        q1_us=round(stats.q1_us, 3),
        q3_us=round(stats.q3_us, 3),
        samples=stats.count,
        regret=round(cell.regret(name), 6),
        floor_us=None if cell.floor is None else round(cell.floor.median_us, 3),
        sol=None if share is None else round(share, 4),
        runner_up=runner_up,
        runner_up_us=None if runner_up is None else round(others[runner_up].median_us, 3),
        status=sol.classify(
            cell.problem, stats.median_us, run.device, run.policy.get("l2", "cold-clean")
        ),
        fresh=True if fresh else msgspec.UNSET,
    )


def _origin(
    records: Sequence[Record], run: Run, rules: Sequence[Rule], judged: Iterable[Timed]
) -> Origin:
    """Where a table's rules come from, what they lose, and what they lose at the cells `judged`,
    which had no part in them.
    """
    losses = [e.regret for rule in rules for interval in rule.intervals for e in interval.evidence]
    held = _held_out_regrets(rules, judged)
    return Origin(
        journal_sha256=digest(run, records),
        config=run.config,
        config_sha256=run.config_sha256,
        started=run.started,
        cells=len(losses),
        trials=sum(isinstance(r, Trial) for r in records),
        failures=failures_by_kind(records),
        regret_max=max(losses),
        regret_mean=round(math.fsum(losses) / len(losses), 6),
        held_out_cells=len(held),
        held_out_regret_max=max(held, default=None),
        held_out_regret_mean=round(math.fsum(held) / len(held), 6) if held else msgspec.UNSET,
    )


def _held_out_regrets(rules: Iterable[Rule], judged: Iterable[Timed]) -> list[float]:
    """What the rules lose at cells that had no part in them, where the choice was timed."""
    by_contract = {rule.when: rule for rule in rules}
    found: list[float] = []
    for cell in judged:
        rule = by_contract.get(cell.problem.contract)
        lost = rule and cell.judged(rule.at(cell.work_units).variant)
        if lost:
            found.append(round(lost[0], 6))
    return found


def failures_by_kind(records: Sequence[Record]) -> dict[str, int]:
    counts = Counter(type(r).__name__.lower() for r in records if r.status != "ok")
    found = {
        kind.__name__.lower(): counts[kind.__name__.lower()] for kind in (Build, Check, Trial, Cell)
    }
    # Cells with times that cannot be believed; absent where there are none, as in older tables.
    if marks := len({cell.problem for cell in noisy(records)}):
        found["noisy"] = marks
    return found


def _failures_in_words(records: Sequence[Record]) -> str:
    counts = failures_by_kind(records)
    return f"{len(records)} records, of which failed: " + ", ".join(
        f"{n} {kind}s" for kind, n in counts.items()
    )
