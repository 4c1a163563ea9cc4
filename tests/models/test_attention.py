"""Attention of few queries: what the kernel is told to see is what the mask says. The kernel itself needs CUDA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.models.cuda_host import COMPILER, compiled
from tests.tiny import CONFIGS, VOCAB, built
from treadle.cache import recent_columns
from treadle.cache.columns import SoloColumns
from treadle.cache.quantise import Packed, Scheme
from treadle.cache.rows import Rows
from treadle.models import attention, few_queries, few_queries_source
from treadle.models.capabilities import describe, forward, new_layers
from treadle.runtime import mlx_lm_module
from treadle.types import Batching, KvFormat


def reference(queries: Any, keys: Any, values: Any, seen: tuple[Any, Any, Any], scale: float, reach: int) -> Any:
    """What the kernel computes, by its own inputs and no mask."""
    table, position, limits = seen
    assert int(limits[0]) == reach <= keys.shape[2]
    rows, n, window = queries.shape[0], queries.shape[2], int(limits[1])
    here = (position[:, None] + mx.arange(n))[:, None, :, None]
    held = table[:rows, None, None, :reach]
    visible = held <= here
    if window:
        visible = visible & (held > here - window)
    return mx.fast.scaled_dot_product_attention(
        queries, keys[:rows, :, :reach], values[:rows, :, :reach], scale=scale, mask=visible
    )


def test_a_device_that_cannot_launch_the_kernel_keeps_mlx_own_attention(caplog: pytest.LogCaptureFixture) -> None:
    few_queries._sound.cache_clear()  # here there is no CUDA at all
    queries, rows = mx.zeros((1, 4, 2, 32), mx.bfloat16), mx.zeros((1, 2, 8, 32), mx.bfloat16)
    assert not few_queries.suits(queries, rows, rows)
    assert "MLX's own is" in caplog.text
    few_queries._sound.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, queries) of each call of the kernel's stand-in; head sizes of tiny models are allowed."""
    made: list[tuple[int, int]] = []

    def counted(queries: Any, *rest: Any) -> Any:
        made.append((queries.shape[0], queries.shape[2]))
        return reference(queries, *rest)

    monkeypatch.setattr(attention, "few_queries", counted)
    monkeypatch.setattr(few_queries, "DIM_STEP", 8)
    monkeypatch.setattr(few_queries, "TYPES", (mx.float32,))
    monkeypatch.setattr(few_queries, "_sound", lambda *_: True)
    return made


