"""What may be taken for rounding where the same tokens went two ways through a model. One rule for all self-checks."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray


def tolerance(dtype: Any) -> float:
    """The most that logits may differ by, as a share of their spread: 1 % in float32, 8 % in smaller types."""
    return 0.01 if dtype == mx.float32 else 0.08


def distance(expected: NDArray[np.float32], found: NDArray[np.float32]) -> float:
    """The largest difference of logits of one shape, as a share of the standard deviation of those expected."""
    return float(np.abs(expected - found).max() / (expected.std() + 1e-9))
