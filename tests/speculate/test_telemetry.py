"""Counters of speculation only go up, and a snapshot is a copy that is JSON."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.speculate.control import Source
from treadle.speculate.telemetry import LONGEST_COUNTED, SpeculationCounters

rounds = st.lists(st.tuples(st.sampled_from(Source), st.integers(0, 30), st.integers(0, 30)), max_size=20)


def test_a_new_one_counts_nothing_and_knows_no_rates():
    counters = SpeculationCounters()
    snapshot = counters.snapshot()
    assert snapshot["drafted"] == {"lookup": 0, "draft": 0, "forced": 0}
    assert snapshot["rate"] is None
    assert snapshot["speed_up"] is None
    assert len(snapshot["accepted_lengths"]) == LONGEST_COUNTED + 1


@given(rounds)
def test_counters_add_up(rounds):
    counters = SpeculationCounters()
    for source, accepted, refused in rounds:
        counters.settled(source, accepted + refused, accepted)
        counters.verified([accepted], accepted + 1, 0.5)
    snapshot = json.loads(json.dumps(counters.snapshot()))
    for source in Source:
        assert snapshot["accepted"][source] == sum(a for s, a, _ in rounds if s is source)
        assert snapshot["drafted"][source] == sum(a + r for s, a, r in rounds if s is source)
    assert sum(snapshot["accepted_lengths"]) == snapshot["rounds"] == len(rounds)
    assert snapshot["accepted_lengths"][LONGEST_COUNTED] == sum(a >= LONGEST_COUNTED for _, a, _ in rounds)
    assert snapshot["verify_tokens"] == sum(a + 1 for _, a, _ in rounds)


def test_the_speed_up_compares_tokens_per_second():
    counters = SpeculationCounters()
    counters.verified([3, 1], 6, 2.0)
    assert counters.speed_up is None
    counters.plain(10, 5.0)
    assert counters.speed_up == pytest.approx(1.5)


def test_the_rate_is_that_of_all_sources():
    counters = SpeculationCounters()
    counters.settled(Source.LOOKUP, 8, 8)
    counters.settled(Source.DRAFT, 2, 0)
    assert counters.rate == pytest.approx(0.8)


def test_a_snapshot_does_not_change_later():
    counters = SpeculationCounters()
    before = counters.snapshot()
    counters.settled(Source.LOOKUP, 4, 2)
    counters.verified([2], 3, 0.1)
    assert before["drafted"]["lookup"] == 0
    assert sum(before["accepted_lengths"]) == 0


@pytest.mark.parametrize(("drafted", "accepted"), [(1, 2), (1, -1)])
def test_impossible_counts_are_refused(drafted, accepted):
    with pytest.raises(ValueError, match="cannot be accepted"):
        SpeculationCounters().settled(Source.DRAFT, drafted, accepted)
