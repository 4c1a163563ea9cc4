"""CUDA kernels for attention of a few queries per sequence, over exact and over packed rows. Engine thread only.

A block computes one query position of one row for the G heads that share a key head, over a part of the columns. Its
warps take columns by turns, UNROLL at a time, with a running maximum and sum each (online softmax), and are joined at
the end. Where there are several parts, `MERGE` joins them. Packed rows of 8 bits are read as they are: a lane reads the
codes of its own dimensions, a quarter of what exact rows in float32 would be and half of bfloat16.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

from treadle.cache import recent_columns
from treadle.cache.pieces import Piece
from treadle.cache.quantise import Packed
from treadle.models.cuda import Kernel
from treadle.models.kernels import numbers

log = logging.getLogger("treadle.models")

WARP = 32
MOST_WARPS = 8  # of a block: with 16, some of the kernels want more registers than a block can have
SHARED_FLOATS = 8192  # of one block, for joining what its warps found
ENOUGH_BLOCKS = 512  # about four for each processor of an H100
LEAST_PART = 128  # columns
MOST_PARTS = 32
TYPES = (mx.bfloat16, mx.float16, mx.float32)
CODE_BITS = 8  # of packed rows that are read as they are
TRIAL = 256  # columns
TRIED = ((2, TRIAL), (2, TRIAL))  # heads and columns of its keys and values
ROUNDING = 2**-5  # of what a trial finds, some 0.1 to 1: bfloat16

SETUP = """
    constexpr int E = D / 32;
    constexpr int UNROLL = 4;
    const int num_parts = gridDim.x / queries_shape[0];
    const int row = blockIdx.x / num_parts, part = blockIdx.x % num_parts, head = blockIdx.y, i = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    // Columns [first, limit); load(c, key, value) reads one of them and says whether the query sees it.
    auto sweep = [&](int first, int limit, auto load) {
        for (int start = first + warp * UNROLL; start < limit; start += WARPS * UNROLL) {
            float key[UNROLL][E], value[UNROLL][E];
            bool seen[UNROLL];
            bool any = false;
            #pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                seen[u] = start + u < limit && load(start + u, key[u], value[u]);
                any = any || seen[u];
                if (!seen[u]) for (int e = 0; e < E; ++e) key[u][e] = value[u][e] = 0.0f;
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
    };
    const T* key_row = keys + row * keys_strides[0] + head * keys_strides[1] + lane * E;
    const T* value_row = values + row * values_strides[0] + head * values_strides[1] + lane * E;
    const int* line = table + row * table_strides[0];
    auto read_exact = [&](int c, float* key, float* value) {
        for (int e = 0; e < E; ++e) {
            key[e] = static_cast<float>(key_row[c * keys_strides[2] + e]);
            value[e] = static_cast<float>(value_row[c * values_strides[2] + e]);
        }
        return true;
    };
"""
# limits: [columns to read, window or 0]
EXACT = """
    const int window = limits[1];
    const int turn = num_parts * WARPS * UNROLL;
    const int span = (limits[0] + turn - 1) / turn * WARPS * UNROLL;
    sweep(part * span, min(limits[0], (part + 1) * span), [&](int c, float* key, float* value) {
        const int p = line[c];
        return p <= here && (window <= 0 || p > here - window) && read_exact(c, key, value);
    });
"""
# limits: [exact columns to read, recent tokens, what the table's entries count from, packed tokens to read]. The last
# part reads the exact columns, the others the packed tokens.
PACKED = """
    const int edge = max(0, here + 1 - limits[1]) / BLOCK * BLOCK;
    const int packed = min(edge, limits[3]);
    const int turn = (num_parts - 1) * WARPS * UNROLL;
    const int span = (packed + turn - 1) / turn * WARPS * UNROLL;
    const int group = lane * E / GROUP;
    const unsigned char* key_codes = reinterpret_cast<const unsigned char*>(
        key_words + row * key_words_strides[0] + head * key_words_strides[1]) + lane * E;
    const unsigned char* value_codes = reinterpret_cast<const unsigned char*>(
        value_words + row * value_words_strides[0] + head * value_words_strides[1]) + lane * E;
    const long key_group = row * key_scales_strides[0] + head * key_scales_strides[1] + group;
    const long value_group = row * value_scales_strides[0] + head * value_scales_strides[1] + group;
    auto unpack = [&](const unsigned char* codes, float scaled, float bias, float* out) {
        if constexpr (E % 4 == 0) {
            for (int w = 0; w < E / 4; ++w) {
                const unsigned int word = reinterpret_cast<const unsigned int*>(codes)[w];
                for (int e = 0; e < 4; ++e) out[4 * w + e] = scaled * ((word >> (8 * e)) & 255u) + bias;
            }
        } else {
            for (int e = 0; e < E; ++e) out[e] = scaled * codes[e] + bias;
        }
    };
    if (part < num_parts - 1) {
        sweep(part * span, min(packed, (part + 1) * span), [&](int c, float* key, float* value) {
            const long k = key_group + c * key_scales_strides[2], v = value_group + c * value_scales_strides[2];
            unpack(key_codes + c * 4 * key_words_strides[2], static_cast<float>(key_scales[k]),
                   static_cast<float>(key_biases[k]), key);
            unpack(value_codes + c * 4 * value_words_strides[2], static_cast<float>(value_scales[v]),
                   static_cast<float>(value_biases[v]), value);
            return true;
        });
    } else {
        sweep(0, limits[0], [&](int c, float* key, float* value) {
            const long p = static_cast<long>(line[c]) + limits[2];
            return p <= here && p >= edge && read_exact(c, key, value);
        });
    }
"""
JOIN = """
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
        out[(at * num_parts + part) * (D + 2) + d] = above;
        if (d == 0) {
            out[(at * num_parts + part) * (D + 2) + D] = top;
            out[(at * num_parts + part) * (D + 2) + D + 1] = below;
        }
"""
# A block for each query of a head, a thread for each dimension. Every warp weighs the parts; the first one's are kept.
MERGE = """
    __shared__ float shares[MOST_PARTS + 1];
    const long at = blockIdx.x;
    const int d = threadIdx.x, lane = threadIdx.x % 32, num_parts = parts_shape[3];
    const float* mine = parts + at * num_parts * (D + 2);
    float top = -1e30f, below = 0.0f, above = 0.0f;
    for (int p = lane; p < num_parts; p += 32) top = fmaxf(top, mine[p * (D + 2) + D]);
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    for (int p = lane; p < num_parts; p += 32) {
        const float fade = __expf(mine[p * (D + 2) + D] - top);
        if (threadIdx.x < 32) shares[p] = fade;
        below += fade * mine[p * (D + 2) + D + 1];
    }
    for (int step = 16; step > 0; step /= 2) below += __shfl_xor_sync(0xffffffff, below, step);
    __syncthreads();
    #pragma unroll 16
    for (int p = 0; p < num_parts; ++p) above += shares[p] * mine[p * (D + 2) + d];
    out[at * D + d] = static_cast<T>(below > 0.0f ? above / below : 0.0f);
"""
ROWS = ["queries", "keys", "values", "table", "position", "limits", "scale"]
CODES = ["key_words", "key_scales", "key_biases", "value_words", "value_scales", "value_biases"]


@lru_cache(maxsize=4)
def _kernel(packed: bool, several: bool) -> Any:
    name = f"treadle_few_queries{'_packed' if packed else ''}{'_part' if several else ''}"
    source = SETUP + (PACKED if packed else EXACT) + JOIN.replace("STORE", PART if several else WHOLE)
    return Kernel(name, ROWS + (CODES if packed else []), ["out"], source)


@lru_cache(maxsize=1)
def _merge() -> Any:
    return Kernel("treadle_merge_parts", ["parts"], ["out"], MERGE)


def few_queries(queries: Any, keys: Any, values: Any, seen: tuple[Any, Any, Any], scale: float, reach: int) -> Any:
    """Attention of `queries` [rows, heads, n, dim] over whole buffers [slots, key heads, columns, dim].

    `seen`: int32 arrays (table [rows, columns] of the position in each column, position [rows] of each row's first
    query, limits [columns to read, window or 0]). Query i of a row sees the positions up to its own, in its window.
    `reach`: the columns to read, as known to the host.
    """
    split = parts(queries.shape[0] * keys.shape[1] * queries.shape[2], reach)
    return _launched(split)(queries, keys, values, *seen, numbers(scale))


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
    split = parts(queries.shape[0] * exact[0].shape[1] * queries.shape[2], reach)
    launched = _launched(split + 1, (recent_columns.BLOCK, keys.scheme.group_size))
    return launched(queries, *exact, *seen, numbers(scale), *keys.arrays(), *values.arrays())


@lru_cache(maxsize=32)
def _launched(split: int, packed: tuple[int, int] | None = None) -> Any:
    """The launch over so many parts, compiled: the text of a kernel is put together once for each set of shapes.

    `packed`: tokens of a block and values of a group, where packed rows are read too.
    """
    return mx.compile(partial(_launch, split=split, packed=packed))


def _launch(*inputs: Any, split: int, packed: tuple[int, int] | None) -> Any:
    queries, keys = inputs[:2]
    rows, heads, n, dim = queries.shape
    shared = keys.shape[1]
    warps = max(1, min(MOST_WARPS, SHARED_FLOATS // (heads // shared * dim)))
    shape, dtype = (queries.shape, queries.dtype) if split == 1 else ((rows, heads, n, split, dim + 2), mx.float32)
    more = [] if packed is None else list(zip(("BLOCK", "GROUP"), packed, strict=True))
    (out,) = _kernel(packed is not None, split > 1)(
        inputs=list(inputs),
        template=[("T", queries.dtype), ("G", heads // shared), ("WARPS", warps), ("D", dim), *more],
        grid=(rows * split * warps * WARP, shared, n),
        threadgroup=(warps * WARP, 1, 1),
        output_shapes=[shape],
        output_dtypes=[dtype],
    )
    if split == 1:
        return out
    (out,) = _merge()(
        inputs=[out],
        template=[("T", queries.dtype), ("D", dim), ("MOST_PARTS", MOST_PARTS)],
        grid=(rows * heads * n * dim, 1, 1),
        threadgroup=(dim, 1, 1),
        output_shapes=[queries.shape],
        output_dtypes=[queries.dtype],
    )
    return out


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
    fits = queries.dtype in TYPES and dim % WARP == 0 and group * dim <= SHARED_FLOATS
    return same and fits and _sound(queries.dtype, group, dim)


def suits_packed(queries: Any, keys: Piece, values: Piece) -> bool:
    """Whether packed rows can be read as they are, by queries that `suits`."""
    if not (isinstance(keys, Packed) and isinstance(values, Packed)):
        return False
    size, group = keys.scheme.group_size, queries.shape[1] // keys.weights.shape[1]
    alike = all(piece.scheme.bits == CODE_BITS and piece.scheme.group_size == size for piece in (keys, values))
    return alike and _sound(queries.dtype, group, queries.shape[3], size)


@lru_cache(maxsize=16)
def _sound(dtype: Any, group: int, dim: int, packed: int = 0) -> bool:
    """Whether the kernels can be launched here and compute what MLX does, up to rounding; tried once for each shape.

    `packed`: values of a group of codes; 0: exact rows.
    """
    shapes = (2 * group, 2), *TRIED
    arrays = [mx.random.normal((1, h, n, dim), key=mx.random.key(i)) for i, (h, n) in enumerate(shapes)]
    queries, keys, values = (a.astype(dtype) for a in arrays)
    told = mx.arange(TRIAL, dtype=mx.int32)[None], mx.array([TRIAL - 2], mx.int32)
    try:
        if packed:
            found, keys, values = _packed_trial(queries, (keys, values), told, packed)
        else:
            seen = (*told, mx.array([TRIAL, 0], mx.int32))
            found = [_launched(split)(queries, keys, values, *seen, numbers(dim**-0.5)) for split in (1, 2)]
        wanted = mx.fast.scaled_dot_product_attention(
            *(a.astype(mx.float32) for a in (queries, keys, values)), scale=dim**-0.5, mask=None if packed else "causal"
        )
        off = float(mx.stack([mx.abs(one.astype(mx.float32) - wanted).max() for one in found]).max())
    except RuntimeError as error:  # of the compiler, or of the device
        log.warning("The kernel for attention of few queries cannot be used here, MLX's own is: %s", error)
        return False
    if not off <= ROUNDING:
        log.warning("Attention of few queries by the kernel is off by %.2g here; MLX's own is used.", off)
    return off <= ROUNDING


def _packed_trial(queries: Any, rows: tuple[Any, Any], told: tuple[Any, Any], size: int) -> tuple[list[Any], Any, Any]:
    """What queries find over rows of which all are packed, and these rows as they are then."""
    codes = [mx.quantize(a.astype(mx.bfloat16), group_size=size, bits=CODE_BITS) for a in rows]
    table, position = told
    seen = table, position + recent_columns.BLOCK, mx.array([0, 0, 0, TRIAL], mx.int32)
    launched = _launched(2, (recent_columns.BLOCK, size))
    found = launched(queries, *rows, *seen, numbers(queries.shape[3] ** -0.5), *codes[0], *codes[1])
    keys, values = (mx.dequantize(*code, group_size=size, bits=CODE_BITS) for code in codes)
    return [found], keys, values
