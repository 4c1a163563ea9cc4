"""The prefix cache as clients see it: its routes, its counts in every usage, and what keeps prompts apart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest

from tests.fakes_engine import FakeEngine, say, tokenizer
from tests.live import Live, live
from treadle.api import admin
from treadle.cache.budget import Reason
from treadle.cache.node import MatchKind
from treadle.types import HIT_KINDS, CacheEntry, CacheReport

CHAT, LEGACY = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello world"}]},
    LEGACY: {"prompt": "hello world"},
}
REPORT = CacheReport(
    enabled=True,
    budget_bytes=1000,
    used_bytes=300,
    entries=(CacheEntry(40, 200, 3, 1.5, "parked", False), CacheEntry(20, 150, 0, 9.0, "disk", True)),
    hits={MatchKind.EXACT: 1, MatchKind.PREFIX: 2, "supersequence": 0, "branch": 4, "miss": 5},
    reused_tokens=70,
    computed_tokens=30,
    evictions={Reason.IDLE: 1},
    freed_bytes={Reason.IDLE: 50},
    bytes_by_tier={"parked": 200, "disk": 150},
    disk={"entries": 1, "bytes": 150},
    note="Two layers keep checkpoints only.",
)


@pytest.fixture
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello", cached=2))) as running:
        yield running


def test_the_report_is_answered_with_its_totals(server: Live) -> None:
    server.engine.report = REPORT
    body = server.get("/v1/cache").json()
    assert body == {
        "object": "cache",
        "enabled": True,
        "note": "Two layers keep checkpoints only.",
        "budget_bytes": 1000,
        "used_bytes": 300,
        "totals": {"entries": 2, "tokens": 60, "bytes": 350, "lookups": 12},
        "hits": {"exact": 1, "prefix": 2, "supersequence": 0, "branch": 4, "miss": 5},
        "reused_tokens": 70,
        "computed_tokens": 30,
        "evictions": {"idle": 1},
        "freed_bytes": {"idle": 50},
        "bytes_by_tier": {"parked": 200, "disk": 150},
        "disk": {"entries": 1, "bytes": 150},
        "entries": [
            {"tokens": 40, "bytes": 200, "hits": 3, "age_s": 1.5, "tier": "parked", "has_images": False},
            {"tokens": 20, "bytes": 150, "hits": 0, "age_s": 9.0, "tier": "disk", "has_images": True},
        ],
    }


def test_a_cache_that_is_off_is_an_empty_report(server: Live) -> None:
    response = server.get("/v1/cache")
    assert response.status_code == 200
    body = response.json()
    assert (body["enabled"], body["entries"], body["disk"]) == (False, [], None)
    assert body["totals"] == {"entries": 0, "tokens": 0, "bytes": 0, "lookups": 0}
    assert body["hits"] == dict.fromkeys(HIT_KINDS, 0)


def test_the_kinds_of_hits_are_those_of_the_tree() -> None:
    assert set(HIT_KINDS) == set(MatchKind)


def test_clearing_tells_what_it_freed(server: Live) -> None:
    server.engine.report = REPORT
    response = httpx.delete(server.url + "/v1/cache", timeout=20)
    assert response.json() == {"object": "cache", "cleared": True, "freed_bytes": 300}
    assert server.get("/v1/cache").json()["entries"] == []


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_without_a_loaded_model_there_is_no_cache_yet(server: Live, method: str) -> None:
    server.engine.state = "loading"
    response = httpx.request(method, server.url + "/v1/cache", timeout=20)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_an_engine_that_does_not_answer_is_a_503(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    monkeypatch.setattr(admin, "ANSWER_S", 0.05)
    with live(FakeEngine(silent=True)) as server:
        response = httpx.request(method, server.url + "/v1/cache", timeout=20)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert "has not answered" in response.json()["error"]["message"]


def usages(response: httpx.Response, *, stream: bool) -> list[dict[str, Any]]:
    """Every usage of an answer, whole or streamed."""
    if not stream:
        return [response.json()["usage"]]
    events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
    return [usage for usage in (json.loads(event)["usage"] for event in events) if usage is not None]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, LEGACY])
def test_every_usage_tells_the_tokens_that_were_not_computed(server: Live, path: str, stream: bool) -> None:
    fields: dict[str, Any] = {"stream": stream, "stream_options": {"include_usage": True}, "n": 2}
    (usage,) = usages(server.post(path, BODIES[path] | fields), stream=stream)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 2}  # once, though two choices share the prompt
    assert usage["prompt_tokens"] == len(server.engine.requests[0].prompt)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, LEGACY])
def test_the_salt_reaches_every_request_of_the_engine(server: Live, path: str, stream: bool) -> None:
    server.post(path, BODIES[path] | {"stream": stream, "cache_salt": "mine", "n": 2})
    server.post(path, BODIES[path] | {"stream": stream})
    assert [request.cache_salt for request in server.engine.requests] == ["mine", "mine", ""]


def test_a_salt_that_is_no_text_is_refused(server: Live) -> None:
    response = server.post(CHAT, BODIES[CHAT] | {"cache_salt": 5})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "cache_salt")


def test_message_starts_reach_the_engine_with_a_chat(server: Live) -> None:
    server.post(CHAT, BODIES[CHAT] | {"n": 2})
    start = tokenizer().convert_tokens_to_ids("<|assistant|>")
    for request in server.engine.requests:
        assert request.boundaries == tuple(np.flatnonzero(request.prompt == start).tolist()) != ()
    server.post(LEGACY, BODIES[LEGACY])
    assert server.engine.requests[-1].boundaries == ()
