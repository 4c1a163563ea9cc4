"""Expressions say what they should in llguidance's own reading."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes_engine import SPECIALS, tokenizer
from treadle.grammar.compile import grammars_of
from treadle.grammar.fault import GrammarError
from treadle.grammar.lark import Lark, expression, in_order, json_expression, quoted
from treadle.types import Constraint, Language

END = 0
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)


def takes(lark: str, text: str) -> bool:
    """Whether the grammar allows this text as a whole."""
    matcher = grammars_of(tokenizer(), len(tokenizer()), frozenset({END})).matcher(
        Constraint(Language.LARK, lark), {END}
    )
    for id in [*tokenizer().encode(text, add_special_tokens=False), END]:
        if not matcher.mask()[id // 32] >> (id % 32) & 1:
            return False
        if id != END:
            matcher.accept(id)
    return True


@given(st.lists(st.one_of(TEXTS, st.sampled_from(SPECIALS[1:])), max_size=4).map("".join))
@example("\x7f")
def test_a_literal_is_its_text_and_special_tokens_are_tokens(text: str) -> None:
    lark = Lark(tokenizer())
    grammar = lark.text(lark.rule(lark.literal(text) or '""'))
    assert takes(grammar, text) and not takes(grammar, text + "x")


@given(st.lists(TEXTS, min_size=1, max_size=4), TEXTS)
def test_a_choice_is_exactly_one_of_its_texts(texts: list[str], other: str) -> None:
    grammar = f"start: {expression(Constraint(Language.CHOICE, json.dumps(texts)))}"
    assert all(takes(grammar, text) for text in texts)
    assert takes(grammar, other) == (other in texts)


@given(TEXTS, st.sampled_from(["</end>", "\n</p>", "<|user|>", "x<|user|>y"]))
def test_until_reads_to_the_first_end(text: str, end: str) -> None:
    lark = Lark(tokenizer())
    grammar = lark.text(f'{lark.until(end)} "!"')
    assert takes(grammar, f"{text}{end}!")
    assert not takes(grammar, f"{text}{end}{end}!") and not takes(grammar, f"{text}!")


@given(st.data(), st.lists(st.booleans(), max_size=4), st.sampled_from(["", ","]), st.booleans())
def test_members_come_in_order_and_only_the_optional_may_be_missing(
    data: st.DataObject, needed: list[bool], separator: str, more: bool
) -> None:
    lark = Lark(tokenizer())
    names = "abcd"[: len(needed)]
    members = [(quoted(name), need) for name, need in zip(names, needed, strict=True)]
    grammar = lark.text(in_order(lark, members, quoted(separator) if separator else "", quoted("z") if more else ""))
    given_names = [name for name in names if data.draw(st.booleans())] + ["z"] * data.draw(st.integers(0, 2))
    right = all(name in given_names for name, need in zip(names, needed, strict=True) if need)
    right = right and (more or "z" not in given_names)
    assert takes(grammar, separator.join(given_names)) == right
    if len(given_names) > 1 and given_names[0] != given_names[-1]:
        assert not takes(grammar, separator.join(reversed(given_names)))


@pytest.mark.parametrize(
    ("constraint", "good", "bad"),
    [
        (Constraint(Language.JSON_OBJECT), '{"a": 1}', "[]"),
        (Constraint(Language.JSON_SCHEMA, '{"type": "integer"}'), "3", "3.5"),
        (Constraint(Language.REGEX, r"a/\d"), "a/7", "a/x"),
        (Constraint(Language.CHOICE, json.dumps(['a"b\n', "ü"])), 'a"b\n', "a"),
        (Constraint(Language.LARK, 'start: "{" start "}" | X\nX: /[}]x/  // not a brace }'), "{}x}", "{}x"),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Constraint) else "",
)
def test_every_constraint_can_be_one_of_several(constraint: Constraint, good: str, bad: str) -> None:
    lark = Lark(tokenizer())
    grammar = lark.text(lark.rule(expression(constraint)), quoted("<call>"))
    assert takes(grammar, good) and takes(grammar, "<call>") and not takes(grammar, bad)


def test_a_free_answer_has_no_expression() -> None:
    assert expression(Constraint(Language.FREE)) == ""


@pytest.mark.parametrize("schema", [{"x-guidance": {"lenient": True}}, True, []])
def test_what_is_no_schema_for_us_is_refused(schema: Any) -> None:
    with pytest.raises(GrammarError):
        json_expression(schema)
