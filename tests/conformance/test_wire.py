"""Server-sent events as bytes on a raw socket: what comes when."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import MutableMapping
from typing import Any

import httpx

from tests.fakes_engine import FakeEngine, say, tokenizer
from tests.live import live, until
from treadle.api.chat import ChatWriter
from treadle.api.exchange import Streamed
from treadle.api.job import Choice, Job, Jobs
from treadle.api.reply import Head
from treadle.output.stream import TextStream, events
from treadle.types import Request

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        part = connection.recv(65536)
        assert part, f"the connection closed before {mark!r}: {data!r}"
        data += part
    return data


def test_headers_and_the_role_come_before_the_prompt_is_computed() -> None:
    with live(FakeEngine(say("hello", prefill_s=60))) as server, server.send(CHAT, HELLO) as connection:
        connection.settimeout(1)
        data = read_until(connection, b"\n\n")
        assert b"HTTP/1.1 200 OK" in data and b"text/event-stream" in data
        assert b'"delta":{"role":"assistant","content":""}' in data
        until(lambda: server.engine.counts() == (1, 0))


def test_the_first_bytes_of_a_legacy_stream_come_as_early() -> None:
    body = {"prompt": "hi", "stream": True}
    with (
        live(FakeEngine(say("hello", queue_s=60))) as server,
        server.send("/v1/completions", body) as connection,
    ):
        connection.settimeout(1)
        assert b": keep-alive\n\n" in read_until(connection, b"\n\n")


def test_a_silent_stream_is_kept_alive_by_comments_only() -> None:
    with (
        live(FakeEngine(say("hello", queue_s=0.1, prefill_s=0.2)), keepalive_s=0.05) as server,
        server.send(CHAT, HELLO) as connection,
    ):
        data = read_until(connection, b"[DONE]").decode()
    before, after = data.split('"content":"hello"')
    assert before.count(": keep-alive\n\n") >= 2
    assert before.count("data: ") == 2  # the role and the text itself
    assert "data: [DONE]" in after


def test_the_order_is_role_text_finish_done() -> None:
    with live(FakeEngine(say("hello world"))) as server:
        text = server.post(CHAT, HELLO).text
    events = text.split("\n\n")
    assert events.pop() == "" and events.pop() == "data: [DONE]"
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert all(set(delta["delta"]) == {"content"} and not delta["finish_reason"] for delta in deltas[1:-1])
    assert deltas[-1]["delta"] == {} and deltas[-1]["finish_reason"] == "stop"


def test_events_that_are_ready_at_once_leave_in_one_send() -> None:
    sent: list[MutableMapping[str, Any]] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        sent.append(message)

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def scenario() -> None:
        engine = FakeEngine(say("hello world"))
        engine.start()
        stream = engine.submit(Request("x", tokenizer().encode("hi", return_tensors="np")[0]))
        await asyncio.sleep(0.02)  # everything is in the queue by now
        job = Job("x", Jobs(engine))
        job.add(Choice(0, stream, events(aiter(stream), TextStream(tokenizer()), stream.abort), True))
        writer = ChatWriter(Head("x", 1, "m", "fp"), 1, False, None)
        await Streamed(job, writer, keepalive_s=60)({}, receive, send)

    asyncio.run(scenario())
    bodies = [message for message in sent if message["type"] == "http.response.body"]
    assert len(bodies) <= 2 and not bodies[-1]["more_body"]
    assert b"".join(message["body"] for message in bodies).count(b"data: ") >= 5


def test_clients_may_ask_for_the_head_of_the_root_before_anything_else() -> None:
    with live(FakeEngine()) as server:
        answer = httpx.head(server.url + "/", timeout=10)
        assert (answer.status_code, answer.content) == (200, b"")
