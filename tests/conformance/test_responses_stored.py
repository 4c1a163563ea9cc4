"""What the official client asks about stored responses, and about the length of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.fakes_engine import FakeEngine, FakeModel, say, tokenizer
from tests.live import Live, live

CALL: Any = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
RESULT: Any = {"type": "function_call_output", "call_id": "c1", "output": "dark"}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(say("hello"))) as running:
        yield running


@pytest.fixture
def client(server: Live) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20)


def test_the_items_that_a_response_answered_can_be_listed(client: OpenAI) -> None:
    reply = client.responses.create(model="fake", input=[{"role": "user", "content": "hi"}, CALL, RESULT])
    items = client.responses.input_items.list(reply.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output"]
    message = items[0]
    assert message.type == "message" and message.role == "user"
    assert [(part.type, part.text) for part in message.content if part.type == "input_text"] == [("input_text", "hi")]
    assert len({item.id for item in items}) == 3 and all(item.id for item in items)


def test_a_list_comes_latest_first_and_in_pages(client: OpenAI) -> None:
    first = client.responses.create(model="fake", input="one")
    reply = client.responses.create(model="fake", input="two", previous_response_id=first.id)
    asked = client.responses.input_items.list(reply.id, limit=1)
    texts = [item.content[0].text for item in asked if item.type == "message"]  # type: ignore[union-attr]
    assert texts == ["two", "hello", "one"]
    whole = client.responses.input_items.list(reply.id)
    assert [item.id for item in whole.data] == [item.id for item in asked]


def test_a_list_of_what_is_not_there_or_with_a_wrong_query_is_refused_by_name(server: Live, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.responses.input_items.list("resp_none")
    id = client.responses.create(model="fake", input="hi").id
    for query, field in (("limit=0", "limit"), ("order=up", "order"), ("after=msg_none", "after")):
        answer = server.get(f"/v1/responses/{id}/input_items?{query}")
        assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_a_stored_response_is_neither_cancelled_nor_streamed_again(client: OpenAI) -> None:
    id = client.responses.create(model="fake", input="hi").id
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.cancel(id)
    with pytest.raises(openai.BadRequestError, match="streamed again"):
        client.responses.retrieve(id, stream=True)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_none")
    client.responses.delete(id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(id)


def test_a_prompt_is_counted_as_the_response_counts_it(server: Live, client: OpenAI) -> None:
    reply = client.responses.create(model="fake", input="hello world", instructions="Be brief.")
    assert reply.usage is not None
    count = client.responses.input_tokens.count(model="fake", input="hello world", instructions="Be brief.")
    assert (count.object, count.input_tokens) == ("response.input_tokens", reply.usage.input_tokens)
    over = client.responses.input_tokens.count(model="fake", input="x" * 2 * FakeModel().caps.context_length)
    assert over.input_tokens > FakeModel().caps.context_length
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.input_tokens.count(model="fake", input=[{"type": "item_reference", "id": "x"}])
    assert refused.value.param == "input[0].type"
    assert tokenizer().decode(server.engine.requests[-1].prompt).count("hello world") == 1
