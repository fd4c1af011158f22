"""gdntune/results/summaries.py: many trials at once, to the last bit what one at a time gives."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gdntune.errors import MeasurementError
from gdntune.results.summaries import rounded, summaries
from gdntune.timing import summary

# Nanoseconds, and steps of a timer: quartiles and means of these often lie in the middle between
# two rounded numbers.
US = st.integers(0, 5_000_000).map(lambda ns: ns / 1000) | st.integers(1, 4000).map(
    lambda steps: round(0.032 * steps, 3)
)


def rounded_one(samples):
    s = summary(samples)
    times = (s.median_us, s.mean_us, s.q1_us, s.q3_us, s.min_us)
    return *(round(us, 3) for us in times), s.outliers


@given(st.lists(st.lists(US | st.floats(0, 1e9), min_size=1, max_size=9), max_size=6))
def test_as_one_at_a_time(trials):
    """Each trial's summary is that of `timing.summary`, rounded by Python."""
    assert summaries(trials) == [rounded_one(samples) for samples in trials]


@given(
    st.lists(st.floats(0, 1e12) | st.integers(0, 10**7).map(lambda n: (n + 0.5) / 1000)),
    st.integers(1, 4),
)
def test_rounded_as_python_rounds(values, digits):
    """Halves too: 2.0005 is a little less as a double, 2.0015 a little more."""
    assert rounded(np.array(values), digits) == [round(v, digits) for v in values]


@pytest.mark.parametrize("wrong", ([], [-1.0], [float("nan")], [1e13]))
def test_what_cannot_be_true_is_refused(wrong):
    """With the message of a single trial's summary, which says the sample."""
    with pytest.raises(MeasurementError) as one:
        summary([*wrong, 2.0] if wrong else [])
    with pytest.raises(MeasurementError) as many:
        summaries([[1.0, 2.0], [*wrong, 2.0] if wrong else []])
    assert str(many.value) == str(one.value)
