"""The step's part of seeing: from the spans that a chunk overlaps to what the model is given. Engine thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

from treadle.types import Ids, Picture, Request, Span
from treadle.vision.encoder import Books, Encoder, Rows
from treadle.vision.positions import Positions, mrope, places


class SeeingModel(Protocol):
    """A model that takes embeddings for some of a step's tokens.

    `model(ids, cache=..., pictures=..., positions=..., shift=...)`; each of the three may be left out. `positions` are
    int32 [3, 1, n], `shift` int32 [rows] is added to where the cache says that a row stands.
    """

    image_id: int
    mrope: bool

    def encode(self, picture: Picture) -> Rows:
        """Lazy arrays [num_rows, dim], see `Rows`."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Inlay:
    """Embeddings in the place of some tokens of a step of one sequence: `places` int32 [k], each of `rows` [k, dim]."""

    places: Any
    rows: Rows


class Viewer(Protocol):
    """What is read of a sequence, and written to it (`looked`, `vision_s`)."""

    computed: int
    looked: int
    vision_s: float
    shift: int
    positions: Positions | None

    @property
    def request(self) -> Request: ...
    @property
    def tokens(self) -> Ids: ...


class Sight:
    """One model's. `budget`: bytes of encoded pictures that are remembered; `books`: who counts them."""

    def __init__(self, model: SeeingModel, budget: int, books: Books | None = None) -> None:
        self.image_id = model.image_id
        self.encoder = Encoder(model.encode, budget, books)
        self._mrope = model.mrope

    def positions(self, prompt: Ids, spans: Sequence[Span]) -> tuple[Positions | None, int]:
        """Those of a prompt, and the shift of what comes behind it; (None, 0) for models that count tokens."""
        return mrope(len(prompt), spans) if self._mrope else (None, 0)

    def look(self, viewer: Viewer, n: int) -> float:
        """Encode one picture of the next `n` tokens that is not known yet, and was not before; the seconds, or 0."""
        spans = viewer.request.spans
        for number in range(viewer.looked, len(spans)):
            span = spans[number]
            if span.start >= viewer.computed + n:
                break
            viewer.looked = number + 1
            if span.end > viewer.computed and not self.encoder.knows(span.picture):
                return self.encoder.rows(span.picture)[1]
        return 0.0

    def given(self, viewer: Viewer, n: int) -> dict[str, Any]:
        """What a seeing model is given with the next `n` tokens, see `SeeingModel`."""
        given: dict[str, Any] = {}
        start = viewer.computed
        inlay, seconds = self._inlay(viewer.tokens, viewer.request.spans, start, n)
        viewer.vision_s += seconds
        if inlay is not None:
            given["pictures"] = inlay
        if viewer.positions is not None:
            given["positions"] = mx.array(places(viewer.positions, viewer.shift, start, n))[:, None]
        return given

    def _inlay(self, tokens: Ids, spans: Sequence[Span], start: int, n: int) -> tuple[Inlay | None, float]:
        """What takes the place of tokens [start, start + n), and the seconds that encoding took; None: nothing does."""
        found: list[Any] = []
        parts: list[Rows] = []
        seconds = 0.0
        for span in spans:
            first, last = max(start, span.start), min(start + n, span.end)
            if first >= last:
                continue
            before = int(np.count_nonzero(tokens[span.start : first] == self.image_id))
            mine = np.flatnonzero(tokens[first:last] == self.image_id)
            rows, took = self.encoder.rows(span.picture)
            seconds += took
            found.append(mine + (first - start))
            parts.append(tuple(array[before : before + len(mine)] for array in rows))
        if not sum(map(len, found)):
            return None, seconds
        joined = tuple(mx.concatenate(list(arrays)) for arrays in zip(*parts, strict=True))
        return Inlay(mx.array(np.concatenate(found).astype(np.int32)), joined), seconds
