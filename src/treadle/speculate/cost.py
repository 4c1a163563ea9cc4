"""What a step costs by the number of tokens in it, as measured. No MLX, no clock.

Nothing says that more tokens cost more: with 4-bit weights on some devices 8 tokens are cheaper than 2 to 7. Plain
steps are kept apart from verify steps, because they overlap host and device (look-ahead) and verify steps do not.

Every step also reads the context of its rows, verify and plain alike. So there is one table for each doubling of that
context (`at`). What a longer one has not measured yet is taken from a shorter one, plus what plain steps became dearer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from statistics import median
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

MOST_WIDTH = 16  # a step is padded to a cheaper size at most up to this many tokens per row
SHORT = 2048  # tokens of context that cost about nothing
RECENT = 7  # observations per point; their median counts, so that three outliers do no harm
OLD = 400  # observations of others after which those of a point are forgotten at the next one
PLAIN_AGE = 200  # observed steps after which a plain one is due
FIRST_AGE = 16  # and after the very first
_FIRST = 1.5  # the first step of a size may build kernels: it does not count if it is so much dearer than the guess
_UNSURE = 1.1  # in a choice of sizes, one that was not measured counts as so much dearer than the guess
LASTS = 16  # observations for which a rough question is not asked anew, however the table changes
_NOTICED = 0.02  # smaller changes of a median are noise and change nothing: to decide anew costs the host time


@dataclass(frozen=True, slots=True)
class Step:
    """A step that has room for some number of tokens per row: its width after padding, and its seconds."""

    width: int
    seconds: float


class CostTable:
    """Seconds of one step, by the number of tokens in it (rows x width).

    This is the table for short contexts. `widths`: tokens per row to which steps are padded, because steps of other
    widths are dearer than their number of tokens tells; none: any width is as good. `shorter` is the next one down,
    for those tables that `at` makes.
    """

    def __init__(self, widths: Collection[int] = (), shorter: CostTable | None = None) -> None:
        self._widths = frozenset(widths)
        self._shorter = shorter
        self._longer: CostTable | None = None
        self._verify = _Curve()
        self._plain = _Curve()
        self._begun: set[int] = set()  # sizes whose first step is over
        self._time = 0  # observations
        self._changes = 0
        self._memo: dict[Hashable, Any] = {}
        self._memo_version = 0
        self._lasting: dict[Hashable, _Answer] = {}

    @classmethod
    def of(cls, verify: Mapping[int, float], plain: Mapping[int, float], widths: Collection[int] = ()) -> CostTable:
        """A table that begins with what `observed` gave: seconds of verify steps by tokens, of plain ones by rows."""
        table = cls(widths)
        for num_tokens, seconds in verify.items():
            table.observe(num_tokens, seconds, warm=True)
        for rows, seconds in plain.items():
            table.observe_plain(rows, seconds)
        return table

    def observed(self) -> tuple[dict[int, float], dict[int, float]]:
        """Seconds of verify steps by tokens, and of plain ones by rows, at short contexts."""
        return self._verify.values(), self._plain.values()

    def at(self, context: int) -> CostTable:
        """The table for steps whose rows have `context` tokens behind them, all together."""
        table = self
        for _ in range((context // SHORT).bit_length()):
            table._longer = table = table._longer or CostTable(self._widths, table)
        return table

    def unpadded(self) -> CostTable:
        """A table that begins with the same prices, for steps of any width."""
        found = deepcopy(self)
        table: CostTable | None = found
        while table is not None:
            table._widths = frozenset()
            table._memo.clear()
            table._lasting.clear()
            table = table._longer
        return found

    def observe(self, num_tokens: int, seconds: float, *, warm: bool = False) -> None:
        """One verify step over `num_tokens` tokens, padding included. Raises ValueError unless both are positive.

        `warm`: it is known not to be the first of its size on this device.
        """
        self._time += 1
        if not warm and num_tokens not in self._begun and not self.known(num_tokens):
            self._begun.add(num_tokens)
            guess = self.seconds(num_tokens)
            if guess is not None and seconds > guess * _FIRST:
                return
        self._changes += self._verify.observe(num_tokens, seconds, self._time)

    def observe_plain(self, rows: int, seconds: float) -> None:
        """One plain step of `rows` rows, from token to token. Raises ValueError unless both are positive."""
        self._time += 1
        self._changes += self._plain.observe(rows, seconds, self._time)

    def known(self, num_tokens: int) -> bool:
        """Whether verify steps of just this size were observed."""
        return num_tokens in self._verify.points

    def plain_due(self, rows: int) -> bool:
        """Whether a plain step of so many rows should be observed again: at first soon, then less often."""
        point = self._plain.points.get(rows)
        if point is None:
            return self._time > PLAIN_AGE
        return self._time - point.last > min(PLAIN_AGE, FIRST_AGE * len(point.recent) ** 2)

    def seconds(self, num_tokens: int) -> float | None:
        """Seconds of a verify step; interpolated between observed sizes, and by the last slope beyond the largest."""
        guess = None if self._shorter is None else self._shorter.seconds(num_tokens)
        if guess is None or self.known(num_tokens):
            return self._verify.at(num_tokens)
        return guess + self._dearer(num_tokens)

    def plain(self, rows: int) -> float | None:
        """Seconds of a plain step; interpolated, and None for fewer or more rows than were ever observed."""
        return self._plain.at(rows) if self._plain.spans(rows) else None

    def cheapest_width(self, rows: int, wanted: int, limit: int) -> int:
        """The width from `wanted` to `limit` whose step is cheapest, the smallest of equals.

        Of those that are usual, if there are any; the first of them if no price is known.
        Sizes that were observed are preferred to such that are a guess.
        """
        return self.memo(("width", rows, wanted, limit), lambda: self._cheapest(rows, wanted, limit))

    def _cheapest(self, rows: int, wanted: int, limit: int) -> int:
        widths = [width for width in range(wanted, limit + 1) if self._usual(width)] or [wanted]
        best, least = widths[0], self._price(rows * widths[0])
        for width in widths[1:]:
            seconds = self._price(rows * width)
            if least is not None and seconds is not None and seconds < least:
                best, least = width, seconds
        return best

    def steps(self, rows: int, limit: int, padded: bool = True) -> tuple[Step, ...]:
        """For widths 1 to `limit`, at index width - 1: the cheapest step with that room, or, if it may not be `padded`,
        the step of just that width. Empty while unknown.

        The seconds of a size that was not observed are on the safe side.
        """
        return self.memo(("steps", rows, limit, padded), lambda: self._build(rows, limit, padded))

    def memo(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, remembered until the table changes."""
        if self._memo_version != self._version:
            self._memo.clear()
            self._memo_version = self._version
        found: T | None = self._memo.get(key)
        if found is None:
            found = self._memo[key] = make()
        return found

    def rough(self, key: Hashable, make: Callable[[], bool]) -> bool:
        """What `make` returns, remembered for LASTS observations at least: on a busy host medians move all the time."""
        found = self._lasting.get(key)
        if found is None or (found.version != self._version and self._time - found.time >= LASTS):
            found = self._lasting[key] = _Answer(make(), self._version, self._time)
        return found.value

    @property
    def _version(self) -> int:
        return self._changes + (self._shorter._version if self._shorter is not None else 0)

    def _dearer(self, num_tokens: int) -> float:
        """How much longer a step takes with this context than with a shorter one.

        By the steps that both know, plain ones of fewer tokens among them: on some devices a context costs every step
        the same, on others each token in it.
        """
        sizes, more = self.memo("dearer", self._differences)
        return float(np.interp(num_tokens, sizes, more)) if sizes else 0.0

    def _differences(self) -> tuple[list[int], list[float]]:
        shorter = self._shorter
        found: dict[int, float] = {}
        if shorter is not None:
            plain = {rows: (value, shorter._plain_step(rows)) for rows, value in self._plain.values().items()}
            found = {rows: max(0.0, value - before) for rows, (value, before) in plain.items() if before is not None}
            for size, value in self._verify.values().items():
                found[size] = max(0.0, value - (shorter.seconds(size) or 0.0))
        sizes = sorted(found)
        return sizes, [found[size] for size in sizes]

    def _plain_step(self, rows: int) -> float | None:
        """Of this context or a shorter one; if none was measured, a verify step without drafts stands for it."""
        found = self.plain(rows)
        if found is None and self._shorter is not None:
            return self._shorter._plain_step(rows)
        return self.seconds(rows) if found is None else found

    def _price(self, num_tokens: int) -> float | None:
        seconds = self.seconds(num_tokens)
        return seconds if seconds is None or self.known(num_tokens) else seconds * _UNSURE

    def _build(self, rows: int, limit: int, padded: bool) -> tuple[Step, ...]:
        steps: list[Step] = []
        for width in range(limit, 0, -1):
            seconds = self._price(rows * width)
            if seconds is None:
                return ()
            step = Step(width, seconds)
            if steps and padded:
                step = min(step, steps[-1], key=lambda s: s.seconds) if self._usual(width) else steps[-1]
            steps.append(step)
        return tuple(reversed(steps))

    def _usual(self, width: int) -> bool:
        return not self._widths or width in self._widths


