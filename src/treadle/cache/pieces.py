"""Rows of some tokens in any form: a plain array, or `quantise.Packed`. Engine thread only; nothing is evaluated.

Both are [.., heads, n, ..] with tokens on axis 2, so they are cut and joined alike. Packing is per token: cutting and
joining packed pieces is exact, and rows are packed once in their life.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from treadle.cache.quantise import Packed, Scheme, pack

Piece: TypeAlias = Any  # mx.array | Packed


def piece_of(rows: Any, scheme: Scheme | None) -> Piece:
    """Rows packed by `scheme`, or as they are without one."""
    return rows if scheme is None else pack(rows, scheme)


def arrays_of(piece: Piece) -> list[Any]:
    return piece.arrays() if isinstance(piece, Packed) else [piece]


def num_tokens(piece: Piece) -> int:
    return int(arrays_of(piece)[0].shape[2])


def head_size(piece: Piece) -> int:
    """Values of one head of one token."""
    if isinstance(piece, Packed):
        return int(piece.scales.shape[-1]) * piece.scheme.group_size
    return int(piece.shape[-1])


def rows_of(piece: Piece) -> Any:
    """As a plain array."""
    return piece.unpack() if isinstance(piece, Packed) else piece


def mapped(piece: Piece, f: Callable[[Any], Any]) -> Piece:
    """`f` of each array; it must keep the last axis and the order of tokens meaningful."""
    return piece.with_arrays([f(a) for a in piece.arrays()]) if isinstance(piece, Packed) else f(piece)


def cut(piece: Piece, start: int, end: int) -> Piece:
    """Tokens start..end-1 in arrays of their own."""
    return mapped(piece, lambda a: mx.contiguous(a[:, :, start:end]))


def joined(pieces: Sequence[Piece]) -> Piece:
    """All tokens in order. Raises ValueError where the forms differ."""
    if len(pieces) == 1:
        return pieces[0]
    if isinstance(pieces[0], Packed):
        return Packed.concatenate(pieces)
    return mx.concatenate(list(pieces), axis=2)
