"""Items become the chat messages that say the same."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.api.body import checked
from treadle.api.responses_body import ResponsesBody, chat_request, client_name, conversation, response_format
from treadle.api.responses_items import CALLS, RESULTS, ROLES, Turns
from treadle.api.responses_tools import chat_tools
from treadle.errors import BadRequest
from treadle.prompt.conversation import normalise


def messages(*items: dict[str, Any], instructions: str | None = None) -> list[dict[str, Any]]:
    return conversation(ResponsesBody(input=list(items), instructions=instructions), ()).messages


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


CALL = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
CALLED = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
THOUGHT = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def test_a_text_is_a_user_message() -> None:
    assert conversation(ResponsesBody(input="hi"), ()).messages == [user("hi")]


def test_instructions_and_the_developer_become_one_system_message() -> None:
    developer = {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "be kind"}]}
    assert messages(developer, user("hi"), instructions="be brief") == [
        {"role": "system", "content": "be brief\n\nbe kind"},
        user("hi"),
    ]


def test_a_later_developer_message_stays_where_it_is() -> None:
    late = {"role": "developer", "content": "stop"}
    assert messages(user("hi"), late) == [user("hi"), late]


def test_thinking_text_and_calls_of_one_turn_are_one_message() -> None:
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]}
    result = {"type": "function_call_output", "call_id": "c1", "output": "1"}
    assert messages(user("hi"), THOUGHT, said, CALL, CALL | {"call_id": "c2"}, result) == [
        user("hi"),
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": [{"type": "output_text", "text": "ok"}],
            "tool_calls": [CALLED, CALLED | {"id": "c2"}],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1"},
    ]


def test_thinking_after_a_call_begins_a_new_turn() -> None:
    assert messages(user("hi"), CALL, THOUGHT, CALL)[1:] == [
        {"role": "assistant", "tool_calls": [CALLED]},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [CALLED]},
    ]


def test_a_summary_stands_for_thinking_that_is_not_shown() -> None:
    summarised = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "short"}], "encrypted_content": "x"}
    assert messages(user("hi"), summarised, {"role": "assistant", "content": "ok"})[1] == {
        "role": "assistant",
        "reasoning_content": "short",
        "content": "ok",
    }
    hidden = {"type": "reasoning", "summary": [], "encrypted_content": "x"}
    assert messages(user("hi"), hidden) == [user("hi")]


@pytest.mark.parametrize("output", [None, "", [], "text", [{"type": "input_text", "text": "a"}]])
def test_a_result_of_any_legal_shape_is_a_tool_message(output: Any) -> None:
    made = messages(user("hi"), CALL, {"type": "function_call_output", "call_id": "c1", "output": output})
    assert made[-1] == {"role": "tool", "tool_call_id": "c1", "content": "" if output is None else output}


def test_custom_calls_are_calls_with_a_text() -> None:
    call = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": "+a"}
    made = messages(user("hi"), call, {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"})
    assert made[1]["tool_calls"][0]["function"] == {"name": "patch", "arguments": {"input": "+a"}}


def test_traces_of_other_servers_are_left_out() -> None:
    assert messages(user("hi"), {"type": "web_search_call", "id": "w", "status": "completed"}) == [user("hi")]


def test_a_picture_gets_the_shape_that_chat_has() -> None:
    picture = {"type": "input_image", "image_url": "data:x", "detail": "low"}
    assert messages({"role": "user", "content": [picture]})[0]["content"] == [
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}
    ]


@pytest.mark.parametrize("instructions", [None, "be brief"])
def test_an_empty_input_is_an_empty_message(instructions: str | None) -> None:
    assert messages(instructions=instructions)[-1] == user("")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ({}, "input[1].role"),
        ({"type": "item_reference", "id": "x"}, "input[1].type"),
        ({"type": ["x"]}, "input[1].type"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": ["user"], "content": "x"}, "input[1].role"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "user", "content": 1}, "input[1].content"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}, "input[1].content[0].image_url"),
        ({"type": "function_call", "call_id": "c", "arguments": "{}"}, "input[1].name"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "input[1].call_id"),
        ({"type": "function_call", "name": "f", "call_id": "c", "arguments": {}}, "input[1].arguments"),
        ({"type": "function_call_output", "output": "x"}, "input[1].call_id"),
        ({"type": "function_call_output", "call_id": "c", "output": 1}, "input[1].output"),
    ],
)
def test_a_bad_item_is_named(item: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        messages(user("hi"), item)
    assert caught.value.param == param


def test_errors_about_messages_name_the_items_that_they_came_from() -> None:
    turns = conversation(ResponsesBody(input=[user("a"), CALL, user("b")], instructions="x"), [user("old")])
    assert turns.origins == ["instructions", "previous_response_id", "input[0]", "input[1]", "input[2]"]
    assert client_name("messages[4].content[0].type", turns) == "input[2].content[0].type"
    assert client_name("messages", turns) == "input"
    assert client_name("response_format.json_schema.schema", turns) == "text.format.schema"
    assert client_name("max_completion_tokens", turns) == "max_output_tokens"
    assert client_name("tools[0].function", turns) == "tools[0].function"


def test_the_settings_reach_the_chat_request() -> None:
    body = ResponsesBody(
        input="hi", max_output_tokens=5, temperature=0.5, seed=3, top_logprobs=2, stop="x", stream=True
    )
    chat = chat_request(body, conversation(body, ()))
    assert (chat.limit, chat.temperature, chat.seed, chat.alternatives, chat.stop) == (5, 0.5, 3, 2, ["x"])
    assert chat.stream


def test_a_text_format_is_a_response_format() -> None:
    assert response_format(None) is None and response_format({"type": "text"}) is None
    assert response_format({"type": "json_object"}) == {"type": "json_object"}
    given = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": None}
    assert response_format(given) == {
        "type": "json_schema",
        "json_schema": {"name": "n", "schema": {"type": "object"}, "strict": True},
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
kinds = st.sampled_from(["message", "reasoning", *CALLS, *RESULTS, "web_search_call", "odd"])
names = ("role", "content", "summary", "call_id", "name", "arguments", "input", "output")
parts = st.fixed_dictionaries({"type": st.sampled_from(["input_text", "input_image"])}, optional={"text": json_values})
values = json_values | st.sampled_from(ROLES) | st.lists(parts, max_size=2)
items = st.fixed_dictionaries({}, optional={"type": kinds | json_values, **dict.fromkeys(names, values)})


@given(st.lists(items, max_size=4))
def test_any_items_are_messages_or_a_bad_request(given_items: list[dict[str, Any]]) -> None:
    try:
        made = normalise(messages(*given_items))
    except BadRequest as error:
        assert error.param is not None
    else:
        assert made and all(isinstance(message["content"], str) for message in made)


@given(st.dictionaries(st.sampled_from(["tools", "tool_choice"]), json_values | st.lists(json_values)))
def test_any_tools_are_offered_or_a_bad_request(body: dict[str, Any]) -> None:
    try:
        whole = checked({"input": "a", **body}, ResponsesBody)
        chat_tools(whole.tools, whole.tool_choice)
    except BadRequest as error:
        assert error.param is not None


# tools

F = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": None}
WRAPPED = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HOSTED = [{"type": "web_search"}, {"type": "custom", "name": "patch"}, {"type": "namespace", "tools": [F]}]


def test_only_functions_are_offered() -> None:
    assert chat_tools([*HOSTED, F], "auto") == {"tools": [WRAPPED], "tool_choice": "auto"}
    assert chat_tools(HOSTED, "auto") == chat_tools([], None) == {}


@pytest.mark.parametrize(
    ("choice", "chosen"),
    [
        ("none", "none"),
        ("required", "required"),
        ({"type": "function", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_a_choice_is_the_chat_route_s(choice: Any, chosen: Any) -> None:
    assert chat_tools([F], choice) == {"tools": [WRAPPED], "tool_choice": chosen}


def test_allowed_tools_leave_only_those() -> None:
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    assert chat_tools([F, F | {"name": "g"}], choice) == {"tools": [WRAPPED], "tool_choice": "required"}


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([{}], None, "tools[0].type"),
        ([{"type": "function"}], None, "tools[0].name"),
        ([F], "always", "tool_choice"),
        ([F], {"type": "web_search"}, "tool_choice"),
        ([F], {"type": "function"}, "tool_choice"),
        ([F], {"type": "allowed_tools", "tools": 1}, "tool_choice.tools"),
    ],
)
def test_bad_tools_are_named(tools: Any, choice: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat_tools(tools, choice)
    assert caught.value.param == param


def test_settling_keeps_system_messages_that_are_more_than_text() -> None:
    turns = Turns()
    turns.say("system", "a", "instructions")
    turns.say("developer", [{"type": "input_image"}], "input[0]")
    turns.settle()
    assert [message["role"] for message in turns.messages] == ["system", "developer", "user"]
