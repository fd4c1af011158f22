"""Which cells a sweep times beyond those of its config: between two whose choices differ, and those
that the table is judged at.
"""

import itertools
import math
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import msgspec

from gdntune import sol
from gdntune.device.arch import Device
from gdntune.errors import ConfigError, JournalError, listed
from gdntune.problem import Contract, Problem
from gdntune.results import workload
from gdntune.results.derive import (
    Timed,
    beyond,
    by_work_units,
    derive,
    marked,
    noted_defaults,
    passes,
    timed_again,
    timed_cells,
    without_dependent_launch,
)
from gdntune.results.records import Cell, Record, Run, Trial
from gdntune.results.table import Rule, Table
from gdntune.tuning.config import Config, HeldOut, Search

# Of those that a choice is compared with: the best two by the samples that chose.
RUNNERS_UP = 2
# Rounds of a choice that was made go on for so long at most: a table has thousands of cells, and
# one in ten has noise that 0.5% would take ten times the rounds for.
FRESH_SECONDS = 3.0


def crossovers(config: Config, records: Sequence[Record], run: Run) -> list[Problem]:
    """The cells that `search.bisect` asks for next, given what was timed; none where the crossovers
    are narrow enough.

    A contract's neighbouring cells are a crossover where the table as it now is has another choice
    at each, for calls that allow dependent launch or for those that do not, and one of the two
    choices loses more than `search.regret` at the other's cell, or has no times there. Between them
    comes the legal problem nearest to the geometric mean of their work units. Where
    `search.extra_cells` do not suffice, those that lose most come first; where a cell between two
    failed, no other is tried.
    """
    search = config.search
    if search.bisect is None:
        return []
    closed = {r.problem for r in records if isinstance(r, Cell)}
    # half of a cell, as a kill leaves it, says nothing yet
    records = [r for r in records if not isinstance(r, Trial) or r.problem in closed]
    try:
        # The table as it would be now: a crossover that its regret has merged away needs no cell.
        rules = {rule.when: rule for rule in derive(records, run, regret=search.regret).rules}
    except JournalError:
        return []
    # Held-out cells have no part in choosing, so they narrow no crossover either.
    aside = {*marked(records), *listed_held_out(config)}
    tuned = by_work_units(c for c in timed_cells(records) if c.problem not in aside)
    # Counted over all runs of this journal, so that a resumed sweep has no second budget.
    spent = marked(records, "bisection")
    found: list[Problem] = []
    for contract, cells in tuned.items():
        left = search.extra_cells - sum(p.contract == contract for p in spent)
        # A cell in the gap that failed is among these: another one beside it would likely fail too.
        done = {p.work_units for p in closed - aside if p.contract == contract}
        kept = {p.work_units for p in aside if p.contract == contract}
        gaps = list(_gaps(config, rules[contract], cells, done, kept))
        # The costliest crossovers first, and by problem where they are equal, so that a resumed
        # sweep asks for the same.
        gaps.sort(key=lambda gap: (-gap[0], gap[1]))
        found += sorted(problem for _, problem in gaps[: max(left, 0)])
    return found


def _gaps(
    config: Config,
    rule: Rule,
    cells: Sequence[Timed],
    done: Collection[int],
    kept: Collection[int],
) -> Iterator[tuple[float, Problem]]:
    """What each crossover of a contract may lose, and the problem that would narrow it.

    done: work units that were tried; kept: those that are held out. Neither is asked for again.
    """
    search = config.search
    for a, b in itertools.pairwise(cells):
        low, high = a.work_units, b.work_units
        loss = _loss(rule, a, b, search.regret)
        if not loss or any(low < w < high for w in done) or high <= (search.bisect or 1) * low:
            continue
        problem = _nearest(config, rule.when, math.sqrt(low * high), low, high, kept)
        if problem is not None:
            yield loss, problem


