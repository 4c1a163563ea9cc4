"""Products by CUDA kernels: which layers and rows get them, and what their sources compute, compiled as C++."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.models.cuda_host import COMPILER, compiled
from treadle.models import gemv, linear, packed_gemm, packed_gemv, products
from treadle.models.around import Around, Form
from treadle.models.packed_gemm import Block

AROUND = [
    Around(),
    Around(bias=True),
    Around(add=True),
    Around(norm=True, bias=True),
    Around(norm=True, gated=True),
    Around(bias=True, gated=True, add=True),
]
FORMS = [Form(size, bits) for size in (32, 64, 128) for bits in (4, 8)]

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels run on this machine, as if it had CUDA."""

    def dense(around: Around) -> Any:
        return compiled(around.inputs("w"), ["out"], gemv.source_of(around), tmp_path)

    def packed(module: Any, around: Around) -> Any:
        return compiled(around.inputs("w", "scales", "biases"), ["out"], module.source_of(around), tmp_path)

    monkeypatch.setattr(gemv, "kernel", dense)
    monkeypatch.setattr(packed_gemv, "kernel", partial(packed, packed_gemv))
    monkeypatch.setattr(packed_gemm, "kernel", partial(packed, packed_gemm))
    monkeypatch.setattr(
        products, "_compiled", lambda form, around, eps, *_: partial(products._launch, form, around, eps)
    )
    monkeypatch.setattr(products, "TRIAL_INPUTS", 1024)  # here threads are slow
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    products._sound.cache_clear()
    yield
    products._sound.cache_clear()


def name(around: Around) -> str:
    return around.named("product")


@needs_compiler
@pytest.mark.parametrize("around", AROUND, ids=name)
@pytest.mark.parametrize(("outputs", "inputs"), [(38, 512), (8, 1152), (2, 128)])
def test_one_row_meets_weights_that_are_not_packed(around: Around, outputs: int, inputs: int, host: None) -> None:
    assert products._off(None, mx.bfloat16, around, 1, outputs, inputs) < products.ROUNDING[mx.bfloat16]


@needs_compiler
@pytest.mark.parametrize("around", AROUND, ids=name)
@pytest.mark.parametrize("form", [Form(64, 4), Form(128, 8)], ids=str)
def test_one_row_meets_packed_weights(form: Form, around: Around, host: None) -> None:
    for outputs, inputs in ((38, 512), (2, 128), (70, 896)):
        assert products._off(form, mx.bfloat16, around, 1, outputs, inputs) < products.ROUNDING[mx.bfloat16]


@needs_compiler
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("around", [Around(bias=True), Around(gated=True)], ids=name)
def test_several_rows_meet_packed_weights(form: Form, around: Around, host: None) -> None:
    assert products._off(form, mx.bfloat16, around, 3, 38, 384) < products.ROUNDING[mx.bfloat16]


@needs_compiler
@pytest.mark.parametrize("rows", [2, 8, 13, 35, 70])
def test_many_rows_take_more_tiles_or_blocks(rows: int, host: None) -> None:
    for dtype in (mx.bfloat16, mx.float16):
        assert products._off(Form(64, 4), dtype, Around(), rows, 38, 384) < products.ROUNDING[dtype]


@needs_compiler
@pytest.mark.parametrize("block", [(1, 2), (1, 4), (2, 4), (4, 2)], ids=str)
def test_a_block_for_one_row_may_have_any_measures(
    block: tuple[int, int], host: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_gemv, "_block", lambda outputs, gated: block)
    for inputs in (64, 256, 1984):  # fewer pieces than warps, and a last one that is not whole
        assert (
            products._off(Form(64, 4), mx.bfloat16, Around(bias=True), 1, 150, inputs) < products.ROUNDING[mx.bfloat16]
        )


