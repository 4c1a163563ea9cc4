"""Attention on CUDA for any length of a sequence. Engine thread only.

What MLX 0.32 does there by itself: one query with an array mask (every batch) is computed by some eight unfused
operations, and two or more queries go through cuDNN, which builds a plan of some 45 ms for each pair of numbers of
queries and columns, and each size of the buffer, that it has not met: at every step that checks drafts and at every
chunk of a prompt. Here

- up to `MOST_QUERIES` queries per row, of 16 bits: a kernel that reads the table of positions (`columns.py`) instead of
  a mask, and packed rows of 8 bits as they are (`few_queries.py`);
- chunks with up to `MOST_SCORES` scores: matrix products, which need no plan;
- larger chunks of one sequence: cuDNN over a grid of sizes, so that prompts meet the same plans (`on_grid`);
- everything else: MLX's own attention.

`install` exchanges the function in the modules of a model's files, once, at load. A cache that is not ours gets what
it got before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from treadle.cache.attend import head_by_head, over_packed
from treadle.cache.columns import BatchColumns, SoloColumns
from treadle.cache.layers import Rows
from treadle.cache.packed_rows import PackedRows
from treadle.models.few_queries import few_queries, few_queries_packed, suits, suits_packed

NAME = "scaled_dot_product_attention"
BASES = {"mlx_lm.models.base": False, "mlx_vlm.models.base": True}  # and whether its model files cut masks to length
LAYERS_AT_ONCE = 4
MOST_QUERIES = 16
MOST_SCORES = 2**26  # of all heads; in bfloat16 on an H100 they cost a model of 36 layers about half a plan
UNPACKED_PARTS = 2  # in which a layer's packed rows are unpacked for a long chunk
MOST_DIM = 128  # of a head, for cuDNN
LEAST_GRAIN = 256  # columns
GRAINS = 32  # the grid has steps of at most this share of the columns


def unfused(queries: Any, keys: Any, values: Any, scale: float) -> Any:
    """Causal attention of the last n tokens of one sequence, [1, heads, n, dim] over [1, key heads, columns, dim]."""
    _, heads, n, dim = queries.shape
    shared, total = keys.shape[1], keys.shape[2]
    grouped = (queries * scale).reshape(1, shared, heads // shared * n, dim)
    scores = (grouped @ keys.swapaxes(-1, -2)).reshape(1, shared, heads // shared, n, total)
    hidden = mx.arange(total)[None] > mx.arange(total - n, total)[:, None]
    scores = mx.where(hidden, mx.array(mx.finfo(scores.dtype).min, scores.dtype), scores)
    weights = mx.softmax(scores, axis=-1, precise=True).reshape(1, shared, -1, total)
    return (weights @ values).reshape(1, heads, n, values.shape[3])


def on_grid(queries: Any, cache: Rows, scale: float) -> Any:
    """The same by cuDNN, for numbers of queries and columns that are multiples of a grain, in buffers of that length.

    Queries of zeros are put in front, which see what comes before the chunk, and behind it, which see columns that hold
    nothing yet; what they find is cut off. The copy of the columns costs some 5 % of the attention.
    """
    n, total = queries.shape[2], cache.columns.read_to
    grain = grain_of(total)
    front, back = (total - n) % grain, -total % grain
    if total + back > cache.keys.shape[2]:
        back = 0
    asked = mx.pad(queries, [(0, 0), (0, 0), (front, back), (0, 0)]) if front or back else queries
    keys, values = (mx.contiguous(a[:, :, : total + back]) for a in (cache.keys, cache.values))
    found = mx.fast.scaled_dot_product_attention(asked, keys, values, scale=scale, mask="causal")
    return found[:, :, front : front + n]


def grain_of(total: int) -> int:
    """The step of the grid at so many columns: a power of two."""
    return max(LEAST_GRAIN, 1 << max(0, (total // GRAINS).bit_length() - 1))


def attention_over(original: Callable[..., Any], cut: bool = False) -> Callable[..., Any]:
    """The function that takes the place of `original`, the one of `BASES`; `cut`: see `BatchColumns.view_of`.

    A step of several tokens is read before the next one is built, so the device would wait while it is built: every few
    layers what was built so far is started. And what was started before that is waited for, because memory is taken
    when work is handed to the device: a long chunk would hold what all of its layers need at once.
    """
    layers = count()
    started: list[Any] = []

    def attend(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        out = compute(queries, keys, values, cache, scale, mask, sinks)
        if isinstance(cache, Rows) and cache.columns.traced:
            return out
        if queries.shape[2] > 1 and next(layers) % LAYERS_AT_ONCE == 0:
            mx.async_eval(out)  # type: ignore[no-untyped-call]
            if started:
                mx.eval(started.pop())
            if queries.shape[2] > MOST_QUERIES:
                started.append(out)
        return out

    def compute(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any) -> Any:
        found = None
        if sinks is None and type(cache) is Rows:
            found = _over_rows(queries, keys, values, cache, scale, mask, cut)
        elif sinks is None and isinstance(cache, PackedRows):
            found = _over_packed(queries, keys, values, cache, scale, mask)
        if found is not None:
            return found
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return attend


def _over_rows(queries: Any, keys: Any, values: Any, cache: Rows, scale: float, mask: Any, cut: bool) -> Any:
    """None where MLX's own attention is as good or has to do."""
    n, columns = queries.shape[2], cache.columns
    own = keys.shape[1] == cache.keys.shape[1] and keys.shape[3] == cache.keys.shape[3]  # attends to its cache as it is
    if n <= MOST_QUERIES and own and suits(queries, cache.keys, cache.values):
        seen = _seen(cache, mask, cut)
        if seen is not None:
            return few_queries(queries, cache.keys, cache.values, seen, scale, columns.read_to)
    if not isinstance(mask, str) or not isinstance(columns, SoloColumns):
        return None
    if queries.shape[1] * n * keys.shape[2] <= MOST_SCORES:
        return unfused(queries, keys, values, scale)
    whole = own and columns.read_from == 0 and keys.shape[2] == columns.read_to
    planned = queries.shape[3] <= MOST_DIM and queries.dtype in (mx.bfloat16, mx.float16)
    return on_grid(queries, cache, scale) if whole and planned else None


