"""How near a measurement comes to what the device could do: bytes that must be read, products that must be made.

A step cannot be shorter than reading its weights and rows once takes, nor than its products take (the roofline model:
Williams, Waterman and Patterson, 2009). Both speeds are measured in the same process, by a copy and by one large
product. A copy also writes, so reading alone may come out above 1 by some percent.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from treadle.bench.shapes import Subject
from treadle.runtime import device_facts, mlx_lm_module
from treadle.types import Footprint

ROUNDS = 5
COPIED = {"cpu": 2**28, "cuda": 2**30, "metal": 2**30}  # bytes read by a copy: launching one must not count
SIDE = {"cpu": 1024, "cuda": 8192, "metal": 4096}  # of the square matrices


@dataclass(frozen=True, slots=True)
class Roofline:
    """What the device was measured to do."""

    copy_gb_s: float  # read and written
    tflops: float  # float32 products on a CPU, elsewhere bfloat16

    def share(self, seconds: float, num_bytes: float | None, flops: float = 0.0) -> float | None:
        """The least time for so much work, as a share of `seconds`; None where the bytes are not known."""
        if num_bytes is None:
            return None
        return max(num_bytes / (1e9 * self.copy_gb_s), flops / (1e12 * self.tflops)) / seconds

    @property
    def facts(self) -> dict[str, float]:
        return {"copy_gb_s": self.copy_gb_s, "tflops": self.tflops}


@dataclass(frozen=True, slots=True)
class Work:
    """What one step of a model has to read and compute."""

    weight_bytes: int | None  # of the weights that every step reads; None for mixtures of experts
    trunk_flops: float  # per token
    head_flops: float  # and per token whose logits are wanted
    footprint: Footprint

    @classmethod
    def of(cls, subject: Subject, plain: Any) -> Work:
        """`plain`: the same model as mlx-lm makes it, from which the products are counted."""
        tied = "lm_head" not in subject.model
        total = int(mlx_lm_module("utils").get_total_parameters(plain))
        table = sum(subject.caps.vocab_size * _width(module) for module in _embeddings(plain))
        looked_up = 0 if tied else sum(_num_bytes(module) for module in _embeddings(subject.model))
        weight_bytes = None if _has_experts(plain) else subject.weight_bytes - looked_up
        trunk = total - table * (1 if tied else 2)
        return cls(weight_bytes, 2.0 * trunk, 2.0 * table, subject.caps.footprint)

    def step_bytes(self, lengths: Iterable[float]) -> float | None:
        """Of a step over rows that hold so many tokens each."""
        if self.weight_bytes is None:
            return None
        return self.weight_bytes + sum(self.footprint.rows(round(length)) for length in lengths)

    def step_flops(self, num_tokens: float, num_logits: float) -> float:
        return num_tokens * self.trunk_flops + num_logits * self.head_flops


@cache
def measured() -> Roofline:
    """Of this process's device, once: best of some rounds each."""
    backend = device_facts().backend
    copy = _cpu_copy if backend == "cpu" else _copy
    return Roofline(copy(COPIED[backend]), _products(backend))


def _copy(num_bytes: int) -> float:
    a = mx.zeros((num_bytes // 4,), mx.float32)
    mx.eval(a)
    return 2 * num_bytes / _best(lambda: mx.eval(a + 1)) / 1e9


def _cpu_copy(num_bytes: int) -> float:
    """By as many threads as there are cores: MLX copies with one."""
    threads = os.cpu_count() or 1
    parts = [(np.ones(num_bytes // 8 // threads), np.zeros(num_bytes // 8 // threads)) for _ in range(threads)]
    with ThreadPoolExecutor(threads) as pool:
        return 2 * num_bytes / _best(lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts))) / 1e9


def _products(backend: str) -> float:
    side = SIDE[backend]
    a = mx.random.normal((side, side)).astype(mx.float32 if backend == "cpu" else mx.bfloat16)
    mx.eval(a)
    return 2 * side**3 / _best(lambda: mx.eval(a @ a)) / 1e12


def _best(call: Callable[[], object]) -> float:
    times = []
    call()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)


def _embeddings(model: Any) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, nn.Embedding | nn.QuantizedEmbedding)]


def _width(embedding: Any) -> int:
    """Numbers per token, packed ones counted one by one."""
    packed = 32 // embedding.bits if isinstance(embedding, nn.QuantizedEmbedding) else 1
    return int(embedding.weight.shape[1]) * packed


def _num_bytes(module: Any) -> int:
    return sum(a.nbytes for _, a in tree_flatten(module.parameters()))


def _has_experts(model: Any) -> bool:
    """Whether some weights are stacks of matrices, of which a token takes a few."""
    return any(a.ndim == 3 and name.endswith(".weight") and "conv" not in name for name, a in _flat(model))


def _flat(model: Any) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = tree_flatten(model.parameters())
    return found
