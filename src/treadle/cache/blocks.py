"""Rows in 4 bits, by whole blocks. Engine thread only; nothing is evaluated.

4 bits are too few in two places. The first tokens of a text get a large share of all attention, so the first block
stays exact. And a few channels of the keys lie far from zero, at a place that moves slowly with the position; so
the mean key of each block is kept beside it, and only what differs from it is packed. With many tokens in a block the
means cost a quarter of a bit a value.

A block belongs to its last token: a cut gives all of it to the part in which that token lies, and a part that ends
inside a block has nothing of it. So texts may branch anywhere, though a block's mean depends on all its tokens, and
what a token before the branch becomes depends on tokens behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import mlx.core as mx

from treadle.cache import recent_columns
from treadle.cache.quantise import Packed, Scheme, pack

MEAN_BITS = 16


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks whose last token is one of `start` .. `end`-1: where those begin and end, `places` tells.

    first: rows of the first block as they are, [.., heads, 0 or block, dim]; rest: the rows of others, packed;
    means: bfloat16 [.., heads, others, dim], what was taken from these before, or None.
    """

    start: int
    end: int
    first: Any
    rest: Packed
    means: Any

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())

    def arrays(self) -> list[Any]:
        """Every array: first, those of the packed rows, and the means where there are any."""
        return [self.first, *self.rest.arrays(), *([] if self.means is None else [self.means])]

    def with_arrays(self, arrays: Sequence[Any]) -> Blocks:
        first, weights, scales, biases, *means = arrays
        rest = self.rest.with_arrays([weights, scales, biases])
        return replace(self, first=first, rest=rest, means=means[0] if means else None)

    def views(self, start: int, end: int) -> Blocks:
        """The tokens start..end-1, counted from the first of these."""
        first, last = self.start + start, self.start + end
        begun = self.places(0, self.start)
        spans = zip(begun, self.places(first, last), strict=True)
        slices = [slice(place.start - old.stop, place.stop - old.stop) for old, place in spans]
        cut = [a[:, :, span] for a, span in zip(self.arrays(), slices, strict=True)]
        return replace(self.with_arrays(cut), start=first, end=last)

    def places(self, start: int, end: int) -> list[slice]:
        """Where tokens [start, end) of a text lie in each of `arrays`, were all of the text in them."""
        size = recent_columns.BLOCK
        a, b = start // size, end // size
        first, means = slice(min(a, 1) * size, min(b, 1) * size), slice(max(a, 1) - 1, max(b, 1) - 1)
        rest = slice(means.start * size, means.stop * size)
        return [first, rest, rest, rest, *([] if self.means is None else [means])]

    @staticmethod
    def concatenate(parts: Sequence[Blocks]) -> Blocks:
        """All of `parts`, which follow each other. Raises ValueError where they do not, or their forms differ."""
        if any(a.end != b.start or len(a.arrays()) != len(b.arrays()) for a, b in pairwise(parts)):
            raise ValueError("blocks join only where one part begins at the end of another of the same form")
        if len({(part.rest.scheme, part.rest.dtype) for part in parts}) != 1:
            raise ValueError("packed rows join only where scheme and type are the same")
        columns = zip(*(part.arrays() for part in parts), strict=True)
        whole = parts[0].with_arrays([mx.concatenate(list(column), axis=2) for column in columns])
        return replace(whole, end=parts[-1].end)

    def unpack(self) -> Any:
        """The rows of these blocks, [.., heads, tokens of whole blocks, dim], in their first type."""
        if not self.rest.num_tokens:
            return self.first
        rows = self.rest.unpack()
        if self.means is not None:
            means = mx.repeat(self.means.astype(mx.float32), recent_columns.BLOCK, axis=2)
            rows = (rows.astype(mx.float32) + means).astype(rows.dtype)
        return mx.concatenate([self.first, rows], axis=2)


def blocks_of(rows: Any, start: int, scheme: Scheme, centred: bool) -> Blocks:
    """Pack `rows`, [1, heads, n, dim] of any float type, of the tokens from `start` on, which begins a block.

    What lies behind the last whole block is left out. Raises ValueError where there are no rows or `start` is wrong.
    """
    size = recent_columns.BLOCK
    if start % size:
        raise ValueError(f"token {start} does not begin a block of {size}")
    end = start + rows.shape[2]
    exact = 0 if start else min(size, end // size * size)
    late = rows[:, :, exact : end // size * size - start]
    means = None
    if centred:
        lines = late.astype(mx.float32).reshape(*late.shape[:2], late.shape[2] // size, size, late.shape[3])
        means = _means(lines)
        late = (lines - means[:, :, :, None].astype(mx.float32)).reshape(late.shape)
    packed = replace(pack(late, scheme), dtype=rows.dtype) if late.size else _nothing(rows, scheme)
    first = mx.contiguous(rows[:, :, :exact])  # a view would keep all rows alive
    return Blocks(start, end, first, packed, means)


def _means(lines: Any) -> Any:
    """bfloat16 [.., blocks, dim] of float32 [.., blocks, tokens, dim]."""
    return (lines.mean(axis=3) if lines.size else lines.sum(axis=3)).astype(mx.bfloat16)


def _nothing(rows: Any, scheme: Scheme) -> Packed:
    """No packed rows, with the shapes of some."""
    one = pack(rows[:, :, :1], scheme)
    return one.with_arrays([a[:, :, :0] for a in one.arrays()])
