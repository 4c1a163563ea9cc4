"""A look at the device, the prefix cache and the sequences, for the metrics. Engine thread only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

import mlx.core as mx

from treadle.cache.store import Store
from treadle.engine.loop import Loop
from treadle.engine.pressure import Pressure
from treadle.metrics.gauges import CacheGauge, Gauges, MemoryGauge, SequenceGauge
from treadle.metrics.snapshot import DeviceCard
from treadle.models.blocks import Traces
from treadle.runtime import DeviceFacts, device_facts
from treadle.speculate.telemetry import SpeculationCounters


def observe(
    limit: int,
    store: Store | None,
    loops: Sequence[Loop],
    pressure: Pressure,
    speculation: Mapping[str, SpeculationCounters],
) -> Gauges:
    """Everything that is read and not counted, now. `limit` is the memory limit in bytes; `speculation` by model."""
    device = facts()
    return Gauges(
        device=DeviceCard(device.name, device.backend, device.memory_bytes, device.versions),
        memory=MemoryGauge(limit, mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory()),
        pressure=pressure.gauge(),
        cache=None if store is None else cache_gauge(store),
        sequences=tuple(
            SequenceGauge(
                sequence.id,
                sequence.stage.value,
                min(sequence.computed, sequence.num_prompt),  # of a reply's tokens none stand for tokens left out
                sequence.cached,
            )
            for loop in loops
            for sequence in loop.sequences()
        ),
        traces=Traces.count,
        speculation={name: one.snapshot() for name, one in speculation.items()} or None,
    )


@cache
def facts() -> DeviceFacts:
    """Those of the device, asked for once: it takes milliseconds."""
    return device_facts()


def cache_gauge(store: Store) -> CacheGauge:
    """Counts and bytes of the cache; nothing that takes a walk over it."""
    return CacheGauge(
        used_bytes=store.tree.totals.nbytes,
        budget_bytes=store.settings.budget.nbytes,
        bits=store.settings.bits or None,
        hits={str(kind): n for kind, n in store.tree.kinds.items()},
        evictions={str(reason): n for reason, n in store.evictions.counts.items()},
        freed_bytes={str(reason): n for reason, n in store.evictions.freed.items()},
    )
