"""What the grammar of calls allows is read as calls that fit their schemas, in the syntax of every family."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.output.spoken import (
    COHERE,
    DEEPSEEK,
    DSML,
    KIMI,
    LFM,
    LLAMA4,
    MISTRAL,
    SAID,
    TOOLS,
    XTML,
    Heard,
    speaker,
)
from treadle.api.call_grammar import CallGrammar
from treadle.api.call_values import Unwritable, arguments
from treadle.grammar.compile import Grammars
from treadle.grammar.vocabulary import Vocabulary
from treadle.output.form import form_of
from treadle.output.reply import ReplyStream
from treadle.output.tools.detect import format_of
from treadle.types import Constraint, Finish, Language, Output

GRANITE = ("<|tool_call|>", "<|/tool_call|>")
GEMMA = ("<|tool_call>", "<tool_call|>", '<|"|>')
FAMILIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "hermes": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', ()),
    "hermes, special": ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', ("<tool_call>", "</tool_call>")),
    "qwen coder": ("<tool_call>\n<function=f>", ()),
    "glm": ("<arg_key><tool_call>", ()),
    "glm, special": ("<arg_key><tool_call>", ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")),
    "minimax": ("<minimax:tool_call>", ()),
    "minicpm": ('<function name="<param name="', ()),
    "longcat": ("<longcat_tool_call>", ()),
    "mistral, list": ("[TOOL_CALLS]", MISTRAL),
    "mistral, headers": ("[TOOL_CALLS][ARGS][CALL_ID]", MISTRAL),
    "llama": ('<|python_tag|>"parameters": ', ("<|python_tag|>",)),
    "llama 3.2, python": ("[func_name1(", ()),
    "llama 4": ("<|python_start|>[func_name1(", LLAMA4),
    "deepseek v3": ("<｜tool▁call▁begin｜>```json", DEEPSEEK),
    "deepseek v3.1": ("<｜tool▁call▁begin｜>", DEEPSEEK),
    "deepseek dsml": ("｜DSML｜function_calls>", DSML),
    "kimi k2": ("<|tool_call_begin|>", KIMI),
    "kimi k3": ("x", XTML),
    "lfm2": ("<|tool_list_start|>", LFM),
    "gemma4": ("<|tool_call><tool_call|>", GEMMA),
    "granite": ("<|tool_call|><|/tool_call|>", GRANITE),
    "seed": ("<seed:tool_call>", ("<seed:tool_call>", "</seed:tool_call>")),
    "cohere": ('<|START_ACTION|>"tool_name""parameters"', COHERE),
    "olmo": ("<function_calls>", ()),
    "nemotron": ("<TOOLCALL>", ()),
    "internlm": ('<|action_start|><|plugin|>"parameters"', ("<|action_start|>", "<|plugin|>", "<|action_end|>")),
}


def function(name: str, **schema: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


# Every argument has few values, so that a random walk ends.
SMALL = [
    function("none"),
    function(
        "set_all",
        type="object",
        properties={
            "short": {"type": "string", "maxLength": 3},
            "count": {"type": "integer", "minimum": -3, "maximum": 30},
            "mode": {"enum": ["on", "off <b>", "a, b}"]},
            "flag": {"$ref": "#/$defs/flag"},
            "code": {"type": "string", "pattern": "^[a-c]{1,2}$"},
            "list": {"type": "array", "items": {"type": "boolean"}},
            "maybe": {"anyOf": [{"type": "string", "maxLength": 2}, {"type": "null"}]},
        },
        required=["count", "flag"],
        **{"$defs": {"flag": {"type": "boolean"}}},
    ),
    function("only.one-x", properties={"x": {"type": "integer", "minimum": 0, "maximum": 9}}, required=["x"]),
]
BY_NAME = {tool["function"]["name"]: tool["function"]["parameters"] for tool in SMALL}


@cache
def grammars_for(template: str, specials: tuple[str, ...]) -> Grammars:
    tokenizer = speaker(template, "<end>", *specials)
    return Grammars(Vocabulary(tokenizer, len(tokenizer), [int(tokenizer.convert_tokens_to_ids("<end>"))]))


def constraint(
    family: str, tools: list[dict[str, Any]], *, only: bool, single: bool = False, held: Any = None
) -> Constraint:
    template, specials = FAMILIES[family]
    tokenizer = speaker(template, "<end>", *specials)
    format = format_of(tokenizer)
    assert format is not None
    names = [tool["function"]["name"] for tool in tools] if held is None else held
    functions = [tool["function"] for tool in tools]
    schemas = {f["name"]: arguments(f.get("parameters"), held=f["name"] in names) for f in functions}
    grammar = CallGrammar(tokenizer, format, schemas, single=single, template=template)
    return Constraint(Language.LARK, grammar.lark.text(grammar.only() if only else grammar.amid_text()))


def walked(family: str, constraint: Constraint, seed: int, most: int = 3000) -> list[int]:
    """Tokens drawn evenly from the masks until the reply may end."""
    grammars = grammars_for(*FAMILIES[family])
    ends = grammars.vocabulary.ends
    matcher = grammars.matcher(constraint, ends)
    draw = random.Random(seed)
    made: list[int] = []
    while len(made) < most:
        bits = np.flatnonzero(np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")).tolist()
        assert not matcher.fault and bits
        if ends & set(bits):
            return made
        made.append(draw.choice(bits))
        matcher.accept(made[-1])
    raise AssertionError("the reply never ended")


def heard(family: str, ids: list[int], tools: list[dict[str, Any]]) -> Heard:
    template, specials = FAMILIES[family]
    tokenizer = speaker(template, "<end>", *specials)
    stream = ReplyStream(tokenizer, (), form_of(tokenizer, "<|assistant|>", tools))
    found = Heard()
    for output in (Output("x", tokens=tuple(ids)), Output("x", finish=Finish.STOP)):
        for event in stream.push(output):
            found.add(event)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_every_walk_through_the_masks_is_read_as_calls_that_fit(family: str) -> None:
    grammar = constraint(family, SMALL, only=True)
    names = set()
    for seed in range(12):
        ids = walked(family, grammar, seed)
        found = heard(family, ids, SMALL)
        text = speaker(FAMILIES[family][0], "<end>", *FAMILIES[family][1]).decode(ids)
        assert found.calls and not found.text.strip(), text
        for name, given in found.calls:
            names.add(name)
            jsonschema.validate(json.loads(given), {"additionalProperties": False, **BY_NAME[name]})
    assert len(names) > 1


def takes(family: str, constraint: Constraint, text: str) -> bool:
    """Whether the masks allow this whole reply."""
    grammars = grammars_for(*FAMILIES[family])
    matcher = grammars.matcher(constraint, grammars.vocabulary.ends)
    tokenizer = speaker(FAMILIES[family][0], "<end>", *FAMILIES[family][1])
    ids = tokenizer.encode(text, add_special_tokens=False)
    for id in ids:
        if not matcher.mask()[id // 32] >> (id % 32) & 1:
            return False
        matcher.accept(id)
    (end,) = grammars.vocabulary.ends
    return bool(matcher.mask()[end // 32] >> (end % 32) & 1)


RECORDED = {
    "hermes": "hermes, twice behind text",
    "hermes, special": "hermes, special tokens",
    "qwen coder": "qwen3 coder",
    "glm": "glm",
    "minimax": "minimax",
    "longcat": "longcat",
    "mistral, list": "mistral, list",
    "deepseek v3": "deepseek v3",
    "deepseek v3.1": "deepseek v3.1",
    "kimi k2": "kimi k2",
    "granite": "granite",
    "nemotron": "nemotron",
    "internlm": "internlm",
}


@pytest.mark.parametrize("family", RECORDED)
def test_what_a_family_is_known_to_write_is_allowed(family: str) -> None:
    (said,) = [found for found in SAID if found.name == RECORDED[family]]
    grammar = constraint(family, TOOLS, only=False)
    assert takes(family, grammar, said.said.replace("{'k': 'v]'}", '{"k": "v]"}'))
    assert takes(family, grammar, "Just text, a < b {c} [d].\n")
    assert not takes(family, grammar, said.said.replace("weather", "wether"))
    assert not takes(family, constraint(family, TOOLS, only=True), "Just text.")


CALL = '<tool_call>\n{"name": "only.one-x", "arguments": {"x": 3}}\n</tool_call>'


def test_text_is_free_but_a_call_that_begins_is_held() -> None:
    grammar = constraint("hermes", SMALL, only=False)
    for text in ("", "Hi <b> {", f"Hi{CALL}", f"{CALL}\nand\n{CALL} done", "Use the tag <tool_cal"):
        assert takes("hermes", grammar, text), text
    for text in (
        "Hi <tool_call>",
        "<tool_call>x",
        CALL.replace("3", '"3"'),
        CALL.replace('x"', 'y"'),
        "<function=now>",
    ):
        assert not takes("hermes", grammar, text), text


def test_only_calls_are_allowed_where_they_are_asked_for() -> None:
    grammar = constraint("hermes", SMALL, only=True)
    assert takes("hermes", grammar, CALL) and takes("hermes", grammar, f"{CALL}\n{CALL}")
    assert not any(takes("hermes", grammar, text) for text in ("", "Hi", f"Hi{CALL}", f"{CALL} done"))


@pytest.mark.parametrize("only", [True, False])
def test_a_single_call_is_not_followed_by_another(only: bool) -> None:
    grammar = constraint("hermes", SMALL, only=only, single=True)
    assert takes("hermes", grammar, CALL) and not takes("hermes", grammar, f"{CALL}\n{CALL}")


@pytest.mark.parametrize("family", ["hermes", "qwen coder", "glm", "gemma4", "lfm2", "kimi k2", "kimi k3"])
def test_a_tool_that_is_not_held_takes_any_arguments(family: str) -> None:
    odd = [function("f", properties={"x": {"not": {}}})]
    said = {
        "hermes": '<tool_call>{"name": "f", "arguments": {"z": [1]}}</tool_call>',
        "qwen coder": "<tool_call><function=f>\n<parameter=z>\n1\n</parameter>\n</function></tool_call>",
        "glm": "<tool_call>f\n<arg_key>z</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "gemma4": '<|tool_call>call:f{z:<|"|>1<|"|>,y:2}<tool_call|>',
        "lfm2": '<|tool_call_start|>[f(z=[1], y="a")]<|tool_call_end|>',
        "kimi k2": (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>"
            '{"z": [1]}<|tool_call_end|><|tool_calls_section_end|>'
        ),
        "kimi k3": (
            '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|open|>argument key="z" type="string"<|sep|>'
            "1<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>"
        ),
    }[family]
    assert takes(family, constraint(family, odd, only=False, held=()), said)


def test_a_bare_format_tells_calls_from_text_by_how_a_reply_begins() -> None:
    grammar = constraint("llama", SMALL, only=False)
    call = '{"name": "only.one-x", "parameters": {"x": 3}}'
    for text in ("Hi {x}", call, f"<|python_tag|>{call}; {call}", f"Hi<|python_tag|>{call}"):
        assert takes("llama", grammar, text), text
    assert not takes("llama", grammar, '{"x": 3}') and not takes("llama", grammar, " {")


@pytest.mark.parametrize(
    ("family", "schema", "says"),
    [
        ("qwen coder", {"properties": {"x": {"type": "string", "contentEncoding": "base64"}}}, "contentEncoding"),
        ("glm", {"properties": {"x": {"type": "string", "format": "date"}}}, "format"),
        ("minimax", {"anyOf": [{"type": "object"}]}, "anyOf"),
        ("glm", {"properties": {"x": {"type": ["string", "integer"]}}}, "other types"),
        ("glm", {"properties": {"x": {"$ref": "#/$defs/none"}}}, "leads nowhere"),
        ("gemma4", {"properties": {"x": {"type": "array", "minItems": 3}}}, "minItems"),
        ("gemma4", {"properties": {"x": {"$ref": "#"}}, "type": "object"}, "without end"),
    ],
)
def test_what_a_syntax_cannot_be_held_to_is_refused_with_the_reason(family: str, schema: Any, says: str) -> None:
    with pytest.raises(Unwritable, match=says):
        constraint(family, [function("f", **schema)], only=True)


def test_a_name_that_would_break_the_syntax_is_refused() -> None:
    for family in ("glm", "lfm2", "kimi k2"):
        with pytest.raises(Unwritable, match="cannot stand"):
            constraint(family, [function("a b>")], only=True)
    assert takes(
        "hermes",
        constraint("hermes", [function("a b>")], only=True),
        '<tool_call>{"name": "a b>", "arguments": {}}</tool_call>',
    )
