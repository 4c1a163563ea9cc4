"""The official `openai` client against a live server with a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.fakes_engine import FakeEngine, say
from tests.live import Live, live
from treadle.errors import QueueFull
from treadle.types import Finish, Request

SAID = "hello wörld 👩‍👩‍👧‍👦"
HELLO: Any = [{"role": "user", "content": "hi"}]


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


def test_a_chat_reply(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO)
    assert reply.choices[0].message.content == SAID
    assert (reply.choices[0].finish_reason, reply.model, reply.object) == ("stop", "fake", "chat.completion")
    assert reply.usage is not None and reply.usage.total_tokens == 5 + len(say(SAID).steps)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 2


def test_a_streamed_chat_reply_is_the_same_text(client: OpenAI) -> None:
    sent = list(client.chat.completions.create(model="fake", messages=HELLO, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in sent) == SAID
    assert [chunk.choices[0].delta.role for chunk in sent if chunk.choices[0].delta.role] == ["assistant"]
    assert [chunk.choices[0].finish_reason for chunk in sent][-1] == "stop"
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in sent}) == 1
    assert all(chunk.usage is None for chunk in sent)


def test_the_accumulating_helper_accepts_the_stream(client: OpenAI) -> None:
    with client.chat.completions.stream(model="fake", messages=HELLO, n=2, logprobs=True) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == [SAID, SAID]
    assert final.choices[1].logprobs is not None and final.choices[1].logprobs.content


def test_streamed_usage_is_the_object_s_usage(client: OpenAI) -> None:
    whole = client.chat.completions.create(model="fake", messages=HELLO)
    sent = list(
        client.chat.completions.create(
            model="fake", messages=HELLO, stream=True, stream_options={"include_usage": True}
        )
    )
    assert sent[-1].choices == [] and sent[-1].usage == whole.usage
    assert all(chunk.choices and chunk.usage is None for chunk in sent[:-1])


def test_several_choices_are_told_apart(server: Live, client: OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, n=3, seed=1)
    assert [choice.index for choice in reply.choices] == [0, 1, 2]
    assert reply.usage is not None and reply.usage.prompt_tokens == 5
    assert len({request.sampling.seed for request in server.engine.requests[-3:]}) == 3


def test_logprobs_spell_the_text(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, logprobs=True, top_logprobs=2)
    found = reply.choices[0].logprobs
    assert found is not None and found.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in found.content).decode() == SAID
    assert all(len(entry.top_logprobs) == 2 for entry in found.content)


def test_streamed_logprobs_come_with_their_text(client: OpenAI) -> None:
    for chunk in client.chat.completions.create(model="fake", messages=HELLO, stream=True, logprobs=True):
        found = chunk.choices[0].logprobs
        if found is not None and found.content:
            spelled = b"".join(bytes(entry.bytes or []) for entry in found.content).decode()
            assert spelled == chunk.choices[0].delta.content


def test_a_limit_ends_with_length_even_inside_a_character(client: OpenAI) -> None:
    reply = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=9, max_completion_tokens=3)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.content == "hello w�"


def test_a_stop_string_is_never_part_of_the_text(client: OpenAI) -> None:
    asked: dict[str, Any] = {"model": "fake", "messages": HELLO, "stop": ["ö", "zz"]}
    assert client.chat.completions.create(**asked).choices[0].message.content == "hello w"
    sent = list(client.chat.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in sent) == "hello w"
    assert sent[-1].choices[0].finish_reason == "stop"


def test_a_legacy_completion_with_logprobs(client: OpenAI) -> None:
    reply = client.completions.create(model="fake", prompt="hi", logprobs=1)
    found = reply.choices[0].logprobs
    assert reply.choices[0].text == SAID and reply.object == "text_completion"
    assert found is not None and found.tokens is not None and found.tokens[0] == "hello"
    assert found.text_offset is not None and found.text_offset[:2] == [0, 5]
    assert found.top_logprobs is not None and found.top_logprobs[0] == {"hello": -0.25}


def test_a_streamed_legacy_completion_of_two_prompts(client: OpenAI) -> None:
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(model="fake", prompt=["a", "b"], stream=True, echo=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: "a" + SAID, 1: "b" + SAID}


def test_models_are_listed_and_found(client: OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["fake"]
    assert client.models.retrieve("fake").id == "fake"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_names_its_field(client: OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="fake", messages=HELLO, temperature=9, stream=stream)
    assert caught.value.param == "temperature"


def test_a_full_queue_is_a_rate_limit_error() -> None:
    with live(FakeEngine()) as server:
        server.engine.refusal = QueueFull("Too many requests.")
        with pytest.raises(openai.RateLimitError):
            client_of(server).chat.completions.create(model="fake", messages=HELLO, stream=True)


def test_a_fault_in_the_middle_of_a_stream_raises_after_the_text() -> None:
    with live(FakeEngine(say("hello", finish=Finish.ERROR, error="It broke."))) as server:
        text = ""
        with pytest.raises(openai.APIError) as caught:
            for chunk in client_of(server).chat.completions.create(model="fake", messages=HELLO, stream=True):
                text += chunk.choices[0].delta.content or ""
                assert chunk.choices[0].finish_reason is None
        assert text == "hello" and caught.value.message == "It broke."


def test_twenty_at_once_all_get_their_own_reply() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with live(FakeEngine(lambda request: say("hello" * len(request.prompt), step_s=0.002))) as server:
        client = client_of(server)

        def ask(size: int) -> str:
            prompt = [5] * size
            if size % 2:
                return client.completions.create(model="fake", prompt=prompt).choices[0].text
            sent = client.completions.create(model="fake", prompt=prompt, stream=True)
            return "".join(chunk.choices[0].text for chunk in sent)

        with ThreadPoolExecutor(20) as pool:
            assert list(pool.map(ask, range(1, 21))) == ["hello" * size for size in range(1, 21)]
