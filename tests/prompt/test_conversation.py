"""Every legal shape of a chat history becomes plain messages; every illegal one names its field."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import BadRequest
from treadle.prompt.conversation import deeper, normalise


def one(**message: Any) -> dict[str, Any]:
    return normalise([message])[0]


def call(arguments: Any) -> Any:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}]
    return one(role="assistant", content=None, tool_calls=calls)["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("given", "role"), [("developer", "system"), ("function", "tool"), ("user", "user"), ("system", "system")]
)
def test_roles_become_those_that_templates_know(given: str, role: str) -> None:
    assert one(role=given, content="x") == {"role": role, "content": "x"}


def test_text_parts_are_joined_by_a_line_break() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache_control": {}}]
    assert one(role="user", content=parts)["content"] == "a\nb"


@pytest.mark.parametrize("role", ["assistant", "tool"])
@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {"content": []}, {}])
def test_an_answer_without_text_has_empty_text(role: str, content: dict[str, Any]) -> None:
    assert one(role=role, **content)["content"] == ""


def test_tool_turns_keep_ids_names_and_reasoning() -> None:
    function = {"name": "f", "arguments": '{"b": 1, "a": {"d": 2, "c": [3]}}'}
    calls = [{"id": "c1", "type": "function", "function": function}]
    history = [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": calls,
            "reasoning_content": "hm",
            "refusal": None,
        },
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    assistant, tool = normalise(history)
    assert assistant["tool_calls"][0]["id"] == "c1"
    assert assistant["reasoning_content"] == "hm"
    assert "refusal" not in assistant
    assert tool == {"role": "tool", "content": "42", "tool_call_id": "c1", "name": "f"}


def test_arguments_become_objects_in_the_clients_key_order() -> None:
    assert list(call('{"b": 1, "a": 2}')) == ["b", "a"]
    assert list(call({"b": 1, "a": 2})) == ["b", "a"]


@pytest.mark.parametrize(("arguments", "kept"), [("", {}), (None, {}), ("{oops", "{oops"), ("[1]", "[1]")])
def test_arguments_that_are_no_object_stay_text(arguments: Any, kept: Any) -> None:
    assert call(arguments) == kept


def test_absurdly_nested_arguments_stay_text() -> None:
    for text in ("[" * 100_000, '{"a":' * 900 + "1" + "}" * 900):
        assert call(text) == text


@given(st.recursive(st.integers(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30))
def test_depth_is_told_by_levels(value: Any) -> None:
    def depth(node: Any) -> int:
        inner = node.values() if isinstance(node, dict) else node if isinstance(node, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    assert not deeper(value, depth(value))
    assert depth(value) == 0 or deeper(value, depth(value) - 1)


def test_the_old_function_call_is_a_tool_call() -> None:
    made = one(role="assistant", content=None, function_call={"name": "f", "arguments": '{"x": 1}'})
    assert made["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]


def test_the_input_is_left_alone() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
    history = [{"role": "assistant", "content": None, "tool_calls": calls}]
    before = copy.deepcopy(history)
    normalise(history)[0]["tool_calls"][0]["function"]["arguments"]["x"] = 2
    assert history == before


@pytest.mark.parametrize("kind", ["image_url", "image", "input_image"])
def test_pictures_are_refused_by_place(kind: str) -> None:
    with pytest.raises(BadRequest, match="This model cannot see images") as caught:
        one(role="user", content=[{"type": "text", "text": "x"}, {"type": kind, kind: {"url": "data:,"}}])
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0].type"),
        ({"role": "user", "content": [{"type": {}, "text": "x"}]}, "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "name": {"a": 1}}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "reasoning_content": 5}, "messages[0].reasoning_content"),
        ({"role": "tool", "content": "x", "tool_call_id": 5}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}, "messages[0].tool_calls[0].id"),
        ({"role": "assistant", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": "abc"}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "c"}]}, "messages[0].tool_calls[0].function"),
    ],
)
def test_a_bad_message_names_its_field(message: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        normalise([message])
    assert caught.value.param == param


def test_no_messages_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="at least one message") as caught:
        normalise([])
    assert caught.value.param == "messages"
