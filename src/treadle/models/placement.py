"""In which form weights are held: packed as they come, or dense. Decided here alone. No MLX."""

from __future__ import annotations

from typing import Literal

from treadle.native import build
from treadle.runtime import Backend

WeightForm = Literal["auto", "packed", "dense"]

DENSE_SHARE = 0.25  # of the free memory that dense weights may take by themselves
FLOAT32_BYTES = 4


def hold_dense(form: WeightForm, backend: Backend, num_parameters: int, free_bytes: int) -> bool:
    """Whether quantised weights are expanded when a model is loaded.

    GPUs compute on packed weights, and so do our kernels on a CPU. Without those, dense float32 through a fast BLAS
    beats MLX's packed operations there by far in prefill and also in decoding, at up to eight times the memory; so
    `auto` takes it while it is small. The first question on a CPU may compile the kernels.
    """
    return widen(form, backend, num_parameters, free_bytes) and (form == "dense" or build.kernels() is None)


def widen(form: WeightForm, backend: Backend, num_parameters: int, free_bytes: int) -> bool:
    """Whether weights that are not packed become float32 when a model is loaded: on a CPU, while they are small."""
    if form != "auto":
        return form == "dense"
    return backend == "cpu" and num_parameters * FLOAT32_BYTES <= DENSE_SHARE * free_bytes
