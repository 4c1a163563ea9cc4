"""Cutting is allowed only where it changes nothing; what is remembered is bounded and right."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from tokenizers import AddedToken

from treadle.prompt.memo import MIN_SEGMENT, Conversation, Cutter, Memo, cut_tokens
from treadle.types import Ids


def token(text: str, **flags: bool) -> AddedToken:
    return AddedToken(text, **{"special": True, "normalized": False, **flags})


class Letters:
    """Encodes each character as its code point, and records what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, texts: Sequence[str]) -> list[Ids]:
        self.asked += texts
        return [np.array([ord(c) for c in text], np.int64) for text in texts]


def turn(text: str) -> str:
    return "<|u|>" + text.ljust(MIN_SEGMENT, ".")


def plain(text: str) -> list[int]:
    return [ord(c) for c in text]


def test_tokens_of_the_template_come_first() -> None:
    assert cut_tokens([token("<a>"), token("<b>"), token("<c>")], "x<c>y") == ["<c>", "<a>", "<b>"]


@pytest.mark.parametrize(
    "other",
    [
        token("x<|u"),
        token("a<|u|>b"),
        token("<|u|> ", lstrip=True),
        token("<|u|>", lstrip=True),
        token("w", single_word=True),
    ],
)
def test_a_token_that_another_may_reach_over_is_no_cut(other: AddedToken) -> None:
    cuts = cut_tokens([token("<|u|>"), other], "")
    assert "<|u|>" not in cuts


@pytest.mark.parametrize(
    "bad",
    [token("\n"), token("<|u|>", normalized=True), token("<|u|>", special=False), token("abab"), token("")],
)
def test_white_space_and_ordinary_or_overlapping_tokens_are_no_cuts(bad: AddedToken) -> None:
    assert cut_tokens([bad], "") == []


def test_a_token_beside_harmless_others_is_a_cut() -> None:
    others = [token("<|user|>"), token("\n\n"), token("<mask>", lstrip=True), token("<sep>", rstrip=True)]
    assert set(cut_tokens([token("<|u|>"), *others], "")) == {"<|u|>", "<|user|>", "<sep>"}


def test_cuts_keep_their_distance() -> None:
    text = "<|u|><|u|>" + turn("a") + turn("b")
    assert Cutter(["<|u|>"]).cuts(text, 0) == [10 + MIN_SEGMENT + 5]


def test_only_what_is_new_is_encoded() -> None:
    letters = Letters()
    memo = Memo(letters, ["<|u|>"], 10**6)
    first = turn("one") + turn("two")
    assert memo.encode(first).tolist() == plain(first)
    letters.asked.clear()
    grown = first + turn("three")
    assert memo.encode(grown).tolist() == plain(grown)
    assert letters.asked == [turn("three")]


def test_a_branch_shares_the_part_before_it() -> None:
    letters = Letters()
    memo = Memo(letters, ["<|u|>"], 10**6)
    memo.encode(turn("one") + turn("two") + turn("three"))
    letters.asked.clear()
    branch = turn("one") + turn("other") + turn("three")
    assert memo.encode(branch).tolist() == plain(branch)
    assert letters.asked == [turn("other")]


def test_a_text_that_ends_inside_what_is_known_is_right() -> None:
    memo = Memo(Letters(), ["<|u|>"], 10**6)
    whole = turn("one") + turn("two") + turn("three")
    memo.encode(whole)
    for end in range(0, len(whole), 7):
        assert memo.encode(whole[:end]).tolist() == plain(whole[:end])
        assert memo.encode(whole[:end] + "<|u|>!").tolist() == plain(whole[:end] + "<|u|>!")


def test_a_place_that_was_a_cut_and_is_none_now_is_not_used() -> None:
    letters = Letters()
    memo = Memo(letters, ["<|u|>"], 10**6)
    memo.encode(turn("one") + turn("two"))
    letters.asked.clear()
    memo.encode(turn("one") + "<|no cut")
    assert letters.asked == [turn("one") + "<|no cut"]


def test_the_end_of_a_text_is_a_cut_when_a_turn_follows() -> None:
    known = Conversation("ab", np.array([1, 2], np.int64), [0, 2], [0, 2])
    assert known.shared_cuts("ab<|u|>", Cutter(["<|u|>"])) == 2
    assert known.shared_cuts("abc", Cutter(["<|u|>"])) == 1
    assert known.shared_cuts("a<|u|>", Cutter(["<|u|>"])) == 1


def test_ids_cannot_be_changed_by_who_gets_them() -> None:
    memo = Memo(Letters(), ["<|u|>"], 10**6)
    with pytest.raises(ValueError, match="read-only"):
        memo.encode("abc")[0] = 1


@pytest.mark.parametrize("budget", [0, 2_000, 20_000])
def test_memory_stays_within_the_budget(budget: int) -> None:
    memo = Memo(Letters(), ["<|u|>"], budget)
    for number in range(60):
        text = "".join(turn(f"{number} {part}") for part in range(number % 7))
        assert memo.encode(text).tolist() == plain(text)
        assert memo.nbytes <= budget


def test_a_growing_conversation_is_kept_once() -> None:
    memo = Memo(Letters(), ["<|u|>"], 10**6)
    text = ""
    for number in range(5):
        text += turn(str(number))
        memo.encode(text)
    assert [c.text for c in memo._conversations] == [text]
