"""Columns of layers that keep recent tokens exactly and older ones packed, in blocks at fixed positions.

The query at position p reads the tokens before `edge(p)` packed and the rest, up to its own, exactly. That depends on
positions alone: not on how a prompt was cut into chunks, on neighbours in a batch, or on what was taken back. So a
step whose queries have different edges reads the tokens between them in both forms, and a mask says who sees which.

Here lie the exact rows, in columns as everywhere; packed ones lie by position (`packed_rows.py`). A step reads

    packed tokens 0 .. read_packed-1 | exact columns read_from .. read_to-1

Exact rows are kept `SPARE` tokens longer than they are read, so that recent tokens can be taken back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.cache.columns import BatchColumns, SoloColumns
from treadle.models.upload import on_device

BLOCK = 64  # tokens that are packed together
SPARE = 64  # tokens that can be taken back at any time
PACKED = -1  # the key of a step's limits, beside those of windows


def edge(position: int, recent: int) -> int:
    """The tokens before it are read packed by the query at `position`; `recent` >= 1 up to it are read exactly."""
    return max(0, position + 1 - recent) // BLOCK * BLOCK


@dataclass(frozen=True, slots=True)
class Due:
    """Tokens [start, end) of a row whose packed rows this step's queries need; `columns` hold them exactly."""

    row: int
    start: int
    end: int
    columns: NDArray[np.intp]


