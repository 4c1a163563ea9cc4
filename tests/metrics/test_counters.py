"""Histograms count every value once, in the bucket that it falls into."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.metrics.counters import Counters, Histogram
from treadle.types import Finish

BOUNDS = (1.0, 2.5, 10.0)


@given(st.lists(st.tuples(st.floats(0, 20), st.integers(1, 5))))
def test_a_bucket_holds_what_is_at_or_below_its_bound(values: list[tuple[float, int]]) -> None:
    histogram = Histogram(BOUNDS)
    for value, times in values:
        histogram.observe(value, times)
    wanted = [sum(times for value, times in values if value <= bound) for bound in BOUNDS]
    rows = histogram.cumulative()
    assert rows == [*zip(("1.0", "2.5", "10.0"), wanted, strict=True), ("+Inf", sum(times for _, times in values))]
    assert histogram.total == pytest.approx(sum(value * times for value, times in values))


def test_every_reason_to_end_is_told_from_the_start() -> None:
    assert Counters().of("m").finished == dict.fromkeys(Finish, 0)
