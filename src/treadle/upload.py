"""Small arrays from the host to where a GPU reads them quickly."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

SHARED = 8  # bytes of an array that MLX keeps where host and device both can reach it, whoever made it


def on_device(values: Any, dtype: Any) -> Any:
    """`values`, an array of numpy's or lists, as an array in the device's own memory. Engine thread only, and lazy.

    On CUDA what the host makes lies in memory that both can reach, and each processor of a GPU that needs a number from
    there waits for it: attention over 4,096 tokens took 25 to 90 us on an H200 with its position and limits there, and
    6 us without. A sum takes it elsewhere, as its result is larger than what goes in and cannot take that place.
    """
    made = mx.array(values, dtype)
    if not _shares_memory():
        return made
    return (made[None] + _zeros(2 if made.nbytes > SHARED else 4, made.ndim, dtype))[0]


@lru_cache(maxsize=32)
def _zeros(copies: int, ndim: int, dtype: Any) -> Any:
    found = mx.zeros((copies, *[1] * ndim), dtype)
    mx.eval(found)  # it outlives the step
    return found


@lru_cache(maxsize=1)
def _shares_memory() -> bool:
    return bool(mx.cuda.is_available())
