"""Small arrays from the host to where a GPU reads them quickly. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.models.cuda import nvrtc

SHARED = 8  # bytes of an array that MLX keeps where host and device both can reach it, whoever made it
NUMPY = {mx.int32: np.int32, mx.uint32: np.uint32, mx.float32: np.float32}  # all of four bytes
ROOM = 12 * 1024  # numbers in what it makes: a size that the host has no arrays of, whose memory MLX would reuse for it
SIZES = (8, 32, 128)  # numbers that go along with a launch; each size is compiled


def on_device(values: Any, dtype: Any) -> Any:
    """`values`, an array of numpy's or lists, as an array in the device's own memory; lazy.

    On CUDA what the host makes lies in memory that both can reach, and each processor of a GPU that needs a number from
    there waits for it: attention over 4,096 tokens took 25 to 90 us on an H200 with its position and limits there, and
    6 us without. A few numbers go along with the launch of a kernel that writes them. More are read by a sum, whose
    result is larger than what goes in, so that it cannot take that place.
    """
    if not _reads_host_slowly():
        return mx.array(values, dtype)
    held = np.ascontiguousarray(values, NUMPY[dtype])
    size = next((size for size in SIZES if held.size <= size), 0)
    write = _writer(size) if size else None
    if write is not None:
        numbers = held.view(np.int32).ravel().tolist()
        (found,) = write(scalars=numbers + [0] * (size - len(numbers)))
        return found[: held.size].view(dtype).reshape(held.shape)
    made = mx.array(held)
    return (made[None] + _zeros(2 if made.nbytes > SHARED else 4, made.ndim, dtype))[0]


@lru_cache(maxsize=8)
def numbers_to(end: int) -> Any:
    """int32 [1, end]: 0, 1, 2 and so on, made once. Columns of one sequence hold the tokens of their own numbers."""
    found = mx.arange(end, dtype=mx.int32)[None]
    mx.eval(found)  # it outlives the step
    return found


@lru_cache(maxsize=len(SIZES))
def _writer(size: int) -> Callable[..., Any] | None:
    """What writes so many numbers, called with `scalars`; None where kernels cannot be compiled here."""
    name = f"treadle_write_{size}"
    arguments = ", ".join(["int* out", *(f"int n{i}" for i in range(size))])
    lines = " ".join(f"out[{i}] = n{i};" for i in range(size))
    compiler = nvrtc()
    code = compiler and compiler.code(name, f'extern "C" __global__ void {name}({arguments}) {{ {lines} }}')
    if not code:
        return None
    return partial(
        mx.fast.precompiled_cuda_kernel,
        name=name,
        compiled_source=code,
        inputs=[],
        output_shapes=[(ROOM,)],
        output_dtypes=[mx.int32],
        grid=(1, 1, 1),
        threadgroup=(1, 1, 1),
    )


@lru_cache(maxsize=32)
def _zeros(copies: int, ndim: int, dtype: Any) -> Any:
    found = mx.zeros((copies, *[1] * ndim), dtype)
    mx.eval(found)  # it outlives the step
    return found


@lru_cache(maxsize=1)
def _reads_host_slowly() -> bool:
    return bool(mx.cuda.is_available())
