"""What was measured second by second, for a while. Pure: the caller says when a second is over."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from treadle.metrics.snapshot import SERIES, HistoryPart, Quantiles

LENGTH = 900  # seconds
MOST_VALUES = 10_000


def _values() -> deque[float]:
    return deque(maxlen=MOST_VALUES)


@dataclass(slots=True)
class Second:
    """What happened since the last point."""

    ttfts: deque[float] = field(default_factory=_values)
    gaps: deque[float] = field(default_factory=_values)  # between tokens
    generated: int = 0
    cached_tokens: int = 0  # of prompts
    computed_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    vision_s: float = 0.0  # of the image encoder
    steps: int = 0  # turns in which somebody got tokens
    rows: int = 0  # sequences that did, over all of those

    def point(self, elapsed: float) -> dict[str, float | None]:
        """The series that come from it, after so many seconds."""
        prompt = self.cached_tokens + self.computed_tokens
        return {
            "batch": self.rows / self.steps if self.steps else None,
            "ttft_s": quantile(self.ttfts, 0.5),
            "inter_token_p50_s": quantile(self.gaps, 0.5),
            "inter_token_p95_s": quantile(self.gaps, 0.95),
            "prefill_tokens_per_s": self.computed_tokens / elapsed,
            "decode_tokens_per_s": self.generated / elapsed,
            "cached_share": self.cached_tokens / prompt if prompt else None,
            "acceptance": self.accepted_tokens / self.drafted_tokens if self.drafted_tokens else None,
            "vision_s": self.vision_s / elapsed if self.vision_s else None,
        }


class History:
    """The last `length` points, each a time and a value for every name of `SERIES`."""

    def __init__(self, length: int = LENGTH) -> None:
        self._points: deque[tuple[float, tuple[float | None, ...]]] = deque(maxlen=length)

    def add(self, time: float, point: Mapping[str, float | None]) -> None:
        """Raises KeyError unless `point` has every series."""
        self._points.append((time, tuple(rounded(point[name]) for name in SERIES)))

    def part(self, since: float = 0.0) -> HistoryPart:
        """The points after `since`, oldest first."""
        points = [point for point in self._points if point[0] > since]
        columns = zip(*(values for _, values in points), strict=True) if points else ((),) * len(SERIES)
        series = {name: list(column) for name, column in zip(SERIES, columns, strict=True)}
        return HistoryPart([time for time, _ in points], series)

    @property
    def newest(self) -> dict[str, float | None]:
        """The last point; empty before the first."""
        return dict(zip(SERIES, self._points[-1][1], strict=True)) if self._points else {}


class Recent:
    """Values of the last `LENGTH` seconds, at most `MOST_VALUES`."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=MOST_VALUES)

    def add(self, now: float, value: float) -> None:
        self._values.append((now, value))

    def quantiles(self, now: float) -> Quantiles:
        while self._values and now - self._values[0][0] > LENGTH:
            self._values.popleft()
        if not self._values:
            return Quantiles()
        p50, p95, p99 = np.quantile([value for _, value in self._values], (0.5, 0.95, 0.99)).tolist()
        return Quantiles(round(p50, 6), round(p95, 6), round(p99, 6), len(self._values))


def quantile(values: Collection[float], q: float) -> float | None:
    return float(np.quantile(list(values), q)) if values else None


def rounded(value: float | None) -> float | None:
    """Six significant figures are enough to draw, and a third of the bytes."""
    return None if value is None else float(f"{value:.6g}")
