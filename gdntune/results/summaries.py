"""What `timing.summary` says of samples, of many trials at once, and Python's `round` of many
numbers: both to the last bit, in a fifth of the time.
"""

import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from gdntune.timing import MOST_US, summary

DIGITS = 3
# Nearer than this to the middle between two rounded numbers, Python decides. Far above what binary
# fractions lose of numbers below _LARGE, far below a digit.
_UNSURE, _LARGE = 1e-6, 1e8


class Summary(NamedTuple):
    """A trial's `timing.Stats` in microseconds, rounded to nanoseconds."""

    median_us: float
    mean_us: float
    q1_us: float
    q3_us: float
    min_us: float
    outliers: int


def summaries(trials: Sequence[Sequence[float]]) -> list[Summary]:
    """The summary of each trial's samples, in the order given. Raises what `timing.summary` does."""
    by_count: dict[int, list[int]] = {}
    for i, samples in enumerate(trials):
        by_count.setdefault(len(samples), []).append(i)
    found: dict[int, Summary] = {}
    for places in by_count.values():
        found |= zip(places, _of_one_count([trials[i] for i in places]), strict=True)
    return [found[i] for i in range(len(trials))]


def _of_one_count(trials: Sequence[Sequence[float]]) -> list[Summary]:
    count = len(trials[0])
    ordered = np.sort(np.array(trials, dtype=np.float64), axis=1)
    if not count or not (ordered >= 0).all() or not (ordered < MOST_US).all():
        # One of them cannot be true: this says which sample, and why.
        for samples in trials:
            summary(samples)
    q1, median, q3 = (_quartile(ordered, quarters) for quarters in (1, 2, 3))
    reach = 3 * (q3 - q1)
    outside = (ordered < (q1 - reach)[:, None]) | (ordered > (q3 + reach)[:, None])
    means = ordered.mean(axis=1)
    mean_us = rounded(means)
    for i in np.flatnonzero(_unsure(means, DIGITS)).tolist():
        # Of the exact sum, which numpy's is not.
        mean_us[i] = round(statistics.fmean(trials[i]), DIGITS)
    columns = (rounded(median), mean_us, rounded(q1), rounded(q3), rounded(ordered[:, 0]))
    return list(map(Summary, *columns, outside.sum(axis=1).tolist()))


def _quartile(ordered: "npt.NDArray[np.float64]", quarters: int) -> "npt.NDArray[np.float64]":
    # The terms of `timing.summary`, in its order: other ones would round otherwise.
    last = ordered.shape[1] - 1
    low, rest = divmod(quarters * last, 4)
    below = ordered[:, low]
    return below + (ordered[:, min(low + 1, last)] - below) * (rest / 4)


def rounded(values: "npt.NDArray[np.float64]", digits: int = DIGITS) -> list[float]:
    """`round(value, digits)` of each."""
    # A whole number over a power of ten is the double nearest to that decimal, as Python's is.
    found: list[float] = (np.rint(values * 10.0**digits) / 10.0**digits).tolist()
    for i in np.flatnonzero(_unsure(values, digits)).tolist():
        found[i] = round(float(values[i]), digits)
    return found


def _unsure(values: "npt.NDArray[np.float64]", digits: int) -> "npt.NDArray[np.bool_]":
    scaled = np.abs(values) * 10.0**digits
    sure = (np.abs(scaled - np.floor(scaled) - 0.5) > _UNSURE) & (scaled < _LARGE)
    return ~sure
