"""From importance to a selection: which tokens of a prompt are computed. Pure.

The prompt is cut into chunks of `CHUNK` tokens behind what is cached exactly; those with the highest mean score are
taken until the share of the tokens is reached. Some are taken in any case: they count towards the share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from treadle.types import Ids, Span

CHUNK = 32  # tokens that are taken or left together
FIRST = 64  # tokens at the start that are always kept: attention leans on them
LAST = 256  # and at the end, among them the question
ROLE = 4  # tokens from a message's start on that say who speaks
ANCHOR_EVERY = 2048  # a chunk at least this often, so that no part of the text is missing altogether
SMOOTHING = 13  # tokens over which scores are averaged
LEAST_LIFT = 1.25  # the kept chunks must have so much more score than their number explains
KEY_STEP, PLACE_STEP = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # odd, for mixing
BEYOND = 1 << 60  # beyond any vocabulary, before what stands for pictures

Places = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Selection:
    """`places`: int64, ascending, the tokens that are computed. `lift`: the mean score of the best share of chunks
    against the mean of all; about 1 when nothing in the prompt stands out."""

    places: Places
    lift: float


def smooth(scores: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each score averaged with its neighbours, [n] to [n]; at the ends with those there are."""
    kernel = np.ones(min(SMOOTHING, len(scores)), np.float32)
    sums = np.convolve(scores, kernel, "same")
    counts = np.convolve(np.ones(len(scores), np.float32), kernel, "same")
    return np.asarray(sums / counts, np.float32)


def needed(
    prompt: Ids, boundaries: Sequence[int], spans: Sequence[Span], special: Iterable[int], share: float, start: int = 0
) -> NDArray[np.bool_]:
    """The tokens that are kept whatever their score, bool [n].

    They are the first and the last ones, special tokens, the starts of messages, pictures, and the last message, if it
    takes no more than half of `share` of the tokens behind the first `start`, which have rows already.
    """
    n = len(prompt)
    kept = np.isin(prompt, np.fromiter(special, np.int64))
    kept[:FIRST] = kept[max(0, n - LAST) :] = True
    for boundary in boundaries:
        kept[boundary : boundary + ROLE] = True
    for span in spans:
        kept[span.start : span.end] = True
    asked = _last_message(n, boundaries)
    if asked is not None and n - asked <= share * (n - start) / 2:
        kept[asked:] = True
    return kept


def _last_message(num_tokens: int, boundaries: Sequence[int]) -> int | None:
    """Where the last message starts that says something: the prompt may end with the bare start of the reply."""
    return next((start for start in reversed(boundaries) if num_tokens - start > 2 * ROLE), None)


def select(scores: NDArray[np.float32], kept: NDArray[np.bool_], start: int, share: float) -> Selection:
    """Choose from the tokens behind the first `start`, which have rows already.

    `scores` and `kept` [n] are of the whole prompt; `share` is of its tokens behind `start`.
    """
    n = len(scores) - start
    budget = int(np.ceil(share * n))
    chunks = -(-n // CHUNK)
    sizes = np.full(chunks, CHUNK)
    sizes[-1] = n - CHUNK * (chunks - 1)
    padded = np.zeros(chunks * CHUNK, np.float64)
    padded[:n] = scores[start:]
    means = padded.reshape(chunks, CHUNK).sum(1) / sizes
    chosen = np.zeros(chunks * CHUNK, np.bool_)
    chosen[:n] = kept[start:]
    lines = chosen.reshape(chunks, CHUNK)
    lines[:: ANCHOR_EVERY // CHUNK] = True
    have = int(chosen[:n].sum())
    best_first = np.argsort(-means, kind="stable")
    for chunk in best_first:
        if have >= budget:
            break
        have += int(sizes[chunk] - lines[chunk, : sizes[chunk]].sum())
        lines[chunk] = True
    mean = float((means * sizes).sum() / n)
    top = best_first[: max(1, int(share * chunks))]
    best = float((means[top] * sizes[top]).sum() / sizes[top].sum())
    return Selection(np.flatnonzero(chosen[:n]) + start, best / mean if mean > 0 else 1.0)


def moved(places: Places, spans: Sequence[Span], boundaries: Sequence[int]) -> tuple[list[Span], list[int]]:
    """Spans and boundaries of a prompt of which only the tokens at `places` are left.

    Spans are left whole; of the boundaries those whose token is left.
    """
    index = {place: i for i, place in enumerate(places.tolist())}
    whole = [Span(index[s.start], index[s.end - 1] + 1, s.picture, s.whole) for s in spans]
    return whole, [index[b] for b in boundaries if b in index]


def placed(keys: Ids, places: Places, gap: int) -> Ids:
    """Key ids [n] of which those that stand behind a gap are mixed with their place, beyond any vocabulary.

    `places` are those of the first ones; the others stand `gap` behind their numbers.
    """
    numbers = np.arange(len(keys), dtype=np.int64)
    where = numbers + gap
    where[: len(places)] = places[: len(keys)]
    behind = where != numbers
    mixed = keys.view(np.uint64) * np.uint64(KEY_STEP) + where.view(np.uint64) * np.uint64(PLACE_STEP)
    mixed ^= mixed >> np.uint64(29)
    beyond = (mixed >> np.uint64(4)) | np.uint64(BEYOND)
    return np.where(behind, beyond.view(np.int64), keys)
