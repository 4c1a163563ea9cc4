"""Keys and values of one attention layer, packed but for the recent ones. Engine thread only; nothing here evaluates.

The recent tokens lie exactly in columns, as in `Rows`; packed ones lie in `PackedBuffer`s, the token at position t in
column t. A token is packed once, when the first query that reads it packed is computed (see `recent_columns.py`): in
8 bits by itself, in 4 bits with its block (see `blocks.py`), of which the keys are centred.
Keys or values that stay at 16 bits, because they are to or because no group divides the head size, take the same way
unpacked, so that all layers of a model share masks and columns.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.cache import recent_columns
from treadle.cache.blocks import MEAN_BITS, Blocks, blocks_of
from treadle.cache.columns import Columns
from treadle.cache.geometry import round_up
from treadle.cache.pieces import (
    Piece,
    arrays_of,
    cut,
    head_size,
    joined,
    mapped,
    num_tokens,
    piece_of,
    places,
    rows_of,
    scheme_of,
    views,
)
from treadle.cache.quantise import Scheme, scheme_for
from treadle.cache.recent_columns import BatchRecent, Due, SoloRecent
from treadle.cache.rows import Rows, cut_columns, held_columns, resized, row_slots
from treadle.types import KvFormat

EXACT_BITS = 16
LEAST_BITS = 4  # of rows that are packed by whole blocks


class PackedBuffer:
    """Packed rows by position: arrays [row slots, heads, column slots, ..]; `piece` is None before the first write.

    `centred`: whether 4-bit rows are packed without the mean of their block.
    """

    def __init__(self, bits: int, group_size: int, centred: bool) -> None:
        self.bits = bits
        self.group_size = group_size
        self.centred = centred
        self.piece: Piece = None
        self.columns = 0  # tokens that there is room for

    def scheme(self, dim: int) -> Scheme | None:
        """How heads of this size are packed; None: not at all."""
        return None if self.bits == EXACT_BITS else scheme_for(self.bits, self.group_size, dim)

    def form(self, rows: Any, start: int) -> Piece:
        """Exact rows of the tokens from `start` on, the first of a block, in the form that is kept here."""
        scheme = self.scheme(rows.shape[-1])
        if scheme is None or scheme.bits != LEAST_BITS:
            return piece_of(rows, scheme)
        return blocks_of(rows, start, scheme, self.centred)

    def formed(self, piece: Piece) -> Piece:
        """A text's first rows in the form that is kept here. Packed ones are packed again only for other bits."""
        if (scheme := scheme_of(piece)) is not None and scheme == self.scheme(head_size(piece)):
            return piece
        return self.form(rows_of(piece), 0)

    def write(self, row: int, start: int, piece: Piece, reserve: int = 0) -> None:
        """Tokens from position `start` on, [1, heads, n, ..]."""
        end = start + num_tokens(piece)
        self._ensure(row + 1, end, piece, reserve)
        lines = zip(arrays_of(self.piece), arrays_of(piece), places(piece, start, end), strict=True)
        for mine, new, at in lines:
            if at.start < at.stop:
                mine[row : row + 1, :, at] = new

    def _ensure(self, rows: int, columns: int, like: Piece, reserve: int) -> None:
        slots = 0 if self.piece is None else arrays_of(self.piece)[0].shape[0]
        if rows <= slots and columns <= self.columns:
            return
        slots = slots if rows <= slots else row_slots(rows)
        self.columns = self.columns if columns <= self.columns else round_up(max(columns, reserve))
        old = [None] * len(arrays_of(like)) if self.piece is None else arrays_of(self.piece)
        widths = [at.stop for at in places(like, 0, self.columns)]
        lines = zip(old, arrays_of(like), widths, strict=True)
        self._hold(like, [resized(a, (slots, b.shape[1], width, b.shape[3]), b.dtype) for a, b, width in lines])

    def _hold(self, like: Piece, arrays: list[Any]) -> None:
        """`arrays` of the whole text, in the form of `like`."""
        remaining = iter(arrays)
        piece = mapped(like, lambda _: next(remaining))
        self.piece = replace(piece, start=0, end=self.columns) if isinstance(piece, Blocks) else piece

    def grow(self, rows: int, end: int, reserve: int) -> bool:
        """Make room for the first `end` tokens, once something was written; whether that took new arrays."""
        before = self.piece
        if before is not None:
            self._ensure(rows, end, before, reserve)
        return self.piece is not before

    def first(self, rows: int, end: int) -> Piece:
        """The first `end` tokens of the first `rows` rows, as views. Rows beyond those written are zeros."""
        self.whole(rows, end)
        return views(mapped(self.piece, lambda a: a[:rows]), 0, end)

    def whole(self, rows: int, end: int) -> Piece:
        """All that is held: at least the first `end` tokens of the first `rows` rows."""
        self._ensure(rows, end, self.piece, 0)
        return self.piece

    def read(self, row: int, start: int, end: int) -> Piece:
        """A copy of tokens [start, end) of one row, [1, heads, end - start, ..]."""
        return cut(mapped(self.piece, lambda a: a[row : row + 1]), start, end)

    def copy(self, source: PackedBuffer, row: int, end: int) -> None:
        """Hold nothing but the first `end` tokens of one row of `source`, which may be this."""
        piece = source.read(row, 0, end) if end else None
        self.piece, self.columns = piece, end

    def drop(self, row: int, last: int) -> None:
        if self.piece is not None and row != last and last < arrays_of(self.piece)[0].shape[0]:
            for a in arrays_of(self.piece):
                a[row] = a[last]

    def release(self) -> None:
        self.piece, self.columns = None, 0

    def arrays(self) -> list[Any]:
        return [] if self.piece is None else arrays_of(self.piece)


