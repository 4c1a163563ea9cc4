"""What a step must read and multiply, and how a time compares with it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from tests.tiny import VOCAB, tiny
from treadle.bench import roofline
from treadle.bench.rival import untouched
from treadle.bench.roofline import Roofline, Work
from treadle.bench.shapes import Subject, plain_of, subject_of
from treadle.engine.compiled import Forward


def test_the_slower_of_reading_and_multiplying_is_the_limit() -> None:
    limit = Roofline(copy_gb_s=100.0, tflops=1.0)
    assert limit.share(0.1, 5e9) == pytest.approx(0.5)
    assert limit.share(0.1, 5e9, 0.08e12) == pytest.approx(0.8)
    assert limit.share(0.1, None, 0.08e12) is None


def test_both_speeds_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(roofline.COPIED, "cpu", 2**20)
    monkeypatch.setitem(roofline.SIDE, "cpu", 64)
    roofline.measured.cache_clear()
    found = roofline.measured()
    assert found.copy_gb_s > 0 and found.tflops > 0 and roofline.measured() is found
    assert roofline._copy(2**20) > 0
    roofline.measured.cache_clear()


def subject(model: Any, caps: Any, weight_bytes: int) -> Subject:
    return Subject("x", model, caps, weight_bytes, Forward(model))


def test_an_embedding_that_is_no_output_layer_is_not_read() -> None:
    """Of it a step takes one line; where it is the output layer too, it is read."""
    model, caps = tiny("attention")
    size = model.args.hidden_size
    work = Work.of(subject(model, caps, 100_000), model)
    assert work.weight_bytes == 100_000 - 4 * VOCAB * size
    assert work.head_flops == 2 * VOCAB * size
    tied = subject_of("random:tiny")
    whole = Work.of(tied, plain_of("random:tiny"))
    assert whole.weight_bytes == tied.weight_bytes
    assert whole.head_flops == 2 * 1024 * 64


def test_products_are_counted_by_weights_whether_packed_or_not() -> None:
    dense, packed = (Work.of(subject_of(name), plain_of(name)) for name in ("random:tiny", "random:tiny:4"))
    assert dense.trunk_flops == packed.trunk_flops > 0
    assert dense.step_flops(3, 1) == 3 * dense.trunk_flops + dense.head_flops


def test_rows_are_read_beside_the_weights() -> None:
    one = subject_of("random:tiny")
    work = Work.of(one, plain_of("random:tiny"))
    assert work.step_bytes([]) == one.weight_bytes
    assert work.step_bytes([100.0, 50.0]) == one.weight_bytes + 150 * one.caps.footprint.row_bytes


def test_the_share_of_a_mixture_of_experts_is_not_told() -> None:
    model, caps = tiny("moe")
    assert Work.of(subject(model, caps, 100_000), model).step_bytes([10]) is None


def test_a_rival_runs_mlx_lm_s_own_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was exchanged for our models is put back for that long; a file's own function of the name stays."""
    import mlx_lm.models.base as base
    import mlx_lm.models.qwen3 as file

    def exchanged(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("ours")

    exchanged.__module__ = "treadle.models.attention"
    monkeypatch.setattr(file, "scaled_dot_product_attention", exchanged)

    def own(gate: Any, x: Any) -> Any:
        return nn.silu(gate) * x

    monkeypatch.setattr(file, "swiglu", own)
    plain = plain_of("random:tiny")
    with untouched(plain):
        assert vars(file)["scaled_dot_product_attention"] is vars(base)["scaled_dot_product_attention"]
        assert vars(file)["swiglu"] is own
        mx.eval(plain(mx.array([[1, 2]])))
    assert vars(file)["scaled_dot_product_attention"] is exchanged
