"""Whose turn it is when several models have work. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

LEAST_S = 0.001  # what a turn costs at least: one that only waits for memory must not come up again and again

T = TypeVar("T", bound=Hashable)


class Turns(Generic[T]):
    """Equal shares of the device's time, not of the turns: a long prefill of one model takes as much as many decode
    steps of another."""

    def __init__(self) -> None:
        self._had: dict[T, float] = {}  # seconds, of those that are busy

    def next(self, busy: Sequence[T]) -> T:
        """The one of `busy` (not empty) that had least so far. A newcomer starts level with the least of the others."""
        least = min((self._had[one] for one in busy if one in self._had), default=0.0)
        self._had = {one: self._had.get(one, least) for one in busy}
        return min(busy, key=self._had.__getitem__)

    def took(self, one: T, seconds: float) -> None:
        """`one`, which `next` gave, had a turn."""
        self._had[one] += max(seconds, LEAST_S)
