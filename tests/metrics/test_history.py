"""Histories hold a bounded number of seconds, and null where nothing was measured."""

from __future__ import annotations

import pytest

from treadle.metrics.history import LENGTH, MOST_VALUES, History, Recent, Second
from treadle.metrics.snapshot import SERIES, Quantiles


def point(value: float | None) -> dict[str, float | None]:
    return dict.fromkeys(SERIES, value)


def test_the_oldest_points_go_first() -> None:
    history = History(length=3)
    for time in range(5):
        history.add(float(time), point(10.0 * time))
    part = history.part()
    assert part.times == [2.0, 3.0, 4.0]
    assert part.series == {name: [20.0, 30.0, 40.0] for name in SERIES}
    assert history.newest == point(40.0)


def test_only_what_is_newer_is_given() -> None:
    history = History()
    for time in range(4):
        history.add(float(time), point(None))
    assert history.part(since=1.0).times == [2.0, 3.0]
    empty = history.part(since=3.0)
    assert (empty.times, empty.series) == ([], {name: [] for name in SERIES})


def test_a_point_that_lacks_a_series_is_a_mistake() -> None:
    with pytest.raises(KeyError):
        History().add(0.0, {"running": 1})


def test_an_empty_second_has_speeds_of_zero_and_no_times_or_shares() -> None:
    values = Second().point(1.0)
    assert {name for name, value in values.items() if value == 0.0} == {"prefill_tokens_per_s", "decode_tokens_per_s"}
    assert set(values.values()) == {0.0, None}


def test_a_second_that_took_two_halves_the_speeds() -> None:
    second = Second(generated=30, computed_tokens=100, cached_tokens=300, steps=4, rows=10)
    values = second.point(2.0)
    assert (values["decode_tokens_per_s"], values["prefill_tokens_per_s"]) == (15.0, 50.0)
    assert (values["cached_share"], values["batch"]) == (0.75, 2.5)


def test_quantiles_forget_what_is_older_than_the_history() -> None:
    recent = Recent()
    recent.add(0.0, 100.0)
    for value in range(1, 102):
        recent.add(10.0, float(value))
    assert recent.quantiles(10.0).count == 102
    assert recent.quantiles(LENGTH + 5.0) == Quantiles(51.0, 96.0, 100.0, 101)
    assert recent.quantiles(LENGTH + 11.0) == Quantiles()


def test_values_are_bounded_however_fast_they_come() -> None:
    recent = Recent()
    for value in range(MOST_VALUES + 10):
        recent.add(0.0, float(value))
    assert recent.quantiles(0.0).count == MOST_VALUES
