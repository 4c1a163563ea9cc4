"""Computing a chunk of a prompt. Engine thread only."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from treadle.cache.layers import Layers
from treadle.engine.memory import Ledger
from treadle.engine.sampling import score
from treadle.engine.sequence import Sequence
from treadle.types import TokenLogprob

KEPT_SHARE = 1 / 32  # of the memory limit that may stay in freed buffers between chunks


def compute(
    model: Any, sequence: Sequence, layers: Layers, n: int, ledger: Ledger, seen: dict[str, Any]
) -> tuple[TokenLogprob, ...]:
    """Compute the rows of the next `n` tokens; `seen` is what the model is told of the pictures among them.

    Logits are made only to score the tokens behind them, if the request asked. The ledger learns what it took.
    """
    ids = sequence.tokens[sequence.computed : sequence.computed + n].astype(np.int32)
    others = mx.get_active_memory() - layers.nbytes
    mx.reset_peak_memory()
    layers.begin([n])
    logits = model(mx.array(ids)[None], cache=layers.caches, **seen)[0]
    layers.end()
    following = sequence.tokens[sequence.computed + 1 : min(sequence.computed + n + 1, sequence.num_prompt)]
    scored = score(logits, following, sequence.request.sampling) if sequence.request.prompt_logprobs else ()
    mx.eval(layers.arrays())
    sequence.computed += n
    ledger.observe(n, sequence.computed, mx.get_peak_memory() - others - layers.nbytes)
    if mx.get_cache_memory() > ledger.limit * KEPT_SHARE:
        mx.clear_cache()  # giving buffers back costs time, above all on CUDA, so a few are kept
    return scored
