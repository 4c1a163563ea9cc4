"""The routes around the tokenizer say what the chat and completion routes do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes_engine import FakeEngine
from tests.live import Live, live

HELLO = [{"role": "user", "content": "hi wörld"}]
PROMPT = "<|user|>hi wörld<|end|><|assistant|>"


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine()) as running:
        yield running


@pytest.mark.parametrize("text", ["", "hello world", "wörld 👩‍👩‍👧‍👦\n\n", PROMPT])
def test_a_text_comes_back_from_its_ids(server: Live, text: str) -> None:
    made = server.post("/v1/tokenize", {"prompt": text}).json()
    assert made["count"] == len(made["tokens"]) and made["max_model_len"] == 256
    assert server.post("/v1/detokenize", {"tokens": made["tokens"]}).json() == {"text": text}


def test_messages_give_the_prompt_that_chat_gives_the_engine(server: Live) -> None:
    made = server.post("/v1/tokenize", {"messages": HELLO}).json()
    used = server.post("/v1/chat/completions", {"messages": HELLO}).json()["usage"]["prompt_tokens"]
    assert made["tokens"] == server.engine.requests[-1].prompt.tolist()
    assert made["count"] == used


def test_the_template_is_shown_with_its_variables(server: Live) -> None:
    assert server.post("/v1/apply-template", {"messages": HELLO}).json() == {"prompt": PROMPT}
    shouted = server.post("/v1/apply-template", {"messages": HELLO, "chat_template_kwargs": {"shout": True}})
    assert shouted.json() == {"prompt": "<|system|>SHOUT" + PROMPT}


def test_a_text_longer_than_the_context_is_counted(server: Live) -> None:
    assert server.post("/v1/tokenize", {"prompt": "ab" * 200}).json()["count"] == 400


def test_a_text_of_megabytes_is_refused_before_it_is_encoded_in_full(server: Live) -> None:
    response = server.post("/v1/tokenize", {"prompt": "x" * 10_000_000})
    assert response.status_code == 400 and response.json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "a", "messages": HELLO}, "prompt"),
        ("tokenize", {"prompt": ["a"]}, "prompt"),
        ("tokenize", {"prompt": "a", "add_special_tokens": 1}, "add_special_tokens"),
        ("tokenize", {"messages": [{"role": "x"}]}, "messages[0].role"),
        ("tokenize", {"prompt": "a", "other": 1}, "other"),
        ("detokenize", {}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": [10**6]}, "tokens"),
        ("detokenize", {"tokens": [10**30]}, "tokens[0]"),
        ("detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("apply-template", {}, "messages"),
        ("apply-template", {"messages": []}, "messages"),
        ("apply-template", {"messages": HELLO, "chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
    ],
)
def test_a_bad_body_is_a_400_that_names_the_field(server: Live, route: str, body: Any, param: str) -> None:
    response = server.post(f"/v1/{route}", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param


@pytest.mark.parametrize("route", ["tokenize", "detokenize", "apply-template", "embeddings"])
def test_another_model_is_a_404(server: Live, route: str) -> None:
    body = {"model": "other", **({"tokens": []} if route == "detokenize" else {"messages": HELLO})}
    assert server.post(f"/v1/{route}", body if route != "embeddings" else {"model": "other"}).status_code == 404


def test_embeddings_are_refused_with_a_reason(server: Live) -> None:
    response = server.post("/v1/embeddings", {"model": "fake", "input": "hi"})
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "model", "unsupported_model")
    assert "made to write text" in error["message"]
