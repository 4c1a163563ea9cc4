"""Requests that need 130 % of the memory all get their text, some at 4 bits, and the limit holds throughout."""

from __future__ import annotations

import mlx.core as mx
import pytest

from treadle.bench import pressure, shapes
from treadle.bench.limit import in_float32
from treadle.cache import geometry, recent_columns


def test_a_run_that_needs_more_than_the_limit_finishes_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """At small scale: buffers grow in small steps, as they do beside the rows of long contexts."""
    monkeypatch.setattr(geometry, "STEP", 32)
    monkeypatch.setattr(recent_columns, "BLOCK", 16)
    monkeypatch.setattr(recent_columns, "SPARE", 16)
    monkeypatch.setattr(pressure, "SAMPLE_S", 0.005)
    monkeypatch.setitem(shapes.SHAPES, "small", shapes.SHAPES["deep"] | {"num_hidden_layers": 12})
    mx.random.seed(0)
    found = pressure.measure(in_float32(shapes.random_model("small", None)), 6, 512, 160, 1.3)
    assert found["finished"] == found["whole"] == 6 and not found["cut short"]
    gave_way = found["packed"], found["held"], found["preempted"]  # which of them, depends on when memory is read
    assert sum(gave_way) >= 1 and found["at 4 bits"] >= min(found["packed"], 1)
    assert found["refused"] == 1
    assert found["looks"] > 20 and 0.5 < found["most sampled of it"] < 1 and found["peak of it"] < 1
