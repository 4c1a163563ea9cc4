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
from treadle.cache.columns import SoloColumns
from treadle.cache.geometry import bucket
from treadle.cache.layers import Layers, Rows
from treadle.models.upload import numbers_to, on_device

FIRST = 3  # of what is told: the column that is written, the end of those that are read, the window or 0


class TracedColumns(BatchColumns):
    """Looks to a model's file like a batch, also where there is one sequence.

    `told`: int32 [3 + 2 rows]: column, end of the columns to read, window or 0, then the rows' numbers and positions.
    `table`: as that of a batch, int32 [rows, columns]; `reach` of its columns are read.
    """

    traced = True

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
        return self._all[FIRST : FIRST + self.num_rows]

    @property
    def offset(self) -> Any:
        return self._all[FIRST + self.num_rows :]

    starts = offset

    def shown(self) -> Any:
        return self._table

    def _limit(self, window: int | None) -> Any:
        if window == self.window:
            return self._all[1:FIRST]
        return mx.concatenate([self._all[1:2], mx.array([window or 0], mx.int32)])


@dataclass(frozen=True, slots=True)
class Frame:
    """A step as a trace sees it: for each kind of columns what is told and the table, then each layer's buffers."""

    key: tuple[Any, ...]  # for each kind: window, columns to read, whether rows may be written in place
    arrays: tuple[Any, ...]

    @classmethod
    def of(cls, layers: Layers) -> Frame | None:
        """None for layers with anything but exact rows that are there already."""
        if layers.states or layers.foreign or any(type(r) is not Rows or r.keys is None for r in layers.rows):
            return None
        kinds = list(layers.columns.values())
        widths = [min((r.keys.shape[2] for r in layers.rows if r.columns is columns), default=0) for columns in kinds]
        facts = [_facts(columns, width) for columns, width in zip(kinds, widths, strict=True)]
        if not facts or any(fact is None for fact in facts):
            return None
        told = [a for fact in facts if fact is not None for a in fact]
        ends = [
            min(bucket(columns.read_to), table.shape[1], width)
            for columns, table, width in zip(kinds, told[1::2], widths, strict=True)
        ]
        key = tuple((columns.window, end, columns.in_place) for columns, end in zip(kinds, ends, strict=True))
        return cls(key, (*told, *(a for r in layers.rows for a in (r.keys, r.values))))

    @contextmanager
    def inside(self, layers: Layers, arrays: Sequence[Any]) -> Iterator[None]:
        """Let `layers` consist of `arrays`, in the order of this frame's own, which they get back afterwards."""
        held = [(r.columns, r.keys, r.values) for r in layers.rows]
        kinds = list(layers.columns.values())
        traced = {
            id(columns): TracedColumns(window, arrays[2 * i], arrays[2 * i + 1], reach, in_place)
            for i, (columns, (window, reach, in_place)) in enumerate(zip(kinds, self.key, strict=True))
        }
        rows = iter(arrays[2 * len(kinds) :])
        try:
            for r in layers.rows:
                r.columns, r.keys, r.values = traced[id(r.columns)], next(rows), next(rows)
            yield
        finally:
            for r, (columns, keys, values) in zip(layers.rows, held, strict=True):
                r.columns, r.keys, r.values = columns, keys, values


def _facts(columns: Any, width: int) -> tuple[Any, Any] | None:
    """What is told of a step, and the table; None where the step's tokens have places of their own."""
    facts = [columns.index, columns.read_to, columns.window or 0]
    if type(columns) is SoloColumns:
        if columns.places is not None:
            return None
        told = [*facts, columns.index, columns.length + columns.gap]
        return on_device(told, mx.int32), numbers_to(width)
    if type(columns) is BatchColumns:
        return on_device([*facts, *columns.lengths, *columns.positions], mx.int32), columns.shown()
    return None
