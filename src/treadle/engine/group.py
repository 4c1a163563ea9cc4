"""Sequences that decode together: the rows of one `Layers`, stepping with look-ahead. Engine thread only.

`launch` builds the next step on tokens that may still be lazy and starts it; the caller reads the step before it while
the device works. Rows with a grammar need their last token for the mask of the next one, so a step with such a row is
read before the next is launched. A row that leaves while a step is under way is simply skipped when that step is read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.engine.sampling import Drawn, Sampler
from treadle.engine.sequence import Emission, Sequence
from treadle.grammar.matcher import free_mask
from treadle.grammar.vocabulary import mask_words
from treadle.types import TokenLogprob


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way: one drawn token for each of `rows`, not read yet."""

    rows: tuple[Sequence, ...]
    drawn: Drawn

    @property
    def urgent(self) -> bool:
        """Whether it must be read at once: for somebody's first token, or for the next mask."""
        return any(row.first_token is None or row.matcher is not None for row in self.rows)

    def read(self) -> list[Emission]:
        """Wait for the device; one synchronisation for all rows."""
        mx.eval(self.drawn.arrays())
        tokens: list[int] = self.drawn.tokens.tolist()
        if self.drawn.logprobs is None:
            return [Emission(token, None) for token in tokens]
        chosen = self.drawn.logprobs.tolist()
        ids, scores = (
            ([[]] * len(tokens),) * 2
            if self.drawn.top_ids is None
            else (self.drawn.top_ids.tolist(), self.drawn.top_logprobs.tolist())
        )
        return [
            Emission(token, _logprob(row, token, chosen[i], ids[i], scores[i]))
            for i, (row, token) in enumerate(zip(self.rows, tokens, strict=True))
        ]


def _logprob(row: Sequence, token: int, chosen: float, ids: list[int], scores: list[float]) -> TokenLogprob | None:
    wanted = row.request.sampling.logprobs
    if wanted is None:
        return None
    return TokenLogprob(token, chosen, tuple(zip(ids[:wanted], scores[:wanted], strict=True)))


class Group:
    """Rows that step together. The first sequence brings its layers; others are copied in."""

    def __init__(self, model: Any, vocab_size: int) -> None:
        self.model = model
        self.rows: list[Sequence] = []
        self.layers: Any = None
        self.sampler = Sampler(vocab_size)
        self.flight: Flight | None = None
        self._feed: Any = None  # int32 [rows]: the token each row is fed next, possibly lazy

    def join(self, sequence: Sequence) -> None:
        """Add a sequence with exactly one pending token. Its own layers are taken over or copied."""
        assert sequence.pending == 1 and sequence.layers is not None
        if self.layers is None:
            self.layers = sequence.layers
        else:
            self.layers.join(sequence.layers)
        sequence.layers = None
        if sequence.holder is not None:
            sequence.holder.locate = lambda: (self.layers, self.rows.index(sequence))
        n = sequence.num_prompt
        self.sampler.join(sequence.request.sampling, sequence.tokens[:n], sequence.tokens[n:])
        last = mx.array(sequence.tokens[-1:].astype(np.int32))
        self._feed = last if self._feed is None else mx.concatenate([self._feed, last])
        self.rows.append(sequence)

    def drop(self, sequence: Sequence) -> None:
        """Remove a row; what it computed is forgotten."""
        row, last = self.rows.index(sequence), len(self.rows) - 1
        self.rows[row] = self.rows[last]
        self.rows.pop()
        if not self.rows:
            self.layers = self._feed = self.flight = None
            return
        self.layers.drop(row)
        self.sampler.drop(row)
        order = list(range(last))
        if row != last:
            order[row] = last
        self._feed = self._feed[mx.array(order)]

    def launch(self) -> Flight:
        """Start one step for all rows."""
        self.layers.begin([1] * len(self.rows))
        logits = self.model(self._feed[:, None], cache=self.layers.caches)[:, -1]
        self.layers.end()
        mask = self._mask(logits)
        for row in self.rows:
            row.computed += 1
            row.launched += 1
        drawn = self.sampler.draw(logits, [row.computed for row in self.rows], mask)
        self._feed = mx.maximum(drawn.tokens, 0)
        mx.async_eval(self._feed, *drawn.arrays())  # type: ignore[no-untyped-call]
        return Flight(tuple(self.rows), drawn)

    def _mask(self, logits: Any) -> NDArray[np.uint32] | None:
        """uint32 [rows, words] of the ids that may come next, made while the device computes; None: all may."""
        matchers = [row.matcher for row in self.rows]
        if not any(matchers):
            return None
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        words = mask_words(self.sampler.vocab_size)
        return np.stack([free_mask(words) if m is None else m.mask() for m in matchers])
