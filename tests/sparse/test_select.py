"""What is kept of a prompt: its share, what must stay, and the parts that matter most."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treadle.sparse import select as module
from treadle.sparse.select import CHUNK, FIRST, LAST, moved, needed, placed, select, smooth
from treadle.types import Picture, Span


def scores_of(n: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random(n).astype(np.float32)


@given(st.integers(1, 3000), st.integers(0, 2000), st.floats(0.01, 1.0), st.integers(0, 99), st.floats(0, 0.3))
def test_the_share_is_kept_and_all_that_must_be(n: int, start: int, share: float, seed: int, must: float) -> None:
    start = min(start, n - 1)
    kept = scores_of(n, seed + 1) < must
    found = select(scores_of(n, seed), kept, start, share).places
    behind = n - start
    assert (np.diff(found) > 0).all() and found[0] >= start and found[-1] < n
    assert set(np.flatnonzero(kept[start:]) + start) <= set(found.tolist())
    anchored = CHUNK * (1 + behind // module.ANCHOR_EVERY)
    assert len(found) >= min(behind, int(np.ceil(share * behind)))
    assert len(found) <= max(int(kept[start:].sum()) + anchored, share * behind + CHUNK + anchored)
    if share == 1.0:
        assert len(found) == behind


def test_the_parts_with_the_highest_scores_are_taken_whole() -> None:
    scores = np.full(20 * CHUNK, 0.1, np.float32)
    scores[7 * CHUNK : 8 * CHUNK] = 0.9
    scores[13 * CHUNK + 5] = 9.0
    found = select(scores, np.zeros(len(scores), np.bool_), 0, 0.15)
    assert set(found.places.tolist()) == {i for c in (0, 7, 13) for i in range(c * CHUNK, (c + 1) * CHUNK)}
    assert found.lift > 1.5


def test_what_must_stay_may_fill_the_share_without_hiding_what_stands_out() -> None:
    scores = np.full(40 * CHUNK, 0.1, np.float32)
    scores[7 * CHUNK : 9 * CHUNK] = 0.9
    kept = np.zeros(len(scores), np.bool_)
    kept[: 10 * CHUNK] = True
    assert select(scores, kept, 0, 0.2).lift > 1.5


def test_nothing_stands_out_where_all_scores_are_alike() -> None:
    found = select(np.ones(50 * CHUNK, np.float32), np.zeros(50 * CHUNK, np.bool_), 0, 0.3)
    assert found.lift == 1.0


def test_no_part_of_a_long_text_is_missing_altogether() -> None:
    n = 5 * module.ANCHOR_EVERY
    scores = np.zeros(n, np.float32)
    scores[: n // 5] = 1.0
    found = select(scores, np.zeros(n, np.bool_), 0, 0.2).places
    assert np.diff(np.concatenate([found, [n]])).max() <= module.ANCHOR_EVERY


def test_what_is_needed_in_any_case() -> None:
    prompt = np.arange(1000, 6000)
    prompt[700] = 7
    picture = Picture(b"0" * 32, {}, 30)
    kept = needed(prompt, (0, 2000, 4700), (Span(900, 930, picture),), {7}, 0.3)
    assert kept[:FIRST].all() and kept[-LAST:].all()
    assert kept[700] and kept[900:930].all()
    assert kept[2000 : 2000 + module.ROLE].all() and not kept[2000 + module.ROLE]
    assert kept[4700:].all()  # the last message
    assert not kept[1200:1900].any()


def test_a_last_message_that_is_the_whole_text_is_not_kept_whole() -> None:
    kept = needed(np.arange(1000, 6000), (0, 100, 4997), (), (), 0.3)
    assert kept[-LAST:].all() and not kept[200:4000].any()
    assert needed(np.arange(1000, 6000), (0, 4400, 4997), (), (), 0.3)[4400:].all()


def test_a_last_message_is_measured_by_what_is_not_cached() -> None:
    prompt = np.arange(1000, 6000)
    assert needed(prompt, (0, 4400, 4997), (), (), 0.3, 900)[4400:].all()
    assert not needed(prompt, (0, 4400, 4997), (), (), 0.3, 4000)[4404:4700].any()


@given(st.integers(1, 60))
def test_smoothing_keeps_the_mean_level_and_spreads_a_peak(n: int) -> None:
    level = smooth(np.full(n, 2.0, np.float32))
    assert level.shape == (n,) and np.allclose(level, 2.0)
    peak = np.zeros(n, np.float32)
    peak[n // 2] = 1.0
    spread = smooth(peak)
    assert np.count_nonzero(spread) <= module.SMOOTHING and spread.max() <= 1.0 and spread[n // 2] > 0


def test_spans_and_boundaries_move_with_their_tokens() -> None:
    picture = Picture(b"0" * 32, {}, 3)
    places = np.array([0, 1, 10, 11, 12, 40, 41])
    spans, boundaries = moved(places, (Span(10, 13, picture, True),), (0, 9, 10, 41))
    assert [(s.start, s.end, s.whole) for s in spans] == [(2, 5, True)]
    assert boundaries == [0, 2, 6]


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=50, unique=True), st.integers(0, 5))
def test_keys_differ_from_those_of_other_places_and_of_no_gap(places: list[int], more: int) -> None:
    where = np.array(sorted(places), np.int64)
    keys = np.full(len(where) + more, 5, np.int64)
    gap = int(where[-1]) + 1 - len(where)
    found = placed(keys, where, gap)
    behind = np.concatenate([where, np.arange(len(where), len(keys)) + gap]) != np.arange(len(keys))
    assert (found[~behind] == 5).all()
    assert len(set(found[behind].tolist())) == behind.sum()
    assert (found[behind] >= module.BEYOND).all() and (found[behind] < 1 << 62).all()
    assert (placed(keys[: len(where)], where, gap) == found[: len(where)]).all()
