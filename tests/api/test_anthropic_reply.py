"""The official client rebuilds from the stream the very message that the single object is."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx2
import pytest
from anthropic import Anthropic
from anthropic.types import Message
from hypothesis import given
from hypothesis import strategies as st

from tests.api.test_replies import events_of, outputs
from tests.live import chunks
from treadle.api.anthropic_reply import PING, MessageCollector, MessageHead, MessageWriter, fault
from treadle.errors import EngineFault
from treadle.output.stream import Event, Kind, ToolDelta
from treadle.types import Finish, Output, Usage

HEAD = MessageHead("msg_1", "the/model", 9)
USAGE = Usage(prompt_tokens=9, completion_tokens=7, cached_tokens=4)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=6)
VALUES: Any = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=5,
)


def said(text: str) -> Event:
    return Event(Kind.TEXT, text, ids=(7,))


def thought(text: str) -> Event:
    return Event(Kind.REASONING, text)


def call(index: int, arguments: str, cuts: list[int]) -> list[Event]:
    """One tool call, its arguments cut in pieces."""
    edges = sorted({0, len(arguments), *(cut % (len(arguments) + 1) for cut in cuts)})
    pieces = [arguments[a:b] for a, b in pairwise(edges)]
    head = ToolDelta(index, f"call_{index}", f"tool{index}")
    return [Event(Kind.TOOL, tool=tool) for tool in (head, *(ToolDelta(index, arguments=piece) for piece in pieces))]


def done(finish: Finish = Finish.STOP, stop: str | None = None) -> Event:
    return Event(Kind.DONE, finish=finish, stop_string=stop, usage=USAGE)


@st.composite
def replies(draw: st.DrawFn) -> list[Event]:
    """The events of a reply with text, thinking and calls in any order."""
    made: list[Event] = [Event(Kind.PROGRESS, prefilled=3)]
    calls = 0
    for kind in draw(st.lists(st.sampled_from(Kind), max_size=8)):
        if kind is Kind.TOOL:
            arguments = json.dumps(draw(st.dictionaries(TEXT, VALUES, max_size=3)))
            made += call(calls, arguments, draw(st.lists(st.integers(0, 99), max_size=4)))
            calls += 1
        elif kind in (Kind.TEXT, Kind.REASONING):
            made += [Event(kind, text) for text in draw(st.lists(TEXT, min_size=1, max_size=3))]
    ends = st.sampled_from([done(), done(Finish.LENGTH), done(stop="END")])
    return [*made, draw(ends)]


def written(events: list[Event], head: MessageHead = HEAD) -> bytes:
    writer = MessageWriter(head)
    return writer.opening() + b"".join(writer.chunk(0, event) for event in events) + writer.closing(USAGE)


def collected(events: list[Event], head: MessageHead = HEAD) -> dict[str, Any]:
    collector = MessageCollector(head)
    for event in events:
        collector.add(0, event)
    return collector.reply(USAGE)


class Wire:
    """The official client, given bytes instead of a server."""

    def __init__(self) -> None:
        self.body = b""
        transport = httpx2.MockTransport(self.answer)
        self.client = Anthropic(api_key="none", max_retries=0, http_client=httpx2.Client(transport=transport))

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.body)

    def read(self, body: bytes) -> Message:
        self.body = body
        with self.client.messages.stream(
            model="m", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            return stream.get_final_message()


WIRE = Wire()


def plain(message: Message) -> dict[str, Any]:
    """Without the fields that the client adds by itself."""
    found = message.model_dump(exclude_unset=True)
    for block in found["content"]:
        block.pop("parsed_output", None)
    return found if found.pop("stop_details", None) is None else {}


def same(events: list[Event], head: MessageHead = HEAD) -> dict[str, Any]:
    """Check that both ways say the same, and return it."""
    whole = collected(events, head)
    expected = plain(Message.model_validate(whole))
    assert plain(WIRE.read(written(events, head))) == expected
    return whole


@given(replies(), st.booleans())
def test_streamed_equals_whole(events: list[Event], omit: bool) -> None:
    same(events, MessageHead("msg_1", "the/model", 9, omit))


@given(outputs(), st.lists(st.text(st.sampled_from("helowt "), min_size=1, max_size=3), max_size=2))
def test_streamed_equals_whole_for_tokens_in_any_groups(made: list[Output], stops: list[str]) -> None:
    events = list(events_of(made, stops))
    whole = same(events)
    assert "".join(block["text"] for block in whole["content"]) == "".join(event.text for event in events)


@given(replies())
def test_the_events_are_named_and_in_order(events: list[Event]) -> None:
    """Start, then one block after the other, each opened, filled and closed; then the end."""
    data = written(events).decode()
    sent = chunks(data)
    assert data.count("event: ") == len(sent)
    for part, payload in zip(data.split("\n\n"), sent, strict=False):
        name, line = part.split("\n")
        assert name == f"event: {payload['type']}"
        assert line == "data: " + json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
    kinds = [payload["type"] for payload in sent]
    assert kinds[:2] == ["message_start", "ping"] and kinds[-2:] == ["message_delta", "message_stop"]
    index, opened = -1, False
    for payload in sent[2:-2]:
        if payload["type"] == "content_block_start":
            assert not opened
            index, opened = index + 1, True
        elif payload["type"] == "content_block_stop":
            opened = False
        else:
            assert payload["type"] == "content_block_delta" and opened
        assert payload["index"] == index
    assert not opened


def test_thinking_is_signed_once_before_the_text_begins() -> None:
    sent = chunks(written([thought("h"), thought("m"), said("hello"), done()]).decode())[2:-2]
    shapes = [payload.get("delta", payload.get("content_block", {})).get("type") for payload in sent]
    assert shapes == [
        "thinking",
        "thinking_delta",
        "thinking_delta",
        "signature_delta",
        None,
        "text",
        "text_delta",
        None,
    ]
    assert sent[3]["delta"]["signature"] and [payload["index"] for payload in sent] == [0] * 5 + [1] * 3


def test_a_signature_belongs_to_its_text() -> None:
    one, two, other = (collected([*events, done()])["content"][0]["signature"] for events in (
        [thought("hm")], [thought("h"), thought("m")], [thought("ha")],
    ))  # fmt: skip
    assert one == two != other


def test_omitted_thinking_is_a_signature_alone() -> None:
    events = [thought("secret"), said("hello"), done()]
    head = MessageHead("msg_1", "m", 9, omit_thinking=True)
    assert b"secret" not in written(events, head)
    block = same(events, head)["content"][0]
    assert block["thinking"] == "" and block["signature"] == collected(events)["content"][0]["signature"]


def test_arguments_stream_as_they_come_and_are_an_object_at_the_end() -> None:
    events = [*call(0, '{"x": 1, "y": "z"}', [4, 9]), *call(1, "{}", []), done()]
    deltas = [
        p["delta"]["partial_json"] for p in chunks(written(events).decode()) if p["type"] == "content_block_delta"
    ]
    assert deltas == ['{"x"', ": 1, ", '"y": "z"}', "{}"]
    content = same(events)["content"]
    assert [(block["id"], block["name"], block["input"]) for block in content] == [
        ("call_0", "tool0", {"x": 1, "y": "z"}),
        ("call_1", "tool1", {}),
    ]


def test_a_call_that_was_cut_has_the_arguments_that_came() -> None:
    whole = same([*call(0, '{"x": 1, "y": [2, ', [5]), done(Finish.LENGTH)])
    assert (whole["content"][0]["input"], whole["stop_reason"]) == ({"x": 1, "y": [2]}, "max_tokens")


@given(st.dictionaries(TEXT, VALUES, min_size=1, max_size=3), st.integers(0))
def test_half_a_call_is_read_as_the_client_reads_it(arguments: Any, cut: int) -> None:
    text = json.dumps(arguments)
    same([*call(0, text[: cut % len(text)], []), done(Finish.LENGTH)])


@pytest.mark.parametrize(
    ("events", "reason", "sequence"),
    [
        ([said("a"), done()], "end_turn", None),
        ([done()], "end_turn", None),
        ([said("a"), done(Finish.LENGTH)], "max_tokens", None),
        ([said("a"), done(stop="END")], "stop_sequence", "END"),
        ([*call(0, "{}", []), done()], "tool_use", None),
        ([*call(0, "{}", [])[:1], done(stop="END")], "stop_sequence", "END"),
        ([thought("hm"), done(Finish.LENGTH)], "max_tokens", None),
    ],
)
def test_the_stop_reason_says_how_it_ended(events: list[Event], reason: str, sequence: str | None) -> None:
    whole = same(events)
    assert (whole["stop_reason"], whole["stop_sequence"]) == (reason, sequence)


def test_cached_tokens_are_no_part_of_the_input() -> None:
    assert collected([done()])["usage"] == {
        "input_tokens": 5,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 7,
    }
    first = chunks(written([done()]).decode())[0]["message"]
    assert first["usage"]["input_tokens"] == 9 and first["content"] == [] and first["stop_reason"] is None


def test_a_fault_and_a_ping_are_named_events() -> None:
    assert PING == b'event: ping\ndata: {"type":"ping"}\n\n'
    name, data = fault(EngineFault("It broke.")).decode().strip().split("\n")
    assert name == "event: error"
    assert json.loads(data[6:]) == {"type": "error", "error": {"type": "api_error", "message": "It broke."}}


def test_a_call_that_goes_on_after_another_block_is_a_bug_and_not_a_second_call() -> None:
    first, piece = call(0, "{}", [])
    writer = MessageWriter(HEAD)
    writer.chunk(0, first)
    writer.chunk(0, said("between"))
    with pytest.raises(AssertionError):
        writer.chunk(0, piece)
