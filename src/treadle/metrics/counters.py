"""Everything that is counted, in one dataclass: these only go up while the process lives."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field

from treadle.types import Finish

TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
INTER_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
QUEUE_S = (0.001, 0.01, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
PROMPT_TOKENS = (16.0, 64.0, 256.0, 1024.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0, 262144.0)


@dataclass(slots=True)
class Histogram:
    """Counts of values up to each of `bounds` (ascending), and of those above the last."""

    bounds: tuple[float, ...]
    total: float = 0.0  # sum of all values
    counts: list[int] = field(default_factory=list)  # one more than bounds, not cumulative

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """(upper bound, values at or below it) for each bucket, the last one for all: `+Inf`."""
        rows, so_far = [], 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            so_far += count
            rows.append((bound, so_far))
        return rows


@dataclass(slots=True)
class ModelCounters:
    """What one model was asked and did."""

    submitted: int = 0
    finished: dict[str, int] = field(default_factory=lambda: {finish.value: 0 for finish in Finish})
    cached_tokens: int = 0  # prompt tokens that were not computed
    computed_tokens: int = 0  # prompt tokens that were
    generated_tokens: int = 0
    sparse_prompts: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # by whether it was engaged
    skipped_tokens: int = 0  # prompt tokens that were left out
    skim_s: float = 0.0  # in which small models read prompts
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_S))
    inter_token: Histogram = field(default_factory=lambda: Histogram(INTER_TOKEN_S))
    queue: Histogram = field(default_factory=lambda: Histogram(QUEUE_S))
    prompt: Histogram = field(default_factory=lambda: Histogram(PROMPT_TOKENS))


@dataclass(slots=True)
class Counters:
    """Of the process. Labels are bounded: models that were served, routes of the application, reasons."""

    models: dict[str, ModelCounters] = field(default_factory=dict)
    turns: int = 0  # of the loop
    turn_s: float = 0.0  # time in them
    faults: int = 0  # of the engine itself, which end everything that runs
    disconnects: int = 0  # clients that left before their answer ended
    responses: Counter[tuple[str, int]] = field(default_factory=Counter)  # by (route, status)
    cache_hits: Counter[str] = field(default_factory=Counter)  # by kind
    cache_evictions: Counter[str] = field(default_factory=Counter)  # by reason
    cache_freed: Counter[str] = field(default_factory=Counter)  # bytes by reason

    def of(self, model: str) -> ModelCounters:
        found = self.models.get(model)
        if found is None:
            found = self.models[model] = ModelCounters()
        return found
