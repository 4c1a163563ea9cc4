"""Packed rows of real models: what comes out is what the specification says, cut and batched in any way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.tiny import VOCAB, tiny
from treadle.cache import attend, recent_columns
from treadle.cache.attend import MOST_SHARED, head_by_head, over_packed
from treadle.cache.layers import Layers
from treadle.cache.packed_rows import PackedRows
from treadle.cache.pieces import piece_of, rows_of
from treadle.cache.quantise import Scheme, scheme_for
from treadle.models.capabilities import forward, new_layers
from treadle.models.packed_attention import install
from treadle.native import build
from treadle.types import KvFormat

NAME = "wide heads"
FORMATS = [KvFormat(8, 8), KvFormat(4, 4), KvFormat(8, 4), KvFormat(16, 4), KvFormat(8, 16), KvFormat(8, 4, 32)]


def assert_same(found: np.ndarray, expected: np.ndarray, kv: KvFormat) -> None:
    """Sums in another order move a code by one now and then; to read other rows costs ten times as much."""
    distance = np.abs(found - expected)
    step = 0.02 if 4 in (kv.key_bits, kv.value_bits) else 0.002
    assert (distance < step).mean() > 0.9 and distance.max() < 10 * step


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recent_columns, "BLOCK", 8)
    monkeypatch.setattr(recent_columns, "SPARE", 8)


@dataclass
class Specified:
    """A cache for one forward over a whole prompt: every row in both forms, and a mask that says who sees which."""

    kv: KvFormat
    offset: int = 0

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        edges = np.array([recent_columns.edge(i, self.kv.recent) for i in range(n)])[:, None]
        tokens, queries = np.arange(n)[None], np.arange(n)[:, None]
        return mx.array(np.concatenate([tokens < edges, (tokens >= edges) & (tokens <= queries)], axis=1))

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return self._both(keys, self.kv.key_bits, True), self._both(values, self.kv.value_bits, False)

    def _both(self, rows: Any, bits: int, centred: bool) -> Any:
        scheme = None if bits == 16 else scheme_for(bits, self.kv.group_size, rows.shape[-1])
        packed = rows_of(piece_of(rows, scheme)) if bits != 4 or scheme is None else by_blocks(rows, scheme, centred)
        return mx.concatenate([packed, rows], axis=2)


def by_blocks(rows: Any, scheme: Scheme, centred: bool) -> Any:
    """4-bit rows as they are read: the first block exactly; of keys in others, what differs from the block's mean."""
    found = [rows[:, :, : recent_columns.BLOCK]]
    for start in range(recent_columns.BLOCK, rows.shape[2], recent_columns.BLOCK):
        block = rows[:, :, start : start + recent_columns.BLOCK]
        mean = block.mean(axis=2, keepdims=True).astype(mx.bfloat16).astype(mx.float32) if centred else 0
        found.append(rows_of(piece_of(block - mean, scheme)) + mean)
    return mx.concatenate(found, axis=2)


def specified(kv: KvFormat, ids: list[int]) -> np.ndarray:
    """Logits [n, vocab]."""
    model, caps = tiny(NAME)
    return np.array(model(mx.array([ids]), cache=[Specified(kv) for _ in caps.layers])[0])


def random_ids(n: int, seed: int = 0) -> list[int]:
    return [int(x) for x in np.random.default_rng(seed).integers(0, VOCAB, n)]


def fresh(kv: KvFormat) -> tuple[Any, Layers]:
    model, caps = tiny(NAME)
    install(model)
    return model, new_layers(model, caps, kv)


def read(kv: KvFormat, ids: list[int], chunks: list[int]) -> tuple[np.ndarray, Layers]:
    """Logits [n, vocab] of a prompt computed in chunks, and its layers."""
    model, layers = fresh(kv)
    found, start = [], 0
    for n in chunks:
        found.append(np.array(forward(model, [ids[start : start + n]], layers)[0]))
        start += n
    assert start == len(ids)
    return np.concatenate(found), layers


@pytest.mark.parametrize("kv", FORMATS, ids=str)
@pytest.mark.parametrize(
    "chunks", [[60], [59, 1], [20, 40], [3, *[1] * 57], [37, 5, 9, 1, 1, 7]], ids=lambda c: f"{len(c)} chunks"
)
def test_any_chunks_give_what_is_specified(kv: KvFormat, chunks: list[int]) -> None:
    kv = KvFormat(kv.key_bits, kv.value_bits, kv.group_size, recent=10)
    ids = random_ids(60)
    assert_same(read(kv, ids, chunks)[0], specified(kv, ids), kv)


