"""Where pictures lie in a prompt, and what follows for chunks and for the prefix cache. Pure; any thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from treadle.types import Ids, Picture, Span

OUTSIDE = 1 << 62  # key ids of pictures start here, beyond any vocabulary
STEP = 0x9E3779B97F4A7C15  # odd, so that the keys within a picture differ


def find_spans(ids: Ids, image_id: int, pictures: Sequence[Picture], whole: bool = False) -> tuple[Span, ...]:
    """The spans of `pictures`, in their order, in `ids` [num_tokens]: each takes the next `num_rows` image ids.

    Raises ValueError when there are more or fewer image ids than embeddings.
    """
    places = np.flatnonzero(ids == image_id)
    wanted = sum(picture.num_rows for picture in pictures)
    if len(places) != wanted:
        raise ValueError(f"{len(places)} tokens stand for images, but the images have {wanted}")
    spans, taken = [], 0
    for picture in pictures:
        mine = places[taken : taken + picture.num_rows]
        taken += picture.num_rows
        spans.append(Span(int(mine[0]), int(mine[-1]) + 1, picture, whole))
    return tuple(spans)


def key_ids(prompt: Ids, spans: Sequence[Span]) -> Ids:
    """What the prefix cache compares, int64 [num_tokens]: token ids, and inside a span ids made of its digest."""
    if not spans:
        return prompt
    keys = np.array(prompt, np.int64)
    for span in spans:
        n = span.end - span.start
        words = np.resize(np.frombuffer(span.picture.digest, "<u8"), n)
        mixed = words + np.arange(n, dtype=np.uint64) * np.uint64(STEP)
        keys[span.start : span.end] = ((mixed >> np.uint64(2)) | np.uint64(OUTSIDE)).astype(np.int64)
    return keys


def chunk_of(spans: Sequence[Span], start: int, n: int) -> int:
    """Tokens of the chunk from `start` on that wants `n`: it ends before a span that must be whole, or behind it.

    Behind it only where the chunk begins with that span: then it is as long as the span at least.
    """
    for span in spans:
        if span.whole and span.start < start + n < span.end:
            return span.start - start if span.start > start else span.end - start
    return n


def outside(spans: Sequence[Span], position: int) -> int:
    """`position`, or the start of the whole span that it would cut in two."""
    return next((span.start for span in spans if span.whole and span.start < position < span.end), position)


def largest(spans: Sequence[Span], start: int = 0) -> int:
    """Embeddings of the largest picture that ends behind `start`; 0: there is none."""
    return max((span.picture.num_rows for span in spans if span.end > start), default=0)


def has_picture(keys: Ids) -> bool:
    """Whether a stored prefix holds a picture."""
    return bool((keys >= OUTSIDE).any())
