"""A prompt is what the model's own template makes; refusals are merged away or told to the client."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.output.families import CHATML, byte_level
from treadle.errors import BadRequest
from treadle.prompt.template import attempts, check_kwargs, merge, render, takes_tools

STRICT = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
SYSTEM_FIRST = (
    "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning') }}{% endif %}"
    "[{{ m['role'] }}]{{ m['content'] }}"
    "{% endfor %}"
)
THINKING = "{{ messages[0]['content'] }}{% if enable_thinking is defined and not enable_thinking %}<quiet>{% endif %}"
TOOLS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ messages[0]['content'] }}"


def using(template: str | dict[str, str] | None) -> PreTrainedTokenizerFast:
    tokenizer = byte_level()
    tokenizer.chat_template = template
    return tokenizer


def say(*turns: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": roles[turn[0]], "content": turn[1:].strip()} for turn in turns]


def test_the_generation_prompt_is_added() -> None:
    assert render(using(CHATML), say("u hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert render(using(CHATML), say("u hi"), add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_a_last_assistant_message_is_continued() -> None:
    text = render(using(CHATML), say("u hi", "a The answer"))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nThe answer"
    assert render(using(CHATML), say("u hi", "a")).endswith("<|im_start|>assistant\n")


def test_a_last_assistant_message_with_tool_calls_is_not_continued() -> None:
    messages = say("u hi", "a")
    messages[1]["tool_calls"] = [{"type": "function", "function": {"name": "f", "arguments": {}}}]
    assert render(using(CHATML), messages).endswith("<|im_end|>\n<|im_start|>assistant\n")


def test_a_template_that_accepts_the_messages_sees_them_unmerged() -> None:
    assert render(using(CHATML), say("u a", "u b")).count("<|im_start|>user") == 2


def test_neighbours_of_one_role_are_merged_when_refused() -> None:
    assert render(using(STRICT), say("u a", "u b")) == "[user]a\n\nb[assistant]"


def test_a_refused_system_message_goes_in_front_of_the_first_user_message() -> None:
    assert render(using(STRICT), say("s rules", "u hi", "a yes", "u go")) == (
        "[user]rules\n\nhi[assistant]yes[user]go[assistant]"
    )


def test_a_leading_system_message_stays_when_only_a_later_one_is_refused() -> None:
    text = render(using(SYSTEM_FIRST), say("s rules", "u hi", "s reminder", "a ok", "u go"))
    assert text == "[system]rules[user]hi\n\nreminder[assistant]ok[user]go"


def test_what_no_merging_helps_is_told_in_the_templates_words() -> None:
    with pytest.raises(BadRequest, match="Roles must alternate") as caught:
        render(using(STRICT), say("a first", "u hi"))
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    ["{{ messages[0]['content'] + 1 }}", "{% if %}", "{{ ''.__class__.__mro__ }}", "{{ nothing.at.all }}"],
)
def test_a_template_that_breaks_is_a_bad_request(template: str) -> None:
    with pytest.raises(BadRequest, match="The chat template refuses"):
        render(using(template), say("u hi"))


@pytest.mark.parametrize("template", [None, ""])
def test_no_template_names_the_model_and_the_other_route(template: str | None) -> None:
    with pytest.raises(BadRequest, match=r"tiny has no chat template; use /v1/completions"):
        render(using(template), say("u hi"), model="tiny")


def test_variables_reach_the_template() -> None:
    assert render(using(THINKING), say("u hi"), enable_thinking=False) == "hi<quiet>"
    assert render(using(THINKING), say("u hi"), enable_thinking=True) == "hi"
    assert render(using(CHATML), say("u hi"), enable_thinking=False) == render(using(CHATML), say("u hi"))


@pytest.mark.parametrize("name", ["tools", "messages", "chat_template", "tokenize", "add_generation_prompt", "model"])
def test_variables_that_are_not_the_clients_are_refused(name: str) -> None:
    with pytest.raises(BadRequest) as caught:
        check_kwargs({name: "x"})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_tools_are_rendered_in_their_own_key_order() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"b": 1, "a": 2}}}
    text = render(using(TOOLS), say("u hi"), [tool])
    assert text.index('"b"') < text.index('"a"') and text.endswith("hi")
    assert text == render(using(TOOLS), say("u hi"), [tool])


def test_a_template_takes_tools_if_it_writes_them() -> None:
    assert takes_tools(using(TOOLS))
    assert not takes_tools(using(CHATML)) and not takes_tools(using(None))
    assert not takes_tools(using("{% if tools %}{{ raise_exception('No tools') }}{% endif %}x"))


def test_call_ids_become_short_only_where_the_template_refuses_them() -> None:
    call = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "f", "arguments": {}}}
    messages = say("u hi", "a", "t 42", "u go")
    messages[1]["tool_calls"], messages[2]["tool_call_id"] = [call], call["id"]
    strict = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{% if c.id|length != 9 %}{{ raise_exception('9!') }}{% endif %}{{ c.id }},{% endfor %}"
        "{{ m.tool_call_id }}{% endfor %}"
    )
    first, second = render(using(strict), messages).split(",")
    assert first == second and len(first) == 9 and first.isalnum()
    free = "{% for m in messages %}{{ m.tool_call_id }}{% endfor %}"
    assert render(using(free), messages) == call["id"]


def test_merging_keeps_tool_results_apart_and_joins_tool_calls() -> None:
    first = {"role": "assistant", "content": "", "tool_calls": [1]}
    second = {"role": "assistant", "content": "x", "tool_calls": [2], "reasoning_content": "r"}
    merged = merge([first, second, *say("t a", "t b")])
    assert merged[0] == {"role": "assistant", "content": "x", "tool_calls": [1, 2], "reasoning_content": "r"}
    assert merged[1:] == say("t a", "t b")


def test_messages_that_merging_does_not_change_are_tried_once() -> None:
    assert len(list(attempts(say("u hi", "a yes", "u go")))) == 1
    assert len(list(attempts(say("s x", "u hi")))) == 2
    assert len(list(attempts(say("s x", "u hi", "s y")))) == 3
