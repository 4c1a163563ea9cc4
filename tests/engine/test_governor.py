"""Memory runs short: the cheapest thing first, nobody is held on a stale reading, and somebody always finishes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.engine.governor import (
    SHARES,
    Act,
    Candidate,
    Governor,
    Level,
    Reading,
    Situation,
    level_of,
)

LIMIT = 1000
candidates = st.lists(
    st.builds(Candidate, st.uuids().map(str), st.floats(0, 100), packable=st.booleans(), preempted=st.booleans()),
    max_size=5,
    unique_by=lambda one: one.arrived,
)
situations = st.builds(Situation, candidates, st.booleans(), st.sampled_from([0, 0, 50, 400]))
readings = st.builds(
    Reading,
    st.integers(0, 1200),
    st.just(LIMIT),
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 300)),
    st.just(100),
)


@given(st.lists(st.tuples(readings, situations), max_size=20))
def test_whatever_is_read_the_rules_hold(history: list[tuple[Reading, Situation]]) -> None:
    governor = Governor()
    for reading, now in history:
        held = governor.holding
        action = governor.decide(reading, now)
        if action is None:
            continue
        level = level_of(reading)
        if action.act in (Act.HOLD, Act.PREEMPT):
            assert reading.fresh
        if action.act is Act.PREEMPT:
            chosen = next(one for one in now.running if one.id == action.id)
            younger = [one for one in now.running if one.arrived > chosen.arrived]
            assert level is Level.PREEMPT and not chosen.preempted
            assert all(one.preempted for one in younger) and chosen.arrived > min(o.arrived for o in now.running)
            assert not now.cached and not now.idle_packable and not any(one.packable for one in now.running)
        if action.act is Act.EVICT:
            assert 0 < action.nbytes <= now.cached and level >= Level.EVICT
        if action.act is Act.PACK_LIVE:
            assert next(one for one in now.running if one.id == action.id).packable and not now.idle_packable
        if action.act is Act.HOLD:
            assert not held and governor.holding
        if action.act is Act.ADMIT:
            assert held and not governor.holding and level <= Level.PACK
        if level is Level.CALM:
            assert action.act is Act.ADMIT
    assert sum(governor.counts.done.values()) <= len(history)


@given(readings, st.integers(0, 300))
def test_more_memory_in_use_is_never_a_lower_level(reading: Reading, more: int) -> None:
    higher = Reading(reading.active + more, LIMIT, reading.fresh, reading.available, reading.reserve)
    assert level_of(higher) >= level_of(reading)


@pytest.mark.parametrize(("level", "share"), SHARES.items())
def test_levels_begin_where_they_say(level: Level, share: float) -> None:
    assert level_of(Reading(int(share * LIMIT), LIMIT)) is level
    assert level_of(Reading(int(share * LIMIT) - 1, LIMIT)) < level


def test_a_system_that_lacks_its_reserve_counts_as_pressure() -> None:
    levels = [level_of(Reading(0, LIMIT, available=n, reserve=100)) for n in (100, 99, 74, 49, 24)]
    assert levels == list(Level)


@dataclass
class Job:
    id: str
    arrived: float
    room: int  # tokens to make, a byte each; half a byte at 4 bits
    made: int = 0
    packed: bool = False
    preempted: bool = False
    cut: bool = False  # ended with what it had made, because nothing else could give way

    @property
    def nbytes(self) -> float:
        return self.made * (0.5 if self.packed else 1.0)


@dataclass
class Machine:
    """A machine of `LIMIT` bytes, whose freed bytes are counted until it is read afresh."""

    jobs: list[Job]
    cache: int
    governor: Governor = field(default_factory=Governor)
    running: list[Job] = field(default_factory=list)
    rubbish: float = 0
    peak: float = 0

    @property
    def active(self) -> int:
        return int(self.cache + self.rubbish + sum(job.nbytes for job in self.running))

    def turn(self) -> None:
        if self.jobs and (not self.governor.holding or not self.running):
            self.running.append(self.jobs.pop(0))
        for job in list(self.running):
            job.made = min(job.room, job.made + 2)
            if job.made == job.room:
                self.running.remove(job)
                self.rubbish += job.nbytes
        self.peak = max(self.peak, self.active)
        fresh = False
        for _ in range(MOST_ACTS):
            action = self.governor.decide(Reading(self.active, LIMIT, fresh), self.situation())
            if action is None:
                return
            fresh = self.done(action) or fresh
        raise AssertionError(f"the governor asks for {action} again and again at {self.active} of {LIMIT}")

    def situation(self) -> Situation:
        facts = [Candidate(j.id, j.arrived, not j.packed, j.preempted) for j in self.running]
        return Situation(facts, False, self.cache)

    def done(self, action: object) -> bool:
        before = self.active
        job = next((j for j in self.running if j.id == action.id), None)  # type: ignore[attr-defined]
        match action.act:  # type: ignore[attr-defined]
            case Act.REMEASURE:
                self.rubbish = 0
            case Act.EVICT:
                self.cache -= action.nbytes  # type: ignore[attr-defined]
            case Act.PACK_LIVE:
                job.packed = True
            case Act.PREEMPT:
                self.running.remove(job)
                job.made, job.preempted = 0, True
                self.jobs.append(job)
            case Act.END:
                self.running.remove(job)
                job.cut = True
        self.governor.freed(action.act, before - self.active)  # type: ignore[attr-defined]
        return action.act is Act.REMEASURE  # type: ignore[attr-defined]


MOST_ACTS = 200  # every one changes something, so there cannot be many in one turn


@settings(max_examples=200)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=12), st.integers(0, 700))
def test_every_job_that_fits_alone_finishes_and_memory_stays_under_the_limit(rooms: list[int], cache: int) -> None:
    jobs = [Job(str(i), i, room) for i, room in enumerate(rooms)]
    machine = Machine(list(jobs), cache)
    for _ in range(20_000):
        if not machine.jobs and not machine.running:
            break
        machine.turn()
    assert all(job.made == job.room or job.cut for job in jobs)
    assert not jobs[0].cut, "the oldest goes on"
    assert machine.peak <= LIMIT
