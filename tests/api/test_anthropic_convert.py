"""An Anthropic request is the chat request that says the same; what would be ignored is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from treadle.api.anthropic_convert import chat_body, chat_choice, chat_format, chat_tool
from treadle.api.anthropic_errors import anthropic_error_body, speaks_anthropic
from treadle.api.anthropic_fields import MessagesBody, Tool, ToolChoice
from treadle.api.body import checked
from treadle.api.fields import ChatBody
from treadle.errors import (
    BadRequest,
    BodyTooLarge,
    ContextLengthExceeded,
    EngineFault,
    MemoryRefused,
    ModelNotFound,
    NotAuthorised,
    NotReady,
    QueueFull,
    TreadleError,
)

HELLO: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}


def chat(**fields: Any) -> ChatBody:
    return chat_body(checked(HELLO | fields, MessagesBody))


def test_the_fields_of_sampling_keep_their_meaning() -> None:
    made = chat(temperature=0.5, top_p=0.9, top_k=40, stop_sequences=["a", "b"], stream=True)
    assert (made.limit, made.temperature, made.top_p, made.top_k) == (9, 0.5, 0.9, 40)
    assert (made.stop, made.stream) == (["a", "b"], True)


def test_what_is_absent_is_left_to_the_model() -> None:
    made = chat()
    assert (made.temperature, made.top_p, made.top_k, made.stop, made.stream) == (None, None, None, [], False)
    assert made.chat_template_kwargs == {} and made.messages == HELLO["messages"]


@pytest.mark.parametrize(
    ("fields", "effort"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "medium"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "max"}}, "xhigh"),
        ({"thinking": {"type": "enabled"}, "output_config": {"effort": "low"}}, "low"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "high"}}, "none"),
        ({"output_config": {"effort": "high"}}, None),
        ({}, None),
    ],
)
def test_thinking_is_the_effort_of_reasoning(fields: Any, effort: str | None) -> None:
    assert chat(**fields).reasoning_effort == effort


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "any", "disable_parallel_tool_use": True}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "f"}, {"type": "function", "function": {"name": "f"}}),
    ],
)
def test_a_tool_choice_is_the_chat_s(choice: Any, expected: Any) -> None:
    assert chat_choice(checked(choice, ToolChoice)) == expected


def test_a_tool_is_a_function_with_its_schema() -> None:
    schema = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "string"}}}
    tool = {"name": "f", "description": "does", "input_schema": schema, "cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "description": "does", "parameters": schema}
    assert chat_tool(checked(tool, Tool)) == {"type": "function", "function": function}


def test_an_output_format_is_a_strict_schema() -> None:
    made = chat_format({"type": "json_schema", "schema": {"type": "object"}})
    assert made["json_schema"] == {"name": "output", "schema": {"type": "object"}, "strict": True}
    with pytest.raises(BadRequest, match=r"output_config|output format"):
        chat_format({"type": "xml"})


@pytest.mark.parametrize(
    "fields",
    [
        {"metadata": {"user_id": "me"}, "service_tier": "auto"},
        {"context_management": {"edits": []}, "betas": ["x"], "anthropic_version": "2023-06-01"},
        {"output_config": {"effort": "high"}, "mcp_servers": []},
    ],
)
def test_what_cannot_change_the_reply_is_accepted(fields: Any) -> None:
    assert chat(**fields) == chat()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"magic": 1}, "magic"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"stop_sequences": ["a" * 1001]}, "stop_sequences"),
        ({"system": 5}, "system"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tool_choice": {"type": "auto", "name": "f"}}, "tool_choice"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}, "magic": 1}]}, "tools[0].magic"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0]"),
        ({"output_config": {"shape": 1}}, "output_config.shape"),
        ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "messages"),
    ],
)
def test_what_would_change_the_reply_is_refused_by_name(fields: Any, param: str) -> None:
    with pytest.raises(BadRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_max_tokens_is_required() -> None:
    with pytest.raises(BadRequest) as caught:
        checked({"messages": HELLO["messages"]}, MessagesBody)
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (BadRequest("No."), "invalid_request_error"),
        (NotAuthorised("No."), "authentication_error"),
        (ModelNotFound("No."), "not_found_error"),
        (BodyTooLarge("No."), "request_too_large"),
        (QueueFull("No."), "rate_limit_error"),
        (EngineFault("No."), "api_error"),
        (NotReady("No."), "overloaded_error"),
        (MemoryRefused("No."), "overloaded_error"),
        (TreadleError("No."), "api_error"),
    ],
)
def test_every_error_has_one_of_anthropic_s_types(error: TreadleError, kind: str) -> None:
    assert anthropic_error_body(error) == {"type": "error", "error": {"type": kind, "message": "No."}}


def test_a_message_names_its_field_once() -> None:
    def message(error: TreadleError) -> Any:
        return anthropic_error_body(error)["error"]["message"]

    assert message(BadRequest("This model cannot see images.", param="messages[0]")).startswith("messages[0]: This")
    assert message(BadRequest("top_k: too small.", param="top_k")) == "top_k: too small."


@pytest.mark.parametrize(("tokens", "most"), [(300, 256), (257, 256), (256, 255)])
def test_a_long_prompt_is_told_in_the_words_that_agents_read(tokens: int, most: int) -> None:
    body = anthropic_error_body(ContextLengthExceeded(tokens, 256))
    assert body["error"]["message"] == f"prompt is too long: {tokens} tokens > {most} maximum"


def test_only_the_routes_of_messages_have_the_shape() -> None:
    assert speaks_anthropic("/v1/messages") and speaks_anthropic("/v1/messages/count_tokens")
    assert not speaks_anthropic("/v1/messages2") and not speaks_anthropic("/v1/chat/completions")
