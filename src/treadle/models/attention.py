"""Attention of a few queries per sequence on CUDA, in one launch and for any length. Engine thread only.

What MLX 0.32 does there by itself: one query with an array mask (every batch) is computed by some eight unfused
operations, and two or more queries go through cuDNN, which builds a plan of some 40 ms for each length it has not met,
that is at every step that checks drafts and at every short chunk. Here

- up to `MOST_QUERIES` queries per row: one kernel that reads the table of positions (`columns.py`) instead of a mask;
- up to `MOST_UNFUSED` queries of one sequence: matrix products, which need no plan;
- everything else: MLX's own attention.

`install` exchanges the function in the modules of a model's files, once, at load. A cache that is not ours gets what
it got before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import lru_cache
from itertools import count
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from treadle.cache.columns import BatchColumns, SoloColumns
from treadle.cache.layers import Rows

NAME = "scaled_dot_product_attention"
BASES = {"mlx_lm.models.base": False, "mlx_vlm.models.base": True}  # and whether its model files cut masks to length
LAYERS_AT_ONCE = 4
MOST_QUERIES = 16
MOST_UNFUSED = 128
WARP = 32
MOST_WARPS = 16
SHARED_FLOATS = 8192  # of one block, for joining what its warps found
ENOUGH_BLOCKS = 256  # about two for each processor of an H100
LEAST_PART = 512  # columns
MOST_PARTS = 8
TYPES = (mx.bfloat16, mx.float16, mx.float32)

# A block computes one query position of one row for the G heads that share a key head. Its warps take columns by
# turns, UNROLL at a time, with a running maximum and sum each (online softmax), and are joined at the end. With
# SPLIT > 1 a block sees one part of the columns only, and `MERGE` joins the parts.
SOURCE = """
    const int row = blockIdx.x / SPLIT, part = blockIdx.x % SPLIT, head = blockIdx.y, i = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int E = D / 32;
    constexpr int UNROLL = 4;
    const int window = limits[1];
    const int span = (limits[0] + SPLIT * WARPS * UNROLL - 1) / (SPLIT * WARPS * UNROLL) * WARPS * UNROLL;
    const int first = part * span, limit = min(limits[0], first + span);
    const int here = position[row] + i;
    float query[G][E], sum[G][E], best[G], total[G];
    for (int g = 0; g < G; ++g) {
        const long at = row * queries_strides[0] + (head * G + g) * queries_strides[1] + i * queries_strides[2];
        best[g] = -1e30f;
        total[g] = 0.0f;
        for (int e = 0; e < E; ++e) {
            query[g][e] = static_cast<float>(queries[at + lane * E + e]) * scale[0];
            sum[g][e] = 0.0f;
        }
    }
    const T* key_row = keys + row * keys_strides[0] + head * keys_strides[1] + lane * E;
    const T* value_row = values + row * values_strides[0] + head * values_strides[1] + lane * E;
    const int* line = table + row * table_strides[0];
    for (int start = first + warp * UNROLL; start < limit; start += WARPS * UNROLL) {
        float key[UNROLL][E], value[UNROLL][E];
        bool seen[UNROLL];
        bool any = false;
        #pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int c = start + u;
            const int p = c < limit ? line[c] : here + 1;
            seen[u] = p <= here && (window <= 0 || p > here - window);
            any = any || seen[u];
            for (int e = 0; e < E; ++e) {
                key[u][e] = seen[u] ? static_cast<float>(key_row[c * keys_strides[2] + e]) : 0.0f;
                value[u][e] = seen[u] ? static_cast<float>(value_row[c * values_strides[2] + e]) : 0.0f;
            }
        }
        if (!any) continue;
        #pragma unroll
        for (int g = 0; g < G; ++g) {
            float score[UNROLL];
            float top = best[g];
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                float s = 0.0f;
                for (int e = 0; e < E; ++e) s += query[g][e] * key[u][e];
                for (int step = 16; step > 0; step /= 2) s += __shfl_xor_sync(0xffffffff, s, step);
                score[u] = seen[u] ? s : -1e30f;
                top = fmaxf(top, score[u]);
            }
            const float fade = __expf(best[g] - top);
            best[g] = top;
            total[g] *= fade;
            for (int e = 0; e < E; ++e) sum[g][e] *= fade;
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                const float weight = seen[u] ? __expf(score[u] - top) : 0.0f;
                total[g] += weight;
                for (int e = 0; e < E; ++e) sum[g][e] += weight * value[u][e];
            }
        }
    }
    __shared__ float bests[WARPS][G], totals[WARPS][G], sums[WARPS][G][D];
    for (int g = 0; g < G; ++g) {
        if (lane == 0) { bests[warp][g] = best[g]; totals[warp][g] = total[g]; }
        for (int e = 0; e < E; ++e) sums[warp][g][lane * E + e] = sum[g][e];
    }
    __syncthreads();
    for (int j = threadIdx.x; j < G * D; j += WARPS * 32) {
        const int g = j / D, d = j % D;
        float top = -1e30f;
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, bests[w][g]);
        float above = 0.0f, below = 0.0f;
        for (int w = 0; w < WARPS; ++w) {
            const float fade = __expf(bests[w][g] - top);
            above += fade * sums[w][g][d];
            below += fade * totals[w][g];
        }
        const long at = ((static_cast<long>(row) * gridDim.y + head) * G + g) * gridDim.z + i;
        STORE
    }
