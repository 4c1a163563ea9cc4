"""The CUDA sources of `few_queries.py`.

Lane 4 g + t of a warp holds scores and sums of queries g and g + 8, of columns or dimensions 2 t and 2 t + 1 of each
tile. A head's dimensions lie in spans of SPAN. Of keys a lane reads dimensions t SPAN / 4 and on of each span, in
columns g and g + 8; of values g SPAN / 8 and on, in columns 2 t, 2 t + 1 and the same + 8.
"""

from treadle.models.cuda import TILE

HEADER = (
    TILE
    + """
template <bool B> struct Bool { static constexpr bool value = B; };
__device__ __forceinline__ unsigned int less_1024(unsigned int pair) {
    unsigned int found;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(found) : "r"(pair), "r"(0x64006400u));
    return found;
}
"""
)
SETUP = """
    constexpr int TILES = D / 8, HALVES = ROWS / 8, SPANS = D / SPAN, STEPS = SPAN / 16, TURN = WARPS * 16;
    constexpr float NEVER = -3e38f;  // below the first maximum
    struct alignas(KEY_ALIGN) Key { unsigned int word[SPAN / 8]; };
    struct alignas(VALUE_ALIGN) Value { unsigned int word[SPAN / 16]; };
    const int num_parts = gridDim.x / queries_shape[0], n = queries_shape[2], asked = n * G;
    const int row = blockIdx.x / num_parts, part = blockIdx.x % num_parts, head = blockIdx.y;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int start = position[row];
    int here[HALVES];
    unsigned int query[SPANS * STEPS][HALVES][2];
    float sum[TILES][4] = {}, best[HALVES], total[HALVES];
    #pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        const int one = min(static_cast<int>(blockIdx.z) * ROWS + h * 8 + g, asked - 1), i = one / G;
        const T* from = queries + ((row * gridDim.y + head) * static_cast<long>(G) + one % G) * n * D + i * D;
        here[h] = start + i;
        best[h] = -1e30f;
        total[h] = 0.0f;
        #pragma unroll
        for (int s = 0; s < SPANS * STEPS; ++s) {
            const uint2 four = *reinterpret_cast<const uint2*>(from + s / STEPS * SPAN + t * SPAN / 4 + s % STEPS * 4);
            query[s][h][0] = four.x;
            query[s][h][1] = four.y;
        }
    }
    auto pair = [](auto a, auto b) { return static_cast<unsigned int>(b.bits) << 16 | a.bits; };
    auto meet = [&](auto kind, float (&score)[4], int s, unsigned int one, unsigned int two) {
        constexpr int low = HALVES - 1;
        tile<kind.value>(score, query[s][0][0], query[s][low][0], query[s][0][1], query[s][low][1], one, two);
    };
    // Scores become weights.
    auto soften = [&](float (&score)[2][4]) {
        #pragma unroll
        for (int h = 0; h < HALVES; ++h) {
            float top = fmaxf(fmaxf(score[0][2 * h], score[0][2 * h + 1]), fmaxf(score[1][2 * h], score[1][2 * h + 1]));
            for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
            top = fmaxf(top, best[h]);
            const float fade = __expf(best[h] - top);
            best[h] = top;
            total[h] *= fade;
            #pragma unroll
            for (int c = 0; c < 4; ++c) {
                float& one = score[c / 2][2 * h + c % 2];
                one = __expf(one - top);
                total[h] += one;
            }
            #pragma unroll
            for (int j = 0; j < TILES; ++j)
                for (int e = 0; e < 2; ++e) sum[j][2 * h + e] *= fade;
        }
    };
    const T* key_row = keys + row * keys_strides[0] + head * keys_strides[1] + t * SPAN / 4;
    const T* value_row = values + row * values_strides[0] + head * values_strides[1] + g * SPAN / 8;
    const int* line = table + row * table_strides[0];
    // Columns [first, limit), of which seen(entry of the table, half) says whether a query sees it. What lies where no
    // query looks need not be numbers.
    auto over_exact = [&](int first, int limit, long base, auto seen) {
        #pragma unroll 1
        for (int turn = first; turn < limit; turn += TURN) {
            const int column = turn + warp * 16;
            Key key[2][SPANS];
            Value value[4][SPANS];
            long held[4];
            #pragma unroll
            for (int m = 0; m < 2; ++m)
                for (int s = 0; s < SPANS; ++s)
                    key[m][s] = *reinterpret_cast<const Key*>(
                        key_row + min(column + 8 * m + g, limit - 1) * keys_strides[2] + s * SPAN);
            #pragma unroll
            for (int c = 0; c < 4; ++c) {
                const int at = min(column + c / 2 * 8 + 2 * t + c % 2, limit - 1);
                held[c] = line[at] + base;
                for (int s = 0; s < SPANS; ++s)
                    value[c][s] = *reinterpret_cast<const Value*>(value_row + at * values_strides[2] + s * SPAN);
            }
            float score[2][4] = {};
            #pragma unroll
            for (int s = 0; s < SPANS * STEPS; ++s)
                for (int m = 0; m < 2; ++m) {
                    const unsigned int* word = key[m][s / STEPS].word + s % STEPS * 2;
                    meet(Bool<BF16>(), score[m], s, word[0], word[1]);
                }
            #pragma unroll
            for (int c = 0; c < 4; ++c)
                for (int h = 0; h < HALVES; ++h) {
                    float& one = score[c / 2][2 * h + c % 2];
                    const bool there = column + c / 2 * 8 + 2 * t + c % 2 < limit && seen(held[c], h);
                    one = there ? one * __int_as_float(SCALE) : NEVER;
                }
            soften(score);
            unsigned int weight[4] = {};
            #pragma unroll
            for (int m = 0; m < 2; ++m)
                for (int h = 0; h < HALVES; ++h)
                    weight[2 * m + h] = pair(T(score[m][2 * h]), T(score[m][2 * h + 1]));
            #pragma unroll
            for (int c = 0; c < 4; ++c)
                if (held[c] >= start + n)
                    for (int s = 0; s < SPANS; ++s) value[c][s] = Value{};
            #pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const int s = j / (SPAN / 8), w = j % (SPAN / 8) / 2, order = j % 2 ? 0x7632 : 0x5410;
                tile<BF16>(sum[j], weight[0], weight[1], weight[2], weight[3],
                           __byte_perm(value[0][s].word[w], value[1][s].word[w], order),
                           __byte_perm(value[2][s].word[w], value[3][s].word[w], order));
            }
        }
    };
"""
# limits: [columns to read, window or 0]
EXACT = """
    const int window = limits[1];
    const int length = (limits[0] + num_parts * TURN - 1) / (num_parts * TURN) * TURN;
    over_exact(part * length, min(limits[0], (part + 1) * length), 0, [&](long p, int h) {
        return p <= here[h] && (window <= 0 || p > here[h] - window);
    });
"""
# limits: [exact columns to read, recent tokens, what the table's entries count from, packed tokens to read]. The last
# part reads the exact columns, the others the packed tokens. Of these a code c in float16 is the number whose bits are
# 0x6400 + c, less 1024. A weight meets its value's scale in float16 too, LIFT times as large, so that it is not lost.
PACKED = """
    struct alignas(SPAN / 4) KeyCodes { unsigned int word[STEPS]; };
    struct alignas(SPAN / 8) ValueCodes { unsigned int word[SPAN / 32]; };
    struct alignas((4 * SPANS) & -(4 * SPANS)) Scales { bfloat16 of[2][SPANS]; };
    constexpr float POWER = 1024.0f, LIFT = 256.0f;
    constexpr unsigned int POWERS = 0x64646464u;
    int edge[HALVES];
    for (int h = 0; h < HALVES; ++h) edge[h] = max(0, here[h] + 1 - limits[1]) / BLOCK * BLOCK;
    const int packed = min(max(0, start + n - limits[1]) / BLOCK * BLOCK, limits[3]);
    const int length = (packed + (num_parts - 1) * TURN - 1) / ((num_parts - 1) * TURN) * TURN;
    const long before = row * gridDim.y + head;
    const unsigned int* key_codes = key_words + before * key_words_shape[2] * (D / 4) + t * STEPS;
    const unsigned int* value_codes = value_words + before * key_words_shape[2] * (D / 4) + g * (SPAN / 32);
    auto scales_of = [&](const bfloat16* all, int column) {
        return *reinterpret_cast<const Scales*>(all + (before * key_words_shape[2] + column) * SPANS);
    };
    auto over_packed = [&](int first, int limit) {
        float all[HALVES][SPANS] = {}, rest[HALVES][SPANS] = {};
        #pragma unroll
        for (int h = 0; h < HALVES; ++h)
            for (int s = 0; s < SPANS * STEPS; ++s)
                for (int k = 0; k < 2; ++k) {
                    unsigned int& two = query[s][h][k];
                    const float16 low(static_cast<float>(T::of(two & 0xffff)));
                    const float16 high(static_cast<float>(T::of(two >> 16)));
                    all[h][s / STEPS] += static_cast<float>(low) + static_cast<float>(high);
                    two = pair(low, high);
                }
        #pragma unroll
        for (int h = 0; h < HALVES; ++h)
            for (int s = 0; s < SPANS; ++s)
                for (int step = 1; step < 4; step *= 2) all[h][s] += __shfl_xor_sync(0xffffffff, all[h][s], step);
        #pragma unroll 1
        for (int turn = first; turn < limit; turn += TURN) {
            const int column = turn + warp * 16, from = min(column, limit - 16);
            KeyCodes key[2][SPANS];
            ValueCodes value[4][SPANS];
            Scales factor[2], shift[2], value_factor[2], value_shift[2];
            #pragma unroll
            for (int m = 0; m < 2; ++m) {
                for (int s = 0; s < SPANS; ++s)
                    key[m][s] = *reinterpret_cast<const KeyCodes*>(
                        key_codes + (from + 8 * m + g) * static_cast<long>(D / 4) + s * (SPAN / 4));
                factor[m] = scales_of(key_scales, from + 8 * m + 2 * t);
                shift[m] = scales_of(key_biases, from + 8 * m + 2 * t);
                value_factor[m] = scales_of(value_scales, from + 8 * m + 2 * t);
                value_shift[m] = scales_of(value_biases, from + 8 * m + 2 * t);
            }
            #pragma unroll
            for (int c = 0; c < 4; ++c)
                for (int s = 0; s < SPANS; ++s)
                    value[c][s] = *reinterpret_cast<const ValueCodes*>(
                        value_codes + (from + c / 2 * 8 + 2 * t + c % 2) * static_cast<long>(D / 4) + s * (SPAN / 4));
            float score[2][4] = {};
            #pragma unroll
            for (int s = 0; s < SPANS; ++s)
                for (int m = 0; m < 2; ++m) {
                    float found[4] = {};
                    for (int k = 0; k < STEPS; ++k) {
                        const unsigned int codes = key[m][s].word[k];
                        meet(Bool<false>(), found, s * STEPS + k, __byte_perm(codes, POWERS, 0x4140),
                             __byte_perm(codes, POWERS, 0x4342));
                    }
                    for (int i = 0; i < 2 * HALVES; ++i) {
                        const float by = static_cast<float>(factor[m].of[i % 2][s]);
                        const float bias = static_cast<float>(shift[m].of[i % 2][s]) - POWER * by;
                        score[m][i] += by * found[i] + bias * all[i / 2][s];
                    }
                }
            #pragma unroll
            for (int m = 0; m < 2; ++m)
                for (int i = 0; i < 2 * HALVES; ++i) {
                    const int at = column + m * 8 + 2 * t + i % 2;
                    score[m][i] = at < min(edge[i / 2], limit) ? score[m][i] * __int_as_float(SCALE) : NEVER;
                }
            const float before_all[2] = {best[0], best[HALVES - 1]};
            soften(score);
            #pragma unroll
            for (int s = 0; s < SPANS; ++s) {
                unsigned int weight[4] = {};
                for (int h = 0; h < HALVES; ++h) {
                    rest[h][s] *= __expf(before_all[h] - best[h]);
                    for (int m = 0; m < 2; ++m) {
                        float lifted[2];
                        for (int e = 0; e < 2; ++e) {
                            const float one = score[m][2 * h + e];
                            rest[h][s] += one * static_cast<float>(value_shift[m].of[e][s]);
                            lifted[e] = one * (LIFT * static_cast<float>(value_factor[m].of[e][s]));
                        }
                        weight[2 * m + h] = pair(float16(lifted[0]), float16(lifted[1]));
                    }
                }
                for (int w = 0; w < SPAN / 32; ++w)
                    for (int k = 0; k < 4; ++k) {
                        const int mix = k < 2 ? 0x5140 : 0x7362, order = k % 2 ? 0x4342 : 0x4140;
                        auto both = [&](int c) {
                            const auto codes = __byte_perm(value[c][s].word[w], value[c + 1][s].word[w], mix);
                            return less_1024(__byte_perm(codes, POWERS, order));
                        };
                        float (&to)[4] = sum[s * (SPAN / 8) + 4 * w + k];
                        tile<false>(to, weight[0], weight[1], weight[2], weight[3], both(0), both(2));
                    }
            }
        }
        #pragma unroll
        for (int h = 0; h < HALVES; ++h)
            for (int s = 0; s < SPANS; ++s) {
                for (int step = 1; step < 4; step *= 2) rest[h][s] += __shfl_xor_sync(0xffffffff, rest[h][s], step);
                for (int j = 0; j < SPAN / 8; ++j)
                    for (int e = 0; e < 2; ++e) {
                        float& one = sum[s * (SPAN / 8) + j][2 * h + e];
                        one = one / LIFT + rest[h][s];
                    }
            }
    };
    if (part < num_parts - 1)
        over_packed(part * length, min(packed, (part + 1) * length));
    else
        over_exact(0, limits[0], limits[2], [&](long p, int h) { return p <= here[h] && p >= edge[h]; });
"""
JOIN = """
    __shared__ float bests[WARPS][ROWS], totals[WARPS][ROWS], sums[WARPS][ROWS][D + 8];
    #pragma unroll
    for (int h = 0; h < HALVES; ++h) {
        for (int step = 1; step < 4; step *= 2) total[h] += __shfl_xor_sync(0xffffffff, total[h], step);
        bests[warp][h * 8 + g] = best[h];
        totals[warp][h * 8 + g] = total[h];
        for (int j = 0; j < TILES; ++j)
            for (int e = 0; e < 2; ++e) sums[warp][h * 8 + g][j * 8 + 2 * t + e] = sum[j][2 * h + e];
    }
    __syncthreads();
    const int mine = min(ROWS, asked - static_cast<int>(blockIdx.z) * ROWS);
    #pragma unroll 1
    for (int k = threadIdx.x; k < mine * D; k += WARPS * 32) {
        const int own = k / D, d = k % D, one = blockIdx.z * ROWS + own;
        const int slot = (d / SPAN * (SPAN / 8) + d % (SPAN / 8)) * 8 + d % SPAN / (SPAN / 8);
        float top = -1e30f, above = 0.0f, below = 0.0f;
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, bests[w][own]);
        for (int w = 0; w < WARPS; ++w) {
            const float fade = __expf(bests[w][own] - top);
            above += fade * sums[w][own][slot];
            below += fade * totals[w][own];
        }
        const long at = ((row * gridDim.y + head) * static_cast<long>(G) + one % G) * n + one / G;
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
# A block for each query of a head, a thread for each dimension and for what fills the last warp. Every warp weighs the
# parts; the first one's are kept.
MERGE = """
    __shared__ float shares[MOST_PARTS + 1];
    const long at = blockIdx.x;
    const int d = threadIdx.x, lane = threadIdx.x % 32, num_parts = parts_shape[3];
    const float* mine = parts + at * num_parts * (D + 2);
    float top = -1e30f, below = 0.0f, above = 0.0f;
    #pragma unroll 1
    for (int p = lane; p < num_parts; p += 32) top = fmaxf(top, mine[p * (D + 2) + D]);
    for (int step = 16; step > 0; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, step));
    #pragma unroll 1
    for (int p = lane; p < num_parts; p += 32) {
        const float fade = __expf(mine[p * (D + 2) + D] - top);
        if (threadIdx.x < 32) shares[p] = fade;
        below += fade * mine[p * (D + 2) + D + 1];
    }
    for (int step = 16; step > 0; step /= 2) below += __shfl_xor_sync(0xffffffff, below, step);
    __syncthreads();
    if (d >= D) return;
    #pragma unroll 8
    for (int p = 0; p < num_parts; ++p) above += shares[p] * mine[p * (D + 2) + d];
    out[at * D + d] = static_cast<T>(below > 0.0f ? above / below : 0.0f);
"""
