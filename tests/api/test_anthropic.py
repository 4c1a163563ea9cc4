"""Anthropic's routes of a live server: what they answer on the wire, and every error in Anthropic's shape."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.conformance.test_wire import read_until
from tests.fakes_engine import FakeEngine, say
from tests.live import Live, chunks, live, until
from treadle.errors import MemoryRefused, QueueFull, TreadleError
from treadle.types import Finish

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {"max_tokens": 99, "messages": [{"role": "user", "content": "hi"}]}
PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
LONG = {"messages": [{"role": "user", "content": "x" * 300}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello world", cached=2))) as running:
        yield running


def error_of(response: httpx.Response, status: int) -> tuple[str, str]:
    """The type and the message."""
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"type", "error"} and body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    return body["error"]["type"], body["error"]["message"]


def test_a_message(server: Live) -> None:
    body = server.post(MESSAGES, HELLO | {"model": "fake"}).json()
    assert body.pop("id").startswith("msg_")
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "fake",
        "content": [{"type": "text", "text": "hello world"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 3,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 2,
            "output_tokens": len(say("hello world").steps),
        },
    }


@pytest.mark.parametrize("name", ["fake", "tests/fake", "claude-sonnet-4-5", "claude-3-5-haiku-20241022", "", None])
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_the_model_s_names_and_all_claudes_are_the_served_model(server: Live, path: str, name: str | None) -> None:
    response = server.post(path, HELLO | {"model": name})
    assert response.status_code == 200 and response.json().get("model", "fake") == "fake"


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize("name", ["gpt-4", "my-claude-3"])
def test_another_model_is_not_found(server: Live, path: str, name: str) -> None:
    kind, message = error_of(server.post(path, HELLO | {"model": name}), 404)
    assert kind == "not_found_error" and name in message


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_queries_and_beta_headers_are_ignored(server: Live, path: str) -> None:
    headers = {"anthropic-beta": "some-2099-01-01,other", "anthropic-version": "2023-06-01", "x-api-key": "any"}
    assert server.post(path + "?beta=true&x=1", HELLO, headers=headers).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"temperature": 3}, "temperature"),
        ({"magic": 1}, "magic"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0]: This model cannot see"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].source"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
    ],
)
def test_bad_fields_are_named_even_for_a_stream(server: Live, fields: dict[str, Any], named: str, stream: bool) -> None:
    kind, message = error_of(server.post(MESSAGES, HELLO | fields | {"stream": stream}), 400)
    assert kind == "invalid_request_error" and named in message


def test_broken_json_and_wrong_routes_have_the_same_shape(server: Live) -> None:
    error_of(httpx.post(server.url + MESSAGES, content=b"[", timeout=10), 400)
    error_of(server.get(MESSAGES), 405)
    assert error_of(server.post("/v1/messages/batches", {}), 404)[0] == "not_found_error"


def test_a_prompt_over_the_context_has_the_words_that_agents_read(server: Live) -> None:
    counted = server.post(COUNT, LONG).json()["input_tokens"]
    kind, message = error_of(server.post(MESSAGES, HELLO | LONG), 400)
    assert kind == "invalid_request_error" and 256 < counted <= 310
    assert message == f"prompt is too long: {counted} tokens > 256 maximum"


def test_a_hopeless_prompt_is_refused_and_counted_without_reading_all_of_it(server: Live) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 10_000_000}]}
    assert "prompt is too long" in error_of(server.post(MESSAGES, HELLO | body), 400)[1]
    assert server.post(COUNT, body).json()["input_tokens"] > 256


def test_a_body_over_the_limit_is_too_large() -> None:
    with live(FakeEngine(), max_body_mb=0.1) as server:
        response = httpx.post(server.url + MESSAGES, content=b" " * 200_000, timeout=10)
        assert error_of(response, 413)[0] == "request_too_large"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFull("Too many requests."), 429, "rate_limit_error"),
        (MemoryRefused("It needs 9 GB, 1 GB is free."), 503, "overloaded_error"),
    ],
)
def test_a_refusal_says_when_to_retry(refusal: TreadleError, status: int, kind: str, stream: bool) -> None:
    with live(FakeEngine()) as server:
        server.engine.refusal = refusal
        response = server.post(MESSAGES, HELLO | {"stream": stream})
        assert error_of(response, status)[0] == kind
        assert int(response.headers["retry-after"]) >= 1


def test_a_bug_says_nothing_of_the_inside() -> None:
    def buggy(_: object) -> Any:
        raise RuntimeError("secret")

    with live(FakeEngine(buggy)) as server:
        kind, message = error_of(server.post(MESSAGES, HELLO), 500)
        assert kind == "api_error" and "secret" not in message


@pytest.mark.parametrize("stream", [False, True])
def test_a_fault_is_an_error_in_both_forms(stream: bool) -> None:
    with live(FakeEngine(say("hello", finish=Finish.ERROR, error="It broke."))) as server:
        response = server.post(MESSAGES, HELLO | {"stream": stream})
        expected = {"type": "error", "error": {"type": "api_error", "message": "It broke."}}
        if stream:
            assert response.text.endswith(f"event: error\ndata: {json.dumps(expected, separators=(',', ':'))}\n\n")
            assert chunks(response.text)[-1] == expected and "message_stop" not in response.text
        else:
            assert error_of(response, 500) == ("api_error", "It broke.")


def test_the_start_comes_before_the_prompt_is_computed() -> None:
    with (
        live(FakeEngine(say("hello", prefill_s=60))) as server,
        server.send(MESSAGES, HELLO | {"stream": True}) as connection,
    ):
        connection.settimeout(2)
        data = read_until(connection, b"event: ping")
        assert b"text/event-stream" in data and b"event: message_start\ndata: " in data
        assert b'"input_tokens":5' in data


def test_a_silent_stream_pings_and_has_no_comments() -> None:
    with (
        live(FakeEngine(say("hello", queue_s=0.1, prefill_s=0.2)), keepalive_s=0.05) as server,
        server.send(MESSAGES, HELLO | {"stream": True}) as connection,
    ):
        data = read_until(connection, b"message_stop").decode()
    before, _ = data.split("event: content_block_start")
    assert before.count("event: ping\n") >= 3
    assert "\n: " not in data and data.count("event: message_start") == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["queue_s", "prefill_s", "step_s"])
def test_a_closed_connection_aborts_at_once(phase: str, stream: bool) -> None:
    with live(FakeEngine(say("hello " * 500, **{phase: 0.05 if phase == "step_s" else 60}))) as server:
        connection = server.send(MESSAGES, HELLO | {"stream": stream})
        until(lambda: bool(server.engine.streams))
        connection.close()
        until(lambda: bool(server.engine.aborted) and not server.engine.streams, within_s=2)


def test_the_attribution_line_never_reaches_the_prompt() -> None:
    """Its value changes with each request; a text that only mentions it is left alone."""
    with live(FakeEngine()) as server:
        for value in ("a", "b"):
            line = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=1; cch={value};"}
            server.post(MESSAGES, HELLO | {"system": [line, {"type": "text", "text": "be kind"}]})
        server.post(MESSAGES, HELLO | {"system": "be kind"})
        server.post(MESSAGES, HELLO | {"system": "about x-anthropic-billing-header: a;"})
        first, second, plain, mention = (request.prompt.tolist() for request in server.engine.requests)
        assert first == second == plain and len(mention) > len(plain)


def test_thinking_reaches_the_template() -> None:
    template = "{% if enable_thinking %}THINK{% endif %}{{ messages[0].content }}"
    from tests.fakes_engine import tokenizer

    with live(FakeEngine(tokenizer=tokenizer(template), chat_template=template)) as server:
        counts = [
            server.post(COUNT, HELLO | {"thinking": thinking}).json()["input_tokens"]
            for thinking in ({"type": "enabled", "budget_tokens": 1024}, {"type": "disabled"}, None)
        ]
        assert counts == [7, 2, 2]


def test_limits_and_sampling_reach_the_engine() -> None:
    with live(FakeEngine(), request_timeout_s=50) as server:
        server.post(MESSAGES, HELLO | {"temperature": 0.5, "top_k": 7, "top_p": 0.5, "seed": 5, "cache_salt": "me"})
        (request,) = server.engine.requests
        assert (request.max_tokens, request.timeout_s, request.cache_salt) == (99, 50, "me")
        drawn = request.sampling
        assert (drawn.temperature, drawn.top_k, drawn.top_p, drawn.seed) == (0.5, 7, 0.5, 5)
        assert request.boundaries or len(request.prompt) == 5
