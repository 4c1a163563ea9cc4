"""The counters of speculation as Prometheus reads them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from treadle.metrics.speculation import speculation
from treadle.speculate.control import Source
from treadle.speculate.telemetry import LONGEST_COUNTED, SpeculationCounters


def exposed(**models: SpeculationCounters) -> dict[tuple[str, ...], float]:
    """Every sample by its name and labels, through the text format and back."""

    class All:
        def collect(self) -> list[Metric]:
            return list(speculation({name: counters.snapshot() for name, counters in models.items()}))

    registry = CollectorRegistry()
    registry.register(All())
    families = text_string_to_metric_families(generate_latest(registry).decode())
    order = ("model", "source", "le")
    samples = [sample for family in families for sample in family.samples]
    return {(s.name, *(s.labels[k] for k in order if k in s.labels)): s.value for s in samples}


def test_counts_of_every_source_and_model_are_told() -> None:
    counters = SpeculationCounters(rewinds=2, cooldowns=3, ties=4)
    counters.settled(Source.LOOKUP, 9, 7)
    counters.settled(Source.DRAFT, 4, 1)
    counters.verified([7, 1], 10, 0.5)
    counters.plain(5, 0.5)
    found = exposed(one=counters, other=SpeculationCounters())
    name = "treadle_speculation"
    assert found[f"{name}_drafted_tokens_total", "one", "lookup"] == 9
    assert found[f"{name}_accepted_tokens_total", "one", "draft"] == 1
    assert found[f"{name}_accepted_tokens_total", "one", "forced"] == 0
    assert [found[f"{name}_{what}_total", "one"] for what in ("rounds", "rewinds", "cooldowns", "ties")] == [1, 2, 3, 4]
    assert found[f"{name}_speed_up", "one"] == 2
    assert (f"{name}_speed_up", "other") not in found, "nothing was measured"
    assert found[f"{name}_rounds_total", "other"] == 0


def test_accepted_lengths_are_a_histogram_whose_last_bin_is_open() -> None:
    counters = SpeculationCounters()
    counters.settled(Source.LOOKUP, 40, 33)
    counters.verified([0, 3, 30], 36, 1.0)
    found = exposed(m=counters)
    name = "treadle_speculation_accepted_length"
    assert found[f"{name}_bucket", "m", "0"] == 1 and found[f"{name}_bucket", "m", "2"] == 1
    assert found[f"{name}_bucket", "m", "3"] == 2 and found[f"{name}_bucket", "m", str(LONGEST_COUNTED - 1)] == 2
    assert found[f"{name}_bucket", "m", "+Inf"] == 3 == found[f"{name}_count", "m"]
    assert found[f"{name}_sum", "m"] == 33
