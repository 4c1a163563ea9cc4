"""A proposal is what followed the longest, then most recent, earlier occurrence of the last tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from treadle.speculate import lookup
from treadle.speculate.lookup import LONGEST, SHORTEST_SHARED, NgramIndex, Proposal, RecentReplies

tokens = st.lists(st.integers(0, 3), max_size=60)
barred_sets = st.frozensets(st.integers(0, 3), max_size=1)


def ids(values: Sequence[int]) -> np.ndarray:
    return np.array(values, dtype=np.int64)


def naive(sequence: Sequence[int], k: int, barred: frozenset[int] = frozenset()) -> Proposal:
    """The rule, by trying every end and every length."""
    known, drafts, matched = list(sequence), [], 0
    while len(drafts) < k:
        found = [
            (length, end)
            for length in range(2, LONGEST + 1)
            for end in range(length, len(known))
            if known[end - length : end] == known[-length:]
        ]
        if not found:
            break
        length, end = max(found)
        matched = matched or length
        for token in known[end:][: k - len(drafts)]:
            if token in barred:
                return Proposal(tuple(drafts), matched if drafts else 0)
            drafts.append(token)
            known.append(token)
    return Proposal(tuple(drafts), matched if drafts else 0)


@pytest.fixture(autouse=True, params=["as it is", "tiny runs", "all hashes equal"])
def sizes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that long sequences reach are reached by short ones."""
    if request.param != "as it is":
        monkeypatch.setattr(lookup, "_NEAR", 3)
    if request.param == "all hashes equal":
        monkeypatch.setattr(lookup, "_MULTIPLIER", 0)


@given(tokens, tokens, st.integers(0, 20), barred_sets)
def test_a_proposal_equals_the_naive_search(prompt, ahead, k, barred):
    assert NgramIndex(ids(prompt), barred).propose(k, ahead) == naive(prompt + ahead, k, barred)


@settings(max_examples=50)
@given(tokens, st.lists(st.tuples(tokens, st.booleans()), max_size=6), st.integers(1, 12))
def test_an_index_that_grew_equals_one_of_the_whole(prompt, pieces, k):
    index, whole = NgramIndex(ids(prompt)), list(prompt)
    for piece, asked in pieces:
        index.extend(piece)
        whole += piece
        if asked:
            assert index.propose(k) == naive(whole, k)
    assert len(index) == len(whole)
    assert index.propose(k) == naive(whole, k)


@given(tokens, tokens, st.integers(1, 8))
def test_what_is_ahead_is_not_kept(prompt, ahead, k):
    index = NgramIndex(ids(prompt))
    before = index.propose(k)
    index.propose(k, ahead)
    assert index.propose(k) == before


def test_tokens_one_by_one_are_found_when_there_are_many():
    rng = np.random.default_rng(0)
    text = rng.integers(0, 12, 700).tolist()
    index = NgramIndex(ids(text[:300]))
    for i in range(300, 700):
        index.extend(text[i : i + 1])
        if i % 40 == 0:
            assert index.propose(8) == naive(text[: i + 1], 8)


def test_the_longest_match_wins_over_a_more_recent_one():
    text = [1, 2, 3, 7, 9, 2, 3, 8, 9, 1, 2, 3]
    assert NgramIndex(ids(text)).propose(1) == Proposal((7,), 3)


def test_the_most_recent_of_equal_matches_wins():
    text = [1, 2, 7, 5, 1, 2, 8, 6, 1, 2]
    assert NgramIndex(ids(text)).propose(1) == Proposal((8,), 2)


def test_a_cycle_goes_on_beyond_the_end():
    assert NgramIndex(ids([5, 6, 7, 5, 6])).propose(7).tokens == (7, 5, 6, 7, 5, 6, 7)


def test_a_barred_token_ends_the_proposal():
    text = [1, 2, 3, 99, 4, 1, 2]
    assert NgramIndex(ids(text), frozenset({99})).propose(4) == Proposal((3,), 2)
    assert NgramIndex(ids(text), frozenset({3})).propose(4) == Proposal((), 0)


def test_nothing_is_proposed_without_a_repeat():
    assert NgramIndex(ids([])).propose(4) == Proposal()
    assert NgramIndex(ids([1])).propose(4) == Proposal()
    assert NgramIndex(ids(range(50))).propose(4) == Proposal()


def test_the_caller_may_change_its_array_afterwards():
    prompt = ids([1, 2, 3, 1, 2])
    index = NgramIndex(prompt)
    prompt[:] = 0
    assert index.propose(1) == Proposal((3,), 2)


def test_a_shortest_match_out_of_range_is_refused():
    with pytest.raises(ValueError, match=r"1\.\.8"):
        NgramIndex(ids([]), shortest=9)


def test_a_reply_of_another_sequence_is_proposed():
    replies = RecentReplies(100)
    replies.add([1, 2, 3, 4, 5, 6])
    assert replies.propose(8, [9, 9, 9, 9, 1, 2, 3, 4]) == Proposal((5, 6), 4)


def test_the_newest_reply_wins():
    replies = RecentReplies(100)
    replies.add([1, 2, 3, 4, 5])
    replies.add([1, 2, 3, 4, 6])
    assert replies.propose(1, [1, 2, 3, 4]).tokens == (6,)


def test_a_short_match_in_a_reply_does_not_count():
    replies = RecentReplies(100)
    replies.add(range(10))
    assert replies.propose(1, list(range(2, 2 + SHORTEST_SHARED - 1))) == Proposal()
    assert replies.propose(1, list(range(2, 2 + SHORTEST_SHARED))).tokens == (6,)


def test_a_barred_token_ends_a_proposal_from_a_reply():
    replies = RecentReplies(100, frozenset({5}))
    replies.add([1, 2, 3, 4, 0, 5, 6])
    assert replies.propose(3, [1, 2, 3, 4]).tokens == (0,)


@settings(max_examples=50)
@given(st.lists(tokens, max_size=8), st.integers(1, 60), st.integers(1, 8), tokens)
def test_replies_are_bounded_and_never_run_into_each_other(replies, most, k, ahead):
    shared = RecentReplies(most)
    for reply in replies:
        shared.add(reply)
        assert len(shared) <= most
    proposal = shared.propose(k, ahead)
    assert len(proposal.tokens) <= k
    assert all(token >= 0 for token in proposal.tokens)
    if proposal.tokens:
        assert SHORTEST_SHARED <= proposal.matched <= min(LONGEST, len(ahead))
        needle = [*ahead[-proposal.matched :], proposal.tokens[0]]
        texts = [reply[-most:] for reply in replies] + [ahead[-LONGEST:]]
        assert any(text[i : i + len(needle)] == needle for text in texts for i in range(len(text) - len(needle) + 1))


def test_the_oldest_replies_make_room():
    replies = RecentReplies(20)
    replies.add([1, 2, 3, 4, 5])
    for start in (100, 200, 300):
        replies.add(range(start, start + 6))
    assert replies.propose(1, [1, 2, 3, 4]) == Proposal()
    assert replies.propose(1, [300, 301, 302, 303]).tokens == (304,)


def test_of_a_reply_that_is_too_long_the_end_is_kept():
    replies = RecentReplies(6)
    replies.add(range(20))
    assert len(replies) == 6
    assert replies.propose(1, [14, 15, 16, 17]).tokens == (18,)
    assert replies.propose(1, [10, 11, 12, 13]) == Proposal()


def test_a_bound_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_tokens"):
        RecentReplies(0)
