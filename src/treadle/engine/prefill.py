"""Computing a chunk of a prompt. Engine thread only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from treadle.cache.layers import Layers
from treadle.engine.memory import Ledger
from treadle.engine.sampling import score
from treadle.engine.sequence import Sequence
from treadle.models.trunk import trunk_of
from treadle.types import Pooling, TokenLogprob, Vector

CHUNKS = {"cpu": 512, "cuda": 4096, "metal": 2048}  # tokens; on CUDA, see `models/attention.py`, each size costs a plan
KEPT_SHARE = 1 / 32  # of the memory limit that may stay in freed buffers between chunks


def usual_chunk() -> int:
    """Most tokens of a prompt in one step on this device, where the configuration does not say."""
    return CHUNKS["metal" if mx.metal.is_available() else "cuda" if mx.cuda.is_available() else "cpu"]


def compute(
    model: Any, sequence: Sequence, layers: Layers, n: int, ledger: Ledger, seen: dict[str, Any]
) -> tuple[TokenLogprob, ...]:
    """Compute the rows of the next `n` tokens; `seen` is what the model is told of the pictures among them.

    Logits are made only to score the tokens behind them, if the request asked; for an embedding the states before
    them are pooled. The ledger learns what it took.
    """
    if sequence.request.pooling is not None:
        model = trunk_of(model)
    ids = sequence.tokens[sequence.computed : sequence.computed + n].astype(np.int32)
    others = mx.get_active_memory() - layers.nbytes
    mx.reset_peak_memory()
    gap, places = sequence.stand(n)
    layers.begin([n], [gap], places)
    made = model(mx.array(ids)[None], cache=layers.caches, **seen)[0]
    layers.end()
    following = sequence.tokens[sequence.computed + 1 : min(sequence.computed + n + 1, sequence.num_prompt)]
    scored = score(made, following, sequence.request.sampling) if sequence.request.prompt_logprobs else ()
    if sequence.request.pooling is not None:
        sequence.pooled = pool(sequence.request.pooling, sequence.pooled, made)
        mx.eval(sequence.pooled)
    mx.eval(layers.arrays())
    sequence.computed += n
    ledger.observe(n, sequence.computed, mx.get_peak_memory() - others - layers.nbytes)
    if mx.get_cache_memory() > ledger.limit * KEPT_SHARE:
        mx.clear_cache()  # giving buffers back costs time, above all on CUDA, so a few are kept
    return scored


def pool(pooling: Pooling, before: Any, states: Any) -> Any:
    """What was pooled `before` (None: nothing), and these states [n, size] of the next tokens: float32 [size]."""
    if pooling is Pooling.LAST:
        return states[-1].astype(mx.float32)
    total = states.astype(mx.float32).sum(axis=0)
    return total if before is None else before + total


def embedding(sequence: Sequence) -> Vector:
    """The pooled states of a whole prompt at length 1: a mean has the direction of the sum.

    Raises ArithmeticError where there is no such thing.
    """
    vector = np.array(sequence.pooled)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    if not 0 < length < np.inf:
        raise ArithmeticError("the states of the text have no direction")
    return (vector / length).astype(np.float32)
