"""A CUDA kernel for the product of one row with packed weights, on tensor cores. Engine thread only.

MLX 0.32 computes it by a kernel that leaves most of an H200 idle. Here a block has few outputs, and its warps share the
inputs. Of the 8 columns that a tile of 16 outputs can meet in one instruction, one is the row: that costs less than to
add up products one by one. (More rows have `packed_gemm.py`.)

A code becomes a number without a conversion: put into the mantissa of a power of two it is that number and the code, at
its place in the word. What that power adds to a group of weights is the sum of the row over the group, which one more
tile, of ones, computes; so it leaves with the bias of the group. Codes of 8 bits are two of 4. Sums are float32.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

from treadle.models.around import NORMED_ROW, WARP, Around, Form, end_of
from treadle.models.cuda import TILE, Kernel, bits_of

TALL = 2**14  # outputs that are many: blocks enough for all processors with two tiles of 16
WIDE = 4608  # outputs that are so few that more warps must share the inputs: so measured

# A lane computes with words of outputs g and g + 8 of each tile, and if g is 0 with what of the row belongs to them; t
# counts the lanes that share an output. A warp takes 128 bytes of each output at a time: read as they lie in memory,
# several outputs by one instruction, they change lanes in shared memory, at places that spread over its banks.
SOURCE = """
    constexpr int THREADS = WARPS * 32, EACH = 32 / BITS, MINE = GROUP / 4, WORDS = MINE / EACH;
    constexpr int SPAN = 32 * EACH, GROUPS = SPAN / GROUP;
    constexpr int RESULTS = 16 * TILES / OUTPUTS;
    constexpr unsigned int ONES = BF16 ? 0x3f803f80u : 0x3c003c00u;
    constexpr unsigned int LOW = BF16 ? 0x43004300u : 0x64006400u, HIGH = BF16 ? 0x45004500u : 0x74007400u;
    constexpr float POWERS = (BF16 ? 128.0f : 1024.0f) * (BITS == 8 ? 17.0f : 1.0f);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const int length = w_shape[1], groups = length * EACH / GROUP, limit = w_shape[0] / OUTPUTS;
    const int first = blockIdx.x * RESULTS;
    auto output = [&](int tile, int i) {
        return min(first + tile % (TILES / OUTPUTS) * 16 + i, limit - 1) + tile / (TILES / OUTPUTS) * limit;
    };
    auto place = [](int i) {
        const int spread = WORDS == 1 ? i % 8 : WORDS == 2 ? i % 4 * 2 : WORDS == 4 ? i % 2 * 4 : i % 2;
        return [=](int piece) { return piece ^ spread; };
    };
    __shared__ uint4 pieces[WARPS][TILES][16][8];
    uint4 next[TILES][4];
    T scale[TILES][2][GROUPS], shift[TILES][2][GROUPS];
    auto read = [&](int chunk) {
        #pragma unroll
        for (int m = 0; m < TILES; ++m) {
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
                const int word = chunk * 32 + lane % 8 * 4;
                const unsigned int* from = w + static_cast<long>(output(m, j * 4 + lane / 8)) * length + word;
                if (word < length) next[m][j] = __ldg(reinterpret_cast<const uint4*>(from));
            }
        }
    };
    auto read_scales = [&](int chunk) {
        #pragma unroll
        for (int m = 0; m < TILES; ++m)
            for (int h = 0; h < 2; ++h) {
                const long from = static_cast<long>(output(m, h * 8 + g)) * groups + chunk * GROUPS;
                auto all = [&](const T* source, T* to) {
                    if (GROUPS == 4 && groups % 4 == 0)
                        *reinterpret_cast<uint2*>(to) = __ldg(reinterpret_cast<const uint2*>(source + from));
                    else for (int q = 0; q < GROUPS; ++q) if (chunk * GROUPS + q < groups) to[q] = source[from + q];
                };
                all(scales, scale[m][h]);
                all(biases, shift[m][h]);
            }
    };
    const int chunks = (length + 31) / 32;
    if (warp < chunks) read(warp);
    <row>
    float sum[TILES][2] = {};
    for (int chunk = warp; chunk < chunks; chunk += WARPS) {
        read_scales(chunk);
        #pragma unroll
        for (int m = 0; m < TILES; ++m)
            for (int j = 0; j < 4; ++j) {
                const int i = j * 4 + lane / 8;
                pieces[warp][m][i][place(i)(lane % 8)] = next[m][j];
            }
        __syncwarp();
        if (chunk + WARPS < chunks) read(chunk + WARPS);
        #pragma unroll
        for (int q = 0; q < GROUPS; ++q) {
            const int i = chunk * GROUPS + q;
            if (i >= groups) break;
            unsigned int words[TILES][2][WORDS];
            #pragma unroll
            for (int m = 0; m < TILES; ++m)
                for (int h = 0; h < 2; ++h) {
                    const uint4* mine = pieces[warp][m][h * 8 + g];
                    auto at = place(g);
                    if constexpr (WORDS == 1)
                        words[m][h][0] = reinterpret_cast<const unsigned int*>(mine + at(q))[t];
                    else if constexpr (WORDS == 2)
                        *reinterpret_cast<uint2*>(words[m][h]) =
                            reinterpret_cast<const uint2*>(mine + at(2 * q + t / 2))[t % 2];
                    else for (int c = 0; c < WORDS / 4; ++c)
                        reinterpret_cast<uint4*>(words[m][h])[c] = mine[at((4 * q + t) * WORDS / 4 + c)];
                }
            float part[TILES][4] = {}, all[4] = {};
            #pragma unroll
            for (int c = 0; c < WORDS; ++c) {
                unsigned int values[EACH / 2] = {}, pairs[EACH / 2];
                if (g == 0) fetch(values, (i * 4 + t) * MINE + c * EACH);
                #pragma unroll
                for (int p = 0; p < EACH / 2; p += 2) {
                    pairs[p] = __byte_perm(values[p / 2], values[p / 2 + EACH / 4], 0x5410);
                    pairs[p + 1] = __byte_perm(values[p / 2], values[p / 2 + EACH / 4], 0x7632);
                }
                #pragma unroll
                for (int p = 0; p < EACH / 2; p += 2) {
                    tile<BF16>(all, ONES, ONES, ONES, ONES, pairs[p], pairs[p + 1]);
                    #pragma unroll
                    for (int m = 0; m < TILES; ++m) {
                        const unsigned int one = words[m][0][c] >> (p * BITS), two = words[m][1][c] >> (p * BITS);
                        auto codes = [](unsigned int word, int by, unsigned int power) {
                            return ((word >> by) & 0x000f000fu) | power;
                        };
                        tile<BF16>(part[m], codes(one, 0, LOW), codes(two, 0, LOW), codes(one, BITS, LOW),
                                   codes(two, BITS, LOW), pairs[p], pairs[p + 1]);
                        if constexpr (BITS == 8)
                            tile<BF16>(part[m], codes(one, 4, HIGH), codes(two, 4, HIGH), codes(one, 12, HIGH),
                                       codes(two, 12, HIGH), pairs[p], pairs[p + 1]);
                    }
                }
            }
            #pragma unroll
            for (int m = 0; m < TILES; ++m)
                for (int h = 0; h < 2; ++h) {
                    const float factor = static_cast<float>(scale[m][h][q]);
                    const float rest = static_cast<float>(shift[m][h][q]) - POWERS * factor;
                    sum[m][h] += factor * part[m][2 * h] + rest * all[0];
                }
        }
        __syncwarp();
    }
    constexpr int SHARE = sizeof(pieces[0]) / sizeof(float);  // of a warp, which has no pieces any more
    float* shares = reinterpret_cast<float*>(pieces);
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        for (int h = 0; h < 2; ++h)
            if (t == 0) shares[warp * SHARE + m * 16 + h * 8 + g] = sum[m][h];
    __syncthreads();
    auto plus = [](T a, T b) { return static_cast<T>(static_cast<float>(a) + static_cast<float>(b)); };
    if (const int own = threadIdx.x; own < RESULTS && first + own < limit) {
        auto made = [&](int o) {
            float whole = 0.0f;
            for (int i = 0; i < WARPS; ++i) whole += shares[i * SHARE + o * RESULTS + own];
            return static_cast<T>(whole);
        };
        auto row = [&](int o) { return first + own + o * limit; };
        const long number = first + own;
        <end>
    }
