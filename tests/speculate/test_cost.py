"""The cost table reports what was measured, and guesses only between measurements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.speculate.cost import FIRST_AGE, OLD, PLAIN_AGE, SHORT, CostTable, Step

H100_4BIT = {1: 31e-6, 2: 57e-6, 4: 110e-6, 8: 27e-6, 16: 28e-6}
curves = st.dictionaries(st.integers(1, 64), st.floats(1e-6, 1.0), min_size=1, max_size=12)


def table(points: dict[int, float]) -> CostTable:
    cost = CostTable()
    for num_tokens, seconds in points.items():
        cost.observe(num_tokens, seconds, warm=True)
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
        largest = points[max(points)]
        assert largest <= seconds <= largest * size / max(points) * (1 + 1e-9)
    else:
        ends = (points[max(below)], points[min(above)])
        assert min(ends) * (1 - 1e-9) <= seconds <= max(ends) * (1 + 1e-9)


def test_sizes_beyond_the_largest_go_on_as_steep_as_before():
    assert table({4: 1.0}).seconds(8) == 2.0
    assert table({4: 1.0, 16: 1.0}).seconds(64) == 1.0
    assert table({4: 1.0, 8: 1.2, 16: 1.6}).seconds(32) == pytest.approx(2.4)
    assert table(H100_4BIT).seconds(64) == pytest.approx(34e-6)


def test_a_longer_context_makes_verify_steps_as_much_dearer_as_plain_ones():
    cost = table({1: 1.0, 8: 1.5})
    cost.observe_plain(1, 0.8)
    longer = cost.at(8 * SHORT)
    assert cost.at(SHORT - 1) is cost
    assert longer is cost.at(8 * SHORT + 1)
    assert longer.plain(1) is None, "it is measured again first"
    assert longer.seconds(8) == 1.5
    longer.observe_plain(1, 2.8)
    assert longer.seconds(8) == pytest.approx(3.5)
    assert longer.steps(1, 8)[-1].seconds == pytest.approx(3.5 * 1.1)
    longer.observe(8, 5.0)
    assert longer.seconds(8) == 5.0
    assert longer.seconds(1) == pytest.approx(3.0), "as much dearer as the plain step"
    assert longer.seconds(4) == pytest.approx(1.0 + 0.5 * 3 / 7 + 2.0 + 1.5 * 3 / 7), "between the two"
    assert longer.seconds(16) == pytest.approx((cost.seconds(16) or 0) + 3.5)
    assert (cost.seconds(8), cost.plain(1)) == (1.5, 0.8)


def test_where_plain_steps_of_a_short_context_were_never_seen_verify_steps_stand_for_them():
    cost = table({8: 1.0, 16: 1.2})
    longer = cost.at(32 * SHORT)
    longer.observe_plain(8, 3.0)
    assert longer.seconds(16) == pytest.approx(3.2)


def test_prices_of_a_longer_context_follow_those_of_a_shorter_one():
    cost = table({8: 1.0})
    longer = cost.at(2 * SHORT)
    assert longer.steps(1, 8)[-1].seconds == pytest.approx(1.1)
    for _ in range(7):
        cost.observe(8, 2.0)
    assert longer.steps(1, 8)[-1].seconds == pytest.approx(2.2)


def test_what_was_not_measured_for_long_is_measured_anew():
    cost = table({8: 1.0, 4: 1.0})
    for _ in range(6):
        cost.observe(8, 1.0)
    for _ in range(OLD):
        cost.observe(4, 3.0)
    cost.observe(8, 3.0)
    assert cost.seconds(8) == 3.0


def test_steps_have_widths_that_are_usual():
    cost = CostTable.of({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.3, 16: 1.5, 32: 2.0}, {}, widths=(1, 2, 4, 8, 16))
    assert [step.width for step in cost.steps(2, 16)] == [1, 2, 4, 4, 8, 8, 8, 8, *[16] * 8]
    assert [step.width for step in cost.at(SHORT).steps(2, 16)] == [step.width for step in cost.steps(2, 16)]
    assert cost.steps(2, 10)[-1].width == 10, "a wider one has no room"
    assert [step.width for step in cost.steps(2, 16, padded=False)] == list(range(1, 17))
    assert [cost.cheapest_width(2, n, 16) for n in (3, 8, 9)] == [4, 8, 16]
    assert cost.cheapest_width(2, 9, 12) == 9
    assert cost.unpadded().observed() == cost.observed() and cost.unpadded().at(SHORT).cheapest_width(2, 9, 16) == 9
    assert cost.at(SHORT).cheapest_width(2, 9, 16) == 16, "which stays as it is"


@pytest.mark.parametrize(("seen", "age"), [(1, FIRST_AGE), (2, 4 * FIRST_AGE), (7, PLAIN_AGE)])
def test_plain_steps_are_due_again_the_sooner_the_fewer_were_seen(seen, age):
    cost = CostTable()
    for _ in range(seen):
        cost.observe_plain(1, 1.0)
    waited = 0
    while not cost.plain_due(1):
        cost.observe(4, 1.0)
        waited += 1
    assert waited == age + 1


def test_plain_steps_that_were_never_seen_are_due_some_day():
    cost = CostTable()
    assert not cost.plain_due(2)
    for _ in range(PLAIN_AGE + 1):
        cost.observe(4, 1.0)
    assert cost.plain_due(2)


def test_steps_that_may_not_be_padded_have_their_own_price():
    steps = table(H100_4BIT).steps(1, 8, padded=False)
    assert [step.width for step in steps] == list(range(1, 9))
    assert steps[3].seconds == 110e-6


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


@pytest.mark.parametrize(("num_tokens", "seconds"), [(0, 1.0), (1, 0.0), (1, -1.0), (1, float("nan"))])
def test_an_impossible_step_is_refused(num_tokens, seconds):
    with pytest.raises(ValueError, match="a step has tokens and takes time"):
        CostTable().observe(num_tokens, seconds)
    with pytest.raises(ValueError, match="a step has tokens and takes time"):
        CostTable().observe_plain(num_tokens, seconds)


def test_a_first_step_that_built_kernels_does_not_rule_its_size_out():
    cost = table({1: 1.0, 2: 1.1, 4: 1.2})
    cost.observe(8, 50.0)
    assert cost.seconds(8) < 3.0
    cost.observe(8, 1.4)
    assert cost.seconds(8) == 1.4


@given(
    st.dictionaries(st.integers(1, 100), st.floats(1e-6, 10.0)),
    st.dictionaries(st.integers(1, 16), st.floats(1e-6, 10.0)),
)
def test_a_table_made_of_what_was_observed_says_the_same(verify, plain):
    known = CostTable.of(verify, plain)
    assert known.observed() == (dict(sorted(verify.items())), dict(sorted(plain.items())))
    again = CostTable.of(*known.observed())
    assert [again.seconds(n) for n in range(1, 120)] == [known.seconds(n) for n in range(1, 120)]
    assert [again.plain(n) for n in range(1, 20)] == [known.plain(n) for n in range(1, 20)]


def test_what_only_long_contexts_cost_is_not_among_what_was_observed():
    cost = table({1: 1.0})
    cost.at(100_000).observe(4, 9.0)
    assert cost.observed() == ({1: 1.0}, {})


def test_the_first_step_of_a_size_does_not_count_if_it_built_kernels():
    cost = table({1: 1.0, 8: 1.0})
    cost.observe(16, 30.0)
    assert not cost.known(16) and cost.seconds(16) == 1.0
    cost.observe(16, 1.2)
    assert cost.seconds(16) == 1.2
    cost.observe(32, 1.3)
    assert cost.seconds(32) == 1.3, "one that was about as dear as it was thought to be counts"


def test_a_size_that_is_dear_again_is_dear():
    cost = table({1: 1.0, 8: 1.0})
    for _ in range(2):
        cost.observe(16, 30.0)
    assert cost.seconds(16) == 30.0
