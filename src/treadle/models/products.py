"""Products of few rows by CUDA kernels, for the linear layers that they know. Engine thread only.

There is one for a row and weights that are not packed (`gemv.py`), one for a row and packed ones (`packed_gemv.py`),
and one for up to `MOST_ROWS` rows and those (`packed_gemm.py`).
"""

from __future__ import annotations

import logging
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from treadle.models import gemv, packed_gemm, packed_gemv
from treadle.models.around import MOST_NORMED, Around, Form
from treadle.models.kernels import ROUNDING
from treadle.models.packed_gemm import Block

log = logging.getLogger("treadle.models")

TYPES = (mx.bfloat16, mx.float16)
BITS = (4, 8)
GROUPS = (32, 64, 128)
MOST_ROWS = 256  # unpacked weights are faster for more
TRIAL_INPUTS, TRIAL_OUTPUTS, TRIAL_ROWS = 4352, 38, 19  # inputs: several times what the warps of a block take
AMPERE = 8  # the first devices with the instruction of both


def most_rows(layer: Any, norm: bool = False, gated: bool = False, add: bool = False) -> int:
    """For how many rows `product` computes this with a linear layer: on CUDA, of types that the kernels read. Or 0."""
    if not mx.cuda.is_available():
        return 0
    form = _form(layer)
    if form is not None and int(mx.device_info().get("compute_capability_major", AMPERE)) < AMPERE:
        return 0
    if form is not None and (layer.mode != "affine" or form.bits not in BITS or form.group_size not in GROUPS):
        return 0
    weights = _weights(layer)
    inputs = weights[0].shape[1] * (1 if form is None else 32 // form.bits)
    fits = inputs % 8 == 0 and not (norm and inputs > MOST_NORMED) and not (gated and weights[0].shape[0] % 2)
    around = Around(norm, "bias" in layer, gated, add)
    alike = all(a.dtype == weights[-1].dtype for a in (*weights[1:], *([layer.bias] if around.bias else [])))
    if weights[-1].dtype not in TYPES or not fits or not alike:
        return 0
    most = 1 if form is None or norm or add else MOST_ROWS
    width = inputs if norm else TRIAL_INPUTS
    return next((n for n in (most, 1) if _sound(form, weights[-1].dtype, around, n, width)), 0)


def takes(layer: Any, x: Any, most: int) -> bool:
    """Whether `product` may be given rows [.., inputs] of a layer for which `most_rows` told `most`."""
    return bool(0 < x.size <= most * x.shape[-1] and x.dtype == _weights(layer)[-1].dtype)


def product(layer: Any, x: Any, norm: Any = None, eps: float = 0.0, gated: bool = False, added: Any = None) -> Any:
    """Rows [.., inputs] through a linear layer, no more than `most_rows` tells with the same around.

    `norm`: weight [inputs] of an RMS norm before it; `gated`: silu of the first half of the outputs times the second
    half; `added`: [.., outputs] to be added, of which the result takes the shape. All are of the rows' type.
    """
    around = Around(norm is not None, "bias" in layer, gated, added is not None)
    more = [a for a in (norm, layer.get("bias"), added) if a is not None]
    weights = _weights(layer)
    return _compiled(_form(layer), around, eps, x.shape, weights[0].shape, x.dtype)(x, *weights, *more)


@lru_cache(maxsize=4096)
def _compiled(form: Form | None, around: Around, eps: float, *shapes: Any) -> Any:
    """The launch, compiled: the text of a kernel is put together once for each set of shapes.

    A function for each, because MLX looks for the shapes that a function has met one by one.
    """
    return mx.compile(partial(_launch, form, around, eps))


def _launch(form: Form | None, around: Around, eps: float, x: Any, *others: Any, block: Block | None = None) -> Any:
    if form is None:
        return gemv.launch(around, eps, x, *others)
    if x.size == others[0].shape[1] * 32 // form.bits:
        return packed_gemv.launch(form, around, eps, x, *others)
    return packed_gemm.launch(form, around, x, *others, block=block)


def _form(layer: Any) -> Form | None:
    quantised = isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding))
    return Form(layer.group_size, layer.bits) if quantised else None


def _weights(layer: Any) -> list[Any]:
    return [layer[key] for key in ("weight", "scales", "biases") if key in layer]


@lru_cache(maxsize=32)
def _sound(form: Form | None, dtype: Any, around: Around, most: int, inputs: int = TRIAL_INPUTS) -> bool:
    """Whether kernels can be built here and compute what MLX does, up to rounding, for up to `most` rows."""
    try:
        off = [_off(form, dtype, around, 1, inputs=inputs)]
        if form is not None and most > 1:
            tiles = (-(-TRIAL_ROWS // packed_gemm.ROW_TILE), packed_gemm.ROW_TILES[-1])
            blocks = dict.fromkeys(block for n in tiles for block in packed_gemm.kinds(form, n))
            off += [_off(form, dtype, around, TRIAL_ROWS, inputs=inputs, block=block) for block in blocks]
        worst = float(np.max(off))  # or NaN
    except RuntimeError as error:
        log.warning(
            "The kernel for products of few rows cannot be built here, MLX's own is used: %s",
            str(error).strip().partition("\n")[0],
        )
        return False
    if not worst <= ROUNDING[dtype]:
        log.warning("A product of few rows by the kernel for %s is off by %.2g; MLX's own is used.", form, worst)
    return worst <= ROUNDING[dtype]


def _off(
    form: Form | None,
    dtype: Any,
    around: Around,
    rows: int,
    outputs: int = TRIAL_OUTPUTS,
    inputs: int = TRIAL_INPUTS,
    block: Block | None = None,
) -> float:
    """The largest difference in a trial, as a share of the largest number; NaN where a result is not finite."""

    def drawn(seed: int, *shape: int) -> Any:
        return mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)

    weight, x, norm = drawn(1, outputs, inputs), drawn(2, rows, inputs), drawn(3, inputs)
    bias, added = drawn(4, outputs), drawn(5, rows, outputs // around.outputs)
    weights = [weight] if form is None else list(mx.quantize(weight, form.group_size, form.bits))
    more = ((norm, around.norm), (bias, around.bias), (added, around.add))
    found = _launch(form, around, 1e-5, x, *weights, *[a for a, given in more if given], block=block)
    whole = weight
    if form is not None:
        scales, biases = (a.astype(mx.float32) for a in weights[1:])
        whole = mx.dequantize(weights[0], scales, biases, group_size=form.group_size, bits=form.bits)
    x = mx.fast.rms_norm(x, norm, 1e-5) if around.norm else x
    wanted = x.astype(mx.float32) @ whole.astype(mx.float32).T
    wanted = wanted + bias if around.bias else wanted
    if around.gated:
        gate, up = mx.split(wanted, 2, axis=-1)
        wanted = nn.silu(gate) * up
    expected = np.array(wanted + added if around.add else wanted)
    off = np.abs(np.array(found.astype(mx.float32)) - expected).max()
    return float(off / np.abs(expected).max())
