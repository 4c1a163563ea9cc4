"""Keys and values of one attention layer, exactly. Engine thread only; nothing here evaluates."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.cache.columns import BatchColumns, Columns, SoloColumns
from treadle.cache.geometry import round_up
from treadle.cache.pieces import rows_of


class Rows:
    """Keys and values of one attention layer, [row slots, heads, column slots, dim] each.

    Row slots beyond the live rows are spare, so that a join seldom copies. `columns` is shared with the layers of
    the same kind and says where this step writes and reads.
    """

    def __init__(self, columns: Columns, additive: bool = False) -> None:
        self.columns = columns
        self.additive = additive
        self.keys: Any = None
        self.values: Any = None
        self.reserve = 0  # tokens to make room for at the first write

    @property
    def offset(self) -> Any:
        return self.columns.offset

    @property
    def _reserved(self) -> int:
        """Columns to make room for at once."""
        return self.reserve

    def make_mask(self, n: int, return_array: bool = False, window_size: int | None = None) -> Any:
        additive = self.keys.dtype if self.additive and not return_array and self.keys is not None else None
        return self.columns.make_mask(n, return_array, window_size, additive)

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        """Write this step's rows ([rows, heads, n, dim]) and return all that its queries can see."""
        self._write(keys, values)
        return self.written()

    def written(self) -> tuple[Any, Any]:
        """This step's rows are in the buffers: all that its queries can see."""
        return self.keys_and_values()

    def in_place(self, dtype: Any) -> tuple[Any, Any, Any] | None:
        """Buffers of keys and values with room for this step's rows of a type, and `columns.column`: for a kernel that
        writes there by itself, before `written` is called. None: this step may not, or there are none yet.

        Arrays that share the memory change as well. Nothing is kept that does: it was copied, or holds older tokens.
        """
        if not self.columns.in_place or self.keys is None or self.keys.dtype != dtype:
            return None
        return self.keys, self.values, self.columns.column

    def _write(self, keys: Any, values: Any) -> None:
        if self.columns.traced:
            start = self.columns.column
            self.keys, self.values = (
                mx.slice_update(a, b, start, (2,)) for a, b in ((self.keys, keys), (self.values, values))
            )
            return
        start, n = self.columns.index, keys.shape[2]
        self._ensure(self.columns.num_rows, self.columns.read_to, keys, values)
        rows = self.columns.num_rows
        self.keys[:rows, :, start : start + n] = keys
        self.values[:rows, :, start : start + n] = values

    def keys_and_values(self) -> tuple[Any, Any]:
        """What the queries of this step can see; also asked by layers that share these rows."""
        rows, start, end = self.columns.num_rows, self.columns.read_from, self.columns.read_to
        near, far = self.columns.unseen
        if near < far:
            keys, values = (
                mx.concatenate([a[:, :, :near], a[:, :, far:end]], axis=2) for a in (self.keys, self.values)
            )
            return keys, values
        if rows == self.keys.shape[0] and start == 0 and end == self.keys.shape[2]:
            return self.keys, self.values
        return self.keys[:rows, :, start:end], self.values[:rows, :, start:end]

    def _ensure(self, rows: int, columns: int, keys: Any, values: Any) -> None:
        """Grow the buffers so that `rows` x `columns` fit; `keys` and `values` tell shape and type."""
        have = (0, 0) if self.keys is None else (self.keys.shape[0], self.keys.shape[2])
        if rows <= have[0] and columns <= have[1]:
            return
        slots = have[0] if rows <= have[0] else row_slots(rows)
        width = have[1] if columns <= have[1] else round_up(max(columns, self._reserved))
        self.keys = resized(self.keys, (slots, keys.shape[1], width, keys.shape[3]), keys.dtype)
        self.values = resized(self.values, (slots, values.shape[1], width, values.shape[3]), values.dtype)

    def grow(self) -> bool:
        """Make room for what this step writes, once there are buffers; whether that took new ones."""
        before = self.keys
        if before is not None:
            self._ensure(self.columns.num_rows, self.columns.read_to, self.keys, self.values)
        return self.keys is not before

    def place(self, row: int, start: int, keys: Any, values: Any) -> None:
        """Copy one sequence's rows ([1, heads, n, dim]) into a row slot."""
        end = start + keys.shape[2]
        self._ensure(row + 1, end, keys, values)
        self.keys[row : row + 1, :, start:end] = keys
        self.values[row : row + 1, :, start:end] = values

    def put(self, start: int, keys: Any, values: Any) -> None:
        """Into the one sequence's layers: the tokens from `start` on, in any form in which `read` gives them."""
        self.place(0, start, rows_of(keys), rows_of(values))

    def release(self) -> None:
        """Let go of all rows; nothing may be read any more."""
        self.keys = self.values = None

    def read(self, row: int, start: int, end: int) -> list[Any]:
        """Copies of the keys and of the values of tokens [start, end), in the form in which they are stored."""
        columns = held_columns(self.columns, row)[start:end]
        return [cut_columns(a, row, columns) for a in (self.keys, self.values)]

    def whole(self, row: int) -> list[Any]:
        """Copies of the keys and of the values of all tokens, as plain arrays."""
        return self.read(row, 0, self.columns.lengths[row])

    def adopt(self, row: int, start: int, other: Rows) -> None:
        """Copy the one sequence of `other` into a row slot, its columns from column `start` on."""
        if other.keys is not None:
            n = other.columns.index
            self.place(row, start, other.keys[:, :, :n], other.values[:, :, :n])
        elif self.keys is not None:
            self._ensure(row + 1, 0, self.keys, self.values)

    def twin(self, row: int, columns: SoloColumns) -> Rows:
        """A copy of one row, with columns of its own."""
        twin = self.empty(columns)
        twin.isolate(self, row)
        return twin

    def empty(self, columns: Columns) -> Rows:
        """Without any rows, in the same form."""
        return Rows(columns, self.additive)

    def isolate(self, source: Rows, row: int) -> None:
        """Hold nothing but one row of `source` (which may be this), in exact layout."""
        if source.keys is not None:
            columns = held_columns(source.columns, row)
            self.keys, self.values = (cut_columns(a, row, columns) for a in (source.keys, source.values))

    def settle(self) -> None:
        """The step was built."""

    def drop(self, row: int, last: int) -> None:
        if row != last and self.keys is not None and last < self.keys.shape[0]:
            self.keys[row] = self.keys[last]
            self.values[row] = self.values[last]

    def shrink(self, rows: int) -> None:
        """Keep only so many row slots."""
        if self.keys is not None and rows < self.keys.shape[0]:
            self.keys, self.values = (mx.contiguous(a[:rows]) for a in (self.keys, self.values))

    def token_bytes(self) -> int:
        """Bytes that one more token takes; only after a step, when shapes are known."""
        return self.exact_bytes()

    def exact_bytes(self) -> int:
        """Bytes of one token in columns."""
        return sum(a.nbytes // (a.shape[0] * a.shape[2]) for a in (self.keys, self.values) if a is not None)

    def arrays(self) -> list[Any]:
        return [] if self.keys is None else [self.keys, self.values]


def row_slots(rows: int) -> int:
    """Row slots to make for so many rows: up to a quarter more, so that a join into a large group seldom copies."""
    grain = 1 << max(0, (rows - 1).bit_length() - 3)
    return -(-rows // grain) * grain


def held_columns(columns: Columns, row: int) -> NDArray[np.intp]:
    """The columns of a row's tokens, in order."""
    return columns.held(row) if isinstance(columns, BatchColumns) else np.arange(columns.index)


def cut_columns(buffer: Any, row: int, columns: NDArray[np.intp]) -> Any:
    """A copy of some columns of one row, as one slice when they lie together."""
    line = buffer[row : row + 1]
    n = len(columns)
    first = int(columns[0]) if n else 0
    if n == 0 or (int(columns[-1]) - first + 1 == n and (np.diff(columns) == 1).all()):
        part = line[:, :, first : first + n]
        if line.shape[1] == 1 or n == line.shape[2]:
            part = part * mx.array(1, part.dtype)  # it is contiguous and would share the memory, see `in_place`
        return mx.contiguous(part)
    return mx.contiguous(mx.take(line, mx.array(columns), axis=2))  # kernels read buffers as they lie in memory


def resized(old: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Zeros, with `old` in the first rows and columns."""
    if old is None:
        return mx.zeros(shape, dtype)
    rows, _, columns, _ = shape
    return mx.pad(old, [(0, rows - old.shape[0]), (0, 0), (0, columns - old.shape[2]), (0, 0)])
