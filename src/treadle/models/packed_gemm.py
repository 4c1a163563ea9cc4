"""A CUDA kernel for the product of 2 to 256 rows with packed weights, on tensor cores. Engine thread only.

MLX 0.32 reads packed weights once for each of up to 7 rows, and for more by a kernel that leaves most of an H200 idle
and takes half a minute to compile on a new machine. Here rows, words and scales come into shared memory some stages
ahead of what is computed. Weights become numbers of 16 bits, as `mx.dequantize` makes them, before they meet the rows:
each weight once for up to 64 rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx

from treadle.models.around import WARP, Around, Form, end_of
from treadle.models.cuda import TILE, Kernel

ROW_TILE = 8
WARP_OUTPUTS = 32
UNIT = 64  # inputs that a warp takes at a time
LEAST_WIDE = 4  # tiles of rows from which on a block of 64 outputs is better, and two stages are enough: so measured
MOST_DEEP = 4  # tiles of rows up to which a warp takes two units a stage: so measured
ROW_TILES = (1, 2, 3, 4, 6, 8)  # of 8 rows in a block; each number is compiled
MANY, SOME = 192, 96  # blocks of 64 outputs that fill an H200 with several on a processor, or with one
LEAST_SHARED = 99 * 1024  # bytes that a block may have on every device since Ampere, and on some
SHARED = {"8.0": 163 * 1024, "9.0": 227 * 1024, "10.0": 227 * 1024, "10.3": 227 * 1024}
PAD = 4  # floats behind the shares of a row, so that lanes meet different banks


@dataclass(frozen=True, slots=True)
class Block:
    """What a block of threads computes: `tall` warps side by side, whose inputs `ways` warps share."""

    tall: int
    ways: int
    units: int
    row_tiles: int
    stages: int

    @property
    def threads(self) -> int:
        return self.tall * self.ways * WARP

    def shared_memory(self, form: Form) -> int:
        """Bytes: the stages, or afterwards what each of the ways has found."""
        rows, outputs = ROW_TILE * self.row_tiles, WARP_OUTPUTS * self.tall
        inputs = self.ways * self.units * UNIT
        stage = inputs * (2 * rows + outputs * form.bits // 8) + inputs // form.group_size * 4 * outputs
        return max(self.stages * stage, 4 * self.ways * rows * (outputs + PAD))


HEADER = (
    TILE
    + """
