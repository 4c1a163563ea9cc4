"""CUDA kernels for the product of one row with the weights of a linear layer. Engine thread only.

Decoding one sequence reads every weight once and computes next to nothing, so all that counts is how fast weights
arrive. MLX 0.32 reads 2.1 TB/s of bfloat16 weights and 0.4 to 0.7 of 4-bit ones on an H100 whose memory gives 2.9. Here
a warp computes `OUTPUTS` outputs; its lanes read 16 bytes of each at a time, and several reads are under way at once.

A code of 4 or 8 bits becomes a number without a conversion, which the device has few units for: put into the mantissa
of 2^23 it is that number and itself, at its place in the word, and the power of two of the place is taken from the row
instead. Sums are float32, and rounded once.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

log = logging.getLogger("treadle.models")

WARP = 32
WARPS = 8  # of a block
OUTPUTS = 1  # of a warp: measured to be as fast as two with weights of 16 bits, and faster with 4
BYTES = 16  # that a lane reads at once
TYPES = (mx.bfloat16, mx.float16)
BITS = (4, 8)
ROUNDING = 2**-7  # of the largest output: one rounding to bfloat16


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are packed, in the affine mode of `mx.quantize`."""

    group_size: int
    bits: int


BEGIN = """
    const long N = w_shape[0];
    const int lane = threadIdx.x % 32;
    const long first = (static_cast<long>(blockIdx.x) * WARPS + threadIdx.x / 32) * OUTPUTS;
    if (first >= N) return;  // a warp leaves as a whole
    float sum[OUTPUTS];
    for (int o = 0; o < OUTPUTS; ++o) sum[o] = 0.0f;
"""
DENSE = """
    const int K = w_shape[1];
    #pragma unroll 4
    for (int k = lane * 8; k < K; k += 256) {
        uint4 weights[OUTPUTS];
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const long n = min(first + o, N - 1);
            weights[o] = __ldg(reinterpret_cast<const uint4*>(w + n * K + k));
        }
        const uint4 row = *reinterpret_cast<const uint4*>(x + k);
        const T* values = reinterpret_cast<const T*>(&row);
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const T* mine = reinterpret_cast<const T*>(&weights[o]);
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum[o] += static_cast<float>(values[e]) * static_cast<float>(mine[e]);
        }
    }
"""
PACKED = """
    constexpr int CODES = 128 / BITS;  // of a lane at once
    constexpr int EACH = 32 / BITS;  // of a word
    constexpr int HALF = EACH / 2;  // that lie low enough in it
    const int K = w_shape[1] * EACH;
    constexpr unsigned int MASK = (1u << BITS) - 1;
    constexpr float PLACE = 1.0f / (1 << BITS);
    #pragma unroll 2
    for (int k = lane * CODES; k < K; k += 32 * CODES) {
        uint4 words[OUTPUTS];
        float scale[OUTPUTS], bias[OUTPUTS];
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const long n = min(first + o, N - 1);
            words[o] = __ldg(reinterpret_cast<const uint4*>(w + (n * K + k) / EACH));
            scale[o] = static_cast<float>(scales[n * (K / GROUP) + k / GROUP]);
            bias[o] = static_cast<float>(biases[n * (K / GROUP) + k / GROUP]);
        }
        float row[CODES], total = 0.0f;
        #pragma unroll
        for (int c = 0; c < CODES; c += 8) {
            const uint4 piece = *reinterpret_cast<const uint4*>(x + k + c);
            const T* values = reinterpret_cast<const T*>(&piece);
            #pragma unroll
            for (int e = 0; e < 8; ++e) row[c + e] = static_cast<float>(values[e]);
        }
        #pragma unroll
        for (int c = 0; c < CODES; ++c) total += row[c];
        #pragma unroll
        for (int c = 0; c < CODES; ++c) {
            float place = 1.0f;
            for (int i = 0; i < c % HALF; ++i) place *= PLACE;
            row[c] *= place;
        }
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const unsigned int* mine = reinterpret_cast<const unsigned int*>(&words[o]);
            float dot = 0.0f;
            #pragma unroll
            for (int c = 0; c < CODES; ++c) {
                const unsigned int half = c % EACH < HALF ? mine[c / EACH] : mine[c / EACH] >> 16;
                const unsigned int code = half & (MASK << (BITS * (c % HALF)));
                dot += row[c] * (__uint_as_float(0x4B000000u | code) - 8388608.0f);
            }
            sum[o] += scale[o] * dot + bias[o] * total;
        }
    }
"""
END = """
    #pragma unroll
    for (int o = 0; o < OUTPUTS; ++o) {
        for (int step = 16; step > 0; step /= 2) sum[o] += __shfl_xor_sync(0xffffffff, sum[o], step);
        if (lane == 0 && first + o < N) out[first + o] = static_cast<T>(sum[o]);
    }
"""


