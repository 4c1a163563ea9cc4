"""Models that have work share the device's time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from treadle.engine.turns import LEAST_S, Turns


def test_many_short_turns_weigh_as_much_as_a_long_one() -> None:
    turns: Turns[str] = Turns()
    costs = {"prefill": 0.25, "decode": 0.01}
    given_to = []
    for _ in range(26 * 8):
        one = turns.next(["prefill", "decode"])
        turns.took(one, costs[one])
        given_to.append(one)
    assert 23 <= given_to.count("decode") / given_to.count("prefill") <= 28


def test_one_that_was_idle_claims_nothing_for_that_time() -> None:
    turns: Turns[str] = Turns()
    for _ in range(100):
        turns.took(turns.next(["old"]), 1.0)
    given_to = []
    for _ in range(10):
        one = turns.next(["old", "new"])
        turns.took(one, 1.0)
        given_to.append(one)
    assert given_to.count("new") == 5


def test_one_that_cannot_go_on_does_not_take_all_turns() -> None:
    turns: Turns[str] = Turns()
    given_to = []
    for _ in range(60):
        one = turns.next(["waits", "works"])
        turns.took(one, 0.0 if one == "waits" else 10 * LEAST_S)
        given_to.append(one)
    assert given_to.count("works") >= 5


@given(st.lists(st.tuples(st.sets(st.integers(0, 3), min_size=1), st.floats(0, 1)), max_size=50))
def test_only_the_busy_get_turns(steps: list[tuple[set[int], float]]) -> None:
    turns: Turns[int] = Turns()
    for busy, cost in steps:
        one = turns.next(sorted(busy))
        assert one in busy
        turns.took(one, cost)
