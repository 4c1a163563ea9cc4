"""Copies with memory of their own. Engine thread only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx


def cut(array: Any, start: int, end: int, axis: int = 2) -> Any:
    """Elements [start, end) along `axis`, sharing nothing with `array`.

    `mx.contiguous` copies a slice only where it is not contiguous already. With one head, or along the first axis, it
    always is, and the slice would keep all of `array` alive; so it is gathered instead.
    """
    if start == 0 and end == array.shape[axis]:
        return array
    outer = 1
    for size in array.shape[:axis]:
        outer *= size
    if outer > 1:
        index = [slice(None)] * axis + [slice(start, end)]
        return mx.contiguous(array[tuple(index)])
    return mx.take(array, mx.arange(start, end), axis=axis)
