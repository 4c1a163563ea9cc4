"""Which tokens of a prompt matter, by the attention of a small model. Engine thread only.

The small model has read the prompt; then it goes on for a few tokens of its own. How strongly these look back at each
token of the prompt is its importance: the largest weight over all heads and layers, averaged over the steps (the method
of Speculative Prefill, arXiv 2502.02789).

Attention functions do not return weights, so they are computed once more from the queries and keys that the layers hand
to `scaled_dot_product_attention`, positions and norms included. `let_watch` lets the modules of a model's files tell
them, once, at load; they do so only inside `watched`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from inspect import unwrap
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from treadle.cache.layers import Layers

NAME = "scaled_dot_product_attention"
STEPS = 4  # tokens that the small model makes to look back from

Asked = tuple[Any, Any, float, Any]  # queries [1, heads, 1, dim], keys [1, key heads, columns, dim], scale, mask
_asked: list[Asked] | None = None
_made: set[Any] = set()  # functions that tell


def let_watch(model: nn.Module) -> int:
    """Let the attention of `model` be watched; returns in how many modules. Those that are already are left alone."""
    files = {type(module).__module__ for module in model.modules()}
    found = [vars(sys.modules[name]) for name in files if NAME in vars(sys.modules[name])]
    for file in found:
        if unwrap(file[NAME], stop=_made.__contains__) not in _made:  # others may have wrapped it
            file[NAME] = _telling(file[NAME])
            _made.add(file[NAME])
    return len(found)


def _telling(attend: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(attend)
    def watching(queries: Any, keys: Any, values: Any, *rest: Any, **others: Any) -> Any:
        if _asked is not None:
            given = dict(zip(("cache", "scale", "mask"), rest, strict=False)) | others
            _asked.append((queries, keys, given["scale"], given.get("mask")))
        return attend(queries, keys, values, *rest, **others)

    return watching


@contextmanager
def watched() -> Iterator[list[Asked]]:
    """The list of what the layers of the steps inside ask, in their order."""
    global _asked
    found: list[Asked] = []
    _asked = found
    try:
        yield found
    finally:
        _asked = None


def importance(model: Any, layers: Layers, token: int) -> NDArray[np.float32]:
    """Scores of all tokens of a prompt, float32 [n]; the last of them, `token`, has no rows in `layers` yet.

    `layers` hold the one sequence exactly, and hold `STEPS` tokens more afterwards. Layers that see a window only are
    left out. Raises ValueError when no layer sees the whole prompt.
    """
    n = layers.lengths[0] + 1
    ids = mx.array([[token]], mx.int32)
    total = mx.zeros((n,), mx.float32)
    for step in range(STEPS):
        layers.begin([1])
        with watched() as asked:
            logits = model(ids, cache=layers.caches)
        layers.end()
        most = [_weights(*one, n) for one in asked if one[1].shape[2] == n + step]
        if not most:
            raise ValueError("no layer of the small model tells what it looks at")
        total = total + mx.stack(most).max(axis=0)
        ids = mx.argmax(logits[:, -1:], axis=-1).astype(mx.int32)
        mx.async_eval(total, ids)  # type: ignore[no-untyped-call]
    return np.array(total / STEPS)


def untold(model: Any, layers: Layers) -> str | None:
    """Why a model does not tell what it looks at, found by asking it about two tokens; None: it does."""
    layers.begin([1])
    model(mx.zeros((1, 1), mx.int32), cache=layers.caches)
    layers.end()
    try:
        importance(model, layers, 0)
    except Exception as error:  # of a third party's model code
        return str(error)
    return None


def _weights(queries: Any, keys: Any, scale: float, mask: Any, num_tokens: int) -> Any:
    """The largest weight of each of the first `num_tokens` tokens over all heads, float32 [num_tokens].

    A mask of numbers is a part of the scores (latent attention keeps positions there).
    """
    _, heads, _, dim = queries.shape
    shared = keys.shape[1]
    grouped = (queries * scale).reshape(1, shared, heads // shared, dim)
    scores = (grouped @ keys.swapaxes(-1, -2)).astype(mx.float32).reshape(1, heads, 1, -1)
    if isinstance(mask, mx.array):
        scores = mx.where(mask, scores, -mx.inf) if mask.dtype == mx.bool_ else scores + mask
    return mx.softmax(scores, axis=-1)[0, :, 0].max(axis=0)[:num_tokens]
