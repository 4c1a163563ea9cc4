"""Requests for a model that is being loaded: signs of life, then the answer, or the reason why there is none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from tests.fakes_engine import FakeEngine, say
from tests.live import chunks, data_lines, live, until
from treadle.errors import NotReady

USER = [{"role": "user", "content": "hi"}]
ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": USER}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/messages", {"messages": USER, "max_tokens": 50, "model": "claude-x"}),
    ("/v1/responses", {"input": "hi"}),
]
DAMAGED = NotReady("The file is damaged.", code="model_load_failed")


class Loading(FakeEngine):
    """Its model is ready after `load_s`, or then fails with `error`."""

    def __init__(self, load_s: float, error: Exception | None = None) -> None:
        super().__init__(say("hello"))
        self.load_s = load_s
        self.error = error
        self.waiting = 0

    def find(self, name: str | None) -> Any:
        super().find(name)
        return LoadingSlot(self)


class LoadingSlot:
    state = "loading"

    def __init__(self, engine: Loading) -> None:
        self.engine = engine

    @asynccontextmanager
    async def use(self) -> AsyncIterator[FakeEngine]:
        self.engine.waiting += 1
        try:
            await asyncio.sleep(self.engine.load_s)
        finally:
            self.engine.waiting -= 1
        if self.engine.error is not None:
            raise self.engine.error
        yield self.engine


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_stream_begins_with_comments_and_then_is_as_ever(path: str, body: dict[str, Any]) -> None:
    with live(Loading(0.2), keepalive_s=0.04) as server, live(FakeEngine(say("hello"))) as ready:
        answer = server.post(path, body | {"stream": True})
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.startswith(": keep-alive")
        wanted = ready.post(path, body | {"stream": True})
        assert len(data_lines(answer.text)) == len(data_lines(wanted.text))


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_failure_after_the_beginning_is_told_in_the_stream(path: str, body: dict[str, Any]) -> None:
    with live(Loading(0.1, DAMAGED), keepalive_s=0.02) as server:
        answer = server.post(path, body | {"stream": True})
        assert answer.status_code == 200
        (last,) = chunks(answer.text)
        if path == "/v1/responses":
            assert (last["type"], last["code"], last["message"]) == ("error", DAMAGED.code, DAMAGED.message)
        else:
            assert last["error"]["message"] == DAMAGED.message


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_failure_before_it_is_a_503(path: str, body: dict[str, Any], stream: bool) -> None:
    with live(Loading(0.05, DAMAGED), keepalive_s=5) as server:
        answer = server.post(path, body | {"stream": stream})
        assert answer.status_code == 503 and answer.json()["error"]["message"] == DAMAGED.message
        assert int(answer.headers["retry-after"]) >= 1


@pytest.mark.parametrize(("path", "body"), ROUTES)
def test_a_reply_in_one_piece_waits_without_a_word(path: str, body: dict[str, Any]) -> None:
    with live(Loading(0.1), keepalive_s=0.02) as server:
        answer = server.post(path, body)
        assert answer.status_code == 200 and answer.text.startswith("{")
        assert "hello" in json.dumps(answer.json())


def test_a_bad_prompt_is_still_a_400_while_the_stream_has_not_begun() -> None:
    with live(Loading(0.05), keepalive_s=5) as server:
        answer = server.post("/v1/completions", {"prompt": [5] * 300, "stream": True})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "context_length_exceeded"


def test_a_bug_in_a_stream_that_has_begun_says_nothing_of_the_inside() -> None:
    with live(Loading(0.1, RuntimeError("secret")), keepalive_s=0.02) as server:
        answer = server.post("/v1/chat/completions", {"messages": USER, "stream": True})
        (last,) = chunks(answer.text)
        assert last["error"]["code"] == "internal_error" and "secret" not in answer.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_waits_no_longer(stream: bool) -> None:
    engine = Loading(60)
    with live(engine, keepalive_s=0.02) as server:
        with server.send("/v1/chat/completions", {"messages": USER, "stream": stream}):
            until(lambda: engine.waiting == 1)
        until(lambda: engine.waiting == 0)
        assert engine.requests == []
