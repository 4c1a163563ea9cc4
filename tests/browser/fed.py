"""A server with a past: its recorder is fed so many requests and seconds before anybody looks."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from tests.fakes_engine import FakeEngine
from treadle.metrics.gauges import CacheGauge, Gauges, MemoryGauge
from treadle.metrics.recorder import Recorder
from treadle.metrics.snapshot import DeviceCard
from treadle.types import CacheEntry, CacheReport, Finish, Output, Request, Sampling, Usage

GB = 10**9


class Clock:
    """The time, so many seconds behind the true one."""

    def __init__(self) -> None:
        self.behind = 0.0

    def __call__(self) -> float:
        return time.time() - self.behind


def feed(engine: FakeEngine, requests: int, *, drafts: bool = False) -> None:
    """So many finished requests, each with a second of history of its own, the last one now.

    A server that runs already keeps the recorder that it has; its seconds then are all the same one.
    """
    clock = Clock()
    if engine.state == "loading":
        engine.recorder = Recorder(clock, clock)
    for i in range(requests):
        clock.behind = float(requests - i)
        one_second(engine.recorder, clock, i, drafts)
    clock.behind = 0.0


def one_second(recorder: Recorder, clock: Clock, i: int, drafts: bool) -> None:
    id, cached, wave = f"old-{i}", i * 37 % 400, 1 + math.sin(i / 20)
    recorder.submitted(Request(id, np.zeros(500, np.int64), Sampling(), 9), "fake")
    clock.behind -= 0.1 + 0.1 * wave
    recorder.turn([Output(id, tokens=(1,))], 0.01)
    for _ in range(int(8 + 6 * wave)):
        clock.behind -= 0.01 + 0.005 * wave
        recorder.turn([Output(id, tokens=(1, 2))], 0.01)
    drafted = {"drafted_tokens": 8, "accepted_tokens": i % 8} if drafts else {}
    recorder.turn([Output(id, tokens=(4,), finish=Finish.STOP, usage=Usage(500, 20, cached, **drafted))], 0.01)
    recorder.measured(gauges(i))
    recorder.tick(round(2 * wave), i % 7 // 6)


def gauges(i: int, **more: Any) -> Gauges:
    memory = MemoryGauge(16 * GB, 6 * GB + i % 90 * GB // 100, 7 * GB, GB)
    hits = {"exact": i, "prefix": 3 * i, "branch": i // 2, "miss": 4}
    cache = CacheGauge(i % 900 * GB // 1000, GB, 8, hits, {"idle": i}, {"idle": 64 * i})
    return Gauges(DeviceCard("A device", "cpu", 64 * GB, {}), memory, cache, **more)


def entries(number: int) -> CacheReport:
    stored = tuple(CacheEntry(100 + i, 10**6 * (i + 1), i % 7, 3.0 * i, "memory", i % 5 == 0) for i in range(number))
    return CacheReport(enabled=True, budget_bytes=GB, used_bytes=GB // 3, entries=stored)
