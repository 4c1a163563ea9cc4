"""Attention over packed rows on CPUs, without unpacking them or a part at a time. Engine thread only.

With codes c, scale s and bias b of a group, q . (s c + b) = s (q . c) + b sum(q): scales and biases touch scores
instead of rows. Where there are CPU kernels (`native/`), they read keys and values of 8 bits so, for any number of
queries. All else is done by operations of MLX: the rotation of 4-bit rows is applied to queries and results instead,
and of keys less the mean of their block, q . mean is one number more for a block. What is left per value is one
conversion from bytes to float32.

With many queries scores outweigh rows, and without kernels rows are better unpacked once, by one key head after the
other: their scores and unpacked rows exist for one head at a time, so a long prefill needs less memory than over exact
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import mlx.core as mx

from treadle.cache import recent_columns
from treadle.cache.blocks import Blocks
from treadle.cache.packed_rows import PackedRows
from treadle.cache.pieces import Piece, mapped, rows_of
from treadle.cache.quantise import Packed, Scheme, on_cpu, rotated
from treadle.native import build

MOST_SHARED = 64  # queries that share a key head; with more, unpacking costs less
NATIVE_BITS = 8  # of the rows that the CPU kernels read
MASKS = (mx.bool_, mx.float32)


def attention_over(original: Callable[..., Any]) -> Callable[..., Any]:
    """A function in the place of mlx-lm's `scaled_dot_product_attention`, which goes to `original` for all else."""

    def attend(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        if not (isinstance(cache, PackedRows) and on_cpu() and sinks is None and cache.taken(keys, values)):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        kernels = build.kernels()
        if kernels is not None and (found := native(kernels, queries, cache, scale, mask)) is not None:
            return found
        if queries.shape[1] // keys.shape[1] * queries.shape[2] <= MOST_SHARED:
            return over_packed(queries, cache, scale, mask)
        return head_by_head(queries, cache, scale, mask)

    return attend


def native(kernels: Any, queries: Any, cache: PackedRows, scale: float, mask: Any) -> Any:
    """As `over_packed`, by the CPU kernels; None where they are not written for what `cache` holds."""
    columns = cache.columns
    old = [buffer.whole(columns.num_rows, columns.read_packed) for buffer in cache.packed]
    if not all(isinstance(piece, Packed) and piece.scheme.bits == NATIVE_BITS for piece in old):
        return None
    keys, values = cache.exact_part()
    if any(a.dtype != mx.float32 for a in (queries, keys, values)):
        return None
    whole = None
    if mask is not None and not isinstance(mask, str):
        if mask.dtype not in MASKS:
            return None
        whole = mask if mask.ndim == 4 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    causal = mask is not None and whole is None
    packed = [piece.arrays() for piece in old]
    return kernels.attention(queries, keys, values, scale, causal, whole, *packed, columns.read_packed)


def head_by_head(queries: Any, cache: PackedRows, scale: float, mask: Any, at_once: int = 1) -> Any:
    """As `over_packed`, unpacking the rows of so many key heads at a time.

    Evaluates: MLX takes memory for all that it dispatches ahead of a device, which would be that of every head and
    layer.
    """
    mx.eval(cache.arrays())
    packed, exact = cache.packed_part(), cache.exact_part()
    shared = exact[0].shape[1]
    group = queries.shape[1] // shared
    found = []
    for first in range(0, shared, at_once):
        heads = slice(first, min(first + at_once, shared))
        keys, values = (_heads(old, new, heads) for old, new in zip(packed, exact, strict=True))
        asking = queries[:, heads.start * group : heads.stop * group]
        found.append(mx.fast.scaled_dot_product_attention(asking, keys, values, scale=scale, mask=mask))
        mx.eval(found[-1])
    return mx.concatenate(found, axis=1)


def _heads(packed: Piece, exact: Any, heads: slice) -> Any:
    """All rows of some heads, [rows, heads, packed and exact columns, dim]."""
    return mx.concatenate([rows_of(mapped(packed, lambda a: a[:, heads])), exact[:, heads]], axis=2)


def over_packed(queries: Any, cache: PackedRows, scale: float, mask: Any) -> Any:
    """Attention of `queries` [rows, heads, n, dim] over what this step reads of `cache`, as if it were unpacked.

    `mask` is what `cache.make_mask` gave: None, "causal", or an array over packed and exact columns.
    """
    (old_keys, old_values), (keys, values) = cache.packed_part(), cache.exact_part()
    rows, heads, n, dim = queries.shape
    shared, end = keys.shape[1], cache.columns.read_packed
    grouped = (queries.astype(mx.float32) * scale).reshape(rows, shared, heads // shared * n, dim)
    parts = [*_scores_over(grouped, old_keys), grouped @ keys.astype(mx.float32).swapaxes(-1, -2)]
    scores = _masked(mx.concatenate(parts, axis=-1).reshape(rows, heads, n, -1), n, mask)
    weights = mx.softmax(scores, axis=-1).reshape(rows, shared, heads // shared * n, -1)
    found = _weighted_sum(weights[..., :end], old_values) + weights[..., end:] @ values.astype(mx.float32)
    return found.reshape(rows, heads, n, -1).astype(queries.dtype)


def _masked(scores: Any, n: int, mask: Any) -> Any:
    if mask is None:
        return scores
    if isinstance(mask, str):
        total = scores.shape[-1]
        mask = mx.arange(total)[None] <= mx.arange(total - n, total)[:, None]
    if mask.dtype != mx.bool_:
        return scores + mask
    return mx.where(mask, scores, mx.array(mx.finfo(mx.float32).min))


def _scores_over(queries: Any, keys: Piece) -> list[Any]:
    """The scores of all columns in parts, one after the other; as `_scores`."""
    if not isinstance(keys, Blocks):
        return [_scores(queries, keys)]
    first = _scores(queries, keys.first)
    if not keys.rest.num_tokens:
        return [first]
    rest = _scores(queries, keys.rest)
    if keys.means is not None:
        blocks = rest.reshape(*rest.shape[:-1], -1, recent_columns.BLOCK)
        rest = (blocks + _scores(queries, keys.means)[..., None]).reshape(rest.shape)
    return [first, rest]


def _weighted_sum(weights: Any, values: Piece) -> Any:
    """As `_weighted`."""
    if not isinstance(values, Blocks):
        return _weighted(weights, values)
    exact = values.first.shape[2]
    found = _weighted(weights[..., :exact], values.first)
    if not values.rest.num_tokens:
        return found
    assert values.means is None
    return found + _weighted(weights[..., exact:], values.rest)


def _scores(queries: Any, keys: Piece) -> Any:
    """[rows, shared, m, dim] over [rows, shared, n, ..]: float32 [rows, shared, m, n]."""
    if not isinstance(keys, Packed):
        return queries @ keys.astype(mx.float32).swapaxes(-1, -2)
    size = keys.scheme.group_size
    turn, sums = _fold(keys.scheme, queries.shape[-1])
    turned = queries if turn is None else queries @ turn
    scales, biases = keys.scales.swapaxes(-1, -2), keys.biases.swapaxes(-1, -2).astype(mx.float32)
    if sums.shape[1] == 1:
        return (turned @ _codes(keys).swapaxes(-1, -2)) * scales + (queries @ sums) * biases
    groups = turned.reshape(*turned.shape[:-1], -1, size).swapaxes(2, 3)  # [rows, shared, groups, m, size]
    dots = (groups @ _codes(keys).swapaxes(-1, -2)) * scales[..., None, :]
    return dots.sum(2) + (queries @ sums) @ biases


def _weighted(weights: Any, values: Piece) -> Any:
    """float32 [rows, shared, m, n] over [rows, shared, n, ..]: [rows, shared, m, dim]."""
    if not isinstance(values, Packed):
        return weights @ values.astype(mx.float32)
    dim = values.scales.shape[-1] * values.scheme.group_size
    turn, sums = _fold(values.scheme, dim)
    scales = values.scales.swapaxes(-1, -2)
    if sums.shape[1] == 1:
        found = (weights * scales) @ _codes(values)
    else:
        grouped = (weights[:, :, None] * scales[..., None, :]) @ _codes(values)  # [rows, shared, groups, m, size]
        found = grouped.swapaxes(2, 3).flatten(-2)
    found = found if turn is None else found @ turn.T
    return found + (weights @ values.biases.astype(mx.float32)) @ sums.T


def _codes(packed: Packed) -> Any:
    """Codes as float32 [rows, shared, n, dim], or [rows, shared, groups, n, size] where there are several groups.

    Of 4-bit ones each group's even codes come first, then its bytes of two, of which the even code is the low half.
    """
    words, groups = packed.weights, packed.scales.shape[-1]
    if packed.scheme.bits == 4:
        words = words if groups == 1 else words.reshape(*words.shape[:-1], groups, -1)
        words = mx.concatenate([words & mx.array(0x0F0F0F0F, mx.uint32), words], axis=-1)
        words = words if groups == 1 else words.flatten(-2)
    codes = words.view(mx.uint8)
    if groups > 1:
        codes = codes.reshape(*codes.shape[:-1], groups, -1).swapaxes(2, 3)
    return codes.astype(mx.float32)


@lru_cache(maxsize=16)
def _fold(scheme: Scheme, dim: int) -> tuple[Any, Any]:
    """What queries are multiplied by instead of rows, and results by its transpose.

    float32 [dim, dim] or None: rotation, and for 4 bits what tells two codes of a byte apart; [dim, groups]: rotation,
    and the sum over each group. Evaluated.
    """
    base = rotated(mx.eye(dim)) if scheme.rotate else mx.eye(dim)
    groups = base.reshape(dim, -1, scheme.group_size)
    sums = groups.sum(-1)
    turn: Any = base if scheme.rotate else None
    if scheme.bits == 4:
        odd = groups[..., 1::2] / 16  # a byte is even + 16 odd
        turn = mx.concatenate([groups[..., 0::2] - odd, odd], axis=-1).reshape(dim, dim)
    mx.eval([sums] if turn is None else [turn, sums])
    return turn, sums
