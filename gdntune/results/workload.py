"""What a serving engine's steps ask of a kernel: how often each batch size and number of tokens
occurs. Knows no kernels.
"""

import bisect
import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from gdntune.errors import ConfigError
from gdntune.problem import MAX_TOKENS

COLUMNS = ("batch", "tokens")
# The most that a cell's share of the steps may multiply its final rounds by, and the least that is
# left of them.
MOST, LEAST_ROUNDS = 4.0, 20


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, order=True):
    """Steps of `batch` requests with `tokens` tokens each. weight: how many of them, or their
    share; any scale.
    """

    batch: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 1
    weight: Annotated[float, msgspec.Meta(gt=0)] = 1.0


def read_trace(path: Path) -> tuple[Load, ...]:
    """The steps of a CSV with the columns `batch` and `tokens`, a row each, as counts; other
    columns are not looked at.

    Raises ConfigError for a file that cannot be read, lacks a column or has a value that is no
    step.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.DictReader(file)
            missing = [name for name in COLUMNS if name not in (rows.fieldnames or ())]
            if missing:
                raise ConfigError(
                    f"{path}: no column {missing[0]!r} in {rows.fieldnames}: expected a CSV with"
                    " the columns batch,tokens, a row a step"
                )
            counts = Counter(
                (
                    _count(path, rows.line_num, row, "batch"),
                    _count(path, rows.line_num, row, "tokens"),
                )
                for row in rows
            )
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise ConfigError(
            f"{path}: cannot be read: {e}; expected a CSV with the columns batch,tokens, a row a"
            " step"
        ) from e
    if not counts:
        raise ConfigError(f"{path}: holds no step: expected a row for each, with batch and tokens")
    return tuple(Load(batch, tokens, float(n)) for (batch, tokens), n in sorted(counts.items()))


def _count(path: Path, line: int, row: Mapping[str, str | None], name: str) -> int:
    said = (row[name] or "").strip()
    largest = MAX_TOKENS if name == "tokens" else 2**31 - 1
    if not said.isdecimal() or not 1 <= int(said) <= largest:
        raise ConfigError(
            f"{path}, line {line}: {name}={said!r}: expected a whole number from 1 to {largest}"
        )
    return int(said)


def shares(
    loads: Sequence[Load], tokens: int, heads: Sequence[int], units: Sequence[int]
) -> dict[int, float]:
    """For cells of a contract with `tokens`, by their work units, the share of its steps that each
    is the nearest to.

    heads: HV of each shard; a step counts at each of them alike. Nearest by ratio. All 0 where no
        step has that many tokens.
    """
    found = dict.fromkeys(units, 0.0)
    mine = [load for load in loads if load.tokens == tokens]
    total = sum(load.weight for load in mine) * len(heads)
    for load in mine:
        for HV in heads:
            nearest = min(units, key=lambda w: (abs(math.log(w / (load.batch * HV))), w))
            found[nearest] += load.weight / total
    return found


def rounds(share: float, cells: int, final_rounds: int) -> int:
    """A cell's final rounds, given its share of the steps: as many in all as without a workload,
    within bounds.

    A cell that no step is near to gets 20, or `final_rounds` where these are fewer.
    """
    wanted = round(final_rounds * min(share * cells, MOST))
    # No step comes near it, yet its table entry serves: it is timed, with the fewest samples that
    # decide.
    return max(wanted, min(LEAST_ROUNDS, final_rounds))


def step_us(work_units: int, times: Mapping[int, float]) -> float | None:
    """A call's time at some work units from those measured at others, by a straight line between
    the two nearest; None beyond them.
    """
    units = sorted(times)
    # Beyond the cells there is no line to read a time from, and none is made up.
    if not units or not units[0] <= work_units <= units[-1]:
        return None
    i = bisect.bisect_left(units, work_units)
    if units[i] == work_units:
        return times[work_units]
    low, high = units[i - 1], units[i]
    return times[low] + (times[high] - times[low]) * (work_units - low) / (high - low)


class Saved(msgspec.Struct, frozen=True):
    """Means over a workload's steps, for one layer's call, in microseconds. covered: the share of
    the steps that both have times at.
    """

    covered: float
    chosen_us: float
    other_us: float

    @property
    def saved_us(self) -> float:
        return self.other_us - self.chosen_us


def saved(
    loads: Sequence[Load],
    HV: int,
    chosen: Mapping[int, Mapping[int, float]],
    other: Mapping[int, Mapping[int, float]],
) -> Saved | None:
    """What choices save against other times, each by tokens and work units; None where no step has
    both.
    """
    mine = theirs = weight = 0.0
    for load in loads:
        a, b = (step_us(load.batch * HV, times.get(load.tokens, {})) for times in (chosen, other))
        if a is not None and b is not None:
            mine, theirs, weight = (
                mine + load.weight * a,
                theirs + load.weight * b,
                weight + load.weight,
            )
    if not weight:
        return None
    return Saved(weight / sum(load.weight for load in loads), mine / weight, theirs / weight)
