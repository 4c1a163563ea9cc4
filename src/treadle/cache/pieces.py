"""Rows of some tokens in any form: a plain array, `quantise.Packed`, or `blocks.Blocks`.

All are cut and joined alike. The first two are [.., heads, n, ..] with tokens on axis 2; `Blocks` know which tokens of
their text they are of, and hold whole blocks alone. Cutting and joining packed pieces is exact, and rows are packed
once in their life. Engine thread only; nothing is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx

from treadle.cache.blocks import Blocks
from treadle.cache.quantise import Packed, Scheme, pack

Piece: TypeAlias = Any  # mx.array | Packed | Blocks


def piece_of(rows: Any, scheme: Scheme | None) -> Piece:
    """Rows packed by `scheme`, or as they are without one."""
    return rows if scheme is None else pack(rows, scheme)


def is_packed(piece: Piece) -> bool:
    return isinstance(piece, Packed | Blocks)


def scheme_of(piece: Piece) -> Scheme | None:
    """How its rows are packed; None: not at all."""
    if isinstance(piece, Blocks):
        return piece.rest.scheme
    return piece.scheme if isinstance(piece, Packed) else None


def arrays_of(piece: Piece) -> list[Any]:
    return piece.arrays() if is_packed(piece) else [piece]


def places(piece: Piece, start: int, end: int) -> list[slice]:
    """Where tokens [start, end) of a text lie on axis 2 of each array, were all of the text in such a piece."""
    return piece.places(start, end) if isinstance(piece, Blocks) else [slice(start, end)] * len(arrays_of(piece))


def num_tokens(piece: Piece) -> int:
    return int(piece.num_tokens if is_packed(piece) else piece.shape[2])


def head_size(piece: Piece) -> int:
    """Values of one head of one token."""
    if isinstance(piece, Blocks):
        return head_size(piece.rest)
    if isinstance(piece, Packed):
        return int(piece.scales.shape[-1]) * piece.scheme.group_size
    return int(piece.shape[-1])


def rows_of(piece: Piece) -> Any:
    """As a plain array."""
    return piece.unpack() if is_packed(piece) else piece


def mapped(piece: Piece, f: Callable[[Any], Any]) -> Piece:
    """`f` of each array; it must keep tokens where they are, and the last axis meaningful."""
    return piece.with_arrays([f(a) for a in piece.arrays()]) if is_packed(piece) else f(piece)


def views(piece: Piece, start: int, end: int) -> Piece:
    """Tokens start..end-1 of these."""
    if isinstance(piece, Blocks):
        return piece.views(start, end)
    return mapped(piece, lambda a: a[:, :, start:end])


def cut(piece: Piece, start: int, end: int) -> Piece:
    """Tokens start..end-1 in arrays of their own."""
    return mapped(views(piece, start, end), mx.contiguous)


def joined(pieces: Sequence[Piece]) -> Piece:
    """All tokens in order. Raises ValueError where the forms differ."""
    if len(pieces) == 1:
        return pieces[0]
    if is_packed(pieces[0]):
        return pieces[0].concatenate(pieces)
    return mx.concatenate(list(pieces), axis=2)
