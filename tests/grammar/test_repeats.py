"""Repetitions that multiply beyond what can be followed are refused before a reply begins, however they are asked."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.output.families import byte_level
from treadle.grammar.compile import Grammars, grammars_of
from treadle.grammar.fault import GrammarError
from treadle.grammar.repeats import most_parts
from treadle.types import Constraint, Language

HUGE = "(a{1000}){1000}"


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = byte_level()
    return grammars_of(tokenizer, len(tokenizer), frozenset({int(tokenizer.eos_token_id)}))


def schema(value: object) -> Constraint:
    return Constraint(Language.JSON_SCHEMA, json.dumps({"type": "object", "properties": {"x": value}}))


@pytest.mark.parametrize(
    "constraint",
    [
        Constraint(Language.REGEX, HUGE),
        Constraint(Language.REGEX, "(a{0,1000}){1000}"),
        Constraint(Language.REGEX, "((a{100}){100}){100,}"),
        Constraint(Language.REGEX, r"x(?:[\]}]{300}|\{{2}b){300}"),
        schema({"type": "string", "pattern": HUGE}),
        schema({"anyOf": [{"type": "null"}, {"type": "string", "pattern": f"^{HUGE}$"}]}),
        schema({"type": "object", "patternProperties": {HUGE: {}}}),
        Constraint(Language.LARK, f"start: /{HUGE}/"),
        Constraint(Language.LARK, f'start: "a" other\nother: %json {json.dumps({"pattern": HUGE})}'),
    ],
    ids=lambda constraint: f"{constraint.kind} {constraint.source[:50]}",
)
def test_too_many_parts_are_refused_with_their_number(grammars: Grammars, constraint: Constraint) -> None:
    with pytest.raises(GrammarError, match="multiply to"):
        grammars.check(constraint)


def test_a_large_repetition_alone_is_followed_to_its_end(grammars: Grammars) -> None:
    tokenizer = byte_level()
    constraint = Constraint(Language.REGEX, "([a-z]{1,200} ){1,200}!")
    grammars.check(constraint)
    matcher = grammars.matcher(constraint, {int(tokenizer.eos_token_id)})
    for id in tokenizer.encode(("a" * 150 + " ") * 10 + "!", add_special_tokens=False):
        matcher.mask()
        matcher.accept(id)
    assert (matcher.fault, matcher.finished) == ("", True)


def test_a_first_mask_that_uses_up_the_limit_is_found_before_a_reply(grammars: Grammars) -> None:
    """Written so that nobody counts its parts: groups of groups without a number of their own."""
    inner = "a" * 1000
    with pytest.raises(GrammarError):
        grammars.check(Constraint(Language.LARK, f'start: T\nT: (("{inner}"){{1000}}){{1000}}'))


ATOMS = st.sampled_from(["a", r"\{", r"\d", "[a-z]", "[^]{3}]", r"[\]{9}]", ".", "é"])


@st.composite
def regexes(draw: st.DrawFn, depth: int = 3) -> tuple[str, int, int]:
    """(expression, parts in all, parts of the largest repetition), by construction."""
    text, parts, most = "", 0, 0
    for _ in range(draw(st.integers(1, 3))):
        if depth and draw(st.booleans()):
            inner, size, inner_most = draw(regexes(depth - 1))
            atom, most = draw(st.sampled_from(["({})", "(?:{})"])).format(inner), max(most, inner_most)
            size += 2 * atom.startswith("(?:")  # `?` repeats nothing and `:` is taken for a character
        else:
            atom, size = draw(ATOMS), 1
        count = draw(st.sampled_from(["", "*", "+", "{3}", "{2,}", "{0,4}"]))
        times = {"{3}": 3, "{2,}": 2, "{0,4}": 4}.get(count)
        if times is not None:
            size *= times
            most = max(most, size)
        text, parts = text + atom + count, parts + size
    return text, parts, most


@given(regexes())
def test_parts_are_those_of_the_construction(made: tuple[str, int, int]) -> None:
    text, _, most = made
    re.compile(text)
    slack = text.count("(?:") and 2  # see `regexes`
    assert most_parts(text) <= most if slack else most_parts(text) == most


@given(st.text(alphabet="a({[]})\\,0123?*+^", max_size=40))
def test_anything_is_counted_without_an_error(text: str) -> None:
    assert most_parts(text) >= 0
