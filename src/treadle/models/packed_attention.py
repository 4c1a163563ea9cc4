"""Letting model files read packed rows without unpacking them, where `cache/attend.py` does so faster (CPUs).

`install` exchanges the attention function in the modules of a model's files, once. Caches that are not packed get what
they got before, so it does not matter what else was exchanged there earlier.
"""

from __future__ import annotations

import sys
from functools import wraps
from inspect import unwrap
from typing import Any

import mlx.nn as nn

from treadle.cache.attend import attention_over

NAME = "scaled_dot_product_attention"
_made: set[Any] = set()  # functions that were made here


def install(model: nn.Module) -> int:
    """Exchange attention in the modules that define the layers of `model`; returns in how many."""
    count = 0
    for name in {type(module).__module__ for module in model.modules()}:
        present: Any = vars(sys.modules[name]).get(NAME)
        if present is not None and unwrap(present, stop=_made.__contains__) not in _made:  # others may have wrapped it
            made = wraps(present)(attention_over(present))
            _made.add(made)
            setattr(sys.modules[name], NAME, made)
            count += 1
    return count