@needs_compiler
@pytest.mark.parametrize(
    "block", [Block(2, 2, 2, 2, 2), Block(2, 4, 1, 3, 3), Block(1, 8, 1, 1, 3), Block(2, 2, 1, 6, 3)], ids=str
)
@pytest.mark.parametrize("form", [Form(64, 4), Form(32, 8)], ids=str)
def test_a_block_for_several_rows_may_have_any_measures(form: Form, block: Block, host: None) -> None:
    for around, inputs in ((Around(bias=True), 64), (Around(gated=True), 256), (Around(bias=True, gated=True), 1984)):
        off = products._off(form, mx.bfloat16, around, 11, 150, inputs, block)
        assert off < products.ROUNDING[mx.bfloat16]


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("number", [*packed_gemm.SHARED, "8.6", "12.0"])
def test_blocks_fit_into_a_device_and_fill_it(form: Form, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    major, minor = map(int, number.split("."))
    told = {"compute_capability_major": major, "compute_capability_minor": minor}
    monkeypatch.setattr(mx, "device_info", lambda *_: told)
    for rows in range(2, products.MOST_ROWS + 1):
        for outputs in (96, 4096, 6144, 24576):
            block = packed_gemm.block_for(form, outputs, rows)
            assert block.shared_memory(form) <= packed_gemm.SHARED.get(number, packed_gemm.LEAST_SHARED)
            assert block.ways * block.units * packed_gemm.UNIT >= 2 * form.group_size
            held = packed_gemm.ROW_TILE * block.row_tiles
            assert -rows % held < max(packed_gemm.ROW_TILE * 2, held / 2) or rows > held
    tall = [packed_gemm.block_for(form, outputs, 8).tall for outputs in (4096, 24576)]
    assert tall == [1, 2] or number not in packed_gemm.SHARED  # narrow blocks where there are few


@needs_compiler
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_a_layer_with_all_that_lies_around_it(packed: bool, bias: bool, host: None) -> None:
    mx.random.seed(3)
    layer = nn.QuantizedLinear(128, 16, bias=bias, bits=4) if packed else nn.Linear(128, 16, bias=bias)
    layer.set_dtype(mx.bfloat16)
    x, norm, added = (mx.random.normal(shape).astype(mx.bfloat16) for shape in ((1, 1, 128), (128,), (1, 8)))
    assert products.most_rows(layer) == (products.MOST_ROWS if packed else 1)
    assert products.most_rows(layer, norm=True, gated=True, add=True) == 1
    assert mx.allclose(products.product(layer, x), layer(x), atol=2e-2)
    gate, up = mx.split(layer(mx.fast.rms_norm(x, norm, 1e-5)), 2, axis=-1)
    wanted = (nn.silu(gate) * up)[0] + added
    found = products.product(layer, x, norm, 1e-5, gated=True, added=added)
    assert found.shape == added.shape and mx.allclose(found, wanted, atol=5e-2)


@needs_compiler
@pytest.mark.parametrize("shape", [(5, 1), (1, 5), (2, 3), (6,)])
def test_rows_may_lie_in_any_axes(shape: tuple[int, ...], host: None) -> None:
    layer = nn.QuantizedLinear(128, 24, bits=4)
    layer.set_dtype(mx.bfloat16)
    x = mx.random.normal((*shape, 128)).astype(mx.bfloat16)
    found = products.product(layer, x)
    wanted = x @ mx.dequantize(layer.weight, layer.scales, layer.biases, bits=4, group_size=64).T + layer.bias
    assert found.shape == (*shape, 24) and mx.allclose(found, wanted, atol=5e-2)


def test_rows_of_another_type_are_not_for_the_kernel() -> None:
    layer = nn.QuantizedLinear(128, 24, bits=4)
    layer.set_dtype(mx.bfloat16)
    for dtype, taken in ((mx.bfloat16, True), (mx.float16, False), (mx.float32, False)):
        assert products.takes(layer, mx.zeros((2, 4, 128), dtype), 8) == taken
    assert not products.takes(layer, mx.zeros((9, 128), mx.bfloat16), 8)
    dense = nn.Linear(128, 24)
    assert products.takes(dense, mx.zeros((1, 128)), 1) and not products.takes(dense, mx.zeros((2, 128)), 1)


def test_only_cuda_has_the_kernels() -> None:
    assert not products.most_rows(nn.Linear(64, 64)) and not products.most_rows(nn.QuantizedLinear(64, 64))


def test_layers_of_other_forms_are_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(products, "_sound", lambda form, dtype, around, most, inputs: True)
    half = nn.Linear(256, 8)
    half.set_dtype(mx.bfloat16)
    assert products.most_rows(half) and not products.most_rows(nn.Linear(256, 8)), "float32 is not read"
    narrow = nn.Linear(20, 8)
    narrow.set_dtype(mx.bfloat16)
    assert not products.most_rows(narrow)
    packed = nn.QuantizedLinear(256, 8, group_size=64, bits=4)
    packed.set_dtype(mx.bfloat16)
    assert products.most_rows(packed)
    packed.bits = 6
    assert not products.most_rows(packed)
    packed.bits = 4
    packed.bias = mx.zeros(8)
    assert not products.most_rows(packed), "a bias of another type"
    long = nn.Linear(products.MOST_NORMED + 8, 8)
    long.set_dtype(mx.bfloat16)
    assert products.most_rows(long) and not products.most_rows(long, norm=True)


def test_devices_without_the_instruction_have_no_kernel_for_packed_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(products, "_sound", lambda form, dtype, around, most, inputs: True)
    layer = nn.QuantizedLinear(256, 8, group_size=64, bits=4, bias=False)
    layer.set_dtype(mx.bfloat16)
    for major, most in ((7, 0), (8, products.MOST_ROWS)):
        told = {"compute_capability_major": major}
        monkeypatch.setattr(mx, "device_info", lambda *_, told=told: told)
        assert products.most_rows(layer) == most


def test_one_row_has_its_kernel_where_that_for_more_is_not_sound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: True)
    monkeypatch.setattr(mx, "device_info", lambda *_: {"compute_capability_major": 9})
    layer = nn.QuantizedLinear(256, 8, group_size=64, bits=4, bias=False)
    layer.set_dtype(mx.bfloat16)
    for sound in (products.MOST_ROWS, 1, 0):
        monkeypatch.setattr(products, "_sound", lambda form, dtype, around, most, inputs, up_to=sound: most <= up_to)
        assert products.most_rows(layer) == sound


