"""Sizes of the buffers of attention layers: what the columns of one and of several sequences share. No MLX."""

from __future__ import annotations

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