template <bool BF16>
__device__ __forceinline__ unsigned int fma_of_pairs(unsigned int a, unsigned int b, unsigned int c) {
    unsigned int found;
    if constexpr (BF16) asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    else asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    return found;
}
extern __shared__ uint4 dynamic_memory[];  // named here only: tests run the source where there is no such thing
__device__ __forceinline__ uint4* shared_pieces() { return dynamic_memory; }
__device__ __forceinline__ void fetch_piece(uint4* to, const void* from, bool there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::
        "r"(static_cast<unsigned int>(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void fetch_pair(void* to, const void* from, bool there) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::
        "r"(static_cast<unsigned int>(__cvta_generic_to_shared(to))), "l"(from), "r"(there ? 4 : 0) : "memory");
}
__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
__device__ __forceinline__ void wait_for_all_but() { asm volatile("cp.async.wait_group %0;" :: "n"(N) : "memory"); }
"""
)
# A lane has 16 inputs of a unit, side by side: of outputs g and g + 8 of each tile, and of row g. t counts the lanes
# that share an output. Pieces of 16 bytes lie at places that spread over the banks of shared memory.
SOURCE = """
    constexpr int THREADS = TALL * WAYS * 32, EACH = 32 / BITS, WORDS = 16 / EACH, TILES = 2, PARTS = WAYS * UNITS;
    constexpr int ROWS = 8 * ROW_TILES, BLOCK = 32 * TALL, RESULTS = BLOCK / OUTPUTS, STAGE = 64 * PARTS;
    constexpr int ROW_PIECES = STAGE / 8, WORD_PIECES = STAGE * BITS / 128, UNIT_PIECES = BITS / 2;
    constexpr int ROW_STEP = THREADS / ROW_PIECES, WORD_STEP = THREADS / WORD_PIECES, OWN_WORDS = BLOCK / WORD_STEP;
    constexpr int SCALES = STAGE / GROUP, PAIRS = BLOCK * SCALES, OWN_PAIRS = (PAIRS + THREADS - 1) / THREADS;
    constexpr int WORDS_END = ROWS * ROW_PIECES + BLOCK * WORD_PIECES, STAGE_PIECES = WORDS_END + PAIRS / 4;
    static_assert(ROWS % ROW_STEP == 0 && BLOCK % WORD_STEP == 0 && SCALES > 1);
    constexpr unsigned int POWER = BF16 ? 0x43004300u : 0x64006400u, ONE = BF16 ? 0x3f803f80u : 0x3c003c00u;
    constexpr unsigned int LESS_POWER = BF16 ? 0xc300c300u : 0xe400e400u;
    constexpr unsigned int SIXTEEN = BF16 ? 0x41804180u : 0x4c004c00u, LESS_16 = BF16 ? 0xc500c500u : 0xf400f400u;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int across = warp / WAYS, way = warp % WAYS;
    const int length = w_shape[1], inputs = length * EACH, groups = inputs / GROUP, limit = w_shape[0] / OUTPUTS;
    const int first = blockIdx.y * RESULTS, before = blockIdx.x * ROWS;
    int rows = 1;
    for (int i = 0; i < x_ndim; ++i) rows *= x_shape[i];
    rows = min(rows / inputs - before, ROWS);
    auto output = [&](int own) {
        if constexpr (OUTPUTS == 1) return static_cast<long>(min(first + own, limit - 1));
        return static_cast<long>(min(first + own / 32 * 16 + own % 16, limit - 1) + own % 32 / 16 * limit);
    };
    auto row_place = [](int row, int piece) { return row * ROW_PIECES + (piece ^ (row & 7)); };
    auto word_place = [](int own, int piece) {
        const int spread = (BITS == 4 && PARTS == 2 ? own >> 1 : own) & (PARTS - 1);
        return ROWS * ROW_PIECES + own * WORD_PIECES + (piece ^ spread * UNIT_PIECES);
    };
    uint4* const pool = shared_pieces();
    const int stages = (inputs + STAGE - 1) / STAGE;
    const int my_row = threadIdx.x / ROW_PIECES, my_piece = threadIdx.x % ROW_PIECES;
    const int my_own = threadIdx.x / WORD_PIECES, my_words = threadIdx.x % WORD_PIECES;
    const T* const my_rows = x + static_cast<long>(before + my_row) * inputs + my_piece * 8;
    const unsigned int* my_outputs[OWN_WORDS];
    #pragma unroll
    for (int j = 0; j < OWN_WORDS; ++j) my_outputs[j] = w + output(my_own + j * WORD_STEP) * length + my_words * 4;
    const T* my_scales[OWN_PAIRS];  // those of all outputs, then their biases, two at a time
    const int my_pair = threadIdx.x % (SCALES / 2) * 2;
    #pragma unroll
    for (int j = 0; j < OWN_PAIRS; ++j) {
        const int line = (threadIdx.x + j * THREADS) / (SCALES / 2);
        my_scales[j] = (line < BLOCK ? scales : biases) + output(line % BLOCK) * groups + my_pair;
    }
    auto fetch = [&](int stage) {
        uint4* const to = pool + stage % STAGES * STAGE_PIECES;
        const bool more = stage * STAGE + my_piece * 8 < inputs;
        #pragma unroll
        for (int j = 0; j < ROWS / ROW_STEP; ++j) {
            const int row = my_row + j * ROW_STEP;
            const bool there = more && row < rows;
            fetch_piece(to + row_place(row, my_piece),
                        there ? my_rows + static_cast<long>(j * ROW_STEP) * inputs + stage * STAGE : x, there);
        }
        const bool words = stage * (STAGE / EACH) + my_words * 4 < length;
        #pragma unroll
        for (int j = 0; j < OWN_WORDS; ++j)
            fetch_piece(to + word_place(my_own + j * WORD_STEP, my_words),
                        words ? my_outputs[j] + stage * (STAGE / EACH) : w, words);
        #pragma unroll
        for (int j = 0; j < OWN_PAIRS; ++j) {
            const int i = threadIdx.x + j * THREADS, group = stage * SCALES + my_pair;
            if (i >= PAIRS) continue;
            T* const pair = reinterpret_cast<T*>(to + WORDS_END) + 2 * i;
            if (groups % 2 == 0)
                fetch_pair(pair, group < groups ? my_scales[j] + stage * SCALES : scales, group < groups);
            else
                for (int e = 0; e < 2; ++e)
                    pair[e] = group + e < groups ? my_scales[j][stage * SCALES + e] : static_cast<T>(0.0f);
        }
        end_stage();
    };
    auto twice = [](unsigned short bits) { return static_cast<unsigned int>(bits) << 16 | bits; };
    float sum[TILES][ROW_TILES][4] = {};
    for (int s = 0; s < STAGES - 1; ++s) fetch(s);
    #pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
        wait_for_all_but<STAGES - 2>();
        __syncthreads();
        fetch(stage + STAGES - 1);
        const uint4* const held = pool + stage % STAGES * STAGE_PIECES;
        const unsigned short* const held_scales = reinterpret_cast<const unsigned short*>(held + WORDS_END);
        #pragma unroll
        for (int u = 0; u < UNITS; ++u) {
            const int unit = way * UNITS + u;
            unsigned int words[TILES][2][WORDS], factor[TILES][2], shift[TILES][2];
            #pragma unroll
            for (int m = 0; m < TILES; ++m)
                for (int h = 0; h < 2; ++h) {
                    const int own = across * 32 + m * 16 + h * 8 + g, group = (unit * 64 + t * 16) / GROUP;
                    factor[m][h] = twice(held_scales[own * SCALES + group]);
                    shift[m][h] = twice(held_scales[(BLOCK + own) * SCALES + group]);
                    if constexpr (BITS == 4)
                        *reinterpret_cast<uint2*>(words[m][h]) = reinterpret_cast<const uint2*>(
                            held + word_place(own, unit * UNIT_PIECES + t / 2))[t % 2];
                    else
                        *reinterpret_cast<uint4*>(words[m][h]) = held[word_place(own, unit * UNIT_PIECES + t)];
                }
            #pragma unroll
            for (int c = 0; c < 2; ++c) {
                unsigned int weights[TILES][2][4];  // pairs of inputs i and i + 4
                #pragma unroll
                for (int m = 0; m < TILES; ++m)
                    for (int h = 0; h < 2; ++h)
                        for (int i = 0; i < 4; ++i) {
                            unsigned int code;
                            if constexpr (BITS == 4) {
                                code = words[m][h][c] >> (4 * i) & 0x000f000fu | POWER;
                                code = fma_of_pairs<BF16>(code, ONE, LESS_POWER);
                            } else {
                                const auto both =
                                    __byte_perm(words[m][h][2 * c], words[m][h][2 * c + 1], i | (4 + i) << 8);
                                const auto low = fma_of_pairs<BF16>(both & 0x000f000fu | POWER, ONE, LESS_POWER);
                                code = fma_of_pairs<BF16>(both >> 4 & 0x000f000fu | POWER, SIXTEEN, LESS_16);
                                code = fma_of_pairs<BF16>(code, ONE, low);
                            }
                            weights[m][h][i] = fma_of_pairs<BF16>(code, factor[m][h], shift[m][h]);
                        }
                // Products of a turn wait for none of the same turn.
                constexpr int TURN = ROW_TILES < 4 ? ROW_TILES : ROW_TILES % 4 ? 3 : 4;
                static_assert(ROW_TILES % TURN == 0);
                #pragma unroll
                for (int from = 0; from < ROW_TILES; from += TURN) {
                    unsigned int pairs[TURN][4];
                    #pragma unroll
                    for (int n = 0; n < TURN; ++n) {
                        const uint4 eight = held[row_place((from + n) * 8 + g, unit * 8 + 2 * t + c)];
                        pairs[n][0] = __byte_perm(eight.x, eight.z, 0x5410);
                        pairs[n][1] = __byte_perm(eight.x, eight.z, 0x7632);
                        pairs[n][2] = __byte_perm(eight.y, eight.w, 0x5410);
                        pairs[n][3] = __byte_perm(eight.y, eight.w, 0x7632);
                    }
                    #pragma unroll
                    for (int i = 0; i < 4; i += 2)
                        for (int n = 0; n < TURN; ++n)
                            for (int m = 0; m < TILES; ++m)
                                tile<BF16>(sum[m][from + n], weights[m][0][i], weights[m][1][i], weights[m][0][i + 1],
                                           weights[m][1][i + 1], pairs[n][i], pairs[n][i + 1]);
                }
            }
        }
    }
    wait_for_all_but<0>();
    __syncthreads();
    constexpr int LINE = BLOCK + PAD;
    float* const shares = reinterpret_cast<float*>(pool);
    #pragma unroll
    for (int m = 0; m < TILES; ++m)
        for (int n = 0; n < ROW_TILES; ++n)
            for (int e = 0; e < 4; ++e) {
                const int row = n * 8 + 2 * t + e % 2, own = across * 32 + m * 16 + e / 2 * 8 + g;
                shares[(way * ROWS + row) * LINE + own] = sum[m][n][e];
            }
    __syncthreads();
    auto plus = [](T a, T b) { return static_cast<T>(static_cast<float>(a) + static_cast<float>(b)); };
    for (int at = threadIdx.x; at < RESULTS * rows; at += THREADS) {
        const int column = at / RESULTS, own = at % RESULTS;
        if (first + own >= limit) continue;
        auto made = [&](int o) {
            const int slot = OUTPUTS == 1 ? own : own / 16 * 32 + o * 16 + own % 16;
            float whole = 0.0f;
            for (int i = 0; i < WAYS; ++i) whole += shares[(i * ROWS + column) * LINE + slot];
            return static_cast<T>(whole);
        };
        auto row = [&](int o) { return first + own + o * limit; };
        const long number = static_cast<long>(before + column) * limit + first + own;
        <end>
    }
