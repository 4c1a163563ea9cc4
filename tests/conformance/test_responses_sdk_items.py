"""Thinking, text and calls of one response through the official client, whatever the model's markers are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import pytest
from openai import OpenAI

from tests.fakes_engine import FakeEngine, FakeModel
from tests.live import Live, live
from treadle.output.stream import Event, Kind, ToolDelta
from treadle.types import Finish, Usage

TOOLS: Any = [
    {
        "type": "function",
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        "strict": False,
    }
]
ANSWER = (
    Event(Kind.PROGRESS, prefilled=0),
    Event(Kind.REASONING, "Let me "),
    Event(Kind.REASONING, "see."),
    Event(Kind.TEXT, "Looking."),
    Event(Kind.TOOL, tool=ToolDelta(0, "call_a", "look")),
    Event(Kind.TOOL, tool=ToolDelta(0, arguments='{"at":')),
    Event(Kind.TOOL, tool=ToolDelta(0, arguments='"sky"}')),
    Event(Kind.TOOL, tool=ToolDelta(1, "call_b", "look", '{"at":"sea"}')),
    Event(Kind.DONE, finish=Finish.STOP, usage=Usage(5, 9)),
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    """A server whose every reply is `ANSWER`, after the stages that would find it in a model's text."""

    async def made(*_: Any) -> AsyncIterator[Event]:
        for event in ANSWER:
            yield event

    monkeypatch.setattr("treadle.api.openai.events", made)
    with live(FakeEngine(caps=replace(FakeModel().caps, context_length=4096))) as running:
        yield running


def client_of(server: Live) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20)


def said(output: Any) -> list[tuple[Any, ...]]:
    """What the items say, without their ids."""
    found: list[tuple[Any, ...]] = []
    for item in output:
        if item.type == "function_call":
            found.append((item.type, item.status, item.call_id, item.name, item.arguments))
        else:
            found.append((item.type, item.status, "".join(part.text for part in item.content)))
    return found


EXPECTED = [
    ("reasoning", "completed", "Let me see."),
    ("message", "completed", "Looking."),
    ("function_call", "completed", "call_a", "look", '{"at":"sky"}'),
    ("function_call", "completed", "call_b", "look", '{"at":"sea"}'),
]


def test_a_whole_response_has_an_item_for_each(server: Live) -> None:
    reply = client_of(server).responses.create(model="fake", input="hi", tools=TOOLS)
    assert said(reply.output) == EXPECTED and reply.output_text == "Looking."
    assert reply.tools[0].type == "function" and reply.tools[0].name == "look"


def test_a_streamed_response_has_the_same_items(server: Live) -> None:
    with client_of(server).responses.stream(model="fake", input="hi", tools=TOOLS) as stream:
        sent = list(stream)
        final = stream.get_final_response()
    assert said(final.output) == EXPECTED
    assert said(event.item for event in sent if event.type == "response.output_item.done") == EXPECTED
    thought = [event.delta for event in sent if event.type == "response.reasoning_text.delta"]
    assert "".join(thought) == "Let me see."
    arguments = [event for event in sent if event.type == "response.function_call_arguments.delta"]
    assert [event.snapshot for event in arguments] == ['{"at":', '{"at":"sky"}', '{"at":"sea"}']


def test_results_continue_a_stored_response(server: Live) -> None:
    client = client_of(server)
    first = client.responses.create(model="fake", input="hi", tools=TOOLS)
    results: Any = [
        {"type": "function_call_output", "call_id": call.call_id, "output": "blue"}
        for call in first.output
        if call.type == "function_call"
    ]
    second = client.responses.create(model="fake", input=results, tools=TOOLS, previous_response_id=first.id)
    assert said(second.output) == EXPECTED


def test_the_output_can_be_sent_back_as_input(server: Live) -> None:
    client = client_of(server)
    first = client.responses.create(model="fake", input="hi", tools=TOOLS, store=False)
    again: Any = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)]
    again.append({"type": "function_call_output", "call_id": "call_a", "output": "blue"})
    assert said(client.responses.create(model="fake", input=again, tools=TOOLS).output) == EXPECTED
