"""How far a prompt is: asked for, streamed, and never part of the reply."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.api.test_replies import HEAD
from tests.fakes_engine import FakeEngine, say
from tests.live import Live, chunks, live
from treadle.api.chat import ChatWriter
from treadle.api.completions import CompletionWriter
from treadle.api.progress import PromptProgress
from treadle.api.reply import ChunkWriter
from treadle.output.stream import Event, Kind

CHAT = "/v1/chat/completions"
HELLO: Any = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, "/v1/completions": {"prompt": "hi"}}


class Hands:
    """A clock that is set by hand."""

    now = 5.0

    def __call__(self) -> float:
        return self.now


def writers(progress: PromptProgress | None) -> list[ChunkWriter]:
    return [ChatWriter(HEAD, 2, True, None, progress), CompletionWriter(HEAD, ["", ""], True, None, progress)]


@pytest.mark.parametrize("kind", [0, 1], ids=["chat", "completions"])
def test_a_chunk_tells_the_choice_s_prompt_what_was_cached_and_the_time_since_its_start(kind: int) -> None:
    clock = Hands()
    writer = writers(PromptProgress([1000, 70], clock))[kind]
    data = writer.chunk(1, Event(Kind.PROGRESS, prefilled=32)).decode()
    clock.now += 0.25
    data += writer.chunk(0, Event(Kind.PROGRESS, prefilled=0)).decode()
    clock.now += 1
    data += writer.chunk(0, Event(Kind.PROGRESS, prefilled=512)).decode()
    data += writer.chunk(0, Event(Kind.PROGRESS, prefilled=1003)).decode()
    sent = chunks(data)
    assert [chunk["prompt_progress"] for chunk in sent] == [
        {"total": 70, "cache": 32, "processed": 32, "time_ms": 0},
        {"total": 1000, "cache": 0, "processed": 0, "time_ms": 0},
        {"total": 1000, "cache": 0, "processed": 512, "time_ms": 1000},
        {"total": 1000, "cache": 0, "processed": 1000, "time_ms": 1000},
    ]
    assert [chunk["choices"][0]["index"] for chunk in sent] == [1, 0, 0, 0]
    assert all(not chunk["choices"][0].get("delta") and not chunk["choices"][0].get("text") for chunk in sent)
    assert all(chunk["choices"][0]["finish_reason"] is None and chunk["usage"] is None for chunk in sent)


def test_what_a_small_model_reads_first_is_told_apart() -> None:
    clock = Hands()
    progress = PromptProgress([1000], clock)
    told = [progress.of(0, Event(Kind.PROGRESS, skimmed=400))]
    clock.now += 0.5
    told += [progress.of(0, Event(Kind.PROGRESS, prefilled=n)) for n in (100, 300)]
    assert told == [
        {"total": 1000, "cache": 0, "processed": 0, "skimmed": 400, "time_ms": 0},
        {"total": 1000, "cache": 100, "processed": 100, "time_ms": 500},
        {"total": 1000, "cache": 100, "processed": 300, "time_ms": 500},
    ]


def test_nothing_is_told_unless_asked_for() -> None:
    assert [writer.chunk(0, Event(Kind.PROGRESS, prefilled=3)) for writer in writers(None)] == [b"", b""]


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello"))) as running:
        yield running


@pytest.mark.parametrize("path", BODIES)
def test_it_is_off_by_default_and_needs_a_stream(server: Live, path: str) -> None:
    silent = server.post(path, {**BODIES[path], "stream": True})
    assert "prompt_progress" not in silent.text
    asked = server.post(path, {**BODIES[path], "stream": True, "return_progress": True})
    assert asked.text.count("prompt_progress") == 1
    for whole in ({}, {"stream": False}):
        refused = server.post(path, {**BODIES[path], **whole, "return_progress": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "return_progress"
    assert server.post(path, {**BODIES[path], "return_progress": False}).status_code == 200


def test_the_official_client_reads_such_a_stream(server: Live) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20)
    extra = {"return_progress": True}
    sent = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True, n=2, extra_body=extra))
    told = [chunk for chunk in sent if "prompt_progress" in (chunk.model_extra or {})]
    assert sorted(chunk.choices[0].index for chunk in told) == [0, 1]
    assert all(chunk.model_extra and chunk.model_extra["prompt_progress"]["total"] == 5 for chunk in told)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in sent) == "hello" * 2
    with client.chat.completions.stream(model="fake", messages=HELLO, extra_body=extra) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "hello"
    texts = client.completions.create(model="fake", prompt="hi", stream=True, extra_body=extra)
    assert "".join(chunk.choices[0].text for chunk in texts) == "hello"
