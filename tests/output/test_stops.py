"""A stream is cut at the first complete stop string, and nothing is held that could be shown."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.errors import BadRequest
from treadle.output.stops import StopMatcher

few_letters = st.text("ab\n", max_size=40)
stop_lists = st.lists(st.text("ab\n", min_size=1, max_size=5), max_size=4)


def first_cut(text: str, stops: Sequence[str]) -> tuple[str, str | None]:
    """The rule itself: the first end wins, then the longest."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def held(text: str, stops: Sequence[str]) -> int:
    """The longest suffix of `text` that is a proper prefix of a stop string."""
    return max((n for s in stops for n in range(1, len(s)) if text.endswith(s[:n])), default=0)


@given(few_letters, stop_lists, st.lists(st.integers(0, 40), max_size=6))
def test_any_chunks_give_the_text_before_the_first_complete_stop_string(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    emitted = "".join([matcher.push(text[a:b])[0] for a, b in pairwise(bounds)]) + matcher.finish()
    assert (emitted, matcher.matched) == first_cut(text, stops)


@given(few_letters, stop_lists)
def test_exactly_what_may_still_match_is_held_back(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    emitted = ""
    for index, char in enumerate(text):
        part, matched = matcher.push(char)
        emitted += part
        if matched:
            return
        seen = text[: index + 1]
        assert emitted == seen[: len(seen) - held(seen, stops)]


@given(st.text("ab", min_size=1, max_size=30), st.text("ab", min_size=1, max_size=4))
def test_one_stop_string_cuts_like_split(text: str, stop: str) -> None:
    matcher = StopMatcher([stop])
    assert matcher.push(text)[0] + matcher.finish() == text.split(stop)[0]


def test_the_longest_of_those_ending_together_wins() -> None:
    assert StopMatcher(["c", "bc", "abcd"]).push("xabcd") == ("xa", "bc")


def test_after_a_match_nothing_more_is_emitted() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.push("aEN") == ("a", None)
    assert matcher.push("D and more") == ("", "END")
    assert matcher.push("later") == ("", "END")
    assert matcher.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(BadRequest, match="empty") as caught:
        StopMatcher(["a", ""])
    assert caught.value.param == "stop"


def test_matchers_of_the_same_strings_share_what_they_know_and_not_where_they_are() -> None:
    first, second = StopMatcher(["END"]), StopMatcher(["END"])
    assert first._automaton is second._automaton
    assert first.push("aEN") == ("a", None)
    assert second.push("D") == ("D", None)
    assert first.push("D") == ("", "END")
