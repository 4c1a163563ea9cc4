"""A mask allows exactly the tokens after which the grammar can still be met, and an end exactly where it is."""

from __future__ import annotations

import json
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import VOCAB
from tests.fakes_engine import tokenizer
from tests.grammar.letters import grammars, ids_of, text_of
from treadle.grammar.compile import grammars_of
from treadle.grammar.matcher import Matcher
from treadle.types import Constraint, Language

END = frozenset({0})


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def walk(matcher: Matcher, draw: st.DataObject, most: int = 60) -> tuple[list[int], bool]:
    """Random allowed tokens until an end is drawn, nothing may follow, or there are many. Whether it ended."""
    made: list[int] = []
    while not matcher.finished and len(made) < most:
        token = draw.draw(st.sampled_from(allowed(matcher)))
        if token in END:
            return made, True
        made.append(token)
        matcher.accept(token)
    return made, matcher.finished


@given(
    st.data(),
    st.lists(
        st.text(st.characters(codec="ascii", min_codepoint=32, max_codepoint=126), min_size=1), min_size=1, max_size=5
    ),
)
def test_a_random_walk_ends_in_one_of_the_choices(data: st.DataObject, choices: list[str]) -> None:
    matcher = grammars().matcher(Constraint(Language.CHOICE, json.dumps(choices)), END)
    made, ended = walk(matcher, data, 10_000)
    assert ended and text_of(made) in choices


@given(st.data(), st.sampled_from([r"[a-f]{1,4}(-[0-9]+)?", r"(ab|a|b)*", r"x?", r"[^a]{0,5}z"]))
def test_a_random_walk_matches_the_regular_expression(data: st.DataObject, regex: str) -> None:
    matcher = grammars().matcher(Constraint(Language.REGEX, regex), END)
    made, ended = walk(matcher, data)
    assert not matcher.fault
    assert not ended or re.fullmatch(regex, text_of(made))


@given(st.data())
def test_a_matcher_of_accepted_tokens_is_where_the_first_one_was(data: st.DataObject) -> None:
    constraint = (
        Constraint(Language.JSON_OBJECT, after=(5, 6)) if data.draw(st.booleans()) else Constraint(Language.JSON_OBJECT)
    )
    matcher = grammars().matcher(constraint, END)
    made: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        again = grammars().matcher(constraint, END, made)
        assert again.mask().tolist() == matcher.mask().tolist() and again.finished == matcher.finished
        if matcher.finished:
            break
        choices = [token for token in allowed(matcher) if 0 < token < VOCAB]
        made.append(data.draw(st.sampled_from([*choices, *(token for token in (5, 6) if token in choices)])))
        matcher.accept(made[-1])


def test_an_end_is_allowed_exactly_where_the_grammar_may_stop() -> None:
    matcher = grammars().matcher(Constraint(Language.REGEX, "ab?"), {0, 7})
    assert allowed(matcher) == ids_of("a")
    matcher.accept(ids_of("a")[0])
    assert allowed(matcher) == [0, 7, *ids_of("b")]
    matcher.accept(ids_of("b")[0])
    assert matcher.finished and allowed(matcher) == [0, 7]


def test_an_end_of_the_model_that_the_request_does_not_know_is_never_allowed() -> None:
    matcher = grammars().matcher(Constraint(Language.REGEX, "a*"), {7})
    assert allowed(matcher) == [7, *ids_of("a")]


def test_everything_is_allowed_until_the_marker_came_whole() -> None:
    marker = tuple(ids_of("</t>"))
    matcher = grammars().matcher(Constraint(Language.REGEX, "[0-9]", after=marker), END)
    for token in ids_of("hm </t </t>"):
        assert len(allowed(matcher)) == 128 and not matcher.finished and matcher.forced() == []
        matcher.accept(token)
    assert allowed(matcher) == ids_of("0123456789")
    matcher.accept(ids_of("4")[0])
    assert matcher.finished


def test_a_marker_counts_in_whatever_tokens_it_comes() -> None:
    vocabulary = grammars_of(tokenizer(), len(tokenizer()), END)
    marker = tuple(tokenizer().encode("</hello", add_special_tokens=False))
    matcher = vocabulary.matcher(Constraint(Language.REGEX, "x", after=marker), END)
    spelled = [tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "a</hello"]
    assert spelled[1:] != list(marker)
    for token in spelled:
        assert matcher.forced() == []
        matcher.accept(token)
    assert matcher.forced() == tokenizer().encode("x", add_special_tokens=False)


def test_a_special_token_may_be_the_marker() -> None:
    vocabulary = grammars_of(tokenizer(), len(tokenizer()), END)
    matcher = vocabulary.matcher(Constraint(Language.REGEX, "x", after=(2,)), END)
    matcher.accept(3)
    assert matcher.forced() == []
    matcher.accept(2)
    assert matcher.forced() == tokenizer().encode("x", add_special_tokens=False)


def test_forced_tokens_spell_what_must_come_next() -> None:
    matcher = grammars().matcher(Constraint(Language.REGEX, "key: [ab]"), END)
    assert text_of(matcher.forced()) == "key: "
    for token in matcher.forced():
        matcher.accept(token)
    assert matcher.forced() == [] and allowed(matcher) == ids_of("ab")


def test_a_forbidden_token_is_a_fault_that_stays() -> None:
    matcher = grammars().matcher(Constraint(Language.REGEX, "a+"), END)
    matcher.accept(ids_of("b")[0])
    assert "grammar" in matcher.fault and "\n" not in matcher.fault and not matcher.finished
    matcher.accept(ids_of("a")[0])
    assert matcher.fault and len(allowed(matcher)) == 128


def test_a_dead_end_is_a_fault_and_not_the_end_of_a_reply() -> None:
    matcher = grammars().matcher(Constraint(Language.LARK, 'start: "a" X\nX: /[a-c]/ & /[d-f]/'), END)
    matcher.accept(ids_of("a")[0])
    matcher.mask()
    assert "no token may follow" in matcher.fault and not matcher.finished