def test_as_many_rows_as_the_kernel_takes_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def plain(layer: Any, x: Any) -> Any:
        return (x @ mx.dequantize(layer.weight, layer.scales, layer.biases, group_size=32, bits=4).T) + 1000

    monkeypatch.setattr(linear, "product", plain)
    model = nn.Sequential(nn.QuantizedLinear(64, 16, group_size=32, bits=4))
    linear.flatten_rows(model, pad=True)
    layer = model.layers[0]
    layer.most = 3
    for shape, by_kernel in (((1, 1), True), ((3, 1), True), ((1, 3), True), ((4, 1), False), ((1, 300), False)):
        assert bool((layer(mx.ones((*shape, 64))) > 500).all()) == by_kernel
    layer.most = 0
    assert (layer(mx.ones((1, 1, 64))) < 500).all()


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def nothing(form: Any, around: Any, eps: float, x: Any, *weights: Any, **_: Any) -> Any:
        return mx.zeros((x.shape[0], weights[0].shape[0]), x.dtype)

    def no_number(form: Any, around: Any, eps: float, x: Any, *weights: Any, **_: Any) -> Any:
        return mx.full((x.shape[0], weights[0].shape[0]), mx.nan, x.dtype)

    def broken(form: Any, around: Any, eps: float, x: Any, *weights: Any, **_: Any) -> Any:
        raise RuntimeError("no compiler")

    for wrong, told in ((nothing, "off by"), (no_number, "off by nan"), (broken, "no compiler")):
        products._sound.cache_clear()
        monkeypatch.setattr(products, "_launch", wrong)
        assert not products._sound(Form(64, 4), mx.bfloat16, Around(), 8) and told in caplog.text
    products._sound.cache_clear()
