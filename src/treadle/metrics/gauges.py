"""What is read, not counted: the device, the cache and the running sequences, at one moment.

Made on the engine thread about once a second; immutable, so any thread may read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from treadle.metrics.snapshot import DeviceCard, PressureCard


@dataclass(frozen=True, slots=True)
class SequenceGauge:
    """Where one sequence stands. Prompt tokens with rows in the layers; those of them from the cache."""

    id: str
    stage: str  # waiting | prefill | decode
    computed: int
    cached: int


@dataclass(frozen=True, slots=True)
class CacheGauge:
    """The prefix cache. Its counts start anew when the cache does; `Growth` makes them go on."""

    used_bytes: int
    budget_bytes: int
    bits: int | None  # of prefixes that are not in use; None: exact
    hits: Mapping[str, int]
    evictions: Mapping[str, int]
    freed_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class MemoryGauge:
    """Bytes on the device."""

    limit: int
    active: int
    peak: int  # since MLX's counter was last reset
    spare: int  # freed buffers that MLX keeps


@dataclass(frozen=True, slots=True)
class Gauges:
    """All of it."""

    device: DeviceCard | None = None  # None until a model is loaded
    memory: MemoryGauge | None = None
    cache: CacheGauge | None = None  # None: off
    sequences: tuple[SequenceGauge, ...] = ()
    speculation: Mapping[str, Mapping[str, Any]] | None = None  # by model that did, loaded or not
    pressure: PressureCard | None = None
    traces: int = 0  # functions that MLX compiled since the start


@dataclass(slots=True)
class Growth:
    """By how much counts of something that may start anew have grown."""

    _last: dict[str, int] = field(default_factory=dict)

    def since_last(self, counts: Mapping[str, int]) -> dict[str, int]:
        """A count below its last value began again at 0."""
        grown = {key: n - self._last.get(key, 0) if n >= self._last.get(key, 0) else n for key, n in counts.items()}
        self._last = dict(counts)
        return grown
