"""Packed rows come back with no value off by more than half a scale, and cutting or joining them loses nothing."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cache.quantise import Packed, Scheme, pack, scheme_for

DTYPES = (mx.float32, mx.bfloat16, mx.float16)
HEAD_SIZES = (32, 64, 96, 128, 160, 192, 256, 576)  # 576: the latent rows of MLA
ROUNDING = {mx.float32: 2**-20, mx.bfloat16: 2**-8, mx.float16: 2**-11}

dtypes = st.sampled_from(DTYPES)
schemes = st.builds(Scheme, st.sampled_from((4, 8)), st.sampled_from((32, 64, 128)), st.booleans())


@st.composite
def rows_and_scheme(draw: st.DrawFn, least: int = 1) -> tuple[Any, Scheme]:
    """Rows [1, heads, n, dim] of some type, with large channels and an offset, and a scheme that fits them."""
    scheme = draw(schemes)
    dim = draw(st.sampled_from([size for size in HEAD_SIZES if size % scheme.group_size == 0]))
    heads, n = draw(st.integers(1, 3)), draw(st.integers(least, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    rows = rng.normal(size=(1, heads, n, dim)) * draw(st.sampled_from((1e-3, 1.0, 40.0)))
    rows[..., rng.integers(dim)] *= draw(st.sampled_from((1, 100)))
    return mx.array((rows + draw(st.sampled_from((0.0, 30.0)))).astype(np.float32)).astype(draw(dtypes)), scheme


def as_numpy(array: Any) -> np.ndarray:
    return np.array(array.astype(mx.float32))


def same(a: Packed, b: Packed) -> bool:
    """Whether both hold the same bits."""
    assert (a.scheme, a.dtype) == (b.scheme, b.dtype)
    return all(x.shape == y.shape and mx.array_equal(x, y).item() for x, y in zip(a.arrays(), b.arrays(), strict=True))


@given(rows_and_scheme())
def test_a_value_is_off_by_half_a_scale_at_most(case: tuple[Any, Scheme]) -> None:
    rows, scheme = case
    packed = pack(rows, scheme)
    found, exact = as_numpy(packed.unpack()), as_numpy(rows)
    half = np.repeat(as_numpy(packed.scales), scheme.group_size, axis=-1) / 2
    largest = np.abs(exact).max(axis=-1, keepdims=True)
    if scheme.rotate:  # an orthonormal matrix keeps the length of a whole head
        distance = np.linalg.norm(found - exact, axis=-1)
        bound = np.linalg.norm(half, axis=-1) + ROUNDING[rows.dtype] * np.linalg.norm(exact, axis=-1) * 2
        assert (distance <= bound * 1.001).all()
    else:
        assert (np.abs(found - exact) <= half * 1.001 + ROUNDING[rows.dtype] * largest).all()


@given(rows_and_scheme())
def test_a_scale_is_hardly_more_than_the_range_needs(case: tuple[Any, Scheme]) -> None:
    rows, scheme = case
    scheme = Scheme(scheme.bits, scheme.group_size, rotate=False)
    groups = as_numpy(rows).reshape(*rows.shape[:-1], -1, scheme.group_size)
    spread, lowest = groups.max(-1) - groups.min(-1), np.abs(groups.min(-1))
    limit = (spread + lowest * 2**-7) / (2**scheme.bits - 1) * (1 + 2**-7)
    assert (as_numpy(pack(rows, scheme).scales) <= limit * 1.001).all()


@given(rows_and_scheme())
def test_rows_come_back_in_their_type_and_shape(case: tuple[Any, Scheme]) -> None:
    rows, scheme = case
    packed = pack(rows, scheme)
    back = packed.unpack()
    assert (back.shape, back.dtype) == (rows.shape, rows.dtype)
    assert packed.num_tokens == rows.shape[2]
    assert [a.dtype for a in packed.arrays()] == [mx.uint32, mx.bfloat16, mx.bfloat16]


@given(rows_and_scheme(least=2), st.data())
def test_a_slice_is_what_packing_the_slice_gives(case: tuple[Any, Scheme], data: st.DataObject) -> None:
    rows, scheme = case
    n = rows.shape[2]
    start = data.draw(st.integers(0, n - 1))
    end = data.draw(st.integers(start + 1, n))
    part = pack(rows, scheme).slice(start, end)
    assert same(part, pack(rows[:, :, start:end], scheme))
    assert mx.array_equal(part.unpack(), pack(rows, scheme).unpack()[:, :, start:end])


@given(rows_and_scheme(least=3), st.data())
def test_pieces_join_to_what_packing_the_whole_gives(case: tuple[Any, Scheme], data: st.DataObject) -> None:
    rows, scheme = case
    n = rows.shape[2]
    cuts = sorted(data.draw(st.sets(st.integers(1, n - 1), max_size=3)))
    pieces = [pack(rows[:, :, a:b], scheme) for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    assert same(Packed.concatenate(pieces), pack(rows, scheme))


@given(rows_and_scheme())
def test_bytes_are_those_that_the_scheme_tells(case: tuple[Any, Scheme]) -> None:
    rows, scheme = case
    packed = pack(rows, scheme)
    assert packed.nbytes * 8 == rows.size * scheme.bits_per_value == sum(a.nbytes for a in packed.arrays()) * 8


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize(("bits", "share"), [(8, 0.54), (4, 0.30)])
def test_common_head_sizes_keep_to_the_share_of_bfloat16(dim: int, bits: int, share: float) -> None:
    rows = mx.zeros((1, 2, 10, dim), mx.bfloat16)
    scheme = scheme_for(bits, 64, dim)
    assert scheme is not None
    assert pack(rows, scheme).nbytes <= share * rows.nbytes


@pytest.mark.parametrize(
    ("asked", "dim", "found"),
    [(64, 64, 64), (128, 64, 64), (128, 256, 128), (32, 128, 32), (64, 96, 32), (128, 192, 64), (128, 576, 64)],
)
def test_the_largest_group_that_fits_is_chosen(asked: int, dim: int, found: int) -> None:
    assert scheme_for(8, asked, dim) == Scheme(8, found, rotate=False)
    assert scheme_for(4, asked, dim) == Scheme(4, found, rotate=True)


@pytest.mark.parametrize("dim", [8, 40, 72, 80, 100, 112])
def test_head_sizes_without_a_group_are_not_quantised(dim: int) -> None:
    assert scheme_for(8, 128, dim) is None
    assert scheme_for(4, 32, dim) is None


@pytest.mark.parametrize(("bits", "group"), [(16, 64), (2, 64), (8, 48), (8, 16), (4, 0)])
def test_bits_and_groups_that_do_not_exist_are_refused(bits: int, group: int) -> None:
    with pytest.raises(ValueError, match=r"bits, not|values, not"):
        scheme_for(bits, group, 128)


def test_what_does_not_fit_is_refused() -> None:
    scheme = Scheme(8, 64, rotate=False)
    with pytest.raises(ValueError, match="do not divide the head size 96"):
        pack(mx.zeros((1, 1, 2, 96)), scheme)
    with pytest.raises(ValueError, match="no rows"):
        pack(mx.zeros((1, 1, 0, 64)), scheme)


@pytest.mark.parametrize(("start", "end"), [(-1, 2), (2, 2), (3, 1), (0, 6)])
def test_a_slice_outside_the_rows_is_refused(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="in 5 packed ones"):
        pack(mx.ones((1, 2, 5, 64)), Scheme(4, 64, rotate=True)).slice(start, end)


def test_only_the_same_scheme_and_type_join() -> None:
    rows = mx.ones((1, 2, 5, 64))
    one = pack(rows, Scheme(8, 64, rotate=False))
    others = [pack(rows, Scheme(8, 32, rotate=False)), pack(rows.astype(mx.float16), Scheme(8, 64, rotate=False))]
    for other in others:
        with pytest.raises(ValueError, match="join only"):
            Packed.concatenate([one, other])
    with pytest.raises(ValueError, match="join only"):
        Packed.concatenate([])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, 1e-30, -3e4])
def test_groups_of_one_repeated_value_come_back_exactly(bits: int, value: float) -> None:
    rows = mx.full((1, 1, 2, 64), value).astype(mx.bfloat16)
    np.testing.assert_array_equal(as_numpy(pack(rows, Scheme(bits, 64, rotate=False)).unpack()), as_numpy(rows))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotate", [False, True])
def test_the_largest_values_of_half_precision_survive(dtype: Any, rotate: bool) -> None:
    rows = mx.array([[-6e4, 6e4] * 32, [6e4] * 64, [-6e4] * 64]).reshape(1, 1, 3, 64).astype(dtype)
    found = as_numpy(pack(rows, Scheme(8, 64, rotate)).unpack())
    np.testing.assert_allclose(found, as_numpy(rows), rtol=0.05)


@pytest.mark.parametrize("dim", HEAD_SIZES)
def test_rotation_spreads_a_large_channel(dim: int) -> None:
    """What rotation is for: at 4 bits one channel of 50 does not drown the others."""
    rng = np.random.default_rng(dim)
    values = rng.normal(size=(1, 2, 50, dim)).astype(np.float32)
    values[..., 3] *= 50
    scheme = scheme_for(4, 64, dim)
    assert scheme is not None and scheme.rotate
    plain = Scheme(4, scheme.group_size, rotate=False)
    group = slice(0, scheme.group_size)

    def error(s: Scheme) -> float:
        return float(np.linalg.norm((as_numpy(pack(mx.array(values), s).unpack()) - values)[..., group]))

    assert error(scheme) < 0.7 * error(plain)


@given(rows_and_scheme())
def test_the_layout_is_that_of_mlx(case: tuple[Any, Scheme]) -> None:
    """So that MLX's quantised products can read packed rows; checked by unpacking the codes by hand."""
    rows, scheme = case
    packed = pack(rows, Scheme(scheme.bits, scheme.group_size, rotate=False))
    codes = np.array(packed.weights).view(np.uint8)
    if scheme.bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(rows.shape)
    scales, biases = (np.repeat(as_numpy(a), scheme.group_size, axis=-1) for a in (packed.scales, packed.biases))
    expected = mx.array(codes * scales + biases).astype(rows.dtype)
    np.testing.assert_allclose(as_numpy(packed.unpack()), as_numpy(expected), rtol=2**-7, atol=1e-4)


def test_a_slice_does_not_keep_the_whole_alive() -> None:
    packed = pack(mx.random.normal((1, 1, 20_000, 128)), Scheme(8, 64, rotate=False))
    mx.eval(packed.arrays())
    whole = mx.get_active_memory()
    part = packed.slice(0, 100)
    mx.eval(part.arrays())
    size = packed.nbytes
    del packed
    assert mx.get_active_memory() <= whole - size + 3 * part.nbytes
