"""CUDA kernels for attention of a few queries per sequence, over exact and over packed rows. Engine thread only.

A block computes up to 16 queries of one row that share a key head (positions and heads alike) over a part of the
columns, on tensor cores. Its warps take columns by turns, 16 at a time, with a running maximum and sum for each query
(online softmax), and are joined at the end. Where there are several parts, a second kernel joins them. Packed rows of
8 bits are read as they are: codes become numbers by their place in a word, scales and biases meet scores and weights.

The order of dimensions within a product is free, so each lane takes those that lie side by side in memory, and nothing
changes lanes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from treadle.cache import recent_columns
from treadle.cache.geometry import bucket
from treadle.cache.pieces import Piece
from treadle.cache.quantise import Packed
from treadle.models import few_queries_source as source
from treadle.models.cuda import Kernel, bits_of

log = logging.getLogger("treadle.models")

WARP = 32
WARPS = 4  # of a block
MOST_ROWS = 16  # queries of a tile
WIDE = 128  # dimensions of a head above which a tile has half as many: sums have to fit into registers
MOST_DIM = 256
DIM_STEP = 16
ENOUGH_BLOCKS = 512  # about four for each processor of an H100
LEAST_PART = 256  # columns
MOST_PARTS = 32
TYPES = (mx.bfloat16, mx.float16)
CODE_BITS = 8  # of packed rows that are read as they are
TRIAL = 256  # columns
TRIED = ((2, TRIAL), (2, TRIAL))  # heads and columns of its keys and values
ROUNDING = 2**-5  # of what a trial finds, some 0.1 to 1: bfloat16

ROWS = ["queries", "keys", "values", "table", "position", "limits"]
CODES = ["key_words", "key_scales", "key_biases", "value_words", "value_scales", "value_biases"]


@lru_cache(maxsize=4)
def _kernel(packed: bool, several: bool) -> Any:
    name = f"treadle_few_queries{'_packed' if packed else ''}{'_part' if several else ''}"
    text = source.SETUP + (source.PACKED if packed else source.EXACT)
    text += source.JOIN.replace("STORE", source.PART if several else source.WHOLE)
    return Kernel(name, ROWS + (CODES if packed else []), ["out"], text, source.HEADER)


@lru_cache(maxsize=1)
def _merge() -> Any:
    return Kernel("treadle_merge_parts", ["parts"], ["out"], source.MERGE)


def few_queries(queries: Any, keys: Any, values: Any, seen: tuple[Any, Any, Any], scale: float, reach: int) -> Any:
    """Attention of `queries` [rows, heads, n, dim] over whole buffers [slots, key heads, columns, dim].

    `seen`: int32 arrays (table [rows, columns] of the position in each column, position [rows] of each row's first
    query, limits [columns to read, window or 0]). Query i of a row sees the positions up to its own, in its window.
    `reach`: the columns to read, as known to the host.
    """
    split = parts(_blocks(queries, keys.shape[1]), bucket(reach))
    return _launched(scale, split)(queries, keys, values, *seen)


def few_queries_packed(
    queries: Any,
    exact: tuple[Any, Any],
    packed: Sequence[Packed],
    seen: tuple[Any, Any, Any],
    scale: float,
    reach: int,
) -> Any:
    """The same over whole `exact` buffers of the recent tokens and `packed` ones of keys and values before them.

    `seen`: what `packed_view` of `recent_columns.py` gave. Query i of a row sees the tokens before its edge packed and
    the others up to its own exactly.
    """
    keys, values = packed
    split = parts(_blocks(queries, exact[0].shape[1]), bucket(reach))
    launched = _launched(scale, split + 1, (recent_columns.BLOCK, keys.scheme.group_size))
    return launched(queries, *exact, *seen, *keys.arrays(), *values.arrays())


@lru_cache(maxsize=32)
def _launched(scale: float, split: int, packed: tuple[int, int] | None = None) -> Any:
    """The launch over so many parts, compiled: the text of a kernel is put together once for each set of shapes.

    `packed`: tokens of a block and values of a group, where packed rows are read too.
    """
    return mx.compile(partial(_launch, scale=scale, split=split, packed=packed))


def _launch(*inputs: Any, scale: float, split: int, packed: tuple[int, int] | None) -> Any:
    queries, keys = inputs[:2]
    rows, heads, n, dim = queries.shape
    shared = keys.shape[1]
    tall = _tile(dim, n * heads // shared)
    block, span = packed or (0, dim)
    shape, dtype = (queries.shape, queries.dtype) if split == 1 else ((rows, heads, n, split, dim + 2), mx.float32)
    sizes = {"G": heads // shared, "ROWS": tall, "D": dim, "SPAN": span, "WARPS": WARPS}
    sizes |= {"BF16": queries.dtype == mx.bfloat16, "BLOCK": block}
    sizes |= {"SCALE": bits_of(scale), "KEY_ALIGN": _alignment(span // 2), "VALUE_ALIGN": _alignment(span // 4)}
    (out,) = _kernel(packed is not None, split > 1)(
        inputs=list(inputs),
        template=[("T", queries.dtype), *sizes.items()],
        grid=(rows * split * WARPS * WARP, shared, _blocks(queries, shared) // (rows * shared)),
        threadgroup=(WARPS * WARP, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    if split == 1:
        return out
    threads = -(-dim // WARP) * WARP  # whole warps, which weigh the parts together
    (out,) = _merge()(
        inputs=[out],
        template=[("T", queries.dtype), ("D", dim), ("MOST_PARTS", MOST_PARTS)],
        grid=(rows * heads * n * threads, 1, 1),
        threadgroup=(threads, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return out


def _tile(dim: int, queries: int) -> int:
    """The queries that one block computes."""
    return MOST_ROWS if dim <= WIDE and queries > MOST_ROWS // 2 else MOST_ROWS // 2


def _blocks(queries: Any, shared: int) -> int:
    """That compute `queries` over columns in one part, of so many key heads."""
    rows, heads, n, dim = queries.shape
    asked = n * heads // shared
    return int(rows * shared * -(-asked // _tile(dim, asked)))


def _alignment(size: int) -> int:
    """Of pieces of so many bytes, which a lane reads by as few loads as possible."""
    return min(16, size & -size)


@lru_cache(maxsize=1024)
def parts(blocks: int, reach: int) -> int:
    """Into how many parts the columns are split, so that few blocks over many columns fill the device."""
    split = 1
    while split < MOST_PARTS and blocks * split < ENOUGH_BLOCKS and reach >= 2 * split * LEAST_PART:
        split *= 2
    return split


def suits(queries: Any, keys: Any, values: Any) -> bool:
    """Whether the kernels have been written for these shapes and types."""
    dim, group = queries.shape[3], queries.shape[1] // keys.shape[1]
    same = keys.dtype == queries.dtype and values.shape[3] == keys.shape[3] == dim
    fits = queries.dtype in TYPES and dim % DIM_STEP == 0 and dim <= MOST_DIM
    return same and fits and _sound(queries.dtype, group, dim)


def suits_packed(queries: Any, keys: Piece, values: Piece) -> bool:
    """Whether packed rows can be read as they are, by queries that `suits`."""
    if not (isinstance(keys, Packed) and isinstance(values, Packed)):
        return False
    size, group = keys.scheme.group_size, queries.shape[1] // keys.weights.shape[1]
    alike = all(piece.scheme.bits == CODE_BITS and piece.scheme.group_size == size for piece in (keys, values))
    alike = alike and keys.num_tokens == values.num_tokens and keys.num_tokens % 2 == 0
    return alike and _sound(queries.dtype, group, queries.shape[3], size)


@lru_cache(maxsize=16)
def _sound(dtype: Any, group: int, dim: int, packed: int = 0) -> bool:
    """Whether the kernels can be launched here and compute what MLX does, up to rounding; tried once for each shape.

    `packed`: values of a group of codes; 0: exact rows.
    """
    try:
        off = max(_off(dtype, group, dim, packed, n) for n in (1, MOST_ROWS // 2 // group + 1))  # of both tiles
    except RuntimeError as error:  # of the compiler, or of the device
        log.warning("The kernel for attention of few queries cannot be used here, MLX's own is: %s", error)
        return False
    if not off <= ROUNDING:
        log.warning("Attention of few queries by the kernel is off by %.2g here; MLX's own is used.", off)
    return off <= ROUNDING


def _off(dtype: Any, group: int, dim: int, packed: int, n: int) -> float:
    """The largest difference in trials with `n` queries; infinite where a result is not a number."""
    shapes = (2 * group, n), *TRIED
    arrays = [mx.random.normal((1, h, m, dim), key=mx.random.key(i)) for i, (h, m) in enumerate(shapes)]
    queries, keys, values = (a.astype(dtype) for a in arrays)
    table, position = mx.arange(TRIAL, dtype=mx.int32)[None], mx.array([TRIAL - n], mx.int32)
    if packed:
        codes = [mx.quantize(a.astype(mx.bfloat16), group_size=packed, bits=CODE_BITS) for a in (keys, values)]
        seen = table, position + recent_columns.BLOCK, mx.array([0, 0, 0, TRIAL], mx.int32)
        launched = [_launched(dim**-0.5, split, (recent_columns.BLOCK, packed)) for split in (2, MOST_PARTS)]
        found = [launch(queries, keys, values, *seen, *codes[0], *codes[1]) for launch in launched]
        keys, values = (mx.dequantize(*code, group_size=packed, bits=CODE_BITS) for code in codes)
    else:
        seen = table, position, mx.array([TRIAL, 0], mx.int32)
        found = [_launched(dim**-0.5, split)(queries, keys, values, *seen) for split in (1, 2, MOST_PARTS)]
    wanted = mx.fast.scaled_dot_product_attention(
        *(a.astype(mx.float32) for a in (queries, keys, values)), scale=dim**-0.5, mask=None if packed else "causal"
    )
    off = float(mx.stack([mx.abs(one.astype(mx.float32) - wanted).max() for one in found]).max())
    return off if off == off else math.inf
