"""What a decoder layer computes between its products for few tokens, by MLX or by small CUDA kernels.

On CUDA every operation costs the host some 3 us, so that many small ones take longer to hand over than to compute. A
kernel stands for several of them and rounds where they do. `checked_kernels` compares each with MLX's own operations on
the device; one that differs, or cannot be built, is left out. Engine thread only.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from treadle.models.cuda import Kernel, bits_of

log = logging.getLogger("treadle.models")

Writer = Callable[[Any, Any, Any, Any, Any], Any]
Settings = tuple[tuple[str, int], ...]

WARP = 32
MOST_THREADS = 1024
TRIAL_COLUMNS, TRIAL_COLUMN = 19, 11  # of buffers, and where a trial writes
ADD_NORM, HEADS, HEADS_INTO, GATED = "add_norm", "heads", "heads_into", "gated"
KERNELS = (ADD_NORM, HEADS, HEADS_INTO, GATED)
# What a kernel's result may differ by from MLX's own, as a share of the largest number: about two roundings.
ROUNDING = {mx.bfloat16: 2**-6, mx.float16: 2**-9, mx.float32: 2**-12}

# One block for each row.
ADD_NORM_SOURCE = """
    constexpr int E = (S + THREADS - 1) / THREADS;
    __shared__ float sums[32];
    const int row = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float mine[E];
    float total = 0.0f;
    #pragma unroll
    for (int e = 0; e < E; ++e) {
        const int d = e * THREADS + threadIdx.x;
        mine[e] = 0.0f;
        if (d < S) {
            const T both = static_cast<T>(static_cast<float>(stream[row * S + d])
                                          + static_cast<float>(branch[row * S + d]));
            sum[row * S + d] = both;
            mine[e] = static_cast<float>(both);
        }
        total += mine[e] * mine[e];
    }
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
    if (lane == 0) sums[warp] = total;
    __syncthreads();
    total = lane < THREADS / 32 ? sums[lane] : 0.0f;
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
    const float factor = rsqrtf(total / S + __int_as_float(EPS));
    #pragma unroll
    for (int e = 0; e < E; ++e) {
        const int d = e * THREADS + threadIdx.x;
        if (d < S) {
            const float scaled = static_cast<float>(static_cast<T>(mine[e] * factor));
            normed[row * S + d] = static_cast<T>(static_cast<float>(weight[d]) * scaled);
        }
    }
"""
# One warp for each head of a token; a row has n of them. SCALE is that of positions, PACE log2 of the base. Keys and
# values go where KEYS_AT and VALUES_AT say.
HEADS_SOURCE = """
    __shared__ float line[D];
    const int token = blockIdx.x / (H + 2 * HK), head = blockIdx.x % (H + 2 * HK), lane = threadIdx.x;
    const int n = gridDim.x / (H + 2 * HK) / position_shape[0], row = token / n, i = token % n;
    const T* from = stacked + (token * (H + 2 * HK) + head) * D;
    if (head >= H + HK) {
        T* out = VALUES_AT;
        for (int d = lane; d < D; d += 32) out[d] = from[d];
        return;
    }
    const bool asks = head < H;
    T* to = asks ? queries + ((row * H + head) * n + i) * D : KEYS_AT;
    float total = 0.0f;
    for (int d = lane; d < D; d += 32) {
        line[d] = static_cast<float>(from[d]);
        total += line[d] * line[d];
    }
    if constexpr (NORM != 0) {
        for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
        const float factor = rsqrtf(total / D + __int_as_float(EPS));
        for (int d = lane; d < D; d += 32) {
            const float scaled = static_cast<float>(static_cast<T>(line[d] * factor));
            const float weight = static_cast<float>(asks ? query_norm[d] : key_norm[d]);
            line[d] = static_cast<float>(static_cast<T>(weight * scaled));
        }
    }
    __syncwarp();
    const float place = __int_as_float(SCALE) * static_cast<float>(position[row] + i);
    for (int p = lane; p < DIMS / 2; p += 32) {
        float pace;
        if constexpr (FREQS != 0) pace = 1.0f / static_cast<float>(freqs[p]);
        else pace = exp2f(-(static_cast<float>(p) / static_cast<float>(DIMS / 2)) * __int_as_float(PACE));
        const float angle = place * pace;
        const float along = cosf(angle), across = sinf(angle);
        const int one = TRADITIONAL != 0 ? 2 * p : p, two = TRADITIONAL != 0 ? one + 1 : one + DIMS / 2;
        to[one] = static_cast<T>(line[one] * along - line[two] * across);
        to[two] = static_cast<T>(line[one] * across + line[two] * along);
    }
    for (int d = DIMS + lane; d < D; d += 32) to[d] = static_cast<T>(line[d]);