@dataclass(frozen=True, slots=True)
class _Answer:
    value: bool
    version: int  # of the table
    time: int  # in observations


@dataclass(slots=True)
class _Point:
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    value: float = 0.0
    last: int = 0  # when it was observed

    def observe(self, seconds: float, now: int) -> bool:
        if now - self.last > OLD:
            self.recent.clear()
        self.last = now
        self.recent.append(seconds)
        middle = median(self.recent) if len(self.recent) > 2 else min(self.recent)
        if abs(middle - self.value) <= _NOTICED * self.value:
            return False
        self.value = middle
        return True


class _Curve:
    """Medians at the sizes that were observed, and a guess between them."""

    def __init__(self) -> None:
        self.points: dict[int, _Point] = {}
        self._sizes: list[int] = []

    def observe(self, size: int, seconds: float, now: int) -> bool:
        """Whether the curve has changed."""
        if size < 1 or not seconds > 0:
            raise ValueError(f"a step has tokens and takes time, not {size} tokens and {seconds} s")
        point = self.points.get(size)
        if point is None:
            point = self.points[size] = _Point()
            self._sizes = sorted(self.points)
        return point.observe(seconds, now)

    def spans(self, size: int) -> bool:
        return bool(self._sizes) and self._sizes[0] <= size <= self._sizes[-1]

    def values(self) -> dict[int, float]:
        return {size: self.points[size].value for size in self._sizes}

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
            return self._beyond(low, size)
        high = self._sizes[above]
        share = (size - low) / (high - low)
        return self.points[low].value * (1 - share) + self.points[high].value * share

    def _beyond(self, last: int, size: int) -> float:
        """In proportion to the largest alone; as steep as before where there are others, never falling."""
        value = self.points[last].value
        if len(self._sizes) == 1:
            return value * size / last
        slopes = [(value - self.points[n].value) / (last - n) for n in (self._sizes[0], self._sizes[-2])]
        return value + (size - last) * min(max(0.0, *slopes), value / last)
