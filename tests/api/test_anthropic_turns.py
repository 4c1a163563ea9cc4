"""Anthropic's messages become chat messages: neighbours merge, results come first, what cannot be read is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.api.anthropic_turns import chat_messages
from treadle.errors import BadRequest
from treadle.prompt.conversation import ImageRef

PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aGk="}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def use(id: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": id, "name": "look", "input": arguments}


def result(id: str, content: Any = None, **rest: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": id, "content": content, **rest}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


@pytest.mark.parametrize("content", ["hi", [text("hi")], [text("hi") | {"cache_control": {"type": "ephemeral"}}]])
def test_a_string_and_its_block_are_the_same(content: Any) -> None:
    assert chat_messages("", [user(content)]) == [{"role": "user", "content": "hi"}]


def test_system_blocks_come_first_as_one_message() -> None:
    made = chat_messages([text("be"), text("kind")], [user("hi")])
    assert made == [{"role": "system", "content": "be\nkind"}, {"role": "user", "content": "hi"}]


def test_a_system_message_stays_where_it_is() -> None:
    said = [user("a"), {"role": "system", "content": "reminder"}, assistant("b"), user("c")]
    assert [(m["role"], m["content"]) for m in chat_messages("top", said)] == [
        ("system", "top"),
        ("user", "a"),
        ("system", "reminder"),
        ("assistant", "b"),
        ("user", "c"),
    ]


def test_neighbours_of_one_role_are_one_turn() -> None:
    made = chat_messages("", [user("a"), user([text("b")]), assistant("c"), assistant([use("1", x=1)])])
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {"x": 1}}}
    assert made == [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "c", "tool_calls": [call]},
    ]


def test_results_come_before_the_text_of_their_turn() -> None:
    said = [
        assistant([use("1"), use("2")]),
        user([text("and?")]),
        user([result("1", "one"), result("2", [text("two")])]),
    ]
    made = chat_messages("", said)
    assert [m["role"] for m in made] == ["assistant", "tool", "tool", "user"]
    assert [(m["tool_call_id"], m["content"]) for m in made[1:3]] == [("1", "one"), ("2", "two")]


def test_the_order_of_a_call_s_arguments_is_kept() -> None:
    (made,) = chat_messages("", [assistant([use("1", z=1, a={"y": 2, "b": 3})])])
    assert json.dumps(made["tool_calls"][0]["function"]["arguments"]) == '{"z": 1, "a": {"y": 2, "b": 3}}'


@pytest.mark.parametrize("content", [None, "", []])
def test_an_empty_result_is_a_result(content: Any) -> None:
    made = chat_messages("", [assistant([use("1")]), user([result("1", content)])])
    assert made[1] == {"role": "tool", "tool_call_id": "1", "content": ""} and len(made) == 2


def test_images_keep_their_place_among_the_texts_of_a_turn() -> None:
    by_url = {"type": "image", "source": {"type": "url", "url": "https://a.example/b.png"}}
    (made,) = chat_messages("", [user([text("a"), PICTURE, text("b"), by_url])])
    assert made["content"] == [
        text("a"),
        ImageRef("data:;base64,aGk=", "messages[0].content[1]"),
        text("b"),
        ImageRef("https://a.example/b.png", "messages[0].content[3]"),
    ]


def test_a_result_may_have_images_also_a_failed_one() -> None:
    said = [user([result("1", [PICTURE, text("seen")], is_error=True), text("well?")])]
    made = chat_messages("", said)
    ref = ImageRef("data:;base64,aGk=", "messages[0].content[0].content[0]")
    assert [m["content"] for m in made] == [[text("Error: "), ref, text("seen")], "well?"]


def test_a_failed_tool_says_so() -> None:
    made = chat_messages("", [user([result("1", "no such file", is_error=True), result("2", "ok", is_error=False)])])
    assert [m["content"] for m in made] == ["Error: no such file", "ok"]


def test_thinking_is_the_reasoning_of_its_turn_and_a_redacted_one_is_dropped() -> None:
    thoughts = [{"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "x"}]
    made = chat_messages("", [user("a"), assistant([*thoughts, text("b")])])
    assert made[1] == {"role": "assistant", "content": "b", "reasoning_content": "hm"}


@pytest.mark.parametrize("content", ["", [], [text("")], [{"type": "thinking", "thinking": "hm", "signature": ""}]])
def test_an_assistant_who_said_nothing_is_left_out(content: Any) -> None:
    assert [m["role"] for m in chat_messages("", [user("a"), assistant(content)])] == ["user"]


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([user("a"), {"role": "tool", "content": "b"}], "messages[1].role"),
        ([{"content": "b"}], "messages[0].role"),
        ([user(None)], "messages[0].content"),
        ([user(7)], "messages[0].content"),
        ([user(["a"])], "messages[0].content[0].type"),
        ([user([text("a"), {"type": "document"}])], "messages[0].content[1].type"),
        ([user([{"type": ["text"]}])], "messages[0].content[0].type"),
        ([user([use("1")])], "messages[0].content[0].type"),
        ([assistant([result("1")])], "messages[0].content[0].type"),
        ([user([{"type": "text"}])], "messages[0].content[0].text"),
        ([user([{"type": "text", "text": 1}])], "messages[0].content[0].text"),
        ([assistant([PICTURE])], "messages[0].content[0].type"),
        ([user([{"type": "image", "source": {"type": "file"}}])], "messages[0].content[0].source"),
        ([user([{"type": "image", "source": {"type": "url", "url": 1}}])], "messages[0].content[0].source.url"),
        ([user([result("1", [text("a"), {"type": "image"}])])], "messages[0].content[0].content[1].source"),
        ([user([result("1", 5)])], "messages[0].content[0].content"),
        ([user([{"type": "tool_result"}])], "messages[0].content[0].tool_use_id"),
        ([assistant([use("1") | {"input": "x"}])], "messages[0].content[0].input"),
        ([assistant([use("1") | {"name": None}])], "messages[0].content[0].name"),
        ([assistant([{"type": "thinking"}])], "messages[0].content[0].thinking"),
    ],
)
def test_what_cannot_be_read_is_named_by_its_place(messages: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_messages("", messages)
    assert caught.value.param == param


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["text", "tool_use", "tool_result", "user", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "type", "content", "text", "id", "name", "input", "tool_use_id"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)


@given(st.lists(st.dictionaries(st.sampled_from(["role", "content"]), JSON), min_size=1, max_size=3))
def test_nothing_but_a_bad_request_comes_of_any_json(messages: Any) -> None:
    try:
        made = chat_messages("", messages)
    except BadRequest as error:
        assert error.param is not None and error.param.startswith("messages[")
    else:
        assert all(isinstance(message["content"], str) for message in made)
