"""What to do when memory runs short: readings in, actions out. Pure; the loop carries the actions out.

    below 80 %  CALM       nothing; admission goes on again below 82 %, so that it does not flutter
    from 80 %   PACK       idle prefixes, then running sequences, go to 4 bits
    from 85 %   EVICT      the prefix cache gives way
    from 90 %   HOLD       nobody is admitted
    from 95 %   PREEMPT    the youngest gives way: its prefix is kept and it waits again; once where a reply has begun

of the memory that there may be beside the weights, or as much as the system lacks of its reserve. Each level includes
those below it. One action that costs time is asked for at a time, cheapest first; what it freed is seen in the next
reading. Readings lag (freed buffers are counted until they are given back), so nobody is held or preempted before a
fresh one was taken.
The oldest sequence is never preempted: whatever happens, somebody finishes. At 98 % with nothing else left to do, the
youngest reply ends where it is, as at its own limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum

SYSTEM_S = 1.0  # how often the system's memory is read


class Level(IntEnum):
    CALM = 0
    PACK = 1
    EVICT = 2
    HOLD = 3
    PREEMPT = 4


SHARES = {Level.PACK: 0.80, Level.EVICT: 0.85, Level.HOLD: 0.90, Level.PREEMPT: 0.95}  # of the limit
RESERVES = {Level.PACK: 1.0, Level.EVICT: 0.75, Level.HOLD: 0.5, Level.PREEMPT: 0.25}  # of the system's, that are left
LAST = 0.98  # of the limit
ADMIT_AGAIN = 0.82  # below HOLD, so that admission does not flutter


class Act(Enum):
    """What the loop is to do."""

    REMEASURE = "remeasure"  # give freed buffers back, then read again
    PACK_IDLE = "pack_idle"  # one idle prefix to fewer bits
    PACK_LIVE = "pack_live"  # the rows of one running sequence to fewer bits
    EVICT = "evict"  # let the prefix cache free `nbytes`
    HOLD = "hold"  # stop admission
    ADMIT = "admit"  # let it go on
    PREEMPT = "preempt"  # end the work on a sequence and put it back into the queue
    END = "end"  # end a reply where it is: the limit is reached, and nothing else is left to do


@dataclass(frozen=True, slots=True)
class Reading:
    """Bytes. `fresh`: taken after freed buffers were given back. `available`: what the system has left."""

    active: int
    limit: int
    fresh: bool = False
    available: int | None = None  # None: the device's memory is not the system's
    reserve: int = 0  # that the system is to keep


@dataclass(frozen=True, slots=True)
class Candidate:
    """A running sequence: `packable` where its rows have more bits than they may have."""

    id: str
    arrived: float
    packable: bool = False
    preempted: bool = False  # already, and may not be again


@dataclass(frozen=True, slots=True)
class Situation:
    """What could be done. `cached` is what the prefix cache would free if it gave way altogether, in bytes."""

    running: Sequence[Candidate] = ()
    idle_packable: bool = False
    cached: int = 0


@dataclass(frozen=True, slots=True)
class Action:
    act: Act
    id: str = ""  # of the sequence
    nbytes: int = 0  # to free


@dataclass(slots=True)
class Counts:
    """For the metrics: how often each level was entered, what was done, and bytes it freed."""

    entered: Counter[Level] = field(default_factory=Counter)
    done: Counter[Act] = field(default_factory=Counter)
    freed: Counter[Act] = field(default_factory=Counter)


class Governor:
    """`decide` after each step; `freed` when an action was carried out."""

    def __init__(self) -> None:
        self.level = Level.CALM
        self.holding = False  # admission has stopped
        self.counts = Counts()

    def decide(self, reading: Reading, now: Situation) -> Action | None:
        """The next thing to do, or None."""
        level = level_of(reading)
        if level >= Level.HOLD and not reading.fresh and not self._spare(level, now):
            return self._counted(Action(Act.REMEASURE))
        if level is not self.level:
            self.level = level
            self.counts.entered[level] += 1
        action = self._action(level, reading, now)
        return None if action is None else self._counted(action)

    def freed(self, act: Act, nbytes: int) -> None:
        self.counts.freed[act] += max(nbytes, 0)

    def _spare(self, level: Level, now: Situation) -> bool:
        """Whether something cheaper than holding is still to be done; it needs no fresh reading."""
        return now.cached > 0 or now.idle_packable or any(one.packable for one in now.running)

    def _action(self, level: Level, reading: Reading, now: Situation) -> Action | None:
        if level >= Level.HOLD and reading.fresh and not self.holding:
            self.holding = True
            return Action(Act.HOLD)
        if self.holding and level <= Level.PACK and reading.active < ADMIT_AGAIN * reading.limit:
            self.holding = False
            return Action(Act.ADMIT)
        if level >= Level.EVICT and now.cached:
            return Action(Act.EVICT, nbytes=min(now.cached, max(1, excess(reading))))
        if level >= Level.PACK and now.idle_packable:
            return Action(Act.PACK_IDLE)
        if level >= Level.PACK and (packable := [one for one in now.running if one.packable]):
            return Action(Act.PACK_LIVE, _youngest(packable).id)
        if level is Level.PREEMPT and reading.fresh:
            return self._preemption(now) or self._ending(reading, now)
        return None

    def _ending(self, reading: Reading, now: Situation) -> Action | None:
        """The youngest, where it has to be: all have waited again already, or it is alone."""
        if reading.active < LAST * reading.limit or not now.running:
            return None
        return Action(Act.END, _youngest(now.running).id)

    def _preemption(self, now: Situation) -> Action | None:
        """The youngest that was not preempted yet, never the oldest."""
        if len(now.running) < 2:
            return None
        oldest = min(now.running, key=lambda one: one.arrived)
        found = [one for one in now.running if not one.preempted and one is not oldest]
        return Action(Act.PREEMPT, _youngest(found).id) if found else None

    def _counted(self, action: Action) -> Action:
        self.counts.done[action.act] += 1
        return action


def level_of(reading: Reading) -> Level:
    """The highest level that the device's or the system's memory has reached."""
    share = reading.active / reading.limit
    reached = [level for level, least in SHARES.items() if share >= least]
    if reading.available is not None and reading.reserve > 0:
        left = reading.available / reading.reserve
        reached += [level for level, most in RESERVES.items() if left < most]
    return max(reached, default=Level.CALM)


def excess(reading: Reading) -> int:
    """Bytes to free so that only the lowest level is left."""
    over = reading.active - int(SHARES[Level.PACK] * reading.limit)
    lacking = 0 if reading.available is None else reading.reserve - reading.available
    return max(over, lacking, 0)


def _youngest(running: Sequence[Candidate]) -> Candidate:
    return max(running, key=lambda one: one.arrived)
