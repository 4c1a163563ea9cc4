"""Random models: drawn, not quantised; finite; and the plain one has the same weights."""

from __future__ import annotations

from collections.abc import Iterator

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from treadle.bench import shapes
from treadle.bench.shapes import forget, plain_of, random_weights, subject_of


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    yield
    forget()


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_random_weights_are_spread_as_dense_ones_are(bits: int) -> None:
    weights = dict(random_weights("tiny", bits))
    name = "model.layers.0.mlp.gate_proj"
    packed = [weights[f"{name}.{part}"] for part in ("weight", "scales", "biases")]
    dense = np.array(mx.dequantize(*packed, 64, bits).astype(mx.float32))
    assert dense.std() == pytest.approx(shapes.SPREAD, rel=0.2) and abs(dense.mean()) < shapes.SPREAD / 4
    codes = np.array(packed[0]).ravel()
    assert all(len(np.unique(codes >> shift & 15)) == 16 for shift in range(0, 32, 4))


@pytest.mark.parametrize("name", ["random:tiny", "random:tiny:4"])
def test_both_models_of_a_name_have_the_same_weights_and_finite_logits(name: str) -> None:
    subject, plain = subject_of(name), plain_of(name)
    assert subject_of(name) is subject and plain_of(name) is plain and subject.model is not plain
    ids = mx.array([[5, 6, 7]])
    ours, theirs = (np.array(model(ids).astype(mx.float32)) for model in (subject.model, plain))
    assert np.isfinite(ours).all() and ours.std() > 0
    np.testing.assert_allclose(ours, theirs, atol=0.05 * theirs.std())


def test_a_name_is_made_anew_after_it_was_forgotten() -> None:
    before = subject_of("random:instant")
    forget()
    assert subject_of("random:instant") is not before


def test_the_bytes_of_a_packed_model_are_those_of_its_arrays() -> None:
    subject = subject_of("random:tiny:4")
    assert subject.weight_bytes == sum(
        array.nbytes for _, array in tree_flatten(plain_of("random:tiny:4").parameters())
    )
