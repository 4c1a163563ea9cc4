"""A CUDA kernel for the product of one row with weights that are not packed. Engine thread only.

Decoding one sequence reads every weight once and computes next to nothing, so all that counts is how fast weights
arrive. MLX 0.32 reads 2.1 TB/s of bfloat16 weights on an H100 whose memory gives 2.9. Here a warp computes one output,
or a gate and what it opens; its lanes read 16 bytes of each at a time, and several reads are under way at once. Sums
are float32, and rounded once.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from treadle.models.around import NORMED_ROW, Around, end_of
from treadle.models.cuda import Kernel, bits_of

WARP = 32
WARPS = 8  # of a block, and half of them where each has a gate and what it opens: so measured

# row(o): the weights of part o of the warp's output; piece(k): 8 values of the row from k on, for this lane's k.
BEGIN = """
    const int lane = threadIdx.x % 32;
    const long limit = w_shape[0] / OUTPUTS;
    const long number = static_cast<long>(blockIdx.x) * WARPS + threadIdx.x / 32;
    auto row = [&](int o) { return number + o * limit; };
"""
ROW = """
    const int K = w_shape[1];
    if (number >= limit) return;  // a warp leaves as a whole
    auto piece = [&](int k) { return *reinterpret_cast<const uint4*>(x + k); };
"""
HELD_ROW = """
    if (number >= limit) return;
    auto piece = [&](int k) { return held[k / 8]; };
"""
DENSE = """
    float sum[OUTPUTS] = {};
    #pragma unroll 4
    for (int k = lane * 8; k < K; k += 256) {
        uint4 weights[OUTPUTS];
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) weights[o] = __ldg(reinterpret_cast<const uint4*>(w + row(o) * K + k));
        const uint4 line = piece(k);
        const T* values = reinterpret_cast<const T*>(&line);
        #pragma unroll
        for (int o = 0; o < OUTPUTS; ++o) {
            const T* mine = reinterpret_cast<const T*>(&weights[o]);
            #pragma unroll
            for (int e = 0; e < 8; ++e) sum[o] += static_cast<float>(values[e]) * static_cast<float>(mine[e]);
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


def source_of(around: Around) -> str:
    before = [NORMED_ROW, HELD_ROW] if around.norm else [ROW]
    return "\n".join([BEGIN, *before, DENSE, END, end_of(around)])


@lru_cache(maxsize=32)
def kernel(around: Around) -> Any:
    return Kernel(around.named("treadle_gemv"), around.inputs("w"), ["out"], source_of(around))


def launch(around: Around, eps: float, x: Any, *others: Any) -> Any:
    """`others`: the weights [outputs, inputs] and what lies around, as `Around.inputs` orders it; `eps`: of a norm."""
    rows, inputs = others[0].shape
    count, warps = rows // around.outputs, WARPS // around.outputs
    constants = [("T", x.dtype), ("WARPS", warps), ("OUTPUTS", around.outputs)]
    constants += [("K", inputs), ("EPS", bits_of(eps))] if around.norm else []  # few: every set is compiled
    (out,) = kernel(around)(
        inputs=[x, *others],
        template=constants,
        grid=(-(-count // warps) * warps * WARP, 1, 1),
        threadgroup=(warps * WARP, 1, 1),
        output_shapes=[others[-1].shape if around.add else (*x.shape[:-1], count)],
        output_dtypes=[x.dtype],
    )
    return out
