"""The product of one row: who gets it, and what its CUDA source computes, compiled as C++ and run lane by lane here."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from treadle.models import gemv, linear

# What CUDA gives to a kernel, for one thread after the other; sums of lanes are added by the caller.
SHIM = """
#include <algorithm>
#include <cstdint>
#include <cstring>
using std::min;
struct Index { int x, y, z; };
static Index threadIdx, blockIdx;
struct uint4 { unsigned int x, y, z, w; };
struct bfloat {
    uint16_t bits;
    operator float() const { uint32_t u = uint32_t(bits) << 16; float f; memcpy(&f, &u, 4); return f; }
};
static float __uint_as_float(unsigned int u) { float f; memcpy(&f, &u, 4); return f; }
template <class X> X __ldg(const X* p) { return *p; }
"""
RUN = """
static void kernel(const bfloat* x, const WORD* w, const bfloat* scales, const bfloat* biases, const int* w_shape,
                   float* result) {
    using T = bfloat;
    constexpr int WARPS = 4, OUTPUTS = 2, GROUP = %(group)d, BITS = %(bits)d;
    %(body)s
    for (int o = 0; o < OUTPUTS; ++o) if (first + o < N) result[first + o] += sum[o];
}
extern "C" void run(const bfloat* x, const WORD* w, const bfloat* s, const bfloat* b, const int* w_shape, float* r) {
    for (blockIdx.x = 0; blockIdx.x * 8 < w_shape[0]; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < 128; ++threadIdx.x) kernel(x, w, s, b, w_shape, r);
}
"""


def host_kernel(folder: Path, form: gemv.Form | None) -> Any:
    source, library = folder / "gemv.cpp", folder / "gemv.so"
    body = gemv.BEGIN + (gemv.DENSE if form is None else gemv.PACKED)
    run = RUN % {"body": body, "group": form.group_size if form else 64, "bits": form.bits if form else 4}
    word = "bfloat" if form is None else "unsigned int"
    source.write_text(SHIM + run.replace("WORD", word))
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(source), "-o", str(library)], check=True, timeout=120
    )
    return ctypes.CDLL(str(library)).run


def host_array(array: Any) -> Any:
    mx.eval(array)
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("form", [None, gemv.Form(64, 4), gemv.Form(32, 4), gemv.Form(128, 8)])
@pytest.mark.parametrize(("outputs", "inputs"), [(37, 512), (8, 1152), (1, 128)])
def test_the_source_computes_the_product(form: gemv.Form | None, outputs: int, inputs: int, tmp_path: Path) -> None:
    mx.random.seed(outputs)
    weight = mx.random.normal((outputs, inputs)).astype(mx.bfloat16)
    x = mx.random.normal((inputs,)).astype(mx.bfloat16)
    if form is None:
        arrays, whole = [weight, weight, weight], weight
    else:
        arrays = list(mx.quantize(weight, form.group_size, form.bits))
        scales, biases = (a.astype(mx.float32) for a in arrays[1:])
        whole = mx.dequantize(arrays[0], scales, biases, group_size=form.group_size, bits=form.bits)
    wanted = np.array(whole.astype(mx.float32)) @ np.array(x.astype(mx.float32))
    held = [host_array(a) for a in (x, *arrays)]
    shape = np.array(arrays[0].shape, np.int32)
    found = np.zeros(outputs, np.float32)
    host_kernel(tmp_path, form)(*(ctypes.c_void_p(a.ctypes.data) for a in (*held, shape, found)))
    np.testing.assert_allclose(found, wanted, atol=2e-5 * inputs)


def test_only_cuda_has_the_kernels() -> None:
    assert not gemv.knows(nn.Linear(64, 64)) and not gemv.knows(nn.QuantizedLinear(64, 64))


def test_layers_of_other_forms_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemv, "_sound", lambda form, dtype: True)
    half = nn.Linear(256, 8)
    half.set_dtype(mx.bfloat16)
    assert gemv.knows(half) and not gemv.knows(nn.Linear(256, 8)), "float32 is not read"
    narrow = nn.Linear(20, 8)
    narrow.set_dtype(mx.bfloat16)
    assert not gemv.knows(narrow)
    packed = nn.QuantizedLinear(256, 8, group_size=64, bits=4)
    packed.set_dtype(mx.bfloat16)
    assert gemv.knows(packed)
    packed.bits = 6
    assert not gemv.knows(packed)


def test_one_row_takes_the_kernel_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(layer: Any, x: Any) -> Any:
        return (x @ mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4).T) + 1000

    monkeypatch.setattr(linear, "row_product", plain)
    model = nn.Sequential(nn.QuantizedLinear(64, 16, group_size=32, bits=4))
    linear.flatten_rows(model, pad=False)
    layer = model.layers[0]
    layer.lean = True
    one, two = mx.ones((1, 1, 64)), mx.ones((2, 1, 64))
    assert (layer(one) > 500).all() and (layer(two) < 500).all()
    layer.lean = False
    assert (layer(one) < 500).all()


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gemv._sound.cache_clear()
    monkeypatch.setattr(gemv, "_launch", lambda form, x, *weights: mx.zeros((1, weights[0].shape[0]), x.dtype))
    assert not gemv._sound(None, mx.bfloat16) and "off by" in caplog.text

    def broken(form: Any, x: Any, *weights: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(gemv, "_launch", broken)
    assert not gemv._sound(gemv.Form(64, 4), mx.bfloat16) and "no compiler" in caplog.text
    gemv._sound.cache_clear()
