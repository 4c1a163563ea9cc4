"""What may be taken for rounding where the same tokens went two ways through a model. One rule for all self-checks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.runtime import mlx_lm_module

READ = tuple(range(3, 13))  # ids that show how much a model's logits differ from themselves
PIECES = (3, 1)  # tokens at a time
TIMES = 2.0  # what they differ by then, and two other ways may too
MOST = 0.25  # whatever they differ by: rows that are mixed up differ by more


def tolerance(dtype: Any) -> float:
    """The most that logits may differ by, as a share of their spread: 1 % in float32, 8 % in smaller types."""
    return 0.01 if dtype == mx.float32 else 0.08


def distance(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """The largest difference of logits of one shape, as a share of the standard deviation of those expected."""
    return float(np.abs(expected - found).max() / (expected.std() + 1e-9))


def within(off: float, dtype: Any, model: Any) -> bool:
    """Whether logits of `model` may differ by `off`, a `distance`.

    Many layers add up more rounding than `tolerance` allows, above all behind weights of 4 bits: a model may also
    differ by what the model file's own caches give when they read the same tokens in other pieces. False for NaN.
    """
    return off <= tolerance(dtype) or (off <= MOST and off <= TIMES * own_distance(model))


def own_distance(model: Any) -> float:
    """How far the logits of a model, as its file computes them, lie from themselves for another number of tokens."""
    found = []
    for n in PIECES:
        caches = mlx_lm_module("models.cache").make_prompt_cache(model)
        logits = [model(mx.array([READ[i : i + n]]), cache=caches)[0, -1:] for i in range(0, len(READ) - 1, n)]
        logits.append(model(mx.array([READ[-1:]]), cache=caches)[0])
        found.append(np.array(mx.concatenate(logits[-2:]).astype(mx.float32)))
    return distance(*found)
