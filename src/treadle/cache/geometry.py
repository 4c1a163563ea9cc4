"""Sizes of the buffers of attention layers: what the columns of one and of several sequences share. No MLX."""

from __future__ import annotations

STEP = 256  # buffers grow by this many columns
SLACK = 256  # tokens kept behind a window, so that recent ones can be taken back


def round_up(n: int) -> int:
    """The next multiple of STEP."""
    return -(-n // STEP) * STEP


def bucket(columns: int) -> int:
    """As many columns or more, of few sizes: multiples of STEP, and of a quarter or half of their number."""
    grain = max(STEP, 1 << max(0, (columns - 1).bit_length() - 2))
    return -(-columns // grain) * grain


def needed_window(window: int | None, position: int, held: int) -> tuple[int, int]:
    """Of the `held` tokens before `position`, how many must be kept to go on from there; and the first position from
    which one can go on with those alone."""
    assert window is not None
    n = min(held, window)
    first = position - n
    return n, first + window - 1 if first > 0 else 0
