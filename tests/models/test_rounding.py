"""What is taken for rounding: a share of the spread, or what a model's own caches give for other pieces."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from treadle.bench.shapes import random_model
from treadle.models import capabilities, rounding
from treadle.models.capabilities import describe
from treadle.types import Batching


def test_a_model_may_differ_by_what_it_differs_from_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounding, "own_distance", lambda model: 0.05)
    assert rounding.within(0.07, mx.bfloat16, None) and rounding.within(0.09, mx.bfloat16, None)
    assert not rounding.within(0.11, mx.bfloat16, None) and not rounding.within(np.nan, mx.bfloat16, None)
    monkeypatch.setattr(rounding, "own_distance", lambda model: 9.0)
    assert not rounding.within(0.3, mx.bfloat16, None), "whatever the model does by itself"
    monkeypatch.setattr(rounding, "own_distance", lambda model: 0.05)
    assert not rounding.within(0.11, mx.float32, None) and rounding.within(0.04, mx.float32, None)


def test_a_model_lies_close_to_itself() -> None:
    model = random_model("tiny", None).model
    assert rounding.own_distance(model) < rounding.tolerance(mx.bfloat16)


def test_rows_that_differ_by_rounding_decode_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a large model in 4 bits, where other products for other numbers of rows add up."""
    model = random_model("tiny", None).model
    plain: Any = capabilities._decoded

    def off(*given: Any) -> list[Any]:
        found: list[Any] = plain(*given)
        shifted = [one.logits + 0.1 * one.logits.std() for one in found]
        return [capabilities._Logits(logits, one.dtype) for logits, one in zip(shifted, found, strict=True)]

    monkeypatch.setattr(capabilities, "_decoded", off)
    assert describe(model, 1024, 4096).batching is Batching.NEVER
    monkeypatch.setattr(rounding, "own_distance", lambda model: 0.06)
    assert describe(model, 1024, 4096).batching is Batching.RAGGED
