"""Rotary positions that are data of the step: each token of a step may stand anywhere. Engine thread only.

Model files hand `cache.offset` to their rotary embedding, which counts on from there. Once `let_gaps_in` has changed a
model, an offset may also be int32 [rows, n], the position of every token; our layers give one where a step has gaps.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from treadle.models.capabilities import evaluated, fault_of, new_layers
from treadle.types import EXACT, Caps, LayerKind

PLACES = (0, 1, 2, 5, 6, 9, 10, 17)  # of the tokens of the trial
PLACED = "Placed"


def let_gaps_in(model: nn.Module) -> None:
    """Let every rotary embedding of `model` take positions for its offset. Parameters and names stay as they are."""
    for module in model.modules():
        kind: Any = type(module)
        name = kind.__name__.lower()
        if kind.__name__.startswith(PLACED) or not ("rope" in name or "rotary" in name):
            continue
        if "offset" in inspect.signature(kind.__call__).parameters:
            module.__class__ = _placed(kind)


@lru_cache(maxsize=16)
def _placed(kind: Any) -> Any:
    def call(self: Any, x: Any, offset: Any = 0, *rest: Any, **others: Any) -> Any:
        if not isinstance(offset, mx.array) or offset.ndim < 2:
            return kind.__call__(self, x, offset, *rest, **others)
        # Tokens become rows of one token each, because rows may have offsets of their own.
        rows, heads, n, dim = x.shape
        lines = x.swapaxes(1, 2).reshape(rows * n, heads, 1, dim)
        lines = kind.__call__(self, lines, offset.reshape(-1), *rest, **others)
        return lines.reshape(rows, n, heads, dim).swapaxes(1, 2)

    return type(PLACED + kind.__name__, (kind,), {"__call__": call})


def gaps_fault(model: Any, caps: Caps) -> str | None:
    """Why prompts with gaps cannot be computed, found by trying one both in one step and run by run; None: they can."""
    if any(kind is not LayerKind.ROWS for kind in caps.layers):
        kinds = sorted({kind.value for kind in caps.layers if kind is not LayerKind.ROWS})
        return f"it has {' and '.join(kinds)} layers, which need every token"
    ids = np.random.default_rng(7).integers(0, caps.vocab_size, len(PLACES)).tolist()
    try:
        reference, found = _by_runs(model, caps, ids), _at_once(model, caps, ids)
    except Exception as error:  # of a third party's model code
        return f"its positions cannot have gaps ({type(error).__name__}: {error})"
    fault = fault_of(model, [evaluated(reference)], [evaluated(found)])
    return None if fault is None else f"its positions cannot have gaps ({fault})"


def _by_runs(model: Any, caps: Caps, ids: list[int]) -> Any:
    """Each run of tokens without a gap in a step of its own; logits [n, vocab]."""
    layers = new_layers(model, caps, EXACT)
    gaps = [place - index for index, place in enumerate(PLACES)]
    found = []
    for gap in sorted(set(gaps)):
        run = [id for id, own in zip(ids, gaps, strict=True) if own == gap]
        layers.begin([len(run)], [gap])
        found.append(model(mx.array([run]), cache=layers.caches)[0])
        layers.end()
    return mx.concatenate(found)


def _at_once(model: Any, caps: Caps, ids: list[int]) -> Any:
    layers = new_layers(model, caps, EXACT)
    layers.begin([len(ids)], places=mx.array([PLACES], mx.int32))
    logits = model(mx.array([ids]), cache=layers.caches)[0]
    layers.end()
    return logits
