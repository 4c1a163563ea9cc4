"""The cache relies on it: `mx.contiguous` of a slice lets go of what it was cut from, also with a single head."""

from __future__ import annotations

import gc

import mlx.core as mx
import pytest


@pytest.mark.parametrize("shape", [(1, 1, 4096, 64), (1, 4, 1024, 64)])
def test_a_piece_keeps_nothing_else_alive(shape: tuple[int, ...]) -> None:
    array = mx.random.normal(shape)
    mx.eval(array)
    gc.collect()
    mx.clear_cache()
    whole = array.nbytes
    piece = mx.contiguous(array[:, :, 1:9])
    mx.eval(piece)
    before = mx.get_active_memory()
    del array
    gc.collect()
    assert before - mx.get_active_memory() >= 0.99 * whole and piece.shape[2] == 8
