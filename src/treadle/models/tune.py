"""What is changed in a loaded model for a backend, from measured facts; text and logits stay the same."""

from __future__ import annotations

from typing import Any

from treadle.models.fuse import fuse_projections
from treadle.models.linear import flatten_rows
from treadle.runtime import Backend


def tune(model: Any, backend: Backend) -> None:
    """Change `model` in place. Projections are stacked on CUDA alone, where launching them is what they cost."""
    if backend == "cuda":
        fuse_projections(model)
    flatten_rows(model, pad=backend == "cuda")
