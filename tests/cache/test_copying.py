"""A cut piece is right, and lets go of what it was cut from."""

from __future__ import annotations

import gc

import mlx.core as mx
import numpy as np
import pytest

from treadle.cache.copying import cut


@pytest.mark.parametrize("shape", [(1, 1, 4096, 64), (1, 4, 1024, 64), (8, 4, 64, 64)])
@pytest.mark.parametrize("axis", [0, 2])
def test_a_piece_keeps_nothing_else_alive(shape: tuple[int, ...], axis: int) -> None:
    if shape[axis] == 1:
        return
    array = mx.random.normal(shape)
    mx.eval(array)
    expected = np.array(array).take(range(1, 3), axis=axis)
    gc.collect()
    mx.clear_cache()
    whole = array.nbytes
    piece = cut(array, 1, 3, axis)
    mx.eval(piece)
    before = mx.get_active_memory()
    del array
    gc.collect()
    assert before - mx.get_active_memory() >= 0.99 * whole
    np.testing.assert_array_equal(np.array(piece), expected)
