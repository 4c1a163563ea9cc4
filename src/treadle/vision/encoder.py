"""What the image encoder made of pictures, remembered within a budget of bytes. Engine thread only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from treadle.types import Picture

Rows = tuple[Any, ...]  # arrays [num_rows, dim]: the embeddings, then what some models add in their first layers


class Encoder:
    """`rows` runs `encode` only for a picture that is not remembered; the least recently used ones are forgotten."""

    def __init__(self, encode: Callable[[Picture], Rows], budget: int) -> None:
        self.encoded = 0  # how often the encoder ran
        self._encode = encode
        self._budget = budget
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(rows) for rows in self._kept.values())

    def knows(self, picture: Picture) -> bool:
        return picture.digest in self._kept

    def rows(self, picture: Picture) -> tuple[Rows, float]:
        """The evaluated embeddings, and the seconds that the encoder took for them now."""
        if picture.digest in self._kept:
            self._kept.move_to_end(picture.digest)
            return self._kept[picture.digest], 0.0
        began = time.perf_counter()
        made = self._encode(picture)
        mx.eval(*made)
        self.encoded += 1
        self._kept[picture.digest] = made
        while self.nbytes > self._budget and len(self._kept) > 1:  # the last one is about to be used
            self._kept.popitem(last=False)
        return made, time.perf_counter() - began


def _nbytes(rows: Rows) -> int:
    return sum(array.nbytes for array in rows)
