"""The same snapshot for Prometheus, in its text format or in OpenMetrics: whichever the scraper asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from treadle import __version__
from treadle.metrics.counters import Counters, Histogram, ModelCounters
from treadle.metrics.gauges import Gauges
from treadle.metrics.snapshot import PressureCard
from treadle.metrics.speculation import speculation
from treadle.metrics.stats import Reading

Labels = tuple[str, ...]
LEVELS = {"calm": 0, "pack": 1, "evict": 2, "hold": 3, "preempt": 4}


class Exporter:
    """A registry of its own, so that nothing else of the process is told. `read` is asked once per scrape."""

    def __init__(self, read: Callable[[], Reading]) -> None:
        self._read = read
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self, accept: str) -> tuple[bytes, str]:
        """The exposition and its content type, for an `Accept` header."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type

    def describe(self) -> Iterable[Metric]:
        """Nothing: registering must not need an engine."""
        return ()

    def collect(self) -> Iterator[Metric]:
        read = self._read()
        yield InfoMetricFamily("treadle", "The server.", {"version": __version__})
        yield gauge("treadle_start_time_seconds", "When the server started, in Unix seconds.", read.started)
        yield gauge("treadle_ready", "1 when requests can be answered.", read.engine.state == "ready")
        yield _models(read)
        yield gauge("treadle_requests_running", "Requests in prefill or decode.", read.engine.running)
        yield gauge("treadle_requests_waiting", "Requests in the queue.", read.engine.waiting)
        yield from _requests(read.counters)
        yield from _process(read.counters)
        yield total("treadle_traces", "Functions that were compiled, of layers and of whole steps.", read.gauges.traces)
        yield from _memory(read.gauges, read.peak_bytes)
        if read.gauges.pressure is not None:
            yield from _pressure(read.gauges.pressure)
        if read.gauges.cache is not None:
            yield from _cache(read)
        if read.gauges.speculation is not None:
            yield from speculation(read.gauges.speculation)


def _models(read: Reading) -> Metric:
    family = GaugeMetricFamily("treadle_model_weight_bytes", "In memory; 0: not loaded.", labels=("model",))
    for model in read.engine.models:
        family.add_metric((model.id,), model.weight_bytes)
    return family


def _requests(counters: Counters) -> Iterator[Metric]:
    models = counters.models

    def per_model(name: str, about: str, value: Callable[[ModelCounters], float]) -> Metric:
        return counter(name, about, ("model",), [((model,), value(counted)) for model, counted in models.items()])

    def histograms(name: str, about: str, value: Callable[[ModelCounters], Histogram]) -> Metric:
        return histogram(name, about, [(model, value(counted)) for model, counted in models.items()])

    yield per_model("treadle_requests_submitted", "Requests that entered the queue.", lambda m: m.submitted)
    ends = [((model, end), n) for model, counted in models.items() for end, n in counted.finished.items()]
    yield counter("treadle_requests_finished", "Requests that ended, by reason.", ("model", "finish"), ends)
    sources = [((model, "cached"), counted.cached_tokens) for model, counted in models.items()]
    sources += [((model, "computed"), counted.computed_tokens) for model, counted in models.items()]
    yield counter("treadle_prompt_tokens", "Prompt tokens, by where they came from.", ("model", "source"), sources)
    yield per_model("treadle_generated_tokens", "Tokens made.", lambda m: m.generated_tokens)
    prompts = [((m, str(on).lower()), n) for m, counted in models.items() for on, n in counted.sparse_prompts.items()]
    yield counter("treadle_sparse_prefills", "Prompts that could be computed in part.", ("model", "engaged"), prompts)
    yield per_model("treadle_skipped_prompt_tokens", "Prompt tokens that were left out.", lambda m: m.skipped_tokens)
    yield per_model("treadle_sparse_score_seconds", "Time of small models for that.", lambda m: m.skim_s)
    yield per_model("treadle_drafted_tokens", "Tokens proposed by speculation.", lambda m: m.drafted_tokens)
    yield per_model("treadle_accepted_tokens", "Drafted tokens that were accepted.", lambda m: m.accepted_tokens)
    yield histograms("treadle_time_to_first_token_seconds", "From submission to the first token.", lambda m: m.ttft)
    yield histograms("treadle_inter_token_seconds", "Between tokens of one request.", lambda m: m.inter_token)
    yield histograms("treadle_queue_seconds", "From submission to the start of the work.", lambda m: m.queue)
    yield histograms("treadle_request_prompt_tokens", "Length of the prompts.", lambda m: m.prompt)


