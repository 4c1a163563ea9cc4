"""What a live server lets in: keys, origins, host names, rates."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes_engine import FakeEngine, say
from tests.live import Live, live, until
from treadle.api.security import Security, exposed_without_key
from treadle.api.server import Server
from treadle.config import Config

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "the quick brown fox"}]}
FOREIGN = "https://evil.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,x-other"}


@pytest.fixture(scope="module")
def locked() -> Iterator[Live]:
    with live(FakeEngine(), api_keys=("one", "two"), allowed_origins=("https://page.example",)) as running:
        yield running


@pytest.fixture(scope="module")
def unlocked() -> Iterator[Live]:
    with live(FakeEngine()) as running:
        yield running


def ask(server: Live, method: str, path: str, body: Any = None, **headers: str) -> httpx.Response:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.request(method, server.url + path, json=body, headers=named, timeout=20)


# keys


@pytest.mark.parametrize("headers", [{"authorization": "Bearer one"}, {"x_api_key": "two"}])
def test_either_header_and_either_key_lets_in(locked: Live, headers: dict[str, str]) -> None:
    assert ask(locked, "POST", CHAT, HELLO, **headers).status_code == 200


@pytest.mark.parametrize("headers", [{}, {"authorization": "Bearer three"}, {"x_api_key": "on"}])
@pytest.mark.parametrize("path", [CHAT, "/v1/models", "/monitor", "/docs", "/v1/no-such-route"])
def test_without_a_key_every_route_is_a_401(locked: Live, path: str, headers: dict[str, str]) -> None:
    method = "POST" if path == CHAT else "GET"
    response = ask(locked, method, path, **headers)
    assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


def test_the_messages_route_refuses_in_anthropic_s_shape(locked: Live) -> None:
    body = ask(locked, "POST", "/v1/messages", {}).json()
    assert (body["type"], body["error"]["type"]) == ("error", "authentication_error")


def test_health_needs_no_key(locked: Live) -> None:
    assert ask(locked, "GET", "/health").status_code == 200
    assert ask(locked, "GET", "/health/more").status_code == 401


def test_a_body_is_not_read_before_the_key_is_known(locked: Live) -> None:
    with locked.connect() as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n".encode())
        assert connection.recv(65536).startswith(b"HTTP/1.1 401")


# origins


@pytest.mark.parametrize("origin", ["https://page.example", "http://localhost:3000"])
def test_a_preflight_is_answered_without_a_key(locked: Live, origin: str) -> None:
    response = httpx.options(locked.url + CHAT, headers={"origin": origin, **PREFLIGHT})
    assert response.status_code == 204
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["access-control-allow-headers"] == "authorization,x-other"
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["vary"].lower() == "origin"


def test_a_page_may_read_answers_and_errors(locked: Live) -> None:
    for key, status in (("one", 200), ("wrong", 401)):
        response = ask(locked, "POST", CHAT, HELLO, origin="https://page.example", x_api_key=key)
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == "https://page.example"


def test_a_foreign_page_can_neither_ask_nor_send_nor_read(unlocked: Live) -> None:
    seen = len(unlocked.engine.requests)
    preflight = httpx.options(unlocked.url + CHAT, headers={"origin": FOREIGN, **PREFLIGHT})
    sent = ask(unlocked, "POST", CHAT, HELLO, origin=FOREIGN)
    read = ask(unlocked, "GET", "/v1/models", origin=FOREIGN)
    assert (preflight.status_code, sent.status_code, read.status_code) == (403, 403, 200)
    assert all("access-control-allow-origin" not in answer.headers for answer in (preflight, sent, read))
    assert sent.json()["error"]["code"] == "origin_not_allowed"
    assert len(unlocked.engine.requests) == seen


def test_every_page_may_ask_where_all_are_allowed() -> None:
    with live(FakeEngine(), allowed_origins=("*",)) as server:
        response = ask(server, "POST", CHAT, HELLO, origin=FOREIGN)
        assert response.status_code == 200 and response.headers["access-control-allow-origin"] == "*"


# host names


def test_a_name_that_was_made_to_point_here_is_refused(unlocked: Live) -> None:
    response = ask(unlocked, "POST", CHAT, HELLO, host="evil.example")
    assert response.status_code == 403 and response.json()["error"]["code"] == "host_not_allowed"
    for host in ("localhost", f"127.0.0.1:{unlocked.port}", "[::1]:80"):
        assert ask(unlocked, "GET", "/health", host=host).status_code == 200


def test_a_configured_name_is_answered() -> None:
    with live(FakeEngine(), allowed_hosts=("box.lan",)) as server:
        assert ask(server, "GET", "/health", host="box.lan:80").status_code == 200
        assert ask(server, "GET", "/health", host="evil.example").status_code == 403


# rates


def test_a_key_has_its_own_rate_and_no_header_changes_it() -> None:
    with live(FakeEngine(), api_keys=("one", "two"), rate_limit_per_minute=2) as server:
        forwarded = {"x_forwarded_for": "1.2.3.4", "forwarded": "for=1.2.3.5"}
        assert [ask(server, "POST", CHAT, HELLO, x_api_key="one").status_code for _ in range(3)] == [200, 200, 429]
        refused = ask(server, "POST", CHAT, HELLO, x_api_key="one", **forwarded)
        assert refused.status_code == 429 and 0 < int(refused.headers["retry-after"]) <= 30
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert ask(server, "POST", CHAT, HELLO, x_api_key="two").status_code == 200
        assert ask(server, "GET", "/v1/models", x_api_key="one").status_code == 200


def test_without_keys_the_address_of_the_connection_counts() -> None:
    with live(FakeEngine(), rate_limit_per_minute=2) as server:
        found = [
            ask(server, "POST", CHAT, HELLO, x_forwarded_for=f"1.2.3.{i}", x_api_key=str(i)).status_code
            for i in range(3)
        ]
        assert found == [200, 200, 429]


def test_guessing_keys_is_limited_too() -> None:
    with live(FakeEngine(), api_keys=("one",), rate_limit_per_minute=2) as server:
        found = [ask(server, "GET", "/v1/models", x_api_key=f"guess {i}").status_code for i in range(3)]
        assert found == [401, 401, 429]
        assert ask(server, "POST", CHAT, HELLO, x_api_key="one").status_code == 200


# streams, logs, warnings


def test_a_stream_passes_through_unbuffered() -> None:
    script = say("hello", prefill_s=60)
    headers = {"origin": "http://localhost:1", "x-api-key": "one"}
    with (
        live(FakeEngine(script), api_keys=("one",)) as server,
        httpx.stream("POST", server.url + CHAT, json=HELLO | {"stream": True}, headers=headers, timeout=5) as answer,
    ):
        texts = answer.iter_text()  # kept: an iterator that is dropped closes the connection
        assert '"role":"assistant"' in next(texts)
        until(lambda: server.engine.counts() == (1, 0))


def test_a_websocket_is_closed_and_never_reaches_the_routes() -> None:
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("reached")

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    asyncio.run(Security(app, Config())({"type": "websocket", "headers": []}, receive, send))
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_no_log_line_has_a_prompt_or_a_key(unlocked: Live, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    for body in (HELLO, HELLO | {"temperature": 9}, {"messages": [{"role": "the quick brown fox"}]}):
        ask(unlocked, "POST", CHAT, body, x_api_key="secret-key")
    assert "quick brown" not in caplog.text and "secret-key" not in caplog.text


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        ({"host": "0.0.0.0"}, True),
        ({"host": "box.lan"}, True),
        ({"host": "0.0.0.0", "api_keys": ("one",)}, False),
        ({"host": "127.0.0.1"}, False),
        ({"host": "::1"}, False),
        ({"host": "localhost"}, False),
    ],
)
def test_an_open_server_without_a_key_is_warned_about(settings: dict[str, Any], warned: bool) -> None:
    assert (exposed_without_key(Config.of(**settings)) is not None) is warned


def test_the_warning_is_logged_when_the_server_is_made(caplog: pytest.LogCaptureFixture) -> None:
    Server(FakeEngine(), Config(host="0.0.0.0"))
    assert "Listening on 0.0.0.0 without an API key" in caplog.text
