"""Keys and values of one attention layer, packed but for the recent ones. Engine thread only; nothing here evaluates.

The recent tokens lie exactly in columns, as in `Rows`; packed ones lie in `PackedBuffer`s, the token at position t in
column t. A token is packed once, when the first query that reads it packed is computed (see `recent_columns.py`).
Keys or values that stay at 16 bits, because they are to or because no group divides the head size, take the same way
unpacked, so that all layers of a model share masks and columns.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from treadle.cache.columns import Columns, round_up
from treadle.cache.pieces import Piece, arrays_of, cut, head_size, joined, mapped, num_tokens, piece_of, rows_of
from treadle.cache.quantise import Packed, Scheme, scheme_for
from treadle.cache.recent_columns import BatchRecent, Due, SoloRecent
from treadle.cache.rows import Rows, cut_columns, held_columns, resized, row_slots
from treadle.types import KvFormat

EXACT_BITS = 16


class PackedBuffer:
    """Packed rows by position: arrays [row slots, heads, column slots, ..]; `piece` is None before the first write."""

    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size
        self.piece: Piece = None

    def scheme(self, dim: int) -> Scheme | None:
        """How heads of this size are packed; None: not at all."""
        return None if self.bits == EXACT_BITS else scheme_for(self.bits, self.group_size, dim)

    def form(self, piece: Piece) -> Piece:
        """Rows of any form in the one that is kept here. What is packed already is packed again only for other bits."""
        scheme = self.scheme(head_size(piece))
        if isinstance(piece, Packed) and piece.scheme == scheme:
            return piece
        return piece_of(rows_of(piece), scheme)

    def write(self, row: int, start: int, piece: Piece, reserve: int = 0) -> None:
        """Tokens from position `start` on, [1, heads, n, ..]."""
        end = start + num_tokens(piece)
        self._ensure(row + 1, end, piece, reserve)
        for mine, new in zip(arrays_of(self.piece), arrays_of(piece), strict=True):
            mine[row : row + 1, :, start:end] = new

    def _ensure(self, rows: int, columns: int, like: Piece, reserve: int) -> None:
        have = (0, 0) if self.piece is None else arrays_of(self.piece)[0].shape[0:3:2]
        if rows <= have[0] and columns <= have[1]:
            return
        slots = have[0] if rows <= have[0] else row_slots(rows)
        width = have[1] if columns <= have[1] else round_up(max(columns, reserve))
        old = [None] * len(arrays_of(like)) if self.piece is None else arrays_of(self.piece)
        grown = [
            resized(a, (slots, b.shape[1], width, b.shape[3]), b.dtype)
            for a, b in zip(old, arrays_of(like), strict=True)
        ]
        self.piece = like.with_arrays(grown) if isinstance(like, Packed) else grown[0]

    def grow(self, rows: int, end: int, reserve: int) -> bool:
        """Make room for the first `end` tokens, once something was written; whether that took new arrays."""
        before = self.piece
        if before is not None:
            self._ensure(rows, end, before, reserve)
        return self.piece is not before

    def first(self, rows: int, end: int) -> Piece:
        """The first `end` tokens of the first `rows` rows, as views. Rows beyond those written are zeros."""
        self._ensure(rows, end, self.piece, 0)
        return mapped(self.piece, lambda a: a[:rows, :, :end])

    def read(self, row: int, start: int, end: int) -> Piece:
        """A copy of tokens [start, end) of one row, [1, heads, end - start, ..]."""
        return cut(mapped(self.piece, lambda a: a[row : row + 1]), start, end)

    def drop(self, row: int, last: int) -> None:
        if self.piece is not None and row != last and last < arrays_of(self.piece)[0].shape[0]:
            for a in arrays_of(self.piece):
                a[row] = a[last]

    def arrays(self) -> list[Any]:
        return [] if self.piece is None else arrays_of(self.piece)


class PackedRows(Rows):
    """See the module. `keys` and `values` are the exact ones, in columns; `attend.py` may read the packed ones."""

    columns: SoloRecent | BatchRecent

    def __init__(self, columns: Columns, kv: KvFormat, additive: bool = False) -> None:
        super().__init__(columns, additive)
        self.kv = kv
        self.packed = (PackedBuffer(kv.key_bits, kv.group_size), PackedBuffer(kv.value_bits, kv.group_size))
        self._offered: tuple[Any, Any] | None = None  # what this step's queries were given, until it is built
        self._owed = False  # whether that stands for packed rows, which somebody has to ask for
        self._asked: set[int] = set()  # numbers of tokens in a step whose attention reads packed rows by itself

    @property
    def _reserved(self) -> int:
        return 0  # columns hold recent tokens only

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        self._write(keys, values)
        for due in self.columns.due():
            self._pack(due)
        self._owed = keys.shape[2] in self._asked and self.columns.read_packed > 0
        self._offered = self.exact_part() if self._owed else self.keys_and_values()
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
            buffer.write(due.row, due.start, buffer.form(cut_columns(exact, due.row, due.columns)), self.reserve)

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
            buffer.write(0, start, buffer.form(piece), self.reserve)

    def release(self) -> None:
        super().release()
        for buffer in self.packed:
            buffer.piece = None

    def read(self, row: int, start: int, end: int) -> list[Piece]:
        """As they are or will be packed."""
        held, packed = held_columns(self.columns, row), self.columns.packed_of[row]
        exact = held[len(held) - (self.columns.lengths[row] - max(start, packed)) :][: end - max(start, packed)]
        found = []
        for buffer, rows in zip(self.packed, (self.keys, self.values), strict=True):
            parts = [buffer.read(row, start, min(end, packed))] if start < packed else []
            if end > packed:
                parts.append(buffer.form(cut_columns(rows, row, exact)))
            found.append(joined(parts))
        return found

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
            mine.piece = theirs.read(row, 0, n) if n else None

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
        buffers = (PackedBuffer(bits, kv.group_size) for bits in (kv.key_bits, kv.value_bits))
        return sum(_packed_bytes(b, a) for b, a in zip(buffers, (self.keys, self.values), strict=True))

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
    return int(exact.shape[1] * exact.shape[3] * scheme.bits_per_value) // 8
