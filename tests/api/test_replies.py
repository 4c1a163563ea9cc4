"""A stream says exactly what the single object says, however the tokens were grouped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tests.fakes_engine import SPECIALS, tokenizer
from tests.live import chunks, data_lines
from treadle.api.chat import ChatCollector, ChatWriter
from treadle.api.completions import CompletionCollector, CompletionWriter
from treadle.api.logprobs import ChatLogprobs, LegacyLogprobs
from treadle.api.reply import ChunkWriter, Collector, Head
from treadle.output.stream import Event, TextStream
from treadle.types import Finish, Output, TokenLogprob, Usage

HEAD = Head("id-1", 1, "the/model", "fp")
USAGE = Usage(prompt_tokens=9, completion_tokens=7, cached_tokens=4)
TOKENS = st.lists(st.integers(len(SPECIALS), len(tokenizer()) - 1), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("helowt "), min_size=1, max_size=3), max_size=2)
FINISH = st.sampled_from([Finish.STOP, Finish.LENGTH])


@st.composite
def outputs(draw: st.DrawFn) -> list[Output]:
    """One sequence's outputs, its tokens in random groups."""
    tokens = draw(TOKENS)
    made: list[Output] = [Output("x", prefilled=3)]
    while tokens:
        size = draw(st.integers(1, 5))
        group, tokens = tokens[:size], tokens[size:]
        logprobs = tuple(TokenLogprob(t, -t / 8, ((t, -t / 8), (5, float("-inf")))) for t in group)
        made.append(Output("x", tokens=tuple(group), logprobs=logprobs))
    return [*made, Output("x", finish=draw(FINISH), usage=USAGE)]


def events_of(made: list[Output], stops: list[str]) -> Iterator[Event]:
    pipeline = TextStream(tokenizer(), stops)
    for output in made:
        yield from pipeline.push(output)


def both(writer: ChunkWriter, collector: Collector, made: list[list[Event]]) -> tuple[str, dict[str, Any]]:
    """The stream's text and the object, for one list of events per choice, interleaved."""
    data = writer.opening()
    for step in range(max(map(len, made))):
        for index, choice in enumerate(made):
            for event in choice[step : step + 1]:
                data += writer.chunk(index, event)
                collector.add(index, event)
    return (data + writer.closing(USAGE)).decode(), dict(collector.reply(USAGE))


@given(st.lists(outputs(), min_size=1, max_size=3), STOPS, st.booleans(), st.booleans())
def test_streamed_chat_equals_the_object(
    sequences: list[list[Output]], stops: list[str], usage: bool, logprobs: bool
) -> None:
    shape = ChatLogprobs(tokenizer()) if logprobs else None
    made = [list(events_of(sequence, stops)) for sequence in sequences]
    text, whole = both(ChatWriter(HEAD, len(made), usage, shape), ChatCollector(HEAD, len(made), shape), made)
    sent = chunks(text)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in sent if c["choices"] and c["choices"][0]["index"] == choice["index"]]
        assert [part["delta"]["role"] for part in mine if "role" in part["delta"]] == ["assistant"]
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        entries = [entry for part in mine if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert entries == (choice["logprobs"]["content"] if logprobs else [])
    check_frame(text, whole, usage, "chat.completion.chunk")


@given(st.lists(outputs(), min_size=1, max_size=3), STOPS, st.booleans(), st.booleans(), st.booleans())
def test_streamed_completions_equal_the_object(
    sequences: list[list[Output]], stops: list[str], usage: bool, logprobs: bool, echo: bool
) -> None:
    shape = LegacyLogprobs(tokenizer()) if logprobs else None
    made = [list(events_of(sequence, stops)) for sequence in sequences]
    echoes = ["prömpt" if echo else ""] * len(made)
    text, whole = both(CompletionWriter(HEAD, echoes, usage, shape), CompletionCollector(HEAD, echoes, shape), made)
    sent = chunks(text)
    for choice in whole["choices"]:
        mine = [c["choices"][0] for c in sent if c["choices"] and c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine if part["finish_reason"]] == [choice["finish_reason"]]
        for name, values in (choice["logprobs"] or {}).items():
            assert [v for part in mine if part["logprobs"] for v in part["logprobs"][name]] == values
        assert (choice["logprobs"] is not None) == logprobs
    check_frame(text, whole, usage, "text_completion")


def check_frame(text: str, whole: dict[str, Any], usage: bool, kind: str) -> None:
    """The rules around the choices: identity, usage chunk, end mark, the encoder's own bytes."""
    assert data_lines(text)[-1] == "[DONE]" and data_lines(text).count("[DONE]") == 1
    sent = chunks(text)
    for chunk, line in zip(sent, data_lines(text), strict=False):
        assert json.dumps(chunk, ensure_ascii=False, separators=(",", ":")).encode() == line.encode()
        assert (chunk["id"], chunk["created"], chunk["model"], chunk["object"]) == (
            "id-1",
            1,
            "the/model",
            kind,
        )
    empty = [chunk for chunk in sent if not chunk["choices"]]
    if usage:
        assert [chunk["usage"] for chunk in empty] == [whole["usage"]] and sent[-1] is empty[0]
        assert all(chunk["usage"] is None for chunk in sent[:-1])
    else:
        assert not empty and not any("usage" in chunk for chunk in sent)


def test_usage_has_the_details_that_clients_read() -> None:
    writer = ChatWriter(HEAD, 1, True, None)
    (chunk,) = chunks(writer.closing(USAGE).decode())
    assert chunk["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 7,
        "total_tokens": 16,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_half_a_character_is_named_by_its_bytes_in_completions() -> None:
    ids = tokenizer().encode("ö", add_special_tokens=False)
    items = tuple(TokenLogprob(token, -1.0) for token in ids)
    event = next(events_of([Output("x", tokens=tuple(ids), logprobs=items), Output("x", finish=Finish.STOP)], []))
    block = LegacyLogprobs(tokenizer()).block(event, start=3)
    assert block["tokens"] == ["bytes:\\xc3", "bytes:\\xb6"]
    assert block["text_offset"] == [3, 3] and block["top_logprobs"] == [None, None]


def test_an_impossible_alternative_is_still_json() -> None:
    entries = ChatLogprobs(tokenizer()).entries([TokenLogprob(5, -1.0, ((6, float("-inf")),))])
    assert entries[0]["top_logprobs"][0]["logprob"] == -9999.0
