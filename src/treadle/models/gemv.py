"""CUDA kernels for the product of one row with the weights of a linear layer. Engine thread only.

Decoding one sequence reads every weight once and computes next to nothing, so all that counts is how fast weights
arrive. MLX 0.32 reads 2.1 TB/s of bfloat16 weights and 0.4 to 0.7 of 4-bit ones on an H100 whose memory gives 2.9. Here
a warp computes one output, or a gate and what it opens; its lanes read 16 bytes of each at a time, and several reads
are under way at once. What lies around the product comes along (`Around`), because the host hands over every kernel.

A code of 4 or 8 bits becomes a number without a conversion, which the device has few units for: put into the mantissa
of 2^23 it is that number and itself, at its place in the word, and the power of two of the place is taken from the row
instead. Sums are float32, and rounded once; what lies around rounds where MLX's operations do.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from treadle.models.kernels import SIGMOID, numbers

log = logging.getLogger("treadle.models")

WARP = 32
WARPS = 8  # of a block, and half of them where each has a gate and what it opens: so measured
BYTES = 16  # that a lane reads at once
MOST_NORMED = 2**14  # inputs of a row that is normed, which a block holds
TYPES = (mx.bfloat16, mx.float16)
BITS = (4, 8)
TRIAL = 1024  # inputs
ROUNDING = 2**-6  # of the largest output: two roundings to bfloat16


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are packed, in the affine mode of `mx.quantize`."""

    group_size: int
    bits: int


@dataclass(frozen=True, slots=True)
class Around:
    """What a kernel does besides the product."""

    norm: bool = False  # RMS norm of the row before it
    bias: bool = False
    gated: bool = False  # SwiGLU of its outputs, gates first
    add: bool = False  # something to the outputs


