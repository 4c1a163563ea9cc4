"""Sizes and places in the buffers of attention layers: what the columns of one and of several sequences share."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import mlx.core as mx

STEP = 256  # buffers grow by this many columns
SLACK = 256  # tokens kept behind a window, so that recent ones can be taken back


def round_up(n: int) -> int:
    """The next multiple of STEP."""
    return -(-n // STEP) * STEP


def needed_window(window: int | None, position: int, held: int) -> tuple[int, int]:
    """Of the `held` tokens before `position`, how many must be kept to go on from there; and the first position from
    which one can go on with those alone."""
    assert window is not None
    n = min(held, window)
    first = position - n
    return n, first + window - 1 if first > 0 else 0


@lru_cache(maxsize=8)
def places(capacity: int) -> Any:
    """int32 [1, capacity]: each column holds the token of its own number."""
    found = mx.arange(capacity, dtype=mx.int32)[None]
    mx.eval(found)  # it outlives the step
    return found
