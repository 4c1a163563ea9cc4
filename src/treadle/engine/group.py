"""Sequences that decode together: the rows of one `Layers`. Engine thread only.

- A plain step (`launch`) feeds each row the token drawn last, which may still be lazy: the caller reads the step before
  it while the device works. Rows with a grammar need their last token for the mask of the next one, so a step with such
  a row is read before the next is launched.
- A checked step (`check`) feeds what is pending and the drafts of each row, and draws behind every draft. Nothing may
  be under way when it is launched, and `settle` says what stood before anything else is.

A row that leaves while a step is under way is simply skipped when that step is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.engine import scheduler
from treadle.engine.compiled import Forward
from treadle.engine.sampling import Drawn, Sampler, Scored
from treadle.engine.sequence import Found, Sequence
from treadle.grammar.matcher import free_mask
from treadle.grammar.vocabulary import mask_words
from treadle.models.upload import on_device
from treadle.types import Batching, TokenLogprob

Tokens = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Flight:
    """A step under way, not read yet: a drawn token for every line; row i has len(drafts[i]) + 1 lines."""

    rows: tuple[Sequence, ...]
    drawn: Drawn
    drafts: tuple[Tokens, ...]
    fed: tuple[int, ...] = ()  # of a checked step: tokens that each row was fed, padding included
    states: Any = None  # of a checked step: the recurrent layers before it

    @property
    def urgent(self) -> bool:
        """Whether a plain step must be read at once: somebody's first token, or a mask that depends on it."""
        return any(row.first_token is None or row.matcher is not None for row in self.rows)

    def read(self) -> list[Found]:
        """Wait for the device, with one synchronisation for all rows; what was drawn, by row."""
        mx.eval(self.drawn.arrays())
        tokens, gaps, told = self.drawn.read(), self.drawn.ahead(), self.drawn.scored()
        found, start = [], 0
        for row, draft in zip(self.rows, self.drafts, strict=True):
            lines = slice(start, start := start + len(draft) + 1)
            logprobs = [] if told is None else _logprobs(row, tokens[lines], told[lines])
            found.append(Found(tokens[lines], logprobs, None if gaps is None else gaps[lines]))
        return found


def _logprobs(row: Sequence, tokens: list[int], told: list[Scored]) -> list[TokenLogprob]:
    n = row.request.sampling.logprobs
    if n is None:
        return []
    lines = zip(tokens, told, strict=True)
    return [TokenLogprob(token, own, tuple(zip(ids[:n], tops[:n], strict=True))) for token, (own, ids, tops) in lines]


