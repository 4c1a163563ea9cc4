"""Each kernel computes what MLX computes in float32, for any shape; a row gets the same in any company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treadle.cache.quantise import Packed, Scheme, pack
from treadle.native import build

kernels: Any = build.kernels()
pytestmark = pytest.mark.skipif(kernels is None, reason=f"no CPU kernels: {build.why_not()}")

ROUNDING = 2e-5  # of float32 sums of some thousand products, as a share of the largest
FEW = 16  # as in linear.h
rows = st.integers(1, 70)
seeds = st.integers(0, 2**16)
floats = st.sampled_from([mx.float32, mx.float16, mx.bfloat16])


def normal(seed: int, *shape: int) -> Any:
    return mx.array(np.random.default_rng(seed).standard_normal(shape, np.float32))


def assert_close(found: Any, expected: Any) -> None:
    assert found.shape == expected.shape and found.dtype == mx.float32
    scale = max(1.0, float(mx.abs(expected).max()))
    np.testing.assert_allclose(np.array(found), np.array(expected), rtol=0, atol=ROUNDING * scale)


@given(
    rows, st.integers(1, 90), st.integers(1, 14), st.sampled_from([32, 64, 128]), st.sampled_from([4, 8]), floats, seeds
)
def test_packed_products(m: int, outputs: int, groups: int, group: int, bits: int, dtype: Any, seed: int) -> None:
    codes, *parts = mx.quantize(normal(seed, outputs, groups * group), group, bits)
    scales, biases = (part.astype(dtype) for part in parts)
    x, bias = normal(seed + 1, m, groups * group), normal(seed + 2, outputs)
    wide = [part.astype(mx.float32) for part in (scales, biases)]
    expected = x @ mx.dequantize(codes, *wide, group, bits).T + bias
    assert_close(kernels.quantised_linear(x, codes, scales, biases, group, bits, bias), expected)


@given(rows, st.integers(1, 90), st.integers(1, 1500), floats, st.booleans(), seeds)
def test_plain_products(m: int, outputs: int, inputs: int, dtype: Any, biased: bool, seed: int) -> None:
    x, weight = normal(seed, m, inputs), normal(seed + 1, outputs, inputs).astype(dtype)
    bias = normal(seed + 2, outputs) if biased else None
    expected = x @ weight.astype(mx.float32).T
    assert_close(kernels.linear(x, weight, bias), expected if bias is None else expected + bias)


@given(rows, st.integers(1, 40), st.integers(1, 50), st.sampled_from([4, 8, None]), seeds)
def test_a_row_gets_the_same_bits_in_any_company(
    m: int, outputs: int, groups: int, bits: int | None, seed: int
) -> None:
    x, weight = normal(seed, m, groups * 32), normal(seed + 1, outputs, groups * 32)
    packed = None if bits is None else mx.quantize(weight, 32, bits)

    def product(part: Any) -> Any:
        return kernels.linear(part, weight) if packed is None else kernels.quantised_linear(part, *packed, 32, bits)

    together = np.array(product(x))
    few = m <= FEW or bits is None  # packed weights meet more rows in another order
    for row in {0, m // 2, m - 1}:
        alone = product(x[row : row + 1])
        assert not few or np.array_equal(np.array(alone)[0], together[row])
        assert_close(alone, mx.array(together[row : row + 1]))


@given(st.integers(FEW + 1, 60), st.integers(1, 40), st.integers(1, 50), st.sampled_from([4, 8]), seeds)
def test_many_rows_get_the_same_bits_as_more_of_them(m: int, outputs: int, groups: int, bits: int, seed: int) -> None:
    x, packed = normal(seed, m, groups * 32), mx.quantize(normal(seed + 1, outputs, groups * 32), 32, bits)
    some, more = (kernels.quantised_linear(part, *packed, 32, bits) for part in (x[: FEW + 1], x))
    assert np.array_equal(np.array(some), np.array(more[: FEW + 1]))


@given(st.integers(1, 5), st.integers(2, 6), st.integers(1, 6), seeds)
def test_inputs_with_gaps(a: int, b: int, c: int, seed: int) -> None:
    weight = normal(seed, 7, 64)
    x = normal(seed + 1, a, c, b, 2, 64).transpose(2, 0, 1, 3, 4)[:, :, :, 1]
    assert_close(kernels.linear(x, weight), x @ weight.T)
    assert_close(kernels.linear(x[::-1], weight), x[::-1] @ weight.T)
    ones = mx.ones(64)
    assert_close(kernels.rms_norm(x, ones, 1e-5), mx.fast.rms_norm(x, ones, 1e-5))
    assert_close(kernels.swiglu(x, x[::-1]), x * mx.sigmoid(x) * x[::-1])


shapes = st.tuples(
    st.integers(1, 3),  # rows
    st.sampled_from([1, 2, 3]),  # heads of keys
    st.integers(1, 4),  # heads that share one
    st.integers(1, 60),  # queries
    st.integers(0, 300),  # columns before them
    st.sampled_from([8, 40, 64, 128]),  # size of a head
    st.sampled_from([8, 24, 64]),  # size of a value
)


def heads(seed: int, rows: int, count: int, length: int, dim: int) -> Any:
    """As model files hand them over: cut from a longer buffer."""
    return normal(seed, rows, count, length + 5, dim)[:, :, :length]


@given(shapes, st.sampled_from(["none", "causal", "bool", "float", "shared"]), seeds)
def test_attention(shape: tuple[int, ...], kind: str, seed: int) -> None:
    rows, shared, group, n, before, dim, value_dim = shape
    queries = normal(seed, rows, n, shared * group, dim).swapaxes(1, 2)
    keys, values = (heads(seed + i, rows, shared, n + before, size) for i, size in ((1, dim), (2, value_dim)))
    seen = np.random.default_rng(seed).random((rows, 1, n, n + before)) < 0.6
    seen[..., 0] = True
    masks = {
        "none": None,
        "causal": "causal",
        "bool": mx.array(seen),
        "float": mx.where(mx.array(seen), normal(seed + 3, *seen.shape), mx.array(float("-inf"))),
        "shared": mx.array(seen[:1, :, :1]),
    }
    mask = masks[kind]
    expected = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.2, mask=mask)
    array = mask if isinstance(mask, mx.array) else None
    assert_close(kernels.attention(queries, keys, values, 0.2, kind == "causal", array), expected)


def packed_heads(seed: int, rows: int, count: int, length: int, dim: int, group: int) -> tuple[Packed, Any]:
    """A buffer with room for a row and some columns more, whose heads are a view, and what its first rows stand for."""
    whole = pack(normal(seed, rows + 1, count + 1, length + 5, dim) + 0.3, Scheme(8, group, rotate=False))
    buffer = whole.with_arrays([a[:, 1:] for a in whole.arrays()])
    return buffer, buffer.unpack()[:rows, :, :length]


@given(
    st.integers(1, 3), st.sampled_from([1, 3]), st.integers(1, 4), st.sampled_from([1, 3, 16, 60]),
    st.integers(1, 400), st.integers(0, 90), st.sampled_from([(64, 32), (64, 64), (128, 32), (128, 64), (128, 128)]),
    st.sampled_from(["none", "causal", "bool", "float", "shared"]), seeds,
)  # fmt: skip
def test_attention_over_packed_rows(
    rows: int, shared: int, group: int, n: int, packed: int, before: int, size: tuple[int, int], kind: str, seed: int
) -> None:
    dim, grain = size
    queries = normal(seed, rows, n, shared * group, dim).swapaxes(1, 2)
    keys, values = (heads(seed + i, rows, shared, n + before, dim) for i in (1, 2))
    (old_keys, first), (old_values, others) = (packed_heads(seed + i, rows, shared, packed, dim, grain) for i in (3, 4))
    total = packed + before + n
    seen = np.random.default_rng(seed).random((rows, 1, n, total)) < 0.6
    seen[..., : packed * (seed % 2)] = False  # whole spans that nobody sees
    seen[..., -1] = True
    masks = {
        "none": None,
        "causal": "causal",
        "bool": mx.array(seen),
        "float": mx.where(mx.array(seen), normal(seed + 5, *seen.shape), mx.array(float("-inf"))),
        "shared": mx.array(np.repeat(seen[:1, :, :1], 2, axis=3))[..., ::2],
    }
    mask = masks[kind]
    both = [mx.concatenate([a, b], axis=2) for a, b in ((first, keys), (others, values))]
    expected = mx.fast.scaled_dot_product_attention(queries, *both, scale=0.2, mask=mask)
    array = mask if isinstance(mask, mx.array) else None
    arrays = old_keys.arrays(), old_values.arrays()
    assert_close(kernels.attention(queries, keys, values, 0.2, kind == "causal", array, *arrays, packed), expected)


@given(st.integers(2, 10), st.integers(1, 400), seeds)
def test_a_query_gets_the_same_bits_over_packed_rows_among_a_few_others(n: int, packed: int, seed: int) -> None:
    queries, keys, values = normal(seed, 1, 6, n, 64), *(heads(seed + i, 1, 2, 70 + n, 64) for i in (1, 2))
    arrays = [packed_heads(seed + i, 1, 2, packed, 64, 32)[0].arrays() for i in (3, 4)]
    together = np.array(kernels.attention(queries, keys, values, 0.125, True, None, *arrays, packed))
    for i in (0, n - 1):
        end = 70 + i + 1
        own = queries[:, :, i : i + 1], keys[:, :, :end], values[:, :, :end]
        one = kernels.attention(*own, 0.125, True, None, *arrays, packed)
        assert np.array_equal(np.array(one)[:, :, 0], together[:, :, i])


@given(st.integers(2, 10), st.integers(0, 400), seeds)
def test_a_query_gets_the_same_bits_among_a_few_others(n: int, before: int, seed: int) -> None:
    queries, keys, values = normal(seed, 1, 6, n, 64), *(heads(seed + i, 1, 2, n + before, 64) for i in (1, 2))
    together = np.array(kernels.attention(queries, keys, values, 0.125, True))
    for i in (0, n - 1):
        end = before + i + 1
        one = kernels.attention(queries[:, :, i : i + 1], keys[:, :, :end], values[:, :, :end], 0.125, True)
        assert np.array_equal(np.array(one)[:, :, 0], together[:, :, i])


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    queries, keys = normal(1, 1, 2, 3, 64), normal(2, 1, 2, 200, 64)
    mask = mx.zeros((1, 1, 3, 200), mx.bool_)
    assert not np.array(kernels.attention(queries, keys, keys, 1.0, False, mask)).any()


@given(rows, st.integers(1, 700), st.booleans(), seeds)
def test_norms(m: int, width: int, weighted: bool, seed: int) -> None:
    x, weight = normal(seed, m, width), normal(seed + 1, width) if weighted else None
    assert_close(kernels.rms_norm(x, weight, 1e-5), mx.fast.rms_norm(x, weight, 1e-5))


@given(st.integers(1, 5000), st.sampled_from([0.1, 10.0, 300.0]), seeds)
def test_gates(count: int, size: float, seed: int) -> None:
    gate, up = normal(seed, count) * size, normal(seed + 1, count)
    assert_close(kernels.swiglu(gate, up), gate * mx.sigmoid(gate) * up)


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 20), st.sampled_from([(64, 64), (64, 32), (20, 6)]),
    st.booleans(), st.booleans(), st.booleans(), seeds,
)  # fmt: skip
def test_rotation(
    rows: int, heads: int, n: int, dims: tuple[int, int], traditional: bool, ragged: bool, own: bool, seed: int
) -> None:
    dim, turning = dims
    x = normal(seed, rows, n, heads, dim).swapaxes(1, 2)
    offset = mx.array(np.random.default_rng(seed).integers(0, 100, rows) if ragged else 37, mx.int32)
    freqs = mx.abs(normal(seed, turning // 2)) + 1 if own else None
    expected = mx.fast.rope(
        x, turning, traditional=traditional, base=None if own else 1e4, scale=0.5, offset=offset, freqs=freqs
    )
    assert_close(kernels.rope(x, turning, traditional, 1e4, 0.5, offset, freqs), expected)


def test_what_does_not_fit_is_refused() -> None:
    x, weight = mx.zeros((2, 64)), mx.zeros((3, 64))
    with pytest.raises(ValueError, match="float32"):
        kernels.linear(x.astype(mx.float16), weight)
    with pytest.raises(ValueError, match="as long as"):
        kernels.linear(mx.zeros((2, 63)), weight)
    with pytest.raises(ValueError, match="4 or 8 bits"):
        kernels.quantised_linear(x, *mx.quantize(weight, 32, 2), 32, 2)
    with pytest.raises(ValueError, match="do not fit"):
        kernels.quantised_linear(x, *mx.quantize(weight, 32, 4), 64, 4)
    ones = mx.zeros((1, 2, 3, 64))
    codes = pack(ones, Scheme(8, 64, rotate=False)).arrays()
    for packed, count, fault in ((codes, 4, "do not fit"), (codes[:2], 3, "codes, scales"), (codes, -1, "fewer")):
        with pytest.raises(ValueError, match=fault):
            kernels.attention(ones, ones, ones, 1.0, False, None, packed, packed, count)
    with pytest.raises(ValueError, match="8 bits"):
        words = pack(ones, Scheme(4, 64, rotate=True)).arrays()
        kernels.attention(ones, ones, ones, 1.0, False, None, words, words, 3)
    with pytest.raises(ValueError, match="multiple of 8"):
        kernels.attention(*[mx.zeros((1, 2, 3, 12))] * 3, 1.0, False)


def test_threads_of_python_may_compute_at_once() -> None:
    """MLX has a CPU thread for each stream; the pool serves one at a time, and the others do their work alone."""
    weight = mx.quantize(normal(1, 300, 640), 32, 4)
    mx.eval(weight)

    def work(seed: int) -> bool:
        x = normal(seed, 9, 640)
        with mx.stream(mx.new_thread_local_stream(mx.cpu)):
            first = np.array(kernels.quantised_linear(x, *weight, 32, 4))
            return all(np.array_equal(np.array(kernels.quantised_linear(x, *weight, 32, 4)), first) for _ in range(40))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
