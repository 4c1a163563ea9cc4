"""A shadow: the tokens of a sequence with the layers of a smaller model. Engine thread only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from treadle.cache.layers import Layers
from treadle.engine.reuse import Reuse
from treadle.engine.sequence import Sequence
from treadle.speculate.draft_model import DraftModel


def read_on(
    shadow: Sequence, num_tokens: int, small: DraftModel[Any], reuse: Reuse, new_layers: Callable[[], Layers]
) -> int:
    """Compute up to so many of its tokens but the last, with the smaller model's own prefixes; how many it were."""
    if shadow.layers is None:
        reuse.acquire(shadow, new_layers)
    assert shadow.layers is not None
    n = reuse.up_to_checkpoint(shadow, max(0, min(num_tokens, shadow.pending - 1)))
    if n:
        small.prefill(shadow.layers, shadow.tokens[shadow.computed : shadow.computed + n])
        shadow.computed += n
        reuse.publish(shadow)
    return n
