"""How much the prefix cache may hold, and what goes first. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

from treadle.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
SHARE = 0.2  # of the device's recommended working set
LEAST_BYTES = 256 * MIB
MOST_BYTES = 8 * GIB


def default_bytes(working_set: int) -> int:
    """The budget in bytes for a device whose recommended working set is `working_set` bytes."""
    return min(max(int(working_set * SHARE), LEAST_BYTES), MOST_BYTES)


@dataclass(frozen=True, slots=True)
class Budget:
    """The limits of the cache. Bytes, seconds, and a share of the memory limit."""

    nbytes: int
    idle_s: float = 30 * 60.0  # what was not used for longer goes
    pressure: float = 0.85  # above this share of the memory limit, the cache gives way

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            raise ConfigError(f"The cache budget must not be negative, not {self.nbytes}.", param="nbytes")
        if self.idle_s <= 0:
            raise ConfigError(f"idle_s must be positive, not {self.idle_s}.", param="idle_s")
        if not 0 < self.pressure <= 1:
            raise ConfigError(f"pressure must lie in (0, 1], not {self.pressure}.", param="pressure")


class Reason(StrEnum):
    """Why something was evicted."""

    IDLE = "idle"
    BUDGET = "budget"
    PRESSURE = "pressure"
    UNLOAD = "unload"  # its model is gone


class Evictable(Protocol):
    """What a plan needs to know of a node."""

    @property
    def nbytes(self) -> int: ...
    @property
    def last_used(self) -> float: ...
    @property
    def pins(self) -> int: ...


E = TypeVar("E", bound=Evictable)


@dataclass(frozen=True, slots=True)
class Victim(Generic[E]):
    """One thing to remove, and why."""

    node: E
    reason: Reason


def plan_eviction(
    candidates: Iterable[E], budget: Budget, *, used: int, now: float, active_memory: int, limit: int
) -> list[Victim[E]]:
    """What to remove, in order, so that the cache keeps to its budget and its device has air.

    `candidates` come least recently used first (`Tree.evict_order`, which also guarantees that the plan can
    be carried out in its order); no more of them are read than needed. `used` is what the cache holds,
    `active_memory` what the device counts, `limit` its memory limit, all in bytes; `now` in the clock of
    `last_used`.
    Pinned candidates are never chosen. A plan may end above the budget if everything else is pinned.
    """
    plan: list[Victim[E]] = []
    threshold = budget.pressure * limit
    for node in candidates:
        if node.pins:
            continue
        if now - node.last_used > budget.idle_s:
            reason = Reason.IDLE
        elif used > budget.nbytes:
            reason = Reason.BUDGET
        elif active_memory > threshold:
            reason = Reason.PRESSURE
        else:
            break
        plan.append(Victim(node, reason))
        used -= node.nbytes
        active_memory -= node.nbytes
    return plan


@dataclass(slots=True)
class Evictions:
    """What went so far, by reason."""

    counts: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))
    freed: dict[Reason, int] = field(default_factory=lambda: dict.fromkeys(Reason, 0))  # bytes

    def record(self, reason: Reason, nbytes: int) -> None:
        self.counts[reason] += 1
        self.freed[reason] += nbytes
