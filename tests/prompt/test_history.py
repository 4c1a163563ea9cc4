"""What changes with every request does not reach the prompt; what was said does, in the same bytes each time."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.prompt.conversation import normalise
from treadle.prompt.history import without_attribution

HEADER = "x-anthropic-billing-header: cc_version=2.1.120.cf9; cc_entrypoint=cli; cch=543cf;"
HELLO = {"role": "user", "content": "hi"}


def cleaned(system: Any, *others: Any, role: str = "system") -> list[dict[str, Any]]:
    return without_attribution(normalise([{"role": role, "content": system}, *(others or [HELLO])]))


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.mark.parametrize("role", ["system", "developer"])
@pytest.mark.parametrize(
    "system",
    [
        f"{HEADER}\nBe kind.\nAlways.",
        f"{HEADER}\r\nBe kind.\nAlways.",
        f"{HEADER} \nBe kind.\nAlways.",
        parts(HEADER, "Be kind.\nAlways."),
        parts(f"{HEADER}\nBe kind.", "Always."),
    ],
)
def test_the_line_is_removed_from_the_start_of_the_system_message(system: Any, role: str) -> None:
    assert cleaned(system, role=role) == [{"role": "system", "content": "Be kind.\nAlways."}, HELLO]


@given(st.text(st.characters(exclude_characters="\r\n"), max_size=40))
def test_whatever_the_line_says_the_prompt_is_the_same(value: str) -> None:
    assert cleaned(parts(f"x-anthropic-billing-header: {value};", "Be kind.")) == cleaned("Be kind.")


@pytest.mark.parametrize("system", [HEADER, parts(HEADER), f"{HEADER}\n"])
def test_a_system_message_of_that_line_alone_goes_as_a_whole(system: Any) -> None:
    assert cleaned(system) == [HELLO]
    assert without_attribution(normalise([{"role": "system", "content": system}])) == [
        {"role": "system", "content": ""}
    ]


@pytest.mark.parametrize(
    "system",
    [
        f"Be kind.\n{HEADER}",
        f" {HEADER}\nBe kind.",
        f"\n{HEADER}\nBe kind.",
        f"{HEADER} Be kind.",
        f"{HEADER[:-1]}\nBe kind.",
        f"X{HEADER[1:]}\nBe kind.",
        "x-anthropic-billing-header:\nBe kind;",
        parts("Be kind.", HEADER),
        "",
    ],
)
def test_any_other_text_stays(system: Any) -> None:
    messages = normalise([{"role": "system", "content": system}, HELLO])
    assert without_attribution(messages) == messages


def test_only_the_first_message_and_only_of_the_system_is_cleaned() -> None:
    header = {"content": f"{HEADER}\nx"}
    for first in ("user", "assistant", "tool"):
        messages = normalise([{"role": first, **header}, {"role": "system", **header}, {"role": "user", **header}])
        assert without_attribution(messages) == messages


def test_the_input_is_left_alone() -> None:
    messages = normalise([{"role": "system", "content": f"{HEADER}\nBe kind."}, HELLO])
    before = copy.deepcopy(messages)
    without_attribution(messages)
    assert messages == before


RENDER = """
import json, sys
from tests.prompt.test_history import tool_prompt
sys.stdout.write(tool_prompt(json.loads(sys.argv[1])))
"""
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% for c in m.tool_calls or [] %}{{ c | tojson }}{{ c.function.arguments }}"
    "{% for k, v in c.function.arguments.items() %}<{{ k }}>{{ v }}{% endfor %}{% endfor %}"
    "{{ m.content }}<|im_end|>{% endfor %}"
)
ARGUMENTS = '{"zeta": 1, "alpha": {"y": [true, null, 1.5], "x": "日本"}, "path": "/a", "beta": {}, "Alpha": ""}'


def tool_prompt(arguments: str) -> str:
    """The prompt of a conversation with a tool call, by a template that writes all of it."""
    from tests.output.families import byte_level
    from treadle.prompt.template import render

    tokenizer = byte_level()
    tokenizer.chat_template = TEMPLATE
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}, {"role": "tool", "content": "ok"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}
    return render(tokenizer, normalise(messages), [tool])


def test_tool_arguments_are_written_in_the_order_they_came_in() -> None:
    text = tool_prompt(ARGUMENTS)
    assert text == tool_prompt(ARGUMENTS)
    assert '{"zeta": 1, "alpha": {"y": [true, null, 1.5], "x": "日本"}, "path": "/a", "beta": {}, "Alpha": ""}' in text
    assert text.index("<zeta>") < text.index("<alpha>") < text.index("<path>") < text.index("<Alpha>")


def test_a_prompt_is_the_same_bytes_in_every_process() -> None:
    made = {
        subprocess.run(
            [sys.executable, "-c", RENDER, json.dumps(ARGUMENTS)],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONIOENCODING": "utf-8"},
            capture_output=True,
            check=True,
        ).stdout.decode()
        for seed in ("1", "2")
    }
    assert made == {tool_prompt(ARGUMENTS)}
