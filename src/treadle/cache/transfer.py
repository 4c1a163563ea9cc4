"""Moving what a sequence computed between layers and the prefix cache. Engine thread only; only `convert` and
`shrink` evaluate.

Rows of layers that keep all tokens travel by position, packed ones as they are. Recurrent layers, and the last exact
rows of windowed and packed ones, travel as a `Snapshot` of one position, because those of earlier positions are gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from treadle.cache.columns import SoloColumns
from treadle.cache.layers import Layers
from treadle.cache.pieces import Piece, num_tokens
from treadle.cache.rows import Rows, cut_columns, held_columns


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Recurrent layers and last exact rows of one sequence after `position` tokens.

    It serves any position from `floor` on: windowed rows can be cut at the end, recurrent state cannot.
    """

    position: int
    floor: int
    states: tuple[tuple[Any, ...], ...]
    windows: tuple[tuple[Any, Any], ...]  # per layer of `partial_rows`: keys, values [1, heads, held, dim]

    @property
    def nbytes(self) -> int:
        arrays = [a for line in (*self.states, *self.windows) for a in line if a is not None]
        return sum(a.nbytes for a in arrays)

    def arrays(self) -> list[Any]:
        return [a for line in (*self.states, *self.windows) for a in line if a is not None]


def full_rows(layers: Layers) -> list[Rows]:
    """The layers whose rows are kept for every token."""
    return [r for r in layers.rows if r.columns.window is None]


def partial_rows(layers: Layers) -> list[Rows]:
    """The layers that keep exact rows of the last tokens only: windowed ones, and packed ones."""
    return [r for r in layers.rows if r.columns.partial]


def read_rows(layers: Layers, row: int, start: int, end: int) -> list[Piece]:
    """Copies of the rows of tokens [start, end): keys and values by turns, [1, heads, n, ..] each."""
    return [piece for r in full_rows(layers) for piece in r.read(row, start, end)]


def needs_snapshots(layers: Layers) -> bool:
    return bool(layers.states) or any(columns.partial for columns in layers.columns.values())


def snapshot(layers: Layers, row: int, back: int = 0) -> Snapshot:
    """The sequence's layers as they are, or `back` tokens ago where there are no recurrent ones."""
    assert not (back and layers.states)
    position = layers.lengths[row] - back
    states = tuple(tuple(line) for line in layers.state_of(row))
    windows, floors = [], [position if states else 0]
    for r in partial_rows(layers):
        held = held_columns(r.columns, row)
        held = held[: len(held) - back]
        n, floor = r.columns.needed(position, len(held))
        held = held[len(held) - n :]
        windows.append((cut_columns(r.keys, row, held), cut_columns(r.values, row, held)))
        floors.append(floor)
    return Snapshot(position, max(floors), states, tuple(windows))


def fill(layers: Layers, pieces: Sequence[Sequence[Piece]], length: int, held: Snapshot | None) -> None:
    """Put `length` tokens into empty layers: `pieces` are consecutive results of `read_rows`."""
    for columns in layers.columns.values():
        assert isinstance(columns, SoloColumns)
        columns.start_at(length)
    for i, r in enumerate(full_rows(layers)):
        start = 0
        for piece in pieces:
            r.put(start, piece[2 * i], piece[2 * i + 1])
            start += num_tokens(piece[2 * i])
    layers.set_length(length)
    if held is not None:
        _restore(layers, held, length)


def _restore(layers: Layers, held: Snapshot, length: int) -> None:
    assert held.floor <= length <= held.position
    for state, line in zip(layers.states, held.states, strict=True):
        state.cache = list(line)
    for r, (keys, values) in zip(partial_rows(layers), held.windows, strict=True):
        n = keys.shape[2] - (held.position - length)
        assert isinstance(r.columns, SoloColumns)
        r.columns.first = length - n
        r.place(0, 0, keys[:, :, :n], values[:, :, :n])


def convert(layers: Layers, fresh: Sequence[Layers]) -> None:
    """Move the sequences of `layers`, row by row, into empty ones of the same model in another format.

    Evaluated layer by layer. `layers` are left empty, so that no more than one layer is held twice; they must not be
    used any more. What was packed is packed again from what packing had left of it.
    """
    for row, new in enumerate(fresh):
        for columns in new.columns.values():
            assert isinstance(columns, SoloColumns)
            columns.start_at(layers.lengths[row])
        for state, line in zip(new.states, layers.state_of(row), strict=True):
            state.cache = line
    for number, old in enumerate(layers.rows):
        for row, new in enumerate(fresh):
            _convert_layer(old, row, new.rows[number], layers.lengths[row])
            mx.eval(new.rows[number].arrays())
        old.release()
    for row, new in enumerate(fresh):
        new.set_length(layers.lengths[row])


def _convert_layer(old: Rows, row: int, new: Rows, length: int) -> None:
    if length and new.columns.window is None:
        new.put(0, *(old.read(row, 0, length) if new.columns.partial else old.whole(row)))
    if length and new.columns.partial:
        held = held_columns(old.columns, row)
        n, _ = new.columns.needed(length, len(held))
        assert isinstance(new.columns, SoloColumns)
        new.columns.first = length - n
        new.place(0, 0, *(cut_columns(a, row, held[len(held) - n :]) for a in (old.keys, old.values)))


def shrink(layers: Layers) -> None:
    """Give back the row slots of sequences that have left; evaluated layer by layer."""
    for r in layers.rows:
        r.shrink(layers.num_rows)
        mx.eval(r.arrays())
