"""Counts of something that may start anew still only grow."""

from __future__ import annotations

from treadle.metrics.gauges import Growth


def test_a_restart_adds_what_was_counted_since() -> None:
    growth = Growth()
    assert growth.since_last({"exact": 7, "miss": 1}) == {"exact": 7, "miss": 1}
    assert growth.since_last({"exact": 9, "miss": 1}) == {"exact": 2, "miss": 0}
    assert growth.since_last({"exact": 2, "miss": 1, "branch": 4}) == {"exact": 2, "miss": 0, "branch": 4}
    assert growth.since_last({"exact": 3, "miss": 1, "branch": 4}) == {"exact": 1, "miss": 0, "branch": 0}
