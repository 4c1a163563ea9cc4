"""Quantised linear layers that see a batch of single tokens as one matrix. Engine thread only.

A decode step hands [rows, 1, inputs] to every layer. MLX's quantised product treats the leading axis as a batch and
reads the weights once per row; the same rows as one [rows, inputs] matrix read them once. Measured on an H100, 4096 ->
12288 at 4 bits: 2..7 rows cost more than 8, so there they are padded to 8; above 64 rows the ordinary path is kept.

From `UNPACK_FROM` rows on (a chunk of a prompt) weights are unpacked for the product there. Measured on an H100 on
2026-11-28 at 4 bits, packed / unpacked in ms: 4096 -> 6144, 16 rows 0.039 / 0.119, 512 rows 0.262 / 0.157, 2,048 rows
0.869 / 0.309; 4096 -> 24576, 512 rows 0.861 / 0.409, 2,048 rows 3.25 / 0.787.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from treadle.models.gemv import knows, row_product

MOST_ROWS = 64
PAD_TO = 8
UNPACK_FROM = 200  # rows
MOST_UNPACKED = 2**27  # weights at once: 256 MB in bfloat16


class FlatQuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """`nn.QuantizedLinear` over flattened rows; `pad` rounds 2..7 rows up to 8 and unpacks the weights for many."""

    pad = False
    lean = False  # whether one row has a faster product

    def __call__(self, x: Any) -> Any:
        if self.lean and x.size == x.shape[-1]:
            return row_product(self, x)
        if self.pad and x.size // x.shape[-1] >= UNPACK_FROM and x.shape[-1] * self.weight.shape[0] <= MOST_UNPACKED:
            return self._unpacked(x)
        return _flattened(super().__call__, x, self.pad)

    def _unpacked(self, x: Any) -> Any:
        weight = mx.dequantize(
            self.weight,
            self.scales,
            self.get("biases"),
            group_size=self.group_size,
            bits=self.bits,
            mode=self.mode,
            dtype=x.dtype,
        )
        return mx.addmm(self.bias, x, weight.T) if "bias" in self else x @ weight.T


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """The same for an embedding that is the output layer too."""

    pad = False
    lean = False

    def as_linear(self, x: Any) -> Any:
        if self.lean and x.size == x.shape[-1]:
            return row_product(self, x)
        return _flattened(super().as_linear, x, self.pad)


def _flattened(product: Callable[[Any], Any], x: Any, pad: bool) -> Any:
    if x.ndim != 3 or x.shape[1] != 1 or not 1 < x.shape[0] <= MOST_ROWS:
        return product(x)
    rows = x.shape[0]
    flat = x.reshape(rows, -1)
    if pad and rows < PAD_TO:
        flat = mx.pad(flat, [(0, PAD_TO - rows), (0, 0)])
    out = product(flat)
    return (out[:rows] if pad and rows < PAD_TO else out).reshape(rows, 1, -1)


FLAT: dict[type, Any] = {nn.QuantizedLinear: FlatQuantizedLinear, nn.QuantizedEmbedding: FlatQuantizedEmbedding}


def flatten_rows(model: Any, pad: bool) -> int:
    """Replace the quantised layers of `model` in place; weights are shared. Returns how many there were."""
    count = 0

    def swap(module: Any) -> Any:
        nonlocal count
        flat = FLAT.get(type(module))
        if flat is None:
            return module
        count += 1
        new: Any = flat.__new__(flat)
        dict.update(new, module)
        new.__dict__.update(module.__dict__)
        new.pad = pad
        new.lean = knows(new)
        return new

    model.update_modules(tree_map(swap, model.leaf_modules(), is_leaf=nn.Module.is_module))
    return count