@lru_cache(maxsize=2)
def _kernel(packed: bool) -> Any:
    return mx.fast.cuda_kernel(
        name="treadle_gemv_packed" if packed else "treadle_gemv",
        input_names=["x", "w", "scales", "biases"] if packed else ["x", "w"],
        output_names=["out"],
        source=BEGIN + (PACKED if packed else DENSE) + END,
    )


@lru_cache(maxsize=16)
def _compiled(form: Form | None) -> Any:
    """The launch, compiled: the text of a kernel is put together once for each set of shapes."""
    return mx.compile(partial(_launch, form))


def _launch(form: Form | None, x: Any, *weights: Any) -> Any:
    outputs = weights[0].shape[0]
    blocks = -(-outputs // (WARPS * OUTPUTS))
    more = [] if form is None else [("GROUP", form.group_size), ("BITS", form.bits)]
    (out,) = _kernel(form is not None)(
        inputs=[x, *weights],
        template=[("T", x.dtype), ("WARPS", WARPS), ("OUTPUTS", OUTPUTS), *more],
        grid=(blocks * WARPS * WARP, 1, 1),
        threadgroup=(WARPS * WARP, 1, 1),
        output_shapes=[(*x.shape[:-1], outputs)],
        output_dtypes=[x.dtype],
    )
    return out


def knows(layer: Any) -> bool:
    """Whether `row_product` computes with the weights of a linear layer: on CUDA, of types that the kernels read."""
    if not mx.cuda.is_available():
        return False
    form = _form(layer)
    if form is not None and (layer.mode != "affine" or form.bits not in BITS):
        return False
    weights = _weights(layer)
    dtype, per_value = weights[-1].dtype, 16 if form is None else form.bits
    inputs = weights[0].shape[1] * weights[0].dtype.size * 8 // per_value
    at_once = 8 * BYTES // per_value
    fits = inputs % at_once == 0 and (form is None or form.group_size % at_once == 0)
    return dtype in TYPES and fits and _sound(form, dtype)


def row_product(layer: Any, x: Any) -> Any:
    """One row, [.., inputs] with 1 for all other sizes, through a linear layer that is known, without its bias."""
    return _compiled(_form(layer))(x, *_weights(layer))


def _form(layer: Any) -> Form | None:
    quantised = isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    return Form(layer.group_size, layer.bits) if quantised else None


def _weights(layer: Any) -> list[Any]:
    return [layer[key] for key in ("weight", "scales", "biases") if key in layer]


@lru_cache(maxsize=16)
def _sound(form: Form | None, dtype: Any) -> bool:
    """Whether a kernel can be built here and computes what MLX does, up to rounding."""
    weight = mx.random.normal((OUTPUTS * WARPS + 1, 1024), key=mx.random.key(1)).astype(dtype)
    x = mx.random.normal((1, 1024), key=mx.random.key(2)).astype(dtype)
    weights = [weight] if form is None else list(mx.quantize(weight, form.group_size, form.bits))
    settings: dict[str, Any] = {} if form is None else {"group_size": form.group_size, "bits": form.bits}
    exact = [a.astype(mx.float32) for a in weights[1:]]
    whole = mx.dequantize(weights[0], exact[0], exact[1], **settings) if settings else weight
    wanted = x.astype(mx.float32) @ whole.astype(mx.float32).T
    try:
        found = _launch(form, x, *weights).astype(mx.float32)
        off = float(np.abs(np.array(found - wanted)).max() / np.abs(np.array(wanted)).max())
        if off <= ROUNDING:
            return True
        log.warning("A product of one row by the kernel for %s is off by %.2g; MLX's own is used.", form, off)
    except RuntimeError as error:
        log.warning("The kernel for products of one row cannot be built here, MLX's own is used: %s", error)
    return False