def buffers_of(kv: KvFormat) -> tuple[PackedBuffer, PackedBuffer]:
    """For keys and for values. Values are not centred: it was measured to gain nothing."""
    return PackedBuffer(kv.key_bits, kv.group_size, True), PackedBuffer(kv.value_bits, kv.group_size, False)


class PackedRows(Rows):
    """See the module. `keys` and `values` are the exact ones, in columns; `attend.py` may read the packed ones."""

    columns: SoloRecent | BatchRecent

    def __init__(self, columns: Columns, kv: KvFormat, additive: bool = False) -> None:
        super().__init__(columns, additive)
        self.kv = kv
        self.packed = buffers_of(kv)
        self._offered: tuple[Any, Any] | None = None  # what this step's queries were given, until it is built
        self._owed = False  # whether that stands for packed rows, which somebody has to ask for
        self._asked: set[int] = set()  # numbers of tokens in a step whose attention reads packed rows by itself
        self._viewed: set[int] = set()  # the same, of attention that needs no mask either

    @property
    def _reserved(self) -> int:
        return 0  # columns hold recent tokens only

    def packed_view(self, mask: Any) -> tuple[Any, Any, Any] | None:
        """What `columns.packed_view` tells of this layer's buffers."""
        seen = self.columns.packed_view(mask, self.keys.shape[2])
        if seen is not None:
            self._viewed.add(self.columns.step)
        return seen

    @property
    def read_without_mask(self) -> bool:
        """Whether attention is known to need no mask, and no packed row unpacked, in steps of this number of tokens."""
        return self.columns.recent >= self.columns.step and self.columns.step in self._viewed

    def in_place(self, dtype: Any) -> tuple[Any, Any, Any] | None:
        """Only where nothing but attention that reads packed rows by itself, and so needs the queries, reads these."""
        late = self.columns.recent < self.columns.step  # what is due now may be among the rows of this step
        copied = self.columns.read_packed > 0 and self.columns.step not in self._asked
        return None if late or copied else super().in_place(dtype)

    def written(self) -> tuple[Any, Any]:
        for due in self.columns.due():
            self._pack(due)
        self._owed = self.columns.step in self._asked and self.columns.read_packed > 0
        # What nobody reads need not be cut to this step's rows and columns.
        self._offered = (self.keys, self.values) if self._owed else self.keys_and_values()
        return self._offered

    def taken(self, keys: Any, values: Any) -> bool:
        """Asked by attention that can read `packed_part` and `exact_part`: whether these stand for them in this step.

        A model file whose attention asks once will ask in every step of that size; such steps unpack nothing.
        """
        offered = self._offered
        if offered is None or keys is not offered[0] or values is not offered[1] or self.columns.read_packed == 0:
            return False
        self._asked.add(self.columns.step)
        self._owed = False
        return True

    def grow(self) -> bool:
        rows, end = self.columns.num_rows, self.columns.read_packed
        return any([super().grow(), *(buffer.grow(rows, end, self.reserve) for buffer in self.packed)])

    def _pack(self, due: Due) -> None:
        for buffer, exact in zip(self.packed, (self.keys, self.values), strict=True):
            rows = cut_columns(exact, due.row, due.columns)
            buffer.write(due.row, due.start, buffer.form(rows, due.start), self.reserve)

    def keys_and_values(self) -> tuple[Any, Any]:
        """Packed tokens unpacked, then the exact columns: [rows, heads, packed + columns, dim]."""
        exact = self.exact_part()
        if self.columns.read_packed == 0:
            return exact
        parts = zip(self.packed_part(), exact, strict=True)
        keys, values = (mx.concatenate([rows_of(old), new], axis=2) for old, new in parts)
        return keys, values

    def exact_part(self) -> tuple[Any, Any]:
        """The columns that this step reads."""
        return super().keys_and_values()

    def packed_part(self) -> tuple[Piece, Piece]:
        """The packed tokens that this step reads, as views; there must be some."""
        rows, end = self.columns.num_rows, self.columns.read_packed
        keys, values = (buffer.first(rows, end) for buffer in self.packed)
        return keys, values

    def put(self, start: int, keys: Piece, values: Piece) -> None:
        for buffer, piece in zip(self.packed, (keys, values), strict=True):
            buffer.write(0, start, buffer.formed(piece), self.reserve)

    def release(self) -> None:
        super().release()
        for buffer in self.packed:
            buffer.release()

    def read(self, row: int, start: int, end: int) -> list[Piece]:
        """As they are or will be packed."""
        packed = self.columns.packed_of[row]
        held = self._since(row, packed)[: max(end - packed, 0)]
        found = []
        for buffer, rows in zip(self.packed, (self.keys, self.values), strict=True):
            parts = [buffer.read(row, start, min(end, packed))] if start < packed else []
            if len(held):
                late = buffer.form(cut_columns(rows, row, held), packed)
                parts.append(cut(late, max(start - packed, 0), end - packed))
            found.append(joined(parts))
        return found

    def whole(self, row: int) -> list[Any]:
        packed = self.columns.packed_of[row]
        exact = [cut_columns(a, row, self._since(row, packed)) for a in (self.keys, self.values)]
        if not packed:
            return exact
        parts = zip((rows_of(buffer.read(row, 0, packed)) for buffer in self.packed), exact, strict=True)
        return [mx.concatenate(list(part), axis=2) for part in parts]

    def _since(self, row: int, position: int) -> NDArray[np.intp]:
        """The columns of a row's tokens from a position on."""
        held = held_columns(self.columns, row)
        return held[len(held) - (self.columns.lengths[row] - position) :]

    def adopt(self, row: int, start: int, other: Rows) -> None:
        assert isinstance(other, PackedRows)
        super().adopt(row, start, other)
        if n := other.columns.packed_of[0]:
            for mine, theirs in zip(self.packed, other.packed, strict=True):
                mine.write(row, 0, theirs.first(1, n))

    def empty(self, columns: Columns) -> PackedRows:
        return PackedRows(columns, self.kv, self.additive)

    def isolate(self, source: Rows, row: int) -> None:
        assert isinstance(source, PackedRows)
        super().isolate(source, row)
        n = source.columns.packed_of[row]
        for mine, theirs in zip(self.packed, source.packed, strict=True):
            mine.copy(theirs, row, n)

    def settle(self) -> None:
        """Raises RuntimeError where a model file used what only stood for packed rows."""
        self._offered = None  # it would keep this step's arrays alive, and later writes would have to copy them
        if self._owed:
            raise RuntimeError("attention did not read the packed rows that it asked for in an earlier step")

    def drop(self, row: int, last: int) -> None:
        super().drop(row, last)
        for buffer in self.packed:
            buffer.drop(row, last)

    def shrink(self, rows: int) -> None:
        super().shrink(rows)
        for buffer in self.packed:
            if buffer.piece is not None and rows < arrays_of(buffer.piece)[0].shape[0]:
                buffer.piece = mapped(buffer.piece, lambda a: mx.contiguous(a[:rows]))

    def token_bytes(self) -> int:
        return self.bytes_in(self.kv)

    def bytes_in(self, kv: KvFormat) -> int:
        """Bytes of a packed token in a format, by the shapes of the exact rows; only after a step."""
        return sum(_packed_bytes(b, a) for b, a in zip(buffers_of(kv), (self.keys, self.values), strict=True))

    def effective_bits(self) -> tuple[int, int]:
        """Those that keys and values really have; only after a step."""
        keys, values = (
            EXACT_BITS if b.scheme(a.shape[-1]) is None else b.bits
            for b, a in zip(self.packed, (self.keys, self.values), strict=True)
        )
        return keys, values

    def arrays(self) -> list[Any]:
        return [*super().arrays(), *(a for buffer in self.packed for a in buffer.arrays())]


def _packed_bytes(buffer: PackedBuffer, exact: Any) -> int:
    scheme = buffer.scheme(exact.shape[-1])
    if scheme is None:
        return int(exact.nbytes // (exact.shape[0] * exact.shape[2]))
    means = MEAN_BITS / recent_columns.BLOCK if buffer.centred and scheme.bits == LEAST_BITS else 0
    return int(exact.shape[1] * exact.shape[3] * (scheme.bits_per_value + means)) // 8
