"""Quantised linear layers that see a batch of single tokens as one matrix. Engine thread only.

A decode step hands [rows, 1, inputs] to every layer. MLX's quantised product treats the leading axis as a batch and
reads the weights once per row; the same rows as one [rows, inputs] matrix read them once, from 8 rows on on CUDA.

On CUDA, few rows have kernels of ours (`products.py`) where they know the layer, and for more of them (a chunk of a
prompt) weights are unpacked. Of a layer that is packed in another way, 2..7 rows cost more than 8 and are padded, and
weights are unpacked from `UNPACK_FROM` rows on. Measured on an H100 on 2026-11-28 at 4 bits, packed / unpacked in ms:
4096 -> 6144, 16 rows 0.039 / 0.119, 512 rows 0.262 / 0.157, 2,048 rows 0.869 / 0.309; 4096 -> 24576, 512 rows 0.861 /
0.409, 2,048 rows 3.25 / 0.787.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from treadle.models.products import most_rows, product, takes

MOST_FLAT = 64  # rows
PAD_TO = 8
UNPACK_FROM = 200  # rows
MOST_UNPACKED = 2**27  # weights at once: 256 MB in bfloat16


class FlatQuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """`nn.QuantizedLinear` over flattened rows; `pad`: 2..7 without a kernel are 8, and many meet unpacked weights."""

    pad = False
    most = 0  # rows that have a faster product

    def __call__(self, x: Any) -> Any:
        return _of_rows(self, super().__call__, x)


class FlatQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """The same for an embedding that is the output layer too."""

    pad = False
    most = 0

    def as_linear(self, x: Any) -> Any:
        return _of_rows(self, super().as_linear, x)


def _of_rows(layer: Any, plain: Callable[[Any], Any], x: Any) -> Any:
    if layer.most and takes(layer, x, layer.most):
        return product(layer, x)
    rows = x.size // x.shape[-1]
    many = layer.most + 1 if layer.most else UNPACK_FROM
    if layer.pad and rows >= many and x.shape[-1] * layer.weight.shape[0] <= MOST_UNPACKED:
        return _unpacked(layer, x)
    if not 1 < rows <= MOST_FLAT or (x.ndim == 3 and x.shape[1] > 1):
        return plain(x)
    flat = x.reshape(rows, -1)
    if not layer.pad or rows >= PAD_TO:
        return plain(flat).reshape(*x.shape[:-1], -1)
    return plain(mx.pad(flat, [(0, PAD_TO - rows), (0, 0)]))[:rows].reshape(*x.shape[:-1], -1)


def _unpacked(layer: Any, x: Any) -> Any:
    settings = {key: getattr(layer, key) for key in ("group_size", "bits", "mode")}
    weight = mx.dequantize(layer.weight, layer.scales, layer.get("biases"), dtype=x.dtype, **settings)
    return mx.addmm(layer.bias, x, weight.T) if "bias" in layer else x @ weight.T


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
        new.most = most_rows(new)
        new.pad = pad
        return new

    model.update_modules(tree_map(swap, model.leaf_modules(), is_leaf=nn.Module.is_module))
    return count
