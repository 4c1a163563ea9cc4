"""Reasoning and tool calls as the official client sees them, streamed and not, and what reaches the prompt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.fakes_engine import FakeEngine, FakeModel, Script, say, tokenizer
from tests.live import Live, live
from treadle.types import Request

THINKING = (
    "{% if tools %}<tools>{% for t in tools %}{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        },
    }
    for name in ("weather", "time")
]
ASK: Any = [{"role": "user", "content": "hi"}]
WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris", "days": "3"}}\n</tool_call>'
TIME = '<tool_call>{"name": "time", "arguments": {}}</tool_call>'
LONG = json.dumps({"name": "weather", "arguments": {"city": "x" * 2000}})
SAID = {
    "both": f"<think>\nHm.\n</think>\n\n{WEATHER}\n{TIME}",
    "inside": f"<think>I should check.{WEATHER}</think>",
    "text": "<think>Hm.</think>Hello.",
    "plain": "Hello.",
    "call": f"Look: {WEATHER}",
    "long": f"<tool_call>{LONG}</tool_call>",
}


class Planned:
    """What the engine says next."""

    script: Script = say("hello")

    def __call__(self, request: Request) -> Script:
        return self.script


PLAN = Planned()


def model_with(template: str) -> dict[str, Any]:
    caps = replace(FakeModel().caps, context_length=8192)
    return {"tokenizer": tokenizer(template), "chat_template": template, "caps": caps}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    with live(FakeEngine(PLAN, **model_with(THINKING))) as running:
        yield running


@pytest.fixture
def client(server: Live) -> OpenAI:
    return OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20)


def whole(client: OpenAI, said: str, per_step: int = 1, **rest: Any) -> Any:
    PLAN.script = say(said, per_step=per_step)
    rest = {"messages": ASK, "tools": TOOLS} | rest
    return client.chat.completions.create(model="fake", **rest)


def streamed(client: OpenAI, said: str, per_step: int = 1, **rest: Any) -> tuple[Any, list[Any]]:
    """The helper's final object, and the chunks."""
    PLAN.script = say(said, per_step=per_step)
    options: Any = {"include_usage": True}
    rest = {"messages": ASK, "tools": TOOLS} | rest
    with client.chat.completions.stream(model="fake", stream_options=options, **rest) as stream:
        chunks = [event.chunk for event in stream if event.type == "chunk"]
        return stream.get_final_completion(), chunks


def prompt_of(server: Live) -> str:
    return str(tokenizer(THINKING).decode(server.engine.requests[-1].prompt.tolist()))


def test_parallel_calls_behind_reasoning(client: OpenAI) -> None:
    reply = whole(client, SAID["both"])
    message = reply.choices[0].message
    assert message.content is None and message.reasoning_content == "Hm."
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in message.tool_calls] == [
        ("function", "weather", {"city": "Paris", "days": 3}),
        ("function", "time", {}),
    ]
    ids = [call.id for call in message.tool_calls]
    assert len(set(ids)) == 2 and all(id.startswith("call_") for id in ids)
    assert reply.choices[0].finish_reason == "tool_calls"
    assert 0 < reply.usage.completion_tokens_details.reasoning_tokens < 10


@pytest.mark.parametrize("per_step", [1, 7, 10_000])
@pytest.mark.parametrize("said", SAID.values(), ids=SAID.keys())
def test_a_stream_says_what_the_object_says(client: OpenAI, said: str, per_step: int) -> None:
    one = whole(client, said)
    many, chunks = streamed(client, said, per_step)
    left, right = one.choices[0], many.choices[0]
    assert (left.message.content or "") == (right.message.content or "")
    assert getattr(left.message, "reasoning_content", None) == getattr(right.message, "reasoning_content", None)
    assert calls_of(left.message) == calls_of(right.message)
    assert left.finish_reason == right.finish_reason and one.usage == many.usage
    finishes = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finishes == ["tool_calls" if left.message.tool_calls else "stop"]


def calls_of(message: Any) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in message.tool_calls or []]


def test_a_call_inside_reasoning_is_found(client: OpenAI) -> None:
    message = whole(client, SAID["inside"]).choices[0].message
    assert message.reasoning_content == "I should check." and message.content is None
    assert [call.function.name for call in message.tool_calls] == ["weather"]


def test_long_arguments_come_in_many_pieces(client: OpenAI) -> None:
    _, chunks = streamed(client, SAID["long"], per_step=50)
    deltas = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    assert len(deltas) >= 10 and {delta.index for delta in deltas} == {0}
    assert [delta.id is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)


