"""`python -m treadle.native.trial LIBRARY`: does a compiled library compute what MLX computes? Ends with 1 if not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from treadle import runtime

ROUNDING = 1e-4  # of float32 sums, as a share of the largest result


def main() -> None:
    runtime.prepare()
    from treadle.native.build import loaded

    kernels = loaded(Path(sys.argv[1]))
    kernels.set_num_threads(2)
    for name, found, expected in _pairs(kernels):
        import mlx.core as mx

        fault = float(mx.abs(found - expected).max() / mx.abs(expected).max())
        if not fault < ROUNDING:
            sys.exit(f"{name} is off by {fault:.2g}")


def _pairs(kernels: Any) -> Iterator[tuple[str, Any, Any]]:
    """What each kernel computes and what it should."""
    import mlx.core as mx

    mx.random.seed(0)
    for rows in (1, 7):
        x, weight = mx.random.normal((rows, 128)), mx.random.normal((40, 128))
        for bits in (4, 8):
            packed = mx.quantize(weight, 64, bits)
            plain = mx.dequantize(*packed, 64, bits)
            yield f"a product with {bits} bits", kernels.quantised_linear(x, *packed, 64, bits), x @ plain.T
        yield "a product", kernels.linear(x, weight), x @ weight.T
    for n in (1, 40):
        queries, keys = mx.random.normal((1, 6, n, 64)), mx.random.normal((1, 2, 150, 64))
        expected = mx.fast.scaled_dot_product_attention(queries, keys, keys, scale=0.1, mask="causal")
        yield "attention", kernels.attention(queries, keys, keys, 0.1, True), expected
        codes, scales, biases = mx.quantize(mx.random.normal((1, 2, 300, 64)), 64, 8)
        coded = [codes, scales.astype(mx.bfloat16), biases.astype(mx.bfloat16)]
        old = mx.dequantize(codes, coded[1].astype(mx.float32), coded[2].astype(mx.float32), 64, 8)
        both = mx.concatenate([old, keys], axis=2)
        expected = mx.fast.scaled_dot_product_attention(queries, both, both, scale=0.1, mask="causal")
        found = kernels.attention(queries, keys, keys, 0.1, True, None, coded, coded, 300)
        yield "attention over packed rows", found, expected
    x, ones = mx.random.normal((2, 3, 5, 64)), mx.ones(64)
    yield "a norm", kernels.rms_norm(x, ones, 1e-5), mx.fast.rms_norm(x, ones, 1e-5)
    yield "a gate", kernels.swiglu(x, x), x * mx.sigmoid(x) * x
    turned = mx.fast.rope(x, 64, traditional=False, base=1e4, scale=1.0, offset=9)
    yield "rotation", kernels.rope(x, 64, False, 1e4, 1.0, mx.array(9)), turned


if __name__ == "__main__":
    main()
