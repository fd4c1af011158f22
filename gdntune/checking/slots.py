"""Which slots the requests of a case read and write, as lists of integers."""

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

from gdntune.checking.options import Options
from gdntune.errors import UnsupportedProblem
from gdntune.problem import Problem


@dataclasses.dataclass
class Slots:
    """By request: the slot read, the slot of the final state, and the columns of slot_index (empty
    where the contract has none). slots: the pool's size. padding: the requests that are padding.
    """

    start: list[int]
    final: list[int]
    columns: list[list[int]]
    slots: int
    padding: set[int]


@dataclasses.dataclass
class _Request:
    """One request's slots. first: the column that names the slot it starts from."""

    start: int
    final: int
    row: list[int]
    first: int


def some(pick: random.Random, among: Sequence[int], share: float, of: int) -> set[int]:
    """A share `of` so many, drawn `among` these: at least one where the share is above 0."""
    # No draw at all for a share of 0: what a seed gives must not hang on options that are off.
    return set(pick.sample(among, min(len(among), max(1, round(share * of))))) if share else set()


def assign_slots(
    problem: Problem,
    options: Options,
    columns: int,
    accepted: Sequence[int],
    pick: random.Random,
) -> Slots:
    """The slots of each request: distinct ones, so that no result depends on the order in which
    requests run.

    columns: of slot_index, 0 without one. accepted: num_accepted_tokens by request, where the
    contract has it. Raises UnsupportedProblem where the pool is too small, or padding has no index
    to be marked by.
    """
    c, B = problem.contract, problem.B
    padded = some(pick, range(B), options.padding, B)
    if padded and not c.pool:
        raise UnsupportedProblem(
            f"padding={options.padding} without a pool: only an index marks padding; pass padding=0"
            " or pool=True"
        )
    own_final = c.writes_index and (options.split or c.intermediate == "slots")
    held, free = _free(problem, options, (columns or 1) + own_final, bool(padded))
    if options.permute and c.pool:
        pick.shuffle(free)
    names = iter(free)
    # A real slot that padding names and no request owns: a kernel that takes a padding request for
    # a real one changes it, and the check sees that.
    guard = next(names) if padded else -1
    lost = _marks(options, held)
    skipping = some(pick, [n for n in range(B) if n not in padded], options.skipped, B)
    plan = Slots([], [], [], held, padded)
    for n in range(B):
        row = list(itertools.islice(names, columns))
        first = min(max(accepted[n], 1), columns) - 1 if c.accepted else 0
        start = row[first] if row else next(names)
        one = _Request(start, next(names) if own_final else start, row, first)
        if n in padded:
            # Every other one names the guard, which it could write if it were not padding.
            _pad(one, lost, guard if n % 2 else None)
        elif n in skipping:
            _skip(one, lost, pick)
        plan.start.append(one.start)
        plan.final.append(one.final)
        plan.columns.append(one.row)
    return plan


def _free(problem: Problem, options: Options, each: int, guarded: bool) -> tuple[int, list[int]]:
    """The pool's size, and the slots of it that may be given away, `each` of them a request."""
    pool, null = problem.contract.pool, options.null_index
    needed = problem.B * each + guarded
    held = options.slots if options.slots is not None else needed + (null >= 0 and pool)
    free = [s for s in range(held) if s != null or not pool]
    if len(free) < needed:
        raise UnsupportedProblem(
            f"slots={held}: {problem.B} requests of {each} slots each need {needed}, without"
            f" null_index={null}; pass more slots"
        )
    return held, free


def _marks(options: Options, held: int) -> Iterator[int]:
    """Indices that mean padding, each kind in its turn, without end."""
    null = [options.null_index] if options.null_index >= 0 else []
    # 2**20 beyond the pool, where a kernel that reads it faults instead of meeting a neighbour.
    beyond = [held, held + 2**20] if options.out_of_range else []
    return itertools.cycle([*null, -1, *beyond, -7])


def _pad(one: _Request, lost: Iterator[int], guard: int | None) -> None:
    """Makes a request padding: its start is a mark, the rest marks or the guard."""
    one.start, one.final = next(lost), next(lost) if guard is None else guard
    if one.row:
        one.row = [next(lost) if guard is None else guard for _ in one.row]
        one.row[one.first] = one.start


def _skip(one: _Request, lost: Iterator[int], pick: random.Random) -> None:
    """Takes the final slot from a request, and a column that it does not start from."""
    one.final = next(lost)
    if spare := [t for t in range(len(one.row)) if t != one.first]:
        one.row[pick.choice(spare)] = next(lost)
