"""Ratios of mean times with confidence intervals, and what an interval says."""

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gdntune.timing import CUPTI_STEP_US, TIE_SHARE

if TYPE_CHECKING:
    import numpy as np

Verdict = Literal["FASTER", "SLOWER", "TIE", "UNCLEAR"]

# Of equal kernels hardly a cell of 320 is SLOWER by chance: the whole interval must be beyond the
# tie, and half of an interval is 0.4% at 200 samples (median of an H100's cells; 1.7% in the
# noisiest, which are UNCLEAR).
CONFIDENCE = 0.95
RESAMPLES = 2000
SEED = 20261128
# Below this the bootstrap's intervals are too narrow to decide anything.
LEAST_SAMPLES = 20


class RatioInterval(NamedTuple):
    """A ratio of means with its bounds."""

    ratio: float
    low: float
    high: float


def ratio_of_means(a: Sequence[float], b: Sequence[float], seed: str) -> RatioInterval:
    """B's mean over A's, with the percentile interval of a circular block bootstrap of each; the
    same seed gives the same bounds.

    Equal samples are one measurement, drawn from once: against itself its ratio is 1, with no
    width.
    """
    import numpy as np

    low, high = _bounds(resampled_ratios(a, b, seed))
    return RatioInterval(float(np.mean(b) / np.mean(a)), low, high)


def widest_interval(choice: Sequence[float], others: Sequence[Sequence[float]]) -> float | None:
    """Half the width of the widest interval of a ratio to the choice's mean, over that ratio; None
    where one has too few samples for an interval.
    """
    if not others or min(map(len, (choice, *others))) < LEAST_SAMPLES:
        return None
    found = [ratio_of_means(choice, other, str(i)) for i, other in enumerate(others)]
    return max((r.high - r.low) / 2 / r.ratio for r in found)


def geometric_mean_of_ratios(
    pairs: Sequence[tuple[Sequence[float], Sequence[float]]],
) -> RatioInterval:
    """The geometric mean over cells of B's mean over A's, with its interval; at least one pair."""
    import numpy as np

    resampled = [np.log(resampled_ratios(a, b, str(i))) for i, (a, b) in enumerate(pairs)]
    low, high = _bounds(np.exp(np.mean(resampled, axis=0)))
    logs = [np.log(np.mean(b) / np.mean(a)) for a, b in pairs]
    return RatioInterval(float(np.exp(np.mean(logs))), low, high)


def resampled_ratios(a: Sequence[float], b: Sequence[float], seed: str) -> "np.ndarray[Any, Any]":
    """B's mean over A's in each of RESAMPLES resamplings."""
    import numpy as np

    chance = np.random.default_rng([SEED, zlib.crc32(seed.encode())])
    means = _resampled_means(np.asarray(a, dtype=float), chance)
    others = means if list(a) == list(b) else _resampled_means(np.asarray(b, dtype=float), chance)
    # Samples of 0 us on a CPU's coarse clock: a resampling of these alone has no ratio.
    return others[means > 0] / means[means > 0]


def _resampled_means(samples: Any, chance: "np.random.Generator") -> Any:
    """Blocks, since neighbouring rounds are alike (on an H100 up to 0.3 of the variance), of an
    even length, since the order of calls is mirrored every other round.
    """
    import numpy as np

    n = len(samples)
    length = min(n, 2 * int(np.ceil(round(n ** (1 / 3) / 2, 9))))
    sums = np.lib.stride_tricks.sliding_window_view(
        np.concatenate([samples, samples[: length - 1]]), length
    ).sum(axis=1)
    picks = chance.integers(0, n, size=(RESAMPLES, -(-n // length)))
    return sums[picks].mean(axis=1) / length


def _bounds(values: Any) -> tuple[float, float]:
    import numpy as np

    tail = 100 * (1 - CONFIDENCE) / 2
    low, high = np.percentile(values, [tail, 100 - tail])
    return float(low), float(high)


def verdict(a_us: float, interval: RatioInterval) -> Verdict:
    """What an interval says of B against A: TIE where all of it is within a tie, FASTER or SLOWER
    where all of it is beyond, else UNCLEAR.

    The tie is `timing.tie`'s: within the larger of 1% of the lesser mean and 32 ns.
    """
    # As in `timing.tie`, where a difference of just one step is a tie whatever binary fractions
    # say.
    slack = 1e-9
    upper = 1 + max(TIE_SHARE, CUPTI_STEP_US / a_us) + slack
    lower = min(1 / (1 + TIE_SHARE), 1 - CUPTI_STEP_US / a_us) - slack
    if interval.low > upper:
        return "SLOWER"
    if interval.high < lower:
        return "FASTER"
    return "TIE" if lower <= interval.low and interval.high <= upper else "UNCLEAR"