# row(o): the weights of part o of the warp's output; piece(k, c): 8 values of the row from k + c on, for this lane's k.
BEGIN = """
    const int lane = threadIdx.x % 32;
    const long limit = w_shape[0] / OUTPUTS;
    const long number = static_cast<long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    auto row = [&](int o) { return number + o * limit; };
"""
ROW = """
    const int K = w_shape[1] * EACH;
    if (number >= limit) return;  // a warp leaves as a whole
    auto piece = [&](int k, int c) { return *reinterpret_cast<const uint4*>(x + k + c); };
"""
# The block norms the row and keeps it in the order in which lanes read it.
NORMED_ROW = """
    constexpr int THREADS = WARPS * 32, PIECES = K / 8, EACH_LANE = AT_ONCE / 8;
    constexpr int MINE = (PIECES + THREADS - 1) / THREADS;
    __shared__ uint4 held[(K + 32 * AT_ONCE - 1) / (32 * AT_ONCE) * 32 * EACH_LANE];
    __shared__ float squares[WARPS];
    uint4 mine[MINE];
    float total = 0.0f;
    #pragma unroll
    for (int p = 0; p < MINE; ++p) {
        const int i = p * THREADS + threadIdx.x;
        if (i >= PIECES) continue;
        mine[p] = reinterpret_cast<const uint4*>(x)[i];
        const T* values = reinterpret_cast<const T*>(&mine[p]);
        for (int e = 0; e < 8; ++e) total += static_cast<float>(values[e]) * static_cast<float>(values[e]);
    }
    for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(0xffffffff, total, step);
    if (lane == 0) squares[threadIdx.x / 32] = total;
    __syncthreads();
    total = 0.0f;
    for (int i = 0; i < WARPS; ++i) total += squares[i];
    const float factor = rsqrtf(total / K + eps[0]);
    #pragma unroll
    for (int p = 0; p < MINE; ++p) {
        const int i = p * THREADS + threadIdx.x;
        if (i >= PIECES) continue;
        const uint4 scales_of = reinterpret_cast<const uint4*>(norm)[i];
        const T* weights = reinterpret_cast<const T*>(&scales_of);
        T* values = reinterpret_cast<T*>(&mine[p]);
        for (int e = 0; e < 8; ++e) {
            const float scaled = static_cast<float>(static_cast<T>(static_cast<float>(values[e]) * factor));
            values[e] = static_cast<T>(static_cast<float>(weights[e]) * scaled);
        }
        const int turn = i / (32 * EACH_LANE), reader = i / EACH_LANE % 32;
        held[(turn * EACH_LANE + i % EACH_LANE) * 32 + reader] = mine[p];
    }
    __syncthreads();
    if (number >= limit) return;
    auto piece = [&](int k, int c) { return held[(k / (32 * AT_ONCE) * EACH_LANE + c / 8) * 32 + lane]; };
"""
DENSE = """
    float sum[OUTPUTS] = {};
    #pragma unroll 4
    for (int k = lane * 8; k < K; k += 256) {
        uint4 weights[OUTPUTS];
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) weights[o] = __ldg(reinterpret_cast<const uint4*>(w + row(o) * K + k));
        const uint4 line = piece(k, 0);
        const T* values = reinterpret_cast<const T*>(&line);
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const T* mine = reinterpret_cast<const T*>(&weights[o]);
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum[o] += static_cast<float>(values[e]) * static_cast<float>(mine[e]);
        }
    }
"""
PACKED = """
    constexpr int HALF = EACH / 2;  // codes of a word that lie low enough in it
    constexpr unsigned int MASK = (1u << BITS) - 1;
    constexpr float PLACE = 1.0f / (1 << BITS);
    float sum[OUTPUTS] = {};
    #pragma unroll 2
    for (int k = lane * AT_ONCE; k < K; k += 32 * AT_ONCE) {
        uint4 words[OUTPUTS];
        float scale[OUTPUTS], shift[OUTPUTS];
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            words[o] = __ldg(reinterpret_cast<const uint4*>(w + (row(o) * K + k) / EACH));
            scale[o] = static_cast<float>(scales[row(o) * (K / GROUP) + k / GROUP]);
            shift[o] = static_cast<float>(biases[row(o) * (K / GROUP) + k / GROUP]);
        }
        float line[AT_ONCE], all = 0.0f;
        #pragma unroll
        for (int c = 0; c < AT_ONCE; c += 8) {
            const uint4 part = piece(k, c);
            const T* values = reinterpret_cast<const T*>(&part);
            #pragma unroll
            for (int e = 0; e < 8; ++e) line[c + e] = static_cast<float>(values[e]);
        }
        #pragma unroll
        for (int c = 0; c < AT_ONCE; ++c) all += line[c];
        #pragma unroll
        for (int c = 0; c < AT_ONCE; ++c) {
            float place = 1.0f;
            for (int i = 0; i < c % HALF; ++i) place *= PLACE;
            line[c] *= place;
        }
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const unsigned int* mine = reinterpret_cast<const unsigned int*>(&words[o]);
            float dot = 0.0f;
            #pragma unroll
            for (int c = 0; c < AT_ONCE; ++c) {
                const unsigned int half = c % EACH < HALF ? mine[c / EACH] : mine[c / EACH] >> 16;
                const unsigned int code = half & (MASK << (BITS * (c % HALF)));
                dot += line[c] * (__uint_as_float(0x4B000000u | code) - 8388608.0f);
            }
            sum[o] += scale[o] * dot + shift[o] * all;
        }
    }
"""
END = """
    #pragma unroll
    for (int o = 0; o < OUTPUTS; ++o)
        for (int step = 16; step > 0; step /= 2) sum[o] += __shfl_xor_sync(0xffffffff, sum[o], step);
    if (lane > 0) return;
    auto plus = [](T a, T b) { return static_cast<T>(static_cast<float>(a) + static_cast<float>(b)); };
    auto made = [&](int o) { return static_cast<T>(sum[o]); };
"""
BIASED = "auto found = [&](int o) { return plus(made(o), bias[row(o)]); };"
UNBIASED = "auto found = made;"
GATED = (
    SIGMOID
    + """
    const T gate = found(0);
    const T opened = static_cast<T>(static_cast<float>(gate) * static_cast<float>(sigmoid(gate)));
    const T result = static_cast<T>(static_cast<float>(opened) * static_cast<float>(found(1)));
"""
)
SINGLE = "const T result = found(0);"
ADDED = "out[number] = plus(added[number], result);"
STORED = "out[number] = result;"


def inputs_of(packed: bool, around: Around) -> list[str]:
    """What the kernel is given, in this order."""
    parts = ("x", True), ("w", True), ("scales", packed), ("biases", packed)
    more = ("norm", around.norm), ("eps", around.norm), ("bias", around.bias), ("added", around.add)
    return [name for name, given in (*parts, *more) if given]


def source_of(packed: bool, around: Around) -> str:
    steps = [BEGIN, NORMED_ROW if around.norm else ROW, PACKED if packed else DENSE, END]
    steps += [BIASED if around.bias else UNBIASED, GATED if around.gated else SINGLE, ADDED if around.add else STORED]
    return "\n".join(steps)


@lru_cache(maxsize=32)
def _kernel(packed: bool, around: Around) -> Any:
    words = ["treadle_gemv", *(["packed"] if packed else [])]
    words += [name for name in ("norm", "bias", "gated", "add") if getattr(around, name)]
    return mx.fast.cuda_kernel(
        name="_".join(words),
        input_names=inputs_of(packed, around),
        output_names=["out"],
        source=source_of(packed, around),
    )


@lru_cache(maxsize=32)
def _compiled(form: Form | None, around: Around) -> Any:
    """The launch, compiled: the text of a kernel is put together once for each set of shapes."""
    return mx.compile(partial(_launch, form, around))


