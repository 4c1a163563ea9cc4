"""Positions of models with three of them for each token (M-RoPE, Qwen2-VL, arXiv 2409.12191). Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.types import Span

Positions = NDArray[np.int32]


def mrope(num_tokens: int, spans: Sequence[Span]) -> tuple[Positions, int]:
    """Time, height and width of every token of a prompt, int32 [3, num_tokens], and how far later tokens are shifted.

    A token behind the prompt stands at its index plus the shift in all three. Text counts on in all three; a picture
    is one moment in time with a row and a column for each of its tokens, and text goes on behind the larger side.
    """
    made = np.empty((3, num_tokens), np.int32)
    index = position = 0
    for span in spans:
        text = span.start - index
        made[:, index : span.start] = np.arange(position, position + text)
        position += text
        rows, columns = span.picture.grid
        made[0, span.start : span.end] = position
        made[1, span.start : span.end] = position + np.repeat(np.arange(rows), columns)
        made[2, span.start : span.end] = position + np.tile(np.arange(columns), rows)
        index, position = span.end, position + max(rows, columns)
    made[:, index:] = np.arange(position, position + num_tokens - index)
    return made, position - index


def places(positions: Positions, shift: int, start: int, n: int) -> Positions:
    """Those of tokens [start, start + n), int32 [3, n]; `positions` and `shift` are those of the prompt."""
    known = positions[:, start : start + n]
    later = np.arange(max(start, positions.shape[1]), start + n, dtype=np.int32) + np.int32(shift)
    return np.concatenate([known, np.broadcast_to(later, (3, len(later)))], axis=1)
