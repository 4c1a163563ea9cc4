"""CUDA sources compiled as C++ for a test: a thread for each of a block, blocks one after the other.

So indices, sums and roundings are tested without a device; what a compiler for CUDA makes of them is tested at load.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

COMPILER = shutil.which("g++")

SHIM = """
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
struct bfloat {
    uint16_t bits;
    bfloat() = default;
    static bfloat of(uint16_t u) { return bfloat(u); }
    explicit bfloat(uint16_t u) : bits(u) {}
    explicit bfloat(float f) { uint32_t u; memcpy(&u, &f, 4); bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
    explicit operator float() const { uint32_t u = uint32_t(bits) << 16; float f; memcpy(&f, &u, 4); return f; }
};
using bfloat16 = bfloat;
struct float16 {
    uint16_t bits;
    float16() = default;
    explicit float16(float f) { _Float16 h = f; memcpy(&bits, &h, 2); }
    explicit operator float() const { _Float16 h; memcpy(&h, &bits, 2); return h; }
    static float16 of(uint16_t u) { float16 h; h.bits = u; return h; }
};
struct uint4 { unsigned int x, y, z, w; };
struct Index { int x = 1, y = 1, z = 1; };
static thread_local Index threadIdx, blockIdx, blockDim, gridDim;
static std::vector<std::unique_ptr<std::barrier<>>> warps;
static std::unique_ptr<std::barrier<>> block;
static float lanes[32][32];
static void __syncwarp() { warps[threadIdx.x / 32]->arrive_and_wait(); }
static void __syncthreads() { block->arrive_and_wait(); }
static float __shfl_xor_sync(unsigned, float value, int mask) {
    float* mine = lanes[threadIdx.x / 32];
    mine[threadIdx.x % 32] = value;
    __syncwarp();
    const float found = mine[(threadIdx.x % 32) ^ mask];
    __syncwarp();
    return found;
}
struct uint2 { unsigned int x, y; };
static unsigned int __byte_perm(unsigned int a, unsigned int b, unsigned int order) {
    const uint64_t both = (uint64_t(b) << 32) | a;
    unsigned int found = 0;
    for (int i = 0; i < 4; ++i) found |= unsigned((both >> (8 * (order >> (4 * i) & 7))) & 0xff) << (8 * i);
    return found;
}
// mma.m16n8k16: lane l has rows l/4 and l/4 + 8 of a, column l/4 of b, numbers 2 (l % 4) + {0, 1, 8, 9} of both.
static unsigned int pieces[32][32][6];
template <bool BF16>
static void tile(float (&sum)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    auto mine = pieces[threadIdx.x / 32];
    const unsigned int given[6] = {a0, a1, a2, a3, b0, b1};
    memcpy(mine[threadIdx.x % 32], given, sizeof given);
    __syncwarp();
    auto half = [](unsigned int pair, int k) {
        const uint16_t bits = k % 2 ? pair >> 16 : pair;
        return BF16 ? float(bfloat::of(bits)) : float(float16::of(bits));
    };
    for (int i = 0; i < 4; ++i) {
        const int row = threadIdx.x % 32 / 4 + i / 2 * 8, column = threadIdx.x % 4 * 2 + i % 2;
        for (int k = 0; k < 16; ++k)
            sum[i] += half(mine[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], k)
                    * half(mine[column * 4 + k % 8 / 2][4 + k / 8], k);
    }
    __syncwarp();
}
template <bool B> struct Bool { static constexpr bool value = B; };
static unsigned int less_1024(unsigned int pair) {
    auto one = [](unsigned int bits) { return float16(float(float16::of(bits)) - 1024.0f).bits; };
    return one(pair & 0xffff) | unsigned(one(pair >> 16)) << 16;
}
template <bool BF16> static unsigned int fma_of_pairs(unsigned int a, unsigned int b, unsigned int c) {
    auto one = [&](int by) {
        auto number = [&](unsigned int pair) {
            const uint16_t bits = pair >> by;
            return BF16 ? float(bfloat::of(bits)) : float(float16::of(bits));
        };
        const float found = std::fma(number(a), number(b), number(c));
        return unsigned(BF16 ? bfloat(found).bits : float16(found).bits) << by;
    };
    return one(0) | one(16);
}
static uint4 dynamic_memory[256 * 1024 / 16];
static uint4* shared_pieces() { return dynamic_memory; }
static void fetch_piece(uint4* to, const void* from, bool there) { there ? *to = *(const uint4*)from : *to = {}; }
static void fetch_pair(void* to, const void* from, bool there) { memset(to, 0, 4); if (there) memcpy(to, from, 4); }
static void end_stage() {}
template <int> static void wait_for_all_but() {}
#define __expf std::exp
using std::fmaxf;
static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static float __int_as_float(int i) { float f; memcpy(&f, &i, 4); return f; }
static float __uint_as_float(unsigned int u) { float f; memcpy(&f, &u, 4); return f; }
template <class X> static X __ldg(const X* p) { return *p; }
using std::min, std::max;
#define __shared__ static
"""
LAUNCH = """
extern "C" void launch(void** arrays, int* shapes, const int* grid, int threads) {
    block = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    for (int w = 0; w < threads; w += 32) warps.push_back(std::make_unique<std::barrier<>>(std::min(32, threads - w)));
    for (int b = 0; b < grid[0] * grid[1] * grid[2]; ++b) {
        std::vector<std::thread> all;
        for (int t = 0; t < threads; ++t) all.emplace_back([=] {
            threadIdx.x = t, blockDim.x = threads, gridDim = {grid[0], grid[1], grid[2]};
            blockIdx = {b % grid[0], b / grid[0] % grid[1], b / grid[0] / grid[1]};
            body(arrays, shapes);
        });
        for (auto& one : all) one.join();
    }
}
"""
SIZES = 4  # of an array's shape, at most
C_TYPES = {
    mx.float32: "float",
    mx.bfloat16: "bfloat",
    mx.float16: "float16",
    mx.int32: "int",
    mx.uint32: "unsigned int",
}


def compiled(inputs_of: Sequence[str], outputs_of: Sequence[str], source: str, folder: Path) -> Any:
    """What `mx.fast.cuda_kernel` gives for a kernel, run by threads of this machine."""

    def launch(
        inputs: list[Any],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[Any],
        shared_memory: int = 0,
    ) -> list[Any]:
        arguments = [*zip(inputs_of, (a.dtype for a in inputs), strict=True)]
        arguments += zip(outputs_of, output_dtypes, strict=True)
        lines = [f"auto {a} = static_cast<{C_TYPES[kind]}*>(arrays[{i}]);" for i, (a, kind) in enumerate(arguments)]
        for i, (a, given) in enumerate(zip(inputs_of, inputs, strict=True)):
            sizes = [f"{a}_shape[{axis}]" for axis in range(given.ndim)]
            steps = [" * ".join(["1L", *sizes[axis + 1 :]]) for axis in range(given.ndim)]
            lines.append(f"const int* {a}_shape = shapes + {SIZES * i};")
            lines.append(f"const long {a}_strides[] = {{{', '.join(steps)}}};")
        lines += [f"constexpr int {a}_ndim = {given.ndim};" for a, given in zip(inputs_of, inputs, strict=True)]
        lines += [
            f"using {key} = {C_TYPES[value]};" if key == "T" else f"constexpr int {key} = {int(value)};"
            for key, value in template
        ]
        text = SHIM + "static void body(void** arrays, int* shapes) {" + "\n".join(lines) + source + "}" + LAUNCH
        written = [f"const_cast<T*>({name})" in source for name in inputs_of]
        held = [host(a, copy=not kept) for a, kept in zip(inputs, written, strict=True)]
        out = [
            np.full(s, 7, np.float32 if d == mx.float32 else np.uint16)
            for s, d in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(arguments))(*[a.ctypes.data for a in held + out])
        shapes = (ctypes.c_int * (SIZES * len(inputs)))(*[n for a in inputs for n in (*a.shape, *[1] * SIZES)[:SIZES]])
        blocks = (ctypes.c_int * 3)(-(-grid[0] // threadgroup[0]), *grid[1:])
        library(text, folder).launch(pointers, shapes, blocks, threadgroup[0])
        return [mx.array(a).view(d) for a, d in zip(out, output_dtypes, strict=True)]

    return launch


def host(a: Any, copy: bool = True) -> Any:
    """As numpy's, which is aligned for any load. Without a copy the same memory, for a kernel that writes there."""
    a = mx.contiguous(a)
    return np.array(a.view(mx.uint16) if a.dtype in (mx.bfloat16, mx.float16) else a, copy=copy)


def library(text: str, folder: Path) -> Any:
    stem = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not stem.with_suffix(".so").exists():
        stem.with_suffix(".cpp").write_text(text)
        assert COMPILER is not None
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
        subprocess.run([COMPILER, *options, "-o", stem.with_suffix(".so"), stem.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(stem.with_suffix(".so")))
