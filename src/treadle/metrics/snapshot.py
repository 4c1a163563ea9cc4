"""The body of `GET /v1/stats`: everything the server can tell about itself, at one moment.

    GET /v1/stats              the snapshot with the last 15 minutes of history and the last 200 finished requests
    GET /v1/stats?since=T      the same, but of `history` and `finished` only what is newer than T

A page polls once a second and passes `history.times[-1]` of what it has as `since`; `live`, cards and totals always
come whole. The route needs an API key where the server has keys. It answers 200 in every state, also while a model
loads.

- Times are Unix seconds (float), durations seconds, sizes bytes, speeds tokens per second, shares 0 to 1.
- In `history.series`, every list is as long as `history.times`, and `null` means that nothing was there to measure in
  that second (no request got its first token, nothing was decoded, ...). Points are one second apart; a gap in `times`
  is a second in which the process did not come to it.
- `live[].id` is the engine's id; a request with several replies has `ID`, `ID:1`, `ID:2`. What
  `POST /v1/requests/{id}/cancel` takes is `live[].job`.
- What is not known (yet) is null: device, memory, pressure and cache before the first model is loaded, `speculation`
  where nothing speculates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SERIES = (
    "running",  # requests in prefill or decode
    "waiting",  # requests in the queue
    "batch",  # mean number of sequences that got tokens in one turn
    "ttft_s",  # median time to first token of the requests that got theirs in this second
    "inter_token_p50_s",  # time between tokens of one request
    "inter_token_p95_s",
    "prefill_tokens_per_s",  # prompt tokens computed
    "decode_tokens_per_s",  # tokens made, all requests together
    "cached_share",  # of the prompt tokens that were dealt with: not computed
    "cache_bytes",  # held by the prefix cache on the device
    "active_bytes",  # held by the process on the device
    "acceptance",  # of the drafted tokens: accepted
    "vision_s",  # seconds of the image encoder, of requests that ended; null: no images
)


@dataclass(frozen=True, slots=True)
class ServerCard:
    """The process."""

    version: str  # of Treadle
    state: str  # loading | ready | stuck | failed | stopping | stopped
    failure: str | None
    started: float
    uptime_s: float


@dataclass(frozen=True, slots=True)
class DeviceCard:
    """What MLX computes on."""

    name: str
    backend: str  # metal | cuda | cpu
    memory_bytes: int
    versions: Mapping[str, str]  # package -> version


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the engine says of one model."""

    id: str
    state: str  # unloaded | loading | ready | failed
    failure: str | None = None  # why the last load failed
    pinned: bool = False  # never unloaded
    weight_bytes: int = 0  # in memory; 0 while it is not loaded
    context_length: int | None = None  # null: it was not loaded yet
    batching: str | None = None  # ragged | decode | never; null: it was not loaded yet
    kv_bits: str | None = None  # of its rows: "16" (exact), "8", "4", or keys/values like "8/4"; null: not loaded yet
    kv_why: str | None = None  # the sentence behind it
    kv_losses: Mapping[str, float] = field(default_factory=dict)  # by format, measured: per cent of perplexity


@dataclass(frozen=True, slots=True)
class ServedModel(ModelFacts):
    """The same, and what it was asked since the server started."""

    requests: int = 0  # finished
    tokens: int = 0  # made


@dataclass(frozen=True, slots=True)
class MemoryCard:
    """The device's memory as this process uses it."""

    limit_bytes: int
    active_bytes: int
    peak_bytes: int  # highest active_bytes seen since the start
    spare_bytes: int  # freed buffers that MLX keeps


@dataclass(frozen=True, slots=True)
class PressureCard:
    """What is done about memory that runs short."""

    level: str  # calm | pack | evict | hold | preempt
    holding: bool  # no sequence is admitted
    entered: Mapping[str, int]  # by level: how often it was reached
    actions: Mapping[str, int]  # remeasure | pack_idle | pack_live | evict | hold | admit | preempt | end
    freed_bytes: Mapping[str, int]  # by action


@dataclass(frozen=True, slots=True)
class CacheCard:
    """The prefix cache; `GET /v1/cache` lists its entries."""

    bits: int | None  # of prefixes that are not in use; null: exact
    budget_bytes: int
    used_bytes: int
    hits: Mapping[str, int]  # exact | prefix | supersequence | branch | miss
    evictions: Mapping[str, int]  # by reason: idle | budget | pressure | unload
    freed_bytes: Mapping[str, int]  # by reason


@dataclass(frozen=True, slots=True)
class TokenTotals:
    """Since the start of the server."""

    prompt: int  # cached + computed
    cached: int
    computed: int
    generated: int
    drafted: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the start of the server; they only grow."""

    submitted: int
    finished: Mapping[str, int]  # by reason: stop | length | abort | error
    tokens: TokenTotals
    disconnects: int  # clients that left before their answer ended
    faults: int  # of the engine itself
    responses: Mapping[str, int]  # HTTP answers by status: "200" -> 12


@dataclass(frozen=True, slots=True)
class Quantiles:
    """Over the last 15 minutes, at most the last 10,000 values; null without any."""

    p50: float | None = None
    p95: float | None = None
    p99: float | None = None
    count: int = 0


@dataclass(frozen=True, slots=True)
class Latency:
    """Seconds."""

    ttft_s: Quantiles
    inter_token_s: Quantiles
    queue_s: Quantiles


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """A request that waits or runs. `prompt_computed` and `cached_tokens` follow with up to a second of delay."""

    id: str
    job: str  # what the cancel route takes
    model: str
    state: str  # waiting | skim | prefill | decode
    prompt_tokens: int
    prompt_computed: int  # how far it is in them, cached ones and those that were left out included
    prompt_skimmed: int  # how far the small model of sparse prefill has read them; 0: there is none
    cached_tokens: int
    generated_tokens: int
    age_s: float
    tokens_per_s: float | None  # decode speed so far; null before the second token


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """One request that has ended. prompt_tokens = cached_tokens + computed_tokens (of a prompt that was completed)."""

    id: str
    model: str
    finish: str  # stop | length | abort | error
    ended: float
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int
    queue_s: float
    ttft_s: float | None  # null: it ended before its first token
    duration_s: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None
    vision_s: float = 0.0  # of the time to the first token, what the image encoder took


@dataclass(frozen=True, slots=True)
class HistoryPart:
    """Points at one-second steps, oldest first. `series` has exactly the keys of `SERIES`."""

    times: list[float]
    series: dict[str, list[float | None]]


@dataclass(frozen=True, slots=True)
class Stats:
    """The whole snapshot."""

    now: float
    server: ServerCard
    device: DeviceCard | None
    models: list[ServedModel]
    running: int
    waiting: int
    memory: MemoryCard | None
    pressure: PressureCard | None
    cache: CacheCard | None  # null: switched off
    speculation: Mapping[str, Mapping[str, Any]] | None  # by model: the snapshot of its `SpeculationCounters`
    traces: int  # functions of layers and of whole steps that were compiled since the start
    totals: Totals
    latency: Latency
    live: list[LiveRequest]  # oldest first
    finished: list[FinishedRequest]  # oldest first
    history: HistoryPart
    object: str = field(default="stats")
