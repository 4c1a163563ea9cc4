"""The routes of a live server: what they answer, and every error in OpenAI's shape."""

from __future__ import annotations

import gzip
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.fakes_engine import FakeEngine, say
from tests.live import Live, live, until
from treadle.api import body as bodies
from treadle.errors import MemoryRefused, QueueFull, TreadleError
from treadle.types import Finish

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello world"))) as running:
        yield running


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    body: dict[str, Any] = response.json()
    assert set(body) == {"error"} and {"message", "type", "param", "code"} <= set(body["error"])
    assert isinstance(body["error"]["message"], str) and body["error"]["message"].endswith(".")
    return dict(body["error"])


@pytest.mark.parametrize("path", [CHAT, "/chat/completions"])
def test_chat_answers_under_both_paths(server: Live, path: str) -> None:
    body = server.post(path, HELLO).json()
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert body["object"] == "chat.completion" and body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("name", ["fake", "tests/fake", "smollm2", "", None])
def test_every_name_of_the_model_is_answered_under_the_served_one(server: Live, name: str | None) -> None:
    assert server.post(CHAT, HELLO | {"model": name}).json()["model"] == "fake"


def test_an_unknown_model_is_a_404(server: Live) -> None:
    error = error_of(server.post(CHAT, HELLO | {"model": "gpt-4"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")


def test_models_tell_what_the_model_can(server: Live) -> None:
    listed = server.get("/v1/models").json()
    (entry,) = listed["data"]
    assert (listed["object"], entry["object"], entry["id"]) == ("list", "model", "fake")
    assert entry["context_length"] == 256
    assert entry["layers"] == {"rows": 2, "windowed": 1} and entry["batching"]["mode"] == "ragged"


@pytest.mark.parametrize("id", ["fake", "tests/fake"])
def test_one_model_is_found_by_an_id_with_slashes(server: Live, id: str) -> None:
    assert server.get(f"/v1/models/{id}").json()["id"] == "fake"
    assert error_of(server.get(f"/v1/models/{id}-2"), 404)["code"] == "model_not_found"


def test_health_may_be_asked_for_without_its_body(server: Live) -> None:
    answer = httpx.head(server.url + "/health", timeout=20)
    assert (answer.status_code, answer.content) == (200, b"")


def test_a_slash_at_the_end_changes_nothing(server: Live) -> None:
    assert server.get("/v1/models/").json() == server.get("/v1/models").json()


def test_the_root_gives_a_hint(server: Live) -> None:
    assert "/v1/chat/completions" in server.get("/").json()["routes"]


def test_unknown_routes_and_methods_have_the_same_shape(server: Live) -> None:
    assert error_of(server.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = server.get(CHAT)
    assert error_of(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [({"messages": []}, "messages"), ({"temperature": 3}, "temperature"), ({"magic": 1}, "magic")],
)
def test_bad_fields_are_plain_json_even_for_a_stream(
    server: Live, fields: dict[str, Any], param: str, stream: bool
) -> None:
    error = error_of(server.post(CHAT, HELLO | fields | {"stream": stream}), 400)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


def test_broken_json_is_a_400(server: Live) -> None:
    response = httpx.post(server.url + CHAT, content=b'{"messages": [', timeout=10)
    assert error_of(response, 400)["code"] == "invalid_json"


def test_ids_beyond_the_vocabulary_are_a_400(server: Live) -> None:
    assert error_of(server.post("/v1/completions", {"prompt": [9999]}), 400)["param"] == "prompt"
    assert error_of(server.post(CHAT, HELLO | {"logit_bias": {"9999": 1}}), 400)["param"] == "logit_bias"


def test_a_prompt_over_the_context_names_both_numbers(server: Live) -> None:
    error = error_of(server.post("/v1/completions", {"prompt": [5] * 300}), 400)
    assert error["code"] == "context_length_exceeded"
    assert (error["n_prompt_tokens"], error["n_ctx"]) == (300, 256)
    assert "300" in error["message"] and "256" in error["message"]


def test_ten_megabytes_in_one_message_are_refused_without_the_engine(server: Live) -> None:
    seen = len(server.engine.requests)
    began = time.monotonic()
    body = {"messages": [{"role": "user", "content": "x" * 10_000_000}], "stream": True}
    assert error_of(server.post(CHAT, body), 400)["code"] == "context_length_exceeded"
    assert time.monotonic() - began < 2
    assert len(server.engine.requests) == seen


def test_a_body_over_the_limit_is_a_413_with_or_without_a_length() -> None:
    with live(FakeEngine(), max_body_mb=0.5) as server:
        data = b" " * 2_000_000
        error = error_of(httpx.post(server.url + CHAT, content=data, timeout=10), 413)
        assert error["code"] == "request_too_large"
        pieces = (data[i : i + 50_000] for i in range(0, len(data), 50_000))
        error_of(httpx.post(server.url + CHAT, content=pieces, timeout=10), 413)
        assert server.post(CHAT, HELLO).status_code == 200


def test_a_declared_length_over_the_limit_is_answered_before_the_body_comes(server: Live) -> None:
    with server.connect() as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_a_body_that_does_not_go_on_is_given_up(server: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "STALL_S", 0.2)
    with server.connect() as connection:
        connection.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{{".encode())
        assert connection.recv(100).startswith(b"HTTP/1.1 400 ")


def test_a_compressed_body_is_refused_by_its_header(server: Live) -> None:
    reply = httpx.post(server.url + CHAT, content=gzip.compress(b"{}"), headers={"content-encoding": "gzip"})
    assert error_of(reply, 400)["param"] == "content-encoding"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (QueueFull("Too many requests."), 429, "rate_limit_error"),
        (MemoryRefused("It needs 9 GB, 1 GB is free."), 503, "insufficient_memory_error"),
    ],
)
def test_a_refusal_of_the_engine_has_its_status_and_says_when_to_retry(
    refusal: TreadleError, status: int, kind: str, stream: bool
) -> None:
    with live(FakeEngine()) as server:
        server.engine.refusal = refusal
        response = server.post(CHAT, HELLO | {"stream": stream, "n": 2})
        assert error_of(response, status)["type"] == kind
        assert int(response.headers["retry-after"]) >= 1
        assert server.get("/health").json()["running"] == 0


def test_health_says_ready_with_counts() -> None:
    with live(FakeEngine(say("hello", prefill_s=30))) as server:
        assert server.get("/health").json() == {
            "status": "ready",
            "running": 0,
            "waiting": 0,
            "model": "fake",
            "kv": {"bits": "16", "why": "", "layers": {}, "delta_percent": None, "losses": {}},
            "speculation": {"sources": ["lookup", "forced"], "draft_model": None, "why": ""},
        }
        with server.send(CHAT, HELLO):
            until(lambda: server.get("/health").json()["running"] == 1)


@pytest.mark.parametrize("state", ["loading", "failed", "stuck", "stopping"])
def test_health_tells_the_truth_when_nothing_can_be_answered(state: str) -> None:
    with live(FakeEngine()) as server:
        server.engine.state = state
        server.engine.failure = "No such file." if state == "failed" else None
        response = server.get("/health")
        assert response.status_code == 503 and response.json()["status"] == state
        assert response.json()["reason"] == ("No such file." if state == "failed" else f"The engine is {state}.")


def test_requests_while_loading_are_told_to_come_again() -> None:
    with live(FakeEngine()) as server:
        server.engine.state = "loading"
        response = server.post(CHAT, HELLO | {"stream": True})
        assert error_of(response, 503)["code"] == "not_ready"
        assert int(response.headers["retry-after"]) >= 1


def test_a_fault_in_one_request_is_a_500_and_the_next_one_works() -> None:
    scripts = iter([say("hel", finish=Finish.ERROR, error="The logits are not numbers."), say("hello")])
    with live(FakeEngine(lambda _: next(scripts))) as server:
        error = error_of(server.post(CHAT, HELLO), 500)
        assert (error["message"], error["code"]) == ("The logits are not numbers.", "engine_fault")
        assert server.post(CHAT, HELLO).json()["choices"][0]["message"]["content"] == "hello"


def test_a_bug_is_a_500_that_says_nothing_of_the_inside() -> None:
    def buggy(_: object) -> Any:
        raise RuntimeError("secret")

    with live(FakeEngine(buggy)) as server:
        error = error_of(server.post(CHAT, HELLO), 500)
        assert error["code"] == "internal_error" and "secret" not in error["message"]


def test_the_limit_and_the_rest_reach_the_engine() -> None:
    with live(FakeEngine(), request_timeout_s=50) as server:
        server.post(CHAT, HELLO | {"max_tokens": 3, "timeout": 90, "cache_salt": "me", "seed": 5})
        (request,) = server.engine.requests
        assert (request.max_tokens, request.timeout_s, request.cache_salt) == (3, 50, "me")
        assert request.sampling.seed == 5 and request.stop_ids == frozenset({0})


def test_choices_and_prompts_become_requests_in_order() -> None:
    with live(FakeEngine(lambda request: say("hello" * len(request.prompt)))) as server:
        body = server.post("/v1/completions", {"prompt": [[5], [6, 7]], "n": 2, "seed": 3}).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"] for choice in body["choices"]] == ["hello"] * 2 + ["hellohello"] * 2
        assert body["usage"]["prompt_tokens"] == 3 and body["usage"]["completion_tokens"] == 6
        seeds = [request.sampling.seed for request in server.engine.requests]
        assert seeds[:2] == seeds[2:] and seeds[0] == 3 != seeds[1]


def test_a_refusal_half_way_ends_the_choices_before_it() -> None:
    engine = FakeEngine(say("hello", prefill_s=30))

    def full(_: object) -> Any:
        if engine.requests[1:]:
            raise QueueFull("Too many requests.")
        return say("hello", prefill_s=30)

    engine._plan = full
    with live(engine) as server:
        error_of(server.post(CHAT, HELLO | {"n": 3}), 429)
        assert not server.engine.streams and len(server.engine.aborted) == 1


def test_more_replies_than_may_ever_wait_are_no_matter_of_trying_again() -> None:
    with live(FakeEngine(say("hello")), max_rows=2, max_waiting=3) as server:
        body = {"prompt": ["a", "b", "c"], "max_tokens": 1}
        assert error_of(server.post("/v1/completions", body | {"n": 2}), 400)["param"] == "n"
        assert server.post("/v1/completions", body).status_code == 200


def test_echo_repeats_the_prompt() -> None:
    with live(FakeEngine(say(" world"))) as server:
        body = server.post("/v1/completions", {"prompt": "hello", "echo": True}).json()
        assert body["choices"][0]["text"] == "hello world"