def test_a_reply_cut_off_inside_a_call_says_length(client: OpenAI) -> None:
    reply = whole(client, WEATHER, max_tokens=len(say(WEATHER).steps) - 25)
    assert reply.choices[0].finish_reason == "length"
    assert reply.choices[0].message.tool_calls[0].function.arguments.startswith('{"city"')


def test_only_the_first_call_without_parallel_calls(client: OpenAI) -> None:
    message = whole(client, SAID["both"], parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather"]


def test_no_choice_means_no_tools_in_the_prompt_and_no_calls(server: Live, client: OpenAI) -> None:
    message = whole(client, "Hello.", tool_choice="none").choices[0].message
    assert message.content == "Hello." and message.tool_calls is None
    assert "weather" not in prompt_of(server)
    whole(client, "Hello.")
    assert "weather" in prompt_of(server)


def test_effort_none_turns_thinking_off(server: Live, client: OpenAI) -> None:
    for rest in ({"reasoning_effort": "none"}, {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}}):
        reply = whole(client, "Hello.", **rest)
        assert prompt_of(server).endswith("</think>\n\n")
        assert reply.usage.completion_tokens_details.reasoning_tokens == 0
    whole(client, "Hello.", reasoning_effort="high")
    assert prompt_of(server).endswith("<|assistant|>")


def test_a_forced_call_is_refused_if_no_tool_fits(client: OpenAI) -> None:
    named = {"type": "function", "function": {"name": "nothing"}}
    for rest in ({"tool_choice": named}, {"tool_choice": "required", "tools": []}):
        with pytest.raises(openai.BadRequestError) as caught:
            whole(client, "Hello.", **rest)
        assert caught.value.param == "tool_choice"


@pytest.mark.parametrize("content", [None, "", [], "absent"])
@pytest.mark.parametrize("result", [None, "", "20", [{"type": "text", "text": "20"}]])
def test_a_history_of_calls_in_every_shape(server: Live, client: OpenAI, content: Any, result: Any) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Rome"}'}}
    turn = {"role": "assistant", "content": content, "tool_calls": [call]}
    if content == "absent":
        del turn["content"]
    history = [*ASK, turn, {"role": "tool", "tool_call_id": "call_1", "content": result}, *ASK]
    assert whole(client, "Hello.", messages=history).choices[0].message.content == "Hello."
    assert '"city": "Rome"' in prompt_of(server)


def test_a_template_without_tools_is_told_in_words() -> None:
    with live(FakeEngine(PLAN, **model_with(FakeModel().chat_template or ""))) as server:
        client = OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=20)
        call = {"id": "a", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        history = [
            {"role": "system", "content": "Be kind."},
            *ASK,
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": "20"},
        ]
        message = whole(client, SAID["call"], messages=history).choices[0].message
        assert message.content == "Look:" and calls_of(message)[0][0] == "weather"
        prompt = prompt_of(server)
        assert prompt.startswith("<|system|>Be kind.\n\n# Tools") and '"name": "time"' in prompt
        assert '<|assistant|><tool_call>\n{"name": "weather"' in prompt
        assert "<|user|><tool_response>\n20\n</tool_response><|end|>" in prompt


FORCED: Any = {"required": "required", "named": {"type": "function", "function": {"name": "weather"}}}


@pytest.mark.parametrize("choice", FORCED.values(), ids=FORCED.keys())
def test_a_forced_call_is_held_to_the_schema(server: Live, client: OpenAI, choice: Any) -> None:
    said = WEATHER
    one = whole(client, said, tool_choice=choice).choices[0]
    many, _ = streamed(client, said, tool_choice=choice)
    assert calls_of(one.message) == calls_of(many.choices[0].message) == [("weather", '{"city": "Paris", "days": 3}')]
    assert one.message.content is None and one.finish_reason == many.choices[0].finish_reason == "tool_calls"
    assert prompt_of(server).endswith("<|assistant|>")
    constraint = server.engine.requests[-1].constraint
    assert constraint is not None
    assert ('"weather"' in constraint.source, '"time"' in constraint.source) == (True, choice == "required")


def test_a_forced_call_whose_schema_cannot_be_enforced_is_refused(client: OpenAI) -> None:
    odd: Any = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"not": {}}}}}}]
    with pytest.raises(openai.BadRequestError) as caught:
        whole(client, "x", tools=odd, tool_choice="required")
    assert caught.value.param == "tools"