"""
HEADS_APART = HEADS_SOURCE.replace("KEYS_AT", "keys + ((row * HK + head - H) * n + i) * D").replace(
    "VALUES_AT", "values + ((row * HK + head - H - HK) * n + i) * D"
)
_HELD = "const_cast<T*>({0}) + ((row * HK + {1}) * static_cast<long>({0}_shape[2]) + column[0] + i) * D"
HEADS_IN_PLACE = HEADS_SOURCE.replace("KEYS_AT", _HELD.format("keys", "head - H")).replace(
    "VALUES_AT", _HELD.format("values", "head - H - HK")
)
SIGMOID = """
    auto sigmoid = [](T x) {
        const T grown = static_cast<T>(expf(fabsf(static_cast<float>(x))));
        const T below = static_cast<T>(1.0f + static_cast<float>(grown));
        const T share = static_cast<T>(1.0f / static_cast<float>(below));
        return static_cast<float>(x) < 0.0f ? share : static_cast<T>(1.0f - static_cast<float>(share));
    };
"""
GATED_SOURCE = (
    SIGMOID
    + """
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at >= stacked_shape[0] * N) return;
    const int row = at / N, d = at % N;
    const T gate = stacked[row * 2 * N + d];
    const T share = sigmoid(gate);
    const T opened = static_cast<T>(static_cast<float>(gate) * static_cast<float>(share));
    out[at] = static_cast<T>(static_cast<float>(opened) * static_cast<float>(stacked[(row * 2 + 1) * N + d]));