"""
ROW = """
    auto fetch = [&](unsigned int* to, int k) {
        const T* from = x + k;
        if constexpr (EACH == 8) *reinterpret_cast<uint4*>(to) = __ldg(reinterpret_cast<const uint4*>(from));
        else *reinterpret_cast<uint2*>(to) = __ldg(reinterpret_cast<const uint2*>(from));
    };
"""
HELD_ROW = """
    auto fetch = [&](unsigned int* to, int k) {
        if constexpr (EACH == 8) *reinterpret_cast<uint4*>(to) = held[k / 8];
        else *reinterpret_cast<uint2*>(to) = reinterpret_cast<const uint2*>(held)[k / 4];
    };
"""


def source_of(around: Around) -> str:
    row = NORMED_ROW + HELD_ROW if around.norm else ROW
    return SOURCE.replace("<row>", row).replace("<end>", end_of(around))


@lru_cache(maxsize=32)
def kernel(around: Around) -> Any:
    inputs = around.inputs("w", "scales", "biases")
    return Kernel(around.named("treadle_packed_gemv"), inputs, ["out"], source_of(around), TILE)


def launch(form: Form, around: Around, eps: float, x: Any, *others: Any) -> Any:
    """`others`: weights, scales and biases, and what lies around, as `Around.inputs` orders it; `eps`: of a norm."""
    outputs, words = others[0].shape
    inputs, count = words * 32 // form.bits, outputs // around.outputs
    tiles, warps = _block(outputs, around.gated)
    constants = [("T", x.dtype), ("BF16", x.dtype == mx.bfloat16), ("WARPS", warps), ("OUTPUTS", around.outputs)]
    constants += [("TILES", tiles), ("GROUP", form.group_size), ("BITS", form.bits)]
    constants += [("K", inputs), ("EPS", bits_of(eps))] if around.norm else []  # few: every set is compiled
    results = 16 * tiles // around.outputs
    (out,) = kernel(around)(
        inputs=[x, *others],
        template=constants,
        grid=(-(-count // results) * warps * WARP, 1, 1),
        threadgroup=(warps * WARP, 1, 1),
        output_shapes=[others[-1].shape if around.add else (*x.shape[:-1], count)],
        output_dtypes=[x.dtype],
    )
    return out


def _block(outputs: int, gated: bool) -> tuple[int, int]:
    """Tiles of 16 outputs in a block, and its warps: fastest on an H200 for the shapes of an 8B model."""
    if gated or outputs >= TALL:
        return 2, 4
    return 1, 8 if outputs <= WIDE else 4