def test_sixteen_bits_change_nothing() -> None:
    ids = random_ids(40)
    model, caps = tiny(NAME)
    plain = new_layers(model, caps)
    exact = np.array(forward(model, [ids], plain)[0])
    np.testing.assert_array_equal(read(KvFormat(16, 16), ids, [40])[0], exact)
    assert not any(isinstance(r, PackedRows) for r in plain.rows)


def test_a_recent_window_over_everything_changes_nothing() -> None:
    ids = random_ids(40)
    exact, _ = read(KvFormat(16, 16), ids, [30, *[1] * 10])
    np.testing.assert_array_equal(read(KvFormat(4, 4, recent=40), ids, [30, *[1] * 10])[0], exact)
    assert np.abs(read(KvFormat(4, 4, recent=4), ids, [30, *[1] * 10])[0] - exact).max() > 0.1


@pytest.mark.parametrize("kv", FORMATS, ids=str)
def test_rows_of_a_batch_give_what_is_specified(kv: KvFormat) -> None:
    kv = KvFormat(kv.key_bits, kv.value_bits, kv.group_size, recent=10)
    model, layers = fresh(kv)
    texts = [random_ids(70, i) for i in range(3)]
    lengths = [41, 9, 24]
    expected = [specified(kv, ids) for ids in texts]
    for i, n in enumerate(lengths):
        _, solo = read(kv, texts[i][:n], [n])
        layers = solo if i == 0 else layers
        assert i == 0 or layers.join(solo) == i
    for counts in ([1, 1, 1], [1, 5, 2], [7, 1, 12], *[[1, 1, 1]] * 12):
        pieces = [texts[i][n : n + c] for i, (n, c) in enumerate(zip(lengths, counts, strict=True))]
        logits = np.array(forward(model, pieces, layers))
        for i, (n, c) in enumerate(zip(lengths, counts, strict=True)):
            assert_same(logits[i, :c], expected[i][n : n + c], kv)
        lengths = [n + c for n, c in zip(lengths, counts, strict=True)]
        layers.rewind(1, 1)
        lengths[1] -= 1


@pytest.mark.parametrize("kv", FORMATS, ids=str)
def test_to_take_back_and_go_on_is_never_to_have_gone(kv: KvFormat) -> None:
    kv = KvFormat(kv.key_bits, kv.value_bits, kv.group_size, recent=3)
    ids = random_ids(80)
    expected, _ = read(kv, ids[:72], [30, *[3] * 14])
    model, layers = fresh(kv)
    forward(model, [ids[:30]], layers)
    for start in range(30, 72, 3):
        forward(model, [random_ids(8, start)], layers)
        layers.rewind(0, 8)
        found = np.array(forward(model, [ids[start : start + 3]], layers)[0])
        np.testing.assert_array_equal(found, expected[start : start + 3])


def test_what_is_no_longer_held_exactly_cannot_be_taken_back() -> None:
    _, layers = read(KvFormat(8, 8, recent=3), random_ids(60), [30, *[1] * 30])
    with pytest.raises(ValueError, match="exact rows"):
        layers.rewind(0, 40)
    assert layers.lengths == [60]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_attention_over_packed_rows_is_attention_over_unpacked_ones(bits: int, group: int) -> None:
    kv = KvFormat(bits, bits, group, recent=5)
    columns = recent_columns.SoloRecent(kv.recent)
    rows = PackedRows(columns, kv)
    mx.random.seed(3)
    for n in (50, 4):
        columns.begin([n])
        keys, values = rows.update_and_fetch(mx.random.normal((1, 2, n, 128)), mx.random.normal((1, 2, n, 128)))
        queries, mask = mx.random.normal((1, 6, n, 128)), rows.make_mask(n, return_array=n == 50)
        expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.1, mask=mask)
        for way in (over_packed, head_by_head):
            found = way(queries, rows, 0.1, mask)
            np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)
        columns.end()


needs_kernels = pytest.mark.skipif(build.kernels() is None, reason=f"no CPU kernels: {build.why_not()}")


