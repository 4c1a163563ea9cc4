"""Messages start where the template puts its own tokens, whichever template it is."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.output.families import byte_level
from treadle.prompt.template import render
from treadle.prompt.tokenise import encode
from treadle.prompt.turns import boundaries, find_markers, markers_of

Message = dict[str, Any]


@dataclass(frozen=True)
class Style:
    """A way to write conversations: its template, its tokens, and those that start messages.

    `begins`: the roles whose messages one of these tokens starts.
    """

    template: str
    tokens: tuple[str, ...]
    markers: tuple[str, ...]
    begins: tuple[str, ...] = ("system", "user", "assistant", "tool")
    special: bool = True


REFUSE = "{{ raise_exception('no') }}"
STYLES = {
    "chatml": Style(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"),
        ("<|im_start|>",),
    ),
    "llama3": Style(
        "<s>{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
        "<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
        ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        ("<|start_header_id|>",),
    ),
    "gemma": Style(
        "<s>{% if messages[0].role == 'system' %}" + REFUSE + "{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}" + REFUSE + "{% endif %}"
        "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content }}<end_of_turn>\n"
        "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
        ("<start_of_turn>", "<end_of_turn>", "\n", "\n\n"),
        ("<start_of_turn>",),
        begins=("user", "assistant"),
    ),
    "mistral": Style(
        "<s>{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]"
        "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]"
        "{% elif m.tool_calls %}[TOOL_CALLS]{{ m.tool_calls[0].function | tojson }}</s>"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]{{ m.content }}[/TOOL_RESULTS]"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}",
        ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
        ("[INST]", "[SYSTEM_PROMPT]", "[TOOL_CALLS]", "[TOOL_RESULTS]"),
        begins=("system", "user", "tool"),
    ),
    "one token per role": Style(
        "[gMASK]{% for m in messages %}<|{{ 'observation' if m.role == 'tool' else m.role }}|>\n"
        "{{ m.tool_calls or '' }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        ("[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        special=False,
    ),
    "thinking of the last reply kept": Style(
        "{% for m in messages %}<|start|>{{ m.role }}<|message|>"
        "{% if m.role == 'assistant' and loop.last %}<think></think>{{ m.content }}<|return|>"
        "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant<think>{% endif %}",
        ("<|start|>", "<|message|>", "<|end|>", "<|return|>", "<think>", "</think>"),
        ("<|start|>",),
    ),
}  # fmt: skip


@cache
def styled(name: str) -> PreTrainedTokenizerFast:
    style = STYLES[name]
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(token, special=style.special, normalized=False) for token in style.tokens])
    tokenizer.chat_template = style.template
    return tokenizer


def prompt(name: str, messages: Sequence[Message], *, generate: bool = True) -> Any:
    text = render(styled(name), list(messages), add_generation_prompt=generate)
    return encode(styled(name), text, add_special_tokens=False)


@pytest.mark.parametrize("name", STYLES)
def test_the_markers_are_those_that_the_template_starts_messages_with(name: str) -> None:
    known = styled(name).convert_ids_to_tokens(markers_of(styled(name)).tolist())
    assert set(known) <= set(STYLES[name].markers)
    assert set(known) >= set(STYLES[name].markers) - {"[SYSTEM_PROMPT]"}  # only ever the first message


TEXTS = st.text(st.sampled_from("ab \n<|>[]日"), max_size=30)


def pieces(name: str, ids: Any) -> list[str]:
    """The prompt's text, cut at the boundaries."""
    return [styled(name).decode(part) for part in np.split(ids, boundaries(styled(name), ids))]


def conversation(roles: Sequence[str], texts: Sequence[str]) -> list[Message]:
    """Messages with numbered contents."""
    return [
        {"role": role, "content": f"no.{index}; {text}"}
        for index, (role, text) in enumerate(zip(roles, texts, strict=False))
    ]


def numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"no\.(\d+);", text)]


@pytest.mark.parametrize("name", STYLES)
@given(texts=st.lists(TEXTS, min_size=1, max_size=8), has_system=st.booleans())
def test_cut_at_the_boundaries_every_piece_is_a_message(name: str, texts: list[str], has_system: bool) -> None:
    begins = STYLES[name].begins
    roles = ["system"] * (has_system and "system" in begins) + ["user", "assistant"] * 4
    messages = conversation(roles, texts)
    if messages[-1]["role"] != "user":
        messages += conversation(["user"], ["last"])
    expected: list[list[int]] = [[]]
    for message in messages:
        if message["role"] in begins and message is not messages[0]:
            expected.append([])
        expected[-1] += numbers(message["content"])
    if "assistant" in begins:
        expected.append([])  # the start of the reply
    made = pieces(name, prompt(name, messages))
    assert [numbers(piece) for piece in made] == expected
    assert all(piece.startswith(STYLES[name].markers) for piece in made[1:])


@pytest.mark.parametrize("name", ["chatml", "mistral", "one token per role"])
def test_tool_calls_and_their_results_start_at_boundaries(name: str) -> None:
    ask, result, thanks = conversation(["user", "tool", "user"], ["go", "done", "thanks"])
    function = {"name": "f", "arguments": {"x": "no.9;"}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
    made = pieces(name, prompt(name, [ask, call, result, thanks]))
    assert [numbers(piece) for piece in made[:4]] == [[0], [9], [1], [2]]


def test_only_positions_of_the_prompt_itself_are_found() -> None:
    start = styled("chatml").convert_tokens_to_ids("<|im_start|>")
    ids = np.array([start, 7, 7, 7, start, 7, start], np.int64)
    assert boundaries(styled("chatml"), ids) == (4, 6)
    assert boundaries(styled("chatml"), ids[:4]) == boundaries(styled("chatml"), ids[:0]) == ()


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{% for m in messages %}{{ '' if loop.first else '\n\n' }}### {{ m.role }}:\n{{ m.content }}{% endfor %}",
        "{{ messages[0].content }}{{ raise_exception('never') }}",
    ],
)
def test_a_template_without_tokens_of_its_own_has_no_boundaries(template: str | None) -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    tokenizer.chat_template = template
    assert find_markers(tokenizer).size == 0
    ids = encode(tokenizer, "### user:\na\n\n### user:\na", add_special_tokens=False)
    assert boundaries(tokenizer, ids) == ()


def test_the_markers_are_found_once_per_tokenizer() -> None:
    assert markers_of(styled("chatml")) is markers_of(styled("chatml"))
