"""The kernels in a loaded model: layers of known kinds get a class that calls them. CPU backend; engine thread only.

Weights stay as they are and where they are. A layer of another kind, or an input that a kernel is not written for
(another type than float32), is computed by MLX as before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from treadle.models.linear import FlatQuantizedEmbedding, FlatQuantizedLinear
from treadle.native import blocks, build

BITS = (4, 8)
WIDE = 8
NARROW = (2, 3, 5, 6)
QUANTISED = (nn.QuantizedLinear, nn.QuantizedEmbedding)
VALUES_AT_ONCE = 2**24
GROUP = 32  # groups are whole multiples of that
LANES = 8  # the size of a head is a multiple of that
FLOATS = (mx.float32, mx.float16, mx.bfloat16)
MASKS = (mx.bool_, mx.float32)
ATTENTION = "scaled_dot_product_attention"
GATE = "swiglu"
# Where model files have these functions from.
HOMES = {ATTENTION: ("mlx_lm.models.base", "mlx_vlm.models.base"), GATE: ("mlx_lm.models.activations",)}

kernels: Any = build.kernels()


class NativeLinear(nn.Linear):  # type: ignore[misc]
    """`nn.Linear` over float32 rows."""

    def __call__(self, x: Any) -> Any:
        if x.dtype != mx.float32:
            return super().__call__(x)
        return kernels.linear(x, self["weight"], self.get("bias"))


class NativeEmbedding(nn.Embedding):  # type: ignore[misc]
    """`nn.Embedding` that is the output layer too."""

    def as_linear(self, x: Any) -> Any:
        return kernels.linear(x, self["weight"]) if x.dtype == mx.float32 else super().as_linear(x)


class NativeQuantizedLinear(nn.QuantizedLinear):  # type: ignore[misc]
    """`nn.QuantizedLinear` over float32 rows."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) if x.dtype != mx.float32 else _product(self, x)


class NativeQuantizedEmbedding(nn.QuantizedEmbedding):  # type: ignore[misc]
    """`nn.QuantizedEmbedding` that is the output layer too."""

    def as_linear(self, x: Any) -> Any:
        return super().as_linear(x) if x.dtype != mx.float32 else _product(self, x)


class NativeRMSNorm(nn.RMSNorm):  # type: ignore[misc]
    """`nn.RMSNorm` over float32 rows."""

    def __call__(self, x: Any) -> Any:
        return super().__call__(x) if x.dtype != mx.float32 else kernels.rms_norm(x, self["weight"], self.eps)


class NativeRoPE(nn.RoPE):  # type: ignore[misc]
    """`nn.RoPE` over float32 heads, [rows, heads, length, dim]."""

    def __call__(self, x: Any, offset: Any = 0) -> Any:
        if x.dtype != mx.float32 or x.ndim != 4:
            return super().__call__(x, offset)
        first = offset if isinstance(offset, mx.array) else mx.array(offset, mx.int32)
        return kernels.rope(x, self.dims, self.traditional, self.base, self.scale, first)


def _product(layer: Any, x: Any) -> Any:
    weight, scales, biases = layer["weight"], layer["scales"], layer["biases"]
    return kernels.quantised_linear(x, weight, scales, biases, layer.group_size, layer.bits, layer.get("bias"))


def _plain(layer: Any) -> bool:
    return layer.weight.dtype in FLOATS and _exact_bias(layer)


def _packed(layer: Any) -> bool:
    if layer.mode != "affine" or layer.bits not in BITS or layer.group_size % GROUP:
        return False
    return layer.scales.dtype in FLOATS and layer.biases.dtype == layer.scales.dtype and _exact_bias(layer)


def _exact_bias(layer: Any) -> bool:
    return "bias" not in layer or layer.bias.dtype == mx.float32


def _norm(layer: Any) -> bool:
    return bool(layer.weight.dtype == mx.float32)


def _any(_layer: Any) -> bool:
    return True