"""
WHOLE = "out[at * D + d] = static_cast<T>(below > 0.0f ? above / below : 0.0f);"
PART = """
        out[(at * SPLIT + part) * (D + 2) + d] = above;
        if (d == 0) {
            out[(at * SPLIT + part) * (D + 2) + D] = top;
            out[(at * SPLIT + part) * (D + 2) + D + 1] = below;
        }
"""
MERGE = """
    const long at = blockIdx.x;
    const int d = threadIdx.x;
    const float* mine = parts + at * SPLIT * (D + 2);
    float top = -1e30f;
    for (int p = 0; p < SPLIT; ++p) top = fmaxf(top, mine[p * (D + 2) + D]);
    float above = 0.0f, below = 0.0f;
    for (int p = 0; p < SPLIT; ++p) {
        const float fade = __expf(mine[p * (D + 2) + D] - top);
        above += fade * mine[p * (D + 2) + d];
        below += fade * mine[p * (D + 2) + D + 1];
    }
    out[at * D + d] = static_cast<T>(below > 0.0f ? above / below : 0.0f);
"""


@lru_cache(maxsize=2)
def _kernel(split: bool) -> Any:
    return mx.fast.cuda_kernel(
        name="treadle_few_queries_part" if split else "treadle_few_queries",
        input_names=["queries", "keys", "values", "table", "position", "limits", "scale"],
        output_names=["out"],
        source=SOURCE.replace("STORE", PART if split else WHOLE),
        ensure_row_contiguous=False,
    )


@lru_cache(maxsize=1)
def _merge() -> Any:
    return mx.fast.cuda_kernel(name="treadle_merge_parts", input_names=["parts"], output_names=["out"], source=MERGE)


@lru_cache(maxsize=8)
def _scale(scale: float) -> Any:
    found = mx.array([scale], mx.float32)
    mx.eval(found)  # it outlives the step
    return found


def few_queries(queries: Any, keys: Any, values: Any, seen: tuple[Any, Any, Any], scale: float, reach: int) -> Any:
    """Attention of `queries` [rows, heads, n, dim] over whole buffers [slots, key heads, columns, dim].

    `seen`: int32 arrays (table [rows, columns] of the position in each column, position [rows] of each row's first
    query, limits [columns to read, window or 0]). Query i of a row sees the positions up to its own, in its window.
    `reach`: the columns to read, as known to the host.
    """
    rows, heads, n, dim = queries.shape
    shared = keys.shape[1]
    group = heads // shared
    warps = max(1, min(MOST_WARPS, SHARED_FLOATS // (group * dim)))
    split = parts(rows * shared * n, reach)
    sizes = [("D", dim), ("SPLIT", split)]
    shape, dtype = (queries.shape, queries.dtype) if split == 1 else ((rows, heads, n, split, dim + 2), mx.float32)
    (out,) = _kernel(split > 1)(
        inputs=[queries, keys, values, *seen, _scale(scale)],
        template=[("T", queries.dtype), ("G", group), ("WARPS", warps), *sizes],
        grid=(rows * split * warps * WARP, shared, n),
        threadgroup=(warps * WARP, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    if split == 1:
        return out
    (out,) = _merge()(
        inputs=[out],
        template=[("T", queries.dtype), *sizes],
        grid=(rows * heads * n * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return out


def parts(blocks: int, reach: int) -> int:
    """Into how many parts the columns are split so that few blocks over many columns fill the device: 1, 2, 4 or 8."""
    split = 1
    while split < MOST_PARTS and blocks * split < ENOUGH_BLOCKS and reach >= 2 * split * LEAST_PART:
        split *= 2
    return split


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


def attention_over(original: Callable[..., Any], cut: bool = False) -> Callable[..., Any]:
    """The function that takes the place of `original`, the one of `BASES`; `cut`: see `BatchColumns.view_of`.

    A step of several tokens is read before the next one is built, so the device would wait while it is built: every few
    layers what was built so far is started.
    """
    layers = count()

    def attend(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        out = compute(queries, keys, values, cache, scale, mask, sinks)
        if queries.shape[2] > 1 and next(layers) % LAYERS_AT_ONCE == 0:
            mx.async_eval(out)  # type: ignore[no-untyped-call]
        return out

    def compute(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any) -> Any:
        n = queries.shape[2]
        if type(cache) is Rows and sinks is None and n <= MOST_UNFUSED:
            seen = _seen(cache, n, mask, cut) if n <= MOST_QUERIES and _suits(queries, keys, cache) else None
            if seen is not None:
                return few_queries(queries, cache.keys, cache.values, seen, scale, cache.columns.read_to)
            if n > 1 and isinstance(mask, str) and isinstance(cache.columns, SoloColumns):
                return unfused(queries, keys, values, scale)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return attend


def _suits(queries: Any, keys: Any, cache: Rows) -> bool:
    """Whether the kernel has been written for these shapes, and the layer attends to its cache as it is."""
    dim, own = queries.shape[3], cache.keys
    group = queries.shape[1] // own.shape[1]
    same = own.dtype == queries.dtype and cache.values.shape[3] == own.shape[3] == keys.shape[3] == dim
    fits = queries.dtype in TYPES and dim % WARP == 0 and group * dim <= SHARED_FLOATS
    return same and fits and keys.shape[1] == own.shape[1]


def _seen(cache: Rows, n: int, mask: Any, cut: bool) -> tuple[Any, Any, Any] | None:
    """The kernel's view of what `mask` lets this step see; None where MLX's own attention is as good or has to do."""
    columns = cache.columns
    if isinstance(columns, BatchColumns):
        return None if mask is None or isinstance(mask, str) else columns.view_of(mask, cut)
    return columns.view(cache.keys.shape[2]) if n > 1 and isinstance(mask, str) else None


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
