"""How many requests one key or address may make: a token bucket each. Pure but for the clock handed in."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

MAX_BUCKETS = 4096


class RateLimit:
    """`per_minute` requests at once and `per_minute` each minute, for every name.

    At most `MAX_BUCKETS` names are remembered; the one that was quiet for longest is forgotten first.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._size = float(per_minute)
        self._per_second = per_minute / 60
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # name -> (left, at that time)

    def take(self, name: str) -> int:
        """0: the request may go on. Otherwise the whole seconds after which one more may."""
        now = self._clock()
        left, then = self._buckets.pop(name, (self._size, now))
        left = min(self._size, left + (now - then) * self._per_second)
        wait = 0 if left >= 1 else math.ceil((1 - left) / self._per_second)
        self._buckets[name] = (left if wait else left - 1, now)
        if len(self._buckets) > MAX_BUCKETS:
            self._buckets.popitem(last=False)
        return wait
