"""From the recorder and what the engine says of itself to the one snapshot that every reader gets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from treadle import __version__
from treadle.metrics.counters import Counters
from treadle.metrics.gauges import Gauges
from treadle.metrics.recorder import Recorder
from treadle.metrics.snapshot import (
    CacheCard,
    MemoryCard,
    ModelFacts,
    ServedModel,
    ServerCard,
    Stats,
    TokenTotals,
    Totals,
)
from treadle.types import HIT_KINDS


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the engine says of itself."""

    state: str
    failure: str | None
    running: int
    waiting: int
    models: Sequence[ModelFacts] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """Everything that has one value now; what `/metrics` tells, and `/v1/stats` besides lists and histories."""

    counters: Counters
    gauges: Gauges
    engine: EngineFacts
    peak_bytes: int
    started: float


def reading(recorder: Recorder, engine: EngineFacts) -> Reading:
    return Reading(recorder.counters(), recorder.gauges, engine, recorder.peak_bytes, recorder.started)


def stats(recorder: Recorder, engine: EngineFacts, since: float = 0.0) -> Stats:
    """The snapshot; of history and finished requests only what came after `since` (Unix seconds)."""
    read = reading(recorder, engine)
    return Stats(
        now=recorder.now,
        server=ServerCard(__version__, engine.state, engine.failure, recorder.started, round(recorder.uptime_s, 3)),
        device=read.gauges.device,
        models=[_model(facts, read.counters) for facts in engine.models],
        running=engine.running,
        waiting=engine.waiting,
        memory=_memory(read),
        pressure=read.gauges.pressure,
        cache=_cache(read),
        speculation=read.gauges.speculation,
        traces=read.gauges.traces,
        totals=_totals(read.counters),
        latency=recorder.latency(),
        live=recorder.live(),
        finished=recorder.finished(since),
        history=recorder.history(since),
    )


def _model(facts: ModelFacts, counters: Counters) -> ServedModel:
    known = {field.name: getattr(facts, field.name) for field in fields(ModelFacts)}
    counted = counters.models.get(facts.id)
    if counted is None:
        return ServedModel(**known)
    return ServedModel(**known, requests=sum(counted.finished.values()), tokens=counted.generated_tokens)


def _memory(read: Reading) -> MemoryCard | None:
    memory = read.gauges.memory
    return None if memory is None else MemoryCard(memory.limit, memory.active, read.peak_bytes, memory.spare)


def _cache(read: Reading) -> CacheCard | None:
    cache, counters = read.gauges.cache, read.counters
    if cache is None:
        return None
    return CacheCard(
        bits=cache.bits,
        budget_bytes=cache.budget_bytes,
        used_bytes=cache.used_bytes,
        hits=dict.fromkeys(HIT_KINDS, 0) | counters.cache_hits,
        evictions=dict(counters.cache_evictions),
        freed_bytes=dict(counters.cache_freed),
    )


def _totals(counters: Counters) -> Totals:
    models = counters.models.values()
    finished: Counter[str] = Counter()
    for model in models:
        finished.update(model.finished)
    statuses: Counter[str] = Counter()
    for (_, status), count in counters.responses.items():
        statuses[str(status)] += count
    cached, computed = sum(m.cached_tokens for m in models), sum(m.computed_tokens for m in models)
    return Totals(
        submitted=sum(m.submitted for m in models),
        finished=dict(finished),
        tokens=TokenTotals(
            prompt=cached + computed,
            cached=cached,
            computed=computed,
            generated=sum(m.generated_tokens for m in models),
            drafted=sum(m.drafted_tokens for m in models),
            accepted=sum(m.accepted_tokens for m in models),
        ),
        disconnects=counters.disconnects,
        faults=counters.faults,
        responses=dict(statuses),
    )
