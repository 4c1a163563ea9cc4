"""4-bit rows by whole blocks: cut and joined anywhere, also where texts branch, they are what one text alone has."""

from __future__ import annotations

import gc
from itertools import pairwise
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cache import recent_columns
from treadle.cache.blocks import Blocks, blocks_of
from treadle.cache.packed_rows import PackedBuffer, PackedRows
from treadle.cache.pieces import arrays_of, cut, joined, num_tokens, rows_of
from treadle.cache.quantise import pack, scheme_for
from treadle.cache.recent_columns import SoloRecent
from treadle.cache.spill import _named, _pieces
from treadle.types import KvFormat

BLOCK = 4
DIM = 64
SCHEME = scheme_for(4, 64, DIM)
assert SCHEME is not None


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_columns, "BLOCK", BLOCK)
    monkeypatch.setattr(recent_columns, "SPARE", 6)


def rows_of_text(n: int, seed: int = 0) -> Any:
    """[1, 2, n, DIM], far from zero in every channel."""
    rng = np.random.default_rng(seed)
    return mx.array((rng.normal(size=(1, 2, n, DIM)) + 5 * rng.normal(size=DIM)).astype(np.float32))


def assert_equal(found: Any, expected: Any) -> None:
    assert (found.start, found.end) == (expected.start, expected.end)
    for a, b in zip(arrays_of(found), arrays_of(expected), strict=True):
        np.testing.assert_array_equal(np.array(a.astype(mx.float32)), np.array(b.astype(mx.float32)))


@given(n=st.integers(1, 30), cuts=st.lists(st.integers(1, 29), max_size=4), centred=st.booleans())
def test_parts_join_to_what_they_were_cut_from(n: int, cuts: list[int], centred: bool) -> None:
    whole = blocks_of(rows_of_text(n), 0, SCHEME, centred)
    bounds = [0, *sorted({c for c in cuts if c < n}), n]
    parts = [cut(whole, a, b) for a, b in pairwise(bounds)]
    assert [num_tokens(part) for part in parts] == [b - a for a, b in pairwise(bounds)]
    assert_equal(joined(parts), whole)
    if len(parts) > 1:
        with pytest.raises(ValueError, match="begins at the end"):
            joined(parts[::-1])


@given(n=st.integers(1, 30), begin=st.integers(0, 5), centred=st.booleans())
def test_blocks_packed_by_and_by_are_those_packed_at_once(n: int, begin: int, centred: bool) -> None:
    rows, begin = rows_of_text(n), min(begin, (n - 1) // BLOCK) * BLOCK
    if begin:
        parts = [blocks_of(rows[:, :, a:b], a, SCHEME, centred) for a, b in ((0, begin), (begin, n))]
        assert_equal(joined(parts), blocks_of(rows, 0, SCHEME, centred))
    if n > 1:
        with pytest.raises(ValueError, match="does not begin a block"):
            blocks_of(rows, 1, SCHEME, centred)


def test_the_first_block_is_exact_and_means_make_the_others_more_exact() -> None:
    rows = rows_of_text(22)
    errors = []
    for centred in (True, False):
        found = rows_of(blocks_of(rows, 0, SCHEME, centred))
        assert found.shape[2] == 20
        np.testing.assert_array_equal(np.array(found[:, :, :BLOCK]), np.array(rows[:, :, :BLOCK]))
        errors.append(float((found - rows[:, :, :20]).square().mean()))
    plain = rows_of(pack(rows, SCHEME))
    assert errors[0] < errors[1] / 4 < float((plain - rows).square().mean()) / 4


@pytest.mark.parametrize("heads", [1, 2])
def test_the_exact_block_does_not_keep_the_rows_alive_that_it_was_cut_from(heads: int) -> None:
    gc.collect()
    before = mx.get_active_memory()
    found = blocks_of(mx.random.normal((1, heads, 20_000, DIM)), 0, SCHEME, True)
    buffer = PackedBuffer(4, 64, True)
    buffer.write(0, 0, found)
    mx.eval(buffer.arrays())
    del found
    gc.collect()
    assert mx.get_active_memory() - before < 1.1 * sum(a.nbytes for a in buffer.arrays())


def test_every_part_keeps_its_place_and_form_on_disk() -> None:
    whole = blocks_of(rows_of_text(22).astype(mx.float16), 0, SCHEME, True)
    for a, b in ((0, 22), (0, 3), (5, 7), (6, 21)):
        keys, values = cut(whole, a, b), cut(blocks_of(rows_of_text(22, 1), 0, SCHEME, False), a, b)
        again = _pieces(_named([keys, values, rows_of_text(2)]))
        assert_equal(again[0], keys)
        assert_equal(again[1], values)
        assert again[0].rest.dtype == mx.float16 and again[1].means is None
        assert again[2].shape == (1, 2, 2, DIM)


def computed(rows: Any, steps: list[int], kv: KvFormat) -> PackedRows:
    """Layers that were given the rows of a text step by step."""
    columns = SoloRecent(kv.recent)
    layer = PackedRows(columns, kv)
    start = 0
    for n in steps:
        columns.begin([n])
        layer.update_and_fetch(rows[:, :, start : start + n], rows[:, :, start : start + n])
        columns.end()
        layer.settle()
        start += n
    return layer


@given(
    same=st.integers(1, 20),
    own=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    at=st.integers(1, 39),
    steps=st.lists(st.integers(1, 9), min_size=40, max_size=40),
    recent=st.integers(1, 7),
)
def test_texts_that_branch_inside_a_block_share_what_both_have(
    same: int, own: tuple[int, int], at: int, steps: list[int], recent: int
) -> None:
    """As the prefix tree has them: one segment is cut at the branch, the other begins there."""
    kv = KvFormat(4, 4, 64, recent=recent)
    texts = [mx.concatenate([rows_of_text(20)[:, :, :same], rows_of_text(n, 1 + i)], axis=2) for i, n in enumerate(own)]
    ends = [same + n for n in own]
    layers = []
    for text, end in zip(texts, ends, strict=True):
        cuts = [0, *(int(c) for c in np.cumsum(steps) if c < end), end]
        layers.append(computed(text, list(np.diff(cuts)), kv))
    first = layers[0].read(0, 0, ends[0])
    whole = layers[1].read(0, 0, ends[1])
    for head, tail, all_of_it in zip(first, layers[1].read(0, same, ends[1]), whole, strict=True):
        assert_equal(joined([cut(head, 0, same), tail]), all_of_it)
    if at < ends[1]:
        parts = zip(layers[1].read(0, 0, at), layers[1].read(0, at, ends[1]), whole, strict=True)
        for head, tail, all_of_it in parts:
            assert_equal(joined([head, tail]), all_of_it)
    keys = whole[0]
    assert isinstance(keys, Blocks) and rows_of(keys).shape[2] == ends[1] // BLOCK * BLOCK
    np.testing.assert_array_equal(np.array(rows_of(keys)), np.array(rows_of(blocks_of(texts[1], 0, SCHEME, True))))
