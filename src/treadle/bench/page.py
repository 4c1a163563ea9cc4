"""How long the monitor page blocks its browser, with a full history and many requests under way.

    python -m treadle.bench page [--requests 10000] [--live 64] [--per-second 20] [--seconds 20]

The page is the server's own, fed by the server's own recorder; no model runs. Chromium's PerformanceObserver reports
every task of more than 50 ms, from the start of the page on, while the page is scrolled and its charts are zoomed.
Other work on the machine lengthens tasks; the trace tells how much processor time the longest one took.

It needs Playwright (an extra for developers) and a Chromium on the PATH.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI
from starlette.requests import Request as WebRequest
from starlette.responses import Response

from treadle.api import monitor
from treadle.api.errors import json_response
from treadle.bench.report import report
from treadle.metrics.gauges import CacheGauge, Gauges, MemoryGauge
from treadle.metrics.recorder import Recorder
from treadle.metrics.snapshot import ModelFacts
from treadle.metrics.stats import EngineFacts, stats
from treadle.types import Finish, Output, Request, Sampling, Usage

HISTORY_S = 900
ENTRIES = 1000  # of the prefix cache
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WATCH = """
window.tasks = [];
new PerformanceObserver((list) => list.getEntries().forEach((task) => tasks.push(task.duration)))
  .observe({ type: "longtask", buffered: true });
"""


class Past:
    """A recorder whose clock is moved by hand until `now` is reached, and by itself from then on."""

    def __init__(self, live: int) -> None:
        self.at = -float(HISTORY_S)  # seconds before the present
        self.began: float | None = None
        self.made = 0
        self.live = live
        self.origin = time.time()
        self.recorder = Recorder(self.clock, lambda: self.origin + self.clock())
        for i in range(live):
            self.submit(f"live-{i}")

    def clock(self) -> float:
        return self.at if self.began is None else time.perf_counter() - self.began

    def submit(self, id: str) -> None:
        self.recorder.submitted(Request(id, np.zeros(800, np.int64), Sampling(), 100), "model")

    def request(self) -> None:
        """One request from its start to its end."""
        id = f"request-{self.made}"
        self.made += 1
        self.submit(id)
        self.recorder.turn([Output(id, tokens=(1, 2))], 0.01)
        usage = Usage(800, 3, cached_tokens=self.made * 37 % 800, drafted_tokens=4, accepted_tokens=self.made % 5)
        self.recorder.turn([Output(id, tokens=(3,), finish=Finish.STOP, usage=usage)], 0.01)

    def second(self, requests: int) -> None:
        for _ in range(requests):
            self.request()
        self.recorder.turn([Output(f"live-{i}", tokens=(1,)) for i in range(self.live)], 0.01)
        used = 2**20 * (self.made % 900)
        cache = CacheGauge(used, 2**30, None, {"exact": self.made, "miss": 7}, {}, {})
        self.recorder.measured(Gauges(None, MemoryGauge(2**34, 2**32 + used, 2**33, 0), cache))
        self.recorder.tick(self.live, self.made % 9)

    def snapshot(self, since: float) -> Any:
        model = ModelFacts("model", "ready", context_length=32768, weight_bytes=2**30)
        return stats(self.recorder, EngineFacts("ready", None, self.live, 0, [model]), since)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="treadle.bench page", description=__doc__)
    parser.add_argument("--requests", type=int, default=10_000, help="in the history before the page is opened")
    parser.add_argument("--live", type=int, default=64)
    parser.add_argument("--per-second", type=int, default=20, help="that end while the page is watched")
    parser.add_argument("--seconds", type=int, default=20)
    args = parser.parse_args(argv)
    past = Past(args.live)
    for second in range(HISTORY_S):
        past.at = float(second - HISTORY_S)
        past.second(args.requests * (second + 1) // HISTORY_S - past.made)
    past.began = time.perf_counter()
    with served(past, args.per_second) as port:
        seen = watch(f"http://127.0.0.1:{port}/", args.seconds)
    tasks = sorted(seen["tasks"])
    row = {
        "requests": past.made,
        "live": args.live,
        "tasks > 50 ms": len(tasks),
        "longest ms": tasks[-1] if tasks else "under 50",
        "longest CPU ms": seen["cpu"],
        "elements": seen["elements"],
        "rows": seen["rows"],
    }
    report("page", [row], browser=seen["browser"], watched_s=args.seconds)


@contextmanager
def served(past: Past, per_second: int) -> Iterator[int]:
    """The page and what it asks for, on a free port, with `per_second` requests ending each second."""
    server = uvicorn.Server(uvicorn.Config(application(past), log_level="warning"))
    listener = socket.create_server(("127.0.0.1", 0))
    over = threading.Event()

    def feed() -> None:
        while not over.wait(1.0):
            past.second(per_second)

    threads = [threading.Thread(target=server.run, args=([listener],)), threading.Thread(target=feed)]
    for thread in threads:
        thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        over.set()
        server.should_exit = True
        for thread in threads:
            thread.join()
        listener.close()


def application(past: Past) -> FastAPI:
    app = FastAPI()
    app.include_router(monitor.router)
    entry = {"tokens": 900, "bytes": 2**22, "hits": 3, "age_s": 5.0, "tier": "memory", "has_images": False}
    totals = {"entries": ENTRIES, "tokens": 900 * ENTRIES}

    @app.get("/v1/stats")
    async def snapshot(request: WebRequest, since: float = 0.0) -> Response:
        return json_response(past.snapshot(since))

    @app.get("/v1/models")
    async def models(request: WebRequest) -> Response:
        return json_response({"data": [{"id": "model", "state": "ready"}]})

    @app.get("/v1/cache")
    async def cache(request: WebRequest) -> Response:
        return json_response({"enabled": True, "totals": totals, "entries": [entry] * ENTRIES})

    return app


def longest_cpu(trace: bytes) -> float:
    """The most processor time in ms that one task of the page's main thread took."""
    events = json.loads(trace)["traceEvents"]
    named = [e for e in events if e["name"] == "thread_name" and e["args"]["name"] == "CrRendererMain"]
    main = {(e["pid"], e["tid"]) for e in named}
    return float(max(e["tdur"] for e in events if e["name"] == "RunTask" and (e["pid"], e["tid"]) in main)) / 1000


def watch(url: str, seconds: int) -> dict[str, Any]:
    """What a browser saw: long tasks in ms, elements on the page, rows of its tables."""
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        sys.exit(f"None of {', '.join(BROWSERS)} is on the PATH.")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        sys.exit("This benchmark needs Playwright: pip install playwright.")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 2200})  # all charts are drawn
        page.add_init_script(WATCH)
        browser.start_tracing(page=page, categories=["disabled-by-default-devtools.timeline", "devtools.timeline"])
        page.goto(url)
        page.wait_for_selector("#state[data-state=ready]")
        for second in range(seconds):
            page.locator("input[name=window]").nth(second % 3).check(force=True)
            page.mouse.wheel(0, 400 if second % 2 else -400)
            page.wait_for_timeout(1000)
        seen = page.evaluate(
            "({ tasks, elements: document.querySelectorAll('*').length,"
            "   rows: document.querySelectorAll('tbody tr').length })"
        )
        seen |= {"browser": browser.version, "cpu": longest_cpu(browser.stop_tracing())}
        browser.close()
    return dict(seen)
