"""A model whose text betrays every mistake: the hash model, and the slow twin that says what the text must be.

It keeps mlx-lm's seam. A key row is a hash of everything the token saw and of its position; the next token depends on
the last row and on every earlier row *as read back from the cache*. A wrong prefix, a missed rewind, a swapped row, a
wrong position or a window off by one changes the text.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from treadle.engine.sampling import Sampler
from treadle.models.capabilities import mlx_cache
from treadle.types import Batching, Caps, LayerKind, Request

VOCAB = 97
STOP = 0
KINDS = {"rows": LayerKind.ROWS, "window": LayerKind.WINDOWED, "state": LayerKind.STATE}


def mix(x: Any) -> Any:
    """A good 32-bit hash, element by element."""
    x = x.astype(mx.uint32)
    x = (x ^ (x >> 16)) * mx.array(0x7FEB352D, mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(0x846CA68B, mx.uint32)
    return x ^ (x >> 16)


class HashModel:
    """`kinds` names the layers: "rows", "window" (of `window` tokens) or "state"."""

    def __init__(self, kinds: tuple[str, ...] = ("rows", "rows"), window: int = 8, context: int = 512) -> None:
        self.kinds = kinds
        self.window = window
        self.caps = Caps(
            vocab_size=VOCAB,
            context_length=context,
            layers=tuple(KINDS[k] for k in kinds),
            window=window if "window" in kinds else None,
            batching=Batching.RAGGED,
        )

    def make_cache(self) -> list[Any]:
        made = {
            "rows": mlx_cache.KVCache,
            "window": lambda: mlx_cache.RotatingKVCache(max_size=self.window),
            "state": lambda: mlx_cache.ArraysCache(1),
        }
        return [made[k]() for k in self.kinds]

    def __call__(self, ids: Any, cache: list[Any]) -> Any:
        return self.through(mix(ids.astype(mx.uint32) + 1), cache)

    def through(self, h: Any, cache: list[Any]) -> Any:
        """Logits [rows, n, vocab] from the hashes [rows, n] that stand for embeddings."""
        for number, (kind, layer) in enumerate(zip(self.kinds, cache, strict=True)):
            out = self._state(h, layer) if kind == "state" else self._attend(h, layer, kind, number)
            h = mix(h * 3 + out + number)
        scores = mix(h[..., None] + mx.arange(VOCAB, dtype=mx.uint32) * 2654435761)
        return (scores >> 12).astype(mx.float32) / 2**17

    def _attend(self, h: Any, layer: Any, kind: str, number: int) -> Any:
        n = h.shape[1]
        mask = layer.make_mask(n, window_size=self.window if kind == "window" else None, return_array=False)
        offset = layer.offset
        if isinstance(offset, mx.array) and offset.ndim == 2:  # of every token
            places = offset
        else:
            places = (offset[:, None] if isinstance(offset, mx.array) else offset) + mx.arange(n)
        keys = mix(h + places.astype(mx.uint32) * 7919 + number)
        keys, values = layer.update_and_fetch(keys[:, None, :, None], (keys * 5)[:, None, :, None])
        seen = mix(keys[:, 0, :, 0] ^ mix(values[:, 0, :, 0]))[:, None, :]
        visible = _visible(mask, n, seen.shape[-1])
        return mx.sum(mx.where(visible, seen, mx.array(0, mx.uint32)), axis=-1).astype(mx.uint32)

    def _state(self, h: Any, layer: Any) -> Any:
        rows, n = h.shape
        mask = layer.make_mask(n)
        state = layer[0] if layer[0] is not None else mx.zeros((rows,), mx.uint32)
        out = []
        for i in range(n):
            new = mix(state * 31 + h[:, i])
            state = new if mask is None else mx.where(mask[:, i], new, state)
            out.append(state)
        layer[0] = state
        layer.advance(n)
        return mx.stack(out, axis=1)


def _visible(mask: Any, n: int, total: int) -> Any:
    """The mask as bool, broadcastable to [rows, n, total]."""
    if mask is None:
        return mx.ones((1, 1, total), mx.bool_)
    if isinstance(mask, str):
        return (mx.arange(total)[None] <= mx.arange(total - n, total)[:, None])[None]
    return mask[:, 0] if mask.ndim == 4 else mask[None]


def slow_twin(model: Any, request: Request, context: int) -> list[int]:
    """The plain loop: one sequence, mlx-lm's own caches, one token at a time, no look-ahead. The specification."""
    cache = mlx_cache.make_prompt_cache(model)
    sampler = Sampler(VOCAB if isinstance(model, HashModel) else model.args.vocab_size)
    sampler.join(request.sampling, request.prompt, np.empty(0, np.int64))
    room = context - len(request.prompt)
    if request.max_tokens is not None:
        room = min(room, request.max_tokens)
    made: list[int] = []
    ids = request.prompt.tolist()
    while len(made) < room:
        logits = model(mx.array([ids]), cache=cache)[:, -1]
        token = int(sampler.draw(logits, [len(request.prompt) + len(made)]).tokens.item())
        if token in request.stop_ids:
            break
        made.append(token)
        ids = [token]
    return made
