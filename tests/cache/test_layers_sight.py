"""Layers whose long steps look back a limited way: what they see, and that short steps see all."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle.cache import columns
from treadle.cache.columns import SoloColumns
from treadle.cache.layers import Layers
from treadle.cache.rows import Rows


def written(rows: Rows, n: int) -> tuple[Any, Any]:
    rows.columns.begin([n])
    positions = mx.arange(rows.columns.lengths[0], rows.columns.lengths[0] + n, dtype=mx.float32)
    line = mx.broadcast_to(positions[None, None, :, None], (1, 2, n, 4))
    return rows.update_and_fetch(line, line)


@pytest.mark.parametrize("as_array", [False, True])
def test_long_steps_see_the_beginning_and_what_is_near(as_array: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "SINKS", 3)
    kind = SoloColumns(None)
    rows = Rows(kind)
    layers = Layers([rows], {None: kind})
    layers.look_back(10)
    for n, seen in (
        (20, [*range(20)]),
        (20, [0, 1, 2, *range(10, 40)]),
        (1, [*range(41)]),
        (16, [*range(57)]),
        (17, [0, 1, 2, *range(47, 74)]),
    ):
        keys, _ = written(rows, n)
        assert keys[0, 0, :, 0].tolist() == seen
        mask = rows.make_mask(n, return_array=as_array)
        if as_array:
            assert mask.shape == (n, len(seen))
            expected = np.array(seen)[None] <= np.arange(kind.index, kind.index + n)[:, None]
            np.testing.assert_array_equal(np.array(mask), expected)
        else:
            assert mask == (None if n == 1 else "causal")
        kind.end()


def test_what_is_held_stays_whole() -> None:
    kind = SoloColumns(None)
    rows = Rows(kind)
    layers = Layers([rows], {None: kind})
    layers.look_back(4)
    for n in (100, 200):
        written(rows, n)
        kind.end()
    assert rows.read(0, 0, 300)[0][0, 0, :, 0].tolist() == [*range(300)]
