"""What the CUDA sources of a layer's kernels compute, compiled as C++."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.models.cuda_host import COMPILER, compiled
from treadle.models import kernels
from treadle.models.blocks import turn_of
from treadle.models.kernels import KERNELS, ROUNDING, SOURCES, Heads, Kernels, difference
from treadle.runtime import mlx_lm_module

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def heads_of(number: int, shared: int, dim: int, rope: Any, dtype: Any) -> Heads:
    """With norms where there are more heads for queries than for keys."""
    weights = [1 + 0.1 * mx.random.normal((dim,), key=mx.random.key(i)) for i in (1, 2)]
    norms = [w.astype(dtype) for w in weights] if number > shared else [None, None]
    return Heads(number, shared, dim, rope, turn_of(rope), norms[0], norms[1], 1e-6)


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["whole", "freqs", "traditional"])
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_computes_what_mlx_does(
    name: str, case: str, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes that fill a warp and that do not; heads of which all or a part is turned."""
    ropes = mlx_lm_module("models.rope_utils")
    heads, size, width = {
        "whole": (heads_of(4, 2, 16, nn.RoPE(16, base=1e6), dtype), 96, 40),
        "freqs": (heads_of(2, 2, 64, ropes.initialize_rope(64, 5e5, False, LLAMA3, 131072), dtype), 100, 24),
        "traditional": (heads_of(3, 1, 40, nn.RoPE(20, traditional=True, scale=0.5), dtype), 64, 300),
    }[case]
    monkeypatch.setattr(kernels, "_compiled_heads", lambda settings: partial(kernels._heads, settings))
    monkeypatch.setattr(kernels, "_kernel", lambda kernel: compiled(*SOURCES[kernel], tmp_path))
    assert difference(name, Kernels((name,)), heads, size, width, dtype) <= ROUNDING[dtype]