def packed_reference(
    queries: Any, exact: Any, packed: Any, seen: tuple[Any, Any, Any], scale: float, reach: int
) -> Any:
    """What the kernel over packed rows computes, by its own inputs and no mask."""
    table, position, limits = seen
    read_to, recent, base, end = limits.tolist()
    rows, n = queries.shape[0], queries.shape[2]
    assert end == reach <= min(piece.num_tokens for piece in packed)
    here = (position[:, None] + mx.arange(n))[:, None, :, None]
    edge = mx.maximum(here + 1 - recent, 0) // recent_columns.BLOCK * recent_columns.BLOCK
    late = table[:rows, None, None, :read_to].astype(mx.int64) + base
    old = mx.broadcast_to(mx.arange(end) < edge, (rows, 1, n, end))
    visible = mx.concatenate([old, (late <= here) & (late >= edge)], axis=-1)
    both = zip(packed, exact, strict=True)
    keys, values = (mx.concatenate([p.unpack()[:rows, :, :end], e[:rows, :, :read_to]], axis=2) for p, e in both)
    return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=visible)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Builds a tiny model whose attention is ours, and takes that back at the end: the files are shared."""
    undo: list[tuple[dict[str, Any], Any]] = []

    def build(name: str) -> Any:
        import sys

        model = built(CONFIGS[name])[0]
        files = [vars(sys.modules[m]) for m in {type(x).__module__ for x in model.modules()}]
        for file in files:
            if attention.NAME in file:  # other tests of the process may have put something before it
                undo.append((file, file[attention.NAME]))
                file[attention.NAME] = getattr(mlx_lm_module("models.base"), attention.NAME)
        assert attention.install(model) > 0
        return model

    yield build
    for file, function in undo:
        file[attention.NAME] = function


@pytest.mark.parametrize("name", ["attention", "window", "moe"])
def test_the_self_check_finds_rows_of_different_length_right(name: str, calls: list[Any], installed: Any) -> None:
    model = installed(name)
    assert describe(model, VOCAB, 512).batching is Batching.RAGGED
    assert any(rows > 1 and n > 1 for rows, n in calls) and any(rows == 1 for rows, n in calls)


@pytest.mark.parametrize("name", ["attention", "window"])
def test_a_few_queries_and_a_short_chunk_see_what_single_steps_see(name: str, calls: list[Any], installed: Any) -> None:
    plain, caps = built(CONFIGS[name])
    model = installed(name)
    model.update(plain.parameters())
    ids = np.random.default_rng(0).integers(0, VOCAB, 90).tolist()
    whole = np.array(plain(mx.array([ids])))[0]
    layers = new_layers(model, caps)
    for start, end in ((0, 30), (30, 33), (33, 49), (49, 89), (89, 90)):
        got = np.array(forward(model, [ids[start:end]], layers))[0]
        np.testing.assert_allclose(got, whole[start:end], atol=2e-4)
    assert {n for _, n in calls} >= {3}, "few queries went to the kernel"


@pytest.mark.parametrize("rows", [1, 3])
def test_packed_rows_are_read_as_if_they_were_unpacked(
    rows: int, installed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recent_columns, "BLOCK", 8)
    made = []

    def counted(queries: Any, *rest: Any) -> Any:
        made.append(queries.shape[:3:2])
        return packed_reference(queries, *rest)

    plain, caps = built(CONFIGS["wide heads"])
    rng = np.random.default_rng(rows)
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in (50, 23, 61)[:rows]]
    steps = [rng.integers(0, VOCAB, (rows, n)).tolist() for n in (1, 1, 5, 1, 12, 1)]

    def logits(model: Any) -> list[Any]:
        layers = [new_layers(model, caps, KvFormat(8, 8, recent=3)) for _ in prompts]
        found = [np.array(forward(model, [p], one)) for p, one in zip(prompts, layers, strict=True)]
        for other in layers[1:]:
            layers[0].join(other)
        for ids in steps:
            found.append(np.array(forward(model, ids, layers[0])))
            if len(ids[0]) == 5:
                layers[0].rewind(0, 4)
        return found

    expected = logits(plain)
    model = installed("wide heads")
    model.update(plain.parameters())
    monkeypatch.setattr(attention, "few_queries_packed", counted)
    monkeypatch.setattr(attention, "few_queries", reference)
    monkeypatch.setattr(few_queries, "TYPES", (mx.float32,))
    monkeypatch.setattr(few_queries, "_sound", lambda *_: True)
    for a, b in zip(logits(model), expected, strict=True):
        distance = np.abs(a - b)  # sums in another order move a code by one now and then
        assert (distance < 2e-3).mean() > 0.95 and distance.max() < 2e-2
    layers = len(caps.layers)
    assert made.count((rows, 1)) == 4 * layers and made.count((rows, 5)) == made.count((rows, 12)) == layers


@pytest.mark.parametrize("start", [0, 7, 256, 300])
def test_long_chunks_are_computed_over_a_grid_of_sizes(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "LEAST_GRAIN", 32)
    columns = SoloColumns(None)
    rows = Rows(columns)
    rows.reserve = 800
    met = []
    plain = mx.fast.scaled_dot_product_attention

    def noted(queries: Any, keys: Any, values: Any, **rest: Any) -> Any:
        met.append((queries.shape[2], keys.shape[2]))
        return plain(queries, keys, values, **rest)

    mx.random.seed(start)
    for n in (start, 100):
        columns.begin([n])
        keys, values = rows.update_and_fetch(*(mx.random.normal((1, 2, n, 32)) for _ in "kv"))
        columns.count = n
        queries = mx.random.normal((1, 4, n, 32))
        if n == 100:
            monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", noted)
            found = attention.on_grid(queries, rows, 0.1)
            np.testing.assert_allclose(found, plain(queries, keys, values, scale=0.1, mask="causal"), atol=1e-5)
        columns.end()
    assert met and all(a % 32 == 0 and b % 32 == 0 and b >= start + 100 for a, b in met)


def test_the_grid_grows_with_the_columns() -> None:
    assert [attention.grain_of(n) for n in (1, 8192, 16383, 16384, 65536)] == [256, 256, 256, 512, 2048]


def test_what_has_sinks_is_left_to_mlx(calls: list[Any], installed: Any) -> None:
    model = installed("sinks")
    layers = new_layers(model, built(CONFIGS["sinks"])[1])
    forward(model, [[1, 2, 3, 4]], layers)
    assert not calls


@pytest.mark.parametrize(
    ("blocks", "reach", "expected"),
    [
        (128, 255, 1),
        (64, 200, 1),
        (64, 511, 1),
        (64, 512, 2),
        (64, 8192, 8),
        (8, 32768, 32),
        (8, 4032, 8),
        (600, 32768, 1),
        (8, 100, 1),
    ],
)
def test_columns_are_split_only_where_few_blocks_face_many(blocks: int, reach: int, expected: int) -> None:
    assert few_queries.parts(blocks, reach) == expected


@pytest.fixture
def on_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The kernels' sources as C++."""

    def kernel(name: str, inputs: Any, outputs: Any, source: str, header: str = "") -> Any:
        return compiled(inputs, outputs, source, tmp_path)

    monkeypatch.setattr(few_queries, "Kernel", kernel)
    for made in (few_queries._kernel, few_queries._merge):
        made.cache_clear()
    yield few_queries._launch
    for made in (few_queries._kernel, few_queries._merge):
        made.cache_clear()