def _over_packed(queries: Any, keys: Any, values: Any, cache: PackedRows, scale: float, mask: Any) -> Any:
    """None where packed rows have to be unpacked, or none is read yet."""
    if queries.shape[2] > MOST_QUERIES:
        if cache.columns.read_packed == 0 or not cache.taken(keys, values):
            return None
        return head_by_head(queries, cache, scale, mask, -(-keys.shape[1] // UNPACKED_PARTS))
    if cache.columns.read_packed == 0 or not suits(queries, cache.keys, cache.values):
        return None
    # Whole, since the kernel knows how far to read; with room for rows that read no packed token but in their padding.
    packed = [buffer.whole(queries.shape[0], cache.columns.read_packed) for buffer in cache.packed]
    if not suits_packed(queries, *packed) or not cache.taken(keys, values):
        return None
    seen = cache.packed_view(mask)
    if seen is None:  # a mask from elsewhere
        return over_packed(queries, cache, scale, mask)
    own = (cache.keys, cache.values)
    return few_queries_packed(queries, own, packed, seen, scale, cache.columns.read_packed)


def _seen(cache: Rows, mask: Any, cut: bool) -> tuple[Any, Any, Any] | None:
    """The kernel's view of what `mask` lets this step see; None where MLX's own attention is as good or has to do."""
    columns = cache.columns
    if isinstance(columns, BatchColumns):
        return None if mask is None or isinstance(mask, str) else columns.view_of(mask, cut)
    whole = mask is None and columns.window is None and columns.count == 1
    return columns.view(cache.keys.shape[2]) if whole or isinstance(mask, str) else None


def install(model: nn.Module) -> int:
    """Exchange attention in the modules that define the layers of `model`; returns in how many.

    The functions of `BASES` do the same with a cache of ours. A package that is not imported has no model here.
    """
    files = [vars(sys.modules[name]) for name in {type(module).__module__ for module in model.modules()}]
    bases: list[tuple[Any, bool]] = [(vars(sys.modules[m])[NAME], cut) for m, cut in BASES.items() if m in sys.modules]
    found: list[tuple[dict[str, Any], Any, bool]] = [
        (file, base, cut) for file in files for base, cut in bases if file.get(NAME) is base
    ]
    for file, base, cut in found:
        file[NAME] = attention_over(base, cut)
    return len(found)
