"""The choice of kernels: one that gives what MLX's own operations give is used, and any other one is left out."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from treadle.models import kernels
from treadle.models.blocks import turn_of
from treadle.models.kernels import ADD_NORM, GATED, HEADS, HEADS_INTO, KERNELS, Heads, Kernels, Plain, checked_kernels

SIZE, WIDTH = 32, 48


def heads_of(normed: bool, dtype: Any = mx.float32) -> Heads:
    rope = nn.RoPE(16, base=1e6)
    norms = [mx.random.normal((16,), dtype=dtype, key=mx.random.key(i)) for i in (1, 2)] if normed else [None, None]
    return Heads(4, 2, 16, rope, turn_of(rope), norms[0], norms[1], 1e-6)


def add_norm(stream: Any, branch: Any, weight: Any, eps: float) -> list[Any]:
    return list(Plain().add_norm(stream, branch, weight, eps))


def turned(
    stacked: Any, position: Any, query_norm: Any, key_norm: Any, freqs: Any, settings: dict[str, Any]
) -> list[Any]:
    eps, scale, base = (float(np.int32(settings[name]).view(np.float32)) for name in ("EPS", "SCALE", "PACE"))
    rope = nn.RoPE(16, base=2**base, scale=scale)
    norms = (query_norm, key_norm) if settings["NORM"] else (None, None)
    n = stacked.shape[0] // position.shape[0]
    return list(Plain().heads(stacked, position, n, Heads(4, 2, 16, rope, None, *norms, eps)))


def like(wrong: str = "") -> Callable[[str], Any]:
    """Stands for the compiler: kernels that compute what they should, but for the `wrong` one."""

    def kernel(name: str) -> Any:
        def launch(inputs: list[Any], template: list[tuple[str, Any]], output_shapes: list[Any], **rest: Any) -> Any:
            settings = dict(template)
            if name == ADD_NORM:
                found = add_norm(*inputs, eps=float(np.int32(settings["EPS"]).view(np.float32)))
            elif name == HEADS:
                found = turned(*inputs, settings)
            elif name == HEADS_INTO:
                *told, keys, values, column = inputs
                found = turned(*told, settings)
                mx.eval(keys, values)
                for buffer, own in ((keys, found[1]), (values, found[2])):
                    np.array(buffer, copy=False)[: own.shape[0], :, column.item() : column.item() + own.shape[2]] = own
                found = found[:1]
            else:
                found = [Plain().gated(*inputs)]
            assert [tuple(a.shape) for a in found] == [tuple(shape) for shape in output_shapes]
            assert rest["grid"][0] % rest["threadgroup"][0] == 0 or name == GATED  # which looks where it ends
            return [1.1 * a for a in found] if name == wrong else found

        return launch

    return kernel


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("wrong", ["", *KERNELS])
def test_a_kernel_that_is_wrong_is_left_out(
    wrong: str, normed: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_compiled_heads", lambda settings: partial(kernels._heads, settings))
    monkeypatch.setattr(kernels, "_kernel", like(wrong))
    found = checked_kernels(heads_of(normed, mx.float16), SIZE, WIDTH, mx.float16)
    assert isinstance(found, Kernels)
    assert found.usable == tuple(name for name in KERNELS if name != wrong)
    assert (f"The kernel {wrong} is left out" in caplog.text) is bool(wrong)


def test_a_kernel_that_gives_no_number_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    right = like()
    monkeypatch.setattr(kernels, "_compiled_heads", lambda settings: partial(kernels._heads, settings))
    monkeypatch.setattr(
        kernels,
        "_kernel",
        lambda name: lambda **more: [a * (math.nan if name == GATED else 1) for a in right(name)(**more)],
    )
    found = checked_kernels(heads_of(False, mx.float16), SIZE, WIDTH, mx.float16)
    assert isinstance(found, Kernels) and found.usable == (ADD_NORM, HEADS, HEADS_INTO)


def test_without_a_compiler_all_is_done_by_mlx(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(name: str) -> Any:
        raise RuntimeError(f"no such thing as {name}\nand more")

    monkeypatch.setattr(kernels, "_kernel", failing)
    with caplog.at_level(logging.WARNING):
        assert type(checked_kernels(heads_of(True), SIZE, WIDTH, mx.float32)) is Plain
    assert [record.getMessage() for record in caplog.records] == [
        f"The kernel {name} is left out: no such thing as {name}" for name in KERNELS if name != HEADS_INTO
    ]


def test_what_kernels_were_not_made_for_is_done_by_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Types that differ, and rotary embeddings that numbers do not describe."""

    def never(name: str) -> Any:
        raise AssertionError(name)

    monkeypatch.setattr(kernels, "_kernel", never)
    found = Kernels()
    x = mx.random.normal((2, SIZE)).astype(mx.bfloat16)
    weight = mx.ones((SIZE,))  # float32
    total, normed = found.add_norm(x, x, weight, 1e-5)
    assert normed.dtype == mx.float32 and total.dtype == mx.bfloat16
    ropes = heads_of(False)
    unknown = Heads(4, 2, 16, ropes.rope)
    position, stacked = mx.array([3, 5], mx.int32), mx.random.normal((2, 8 * 16))
    for one, other in zip(
        found.heads(stacked, position, 1, unknown), Plain().heads(stacked, position, 1, ropes), strict=True
    ):
        np.testing.assert_array_equal(np.array(one), np.array(other))
    assert type(checked_kernels(ropes, SIZE, WIDTH, mx.int32)) is Plain
