"""A token bucket per name: a burst of the limit, then the limit's pace."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from treadle.api.security_limits import MAX_BUCKETS, RateLimit


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_limit_may_come_at_once_and_then_one_by_one() -> None:
    clock = Clock()
    limit = RateLimit(6, clock)
    assert [limit.take("a") for _ in range(7)] == [0] * 6 + [10]
    assert limit.take("b") == 0
    clock.now = 4
    assert limit.take("a") == 6
    clock.now = 10
    assert [limit.take("a"), limit.take("a")] == [0, 10]


@given(st.integers(1, 60), st.lists(st.floats(0, 30), max_size=60))
def test_no_minute_sees_more_than_twice_the_limit_and_waiting_helps(limit: int, gaps: list[float]) -> None:
    clock = Clock()
    buckets = RateLimit(limit, clock)
    taken: list[float] = []
    for gap in gaps:
        clock.now += gap
        wait = buckets.take("a")
        if wait:
            clock.now += wait
            assert buckets.take("a") == 0
        taken.append(clock.now)
        assert sum(clock.now - then < 60 for then in taken) <= 2 * limit


def test_a_flood_of_names_is_forgotten_oldest_first() -> None:
    limit = RateLimit(1, Clock())
    for name in range(MAX_BUCKETS + 1):
        assert limit.take(str(name)) == 0
    assert limit.take("0") == 0  # forgotten
    assert limit.take(str(MAX_BUCKETS)) > 0
