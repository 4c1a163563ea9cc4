"""What a product's CUDA kernel computes besides the product: a norm before it, gates and a sum behind it.

The host hands over every kernel by itself, so what lies around a product comes along. It rounds where MLX's own
operations do.
"""

from __future__ import annotations

from dataclasses import dataclass

from treadle.models.kernels import SIGMOID

WARP = 32
MOST_NORMED = 14 * 1024  # inputs of a row that is normed, which a block holds beside what else it has


@dataclass(frozen=True, slots=True)
class Form:
    """How weights are packed, in the affine mode of `mx.quantize`."""

    group_size: int
    bits: int


@dataclass(frozen=True, slots=True)
class Around:
    """What a kernel does besides the product."""

    norm: bool = False  # RMS norm of the row before it, which is the only one
    bias: bool = False
    gated: bool = False  # SwiGLU of its outputs, gates first
    add: bool = False  # something to the outputs

    @property
    def outputs(self) -> int:
        """Of the product, for each of the kernel's."""
        return 2 if self.gated else 1

    def named(self, name: str) -> str:
        """The name of a kernel that does all this."""
        return "_".join((name, *(part for part in ("norm", "bias", "gated", "add") if getattr(self, part))))

    def inputs(self, *weights: str) -> list[str]:
        """What a kernel is given, in this order."""
        more = ("norm", self.norm), ("bias", self.bias), ("added", self.add)
        return ["x", *weights, *(name for name, given in more if given)]


# The block norms the row of K values and keeps it.
NORMED_ROW = """
    constexpr int PIECES = K / 8, OWN = (PIECES + WARPS * 32 - 1) / (WARPS * 32);
    __shared__ uint4 held[PIECES];
    __shared__ float squares[WARPS];
    uint4 mine[OWN];
    float total = 0.0f;
    #pragma unroll
    for (int p = 0; p < OWN; ++p) {
        const int i = p * WARPS * 32 + threadIdx.x;
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
    const float factor = rsqrtf(total / K + __int_as_float(EPS));
    #pragma unroll
    for (int p = 0; p < OWN; ++p) {
        const int i = p * WARPS * 32 + threadIdx.x;
        if (i >= PIECES) continue;
        const uint4 scales_of = reinterpret_cast<const uint4*>(norm)[i];
        const T* weights = reinterpret_cast<const T*>(&scales_of);
        T* values = reinterpret_cast<T*>(&mine[p]);
        for (int e = 0; e < 8; ++e) {
            const float scaled = static_cast<float>(static_cast<T>(static_cast<float>(values[e]) * factor));
            values[e] = static_cast<T>(static_cast<float>(weights[e]) * scaled);
        }
        held[i] = mine[p];
    }
    __syncthreads();
"""
# A kernel tells row(o), the output of the product for part o of its own; made(o), its product, rounded; number, where
# in `out` the result goes; plus(a, b), a rounded sum.
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


def end_of(around: Around) -> str:
    """What is done with a product."""
    steps = (BIASED if around.bias else UNBIASED, GATED if around.gated else SINGLE, ADDED if around.add else STORED)
    return "\n".join(steps)
