"""gdntune/results/bootstrap.py: ratios of means with intervals that hold the truth."""

import math
import random

import pytest

from gdntune.results.bootstrap import geometric_mean_of_ratios, ratio_of_means, verdict


def samples(mean, seed, n=200):
    """Times around a mean, with 2% of noise."""
    chance = random.Random(seed)
    return [chance.gauss(mean, 0.02 * mean) for _ in range(n)]


def test_the_geometric_mean_has_an_interval_about_it():
    """Its bounds hold the true ratio, are narrower than a cell's, and the same each time."""
    pairs = [(samples(us, i), samples(1.1 * us, 100 + i)) for i, us in enumerate((5, 20, 80, 300))]
    found = geometric_mean_of_ratios(pairs)
    assert found.low < 1.1 < found.high and found.low < found.ratio < found.high
    one = ratio_of_means(*pairs[0], "0")
    assert found.high - found.low < one.high - one.low
    assert found == geometric_mean_of_ratios(pairs)
    logs = [math.log(ratio_of_means(a, b, "x").ratio) for a, b in pairs]
    assert found.ratio == pytest.approx(math.exp(sum(logs) / len(logs)))


@pytest.mark.parametrize(
    "factor, said", [(1.1, "SLOWER"), (0.9, "FASTER"), (1.0, "TIE"), (1.01, "UNCLEAR")]
)
def test_what_an_interval_says(factor, said):
    """Beyond a tie, within it, across its edge."""
    a, b = samples(100, 1), samples(100 * factor, 2)
    assert verdict(100, ratio_of_means(a, b, "x")) == said
