"""The cache gives up the least recently used first, never what is pinned, and no more than it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cache.budget import (
    GIB,
    MIB,
    Budget,
    Evictions,
    Reason,
    default_bytes,
    plan_eviction,
)
from treadle.errors import ConfigError


@dataclass(frozen=True)
class Held:
    nbytes: int
    last_used: float = 0.0
    pins: int = 0


def plan(candidates, budget, *, used=None, now=0.0, active_memory=0, limit=1000):
    used = sum(c.nbytes for c in candidates) if used is None else used
    return plan_eviction(candidates, budget, used=used, now=now, active_memory=active_memory, limit=limit)


@pytest.mark.parametrize(
    ("working_set", "expected"),
    [
        (0, 256 * MIB),
        (GIB, 256 * MIB),
        (10 * GIB, 2 * GIB),
        (40 * GIB, 8 * GIB),
        (512 * GIB, 8 * GIB),
    ],
)
def test_the_default_is_a_fifth_of_the_working_set_between_its_clamps(working_set, expected):
    assert default_bytes(working_set) == expected


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"nbytes": -1}, "nbytes"),
        ({"nbytes": 1, "idle_s": 0}, "idle_s"),
        ({"nbytes": 1, "pressure": 1.5}, "pressure"),
        ({"nbytes": 1, "pressure": 0}, "pressure"),
    ],
)
def test_a_bad_limit_names_its_key(values, key):
    with pytest.raises(ConfigError) as caught:
        Budget(**values)
    assert caught.value.param == key


def test_nothing_goes_within_all_limits():
    assert plan([Held(10), Held(10)], Budget(20), now=1800.0, active_memory=850) == []


def test_the_oldest_go_until_the_budget_holds():
    oldest, middle, newest = Held(10, 1), Held(10, 2), Held(10, 3)
    victims = plan([oldest, middle, newest], Budget(15), now=4)
    assert [(v.node, v.reason) for v in victims] == [(oldest, Reason.BUDGET), (middle, Reason.BUDGET)]


def test_what_was_idle_for_longer_than_the_limit_goes_even_within_the_budget():
    old, young = Held(1, 0.0), Held(1, 0.5)
    victims = plan([old, young], Budget(100), now=1800.25)
    assert [(v.node, v.reason) for v in victims] == [(old, Reason.IDLE)]


def test_under_memory_pressure_the_cache_gives_way_until_the_device_is_below_the_threshold():
    candidates = [Held(100, 1), Held(100, 2), Held(100, 3)]
    victims = plan(candidates, Budget(1000), active_memory=1000, limit=1000)
    assert [(v.node, v.reason) for v in victims] == [(c, Reason.PRESSURE) for c in candidates[:2]]


def test_bytes_freed_for_one_reason_count_for_the_others():
    candidates = [Held(100, 0.0), Held(100, 5000.0)]
    victims = plan(candidates, Budget(100), now=5000.0, active_memory=900, limit=1000)
    assert [v.reason for v in victims] == [Reason.IDLE]


def test_no_more_candidates_are_read_than_the_plan_needs():
    seen = []

    def endless() -> Iterator[Held]:
        while True:
            seen.append(len(seen))
            yield Held(10)

    victims = plan_eviction(endless(), Budget(0), used=30, now=0, active_memory=0, limit=1)
    assert len(victims) == 3
    assert len(seen) == 4


held = st.builds(Held, st.integers(0, 50), st.floats(0, 3600), st.integers(0, 1))


@given(st.lists(held, max_size=20), st.integers(0, 500), st.integers(0, 1000), st.floats(3600, 7200))
def test_a_plan_is_the_shortest_prefix_of_the_unpinned_that_satisfies_every_limit(nodes, size, active, now):
    nodes.sort(key=lambda node: node.last_used)
    budget = Budget(size)
    victims = [v.node for v in plan(nodes, budget, now=now, active_memory=active)]
    free = [node for node in nodes if not node.pins]

    def satisfied(k: int) -> bool:
        freed = sum(node.nbytes for node in free[:k])
        return (
            sum(node.nbytes for node in nodes) - freed <= size
            and active - freed <= 850
            and all(now - node.last_used <= 1800 for node in free[k:])
        )

    shortest = next((k for k in range(len(free)) if satisfied(k)), len(free))
    assert [id(node) for node in victims] == [id(node) for node in free[:shortest]]


def test_evictions_are_counted_by_reason():
    evictions = Evictions()
    evictions.record(Reason.IDLE, 5)
    evictions.record(Reason.IDLE, 7)
    evictions.record(Reason.PRESSURE, 1)
    assert evictions.counts == {Reason.IDLE: 2, Reason.BUDGET: 0, Reason.PRESSURE: 1, Reason.UNLOAD: 0}
    assert evictions.freed == {Reason.IDLE: 12, Reason.BUDGET: 0, Reason.PRESSURE: 1, Reason.UNLOAD: 0}
