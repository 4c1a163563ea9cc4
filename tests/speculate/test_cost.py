"""The cost table reports what was measured, and guesses only between measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.speculate.cost import CostTable, Step

H100_4BIT = {1: 31e-6, 2: 57e-6, 4: 110e-6, 8: 27e-6, 16: 28e-6}
curves = st.dictionaries(st.integers(1, 64), st.floats(1e-6, 1.0), min_size=1, max_size=12)


def table(points: dict[int, float]) -> CostTable:
    cost = CostTable()
    for num_tokens, seconds in points.items():
        cost.observe(num_tokens, seconds)
    return cost


def price(cost: CostTable, num_tokens: int) -> float:
    """What a size counts for in a choice: guesses are a tenth dearer."""
    seconds = cost.seconds(num_tokens)
    assert seconds is not None
    return seconds if cost.known(num_tokens) else seconds * 1.1


def test_nothing_is_known_before_the_first_observation():
    cost = CostTable()
    assert cost.seconds(1) is None
    assert cost.plain(1) is None
    assert cost.cheapest_width(1, 3, 8) == 3
    assert cost.steps(1, 8) == ()
    assert not cost.known(1)
    assert not cost.known_plain(1)


@given(curves, st.integers(1, 100))
def test_a_known_size_is_exact_and_another_lies_between_its_neighbours(points, size):
    cost = table(points)
    seconds = cost.seconds(size)
    assert seconds is not None
    assert cost.known(size) == (size in points)
    below = [n for n in points if n <= size]
    above = [n for n in points if n >= size]
    if size in points:
        assert seconds == points[size]
    elif not below:
        assert seconds == points[min(points)]
    elif not above:
        assert seconds == pytest.approx(points[max(points)] * size / max(points))
    else:
        ends = (points[max(below)], points[min(above)])
        assert min(ends) * (1 - 1e-9) <= seconds <= max(ends) * (1 + 1e-9)


def test_more_tokens_may_cost_less():
    cost = table(H100_4BIT)
    assert [cost.cheapest_width(1, wanted, 16) for wanted in range(1, 10)] == [8] * 8 + [16]
    assert cost.cheapest_width(4, 1, 4) == 2
    assert cost.cheapest_width(3, 1, 2) == 2
    assert cost.cheapest_width(1, 2, 4) == 2  # no cheap size within the limit


@given(curves, st.integers(1, 4), st.integers(1, 16), st.integers(1, 16))
def test_the_cheapest_width_is_the_smallest_of_the_cheapest(points, rows, wanted, limit):
    cost = table(points)
    width = cost.cheapest_width(rows, wanted, limit)
    choices = range(wanted, max(wanted, limit) + 1)
    assert width in choices
    prices = {choice: price(cost, rows * choice) for choice in choices}
    assert width == min(choice for choice in choices if prices[choice] == min(prices.values()))


@given(curves, st.integers(1, 4), st.integers(1, 16))
def test_steps_are_the_cheapest_widths_at_once(points, rows, limit):
    cost = table(points)
    steps = cost.steps(rows, limit)
    widths = [cost.cheapest_width(rows, wanted, limit) for wanted in range(1, limit + 1)]
    assert [price(cost, rows * width) for width in widths] == [step.seconds for step in steps]
    assert all(wanted <= step.width <= limit for wanted, step in enumerate(steps, start=1))
    assert all(price(cost, rows * step.width) == step.seconds for step in steps)


def test_an_observed_size_is_preferred_to_a_guess_that_is_hardly_cheaper():
    cost = table({8: 1.0, 16: 1.05})
    assert cost.cheapest_width(1, 9, 16) == 16
    cost.observe(12, 1.0)
    assert cost.cheapest_width(1, 9, 16) == 12
    assert table({8: 1.0, 16: 2.0}).cheapest_width(1, 9, 16) == 9


def test_steps_follow_new_observations():
    cost = table({1: 1.0, 4: 2.0})
    assert cost.steps(1, 4)[-1] == Step(4, 2.0)
    for _ in range(7):
        cost.observe(4, 3.0)
    assert cost.steps(1, 4)[-1] == Step(4, 3.0)
    cost.observe(3, 0.5)
    assert cost.steps(1, 4)[0] == Step(3, 0.5)


def test_outliers_change_nothing_and_a_lasting_change_is_followed():
    cost = table({8: 1.0})
    for seconds in (1.0, 50.0, 1.0, 1.0, 50.0, 1.0, 50.0):
        cost.observe(8, seconds)
    assert cost.seconds(8) == 1.0
    for _ in range(7):
        cost.observe(8, 2.0)
    assert cost.seconds(8) == 2.0


def test_a_slow_drift_is_followed():
    cost = CostTable()
    seconds = 1.0
    for _ in range(500):
        seconds *= 1.001
        cost.observe(8, seconds)
    assert cost.seconds(8) == pytest.approx(seconds, rel=0.02)


def test_plain_steps_are_kept_apart():
    cost = CostTable()
    cost.observe(1, 2.0)
    cost.observe_plain(1, 1.0)
    cost.observe_plain(3, 2.0)
    assert cost.seconds(1) == 2.0
    assert cost.plain(1) == 1.0
    assert cost.plain(2) == 1.5
    assert cost.plain(4) is None  # a guess here would make drafts look better than they are
    assert cost.known_plain(3)
    assert not cost.known_plain(2)


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_an_impossible_step_is_refused(num_tokens, seconds):
    with pytest.raises(ValueError, match="a step has tokens and takes time"):
        CostTable().observe(num_tokens, seconds)
    with pytest.raises(ValueError, match="a step has tokens and takes time"):
        CostTable().observe_plain(num_tokens, seconds)
