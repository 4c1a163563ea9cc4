"""Letting model files read packed rows without unpacking them, where `cache/attend.py` does so faster (CPUs).

`install` exchanges the attention function in the modules of a model's files, once. Caches that are not packed get what
they got before, so it does not matter what else was exchanged there earlier.
"""

from __future__ import annotations

import sys
from typing import Any

import mlx.nn as nn

from treadle.cache.attend import attention_over

NAME = "scaled_dot_product_attention"
_ours: set[int] = set()  # by identity: functions that were made here


def install(model: nn.Module) -> int:
    """Exchange attention in the modules that define the layers of `model`; returns in how many."""
    count = 0
    for name in {type(module).__module__ for module in model.modules()}:
        present: Any = vars(sys.modules[name]).get(NAME)
        if present is not None and id(present) not in _ours:
            made = attention_over(present)
            _ours.add(id(made))
            setattr(sys.modules[name], NAME, made)
            count += 1
    return count
