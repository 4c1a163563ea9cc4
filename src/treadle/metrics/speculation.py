"""What speculation did, for Prometheus: by model, from the snapshots of their counters, which go on after an unload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

Snapshots = Mapping[str, Mapping[str, Any]]
BY_SOURCE = {
    "drafted": "Drafts that were judged, by where they came from.",
    "accepted": "Of those, what the model drew too.",
}
COUNTED = {
    "rounds": "Steps with drafts.",
    "rewinds": "Rows that took refused drafts back.",
    "cooldowns": "Times that a source stopped because it did not pay.",
    "ties": "Lines that were too close to call and were left to a plain step.",
}


def speculation(snapshots: Snapshots) -> Iterator[Metric]:
    """The metrics of all models that speculate."""
    for name, about in BY_SOURCE.items():
        family = CounterMetricFamily(f"treadle_speculation_{name}_tokens", about, labels=("model", "source"))
        for model, found in snapshots.items():
            for source, count in found[name].items():
                family.add_metric((model, source), count)
        yield family
    for name, about in COUNTED.items():
        family = CounterMetricFamily(f"treadle_speculation_{name}", about, labels=("model",))
        for model, found in snapshots.items():
            family.add_metric((model,), found[name])
        yield family
    yield _lengths(snapshots)
    yield _speed_up(snapshots)


def _lengths(snapshots: Snapshots) -> Metric:
    family = HistogramMetricFamily("treadle_speculation_accepted_length", "Accepted drafts per row.", labels=("model",))
    for model, found in snapshots.items():
        lengths = found["accepted_lengths"]
        bounds = [*map(str, range(len(lengths) - 1)), "+Inf"]
        cumulative = list(zip(bounds, accumulate(lengths), strict=True))
        family.add_metric((model,), cumulative, sum(found["accepted"].values()))
    return family


def _speed_up(snapshots: Snapshots) -> Metric:
    about = "Tokens per second of steps with drafts over those of plain steps; absent until both were seen."
    family = GaugeMetricFamily("treadle_speculation_speed_up", about, labels=("model",))
    for model, found in snapshots.items():
        if found["speed_up"] is not None:
            family.add_metric((model,), found["speed_up"])
    return family