"""


def source_of(around: Around) -> str:
    return SOURCE.replace("<end>", end_of(around))


@lru_cache(maxsize=8)
def kernel(around: Around) -> Any:
    inputs = around.inputs("w", "scales", "biases")
    return Kernel(around.named("treadle_packed_gemm"), inputs, ["out"], source_of(around), HEADER)


def launch(form: Form, around: Around, x: Any, *others: Any, block: Block | None = None) -> Any:
    """`others`: weights, scales and biases, and the bias if there is one, as `Around.inputs` orders it."""
    assert not (around.norm or around.add), "of a single row"
    outputs, words = others[0].shape
    inputs, count = words * 32 // form.bits, outputs // around.outputs
    rows = x.size // inputs
    block = block or block_for(form, outputs, rows)
    constants = [("T", x.dtype), ("BF16", x.dtype == mx.bfloat16), ("GROUP", form.group_size), ("BITS", form.bits)]
    constants += [("TALL", block.tall), ("WAYS", block.ways), ("UNITS", block.units), ("ROW_TILES", block.row_tiles)]
    constants += [("STAGES", block.stages), ("OUTPUTS", around.outputs), ("PAD", PAD)]
    results = WARP_OUTPUTS * block.tall // around.outputs
    (out,) = kernel(around)(
        inputs=[x, *others],
        template=constants,
        grid=(-(-rows // (ROW_TILE * block.row_tiles)) * block.threads, -(-count // results), 1),
        threadgroup=(block.threads, 1, 1),
        output_shapes=[(*x.shape[:-1], count)],
        output_dtypes=[x.dtype],
        shared_memory=block.shared_memory(form),
    )
    return out


def block_for(form: Form, outputs: int, rows: int) -> Block:
    """What is fastest on an H200, for the shapes of an 8B model: there should be work for all processors."""
    row_tiles = next((n for n in ROW_TILES if rows <= ROW_TILE * n), None)
    if row_tiles is None:  # several blocks with as few rows of nothing as possible
        row_tiles = min(ROW_TILES[-2:], key=lambda n: (-(-rows // (ROW_TILE * n)) * n, -n))
    many, some, few = kinds(form, row_tiles)
    blocks = -(-outputs // (2 * WARP_OUTPUTS)) * -(-rows // (ROW_TILE * row_tiles))
    if blocks >= MANY:
        return many
    return some if blocks >= SOME and row_tiles >= LEAST_WIDE else few


def kinds(form: Form, row_tiles: int) -> tuple[Block, Block, Block]:
    """Blocks where there are many, which share processors, where there are some, with one each, and where fewer."""
    deep = row_tiles <= MOST_DEEP or form.group_size > UNIT  # a stage has scales of two groups at least
    many = Block(2, 2, 2, row_tiles, 2) if deep else Block(2, 2, 1, row_tiles, 3)
    others = Block(2, 4, 1, row_tiles, 3), Block(1, 8, 1, row_tiles, 3 if row_tiles < LEAST_WIDE else 2)
    some, few = (block if block.shared_memory(form) <= _most_shared() else many for block in others)
    return many, some, few


def _most_shared() -> int:
    """Bytes of shared memory that a block may have here."""
    found = mx.device_info()
    number = f"{found.get('compute_capability_major')}.{found.get('compute_capability_minor')}"
    return SHARED.get(number, LEAST_SHARED)
