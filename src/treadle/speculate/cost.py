"""What a step costs by the number of tokens in it, as measured. No MLX, no clock.

Nothing says that more tokens cost more: with 4-bit weights on some devices 8 tokens are cheaper than 2 to 7. Plain
steps are kept apart from verify steps, because they overlap host and device (look-ahead) and verify steps do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from statistics import median

MOST_WIDTH = 16  # a step is padded to a cheaper size at most up to this many tokens per row
RECENT = 7  # observations per point; their median counts, so that three outliers do no harm
_UNSURE = 1.1  # in a choice of sizes, one that was not measured counts as so much dearer than the guess
_NOTICED = 0.01  # smaller changes of a median are noise and change nothing


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has room for some number of tokens per row: its width after padding, and its seconds."""

    width: int
    seconds: float


class CostTable:
    """Seconds of one step, by the number of tokens in it (rows x width)."""

    def __init__(self) -> None:
        self._verify = _Curve()
        self._plain = _Curve()
        self._steps: dict[tuple[int, int], tuple[Step, ...]] = {}

    def observe(self, num_tokens: int, seconds: float) -> None:
        """One verify step over `num_tokens` tokens, padding included. Raises ValueError unless both are positive."""
        if self._verify.observe(num_tokens, seconds):
            self._steps.clear()

    def observe_plain(self, rows: int, seconds: float) -> None:
        """One plain step of `rows` rows, from token to token. Raises ValueError unless both are positive."""
        self._plain.observe(rows, seconds)

    def known(self, num_tokens: int) -> bool:
        """Whether verify steps of just this size were observed."""
        return num_tokens in self._verify.points

    def known_plain(self, rows: int) -> bool:
        """Whether plain steps of just so many rows were observed."""
        return rows in self._plain.points

    def seconds(self, num_tokens: int) -> float | None:
        """Seconds of a verify step; interpolated between observed sizes, in proportion beyond the largest."""
        return self._verify.at(num_tokens)

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step; interpolated, and None for fewer or more rows than were ever observed."""
        return self._plain.at(rows) if self._plain.spans(rows) else None

    def cheapest_width(self, rows: int, wanted: int, limit: int) -> int:
        """The width from `wanted` to `limit` whose step is cheapest, the smallest of equals; `wanted` if unknown.

        Sizes that were observed are preferred to such that are a guess.
        """
        best, least = wanted, self._price(rows * wanted)
        for width in range(wanted + 1, limit + 1):
            seconds = self._price(rows * width)
            if least is not None and seconds is not None and seconds < least:
                best, least = width, seconds
        return best

    def steps(self, rows: int, limit: int) -> tuple[Step, ...]:
        """For widths 1 to `limit`, at index width - 1: the cheapest step with that room. Empty while unknown.

        The seconds of a size that was not observed are on the safe side.
        """
        found = self._steps.get((rows, limit))
        if found is None:
            found = self._steps[rows, limit] = self._build(rows, limit)
        return found

    def _price(self, num_tokens: int) -> float | None:
        seconds = self.seconds(num_tokens)
        return seconds if seconds is None or self.known(num_tokens) else seconds * _UNSURE

    def _build(self, rows: int, limit: int) -> tuple[Step, ...]:
        steps: list[Step] = []
        for width in range(limit, 0, -1):
            seconds = self._price(rows * width)
            if seconds is None:
                return ()
            step = Step(width, seconds)
            steps.append(min(step, steps[-1], key=lambda s: s.seconds) if steps else step)
        return tuple(reversed(steps))


@dataclass(slots=True)
class _Point:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    value: float = 0.0

    def observe(self, seconds: float) -> bool:
        self.recent.append(seconds)
        now = median(self.recent)
        if abs(now - self.value) <= _NOTICED * self.value:
            return False
        self.value = now
        return True


class _Curve:
    """Medians at the sizes that were observed, and a guess between them."""

    def __init__(self) -> None:
        self.points: dict[int, _Point] = {}
        self._sizes: list[int] = []

    def observe(self, size: int, seconds: float) -> bool:
        """Whether the curve has changed."""
        if size < 1 or not seconds > 0:
            raise ValueError(f"a step has tokens and takes time, not {size} tokens and {seconds} s")
        point = self.points.get(size)
        if point is None:
            point = self.points[size] = _Point()
            self._sizes = sorted(self.points)
        return point.observe(seconds)

    def spans(self, size: int) -> bool:
        return bool(self._sizes) and self._sizes[0] <= size <= self._sizes[-1]

    def at(self, size: int) -> float | None:
        if size in self.points:
            return self.points[size].value
        if not self._sizes:
            return None
        above = bisect_left(self._sizes, size)
        if above == 0:
            return self.points[self._sizes[0]].value
        low = self._sizes[above - 1]
        if above == len(self._sizes):
            return self.points[low].value * size / low
        high = self._sizes[above]
        share = (size - low) / (high - low)
        return self.points[low].value * (1 - share) + self.points[high].value * share
