"""The head of a request has an end, in bytes and in time, for it is read before any key is checked."""

from __future__ import annotations

import pytest

from tests.fakes_engine import FakeEngine, say
from tests.live import live
from treadle.api import connection
from treadle.api.connection import MAX_HEAD

HEAD = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


def test_headers_without_end_are_refused() -> None:
    with live(FakeEngine(say("hello"))) as server, server.connect() as client:
        client.sendall(HEAD + b"X-Long: ")
        with pytest.raises(OSError):
            for _ in range(1000):
                client.sendall(b"a" * MAX_HEAD)
        assert server.get("/health").status_code == 200


@pytest.mark.parametrize("start", [b"", b"GET /hea", HEAD], ids=["nothing", "line", "headers"])
def test_a_head_that_does_not_come_ends_the_connection(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.2)
    with live(FakeEngine(say("hello"))) as server, server.connect() as client:
        client.sendall(start)
        assert client.recv(100) == b""


def test_a_slow_head_and_a_slow_answer_are_both_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_S", 0.4)
    with live(FakeEngine(say("hello", prefill_s=0.6))) as server, server.connect() as client:
        body = b'{"messages": [{"role": "user", "content": "hi"}]}'
        client.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n")
        client.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        client.sendall(b"GET /hea")  # the next request begins while this one is answered
        assert client.recv(100).startswith(b"HTTP/1.1 200")