def _process(counters: Counters) -> Iterator[Metric]:
    yield total("treadle_turns", "Turns of the generation loop.", counters.turns)
    yield total("treadle_turn_seconds", "Time spent in turns of the loop.", counters.turn_s)
    yield total("treadle_engine_faults", "Faults that ended everything that ran.", counters.faults)
    yield total("treadle_client_disconnects", "Clients that left before their answer ended.", counters.disconnects)
    answers = [((route, str(status)), n) for (route, status), n in sorted(counters.responses.items())]
    yield counter("treadle_http_responses", "HTTP answers.", ("route", "status"), answers)


def _memory(gauges: Gauges, peak: int) -> Iterator[Metric]:
    if gauges.memory is not None:
        yield gauge("treadle_memory_active_bytes", "Held on the device.", gauges.memory.active)
        yield gauge("treadle_memory_peak_bytes", "Most that was seen held on the device.", peak)
        yield gauge("treadle_memory_spare_bytes", "Freed buffers that are kept.", gauges.memory.spare)
        yield gauge("treadle_memory_limit_bytes", "What the process may use.", gauges.memory.limit)


def _pressure(found: PressureCard) -> Iterator[Metric]:
    yield gauge("treadle_pressure_level", "Memory: 0 calm, 1 pack, 2 evict, 3 hold, 4 preempt.", LEVELS[found.level])
    yield gauge("treadle_pressure_holding", "1 while no request is admitted because memory runs short.", found.holding)
    counts = (
        ("entered", "level", "Times that a level was reached.", found.entered),
        ("actions", "action", "What was done about memory that runs short.", found.actions),
        ("freed_bytes", "action", "Bytes that it freed on the device.", found.freed_bytes),
    )
    for name, label, about, values in counts:
        yield counter(f"treadle_pressure_{name}", about, (label,), [((key,), n) for key, n in values.items()])


def _cache(read: Reading) -> Iterator[Metric]:
    counters, cache = read.counters, read.gauges.cache
    assert cache is not None
    yield gauge("treadle_cache_used_bytes", "Held by the prefix cache on the device.", cache.used_bytes)
    yield gauge("treadle_cache_budget_bytes", "What the prefix cache may hold.", cache.budget_bytes)
    kinds = [((kind,), n) for kind, n in counters.cache_hits.items()]
    yield counter("treadle_cache_lookups", "Look-ups in the prefix cache, by what was found.", ("kind",), kinds)
    evictions = [((reason,), n) for reason, n in counters.cache_evictions.items()]
    yield counter("treadle_cache_evictions", "Pieces removed from the cache.", ("reason",), evictions)
    freed = [((reason,), n) for reason, n in counters.cache_freed.items()]
    yield counter("treadle_cache_freed_bytes", "Bytes that evictions freed.", ("reason",), freed)


def gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(name, about, value=float(value))


def total(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(name, about, value=float(value))


def counter(name: str, about: str, labels: Labels, values: Iterable[tuple[Labels, float]]) -> Metric:
    family = CounterMetricFamily(name, about, labels=labels)
    for key, value in values:
        family.add_metric(key, value)
    return family


def histogram(name: str, about: str, values: Iterable[tuple[str, Histogram]]) -> Metric:
    family = HistogramMetricFamily(name, about, labels=("model",))
    for model, counted in values:
        family.add_metric((model,), counted.cumulative(), counted.total)
    return family
