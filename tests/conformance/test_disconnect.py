"""A request ends when its client leaves, when it is cancelled or late, and when the server stops."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.fakes_engine import FakeEngine, Script, say
from tests.live import chunks, live, until
from treadle.types import Request

HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
PHASES: dict[str, Any] = {
    "queue": {"queue_s": 60},
    "prefill": {"prefill_s": 60},
    "decode": {"step_s": 0.02},
}
LONG = "hello " * 500
ROUTES = [("/v1/chat/completions", HELLO), ("/v1/completions", {"prompt": "hi"})]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize(("path", "body"), ROUTES, ids=["chat", "completions"])
def test_a_closed_connection_aborts_at_once(path: str, body: Any, phase: str, stream: bool) -> None:
    with live(FakeEngine(say(LONG, **PHASES[phase]))) as server:
        engine = server.engine
        connection = server.send(path, body | {"stream": stream})
        until(lambda: any(stream.phase == phase for stream in list(engine.streams.values())))
        connection.close()
        until(lambda: bool(engine.aborted), within_s=0.5)
        assert list(engine.aborted.values()) == [phase] and not engine.streams


def test_every_choice_of_a_closed_connection_is_aborted() -> None:
    with live(FakeEngine(say(LONG, step_s=0.02))) as server:
        connection = server.send("/v1/chat/completions", HELLO | {"n": 3, "stream": True})
        until(lambda: len(server.engine.streams) == 3)
        connection.close()
        until(lambda: len(server.engine.aborted) == 3, within_s=0.5)


def test_a_client_that_never_reads_is_ended_when_it_leaves() -> None:
    with live(FakeEngine(say(LONG * 40, per_step=50, step_s=0.001))) as server:
        connection = server.send("/v1/chat/completions", HELLO | {"stream": True})
        until(lambda: bool(server.engine.streams))
        connection.close()
        until(lambda: not server.engine.streams, within_s=2)


def test_fifty_ghosts_leave_nothing_behind() -> None:
    """Closed at different points, half of them streamed; then a normal request is served."""
    scripts: list[Any] = [{"queue_s": 60}, {"prefill_s": 60}, {"step_s": 0.01}, {"step_s": 0.001}]

    def plan(request: Request) -> Script:
        if request.max_tokens == 1:
            return say("hello")
        return say(LONG, **scripts[len(server.engine.requests) % len(scripts)])

    with live(FakeEngine(plan)) as server:
        for index in range(50):
            connection = server.send("/v1/chat/completions", HELLO | {"stream": index % 2 == 0})
            time.sleep(0.002 * (index % 5))
            connection.close()
        until(lambda: server.get("/health").json()["running"] == 0 and not server.engine.streams, within_s=2)
        reply = server.post("/v1/chat/completions", HELLO | {"max_tokens": 1})
        assert reply.json()["choices"][0]["message"]["content"] == "hello"


def test_a_stream_is_cancelled_by_the_id_that_its_client_saw() -> None:
    with live(FakeEngine(say(LONG, step_s=0.01))) as server:
        client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)
        with pytest.raises(openai.APIError) as caught:
            for chunk in client.chat.completions.create(model="", messages=HELLO["messages"], stream=True):
                server.post(f"/v1/requests/{chunk.id}/cancel")
        assert caught.value.code == "request_cancelled"
        until(lambda: list(server.engine.aborted.values()) == ["decode"], within_s=0.5)


def test_cancelling_an_unknown_or_finished_request_is_a_404() -> None:
    with live(FakeEngine(say("hello"))) as server:
        done = server.post("/v1/chat/completions", HELLO).json()["id"]
        for id in (done, "chatcmpl-unknown"):
            response = server.post(f"/v1/requests/{id}/cancel")
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "request_not_found"


def test_a_cancelled_whole_reply_is_an_error_that_is_not_retried() -> None:
    with live(FakeEngine(say(LONG, step_s=0.01))) as server, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.post, "/v1/chat/completions", HELLO)
        until(lambda: bool(server.engine.streams))
        (id,) = server.engine.streams
        assert server.post(f"/v1/requests/{id}/cancel").json() == {
            "id": id,
            "object": "request",
            "cancelled": True,
        }
        response = reply.result(5)
        assert response.status_code == 499 and response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("stream", [False, True])
def test_the_time_limit_is_an_error_of_its_own(stream: bool) -> None:
    with live(FakeEngine(say(LONG, step_s=0.01))) as server:
        response = server.post("/v1/chat/completions", HELLO | {"timeout": 0.1, "stream": stream})
        error = chunks(response.text)[-1]["error"] if stream else response.json()["error"]
        assert response.status_code == (200 if stream else 504)
        assert error["code"] == "request_timeout" and "[DONE]" not in response.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_stops_tells_what_still_runs(stream: bool) -> None:
    with live(FakeEngine(say(LONG, prefill_s=60))) as server:
        connection = server.send("/v1/chat/completions", HELLO | {"stream": stream})
        until(lambda: bool(server.engine.streams))
    assert server.engine.state == "stopped"
    assert list(server.engine.aborted.values()) == ["prefill"]
    with connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 200 " if stream else b"HTTP/1.1 503 ")
    assert b'"code":"shutting_down"' in answer


def test_a_preempted_request_is_not_repeated_by_its_client() -> None:
    with live(FakeEngine(say(LONG, prefill_s=60))) as server, ThreadPoolExecutor(1) as pool:
        reply = pool.submit(server.post, "/v1/chat/completions", HELLO)
        until(lambda: bool(server.engine.streams))
        (id,) = server.engine.streams
        server.engine.loop.call_soon_threadsafe(server.engine.abort, id, None)
        response = reply.result(5)
    assert response.status_code == 409 and response.headers["x-should-retry"] == "false"
    assert response.json()["error"]["code"] == "request_preempted"