def drawn(shape: tuple[int, ...], dtype: Any, seed: int) -> Any:
    return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "n", "split", "window"),
    [
        (mx.bfloat16, (8, 2), 128, 1, 1, 0),  # half a tile
        (mx.float16, (8, 2), 128, 3, 2, 0),  # most of a whole one
        (mx.float16, (3, 3), 32, 1, 2, 20),
        (mx.float16, (12, 1), 96, 3, 1, 0),  # more than two
        (mx.float16, (4, 2), 80, 5, 1, 11),
        (mx.float16, (2, 1), 80, 1, 3, 0),
        (mx.bfloat16, (4, 1), 256, 4, 1, 9),  # halves, as sums of more would not fit
    ],
)
def test_the_source_over_exact_rows_computes_what_it_is_told(
    dtype: Any, heads: tuple[int, int], dim: int, n: int, split: int, window: int, on_host: Any
) -> None:
    rows, capacity, reach = 2, 80, 69
    queries = drawn((rows, heads[0], n, dim), dtype, 0)
    keys, values = (drawn((3, heads[1], capacity, dim), dtype, seed) for seed in (1, 2))
    line = mx.where(mx.arange(capacity) < 66, mx.arange(capacity), 2**30)
    table = mx.stack([line, mx.where(line % 7 == 0, 2**30, line)]).astype(mx.int32)
    hidden = (table[:, None, :, None] == 2**30) & mx.ones((rows, heads[1], 1, dim), mx.bool_)
    nan = mx.array(float("nan"), dtype)
    held = [mx.concatenate([mx.where(hidden, nan, a[:rows]), a[rows:]]) for a in (keys, values)]
    seen = table, mx.array([64 - n, 40], mx.int32), mx.array([reach, window], mx.int32)
    found = on_host(queries, *held, *seen, scale=dim**-0.5, split=split, packed=None)
    wanted = reference(queries, *(mx.nan_to_num(a) for a in (keys, values)), seen, dim**-0.5, reach)
    np.testing.assert_allclose(
        *(np.array(a.astype(mx.float32)) for a in (found, wanted)), atol=2e-3 if dtype == mx.float16 else 2e-2
    )


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "group", "n", "split"),
    [
        (mx.float16, (4, 2), 64, 32, 2, 2),
        (mx.bfloat16, (4, 1), 128, 64, 3, 4),
        (mx.float16, (2, 2), 256, 128, 2, 3),
        (mx.bfloat16, (3, 3), 96, 32, 1, 2),
    ],
)
def test_the_source_over_packed_rows_computes_what_it_is_told(
    dtype: Any, heads: tuple[int, int], dim: int, group: int, n: int, split: int, on_host: Any
) -> None:
    rows, scheme = 2, Scheme(8, group, rotate=False)
    queries = drawn((rows, heads[0], n, dim), dtype, 0)
    exact = [drawn((3, heads[1], 90, dim), dtype, seed) for seed in (1, 2)]
    old = [drawn((3, heads[1], 150, dim), dtype, seed) for seed in (3, 4)]
    codes = [mx.quantize(a.astype(mx.bfloat16), group_size=group, bits=8) for a in old]
    packed = [Packed(*code, scheme, dtype) for code in codes]
    table = mx.stack([mx.arange(64, 154), mx.arange(90)]).astype(mx.int32)
    seen = table, mx.array([140, 70], mx.int32), mx.array([82, 5, 0, 128], mx.int32)
    found = on_host(queries, *exact, *seen, *codes[0], *codes[1], scale=dim**-0.5, split=split, packed=(64, group))
    wanted = packed_reference(queries, exact, packed, seen, dim**-0.5, 128)
    np.testing.assert_allclose(
        *(np.array(a.astype(mx.float32)) for a in (found, wanted)), atol=2e-3 if dtype == mx.float16 else 2e-2
    )


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("num_parts", "dim"), [(2, 32), (33, 64), (32, 128), (32, 80), (17, 48)])
def test_parts_are_joined_as_if_they_had_been_one(num_parts: int, dim: int, tmp_path: Path) -> None:
    """The kernel's source, compiled as C++; one part has seen nothing."""
    rng = np.random.default_rng(num_parts)
    scores, values = rng.normal(0, 4, (3, num_parts, 5)), rng.normal(size=(3, num_parts, 5, dim))
    tops = scores.max(axis=-1, keepdims=True)
    weights = np.exp(scores - tops)
    sums = np.einsum("hpc,hpcd->hpd", weights, values)
    parts = np.concatenate([sums, tops, weights.sum(axis=-1, keepdims=True)], axis=-1)
    parts[:, -1, :dim], parts[:, -1, dim], parts[:, -1, dim + 1] = 0, -1e30, 0
    whole = np.exp(scores[:, :-1] - scores[:, :-1].max(axis=(1, 2), keepdims=True))
    wanted = np.einsum("hpc,hpcd->hd", whole, values[:, :-1]) / whole.sum(axis=(1, 2))[:, None]
    merge = compiled(["parts"], ["out"], few_queries_source.MERGE, tmp_path)
    (found,) = merge(
        inputs=[mx.array(parts.astype(np.float32)).reshape(1, 3, 1, num_parts, dim + 2)],
        template=[("T", mx.float32), ("D", dim), ("MOST_PARTS", 32)],
        grid=(3 * -(-dim // 32) * 32, 1, 1),
        threadgroup=(-(-dim // 32) * 32, 1, 1),
        output_shapes=[(3, dim)],
        output_dtypes=[mx.float32],
    )
    np.testing.assert_allclose(np.array(found), wanted, atol=1e-5)
