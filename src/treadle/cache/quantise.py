"""Rows in fewer bits while no step reads them: `pack(rows, scheme) -> Packed`, `Packed.unpack() -> rows`.

Values are quantised in groups along the head dimension, so a token's bytes depend on that token alone and cutting or
joining packed rows is exact. A group of 8 or 4 bit codes has a scale and a bias (value = scale * code + bias) in
bfloat16 whatever the rows' type: 8.5 and 4.5 bits a value with groups of 64, that is 0.53 and 0.28 of bfloat16 rows
(groups of 32, which only odd head sizes need: 0.56 and 0.31). The layout is that of `mx.quantize`, but the codes are
fitted here: `mx.quantize` computes them for scales that it rounds afterwards, which costs 60 to 75 % more error at
8 bits. Here the bias is rounded down and the scale up before the codes are chosen, so that no value is off by more
than half a scale. All arithmetic is in float32: half precision is slower on CPUs and loses the eighth bit.

At 4 bits each head is rotated first by a Hadamard matrix, so that a few large channels do not set the scale of a
whole group.

Engine thread only. Nothing here evaluates: arrays stay lazy until the caller evaluates `Packed.arrays()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import mlx.core as mx

GROUP_SIZES = (32, 64, 128)  # what MLX can read
CODE_BITS = (4, 8)
SCALE_BITS = 32  # of a group's scale and bias together
LEAST_SCALE = 1e-38  # a divisor for groups of one repeated value


@dataclass(frozen=True)
class Scheme:
    """How rows are packed. Raises ValueError for bits or group sizes that do not exist."""

    bits: int  # of a code: 8 or 4
    group_size: int  # values that share a scale and a bias: 32, 64 or 128
    rotate: bool  # by a Hadamard matrix, before quantising

    def __post_init__(self) -> None:
        if self.bits not in CODE_BITS:
            raise ValueError(f"rows have 8 or 4 bits, not {self.bits}")
        if self.group_size not in GROUP_SIZES:
            raise ValueError(f"a group has 32, 64 or 128 values, not {self.group_size}")

    @property
    def bits_per_value(self) -> float:
        """Codes, scales and biases together."""
        return self.bits + SCALE_BITS / self.group_size


def scheme_for(bits: int, group_size: int, head_dim: int) -> Scheme | None:
    """The scheme with the largest group that divides `head_dim` and is not above `group_size`; 4 bits are rotated.

    None where no group fits: rows of this head size stay exact. Raises ValueError as `Scheme` does.
    """
    asked = Scheme(bits, group_size, rotate=bits == 4)
    fitting = [size for size in GROUP_SIZES if size <= group_size and head_dim % size == 0]
    return replace(asked, group_size=max(fitting)) if fitting else None


@dataclass(frozen=True, eq=False)
class Packed:
    """Packed rows of one layer's keys or values, n tokens.

    weights: uint32 [1, heads, n, dim * bits / 32], the first code in the lowest bits;
    scales, biases: bfloat16 [1, heads, n, dim / group_size]; dtype: of the rows that `unpack` returns.
    """

    weights: Any
    scales: Any
    biases: Any
    scheme: Scheme
    dtype: Any

    @property
    def num_tokens(self) -> int:
        return int(self.weights.shape[2])

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())

    def arrays(self) -> list[Any]:
        """Every array, for evaluation: weights, scales, biases."""
        return [self.weights, self.scales, self.biases]

    def slice(self, start: int, end: int) -> Packed:
        """Tokens start..end-1 in arrays of their own (no views, which would keep all of these alive).

        Raises ValueError unless 0 <= start < end <= n.
        """
        if not 0 <= start < end <= self.num_tokens:
            raise ValueError(f"no tokens {start} to {end} in {self.num_tokens} packed ones")
        return self.with_arrays([mx.contiguous(a[:, :, start:end]) for a in self.arrays()])

    @staticmethod
    def concatenate(parts: Sequence[Packed]) -> Packed:
        """All tokens of `parts` in order. Raises ValueError without parts, or where their schemes or types differ."""
        if len({(part.scheme, part.dtype) for part in parts}) != 1:
            raise ValueError("packed rows join only where scheme and type are the same")
        columns = zip(*(part.arrays() for part in parts), strict=True)
        return parts[0].with_arrays([mx.concatenate(list(column), axis=2) for column in columns])

    def unpack(self) -> Any:
        """The rows [1, heads, n, dim] in their first type, each value off by half a scale at most (before rotation).

        Needs float32 rows as working memory while it is evaluated: evaluate layer by layer where memory is short.
        """
        scales, biases = self.scales.astype(mx.float32), self.biases.astype(mx.float32)
        if self.scheme.bits == 8 and on_cpu():  # a third of the time of `mx.dequantize` there
            codes = self.weights.view(mx.uint8).astype(mx.float32)
            groups = codes.reshape(*scales.shape, self.scheme.group_size)
            rows = (groups * scales[..., None] + biases[..., None]).reshape(codes.shape)
        else:
            rows = mx.dequantize(self.weights, scales, biases, self.scheme.group_size, self.scheme.bits)
        return (rotated(rows) if self.scheme.rotate else rows).astype(self.dtype)

    def with_arrays(self, arrays: Sequence[Any]) -> Packed:
        weights, scales, biases = arrays
        return Packed(weights, scales, biases, self.scheme, self.dtype)


def pack(rows: Any, scheme: Scheme) -> Packed:
    """Quantise `rows`, [1, heads, n, dim] of any float type, n >= 1.

    Raises ValueError without rows and where the groups do not divide dim.
    """
    dim = rows.shape[-1]
    if rows.size == 0:
        raise ValueError("there are no rows to pack")
    if dim % scheme.group_size:
        raise ValueError(f"groups of {scheme.group_size} do not divide the head size {dim}")
    values = rows.astype(mx.float32)
    values = rotated(values) if scheme.rotate else values
    groups = values.reshape(*rows.shape[:-1], dim // scheme.group_size, scheme.group_size)
    biases = _to_bfloat16(low := groups.min(-1, keepdims=True), away=low < 0)
    above = groups - biases.astype(mx.float32)
    scales = _to_bfloat16(above.max(-1, keepdims=True) / (2**scheme.bits - 1), away=mx.array(True))
    codes = mx.round(above / mx.maximum(scales.astype(mx.float32), LEAST_SCALE)).astype(mx.uint8)
    weights = _joined(codes.reshape(rows.shape), scheme.bits)
    return Packed(weights, scales.squeeze(-1), biases.squeeze(-1), scheme, rows.dtype)


@lru_cache(maxsize=1)
def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return not (mx.metal.is_available() or mx.cuda.is_available())


def _joined(codes: Any, bits: int) -> Any:
    """uint8 codes [..., dim] as uint32 words, lowest bits first."""
    if bits == 4:
        codes = codes[..., 0::2] | (codes[..., 1::2] << 4)
    return codes.view(mx.uint32)


def rotated(values: Any) -> Any:
    """Rotate each head in blocks of the largest power of two that divides its size; twice is the identity.

    Powers of two alone, because MLX's matrices for 20 and 28 are not their own inverses, and because its CPU kernel
    writes out of bounds for sizes that it does not know.
    """
    dim = values.shape[-1]
    block = dim & -dim
    blocks = values.reshape(*values.shape[:-1], dim // block, block)
    return mx.hadamard_transform(blocks).reshape(values.shape)


def _to_bfloat16(values: Any, away: Any) -> Any:
    """float32 to bfloat16, rounded towards zero, or away from it where `away` is true. What fits exactly stays."""
    bits = values.view(mx.uint32)
    bits = mx.where(away, bits + 0xFFFF, bits)
    return (bits >> 16).astype(mx.uint16).view(mx.bfloat16)
