"""A small model that drafts for several sequences at once. Engine thread only.

It has layers of its own, one row per sequence that it follows. `draft` feeds each row what it has not seen and then its
own draws, and reads nothing until all are made. Draws use the sequence's own settings and random numbers, so that where
both models think alike they also draw alike.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from typing import Any, Generic, TypeVar

import mlx.core as mx
import numpy as np

from treadle.cache.layers import Layers
from treadle.models.upload import on_device
from treadle.types import Caps, Ids, Sampling

K = TypeVar("K", bound=Hashable)


class DraftModel(Generic[K]):
    """The rows of the small model. Keys are whatever names a sequence; `sampler` is an `engine.sampling.Sampler`.

    `forward`: an `engine.compiled.Forward` of the model; None: the model's own.
    """

    def __init__(self, model: Any, caps: Caps, sampler: Any, forward: Any = None) -> None:
        self.model = model
        self.forward = forward or (lambda ids, layers: model(ids, cache=layers.caches))
        self.caps = caps
        self.keys: list[K] = []
        self.layers: Layers | None = None
        self.sampler = sampler

    def prefill(self, layers: Layers, ids: Ids) -> None:
        """Compute one sequence's next rows, [num_tokens] ids, in layers of its own."""
        layers.begin([len(ids)])
        self.model(mx.array(self.known_ids(ids))[None], cache=layers.caches)
        layers.end()
        mx.eval(layers.arrays())

    def join(self, key: K, layers: Layers, sampling: Sampling) -> None:
        """Follow one more sequence; its layers are taken over or copied."""
        if self.layers is None:
            self.layers = layers
        else:
            self.layers.join(layers)
        nothing = np.empty(0, np.int64)
        self.sampler.join(_simple(sampling, self.caps.vocab_size), nothing, nothing)
        self.keys.append(key)

    def drop(self, key: K) -> None:
        """Follow a sequence no more. The layers of the last one are left as they are."""
        assert self.layers is not None
        row = self.row(key)
        self.keys[row] = self.keys[-1]
        self.keys.pop()
        self.sampler.drop(row)
        if self.keys:
            self.layers.drop(row)
        else:
            self.layers = None

    def row(self, key: K) -> int:
        return self.keys.index(key)

    def known(self, key: K) -> int:
        """Tokens of a sequence that have rows here."""
        assert self.layers is not None
        return self.layers.lengths[self.row(key)]

    def draft(self, feeds: Mapping[K, Ids], count: int) -> dict[K, tuple[int, ...]]:
        """`count` tokens for every sequence followed; `feeds`: its tokens without rows here, at least one each.

        Afterwards each row holds its feed and all drafts but the last.
        """
        layers = self.layers
        assert layers is not None
        sizes = [len(feeds[key]) for key in self.keys]
        ids = np.zeros((len(sizes), max(sizes)), np.int32)
        for line, key in zip(ids, self.keys, strict=True):
            line[: len(feeds[key])] = self.known_ids(feeds[key])
        positions = [known + size for known, size in zip(layers.lengths, sizes, strict=True)]
        logits = self._step(layers, on_device(ids, mx.int32), sizes)
        last = logits[mx.arange(len(sizes)), on_device([size - 1 for size in sizes], mx.int32)]
        drawn = [self._started(last, positions)]
        for i in range(1, count):
            logits = self._step(layers, drawn[-1][:, None], [1] * len(sizes))
            drawn.append(self._started(logits[:, -1], [p + i for p in positions]))
        made: Any = mx.stack(drawn, axis=1).tolist()
        return {key: tuple(line) for key, line in zip(self.keys, made, strict=True)}

    def _started(self, logits: Any, positions: list[int]) -> Any:
        """The tokens drawn, lazy, but under way: the next step may let buffers grow, which copies what was written."""
        tokens = self.sampler.draw(logits, positions).tokens
        mx.async_eval(tokens)  # type: ignore[no-untyped-call]
        return tokens

    def _step(self, layers: Layers, ids: Any, counts: list[int]) -> Any:
        layers.begin(counts, in_place=True)
        logits = self.forward(ids, layers)
        layers.end()
        return logits

    def keep(self, key: K, length: int) -> None:
        """Take back what a row holds beyond `length` tokens."""
        assert self.layers is not None
        row = self.row(key)
        surplus = self.layers.lengths[row] - length
        if surplus > 0:
            self.layers.rewind(row, surplus)

    def known_ids(self, ids: Ids) -> Any:
        """Ids as this model knows them: those beyond its embedding (padding of the larger model) become the first."""
        return np.where(ids < self.caps.vocab_size, ids, 0).astype(np.int32)


def _simple(sampling: Sampling, vocab_size: int) -> Sampling:
    """What matters for guessing: no penalties, which would need counts, and no logprobs."""
    return replace(
        sampling,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        logprobs=None,
        logit_bias=tuple(pair for pair in sampling.logit_bias if pair[0] < vocab_size),
    )