def counting(monkeypatch: pytest.MonkeyPatch, *names: str) -> dict[str, list[int]]:
    """How many queries each of these functions of `attend` was called with, which found something."""
    seen: dict[str, list[int]] = {name: [] for name in names}

    def counted(name: str) -> None:
        original = vars(attend)[name]

        def call(*args: Any) -> Any:
            found = original(*args)
            asked = args[1] if name == "native" else args[0]
            if found is not None:
                seen[name].append(asked.shape[2])
            return found

        monkeypatch.setattr(attend, name, call)

    for name in names:
        counted(name)
    return seen


def test_without_kernels_few_queries_read_packed_rows_and_many_unpack_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "kernels", lambda: None)
    seen = counting(monkeypatch, "over_packed", "head_by_head")
    read(KvFormat(8, 8, recent=3), random_ids(100), [20, 78, 1, 1])
    assert set(seen["over_packed"]) == {20, 1} and set(seen["head_by_head"]) == {78}
    assert 20 * 2 <= MOST_SHARED < 78 * 2


@needs_kernels
@pytest.mark.parametrize("kv", FORMATS, ids=str)
def test_kernels_read_rows_of_8_bits_alone(kv: KvFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = counting(monkeypatch, "native", "over_packed", "head_by_head")
    read(KvFormat(kv.key_bits, kv.value_bits, kv.group_size, recent=3), random_ids(100), [20, 78, 1, 1])
    others = {*seen["over_packed"], *seen["head_by_head"]}
    expected = {20, 78, 1} if (kv.key_bits, kv.value_bits) == (8, 8) else set()
    assert set(seen["native"]) == expected and others == {20, 78, 1} - expected


@needs_kernels
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (1, 4, 2), (9, 16, 1), (40, 33, 17)], ids=str)
def test_kernels_read_what_a_batch_sees(counts: tuple[int, ...], group: int) -> None:
    kernels_agree(KvFormat(8, 8, group, recent=5), counts, 2)


@needs_kernels
def test_kernels_read_this_steps_rows_alone_whatever_the_buffers_hold() -> None:
    """After the first step the rows are handed over uncut, here in more slots than rows and up to full columns."""
    kernels_agree(KvFormat(8, 8, 64, recent=200), (1, 1, 1), 150)


def kernels_agree(kv: KvFormat, counts: tuple[int, ...], steps: int) -> None:
    """In steps of a batch with so many tokens of each row; the first says that nobody needs rows unpacked."""
    columns: Any = recent_columns.BatchRecent(kv.recent)
    rows = PackedRows(columns, kv)
    for i in range(len(counts) + 1):
        own = recent_columns.SoloRecent(kv.recent)
        solo = PackedRows(own, kv)
        n = kv.recent + 45 + 37 * i
        own.begin([n])
        solo.update_and_fetch(*(normal(2 * i + j, 1, n, 128) for j in (0, 1)))
        own.end()
        rows.adopt(*columns.take_over(own), solo)
    rows.drop(0, len(counts))
    columns.drop(0)  # its slot stays
    n, attention = max(counts), attend.attention_over(forbidden)
    for step in range(steps):
        columns.begin(list(counts))
        keys, values = rows.update_and_fetch(*(normal(20 + 2 * step + j, len(counts), n, 128) for j in (0, 1)))
        queries, mask = mx.random.normal((len(counts), 6, n, 128)), rows.make_mask(n)
        expected = over_packed(queries, rows, 0.1, mask)
        found = attention(queries, keys, values, rows, 0.1, mask)
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-4)
        columns.end()
        rows.settle()


def forbidden(*_: Any, **__: Any) -> Any:
    raise AssertionError("MLX's own attention was asked")


def normal(seed: int, rows: int, n: int, dim: int) -> Any:
    return mx.random.normal((rows, 2, n, dim), key=mx.random.key(seed))


def test_a_reservation_is_for_packed_rows_and_not_for_the_exact_ones() -> None:
    model, layers = fresh(KvFormat(8, 8, recent=3))
    layers.reserve(20_000)
    forward(model, [random_ids(100)], layers)
    rows = layers.rows[0]
    assert isinstance(rows, PackedRows) and rows.packed[0].piece.num_tokens >= 20_000
    assert rows.keys.shape[2] < 300
