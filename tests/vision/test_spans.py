"""Where pictures lie: keys of the prefix cache, borders of chunks, and positions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.vision.seeing import IMAGE, picture, shown
from treadle.types import Span
from treadle.vision.positions import mrope, places
from treadle.vision.spans import OUTSIDE, chunk_of, find_spans, has_picture, key_ids, outside

CAT, DOG = picture("cat", 2, 3), picture("dog", 3, 1)
words = st.lists(st.integers(0, IMAGE - 2), min_size=1, max_size=5)


@st.composite
def parts(draw: st.DrawFn) -> list[Any]:
    made: list[Any] = draw(words)
    for _ in range(draw(st.integers(0, 3))):
        made += [draw(st.sampled_from([CAT, DOG])), *draw(words)]
    return made


@given(parts(), st.booleans())
def test_spans_are_where_the_pictures_were_put(content: list[Any], pauses: bool) -> None:
    prompt, spans = shown(content, pauses=pauses)
    assert [span.picture for span in spans] == [part for part in content if not isinstance(part, int)]
    for span in spans:
        assert prompt[span.start] == prompt[span.end - 1] == IMAGE
        assert (prompt[span.start : span.end] == IMAGE).sum() == span.picture.num_rows


def test_more_or_fewer_image_tokens_than_embeddings_are_refused() -> None:
    prompt, _ = shown([1, CAT, 2])
    for pictures in ([], [DOG], [CAT, CAT]):
        with pytest.raises(ValueError, match="6 tokens stand for images"):
            find_spans(prompt, IMAGE, pictures)


@given(parts())
def test_keys_are_the_ids_of_text_and_beyond_any_vocabulary_in_pictures(content: list[Any]) -> None:
    prompt, spans = shown(content)
    keys = key_ids(prompt, spans)
    assert keys.dtype == np.int64 and len(keys) == len(prompt)
    seen = prompt == IMAGE
    assert (keys[~seen] == prompt[~seen]).all()
    assert (keys[seen] >= OUTSIDE).all()
    assert has_picture(keys) == bool(spans)


def test_a_prompt_of_text_is_its_own_key() -> None:
    prompt, spans = shown([1, 2, 3])
    assert key_ids(prompt, spans) is prompt


def test_two_pictures_differ_from_their_first_key_on_and_equal_ones_wherever_they_lie_do_not() -> None:
    cat, dog = (key_ids(*shown([1, p, 2]))[1:7] for p in (CAT, picture("dog", 2, 3)))
    assert cat[0] != dog[0]
    assert len(set(cat.tolist())) == 6
    assert (key_ids(*shown([5, 5, 5, CAT, 2]))[3:9] == cat).all()


@given(parts(), st.integers(1, 12), st.booleans())
def test_chunks_cover_a_prompt_and_never_cut_a_whole_picture(content: list[Any], size: int, whole: bool) -> None:
    prompt, spans = shown(content, whole)
    start, borders = 0, []
    while start < len(prompt):
        n = chunk_of(spans, start, min(size, len(prompt) - start))
        assert n > 0
        start += n
        borders.append(start)
    assert start == len(prompt)
    if whole:
        assert not [b for b in borders for span in spans if span.start < b < span.end]
    else:
        assert borders == [*range(size, len(prompt), size), len(prompt)]


@given(parts(), st.integers(0, 30), st.booleans())
def test_a_cut_in_a_whole_picture_moves_in_front_of_it(content: list[Any], at: int, whole: bool) -> None:
    _, spans = shown(content, whole)
    moved = outside(spans, at)
    inside = [span for span in spans if span.start < at < span.end]
    assert moved == (inside[0].start if whole and inside else at)


def test_positions_of_a_picture_are_a_grid_and_text_goes_on_behind_its_larger_side() -> None:
    prompt, spans = shown([1, 2, CAT, 3, DOG, 4])
    positions, shift = mrope(len(prompt), spans)
    assert positions.T.tolist() == [
        [0, 0, 0], [1, 1, 1],
        [2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4],
        [5, 5, 5],
        [6, 6, 6], [6, 7, 6], [6, 8, 6],
        [9, 9, 9],
    ]  # fmt: skip
    assert shift == 10 - len(prompt)


@given(parts(), st.integers(1, 7), st.integers(0, 9))
def test_positions_in_chunks_and_behind_the_prompt_are_those_of_the_whole(
    content: list[Any], size: int, later: int
) -> None:
    prompt, spans = shown(content)
    positions, shift = mrope(len(prompt), spans)
    total = len(prompt) + later
    cut = np.concatenate(
        [places(positions, shift, start, min(size, total - start)) for start in range(0, total, size)], axis=1
    )
    assert (cut[:, : len(prompt)] == positions).all()
    assert (cut[:, len(prompt) :] == np.arange(len(prompt), total) + shift).all()
    assert later == 0 or cut[0, len(prompt)] == positions.max() + 1


def test_text_alone_stands_where_it_stands() -> None:
    positions, shift = mrope(4, ())
    assert positions.tolist() == [[0, 1, 2, 3]] * 3 and shift == 0


def test_a_span_is_compared_by_identity_so_that_requests_are_cheap_to_compare() -> None:
    assert Span(0, 1, CAT) != Span(0, 1, CAT)
