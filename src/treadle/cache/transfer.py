"""Moving what a sequence computed between layers and the prefix cache. Engine thread only; nothing is evaluated here.

Rows of layers that keep all tokens travel by position. Recurrent layers, and the last rows of windowed ones, travel as
a `Snapshot` of one position, because earlier positions are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.cache.columns import BatchColumns, Columns, SoloColumns
from treadle.cache.layers import Layers, Rows


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Recurrent and windowed layers of one sequence after `position` tokens.

    It serves any position from `floor` on: windowed rows can be cut at the end, recurrent state cannot.
    """

    position: int
    floor: int
    states: tuple[tuple[Any, ...], ...]
    windows: tuple[tuple[Any, Any], ...]  # per windowed layer: keys, values [1, heads, held, dim]

    @property
    def nbytes(self) -> int:
        arrays = [a for line in (*self.states, *self.windows) for a in line if a is not None]
        return sum(a.nbytes for a in arrays)

    def arrays(self) -> list[Any]:
        return [a for line in (*self.states, *self.windows) for a in line if a is not None]


def full_rows(layers: Layers) -> list[Rows]:
    """The layers whose rows are kept for every token."""
    return [r for r in layers.rows if r.columns.window is None]


def windowed_rows(layers: Layers) -> list[Rows]:
    return [r for r in layers.rows if r.columns.window is not None]


def read_rows(layers: Layers, row: int, start: int, end: int) -> list[Any]:
    """Copies of the rows of tokens [start, end): keys and values by turns, [1, heads, n, dim] each."""
    full = full_rows(layers)
    held = _held(full[0].columns, row)[start:end] if full else None  # layers of a kind share their columns
    return [_cut(a, row, held) for r in full for a in (r.keys, r.values)]


def needs_snapshots(layers: Layers) -> bool:
    return bool(layers.states) or any(window is not None for window in layers.columns)


def snapshot(layers: Layers, row: int, back: int = 0) -> Snapshot:
    """The sequence's layers as they are, or `back` tokens ago where there are no recurrent ones."""
    assert not (back and layers.states)
    position = layers.lengths[row] - back
    states = tuple(tuple(line) for line in layers.state_of(row))
    windows, floors = [], [position if states else 0]
    for r in windowed_rows(layers):
        window, held = r.columns.window, _held(r.columns, row)
        assert window is not None
        held = held[: len(held) - back][-window:] if back else held[-window:]
        windows.append((_cut(r.keys, row, held), _cut(r.values, row, held)))
        first = position - len(held)
        floors.append(first + window - 1 if first > 0 else 0)
    return Snapshot(position, max(floors), states, tuple(windows))


def fill(layers: Layers, pieces: Sequence[Sequence[Any]], length: int, held: Snapshot | None) -> None:
    """Put `length` tokens into empty layers: `pieces` are consecutive results of `read_rows`."""
    for window, columns in layers.columns.items():
        assert isinstance(columns, SoloColumns)
        columns.length = length
        if window is not None:
            columns.first = length
    for i, r in enumerate(full_rows(layers)):
        start = 0
        for piece in pieces:
            r.place(0, start, piece[2 * i], piece[2 * i + 1])
            start += piece[2 * i].shape[2]
    layers.set_length(length)
    if held is not None:
        _restore(layers, held, length)


def _restore(layers: Layers, held: Snapshot, length: int) -> None:
    assert held.floor <= length <= held.position
    for state, line in zip(layers.states, held.states, strict=True):
        state.cache = list(line)
    for r, (keys, values) in zip(windowed_rows(layers), held.windows, strict=True):
        n = keys.shape[2] - (held.position - length)
        assert isinstance(r.columns, SoloColumns)
        r.columns.first = length - n
        r.place(0, 0, keys[:, :, :n], values[:, :, :n])


def _held(columns: Columns, row: int) -> Any:
    """The columns of a row's tokens, in order."""
    if isinstance(columns, BatchColumns):
        return columns.held(row)
    return np.arange(columns.index)


def _cut(buffer: Any, row: int, columns: Any) -> Any:
    """A copy of some columns of one row, as one slice when they lie together."""
    line = buffer[row : row + 1]
    n = len(columns)
    first = int(columns[0]) if n else 0
    if n == 0 or int(columns[-1]) - first + 1 == n:
        return mx.contiguous(line[:, :, first : first + n])
    return mx.take(line, mx.array(columns), axis=2)