class Group:
    """Rows that step together. The first sequence brings its layers; others are copied in."""

    def __init__(self, model: Any, vocab_size: int, forward: Forward | None = None) -> None:
        """`forward`: how steps are computed; built one by one, where it is not given."""
        self.forward = Forward(model) if forward is None else forward
        self.rows: list[Sequence] = []
        self.layers: Any = None
        self.sampler = Sampler(vocab_size)
        self.flight: Flight | None = None
        self.denied = self.denials = 0  # see `Speculation.foresees`
        self._feed: Any = None  # int32 [rows]: the token each row is fed next, possibly lazy

    def takes(self, sequence: Sequence, batching: Batching) -> bool:
        """Whether a sequence may step with those that are here."""
        if batching is Batching.NEVER or sequence.alone or any(row.alone for row in self.rows):
            return False
        if batching is Batching.DECODE and any(row.pending > 1 for row in self.rows):
            return False  # what was taken back is computed again in one step of several tokens
        if (self.rows[0].kv, self.rows[0].request.kv) != (sequence.kv, sequence.request.kv):
            return False  # one format for all, and all or none may be packed when memory is short
        return scheduler.fits_together([row.computed for row in self.rows], sequence.computed)

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
        self.denied = self.denials = 0
        n = sequence.num_prompt
        prompt = sequence.tokens[:n] if sequence.original is None else sequence.original.prompt
        self.sampler.join(sequence.request.sampling, prompt, sequence.tokens[n:])
        if self._feed is not None:
            self._feed = mx.concatenate([self._feed, mx.array(sequence.tokens[-1:].astype(np.int32))])
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
        if self._feed is not None:
            self._feed = self._feed[on_device(order, mx.int32)]

    def launch(self) -> Flight:
        """Start a plain step for all rows."""
        if self._feed is None:
            self._feed = on_device([int(row.tokens[-1]) for row in self.rows], mx.int32)
        self.layers.begin([1] * len(self.rows), [row.gap for row in self.rows], in_place=True)
        logits = self.forward(self._feed[:, None], self.layers, **self._shifted())[:, -1]
        self.layers.end()
        nothing: tuple[Tokens, ...] = ((),) * len(self.rows)
        mask = self._mask(logits, nothing)
        for row in self.rows:
            row.computed += 1
            row.launched += 1
        drawn = self.sampler.draw(logits, [row.computed + row.gap for row in self.rows], mask)
        self._feed = drawn.tokens
        mx.async_eval(*drawn.arrays())  # type: ignore[no-untyped-call]
        return Flight(tuple(self.rows), drawn, nothing)

    def check(self, drafts: Mapping[Sequence, Tokens], width: int = 0, gaps: bool = True) -> Flight:
        """Start a checked step. `width`: tokens per row to pad to, where that is cheaper; `gaps`: measure them.

        Rows without drafts ride along. No step may be under way.
        """
        assert self.flight is None
        self._feed = None
        mine = tuple(drafts.get(row, ()) for row in self.rows)
        feeds = [[*row.tokens[row.computed :].tolist(), *draft] for row, draft in zip(self.rows, mine, strict=True)]
        longest = max(feeds, key=len)
        longest += [0] * (width - len(longest))
        width = len(longest)
        ids = np.array([feed + [0] * (width - len(feed)) for feed in feeds], np.int32)
        states = self.layers.states_now()
        self.layers.begin([len(feed) for feed in feeds], [row.gap for row in self.rows], in_place=True)
        logits = self.forward(on_device(ids, mx.int32), self.layers, **self._shifted())
        self.layers.end()
        logits = _lines(logits, [row.pending - 1 for row in self.rows], [len(draft) + 1 for draft in mine])
        mx.async_eval(logits)  # type: ignore[no-untyped-call]  # the device begins while the rest is built
        mask = self._mask(logits, mine)
        drawn = self.sampler.check(logits, mine, [len(row.tokens) + row.gap for row in self.rows], mask, gaps)
        for row, feed in zip(self.rows, feeds, strict=True):
            row.computed += len(feed)
            row.launched += 1
        return Flight(tuple(self.rows), drawn, mine, tuple(len(feed) for feed in feeds), states)

    def settle(self, flight: Flight, taken: Several[Several[int]]) -> None:
        """Take back what a checked step fed beyond what stands: `taken` are the tokens of each row that do.

        Afterwards the last token taken, or the last one known if none was, is pending in every row, and with recurrent
        layers all that a row with refused drafts was fed.
        """
        surplus = {}
        for i, (row, tokens) in enumerate(zip(flight.rows, taken, strict=True)):
            stands = row.pending + flight.fed[i] + len(tokens) - 1
            if flight.fed[i] > stands:
                surplus[i] = flight.fed[i] - stands
            self.sampler.count(i, tokens)
        if self.layers.states and surplus:
            surplus = {i: flight.fed[i] for i in surplus}
            self.layers.go_back(flight.states, surplus)
        else:
            for i, n in surplus.items():
                self.layers.rewind(i, n)
        for i, n in surplus.items():
            flight.rows[i].computed -= n

    def _shifted(self) -> dict[str, Any]:
        """How far the rows stand from where their layers say, for models whose pictures shift what follows them."""
        shifts = [row.shift for row in self.rows]
        return {"shift": on_device(shifts, mx.int32)} if any(shifts) else {}

    def _mask(self, logits: Any, drafts: Several[Tokens]) -> NDArray[np.uint32] | None:
        """uint32 [lines, words] of the ids that may come next, made while the device computes; None: all may."""
        if not any(row.matcher for row in self.rows):
            return None
        mx.async_eval(logits)  # type: ignore[no-untyped-call]
        words = mask_words(self.sampler.vocab_size)
        return np.concatenate(
            [
                np.stack([free_mask(words)] * (len(draft) + 1)) if row.matcher is None else row.matcher.masks(draft)
                for row, draft in zip(self.rows, drafts, strict=True)
            ]
        )


def _lines(logits: Any, starts: Several[int], counts: Several[int]) -> Any:
    """[lines, vocab]: of each row of `logits` [rows, n, vocab], `counts` lines from `starts` on, row after row."""
    if len(counts) == 1:
        return logits[0, starts[0] : starts[0] + counts[0]]
    rows, width, _ = logits.shape
    if sum(counts) == rows * width:
        return logits.flatten(0, 1)
    lines = [row * width + a + j for row, (a, n) in enumerate(zip(starts, counts, strict=True)) for j in range(n)]
    return logits.flatten(0, 1)[on_device(lines, mx.int32)]