CLASSES: dict[type, tuple[type, Callable[[Any], bool]]] = {
    nn.Linear: (NativeLinear, _plain),
    nn.Embedding: (NativeEmbedding, _plain),
    nn.QuantizedLinear: (NativeQuantizedLinear, _packed),
    FlatQuantizedLinear: (NativeQuantizedLinear, _packed),
    nn.QuantizedEmbedding: (NativeQuantizedEmbedding, _packed),
    FlatQuantizedEmbedding: (NativeQuantizedEmbedding, _packed),
    nn.RMSNorm: (NativeRMSNorm, _norm),
    nn.RoPE: (NativeRoPE, _any),
}


def _suits(layer: Any) -> bool:
    """Whether there is a kernel for what a layer computes."""
    new, suits = CLASSES.get(type(layer), (None, _any))
    return new is not None and suits(layer)


def widen_codes(layer: Any) -> None:
    """Make codes of 2, 3, 5 or 6 bits ones of 8, which stand for the same numbers: MLX's own products with these are
    slower than with float32 weights, and the kernels read 4 and 8 bits."""
    rows = max(1, VALUES_AT_ONCE * layer.bits // (32 * layer.weight.shape[1]))
    parts = []
    for start in range(0, layer.weight.shape[0], rows):
        words, like = layer.weight[start : start + rows], layer.scales[start : start + rows].astype(mx.float32)
        settings = {"group_size": layer.group_size, "bits": layer.bits}
        codes = mx.dequantize(words, mx.ones_like(like), mx.zeros_like(like), **settings)
        parts.append(codes.astype(mx.uint8).view(mx.uint32))
        mx.eval(parts[-1])
    layer.weight, layer.bits = mx.concatenate(parts), WIDE
    mx.eval(layer.weight)


def _widens(layer: Any) -> bool:
    return isinstance(layer, QUANTISED) and layer.mode == "affine" and layer.bits in NARROW


def install(model: Any) -> int:
    """Change the layers of `model` in place, and what its files call; returns how many layers were changed."""
    for layer in model.modules():
        if _widens(layer):
            widen_codes(layer)
    count = blocks.exchange(model, _suits)
    for module in model.modules():
        new, _ = CLASSES.get(type(module), (None, _any))
        if new is not None and _suits(module):
            module.__class__ = new
            count += 1
    files = [vars(sys.modules[name]) for name in {type(module).__module__ for module in model.modules()}]
    for name, make in ((ATTENTION, _attention), (GATE, _gate)):
        homes = [vars(sys.modules[home])[name] for home in HOMES[name] if home in sys.modules]
        for file in files:
            if any(file.get(name) is original for original in homes):
                file[name] = make(file[name])
    return count


def _attention(original: Any) -> Any:
    @wraps(original)
    def attend(queries: Any, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None) -> Any:
        if sinks is not None or not _attends(queries, keys, values, mask):
            return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)
        if mask is None or isinstance(mask, str):
            return kernels.attention(queries, keys, values, scale, mask is not None)
        whole = mask if mask.ndim == 4 else mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
        return kernels.attention(queries, keys, values, scale, False, whole)

    return attend


def _attends(queries: Any, keys: Any, values: Any, mask: Any) -> bool:
    """Whether the kernel is written for these; packed keys of mlx-lm's own cache are tuples."""
    for a in (queries, keys, values):
        if type(a) is not mx.array or a.dtype != mx.float32 or a.shape[3] % LANES:
            return False
    return mask is None or (mask == "causal" if isinstance(mask, str) else mask.dtype in MASKS)


def _gate(original: Any) -> Any:
    @wraps(original)
    def swiglu(gate: Any, x: Any) -> Any:
        if gate.dtype == mx.float32 and x.dtype == mx.float32 and gate.shape == x.shape:
            return kernels.swiglu(gate, x)
        return original(gate, x)

    return swiglu
