"""From a stored tensor to what an MLX module holds: repacked exactly, requantised to 8 bits, or plain floats.

`convert` is NumPy alone and may run on any thread; `to_mlx` belongs to the engine thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.errors import LoadError
from treadle.models.gguf import Tensor
from treadle.models.gguf_blocks import AFFINE, GROUP, PLAIN, VALUES, Affine, Floats, mxfp4, pack, requantise


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor for MLX: arrays by part (`weight`, and for packed ones `scales`, `biases`).

    `quantization` has the arguments of MLX's `to_quantized`, None for floats; `became` is for the log.
    """

    parts: dict[str, NDArray[Any]]
    quantization: dict[str, Any] | None
    became: str


def check_types(tensors: dict[str, Tensor]) -> None:
    """
    Raises:
        LoadError: names the first tensor of a type that cannot be loaded.
    """
    known = {*AFFINE, *VALUES, *PLAIN, "MXFP4"}
    for tensor in tensors.values():
        if tensor.type.name not in known:
            raise LoadError(f"Tensor {tensor.name} has type {tensor.type.name}, which is not supported.")


def convert(
    tensor: Tensor, rows: NDArray[np.intp] | None = None, *, dense: bool = False, offset: float = 0.0
) -> Weight:
    """Decode one tensor. `rows` reorders its rows; `dense` asks for plain float32 values whatever the type.

    `offset` is taken off plain values, before they are rounded to a narrower type.
    Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K and Q5_K keep their codes; MXFP4 keeps codes and exponents; Q2_K, Q3_K,
    Q6_K, IQ4_NL and IQ4_XS have no exact form in MLX and become 8-bit with groups of 32.
    """
    kind, vector = tensor.type.name, len(tensor.shape) == 1
    raw = np.ascontiguousarray(tensor.raw if rows is None or vector else tensor.raw[rows])
    if kind in PLAIN or dense or vector:
        values = _values(kind, raw).reshape(tensor.shape)
        ordered = values[rows] if vector and rows is not None else values
        return Weight({"weight": ordered - np.float32(offset) if offset else ordered}, None, "dense")
    if kind == "MXFP4":
        blocks = mxfp4(raw)
        parts = {
            "weight": _shaped(pack(blocks.codes, 4), tensor),
            "scales": _shaped(blocks.exponents, tensor),
        }
        return Weight(parts, {"group_size": GROUP, "bits": 4, "mode": "mxfp4"}, "mxfp4")
    if kind in AFFINE:
        return _packed(AFFINE[kind](raw), tensor, "repacked")
    return _packed(requantise(VALUES[kind](raw)), tensor, "requantised")


def _values(kind: str, raw: NDArray[np.uint8]) -> Floats:
    if kind in PLAIN:
        return PLAIN[kind](raw)
    if kind in VALUES:
        return VALUES[kind](raw)
    return mxfp4(raw).values() if kind == "MXFP4" else AFFINE[kind](raw).values()


def _packed(affine: Affine, tensor: Tensor, how: str) -> Weight:
    parts = {
        "weight": _shaped(pack(affine.codes, affine.bits), tensor),
        "scales": _shaped(affine.scales, tensor),
        "biases": _shaped(affine.biases, tensor),
    }
    settings = {"group_size": GROUP, "bits": affine.bits, "mode": "affine"}
    return Weight(parts, settings, f"{how} to {affine.bits}-bit groups of {GROUP}")


def _shaped(part: NDArray[Any], tensor: Tensor) -> NDArray[Any]:
    return part.reshape(*tensor.shape[:-1], -1)


def to_mlx(weight: Weight, dtype: Any) -> dict[str, Any]:
    """MLX arrays by part; floats become `dtype`, packed codes and exponents stay integers."""
    import mlx.core as mx

    arrays = {part: mx.array(values) for part, values in weight.parts.items()}
    return {
        part: array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
        for part, array in arrays.items()
    }