def _loss(rule: Rule, a: Timed, b: Timed, limit: float) -> float:
    """How much the choices of two neighbours lose at the other's cell, at most, for any call; 0
    where they are equal, or both tie there.
    """
    worst = 0.0
    for here, there in ((a, b), (b, a)):
        for allowed, seen in _by_calls(rule, here):
            name = rule.at(there.work_units, allowed).variant
            if name == rule.at(here.work_units, allowed).variant:
                continue
            judged = seen.judged(name)
            # Not timed at the other's cell: it may lose anything there.
            loss = math.inf if judged is None else judged[0]
            if beyond(seen.best_us, loss, limit):
                worst = max(worst, loss)
    return worst


def _by_calls(rule: Rule, cell: Timed) -> Iterator[tuple[bool, Timed]]:
    """Whether calls allow dependent launch, with a cell's times of what they may take: where a rule
    has a choice for those that do not, of both kinds.
    """
    yield True, cell
    if rule.alone:
        yield from ((False, seen) for seen in without_dependent_launch([cell]))


def effort(config: Config, problem: Problem) -> Search:
    """What the sweep spends on a cell: with a workload, final rounds, and the time for them, by the
    cell's share of its steps.
    """
    search = config.search
    if not isinstance(search.workload, tuple):
        return search
    contract = problem.contract
    units = {p.work_units for p in config.problems() if p.contract == contract} | {
        problem.work_units
    }
    share = workload.shares(
        search.workload,
        contract.tokens,
        sorted({HV for HV, _ in _heads(config, contract)}),
        sorted(units),
    )[problem.work_units]
    rounds = workload.rounds(share, len(units), search.final_rounds)
    # Never less time than the config says: fewer rounds end by themselves.
    longer = max(1.0, rounds / search.final_rounds)
    return msgspec.structs.replace(
        search, final_rounds=rounds, max_cell_seconds=min(longer * search.max_cell_seconds, 86400.0)
    )


def too_large(problem: Problem, device: Device) -> str:
    """Why a cell does not fit a device's memory; empty where it does, or where the device does not
    say how much it has.
    """
    states = sol.state_bytes(problem)
    if not 0 < device.memory_bytes < states:
        return ""
    memory = device.memory_bytes / 2**30
    return f"its states take {states / 2**30:.1f} GiB of the device's {memory:.1f}"


def fresh_rounds(search: Search) -> int:
    """The rounds in which a choice is timed again; 0: it is not."""
    return search.final_rounds if search.fresh_rounds is None else search.fresh_rounds


class Again(NamedTuple):
    """A cell that is timed again once its choice was made: the choice first, then the choice for
    calls without dependent launch, then what they are compared with; floors: those with the best
    samples.
    """

    variants: tuple[str, ...]
    floors: frozenset[str]


def again(
    records: Sequence[Record], table: Table, noisy: Collection[Problem] = ()
) -> dict[Problem, Again]:
    """The cells whose choices have no samples that were taken after them, or had noisy ones: the
    choice, that for calls without dependent launch, of each the best by the samples that chose and
    the next best, and the default rule's.
    """
    rules = {rule.when: rule for rule in table.rules}
    aside, known = set(marked(records)), timed_again(records)
    defaults = noted_defaults(records)
    trials = passes(records)
    found: dict[Problem, Again] = {}
    for contract, cells in by_work_units(timed_cells(records)).items():
        for cell in (c for c in cells if contract in rules and c.problem not in aside):
            choices, ranked = _compared(rules[contract], cell)
            done = known.get(cell.problem)
            fresh = done is not None and done.finals.keys() >= {*choices}
            if not choices or (fresh and cell.problem not in noisy):
                continue
            default = defaults(contract, cell.work_units)
            wanted = [*choices, *ranked, *([default] if default in cell.finals else [])]
            floors = frozenset(
                t.variant.id
                for t in trials[cell.problem]
                if t.role == "floor" and t.stage == "final" and t.status == "ok"
            )
            found[cell.problem] = Again(tuple(dict.fromkeys(wanted)), floors)
    return found


def _compared(rule: Rule, cell: Timed) -> tuple[list[str], list[str]]:
    """A rule's choices at a cell, for calls with dependent launch first, and the best that each
    was chosen among; none where the first has no samples there.
    """
    choices: list[str] = []
    ranked: list[str] = []
    for allowed, seen in _by_calls(rule, cell):
        means = {name: final.stats.mean_us for name, final in seen.finals.items()}
        choice = rule.at(cell.work_units, allowed).variant
        if choice not in means:
            return choices, ranked
        choices.append(choice)
        ranked += sorted(means, key=means.__getitem__)[:RUNNERS_UP]
    return choices, ranked


