"""The official `anthropic` client against a live server with a scripted engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import anthropic
import pytest
from anthropic import Anthropic

from tests.fakes_engine import TEMPLATE, FakeEngine, FakeModel, Script, say, tokenizer
from tests.live import Live, live, until
from treadle.errors import QueueFull
from treadle.types import Finish, Request

SAID = "hello wörld 👩‍👩‍👧‍👦"
HELLO: Any = [{"role": "user", "content": "hi"}]
ASKED: dict[str, Any] = {"model": "claude-any", "max_tokens": 99, "messages": HELLO}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(say(SAID, cached=2))) as running:
        yield running


@pytest.fixture
def client(server: Live) -> Anthropic:
    return client_of(server)


def client_of(server: Live, **rest: Any) -> Anthropic:
    return Anthropic(base_url=server.url, max_retries=0, timeout=20, **{"api_key": "none", **rest})


def final(client: Anthropic, **asked: Any) -> Any:
    with client.messages.stream(**ASKED | asked) as stream:
        return stream.get_final_message()


def same(client: Anthropic, **asked: Any) -> Any:
    """The message, after checking that the streamed one differs in nothing but its id."""
    whole, sent = client.messages.create(**ASKED | asked), final(client, **asked)
    ignored = {"id"}
    found = sent.model_dump(exclude=ignored)
    for block in found["content"]:
        block.pop("parsed_output", None)
    assert found == whole.model_dump(exclude=ignored)
    return whole


def test_a_message_whole_and_streamed(client: Anthropic) -> None:
    message = same(client)
    assert [block.text for block in message.content] == [SAID]
    assert (message.stop_reason, message.role, message.model) == ("end_turn", "assistant", "fake")
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (3, 2)
    assert message.usage.output_tokens == len(say(SAID).steps)


def test_the_text_streams_as_it_comes(client: Anthropic) -> None:
    with client.messages.stream(**ASKED) as stream:
        pieces = list(stream.text_stream)
    assert "".join(pieces) == SAID and len(pieces) > 5


def test_raw_events_have_their_order(client: Anthropic) -> None:
    kinds = [event.type for event in client.messages.create(**ASKED, stream=True)]
    assert kinds[:2] == ["message_start", "content_block_start"]
    assert set(kinds[2:-3]) == {"content_block_delta"}
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]


def test_a_stop_sequence_is_named_and_not_part_of_the_text(client: Anthropic) -> None:
    message = same(client, stop_sequences=["zz", "ö"])
    assert message.content[0].text == "hello w"
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "ö")


def test_a_limit_is_max_tokens(client: Anthropic) -> None:
    message = same(client, max_tokens=3)
    assert message.stop_reason == "max_tokens" and message.content[0].text == "hello w�"


def test_an_empty_reply_has_no_blocks_but_counts() -> None:
    with live(FakeEngine(say(""))) as server:
        message = same(client_of(server))
        assert message.content == [] and message.stop_reason == "end_turn"


def test_the_beta_client_works_too(client: Anthropic) -> None:
    reply = client.beta.messages.create(**ASKED, betas=["context-1m-2025-08-07"])
    assert reply.content[0].type == "text"
    assert client.beta.messages.count_tokens(model="claude-any", messages=HELLO, betas=["x"]).input_tokens == 5


CONVERSATION: dict[str, Any] = {
    "system": [{"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "hi"},
        {"role": "system", "content": "reminder"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "it"}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "a wall"}]},
        {"role": "user", "content": [{"type": "text", "text": "and?"}]},
    ],
}


def test_a_count_is_what_the_message_reports(client: Anthropic) -> None:
    for asked in ({"messages": HELLO}, CONVERSATION):
        counted = client.messages.count_tokens(model="claude-haiku", **asked).input_tokens
        usage = client.messages.create(**ASKED | asked).usage
        assert usage.cache_read_input_tokens == 2 and counted == usage.input_tokens + 2


def test_a_conversation_of_every_kind_of_block_is_answered(client: Anthropic) -> None:
    assert same(client, **CONVERSATION).content[0].text == SAID


def test_the_reply_goes_on_from_a_prefilled_turn(server: Live, client: Anthropic) -> None:
    client.messages.create(**ASKED | {"messages": [*HELLO, {"role": "assistant", "content": "hello"}]})
    prompt = server.engine.model.tokenizer.decode(server.engine.requests[-1].prompt)
    assert prompt.endswith("<|assistant|>hello")


def test_both_ways_to_send_a_key_are_read() -> None:
    with live(FakeEngine(), api_keys=("secret",)) as server:
        client_of(server, api_key="secret").messages.create(**ASKED)
        client_of(server, api_key=None, auth_token="secret").messages.create(**ASKED)
        with pytest.raises(anthropic.AuthenticationError):
            client_of(server, api_key="wrong").messages.create(**ASKED)


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_the_client_s_own(client: Anthropic, stream: bool) -> None:
    with pytest.raises(anthropic.BadRequestError, match="stop_sequences"):
        client.messages.create(**ASKED, stop_sequences=[""], stream=stream)
    with pytest.raises(anthropic.NotFoundError, match="gpt-4"):
        client.messages.create(**ASKED | {"model": "gpt-4"}, stream=stream)
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: \d+ tokens > 256 maximum"):
        client.messages.create(**ASKED | {"messages": [{"role": "user", "content": "x" * 999}]}, stream=stream)


def test_a_picture_is_refused_also_inside_a_result(client: Anthropic) -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}
    for block in (picture, {"type": "tool_result", "tool_use_id": "1", "content": [picture]}):
        asked: Any = [{"role": "user", "content": [block]}]
        for ask in (client.messages.create, client.messages.count_tokens):
            with pytest.raises(anthropic.BadRequestError, match="cannot see images"):
                ask(
                    **{"model": "claude-any", "messages": asked}
                    | ({} if "count" in ask.__name__ else {"max_tokens": 9})
                )


def test_a_full_queue_is_a_rate_limit_error() -> None:
    with live(FakeEngine()) as server:
        server.engine.refusal = QueueFull("Too many requests.")
        with pytest.raises(anthropic.RateLimitError):
            client_of(server).messages.create(**ASKED, stream=True)


def test_a_fault_in_the_middle_of_a_stream_raises_after_the_text() -> None:
    with live(FakeEngine(say("hello", finish=Finish.ERROR, error="It broke."))) as server:
        text = ""
        with pytest.raises(anthropic.APIStatusError, match="It broke"):
            for event in client_of(server).messages.create(**ASKED, stream=True):
                text += getattr(getattr(event, "delta", None), "text", "")
        assert text == "hello"


def test_pings_keep_a_waiting_client() -> None:
    with live(FakeEngine(say(SAID, prefill_s=0.3)), keepalive_s=0.05) as server:
        assert final(client_of(server)).content[0].text == SAID


def test_a_client_that_leaves_ends_its_request() -> None:
    with live(FakeEngine(say("hello " * 500, step_s=0.01))) as server:
        with client_of(server).messages.stream(**ASKED | {"max_tokens": 9999}) as stream:
            next(stream.text_stream)
        until(lambda: list(server.engine.aborted.values()) == ["decode"], within_s=2)


def test_a_message_is_cancelled_by_the_id_that_its_client_saw() -> None:
    with live(FakeEngine(say("hello " * 500, step_s=0.01))) as server:
        with pytest.raises(anthropic.APIStatusError, match="cancelled"):
            for event in client_of(server).messages.create(**ASKED | {"max_tokens": 9999}, stream=True):
                if event.type == "message_start":
                    server.post(f"/v1/requests/{event.message.id}/cancel")
        until(lambda: bool(server.engine.aborted), within_s=2)


LOOK: Any = {
    "name": "look",
    "description": "Looks at something.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
}
THINKING = TEMPLATE + (
    "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
CALLS = (
    'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "the wäll"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "look", "arguments": {"at": "a door"}}\n</tool_call>'
)


def able(plan: Any, template: str = TEMPLATE) -> FakeEngine:
    """An engine with room for tools in the prompt."""
    caps = replace(FakeModel().caps, context_length=8192)
    return FakeEngine(plan, caps=caps, tokenizer=tokenizer(template), chat_template=template)


def prompt_of(request: Request) -> str:
    return str(tokenizer().decode(request.prompt))


@pytest.mark.parametrize("per_step", [1, 7, 999])
def test_tools_are_called_and_answered(per_step: int) -> None:
    """Parallel calls come as blocks one after the other, and their results lead to the answer."""

    def plan(request: Request) -> Script:
        return say("a wall." if "it is white" in prompt_of(request) else CALLS, per_step=per_step)

    with live(able(plan)) as server:
        client = client_of(server)
        asked: dict[str, Any] = {"tools": [LOOK], "max_tokens": 500}
        with client.messages.stream(**ASKED | asked) as stream:
            sent = stream.get_final_message()
        reply = client.messages.create(**ASKED | asked)
        assert [block.type for block in reply.content] == ["text", "tool_use", "tool_use"]
        calls = [block for block in reply.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [
            ("look", {"at": "the wäll"}),
            ("look", {"at": "a door"}),
        ]
        assert reply.stop_reason == sent.stop_reason == "tool_use" and calls[0].id != calls[1].id
        assert [block.model_dump(exclude={"id", "parsed_output"}) for block in sent.content] == [
            block.model_dump(exclude={"id"}) for block in reply.content
        ]
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": "it is white"} for call in calls]
        history = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        answer = client.messages.create(**ASKED | asked | {"messages": history})
        assert answer.content[0].text == "a wall." and answer.stop_reason == "end_turn"
        counted = client.messages.count_tokens(model="fake", messages=history, tools=[LOOK])
        assert counted.input_tokens == answer.usage.input_tokens


def test_arguments_come_in_many_pieces() -> None:
    long = CALLS.replace("a door", "x" * 300)
    with live(able(say(long))) as server:
        deltas = [
            event.delta.partial_json
            for event in client_of(server).messages.create(**ASKED | {"max_tokens": 900, "tools": [LOOK]}, stream=True)
            if event.type == "content_block_delta" and event.delta.type == "input_json_delta"
        ]
    assert len(deltas) > 50


def test_no_tools_are_called_when_none_is_chosen() -> None:
    with live(able(say("hello"))) as server:
        client = client_of(server)
        reply = client.messages.create(**ASKED, tools=[LOOK], tool_choice={"type": "none"})
        assert reply.content[0].text == "hello" and reply.stop_reason == "end_turn"


@pytest.mark.parametrize("per_step", [1, 5, 999])
def test_thinking_is_a_block_of_its_own_before_the_text(per_step: int) -> None:
    with live(able(say("<think>hm, wäit</think>hello", per_step=per_step), THINKING)) as server:
        message = same(client_of(server), thinking={"type": "enabled", "budget_tokens": 1024})
        thinking, text = message.content
        assert (thinking.type, thinking.thinking, text.text) == ("thinking", "hm, wäit", "hello")
        assert thinking.signature
        omitted = same(client_of(server), thinking={"type": "adaptive", "display": "omitted"})
        assert (omitted.content[0].thinking, omitted.content[0].signature) == ("", thinking.signature)


def test_thinking_is_switched_off_in_the_template() -> None:
    with live(able(say("hello"), THINKING)) as server:
        same(client_of(server), thinking={"type": "disabled"})
        assert prompt_of(server.engine.requests[0]).endswith("<think></think>")
        same(client_of(server))
        assert prompt_of(server.engine.requests[-1]).endswith("<|assistant|>")


def test_thoughts_and_calls_go_back_as_they_came() -> None:
    with live(able(say("<think>hm</think>" + CALLS), THINKING)) as server:
        client = client_of(server)
        reply = client.messages.create(**ASKED | {"tools": [LOOK], "max_tokens": 500})
        assert [block.type for block in reply.content] == ["thinking", "text", "tool_use", "tool_use"]
        results: Any = [
            {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "white"}]}
            for block in reply.content
            if block.type == "tool_use"
        ]
        history: Any = [*HELLO, {"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
        assert client.messages.create(**ASKED | {"tools": [LOOK], "messages": history}).role == "assistant"
