"""Every block format decodes to exactly the values of the reference implementation."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from treadle.models.gguf import BLOCK_TYPES
from treadle.models.gguf_blocks import AFFINE, GROUP, PLAIN, VALUES, mxfp4, pack, requantise

KINDS = {kind.name: kind for kind in BLOCK_TYPES.values()}
# Where the half-precision scales of a block start, in bytes: random bytes there would often be no number.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}


def random_rows(name: str, seed: int, rows: int = 5, columns: int = 768) -> NDArray[np.uint8]:
    """Random codes with finite scales, `[rows, bytes per row]`."""
    rng = np.random.default_rng(seed)
    kind = KINDS[name]
    blocks = rng.integers(0, 256, (rows, columns // kind.elements, kind.size), dtype=np.uint8)
    for start in HALVES.get(name, ()):
        scales = rng.standard_normal(blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    if name == "MXFP4":
        blocks[..., 0] = rng.integers(100, 140, blocks.shape[:2])
    return blocks.reshape(rows, -1)


def reference(name: str, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.asarray(quants.dequantize(raw, GGMLQuantizationType[name]))


def test_every_supported_type_is_checked_here() -> None:
    assert set(HALVES) == {*AFFINE, *VALUES}


@pytest.mark.parametrize("name", AFFINE)
@given(seed=st.integers(0, 1000))
def test_affine_types_equal_the_reference(name: str, seed: int) -> None:
    raw = random_rows(name, seed)
    np.testing.assert_array_equal(AFFINE[name](raw).values(), reference(name, raw))


@pytest.mark.parametrize("name", VALUES)
@given(seed=st.integers(0, 1000))
def test_other_types_equal_the_reference(name: str, seed: int) -> None:
    raw = random_rows(name, seed)
    np.testing.assert_array_equal(VALUES[name](raw), reference(name, raw))


@pytest.mark.parametrize("name", AFFINE)
def test_packed_codes_mean_the_same_to_mlx(name: str) -> None:
    raw = random_rows(name, 1)
    affine = AFFINE[name](raw)
    parts = [mx.array(part) for part in (pack(affine.codes, affine.bits), affine.scales, affine.biases)]
    values = mx.dequantize(*parts, group_size=GROUP, bits=affine.bits)
    np.testing.assert_array_equal(np.array(values), reference(name, raw))


def test_mxfp4_means_the_same_to_mlx() -> None:
    raw = random_rows("MXFP4", 1)
    blocks = mxfp4(raw)
    np.testing.assert_array_equal(blocks.values(), reference("MXFP4", raw))
    parts = mx.array(pack(blocks.codes, 4)), mx.array(blocks.exponents)
    values = mx.dequantize(*parts, group_size=GROUP, bits=4, mode="mxfp4").astype(mx.float32)
    np.testing.assert_array_equal(np.array(values), reference("MXFP4", raw))


@pytest.mark.parametrize(("name", "dtype"), [("F32", np.float32), ("F16", np.float16)])
def test_floats_are_taken_as_they_are(name: str, dtype: type) -> None:
    values = np.random.default_rng(0).standard_normal((3, 40)).astype(dtype)
    np.testing.assert_array_equal(PLAIN[name](values.view(np.uint8)), values.astype(np.float32))


def test_bfloat16_is_widened_exactly() -> None:
    values = mx.random.normal((3, 40)).astype(mx.bfloat16)
    raw = np.array(values.view(mx.uint8))
    np.testing.assert_array_equal(PLAIN["BF16"](raw), np.array(values.astype(mx.float32)))


@given(st.integers(0, 1000), st.floats(1e-6, 1e4), st.floats(-1e4, 1e4))
def test_requantised_values_are_off_by_half_a_step_at_most(seed: int, spread: float, centre: float) -> None:
    noise = np.random.default_rng(seed).standard_normal((4, 96))
    values = (centre + spread * noise).astype(np.float32)
    affine = requantise(values)
    error = np.abs(affine.values() - values).reshape(4, -1, GROUP).max(axis=-1)
    rounding = np.abs(values).max() * 1e-6
    assert (error <= affine.scales * 0.501 + rounding).all()


def test_a_group_of_equal_values_survives_requantising() -> None:
    values = np.full((2, 64), -3.25, np.float32)
    np.testing.assert_array_equal(requantise(values).values(), values)
