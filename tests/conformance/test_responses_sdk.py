"""The official `openai` client's Responses API against a live server with a scripted engine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.fakes_engine import FakeEngine, say, tokenizer
from tests.live import Live, chunks, live
from treadle.errors import MemoryRefused, QueueFull
from treadle.types import Finish, Request

SAID = "hello wörld 👩‍👩‍👧‍👦"
PATH = "/v1/responses"


def plan(request: Request) -> Any:
    return say(SAID, cached=2)


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(plan)) as running:
        yield running


@pytest.fixture
def client(server: Live) -> OpenAI:
    return client_of(server)


def client_of(server: Live) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20)


def prompt_of(server: Live) -> str:
    """What the engine got last."""
    return str(tokenizer().decode(server.engine.requests[-1].prompt))


def test_a_response(client: OpenAI) -> None:
    reply = client.responses.create(model="fake", input="hi")
    assert reply.output_text == SAID and reply.id.startswith("resp_")
    assert (reply.status, reply.model, reply.object, reply.error) == ("completed", "fake", "response", None)
    assert reply.usage is not None and reply.usage.input_tokens_details.cached_tokens == 2
    assert reply.usage.total_tokens == 5 + reply.usage.output_tokens
    assert reply.output[0].type == "message" and reply.output[0].status == "completed"


def test_a_streamed_response_is_the_same(client: OpenAI) -> None:
    whole = client.responses.create(model="fake", input="hi")
    with client.responses.stream(model="fake", input="hi") as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.usage == whole.usage and final.status == whole.status


def test_events_come_in_order_and_numbered(client: OpenAI) -> None:
    sent = list(client.responses.create(model="fake", input="hi", stream=True))
    kinds = [event.type for event in sent if event.type != "response.output_text.delta"]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds[-1] == "response.completed"
    assert [event.sequence_number for event in sent] == list(range(len(sent)))


def test_the_stream_ends_right_after_the_last_event(server: Live) -> None:
    text = server.post(PATH, {"input": "hi", "stream": True}).text
    assert "[DONE]" not in text and text.endswith("\n\n")
    assert chunks(text)[-1]["type"] == "response.completed"
    for block in text.split("\n\n")[:-1]:
        name, data = block.split("\n")
        assert name.removeprefix("event: ") == json.loads(data.removeprefix("data: "))["type"]


def test_a_limit_is_an_incomplete_response(client: OpenAI) -> None:
    reply = client.responses.create(model="fake", input="hi", max_output_tokens=16, temperature=0)
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"
    sent = list(client.responses.create(model="fake", input="hi", max_output_tokens=2, stream=True))
    assert sent[-1].type == "response.incomplete"


def test_a_conversation_goes_on_from_a_stored_response(server: Live, client: OpenAI) -> None:
    first = client.responses.create(model="fake", input="one", instructions="be brief")
    second = client.responses.create(model="fake", input="two", previous_response_id=first.id)
    assert prompt_of(server) == f"<|user|>one<|end|><|assistant|>{SAID}<|end|><|user|>two<|end|><|assistant|>"
    with client.responses.stream(model="fake", input="three", previous_response_id=second.id) as stream:
        third = stream.get_final_response()
    assert prompt_of(server).count(SAID) == 2 and third.previous_response_id == second.id
    assert client.responses.retrieve(third.id).output_text == SAID


def test_a_response_that_is_not_stored_cannot_be_continued(client: OpenAI) -> None:
    reply = client.responses.create(model="fake", input="hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="hi", previous_response_id=reply.id)
    assert (caught.value.param, caught.value.code) == ("previous_response_id", "previous_response_not_found")


def test_a_deleted_response_is_gone(client: OpenAI) -> None:
    reply = client.responses.create(model="fake", input="hi")
    client.responses.delete(reply.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(reply.id)


def test_logprobs_spell_the_text(client: OpenAI) -> None:
    reply = client.responses.create(model="fake", input="hi", include=["message.output_text.logprobs"], top_logprobs=2)
    assert reply.output[0].type == "message" and reply.output[0].content[0].type == "output_text"
    found = reply.output[0].content[0].logprobs
    assert found is not None and b"".join(bytes(entry.bytes) for entry in found).decode() == SAID
    assert all(len(entry.top_logprobs) == 2 for entry in found)
    sent = client.responses.create(model="fake", input="hi", top_logprobs=1, stream=True)
    streamed = [entry for event in sent if event.type == "response.output_text.delta" for entry in event.logprobs]
    assert [entry.token for entry in streamed] == [entry.token for entry in found]


# coding agents


def test_what_a_coding_agent_sends_is_answered(server: Live, client: OpenAI) -> None:
    body: dict[str, Any] = {
        "model": "fake",
        "instructions": "You are a coding agent.",
        "input": [
            {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandbox: none."}]},
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        ],
        "tools": [{"type": "web_search"}, {"type": "custom", "name": "apply_patch"}, {"type": "local_shell"}],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": None,
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "k",
        "extra_body": {"client_metadata": {"a": "b"}},
        "text": {"verbosity": "low"},
    }
    sent = list(client.responses.create(**body))
    assert sent[-1].type == "response.completed"
    system = "<|system|>You are a coding agent.\n\nSandbox: none.<|end|>"
    assert prompt_of(server) == system + "<|user|>hi<|end|><|assistant|>"


@pytest.mark.parametrize("body", [{"input": []}, {"input": ""}, {"input": [], "instructions": "x"}])
def test_an_empty_probe_is_answered(server: Live, body: dict[str, Any]) -> None:
    assert server.post(PATH, body).json()["status"] == "completed"


def test_a_long_silence_repeats_a_real_event() -> None:
    with live(FakeEngine(say("hello", prefill_s=0.3)), keepalive_s=0.05) as server:
        text = server.post(PATH, {"input": "hi", "stream": True}).text
        with client_of(server).responses.stream(model="fake", input="hi") as stream:
            assert stream.get_final_response().output_text == "hello"
    sent = chunks(text)
    assert [event["type"] for event in sent].count("response.in_progress") >= 3
    assert [event["sequence_number"] for event in sent] == list(range(len(sent)))
    assert ": keep-alive" not in text


def test_the_first_events_come_before_the_prompt_is_computed() -> None:
    with live(FakeEngine(say("hello", prefill_s=60))) as server:
        connection: socket.socket = server.send(PATH, {"input": "hi", "stream": True})
        with connection:
            connection.settimeout(2)
            data = b""
            while b"response.in_progress" not in data:
                data += connection.recv(65536)
            assert b"event: response.created" in data


# errors


def test_a_prompt_that_is_too_long_is_a_400_with_both_numbers(server: Live, client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="fake", input="ab " * 300)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")
    assert isinstance(caught.value.body, dict) and caught.value.body["n_ctx"] == 256


def test_a_prompt_that_is_too_long_fails_a_stream_with_the_code_that_agents_know(client: OpenAI) -> None:
    sent = list(client.responses.create(model="fake", input="ab " * 300, stream=True))
    assert [event.type for event in sent] == ["response.created", "response.in_progress", "response.failed"]
    assert sent[-1].type == "response.failed" and sent[-1].response.error is not None
    assert sent[-1].response.error.code == "context_length_exceeded"


def test_a_fault_in_the_middle_fails_the_stream_once() -> None:
    with live(FakeEngine(say("hello", finish=Finish.ERROR, error="It broke."))) as server:
        sent = list(client_of(server).responses.create(model="fake", input="hi", stream=True))
        assert sent[-1].type == "response.failed" and sent[-1].response.error is not None
        assert sent[-1].response.error.message == "It broke."
        with pytest.raises(openai.InternalServerError):
            client_of(server).responses.create(model="fake", input="hi")


@pytest.mark.parametrize("stream", [False, True])
def test_refusals_before_the_start_have_their_status(stream: bool) -> None:
    with live(FakeEngine()) as server:
        for refusal, kind in (
            (QueueFull("Full."), openai.RateLimitError),
            (MemoryRefused("No."), openai.APIStatusError),
        ):
            server.engine.refusal = refusal
            with pytest.raises(kind) as caught:
                client_of(server).responses.create(model="fake", input="hi", stream=stream)
            assert caught.value.status_code == refusal.status


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": 1}, "input"),
        ({"input": ["a"]}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "odd"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}]}]}, "input[0].content[0]"),
        ({"input": "a", "temperature": 9}, "temperature"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "background": True}, "background"),
        ({"input": "a", "conversation": "c"}, "conversation"),
        ({"input": "a", "n": 2}, "n"),
        ({"input": "a", "messages": []}, "messages"),
        ({"input": "a", "other": 1}, "other"),
        ({"input": "a", "tool_choice": "always"}, "tool_choice"),
        ({"input": "a", "tools": [{"type": "function"}]}, "tools[0].name"),
        ({"input": "a", "text": {"format": {"type": "odd"}}}, "text.format.type"),
        ({"input": "a", "reasoning": {"odd": 1}}, "reasoning.odd"),
        ({"input": "a", "metadata": {"a": 1}}, "metadata.a"),
        ({"input": "a", "stream_options": {"include_usage": True}}, "stream_options.include_usage"),
    ],
)
def test_a_bad_field_is_a_400_that_names_it(server: Live, body: dict[str, Any], param: str, stream: bool) -> None:
    response = server.post(PATH, body | {"stream": stream})
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_an_unknown_model_is_a_404(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="hi")


def test_a_response_can_be_cancelled_by_its_id() -> None:
    with live(FakeEngine(say("hello " * 50, step_s=0.05))) as server:
        kinds = []
        for event in client_of(server).responses.create(model="fake", input="hi", stream=True):
            kinds.append(event.type)
            if event.type == "response.created":
                assert server.post(f"/v1/requests/{event.response.id}/cancel").status_code == 200
        assert kinds[-1] == "response.failed"


def test_a_client_that_leaves_ends_its_request() -> None:
    from tests.live import until

    with live(FakeEngine(say("hello", prefill_s=60))) as server:
        with server.send(PATH, {"input": "hi", "stream": True}) as connection:
            until(lambda: server.engine.counts() == (1, 0))
            connection.close()
        until(lambda: len(server.engine.aborted) == 1)


def test_a_message_of_ten_megabytes_is_refused_fast(server: Live) -> None:
    seen = len(server.engine.requests)
    assert server.post(PATH, {"input": "x" * 10_000_000}).status_code == 400
    assert len(server.engine.requests) == seen
