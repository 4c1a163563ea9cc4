"""A model without its output layer, which is what makes embeddings. Engine thread only."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from treadle.models.capabilities import new_layers
from treadle.types import Caps, Embedding

IDS = (3, 1, 4, 1, 5, 9, 2, 6)
BEST = 4  # likeliest tokens whose order the states must explain


def trunk_of(model: Any) -> Any:
    """What gives the states after the last norm, [rows, n, size], for the ids and caches that `model` takes."""
    return model.model


def checked(model: Any, caps: Caps, found: Embedding) -> Embedding:
    """`found` with the size of an embedding, or with the sentence why none can be made: found by trying.

    The output layer, applied to the trunk's states, must prefer the tokens that the model prefers. So states before
    the last norm, or of another kind, are not taken for what they are not.
    """
    if found.pooling is None:
        return found
    try:
        states, best, explained = _tried(model, caps)
    except Exception as error:  # a model file of another build; what it raises is the finding
        return replace(found, pooling=None, why=f"its states cannot be had ({type(error).__name__}: {error})")
    if best != explained:
        return replace(found, pooling=None, why="its output layer is not all that follows its last states")
    return replace(found, size=int(states.shape[-1]))


def _tried(model: Any, caps: Caps) -> tuple[Any, list[list[int]], list[list[int]]]:
    """The trunk's states, and the order of the best tokens by the model and by its output layer on these states."""
    ids = mx.array([[id % caps.vocab_size for id in IDS]])
    states, logits = (_run(part, model, caps, ids) for part in (trunk_of(model), model))
    tied = "lm_head" not in model
    again = trunk_of(model).embed_tokens.as_linear(states) if tied else model.lm_head(states)
    return states, _best(logits), _best(again)


def _run(part: Any, model: Any, caps: Caps, ids: Any) -> Any:
    layers = new_layers(model, caps)
    layers.begin([ids.shape[1]])
    made = part(ids, cache=layers.caches)
    layers.end()
    return made


def _best(logits: Any) -> list[list[int]]:
    values = np.array(logits[0].astype(mx.float32))
    return [np.argsort(-row, kind="stable")[:BEST].tolist() for row in values]
