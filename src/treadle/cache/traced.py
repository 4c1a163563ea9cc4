"""Columns while a step's forward is traced: all that changes from step to step is in arrays. Engine thread only.

`Frame.of(layers)` is taken after `layers.begin`. Its `key` and the shapes of its `arrays` say which steps one trace
serves: buffers keep their sizes for a while, and what is read of them goes up to a bucket's end, of which a table hides
what holds no token yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from treadle.cache.batch_columns import BatchColumns
from treadle.cache.geometry import bucket
from treadle.cache.layers import Layers, Rows
from treadle.cache.packed_rows import PackedRows
from treadle.cache.quantise import Packed
from treadle.cache.recent_columns import BatchRecent, Due, SoloRecent
from treadle.models.upload import numbers_to, on_device


class TracedColumns(BatchColumns):
    """Looks to a model's file like a batch, also where there is one sequence.

    `told`: int32 [3 + 2 rows]: column, end of the columns to read, window or 0, then the rows' numbers and positions.
    `table`: as that of a batch, int32 [rows, columns]; `reach` of its columns are read.
    """

    traced = True
    first = 3  # of what is told, the rows' numbers

    def __init__(self, window: int | None, told: Any, table: Any, reach: int, in_place: bool) -> None:
        super().__init__(window)
        self.in_place = in_place
        self._all = told
        self._table = table
        self._reach = reach

    @property
    def num_rows(self) -> int:
        return int(self._table.shape[0])

    @property
    def read_to(self) -> int:
        return self._reach

    @property
    def column(self) -> Any:
        return self._all[:1]

    @property
    def numbers(self) -> Any:
        return self._all[self.first : self.first + self.num_rows]

    @property
    def offset(self) -> Any:
        return self._all[self.first + self.num_rows :]

    starts = offset

    def shown(self) -> Any:
        return self._table

    def _limit(self, window: int | None) -> Any:
        if window == self.window:
            return self._all[1 : self.first]
        return mx.concatenate([self._all[1:2], mx.array([window or 0], mx.int32)])


class TracedRecent(TracedColumns):
    """The same for layers that keep older tokens packed, in a step in which none is due to be.

    `told`: int32 [5 + 2 rows]: column, end of the exact columns, recent tokens, what the table counts from, end of the
    packed tokens, then the rows' numbers and positions. `read_packed`: of the packed tokens, room for so many is read.
    """

    first = 5

    def __init__(
        self, told: Any, table: Any, reach: int, in_place: bool, recent: int, step: int, read_packed: int
    ) -> None:
        super().__init__(None, told, table, reach, in_place)
        self.recent = recent
        self.step = step
        self.read_packed = read_packed

    def due(self) -> list[Due]:
        return []

    def packed_view(self, mask: Any, capacity: int) -> tuple[Any, Any, Any]:
        """Raises ValueError for a mask that is not from here: nothing else knows what is seen."""
        if not any(made is mask and window is None for (_, window, _), made in self._masks.items()):
            raise ValueError("a mask from elsewhere")
        return self.shown(), self.numbers, self._all[1 : self.first]


@dataclass(frozen=True, slots=True)
class Frame:
    """A step as a trace sees it: for each kind of columns what is told and the table, then each layer's buffers."""

    key: tuple[Any, ...]  # for each kind: window, columns to read, whether rows may be written in place; see `_recent`
    arrays: tuple[Any, ...]  # keys and values come last
    room: int = 0  # columns that can be written before the key is another one

    @classmethod
    def of(cls, layers: Layers, packed: bool = False) -> Frame | None:
        """None for layers with anything but exact rows that are there already, or, if `packed`, such with packed ones
        before them that attention reads as they are.
        """
        if layers.states or layers.foreign or not all(_served(r, packed) for r in layers.rows):
            return None
        told: list[Any] = []
        key: list[Any] = []
        rooms = []
        for columns in layers.columns.values():
            own = [r for r in layers.rows if r.columns is columns]
            width = min((r.keys.shape[2] for r in own), default=0)
            if (fact := _facts(columns, width)) is None:
                return None
            told += fact
            end = min(bucket(columns.read_to), fact[1].shape[1], width)
            key.append((columns.window, end, columns.in_place, *_recent(columns, own)))
            rooms.append(max(0, end - columns.read_to))
        codes = (a for r in layers.rows for a in _packed_arrays(r))
        arrays = (*told, *codes, *(a for r in layers.rows for a in (r.keys, r.values)))
        return cls(tuple(key), arrays, min(rooms)) if key else None

    @contextmanager
    def inside(self, layers: Layers, arrays: Sequence[Any]) -> Iterator[None]:
        """Let `layers` consist of `arrays`, in the order of this frame's own, which they get back afterwards."""
        held = [(r.columns, r.keys, r.values) for r in layers.rows]
        buffers = [buffer for r in layers.rows if isinstance(r, PackedRows) for buffer in r.packed]
        pieces = [buffer.piece for buffer in buffers]
        kinds = list(layers.columns.values())
        traced: dict[int, Any] = {}
        for i, (columns, (window, reach, in_place, *recent)) in enumerate(zip(kinds, self.key, strict=True)):
            told, table = arrays[2 * i : 2 * i + 2]
            traced[id(columns)] = (
                TracedRecent(told, table, reach, in_place, *recent)
                if recent
                else TracedColumns(window, told, table, reach, in_place)
            )
        rest = iter(arrays[2 * len(kinds) :])
        try:
            for buffer in buffers:
                buffer.piece = buffer.piece.with_arrays([next(rest) for _ in buffer.arrays()])
            for r in layers.rows:
                r.columns, r.keys, r.values = traced[id(r.columns)], next(rest), next(rest)
            yield
        finally:
            for buffer, piece in zip(buffers, pieces, strict=True):
                buffer.piece = piece
            for r, (columns, keys, values) in zip(layers.rows, held, strict=True):
                r.columns, r.keys, r.values = columns, keys, values