class SoloRecent(SoloColumns):
    """One sequence. Column 0 holds token `first`; the packed rows of `packed` tokens are in place."""

    def __init__(self, recent: int, length: int = 0, first: int = 0, packed: int = 0) -> None:
        super().__init__(None, length, first)
        self.recent = recent
        self.packed = packed
        self._made: Any = None  # the last mask
        self._edged: tuple[int, int] = (-1, 0)  # a position and its edge: every layer asks for it several times

    partial = True

    def edge(self, position: int) -> int:
        return edge(position, self.recent)

    @property
    def read_from(self) -> int:
        return self.edge(self.length) - self.first

    @property
    def read_packed(self) -> int:
        last = self.length + (self.count or 1) - 1
        if self._edged[0] != last:
            self._edged = (last, edge(last, self.recent))
        return self._edged[1]

    @property
    def step(self) -> int:
        """Tokens of this step's widest row."""
        return self.count

    @property
    def packed_of(self) -> list[int]:
        """Tokens of each row whose packed rows are in place."""
        return [self.packed]

    def due(self) -> list[Due]:
        """What has to be packed in this step."""
        start, end = self.packed, self.read_packed
        return [Due(0, start, end, np.arange(start - self.first, end - self.first))] if start < end else []

    def surplus(self, count: int) -> int:
        kept = min(self.edge(max(0, self.length - SPARE)), self.packed)
        return kept - self.first if kept - self.first >= BLOCK else 0

    def end(self) -> None:
        self.packed = max(self.packed, self.read_packed)
        super().end()

    def reaches(self, length: int) -> bool:
        return self.edge(length) >= self.first

    def rewind(self, row: int, n: int) -> None:
        length = self.length - n
        if n and (length < 0 or not self.reaches(length)):
            raise ValueError(f"cannot rewind {n} tokens: the exact rows before them are gone")
        self.length = length
        self.packed = min(self.packed, length // BLOCK * BLOCK)

    def start_at(self, length: int) -> None:
        super().start_at(length)
        self.packed = length // BLOCK * BLOCK

    def needed(self, position: int, held: int) -> tuple[int, int]:
        return _needed(self.recent, position, held)

    def opened(self) -> BatchRecent:
        return BatchRecent(self.recent)

    def alone(self, row: int, held: int) -> SoloRecent:
        return SoloRecent(self.recent, self.length, self.length - held, self.packed)

    def packed_view(self, mask: Any, capacity: int) -> tuple[Any, Any, Any] | None:
        """What a step sees whose `mask` was made here, for a kernel that needs none; None for another one.

        int32 (table [1, capacity], position [1] of the first query, [end of the exact columns, recent tokens, what the
        table counts from, end of the packed tokens]).
        """
        if not (mask is None or isinstance(mask, str) or mask is self._made):
            return None
        return self.view(capacity)

    def _facts(self) -> tuple[int, ...]:
        return self.length, self.read_to, self.recent, self.first, self.read_packed

    def make_mask(self, n: int, return_array: bool, window: int | None, additive: Any = None) -> Any:
        """`None`, `"causal"`, or bool [n, columns read]; numbers of the type `additive` where that is given."""
        mask = self._mask(n, return_array, window, additive)
        self._made = mask if window is None else None
        return mask

    def _mask(self, n: int, return_array: bool, window: int | None, additive: Any) -> Any:
        low, high = self.edge(self.length), self.edge(self.length + n - 1)
        if low == high and not return_array and (window is None or self.length + n <= window):
            return None if n == 1 else "causal"
        queries = mx.arange(self.length, self.length + n)[:, None]
        edges = mx.array([self.edge(self.length + i) for i in range(n)])[:, None]
        packed = mx.arange(high)[None]
        exact = mx.arange(low, self.length + n)[None]
        parts = [mx.broadcast_to(packed < edges, (n, high)), (exact >= edges) & (exact <= queries)]
        mask = mx.concatenate(parts, axis=1)
        if window is not None:
            mask = mask & (mx.concatenate([packed, exact], axis=1) > queries - window)
        return _as(mask, additive)


class BatchRecent(BatchColumns):
    """Several sequences; the table is that of the exact rows."""

    def __init__(self, recent: int) -> None:
        super().__init__(None)
        self.recent = recent
        self.packed_of: list[int] = []
        self._due: list[Due] = []
        self._read = 0  # packed tokens that the step under way reads

    partial = True

    def edge(self, position: int) -> int:
        return edge(position, self.recent)

    @property
    def read_packed(self) -> int:
        return self._read if self._width else self._furthest([1] * self.num_rows)

    def _furthest(self, counts: Sequence[int]) -> int:
        """The greatest edge of the last queries of all rows in a step of so many tokens."""
        return max((self.edge(n + max(c, 1) - 1) for n, c in zip(self.lengths, counts, strict=True)), default=0)

    @property
    def step(self) -> int:
        return self._width

    def due(self) -> list[Due]:
        return self._due

    def needed(self, position: int, held: int) -> tuple[int, int]:
        return _needed(self.recent, position, held)

    def take_over(self, source: SoloColumns) -> tuple[int, int]:
        assert isinstance(source, SoloRecent)
        self.packed_of.append(source.packed)
        return super().take_over(source)

    def drop(self, row: int) -> None:
        self.packed_of[row] = self.packed_of[-1]
        self.packed_of.pop()
        super().drop(row)

    def begin(self, counts: Sequence[int]) -> None:
        super().begin(counts)
        self._read = self._furthest(counts)  # asked several times in every layer
        self._due = [due for row, count in enumerate(counts) if (due := self._due_of(row, count)) is not None]

    def _due_of(self, row: int, count: int) -> Due | None:
        start, end = self.packed_of[row], self.edge(self.lengths[row] + max(count, 1) - 1)
        if start >= end:
            return None
        line = self.table[row]
        columns = np.flatnonzero((line >= start) & (line < end))
        assert len(columns) == end - start
        return Due(row, start, end, columns[np.argsort(line[columns], kind="stable")])

    def end(self) -> None:
        for due in self._due:
            self.packed_of[due.row] = due.end
        self._due = []
        super().end()

    def rewind(self, row: int, n: int) -> None:
        length = self.lengths[row] - n
        held = self.held(row)
        first = int(self.table[row, held[0]]) if len(held) else self.lengths[row]
        if n and (length < 0 or self.edge(length) < first):
            raise ValueError(f"cannot rewind {n} tokens: the exact rows before them are gone")
        super().rewind(row, n)
        self.packed_of[row] = min(self.packed_of[row], length // BLOCK * BLOCK)

    def alone(self, row: int, held: int) -> SoloRecent:
        return SoloRecent(self.recent, self.lengths[row], self.lengths[row] - held, self.packed_of[row])

    def _kept(self, row: int) -> int:
        """How many of the row's last tokens stay in columns."""
        length = self.lengths[row]
        return max(1, length - min(self.edge(max(0, length - SPARE)), self.packed_of[row]))

    def waste(self) -> bool:
        return self.index - max(map(self._kept, range(self.num_rows)), default=0) > 2 * BLOCK

    def packed_view(self, mask: Any, capacity: int) -> tuple[Any, Any, Any] | None:
        """As for one sequence; positions are counted from 0."""
        own = next((key for key, made in self._masks.items() if made is mask), None)
        if own is None or own[1] is not None:
            return None
        if PACKED not in self._limits:
            self._limits[PACKED] = on_device([self.read_to, self.recent, 0, self.read_packed], mx.int32)
        return self.shown(), self.numbers, self._limits[PACKED]

    def make_mask(self, n: int, return_array: bool, window: int | None, additive: Any = None) -> Any:
        """[rows, 1, n, packed and exact columns]: bool, or 0 and the least number in the type `additive`."""
        key = (n, window, additive)
        if key not in self._masks:
            exact = self.shown()[:, : self.read_to][:, None, None, :]
            queries = (self.numbers[:, None] + mx.arange(n, dtype=mx.int32))[:, None, :, None]
            edges = mx.array(self._edges(n), mx.int32)[:, None, :, None]
            packed = mx.arange(self.read_packed, dtype=mx.int32)[None, None, None]
            mask = mx.concatenate([packed < edges, (exact >= edges) & (exact <= queries)], axis=-1)
            if window is not None:
                mask = mask & mx.concatenate([packed > queries - window, exact > queries - window], axis=-1)
            self._masks[key] = _as(mask, additive)
        return self._masks[key]

    def _edges(self, n: int) -> list[list[int]]:
        """Of each row's queries. Padded ones take that of the last, so that they see something and stay finite."""
        counts = self._counts if self._width else [n] * self.num_rows
        rows = zip(self.lengths, counts, strict=True)
        return [[self.edge(length + min(i, max(count, 1) - 1)) for i in range(n)] for length, count in rows]


def _needed(recent: int, position: int, held: int) -> tuple[int, int]:
    """As `geometry.needed_window`: one can go on where the edge has passed what is not kept."""
    first = edge(position, recent)
    assert position - first <= held
    return position - first, first + recent - 1 if first else 0


def _as(mask: Any, additive: Any) -> Any:
    if additive is None:
        return mask
    return mx.where(mask, mx.array(0, additive), mx.array(mx.finfo(additive).min, additive))
