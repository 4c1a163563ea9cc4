"""What a body may hold: every complaint is a 400 that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.api.body import MAX_DEPTH, parse
from treadle.api.fields import ChatBody, CompletionBody
from treadle.errors import BadRequest

HELLO = [{"role": "user", "content": "hi"}]


def chat(**fields: Any) -> ChatBody:
    return parse(json.dumps({"messages": HELLO, **fields}).encode(), ChatBody)


def completion(**fields: Any) -> CompletionBody:
    return parse(json.dumps({"prompt": "hi", **fields}).encode(), CompletionBody)


BAD_CHAT = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": ["hi"]}, "messages[0]"),
    ({"model": 1}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": []}, "stream_options"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"stream_options": {"include_all": True}}, "stream_options.include_all"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": "9"}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_completion_tokens": -1}, "max_completion_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 1.1}, "min_p"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"1": "2"}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": {"007": 1}}, "logit_bias"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "1"}, "seed"),
    ({"stop": 1}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop"),
    ({"stop": ["a", 1]}, "stop"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": "a" * 1001}, "stop"),
    ({"n": 0}, "n"),
    ({"n": 129}, "n"),
    ({"timeout": 0}, "timeout"),
    ({"cache_salt": 1}, "cache_salt"),
    ({"logprobs": 1}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"chat_template_kwargs": "x"}, "chat_template_kwargs"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools"),
    ({"tools": [{"type": "web_search"}]}, "tools"),
    ({"tool_choice": "all"}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"response_format": {"type": "nonsense"}}, "response_format.type"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"reasoning_effort": "much"}, "reasoning_effort"),
    ({"temprature": 1}, "temprature"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_CHAT, ids=lambda value: str(value)[:40])
def test_a_bad_chat_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert param in caught.value.message


BAD_COMPLETION = [
    ({"prompt": None}, "prompt"),
    ({"prompt": 1}, "prompt"),
    ({"prompt": [["a"]]}, "prompt"),
    ({"prompt": [1, "a"]}, "prompt"),
    ({"prompt": [True]}, "prompt"),
    ({"logprobs": 6}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"suffix": "end"}, "suffix"),
    ({"best_of": 3}, "best_of"),
    ({"max_completion_tokens": 3}, "max_completion_tokens"),
]


@pytest.mark.parametrize(("fields", "param"), BAD_COMPLETION, ids=lambda value: str(value)[:40])
def test_a_bad_completion_field_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        completion(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"1", b"nan", b'{"a": "\\ud800"}', b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(data, ChatBody)
    assert caught.value.code == "invalid_json"


NEUTRAL = [
    {
        "user": "me",
        "store": True,
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "parallel_tool_calls": False,
    },
    {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]},
    {"tools": None, "nonsense": None, "stop": None, "temperature": None, "logit_bias": None, "n": None},
    {"stop": [], "logit_bias": {}, "chat_template_kwargs": {}, "logprobs": False, "top_logprobs": 0},
]


@pytest.mark.parametrize("fields", NEUTRAL, ids=lambda value: ",".join(value))
def test_what_asks_for_nothing_is_accepted(fields: dict[str, Any]) -> None:
    assert chat(**fields).stop == []


def test_the_newer_limit_wins() -> None:
    assert chat(max_tokens=9, max_completion_tokens=7).limit == 7
    assert chat(max_tokens=9).limit == 9
    assert chat().limit is None


def test_logprobs_mean_alternatives_in_both_routes() -> None:
    assert chat().alternatives is None
    assert chat(logprobs=True).alternatives == 0
    assert chat(logprobs=True, top_logprobs=20).alternatives == 20
    assert completion().alternatives is None
    assert completion(logprobs=0).alternatives == 0


def test_every_form_of_prompt_becomes_a_list() -> None:
    forms: list[Any] = ["a", ["a", "b"], [1, 2], [[1], [2, 3]]]
    assert [completion(prompt=form).prompt for form in forms] == [["a"], ["a", "b"], [[1, 2]], [[1], [2, 3]]]


def test_best_of_equal_to_n_asks_for_nothing() -> None:
    assert completion(best_of=2, n=2).n == 2


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from(sorted({*ChatBody.model_fields, *CompletionBody.model_fields, "tools", "best_of", "x"}))


@given(st.dictionaries(NAMES, JSON, max_size=5), st.sampled_from([ChatBody, CompletionBody]))
def test_any_json_is_parsed_or_refused_but_never_a_crash(fields: dict[str, Any], model: type[Any]) -> None:
    try:
        body = parse(json.dumps(fields).encode(), model)
    except BadRequest as error:
        assert error.message.endswith(".")
    else:
        assert isinstance(body, model)


def nested(levels: int) -> Any:
    return {"a": nested(levels - 1)} if levels else 1


def test_a_body_that_is_nested_too_deeply_is_refused_wherever_that_is() -> None:
    assert chat(metadata=nested(MAX_DEPTH - 1)).metadata  # type: ignore[attr-defined]
    with pytest.raises(BadRequest, match="nested") as caught:
        chat(metadata=nested(MAX_DEPTH))
    assert caught.value.code == "invalid_json"


def tool(**parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **parameters}}}


def test_a_tool_may_be_given_twice_but_not_with_two_meanings() -> None:
    assert len(chat(tools=[tool(), tool()]).tools) == 2
    with pytest.raises(BadRequest, match="differ") as caught:
        chat(tools=[tool(), tool(required=["a"])])
    assert caught.value.param == "tools"
