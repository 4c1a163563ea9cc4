"""A stored tensor becomes what an MLX module holds, with its rows in order, or is refused by name."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tests.models.test_gguf_blocks import KINDS, random_rows, reference
from treadle.errors import LoadError
from treadle.models.gguf import Tensor
from treadle.models.gguf_blocks import AFFINE, VALUES
from treadle.models.gguf_types import check_types, convert, to_mlx

ORDER = np.array([3, 1, 0, 4, 2])


def tensor(name: str) -> Tensor:
    return Tensor("blk.0.attn_q.weight", (5, 768), KINDS[name], random_rows(name, 2))


@pytest.mark.parametrize("name", [*AFFINE, "MXFP4"])
def test_exact_types_stay_packed_and_exact(name: str) -> None:
    weight = convert(tensor(name), ORDER)
    assert weight.quantization is not None
    parts = to_mlx(weight, mx.float32)
    values = mx.dequantize(parts["weight"], parts["scales"], parts.get("biases"), **weight.quantization).astype(
        mx.float32
    )
    np.testing.assert_array_equal(np.array(values), reference(name, random_rows(name, 2))[ORDER])


@pytest.mark.parametrize("name", VALUES)
def test_other_types_are_requantised_to_eight_bits(name: str) -> None:
    weight = convert(tensor(name), ORDER)
    assert weight.quantization == {"group_size": 32, "bits": 8, "mode": "affine"}
    parts = to_mlx(weight, mx.float32)
    values = np.array(mx.dequantize(parts["weight"], parts["scales"], parts["biases"], 32, 8))
    expected = reference(name, random_rows(name, 2))[ORDER]
    step = np.ptp(expected.reshape(5, -1, 32), axis=-1, keepdims=True) / 255
    assert (np.abs(values - expected).reshape(5, -1, 32) <= 0.51 * step + 1e-5).all()


@pytest.mark.parametrize("name", [*AFFINE, *VALUES, "MXFP4"])
def test_dense_means_the_very_values(name: str) -> None:
    weight = convert(tensor(name), ORDER, dense=True)
    assert weight.quantization is None
    np.testing.assert_array_equal(weight.parts["weight"], reference(name, random_rows(name, 2))[ORDER])


def test_a_vector_is_reordered_by_element() -> None:
    values = np.arange(5, dtype=np.float32)
    bias = Tensor("blk.0.attn_q.bias", (5,), KINDS["F32"], values.view(np.uint8).reshape(1, -1))
    np.testing.assert_array_equal(convert(bias, ORDER).parts["weight"], values[ORDER])


def test_floats_take_the_asked_type_and_codes_stay_integers() -> None:
    parts = to_mlx(convert(tensor("Q4_K")), mx.float16)
    assert (parts["weight"].dtype, parts["scales"].dtype) == (mx.uint32, mx.float16)


def test_a_type_that_is_not_supported_is_refused_with_its_tensor() -> None:
    raw = np.zeros((5, KINDS["IQ2_XS"].size * 3), np.uint8)
    with pytest.raises(LoadError, match=r"blk\.0\.ffn_up\.weight has type IQ2_XS"):
        check_types({"x": Tensor("blk.0.ffn_up.weight", (5, 768), KINDS["IQ2_XS"], raw)})
