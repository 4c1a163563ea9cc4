"""Attention of few queries: what the kernel is told to see is what the mask says. The kernel itself needs CUDA."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.tiny import CONFIGS, VOCAB, built
from treadle.models import attention
from treadle.models.capabilities import describe, forward, new_layers
from treadle.runtime import mlx_lm_module
from treadle.types import Batching


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


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(rows, queries) of each call of the kernel's stand-in; head sizes of tiny models are allowed."""
    made: list[tuple[int, int]] = []

    def counted(queries: Any, *rest: Any) -> Any:
        made.append((queries.shape[0], queries.shape[2]))
        return reference(queries, *rest)

    monkeypatch.setattr(attention, "few_queries", counted)
    monkeypatch.setattr(attention, "WARP", 8)
    return made


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


def test_what_has_sinks_is_left_to_mlx(calls: list[Any], installed: Any) -> None:
    model = installed("sinks")
    layers = new_layers(model, built(CONFIGS["sinks"])[1])
    forward(model, [[1, 2, 3, 4]], layers)
    assert not calls


@pytest.mark.parametrize(
    ("blocks", "reach", "expected"),
    [(128, 512, 1), (64, 900, 1), (64, 1024, 2), (64, 8192, 4), (8, 32768, 8), (300, 32768, 1), (8, 100, 1)],
)
def test_columns_are_split_only_where_few_blocks_face_many(blocks: int, reach: int, expected: int) -> None:
    assert attention.parts(blocks, reach) == expected
