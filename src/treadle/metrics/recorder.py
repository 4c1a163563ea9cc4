"""The one place where things are counted. It learns all of it from requests, outputs and a look at the device a second.

`submitted`, `answered`, `disconnected` and the readers run on the asyncio thread, `turn`, `measured` and `fault` on the
engine thread; one lock is held for microseconds. Nothing grows without bound when nobody reads, as in offline use.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from treadle.metrics.counters import Counters
from treadle.metrics.gauges import CacheGauge, Gauges, Growth
from treadle.metrics.history import History, Recent, Second
from treadle.metrics.snapshot import FinishedRequest, HistoryPart, Latency, LiveRequest
from treadle.metrics.track import Track
from treadle.types import Finish, Output, Request, Usage

MEASURE_S = 0.95  # a little less than the beat of an idle engine
FINISHED = 200  # records that are kept

Listener = Callable[[FinishedRequest], None]


class Recorder:
    """Counters, histories and the requests under way. `clock` gives durations, `wall` Unix seconds."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter, wall: Callable[[], float] = time.time) -> None:
        self.started = wall()
        self.gauges = Gauges()
        self.peak_bytes = 0
        self.listener: Listener | None = None  # told of every finished request, on the engine thread
        self._clock = clock
        self._wall = wall
        self._began = clock()
        self._lock = threading.Lock()
        self._counters = Counters()
        self._tracks: dict[str, Track] = {}
        self._finished: deque[FinishedRequest] = deque(maxlen=FINISHED)
        self._second = Second()
        self._ticked = self._began
        self._history = History()
        self._ttft, self._gaps, self._queue = Recent(), Recent(), Recent()
        self._measured: float | None = None
        self._hits, self._evictions, self._freed = Growth(), Growth(), Growth()

    # Written

    def submitted(self, request: Request, model: str) -> None:
        """A request entered the engine's queue."""
        with self._lock:
            counters = self._counters.of(model)
            counters.submitted += 1
            counters.prompt.observe(len(request.prompt))
            self._tracks[request.id] = Track(request.id, model, len(request.prompt), self._clock())

    def turn(self, outputs: Sequence[Output], seconds: float) -> None:
        """One turn of a loop took so long and made these. Outputs of unknown requests are ignored."""
        now = self._clock()
        ended = []
        with self._lock:
            self._counters.turns += 1
            self._counters.turn_s += seconds
            rows = 0
            for output in outputs:
                track = self._tracks.get(output.id)
                if track is not None:
                    rows += bool(output.tokens)
                    self._follow(track, output, now)
                    if output.finish is not None:
                        ended.append(self._end(track, output, now))
            self._second.steps += rows > 0
            self._second.rows += rows
        if self.listener is not None:
            for record in ended:
                self.listener(record)

    def measured(self, gauges: Gauges) -> None:
        """A look at the device, the cache and the sequences."""
        with self._lock:
            self._measured = self._clock()
            self.gauges = gauges
            if gauges.memory is not None:
                self.peak_bytes = max(self.peak_bytes, gauges.memory.active, gauges.memory.peak)
            if gauges.cache is not None:
                self._count_cache(gauges.cache)
            for sequence in gauges.sequences:
                track = self._tracks.get(sequence.id)
                if track is not None:
                    track.state = sequence.stage
                    track.seen = max(track.seen, min(sequence.computed, track.prompt_tokens))
                    self._count_prompt(track, sequence.cached, sequence.computed)

    @property
    def due(self) -> bool:
        """Whether it is time for `measured`."""
        return self._measured is None or self._clock() - self._measured >= MEASURE_S

    def fault(self) -> None:
        """The engine itself failed: whatever was under way ends with an error."""
        with self._lock:
            self._counters.faults += 1
            under_way = [Output(id, finish=Finish.ERROR) for id in self._tracks]
        self.turn(under_way, 0.0)

    def answered(self, route: str, status: int) -> None:
        """An HTTP answer began."""
        with self._lock:
            self._counters.responses[route, status] += 1

    def disconnected(self) -> None:
        """A client left before its answer had ended."""
        with self._lock:
            self._counters.disconnects += 1

    def tick(self, running: int, waiting: int) -> None:
        """A second is over: add a point to the history. With the engine's requests in work and in the queue."""
        now = self._clock()
        with self._lock:
            second, self._second = self._second, Second()
            elapsed, self._ticked = max(now - self._ticked, 1e-6), now
            gauges = self.gauges
            cache, memory = gauges.cache, gauges.memory
            point = second.point(elapsed) | {
                "running": running,
                "waiting": waiting,
                "cache_bytes": None if cache is None else cache.used_bytes,
                "active_bytes": None if memory is None else memory.active,
            }
            self._history.add(self._wall(), point)

    # Read

    def counters(self) -> Counters:
        """A copy of all counters at one moment."""
        with self._lock:
            return copy.deepcopy(self._counters)

    def live(self) -> list[LiveRequest]:
        """The requests under way, oldest first."""
        with self._lock:
            now = self._clock()
            return [track.live(now) for track in self._tracks.values()]

    def finished(self, since: float = 0.0) -> list[FinishedRequest]:
        """The last ones that ended after `since`, oldest first."""
        with self._lock:
            return [record for record in self._finished if record.ended > since]

    def history(self, since: float = 0.0) -> HistoryPart:
        with self._lock:
            return self._history.part(since)

    def latency(self) -> Latency:
        with self._lock:
            now = self._clock()
            return Latency(self._ttft.quantiles(now), self._gaps.quantiles(now), self._queue.quantiles(now))

    @property
    def now(self) -> float:
        return self._wall()

    @property
    def uptime_s(self) -> float:
        return self._clock() - self._began

    # Under the lock

    def _follow(self, track: Track, output: Output, now: float) -> None:
        if output.skimmed is not None:
            track.state, track.skimming, track.skimmed = "prefill", True, output.skimmed
        if output.prefilled is not None:
            track.skimming = False
            track.state, track.seen = "prefill", max(track.seen, output.prefilled)
        made = len(output.tokens)
        if not made and output.stop_id is None:
            return
        counters = self._counters.of(track.model)
        if track.first is None or track.last is None:
            track.first, track.state = now, "decode"
            self._second.ttfts.append(now - track.submitted)
            self._ttft.add(now, now - track.submitted)
            counters.ttft.observe(now - track.submitted)
        elif made:
            gap = (now - track.last) / made
            counters.inter_token.observe(gap, made)
            self._second.gaps.extend([gap] * made)
            self._gaps.add(now, gap)
        if made:
            track.last = now
        track.generated += made
        self._second.generated += made
        counters.generated_tokens += made

    def _end(self, track: Track, output: Output, now: float) -> FinishedRequest:
        del self._tracks[track.id]
        usage = output.usage or Usage(track.prompt_tokens, track.generated, track.cached)
        counters, finish = self._counters.of(track.model), str(output.finish)
        skipped = 0 if usage.sparse is None else usage.sparse.tokens - usage.sparse.kept
        in_layers = (track.prompt_tokens if track.first is not None else track.seen) - skipped
        self._count_prompt(track, min(usage.cached_tokens, in_layers), in_layers)
        counters.finished[finish] += 1
        unseen = max(usage.completion_tokens - track.generated, 0)  # the end id, which no output shows
        counters.generated_tokens += unseen
        self._second.generated += unseen
        for target in (counters, self._second):
            target.drafted_tokens += usage.drafted_tokens
            target.accepted_tokens += usage.accepted_tokens
        self._second.vision_s += usage.vision_s
        if usage.sparse is not None:
            counters.sparse_prompts[usage.sparse.engaged] += 1
            counters.skipped_tokens += skipped
            counters.skim_s += usage.sparse.score_s
        if output.usage is not None:
            counters.queue.observe(usage.queue_s)
            self._queue.add(now, usage.queue_s)
        record = track.ended(finish, usage, now, self._wall())
        self._finished.append(record)
        return record

    def _count_prompt(self, track: Track, cached: int, in_layers: int) -> None:
        new_cached, new_computed = track.prompt_done(cached, in_layers)
        counters = self._counters.of(track.model)
        for target in (counters, self._second):
            target.cached_tokens += new_cached
            target.computed_tokens += new_computed

    def _count_cache(self, cache: CacheGauge) -> None:
        self._counters.cache_hits.update(self._hits.since_last(cache.hits))
        self._counters.cache_evictions.update(self._evictions.since_last(cache.evictions))
        self._counters.cache_freed.update(self._freed.since_last(cache.freed_bytes))
