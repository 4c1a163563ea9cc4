"""The product of one row: who gets it, and what its CUDA source computes, compiled as C++."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.models.cuda_host import COMPILER, compiled
from treadle.models import gemv, linear
from treadle.models.gemv import Around

FORMS = [None, gemv.Form(64, 4), gemv.Form(32, 4), gemv.Form(128, 8)]
AROUND = [
    Around(),
    Around(bias=True),
    Around(add=True),
    Around(norm=True, bias=True),
    Around(norm=True, gated=True),
    Around(bias=True, gated=True, add=True),
]


def on_the_host(folder: Path, packed: bool, around: Around) -> Any:
    return compiled(gemv.inputs_of(packed, around), ["out"], gemv.source_of(packed, around), folder)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "around", AROUND, ids=lambda a: "+".join(n for n in ("norm", "bias", "gated", "add") if getattr(a, n))
)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(38, 512), (8, 1152), (2, 128)])
def test_the_source_computes_the_product(
    form: gemv.Form | None, around: Around, outputs: int, inputs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemv, "_kernel", partial(on_the_host, tmp_path))
    assert gemv._off(form, mx.bfloat16, around, outputs, inputs) < gemv.ROUNDING


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_with_all_that_lies_around_it(
    packed: bool, bias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gemv._sound.cache_clear()
    monkeypatch.setattr(gemv, "_kernel", partial(on_the_host, tmp_path))
    monkeypatch.setattr(gemv, "_compiled", lambda form, around: partial(gemv._launch, form, around))
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    mx.random.seed(3)
    layer = nn.QuantizedLinear(128, 16, bias=bias, bits=4) if packed else nn.Linear(128, 16, bias=bias)
    layer.set_dtype(mx.bfloat16)
    x, norm, added = (mx.random.normal(shape).astype(mx.bfloat16) for shape in ((1, 1, 128), (128,), (1, 8)))
    assert gemv.knows(layer) and gemv.knows(layer, norm=True, gated=True, add=True)
    assert mx.allclose(gemv.row_product(layer, x), layer(x), atol=2e-2)
    gate, up = mx.split(layer(mx.fast.rms_norm(x, norm, 1e-5)), 2, axis=-1)
    wanted = (nn.silu(gate) * up)[0] + added
    found = gemv.row_product(layer, x, norm, 1e-5, gated=True, added=added)
    assert found.shape == added.shape and mx.allclose(found, wanted, atol=5e-2)
    gemv._sound.cache_clear()


def test_only_cuda_has_the_kernels() -> None:
    assert not gemv.knows(nn.Linear(64, 64)) and not gemv.knows(nn.QuantizedLinear(64, 64))


def test_layers_of_other_forms_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gemv, "_sound", lambda form, dtype, around, inputs: True)
    half = nn.Linear(256, 8)
    half.set_dtype(mx.bfloat16)
    assert gemv.knows(half) and not gemv.knows(nn.Linear(256, 8)), "float32 is not read"
    narrow = nn.Linear(20, 8)
    narrow.set_dtype(mx.bfloat16)
    assert not gemv.knows(narrow)
    packed = nn.QuantizedLinear(256, 8, group_size=64, bits=4)
    packed.set_dtype(mx.bfloat16)
    assert gemv.knows(packed)
    packed.bits = 6
    assert not gemv.knows(packed)


def test_one_row_takes_the_kernel_and_others_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(layer: Any, x: Any) -> Any:
        return (x @ mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4).T) + 1000

    monkeypatch.setattr(linear, "row_product", plain)
    model = nn.Sequential(nn.QuantizedLinear(64, 16, group_size=32, bits=4))
    linear.flatten_rows(model, pad=False)
    layer = model.layers[0]
    layer.lean = True
    one, two = mx.ones((1, 1, 64)), mx.ones((2, 1, 64))
    assert (layer(one) > 500).all() and (layer(two) < 500).all()
    layer.lean = False
    assert (layer(one) < 500).all()


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    gemv._sound.cache_clear()
    monkeypatch.setattr(gemv, "_launch", lambda form, around, x, *weights: mx.zeros((1, weights[0].shape[0]), x.dtype))
    assert not gemv._sound(None, mx.bfloat16, Around()) and "off by" in caplog.text

    def broken(form: Any, around: Any, x: Any, *weights: Any) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(gemv, "_launch", broken)
    assert not gemv._sound(gemv.Form(64, 4), mx.bfloat16, Around()) and "no compiler" in caplog.text
    gemv._sound.cache_clear()