"""
)


@dataclass(frozen=True, slots=True)
class Turn:
    """What a rotary embedding is made of: pairs of the first `dims` numbers of a head turn by position."""

    dims: int
    traditional: bool
    scale: float  # of positions
    base: float | None
    freqs: Any = None  # float32 [dims / 2], instead of a base


@dataclass(frozen=True, slots=True)
class Heads:
    """How the stacked product of a layer becomes queries, keys and values."""

    num_heads: int
    num_kv_heads: int
    dim: int
    rope: Any  # called with an array offset, where `turn` does not say all that it does
    turn: Turn | None = None
    query_norm: Any = None  # [dim], and so is the next
    key_norm: Any = None
    eps: float = 0.0


class Plain:
    """The pieces by MLX's own operations."""

    def add_norm(self, stream: Any, branch: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        """The sum of both, [rows, size], and it normed."""
        total = stream + branch
        return total, mx.fast.rms_norm(total, weight, eps)

    def heads(self, stacked: Any, position: Any, n: int, heads: Heads) -> tuple[Any, Any, Any]:
        """From [rows * n, (heads + 2 kv heads) * dim] queries, keys and values [rows, heads, n, dim], turned.

        `position`: int32 [rows], where the first of the `n` tokens of each row stands.
        """
        rows, dim = position.shape[0], heads.dim
        first, second = heads.num_heads * dim, (heads.num_heads + heads.num_kv_heads) * dim
        queries, keys, values = (
            part.reshape(rows, -1, 1, dim) if n == 1 else part.reshape(rows, n, -1, dim).swapaxes(1, 2)
            for part in (stacked[:, :first], stacked[:, first:second], stacked[:, second:])
        )
        if heads.query_norm is not None:
            queries = mx.fast.rms_norm(queries, heads.query_norm, heads.eps)
            keys = mx.fast.rms_norm(keys, heads.key_norm, heads.eps)
        return heads.rope(queries, offset=position), heads.rope(keys, offset=position), values

    def writer(self, heads: Heads, dtype: Any) -> Writer | None:
        """What does the same with heads of this type and gives queries; keys and values go into buffers, in place.

        None where nothing does. It is called with (stacked, position, keys, values, column), the buffers [slots, kv
        heads, columns, dim] and int32 [1], the column of each row's first token. MLX takes arrays for unchanging and
        does not know of it: what reads the buffers in the same evaluation has to read the queries too.
        """
        return None

    def gated(self, stacked: Any) -> Any:
        """SwiGLU of [rows, gate and up side by side]."""
        gate, up = mx.split(stacked, 2, axis=-1)
        return nn.silu(gate) * up


class Kernels(Plain):
    """The same by CUDA kernels, as far as they are `usable` and made for the types at hand."""

    def __init__(self, usable: tuple[str, ...] = KERNELS) -> None:
        self.usable = usable

    def add_norm(self, stream: Any, branch: Any, weight: Any, eps: float) -> tuple[Any, Any]:
        rows, size = stream.shape
        if ADD_NORM not in self.usable or not _alike(stream, branch, weight):
            return super().add_norm(stream, branch, weight, eps)
        threads = min(MOST_THREADS, -(-size // WARP) * WARP)
        total, normed = _kernel(ADD_NORM)(
            inputs=[stream, branch, weight],
            template=[("T", stream.dtype), ("S", size), ("THREADS", threads), ("EPS", bits_of(eps))],
            grid=(rows * threads, 1, 1),
            threadgroup=(threads, 1, 1),
            output_shapes=[stream.shape, stream.shape],
            output_dtypes=[stream.dtype, stream.dtype],
        )
        return total, normed

    def heads(self, stacked: Any, position: Any, n: int, heads: Heads) -> tuple[Any, Any, Any]:
        if HEADS not in self.usable or heads.turn is None or not _alike(stacked, *_norms(heads)):
            return super().heads(stacked, position, n, heads)
        queries, keys, values = _heads(_settings(heads), stacked, position, *_more(heads, stacked))
        return queries, keys, values

    def writer(self, heads: Heads, dtype: Any) -> Writer | None:
        if HEADS_INTO not in self.usable or heads.turn is None or any(a.dtype != dtype for a in _norms(heads)):
            return None
        launch = _compiled_heads(_settings(heads))

        def write(stacked: Any, position: Any, keys: Any, values: Any, column: Any) -> Any:
            return launch(stacked, position, *_more(heads, stacked), keys, values, column)[0]

        return write

    def gated(self, stacked: Any) -> Any:
        if GATED not in self.usable or not _alike(stacked):
            return super().gated(stacked)
        rows, size = stacked.shape[0], stacked.shape[1] // 2
        (out,) = _kernel(GATED)(
            inputs=[stacked],
            template=[("T", stacked.dtype), ("N", size)],
            grid=(rows * size, 1, 1),
            threadgroup=(min(256, rows * size), 1, 1),
            output_shapes=[(rows, size)],
            output_dtypes=[stacked.dtype],
        )
        return out


def _norms(heads: Heads) -> list[Any]:
    return [] if heads.query_norm is None else [heads.query_norm, heads.key_norm]


def _more(heads: Heads, stacked: Any) -> list[Any]:
    """What the kernels read of a layer: `stacked` stands for what it does not have."""
    freqs = None if heads.turn is None else heads.turn.freqs
    return [*(_norms(heads) or [stacked, stacked]), stacked if freqs is None else freqs]


def _settings(heads: Heads) -> Settings:
    """The constants of the kernels for such heads."""
    turn = heads.turn
    assert turn is not None
    paces = 0.0 if turn.base is None else math.log2(turn.base)
    return (
        *(("D", heads.dim), ("H", heads.num_heads), ("HK", heads.num_kv_heads)),
        *(("NORM", int(heads.query_norm is not None)), ("DIMS", turn.dims), ("EPS", bits_of(heads.eps))),
        *(("SCALE", bits_of(turn.scale)), ("PACE", bits_of(paces))),
        *(("FREQS", int(turn.freqs is not None)), ("TRADITIONAL", int(turn.traditional))),
    )


@lru_cache(maxsize=16)
def _compiled_heads(settings: Settings) -> Any:
    """One function for all layers with such heads: it is traced once for each size of their buffers."""
    return mx.compile(partial(_heads, settings))


def _heads(settings: Settings, stacked: Any, position: Any, *more: Any) -> list[Any]:
    """`more`: `_more`, and buffers with a column where keys and values are written in place."""
    size = dict(settings)
    rows, count, shared = position.shape[0], size["H"], size["HK"]
    tokens, into = stacked.shape[0], len(more) > len(READ) - 2
    shapes = [(rows, number, tokens // rows, size["D"]) for number in ((count,) if into else (count, shared, shared))]
    found: list[Any] = _kernel(HEADS_INTO if into else HEADS)(
        inputs=[stacked, position, *more],
        template=[("T", stacked.dtype), *settings],
        grid=(tokens * (count + 2 * shared) * WARP, 1, 1),
        threadgroup=(WARP, 1, 1),
        output_shapes=shapes,
        output_dtypes=[stacked.dtype] * len(shapes),
    )
    return found


READ = ["stacked", "position", "query_norm", "key_norm", "freqs"]
SOURCES = {
    ADD_NORM: (["stream", "branch", "weight"], ["sum", "normed"], ADD_NORM_SOURCE),
    HEADS: (READ, ["queries", "keys", "values"], HEADS_APART),
    HEADS_INTO: ([*READ, "keys", "values", "column"], ["queries"], HEADS_IN_PLACE),
    GATED: (["stacked"], ["out"], GATED_SOURCE),
}


@lru_cache(maxsize=len(SOURCES))
def _kernel(name: str) -> Any:
    inputs, outputs, source = SOURCES[name]
    return Kernel(f"treadle_{name}", inputs, outputs, source)


def _alike(*arrays: Any) -> bool:
    return arrays[0].dtype in ROUNDING and all(a.dtype == arrays[0].dtype for a in arrays)


def checked_kernels(heads: Heads, size: int, width: int, dtype: Any) -> Plain:
    """The pieces for layers of these measures, by kernels where they give what MLX's own operations give here.

    `size` of the hidden state, `width` of the MLP. Some short trials, and the time to build the kernels.
    """
    if dtype not in ROUNDING:
        return Plain()
    # In float32 attention is MLX's, which may copy keys without waiting for the kernel that writes them.
    names = [name for name in KERNELS if name != HEADS_INTO or dtype != mx.float32]
    usable = tuple(name for name in names if _agrees(name, heads, size, width, dtype))
    return Kernels(usable) if usable else Plain()


def _agrees(name: str, heads: Heads, size: int, width: int, dtype: Any) -> bool:
    try:
        worst = difference(name, Kernels((name,)), heads, size, width, dtype)
    except (RuntimeError, ValueError) as error:  # of the compiler on this machine
        log.warning("The kernel %s is left out: %s", name, str(error).strip().splitlines()[0] if str(error) else error)
        return False
    if not worst <= ROUNDING[dtype]:
        log.warning("The kernel %s is left out: its result is off by %.2g.", name, worst)
        return False
    return True


def difference(name: str, pieces: Plain, heads: Heads, size: int, width: int, dtype: Any) -> float:
    """The largest difference of a piece from MLX's own operations, as a share of the largest number.

    Over one row and over three, which bring three tokens each where that matters. NaN where a result is not finite.
    """
    worst = 0.0
    for rows in (1, 3):
        for found, wanted in zip(
            _tried(name, pieces, heads, size, width, dtype, rows),
            _tried(name, Plain(), heads, size, width, dtype, rows),
            strict=True,
        ):
            expected, given = _values(wanted), _values(found)
            if not np.isfinite(given).all():
                return math.nan
            worst = max(worst, float(np.abs(expected - given).max() / np.abs(expected).max()))
    return worst


def _tried(name: str, pieces: Plain, heads: Heads, size: int, width: int, dtype: Any, rows: int) -> tuple[Any, ...]:
    if name == ADD_NORM:
        stream, branch, weight = _trial(dtype, (rows, size), (rows, size), (size,))
        return pieces.add_norm(stream, branch, weight, 1e-5)
    if name == GATED:
        return (pieces.gated(*_trial(dtype, (rows, 2 * width))),)
    stacked = _trial(dtype, (rows * rows, (heads.num_heads + 2 * heads.num_kv_heads) * heads.dim))[0]
    position = mx.arange(7, 7 + 401 * rows, 401, dtype=mx.int32)
    if name == HEADS or (write := pieces.writer(heads, dtype)) is None:
        return pieces.heads(stacked, position, rows, heads)
    held = [mx.zeros((rows + 1, heads.num_kv_heads, TRIAL_COLUMNS, heads.dim), dtype) for _ in range(2)]
    mx.eval(held)
    queries = write(stacked, position, held[0], held[1], mx.array([TRIAL_COLUMN], mx.int32))
    mx.eval(queries)  # or what was written might be read before it is there
    return queries, *(a[:rows, :, TRIAL_COLUMN : TRIAL_COLUMN + rows] for a in held)


def _values(a: Any) -> NDArray[np.float32]:
    return np.array(a.astype(mx.float32))


def _trial(dtype: Any, *shapes: tuple[int, ...]) -> list[Any]:
    """The same random arrays at every call."""
    return [(2 * mx.random.normal(shape, key=mx.random.key(11 + i))).astype(dtype) for i, shape in enumerate(shapes)]
