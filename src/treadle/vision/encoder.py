"""What the image encoder made of pictures, remembered within a budget of bytes. Engine thread only."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import mlx.core as mx

from treadle.types import Picture

Rows = tuple[Any, ...]  # arrays [num_rows, dim]: the embeddings, then what some models add in their first layers


class Books(Protocol):
    """Who counts memory: is told of the pictures that are kept, and what it took to encode one."""

    pictures: Any

    def looked(self, num_rows: int, peak: int) -> None: ...


class Encoder:
    """`rows` runs `encode` only for a picture that is not remembered; the least recently used ones are forgotten."""

    def __init__(self, encode: Callable[[Picture], Rows], budget: int, books: Books | None = None) -> None:
        self.encoded = 0  # how often the encoder ran
        self.nbytes = 0  # of all that are remembered; read on other threads
        self._encode = encode
        self._budget = budget
        self._books = books
        self._kept: OrderedDict[bytes, Rows] = OrderedDict()
        if books is not None:
            books.pictures = self

    @property
    def spare(self) -> int:
        """Bytes that `forget` may free: all but the picture used last, which the next chunk may show again."""
        return self.nbytes - _nbytes(next(reversed(self._kept.values()), ()))

    def knows(self, picture: Picture) -> bool:
        return picture.digest in self._kept

    def rows(self, picture: Picture) -> tuple[Rows, float]:
        """The evaluated embeddings, and the seconds that the encoder took for them now."""
        if picture.digest in self._kept:
            self._kept.move_to_end(picture.digest)
            return self._kept[picture.digest], 0.0
        began, before = time.perf_counter(), mx.get_active_memory()
        mx.reset_peak_memory()
        made = self._encode(picture)
        mx.eval(*made)
        if self._books is not None:
            self._books.looked(picture.num_rows, mx.get_peak_memory() - before)
        self.encoded += 1
        self._kept[picture.digest] = made
        self.nbytes += _nbytes(made)
        self.forget(self.nbytes - self._budget)
        return made, time.perf_counter() - began

    def forget(self, nbytes: int) -> None:
        """Free at least so many bytes, or `spare`."""
        target = self.nbytes - nbytes
        while self.nbytes > target and len(self._kept) > 1:
            self.nbytes -= _nbytes(self._kept.popitem(last=False)[1])


def _nbytes(rows: Rows) -> int:
    return sum(array.nbytes for array in rows)
