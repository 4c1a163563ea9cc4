"""A flattened quantised layer gives what the ordinary one gives, for any number of rows."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.tiny import COMMON
from treadle.models import linear
from treadle.models.linear import FlatQuantizedLinear, flatten_rows
from treadle.runtime import mlx_lm_module


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 1), (7, 1), (8, 1), (16, 1), (65, 1), (3, 2), (1, 200)])
def test_any_shape_gives_the_same_product(shape: tuple[int, int], pad: bool) -> None:
    mx.random.seed(0)
    model = nn.Sequential(nn.QuantizedLinear.from_linear(nn.Linear(64, 96), 32, 4))
    x = mx.random.normal((*shape, 64))
    before = np.array(model(x))
    assert flatten_rows(model, pad) == 1
    assert isinstance(model.layers[0], FlatQuantizedLinear)
    np.testing.assert_allclose(np.array(model(x)), before, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
def test_many_rows_meet_unpacked_weights(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """From UNPACK_FROM rows on there, and as long as the unpacked weights stay small enough."""
    unpacked: list[int] = []
    original = linear._unpacked
    monkeypatch.setattr(linear, "_unpacked", lambda layer, x: (unpacked.append(x.shape[1]), original(layer, x))[1])
    model = nn.Sequential(nn.QuantizedLinear.from_linear(nn.Linear(64, 96, bias=bias), 32, 4))
    xs = [mx.random.normal((1, n, 64)) for n in (199, 200, 300)]
    before = [np.array(model(x)) for x in xs]
    flatten_rows(model, pad=True)
    for x, expected in zip(xs, before, strict=True):
        np.testing.assert_allclose(np.array(model(x)), expected, atol=1e-5)
    assert unpacked == [200, 300]
    monkeypatch.setattr(linear, "MOST_UNPACKED", 64 * 96 - 1)
    model(xs[1])
    assert unpacked == [200, 300]


def test_a_whole_model_with_tied_embeddings_stays_the_same() -> None:
    module = mlx_lm_module("models.llama")
    config = {**COMMON, "model_type": "llama", "tie_word_embeddings": True}
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict(config))
    nn.quantize(model, 32, 4)
    ids = mx.array([[3], [4], [5]])
    before = np.array(model(ids))
    assert flatten_rows(model, True) == 4 * 7 + 1
    np.testing.assert_allclose(np.array(model(ids)), before, atol=1e-4)
