"""A mask allows exactly the tokens after which the grammar can still be met, and an end exactly where it is."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import VOCAB
from tests.fakes_engine import tokenizer
from tests.grammar.letters import grammars, ids_of, text_of
from treadle.grammar.compile import grammars_of
from treadle.grammar.matcher import Matcher
from treadle.types import Constraint, Language, Reasoning

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
        Constraint(Language.JSON_OBJECT, reasoning=Reasoning((5, 6)))
        if data.draw(st.booleans())
        else Constraint(Language.JSON_OBJECT)
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


def test_everything_but_an_end_is_allowed_until_the_marker_came_whole() -> None:
    marker = tuple(ids_of("</t>"))
    matcher = grammars().matcher(Constraint(Language.REGEX, "[0-9]", reasoning=Reasoning(marker)), END)
    for token in ids_of("hm </t </t>"):
        assert allowed(matcher) == list(range(1, 128)) and not matcher.finished and matcher.forced() == []
        matcher.accept(token)
    assert allowed(matcher) == ids_of("0123456789")
    matcher.accept(ids_of("4")[0])
    assert matcher.finished


def test_a_marker_counts_in_whatever_tokens_it_comes() -> None:
    vocabulary = grammars_of(tokenizer(), len(tokenizer()), END)
    marker = tuple(tokenizer().encode("</hello", add_special_tokens=False))
    matcher = vocabulary.matcher(Constraint(Language.REGEX, "x", reasoning=Reasoning(marker)), END)
    spelled = [tokenizer().encode(letter, add_special_tokens=False)[0] for letter in "a</hello"]
    assert spelled[1:] != list(marker)
    for token in spelled:
        assert matcher.forced() == []
        matcher.accept(token)
    assert matcher.forced() == tokenizer().encode("x", add_special_tokens=False)


def test_a_special_token_may_be_the_marker() -> None:
    vocabulary = grammars_of(tokenizer(), len(tokenizer()), END)
    matcher = vocabulary.matcher(Constraint(Language.REGEX, "x", reasoning=Reasoning((2,))), END)
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


CONSTRAINTS = (
    Constraint(Language.JSON_OBJECT),
    Constraint(Language.JSON_OBJECT, reasoning=Reasoning((5, 6))),
    Constraint(Language.JSON_OBJECT, reasoning=Reasoning((5, 6), budget=3)),
    Constraint(Language.JSON_OBJECT, reasoning=Reasoning((5, 6), opener=(6, 5), budget=3)),
    Constraint(Language.REGEX, r"(%&|[%&]{0,3})x?", reasoning=Reasoning((5, 6), opener=(6, 5, 5))),  # 5 is "$", 6 "%"
    Constraint(Language.FREE, reasoning=Reasoning((5, 6), opener=(6,), budget=2)),
    Constraint(Language.FREE, reasoning=Reasoning((5, 6), budget=0)),
    Constraint(Language.REGEX, "(ab|a|b){0,3}c?"),
    Constraint(Language.LARK, 'start: "a" X | "b" "c"\nX: /[a-c]/ & /[d-f]/'),  # after an "a" nothing may follow
)


def drafted(data: st.DataObject, matcher: Matcher, most: int) -> list[int]:
    """Tokens that the masks mostly allow, for a matcher that takes them all."""
    made: list[int] = []
    for _ in range(data.draw(st.integers(0, most))):
        likely = [token for token in (5, 6, *allowed(matcher)) if 0 < token < VOCAB]
        wild = data.draw(st.integers(0, 9)) == 0 or not likely
        made.append(data.draw(st.integers(1, VOCAB - 1) if wild else st.sampled_from(likely)))
        matcher.accept(made[-1])
    return made


def looks(matcher: Matcher) -> tuple[list[int], bool, bool, list[int]]:
    return matcher.mask().tolist(), matcher.finished, bool(matcher.fault), matcher.forced()


@given(st.data(), st.sampled_from(CONSTRAINTS))
def test_the_masks_of_a_draft_are_those_of_its_tokens_one_by_one(data: st.DataObject, constraint: Constraint) -> None:
    matcher = grammars().matcher(constraint, END)
    kept = drafted(data, matcher, 8)
    draft = drafted(data, grammars().matcher(constraint, END, kept), 8)
    draft.insert(data.draw(st.integers(0, len(draft))), 0) if data.draw(st.integers(0, 4)) == 0 else None
    before = looks(matcher)
    rows = matcher.masks(draft)
    assert rows.shape == (len(draft) + 1, 4) and rows.dtype == np.uint32 and looks(matcher) == before
    good = True
    for i, row in enumerate(rows):
        fresh = grammars().matcher(constraint, END, [*kept, *draft[:i]] if good else [])
        assert row.tolist() == (fresh.mask().tolist() if good else [0xFFFFFFFF] * 4)
        good = good and i < len(draft) and draft[i] not in END and draft[i] in allowed(fresh)


def test_a_draft_into_a_dead_end_leaves_the_matcher_where_it_was() -> None:
    matcher = grammars().matcher(CONSTRAINTS[-1], END)
    assert matcher.masks(ids_of("ab")).tolist()[1:] == [[0xFFFFFFFF] * 4] * 2
    assert not matcher.fault and allowed(matcher) == ids_of("ab")
    matcher.accept(ids_of("b")[0])
    assert allowed(matcher) == ids_of("c")


# 5 is "$", 6 is "%"; here "$%" opens reasoning and "%$" closes it.
OPENED = Reasoning(closer=(6, 5), opener=(5, 6), budget=None)


def after(matcher: Matcher, ids: list[int]) -> Matcher:
    for token in ids:
        assert token in allowed(matcher), token
        matcher.accept(token)
    return matcher


def test_a_reply_may_begin_with_reasoning_or_with_the_answer() -> None:
    constraint = Constraint(Language.REGEX, "[0-9]+", reasoning=OPENED)
    fresh = partial(grammars().matcher, constraint, END)
    assert allowed(fresh()) == sorted([5, *ids_of("0123456789")]) and fresh().forced() == []
    assert allowed(after(fresh(), ids_of("7"))) == [0, *ids_of("0123456789")]
    assert allowed(after(fresh(), [5])) == [6]
    assert allowed(after(fresh(), [5, 6])) == list(range(1, 128))
    assert allowed(after(fresh(), [5, 6, *ids_of("7x"), 6, 5])) == ids_of("0123456789")


def test_an_answer_that_begins_like_the_opener_stays_possible() -> None:
    constraint = Constraint(Language.REGEX, r"\$[0-9%]", reasoning=OPENED)
    fresh = partial(grammars().matcher, constraint, END)
    assert allowed(after(fresh(), [5])) == sorted([6, *ids_of("0123456789")])
    assert after(fresh(), [5, *ids_of("3")]).finished
    reasoning = after(fresh(), [5, 6])
    assert len(allowed(reasoning)) == 127  # of the two the opener wins
    assert allowed(after(reasoning, [*ids_of("x"), 6, 5])) == [5]


def test_reasoning_may_end_the_reply_where_the_answer_may_be_empty() -> None:
    for regex, may in (("x?", True), ("x", False)):
        matcher = grammars().matcher(Constraint(Language.REGEX, regex, reasoning=Reasoning((6, 5))), END)
        assert (0 in allowed(matcher)) == may and not matcher.finished


@given(st.integers(0, 5), st.booleans(), st.sampled_from([Language.FREE, Language.JSON_OBJECT]))
def test_a_used_up_budget_forces_the_closer(budget: int, opened: bool, kind: Language) -> None:
    reasoning = replace(OPENED, budget=budget, opener=(5, 6) if opened else ())
    matcher = grammars().matcher(Constraint(kind, reasoning=reasoning), END)
    after(matcher, [5, 6] if opened else [])
    after(matcher, ids_of("x" * budget))
    assert allowed(matcher) == [6] and matcher.forced() == [6, 5] and not matcher.finished
    matcher.accept(6)
    assert allowed(matcher) == [5] and matcher.forced() == [5]
    matcher.accept(5)
    assert allowed(matcher) == (list(range(128)) if kind is Language.FREE else ids_of("{"))


def test_a_closer_that_has_begun_when_the_budget_is_used_up_is_not_begun_again() -> None:
    reasoning = Reasoning((6, 5, 6), budget=2)
    matcher = grammars().matcher(Constraint(Language.FREE, reasoning=reasoning), END)
    assert after(matcher, [*ids_of("x"), 6]).forced() == [5, 6]


def test_reasoning_that_ends_within_its_budget_is_left_alone() -> None:
    reasoning = replace(OPENED, budget=3, opener=())
    matcher = grammars().matcher(Constraint(Language.REGEX, "[0-9]", reasoning=reasoning), END)
    assert allowed(after(matcher, [*ids_of("x"), 6, 5])) == ids_of("0123456789")
    longer = grammars().matcher(Constraint(Language.REGEX, "[0-9]", reasoning=reasoning), END)
    assert len(allowed(after(longer, [*ids_of("x"), 6]))) == 127
    assert allowed(after(longer, ids_of("y"))) == [6]


def test_a_token_of_the_closer_may_hold_the_beginning_of_the_answer() -> None:
    vocabulary = grammars_of(tokenizer(), len(tokenizer()), END)
    closer = tuple(tokenizer().encode("</h", add_special_tokens=False))
    (hell,) = tokenizer().encode("hell", add_special_tokens=False)
    matcher = vocabulary.matcher(Constraint(Language.REGEX, "ell[ao]", reasoning=Reasoning(closer)), END)
    for token in (*closer[:-1], hell):
        matcher.accept(token)
    assert not matcher.fault and tokenizer().decode(allowed(matcher)) in ("ao", "oa")
    matcher = vocabulary.matcher(Constraint(Language.REGEX, "x", reasoning=Reasoning(closer)), END)
    for token in (*closer[:-1], hell):
        matcher.accept(token)
    assert matcher.fault