def _launch(form: Form | None, around: Around, x: Any, *others: Any) -> Any:
    rows, words = others[0].shape
    outputs = 2 if around.gated else 1  # of a warp
    count, each, warps = rows // outputs, _each(form), WARPS // outputs
    constants = [("T", x.dtype), ("WARPS", warps), ("OUTPUTS", outputs), ("EACH", each), ("AT_ONCE", _at_once(form))]
    constants += [] if form is None else [("GROUP", form.group_size), ("BITS", form.bits)]
    constants += [("K", words * each)] if around.norm else []  # few: every set is compiled
    (out,) = _kernel(form is not None, around)(
        inputs=[x, *others],
        template=constants,
        grid=(-(-count // warps) * warps * WARP, 1, 1),
        threadgroup=(warps * WARP, 1, 1),
        output_shapes=[others[-1].shape if around.add else (*x.shape[:-1], count)],
        output_dtypes=[x.dtype],
    )
    return out


def _each(form: Form | None) -> int:
    """Values in an element of the weights."""
    return 1 if form is None else 32 // form.bits


def _at_once(form: Form | None) -> int:
    """Values of the row that a lane reads for 16 bytes of weights."""
    return 8 * BYTES // (16 if form is None else form.bits)


def knows(layer: Any, norm: bool = False, gated: bool = False, add: bool = False) -> bool:
    """Whether `row_product` computes this with a linear layer: on CUDA, of types that the kernels read."""
    if not mx.cuda.is_available():
        return False
    form = _form(layer)
    if form is not None and (layer.mode != "affine" or form.bits not in BITS):
        return False
    weights = _weights(layer)
    dtype, at_once = weights[-1].dtype, _at_once(form)
    inputs = weights[0].shape[1] * _each(form)
    fits = inputs % at_once == 0 and (form is None or form.group_size % at_once == 0)
    fits = fits and not (norm and inputs > MOST_NORMED) and not (gated and weights[0].shape[0] % 2)
    around = Around(norm, "bias" in layer, gated, add)
    return dtype in TYPES and fits and _sound(form, dtype, around, inputs if norm else TRIAL)


def row_product(layer: Any, x: Any, norm: Any = None, eps: float = 0.0, gated: bool = False, added: Any = None) -> Any:
    """One row, [.., inputs] with 1 for all other sizes, through a linear layer that `knows` knows with the same around.

    `norm`: weight [inputs] of an RMS norm before it; `gated`: silu of the first half of the outputs times the second
    half; `added`: [.., outputs] to be added, of which the result takes the shape. All are of the row's type.
    """
    around = Around(norm is not None, "bias" in layer, gated, added is not None)
    given = [] if norm is None else [norm, numbers(eps)]
    more = [a for a in (layer.get("bias"), added) if a is not None]
    return _compiled(_form(layer), around)(x, *_weights(layer), *given, *more)


def _form(layer: Any) -> Form | None:
    quantised = isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    return Form(layer.group_size, layer.bits) if quantised else None


def _weights(layer: Any) -> list[Any]:
    return [layer[key] for key in ("weight", "scales", "biases") if key in layer]


@lru_cache(maxsize=32)
def _sound(form: Form | None, dtype: Any, around: Around, inputs: int = TRIAL) -> bool:
    """Whether a kernel can be built here and computes what MLX does, up to rounding."""
    try:
        off = _off(form, dtype, around, inputs=inputs)
    except RuntimeError as error:
        log.warning("The kernel for products of one row cannot be built here, MLX's own is used: %s", error)
        return False
    if not off <= ROUNDING:
        log.warning("A product of one row by the kernel for %s is off by %.2g; MLX's own is used.", form, off)
    return off <= ROUNDING


def _off(form: Form | None, dtype: Any, around: Around, outputs: int = 2 * WARPS + 2, inputs: int = TRIAL) -> float:
    """The largest difference in a trial, as a share of the largest number; NaN where a result is not finite."""

    def drawn(seed: int, *shape: int) -> Any:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

    weight, x, norm = drawn(1, outputs, inputs), drawn(2, 1, inputs), drawn(3, inputs)
    bias, added = drawn(4, outputs), drawn(5, 1, outputs // (2 if around.gated else 1))
    weights = [weight] if form is None else list(mx.quantize(weight, form.group_size, form.bits))
    more = ((norm, around.norm), (numbers(1e-5), around.norm), (bias, around.bias), (added, around.add))
    found = _launch(form, around, x, *weights, *[a for a, given in more if given])
    whole = weight
    if form is not None:
        scales, biases = (a.astype(mx.float32) for a in weights[1:])
        whole = mx.dequantize(weights[0], scales, biases, group_size=form.group_size, bits=form.bits)
    row = mx.fast.rms_norm(x, norm, 1e-5) if around.norm else x
    wanted = row.astype(mx.float32) @ whole.astype(mx.float32).T
    wanted = wanted + bias if around.bias else wanted
    if around.gated:
        gate, up = mx.split(wanted, 2, axis=-1)
        wanted = nn.silu(gate) * up
    expected = np.array(wanted + added if around.add else wanted)
    return float(np.abs(np.array(found.astype(mx.float32)) - expected).max() / np.abs(expected).max())
