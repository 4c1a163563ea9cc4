"""The columns of several sequences in one buffer; see `columns.py`. Engine thread only.

Every step writes one block of columns for all rows, so a write is a single slice whatever the lengths are. A table says
which token position each column holds for each row; what a row may see is `table <= position`. Joins, padding, refused
drafts and rewinds are only entries of that table: attention does not care where a row lies, since keys carry their
position already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.cache import geometry
from treadle.cache.geometry import needed_window, round_up
from treadle.models.upload import on_device

if TYPE_CHECKING:
    from treadle.cache.columns import SoloColumns

GRAIN = 64  # a batch reads a multiple of this many columns, so that attention meets a new shape once in 64 steps
FREE = np.int32(2**31 - 1)  # the position of a column that holds nothing for a row


class BatchColumns:
    """Several sequences in one buffer.

    `table` is int32 [rows, columns]: the position of the token in that column, or `FREE`.
    """

    traced = False

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.table: NDArray[np.int32] = np.full((0, geometry.STEP), FREE, np.int32)
        self.lengths: list[int] = []
        self.index = 0
        self._counts: list[int] = []  # of the last step, less what was taken back; none: columns moved since
        self._width = 0
        self._begun = 0  # the column in which the last step began
        self._device: Any = None  # the table on the device, right for columns below `_clean`
        self._clean, self._sent = 0, False  # and whether this step's tokens are there
        self._told_to = 0  # the end of the columns that hold a token there
        self._masks: dict[tuple[int, int | None, Any], Any] = {}
        self._limits: dict[int | None, Any] = {}
        self._gaps: list[int] = []
        self.in_place = False
        self._told: Any = None
        self._offset: Any = None

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    @property
    def partial(self) -> bool:
        return self.window is not None

    @property
    def numbers(self) -> Any:
        """int32 [rows]: the number of each row's next token, as the table counts them."""
        return self._tell()[1:]

    @property
    def column(self) -> Any:
        """int32 [1]: the first column that this step writes."""
        return self._tell()[:1]

    def _tell(self) -> Any:
        if self._told is None:
            self._told = on_device([self.index, *self.lengths], mx.int32)
        return self._told

    @property
    def offset(self) -> Any:
        """int32 [rows]: the position of each row's next token, which is its number where no prompt has gaps."""
        if not any(self._gaps):
            return self.numbers
        if self._offset is None:
            self._offset = on_device(self.positions, mx.int32)
        return self._offset

    @property
    def positions(self) -> list[int]:
        """`offset`, as known to the host."""
        return [n + gap for n, gap in zip(self.lengths, self._gaps or [0] * self.num_rows, strict=True)]

    starts = offset  # by the name that columns of one sequence have for it too

    def stand(self, gaps: Sequence[int], places: Any) -> None:
        """Say how far this step's tokens stand behind their numbers, row by row; none: not at all."""
        assert places is None, "prompts are computed one at a time"
        self._gaps = list(gaps)

    read_from = 0
    unseen = (0, 0)

    @property
    def read_to(self) -> int:
        """The end of the columns that a step reads. Those at the end may hold nothing; the mask hides them."""
        end = self.index + self._width
        return min(-(-end // GRAIN) * GRAIN, round_up(end))

    def place(self, length: int, held: int) -> tuple[int, int]:
        """Add a row of `length` tokens whose last `held` come along. Returns (row, first column to copy them to)."""
        self._ensure(max(self.index, held))
        self.index = max(self.index, held)
        start = self.index - held
        line = np.full((1, self.table.shape[1]), FREE, np.int32)
        line[0, start : self.index] = np.arange(length - held, length, dtype=np.int32)
        self.table = np.concatenate([self.table, line])
        self.lengths.append(length)
        self._forget()
        return len(self.lengths) - 1, start

    def needed(self, position: int, held: int) -> tuple[int, int]:
        """See `needed_window`."""
        return needed_window(self.window, position, held)

    def take_over(self, source: SoloColumns) -> tuple[int, int]:
        """Add a sequence as a row. Returns (row, first column to copy its columns to)."""
        return self.place(source.length, source.index)

    def alone(self, row: int, held: int) -> SoloColumns:
        """Columns for one row whose last `held` tokens come along."""
        from treadle.cache.columns import SoloColumns

        return SoloColumns(self.window, self.lengths[row], self.lengths[row] - held)

    def drop(self, row: int) -> None:
        """Remove a row; the last row takes its number."""
        self.table[row] = self.table[-1]
        self.table = self.table[:-1]
        self.lengths[row] = self.lengths[-1]
        self.lengths.pop()
        self._forget()

    def begin(self, counts: Sequence[int]) -> None:
        self._counts = list(counts)
        self._width = max(counts)
        self._begun = self.index
        self._ensure(self.index + self._width)
        steps = np.arange(self._width, dtype=np.int32)
        positions = np.array(self.lengths, np.int32)[:, None] + steps
        if min(counts) < self._width:
            positions[steps >= np.array(counts)[:, None]] = FREE
        self.table[:, self.index : self.index + self._width] = positions
        self._masks.clear()
        self._limits.clear()
        self._told = self._offset = None
        self._sent = False

    def end(self) -> None:
        self.lengths = [length + count for length, count in zip(self.lengths, self._counts, strict=True)]
        self.index += self._width
        self._width = 0
        self._told = self._offset = None

    def rewind(self, row: int, n: int) -> None:
        """Take the last `n` tokens of a row back; columns free for all rows are reused."""
        if n == 0:
            return
        line, length = self.table[row, : self.index], self.lengths[row] - n
        end = self._begun + (self._counts[row] if row < len(self._counts) else 0)
        first = end - n  # the last step wrote them there, if nothing moved: later tokens stand further right
        as_written = first >= 0 and end <= self.index and line[first] == length and line[end - 1] == length + n - 1
        if not as_written:
            gone = np.flatnonzero((line >= length) & (line != FREE))
            if len(gone) != n:
                raise ValueError(f"cannot rewind {n} tokens: only {len(gone)} are held")
            first, end = int(gone[0]), int(gone[-1]) + 1
        line[first:end] = FREE
        self.lengths[row] = length
        if as_written and row < len(self._counts):
            self._counts[row] = max(0, self._counts[row] - n)
        else:
            self._counts = []
        if any(self._counts):
            self.index = self._begun + max(self._counts)  # the last step's columns hold nothing else
        else:
            while self.index > 0 and (self.table[:, self.index - 1] == FREE).all():
                self.index -= 1
        self._clean, self._sent = min(self._clean, first, self.index), False
        self._told = self._offset = None

    def held(self, row: int) -> NDArray[np.intp]:
        """The columns of a row, in token order."""
        line = self.table[row, : self.index]
        columns = np.flatnonzero(line != FREE)
        return columns[np.argsort(line[columns], kind="stable")]

    def waste(self) -> bool:
        """Whether so many columns hold nothing needed that `squeeze` pays for its copy."""
        limit = None if self.window is None else self.window + geometry.SLACK
        longest = max(self.lengths, default=0)
        needed = min(longest, limit) if limit else longest
        return self.index - needed > max(geometry.STEP, needed if limit else needed // 4)

    def _kept(self, row: int) -> int:
        """How many of the row's last tokens stay in columns, at least 1 where it has any."""
        return max(1, self.lengths[row] if self.window is None else self.window + geometry.SLACK)

    def squeeze(self) -> NDArray[np.int32]:
        """Move every row's needed columns together at the right end.

        Returns int32 [rows, new index]: the old column for each new one (0 where the new one is free).
        """
        rows = [self.held(row)[-self._kept(row) :] for row in range(self.num_rows)]
        width = max(len(columns) for columns in rows)
        source = np.zeros((self.num_rows, width), np.int32)
        table = np.full((self.num_rows, round_up(max(width, 1))), FREE, np.int32)
        for row, columns in enumerate(rows):
            start = width - len(columns)
            source[row, start:] = columns
            table[row, start:width] = self.table[row, columns]
        self.table, self.index = table, width
        self._forget()
        return source

    def make_mask(self, n: int, return_array: bool, window: int | None, additive: Any = None) -> Any:
        """[rows, 1, n, columns]: bool, or 0 and the least number in the type `additive`. `return_array` is met anyway.

        Attention on CUDA turns a boolean mask into numbers once per layer; so it is done here, once per step.
        """
        window = self.window if self.window is not None else window
        key = (n, window, additive)
        if key not in self._masks:
            positions = self.shown()[:, : self.read_to][:, None, None, :]
            queries = (self.numbers[:, None] + mx.arange(n, dtype=mx.int32))[:, None, :, None]
            mask = positions <= queries
            mask = mask if window is None else mask & (positions > queries - window)
            if additive is not None:
                mask = mx.where(mask, mx.array(0, additive), mx.array(mx.finfo(additive).min, additive))
            self._masks[key] = mask
        return self._masks[key]

    def view_of(self, mask: Any, cut: bool = False) -> tuple[Any, Any, Any] | None:
        """The facts behind a mask that `make_mask` returned in this step, for a kernel that needs none.

        int32 (table [rows, columns], number [rows] of the first query, [columns to read, window or 0]); None for a
        mask that is not from here. `cut`: a model file may have cut a mask to the columns that are read, which gives
        another array of the same shape; it is taken for this step's mask if there is only one.
        """
        for (_, window, _), own in self._masks.items():
            if own is mask or (cut and len(self._masks) == 1 and own.shape == mask.shape and own.dtype == mask.dtype):
                if window not in self._limits:
                    self._limits[window] = self._limit(window)
                return self.shown(), self.numbers, self._limits[window]
        return None

    def _limit(self, window: int | None) -> Any:
        return on_device([self.read_to, window or 0], mx.int32)

    def shown(self) -> Any:
        """The table on the device. Only columns that changed since the last step travel: few go with a launch."""
        end = self.index + self._width
        changed = max(end, self._told_to)
        if self._device is None or self._device.shape != self.table.shape:
            self._device = on_device(self.table, mx.int32)
        elif self._clean < changed and not self._sent:
            self._device[:, self._clean : changed] = on_device(self.table[:, self._clean : changed], mx.int32)
        self._clean, self._told_to, self._sent = end, end, True
        return self._device

    def _ensure(self, columns: int) -> None:
        extra = round_up(columns) - self.table.shape[1]
        if extra > 0:
            self.table = np.pad(self.table, ((0, 0), (0, extra)), constant_values=FREE)

    def _forget(self) -> None:
        self._device, self._clean, self._sent, self._told, self._offset = None, 0, False, None, None
        self._counts = []
        self._masks.clear()