def _served(r: Rows, packed: bool) -> bool:
    """Whether the rows of a layer are there and are read as they lie."""
    if r.keys is None or type(r) is Rows:
        return r.keys is not None
    if not packed or not isinstance(r, PackedRows):
        return False
    columns, rows = r.columns, r.columns.num_rows
    whole = all(type(buffer.piece) is Packed and buffer.arrays()[0].shape[0] >= rows for buffer in r.packed)
    return whole and columns.read_packed > 0 and not columns.due() and r.read_without_mask


def _recent(columns: Any, own: Sequence[Rows]) -> tuple[int, ...]:
    """Of layers with packed rows: recent tokens, tokens in this step, and room for packed ones that is read."""
    if not isinstance(columns, SoloRecent | BatchRecent):
        return ()
    room = min(buffer.columns for r in own if isinstance(r, PackedRows) for buffer in r.packed)
    return columns.recent, columns.step, min(bucket(columns.read_packed), room)


def _packed_arrays(r: Rows) -> list[Any]:
    return [a for buffer in r.packed for a in buffer.arrays()] if isinstance(r, PackedRows) else []


def _facts(columns: Any, width: int) -> tuple[Any, Any] | None:
    """What is told of a step, and the table; None where the step's tokens have places of their own."""
    facts = [columns.index, columns.read_to]
    if isinstance(columns, SoloRecent | BatchRecent):
        base = columns.first if isinstance(columns, SoloRecent) else 0
        facts += [columns.recent, base, columns.read_packed]
    else:
        facts.append(columns.window or 0)
    if isinstance(columns, BatchColumns):
        return on_device([*facts, *columns.lengths, *columns.positions], mx.int32), columns.shown()
    if columns.places is not None:
        return None
    number = columns.length if isinstance(columns, SoloRecent) else columns.index
    return on_device([*facts, number, columns.length + columns.gap], mx.int32), numbers_to(width)