def held_out(config: Config, records: Sequence[Record]) -> list[Problem]:
    """The cells of `search.held_out`, in order: those of its list, or for each contract its number
    of them.

    The number's are spread evenly over the logarithm of work units, from the smallest to the
    largest cell of the config, and are no cell that has a part in choosing: neither the config's
    nor one of `crossovers`. Where there are fewer legal ones, fewer.
    """
    wanted = config.search.held_out
    if isinstance(wanted, tuple):
        return listed_held_out(config)
    own: dict[Contract, set[int]] = {}
    for p in config.problems():
        own.setdefault(p.contract, set()).add(p.work_units)
    found: list[Problem] = []
    for contract, units in sorted(own.items()):
        low, high = min(units), max(units)
        taken = units | {
            p.work_units for p in marked(records, "bisection") if p.contract == contract
        }
        for i in range(wanted):
            # The middle of each of as many equal stretches of the logarithm, since neighbouring
            # cells lie a factor apart.
            target = low * (high / low) ** ((i + 0.5) / wanted)
            problem = _nearest(config, contract, target, low, high, taken)
            if problem is not None:
                taken.add(problem.work_units)
                found.append(problem)
    return sorted(found)


def listed_held_out(config: Config) -> list[Problem]:
    """The problems of a `search.held_out` that is a list; ConfigError for one that no part has, or
    that is a cell of the config.
    """
    wanted = config.search.held_out
    own = {(p.contract, p.work_units) for p in config.problems()}
    found: dict[Problem, None] = {}
    for i, one in enumerate(wanted if isinstance(wanted, tuple) else ()):
        path = f"{config.name}: $.search.held_out[{i}]"
        problems = list(_of_parts(config, one))
        if not problems:
            said = ", ".join(
                f"{k}={v}" for k, v in msgspec.structs.asdict(one).items() if v is not None
            )
            tokens = sorted({c.tokens for c in config.all_contracts()})
            raise ConfigError(
                f"{path}: no contract is held out at {said}: expected tokens of"
                f" {listed(tokens)} and shards that divide H"
            )
        for p in problems:
            if (p.contract, p.work_units) in own:
                raise ConfigError(
                    f"{path}: batch={one.batch} with HV={p.HV} is {p.work_units} work units of"
                    f" {p.contract.key()}, where the config has a cell: expected another, since"
                    " a held-out cell has no part in choosing"
                )
            found[p] = None
    return sorted(found)


def _of_parts(config: Config, one: HeldOut) -> Iterator[Problem]:
    for part in config.each_part():
        H, HV = part.model.H, part.model.HV
        for contract in part.own_contracts():
            if one.tokens in (None, contract.tokens) and H % one.shards == 0:
                yield Problem(contract, one.batch, H // one.shards, HV // one.shards)


def _heads(config: Config, contract: Contract) -> set[tuple[int, int]]:
    """HV and H of each shard of the parts with a contract."""
    return {
        (part.model.HV // s, part.model.H // s)
        for part in config.each_part()
        if contract in part.own_contracts()
        for s in part.shards
    }


def _nearest(
    config: Config, contract: Contract, target: float, low: int, high: int, taken: Collection[int]
) -> Problem | None:
    """The problem with a shard's heads whose work units are nearest to `target`, between two bounds
    and none of `taken`.

    Of several with equal work units the one with the most heads a request, as the config's own
    cells have it.
    """
    possible = (
        # Nearest by ratio. The rest breaks ties: most heads a request, as the docstring says, then
        # the smallest batch.
        (abs(math.log(B * HV / target)), -HV, -H, B)
        for HV, H in _heads(config, contract)
        for B in range(low // HV + 1, -(-high // HV))
        if B * HV not in taken
    )
    best = min(possible, default=None)
    return None if best is None else Problem(contract, best[3], -best[2], -best[1])
