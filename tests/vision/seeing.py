"""A hash model that sees: a stale, misplaced or half shown picture changes its text, and so does a wrong position."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from tests.fakes import VOCAB, HashModel, mix
from treadle.engine.sampling import Sampler
from treadle.models.capabilities import mlx_cache
from treadle.types import Ids, Picture, Request, Sampling, Span
from treadle.vision.positions import mrope, places
from treadle.vision.sight import Inlay
from treadle.vision.spans import find_spans

IMAGE = VOCAB - 1  # the image id
BREAK = VOCAB - 2  # a token inside a span that is none of the image's


def picture(name: str, rows: int = 1, columns: int = 4) -> Picture:
    """One of `rows` x `columns` embeddings; the name is all that it shows."""
    return Picture(hashlib.sha256(name.encode()).digest(), {}, rows * columns, (rows, columns))


class SeeingHashModel(HashModel):
    """`mrope`: three positions for each token; `whole`: it refuses to see a part of a picture."""

    image_id = IMAGE

    def __init__(self, kinds: tuple[str, ...] = ("rows", "rows"), *, mrope: bool = False, whole: bool = False) -> None:
        super().__init__(kinds)
        self.mrope = mrope
        self.whole = whole
        self.encoded: list[Picture] = []

    def encode(self, picture: Picture) -> tuple[Any, ...]:
        """Rows of (hash, place in the picture, size of the picture)."""
        self.encoded.append(picture)
        return (mx.array(rows_of(picture)),)

    def __call__(
        self, ids: Any, cache: list[Any], pictures: Inlay | None = None, positions: Any = None, shift: Any = None
    ) -> Any:
        h = mix(ids.astype(mx.uint32) + 1)
        if pictures is not None:
            (rows,) = pictures.rows
            if self.whole:
                _check_whole(np.array(rows))
            h[0, pictures.places] = mix(rows[:, 0])
        if self.mrope:
            if positions is None:
                start = cache[0].offset
                start = start[:, None] if isinstance(start, mx.array) else start
                here = mx.arange(ids.shape[1])[None] + start + (0 if shift is None else shift[:, None])
                positions = mx.broadcast_to(here, (3, *ids.shape))
            p = positions.astype(mx.uint32)
            h = mix(h + mix(p[0] * 31 + p[1] * 1009 + p[2] * 65537))
        else:
            assert positions is None and shift is None
        return self.through(h, cache)


def rows_of(picture: Picture) -> Any:
    n = picture.num_rows
    seed = int.from_bytes(picture.digest[:4], "little")
    hashes = np.array([(seed + 7919 * j) % 2**32 for j in range(n)], np.uint32)
    return np.stack([hashes, np.arange(n, dtype=np.uint32), np.full(n, n, np.uint32)], axis=1)


def _check_whole(rows: Any) -> None:
    expected = 0
    for _, place, size in rows.tolist():
        if place != expected:
            raise ValueError("a picture was cut in two")
        expected = (place + 1) % size
    if expected:
        raise ValueError("a picture was cut in two")


def shown(parts: list[int | Picture], whole: bool = False, pauses: bool = False) -> tuple[Ids, tuple[Span, ...]]:
    """A prompt of ids and pictures; with `pauses` another token stands in the middle of each picture."""
    ids: list[int] = []
    for part in parts:
        if isinstance(part, int):
            ids.append(part)
        else:
            tokens = [IMAGE] * part.num_rows
            if pauses:
                tokens.insert(part.num_rows // 2, BREAK)
            ids += tokens
    prompt = np.array(ids, np.int64)
    return prompt, find_spans(prompt, IMAGE, [p for p in parts if isinstance(p, Picture)], whole)


def ask(id: str, parts: list[int | Picture], *, whole: bool = False, pauses: bool = False, **more: Any) -> Request:
    prompt, spans = shown(parts, whole, pauses)
    return replace(Request(id, prompt, Sampling(temperature=0), max_tokens=12), spans=spans, **more)


def slow_seeing(model: SeeingHashModel, request: Request) -> list[int]:
    """The plain loop: the prompt in one step, then one token at a time."""
    ids = request.prompt
    cache = mlx_cache.make_prompt_cache(model)
    sampler = Sampler(VOCAB)
    sampler.join(request.sampling, ids, np.empty(0, np.int64))
    known, shift = mrope(len(ids), request.spans) if model.mrope else (None, 0)
    rows = [rows_of(span.picture) for span in request.spans]
    at = mx.array(np.flatnonzero(ids == IMAGE).astype(np.int32))
    given: dict[str, Any] = {"pictures": Inlay(at, (mx.array(np.concatenate(rows)),))} if rows else {}
    made: list[int] = []
    fed = ids.tolist()
    start = 0
    assert request.max_tokens is not None
    while len(made) < request.max_tokens:
        if known is not None:
            given["positions"] = mx.array(places(known, shift, start, len(fed)))[:, None]
        logits = model(mx.array([fed]), cache=cache, **given)[:, -1]
        token = int(sampler.draw(logits, [len(ids) + len(made)]).tokens.item())
        if token in request.stop_ids:
            break
        made.append(token)
        start += len(fed)
        fed, given = [token], {}
    return made
