"""What the CUDA sources of a layer's kernels compute: compiled as C++, a thread for each of a block, and compared.

So indices, sums and roundings are tested without a device; what a compiler for CUDA makes of them is tested at load.
"""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from treadle.models import kernels
from treadle.models.blocks import turn_of
from treadle.models.kernels import ADD_NORM, GATED, HEADS, KERNELS, ROUNDING, Heads, Kernels, difference
from treadle.runtime import mlx_lm_module

COMPILER = shutil.which("g++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

SHIM = """
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
    explicit bfloat(float f) { uint32_t u; memcpy(&u, &f, 4); bits = (u + 0x7fff + ((u >> 16) & 1)) >> 16; }
    explicit operator float() const { uint32_t u = uint32_t(bits) << 16; float f; memcpy(&f, &u, 4); return f; }
};
struct Index { int x = 1; };
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
static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
#define __shared__ static
struct Sigmoid {
    template <typename T> T operator()(T x) {
        const T y = T(1.0f / float(T(1.0f + float(T(expf(std::fabs(float(x))))))));
        return float(x) < 0 ? y : T(1.0f - float(y));
    }
};
"""
LAUNCH = """
extern "C" void launch(void** arrays, int* rows, int blocks, int threads) {
    block = std::make_unique<std::barrier<>>(threads);
    warps.clear();
    for (int w = 0; w < threads; w += 32) warps.push_back(std::make_unique<std::barrier<>>(std::min(32, threads - w)));
    for (int b = 0; b < blocks; ++b) {
        std::vector<std::thread> all;
        for (int t = 0; t < threads; ++t) all.emplace_back([=] {
            threadIdx.x = t, blockIdx.x = b, blockDim.x = threads, gridDim.x = blocks;
            body(arrays, rows);
        });
        for (auto& one : all) one.join();
    }
}
"""
NAMES = {
    ADD_NORM: (["stream", "branch", "weight", "eps"], ["sum", "normed"], kernels.ADD_NORM_SOURCE),
    HEADS: (
        ["stacked", "position", "query_norm", "key_norm", "numbers", "freqs"],
        ["queries", "keys", "values"],
        kernels.HEADS_SOURCE,
    ),
    GATED: (["stacked"], ["out"], kernels.GATED_SOURCE),
}
C_TYPES = {mx.float32: "float", mx.bfloat16: "bfloat", mx.int32: "int"}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def compiled(name: str, folder: Path) -> Any:
    """What `mx.fast.cuda_kernel` gives for a kernel, run by threads of this machine."""
    inputs_of, outputs_of, source = NAMES[name]

    def launch(
        inputs: list[Any],
        template: list[tuple[str, Any]],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: list[tuple[int, ...]],
        output_dtypes: list[Any],
    ) -> list[Any]:
        arguments = [*zip(inputs_of, (a.dtype for a in inputs), strict=True)]
        arguments += zip(outputs_of, output_dtypes, strict=True)
        lines = [f"auto {a} = static_cast<{C_TYPES[kind]}*>(arrays[{i}]);" for i, (a, kind) in enumerate(arguments)]
        lines += [f"const int* {a}_shape = rows + {i};" for i, a in enumerate(inputs_of)]
        lines += [
            f"using {key} = {C_TYPES[value]};" if key == "T" else f"constexpr int {key} = {value};"
            for key, value in template
        ]
        text = SHIM + "static void body(void** arrays, int* rows) {" + "\n".join(lines) + source + "}" + LAUNCH
        held = [host(a) for a in inputs]
        out = [
            np.full(s, 7, np.uint16 if d == mx.bfloat16 else np.float32)
            for s, d in zip(output_shapes, output_dtypes, strict=True)
        ]
        pointers = (ctypes.c_void_p * len(arguments))(*[a.ctypes.data for a in held + out])
        rows = (ctypes.c_int * len(inputs))(*[a.shape[0] for a in inputs])
        library(text, folder).launch(pointers, rows, -(-grid[0] // threadgroup[0]), threadgroup[0])
        return [mx.array(a).view(d) for a, d in zip(out, output_dtypes, strict=True)]

    return launch


def host(a: Any) -> Any:
    a = mx.contiguous(a)
    return np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)


def library(text: str, folder: Path) -> Any:
    stem = folder / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not stem.with_suffix(".so").exists():
        stem.with_suffix(".cpp").write_text(text)
        assert COMPILER is not None
        options = ["-std=c++20", "-O1", "-w", "-shared", "-fPIC", "-pthread"]
        subprocess.run([COMPILER, *options, "-o", stem.with_suffix(".so"), stem.with_suffix(".cpp")], check=True)
    return ctypes.CDLL(str(stem.with_suffix(".so")))


def heads_of(number: int, shared: int, dim: int, rope: Any, dtype: Any) -> Heads:
    """With norms where there are more heads for queries than for keys."""
    weights = [1 + 0.1 * mx.random.normal((dim,), key=mx.random.key(i)) for i in (1, 2)]
    norms = [w.astype(dtype) for w in weights] if number > shared else [None, None]
    return Heads(number, shared, dim, rope, turn_of(rope), norms[0], norms[1], 1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["whole", "freqs", "traditional"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_mlx_does(
    name: str, case: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that fill a warp and that do not; heads of which all or a part is turned."""
    ropes = mlx_lm_module("models.rope_utils")
    heads, size, width = {
        "whole": (heads_of(4, 2, 16, nn.RoPE(16, base=1e6), dtype), 96, 40),
        "freqs": (heads_of(2, 2, 64, ropes.initialize_rope(64, 5e5, False, LLAMA3, 131072), dtype), 100, 24),
        "traditional": (heads_of(3, 1, 40, nn.RoPE(20, traditional=True, scale=0.5), dtype), 64, 300),
    }[case]
    monkeypatch.setattr(kernels, "_kernel", lambda kernel: compiled(kernel, tmp_path))
    assert difference(name, Kernels((name,)), heads, size, width, dtype) <= ROUNDING[dtype]
