"""Small arrays on the device. That a compiler for CUDA takes the kernels is tested in `models/test_cuda.py`."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.models.cuda_host import COMPILER, library
from treadle.models import upload
from treadle.models.upload import on_device


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a device that reads what the host makes slowly."""
    monkeypatch.setattr(upload, "_reads_host_slowly", lambda: True)
    upload._writer.cache_clear()
    yield
    upload._writer.cache_clear()


VALUES = [
    ([7], mx.int32),
    ([3, 2**30, -5], mx.int32),
    ((0.5, -np.inf, 1e-7), mx.float32),
    (np.arange(40, dtype=np.uint32).reshape(20, 2) + 2**31, mx.uint32),
    (np.arange(600, dtype=np.int32).reshape(3, 200), mx.int32),
    (np.zeros((0, 4), np.int32), mx.int32),
]


def same(found: Any, values: Any, dtype: Any) -> bool:
    return found.dtype == dtype and np.array_equal(np.array(found), np.array(values, upload.NUMPY[dtype]))


@pytest.mark.parametrize(("values", "dtype"), VALUES)
def test_where_there_is_one_memory_it_is_an_array(values: Any, dtype: Any) -> None:
    assert same(on_device(values, dtype), values, dtype)


@pytest.mark.parametrize(("values", "dtype"), VALUES)
def test_a_sum_gives_an_array_of_its_own(values: Any, dtype: Any, shared: None) -> None:
    assert same(on_device(values, dtype), values, dtype)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("values", "dtype"), VALUES)
def test_a_kernel_writes_a_few_numbers(
    values: Any, dtype: Any, shared: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []

    class Compiler:
        def code(self, name: str, text: str) -> bytes:
            return text.replace("__global__", "").encode()

    def launch(name: str, compiled_source: bytes, scalars: list[int], output_shapes: Any, **rest: Any) -> list[Any]:
        out = np.zeros(output_shapes[0], np.int32)
        call = getattr(library(compiled_source.decode(), tmp_path), name)
        call(ctypes.c_void_p(out.ctypes.data), *scalars)
        written.append(len(scalars))
        return [mx.array(out)]

    monkeypatch.setattr(upload, "nvrtc", Compiler)
    monkeypatch.setattr(mx.fast, "precompiled_cuda_kernel", launch)
    assert same(on_device(values, dtype), values, dtype)
    assert written == [size for size in upload.SIZES if np.size(values) <= size][:1]
