"""In which form weights are held: packed as they come, or dense. Decided here alone. No MLX."""

from __future__ import annotations

from typing import Literal

from treadle.runtime import Backend

WeightForm = Literal["auto", "packed", "dense"]

DENSE_SHARE = 0.25  # of the free memory that dense weights may take by themselves
FLOAT32_BYTES = 4


def hold_dense(form: WeightForm, backend: Backend, num_parameters: int, free_bytes: int) -> bool:
    """Whether quantised weights are expanded when a model is loaded.

    On a CPU dense float32 through a fast BLAS beats MLX's packed kernels by far in prefill and also in
    decoding, at up to eight times the memory; so `auto` takes it there while it is small. GPUs compute on
    packed weights.
    """
    if form != "auto":
        return form == "dense"
    return backend == "cpu" and num_parameters * FLOAT32_BYTES <= DENSE_SHARE * free_bytes
