"""What the cache says it holds is what the device counts, and stays within the limit."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import mlx.core as mx
import pytest

from tests.engine.test_loop import Run
from tests.engine.test_reuse import finish_of
from tests.engine.test_reuse_real import random_ids, request_of
from tests.tiny import CONFIGS, built
from treadle.bench.limit import in_float32, measure
from treadle.bench.shapes import random_model
from treadle.cache.budget import Budget
from treadle.cache.report import cache_report
from treadle.cache.store import Settings, Store
from treadle.config import Config
from treadle.engine.loop import Loop
from treadle.engine.reuse import Reuse
from treadle.models.capabilities import new_layers

SSM = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_ssm": 2048, "mamba_d_state": 64}
DELTA = {
    "linear_num_value_heads": 16,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
REALISTIC: dict[str, dict[str, Any]] = {"delta": DELTA, "mamba": SSM, "pair": SSM}
"""States of the size that real models have: of far smaller ones MLX keeps up to 16 KB of shared buffer per array."""


@pytest.mark.parametrize("name", REALISTIC)
def test_snapshots_of_recurrent_layers_are_counted_as_the_device_does(name: str) -> None:
    model, caps = built({**CONFIGS[name], **REALISTIC[name]})
    store = Store(Settings(Budget(10**10), 10**12), active_memory=lambda: 0)
    run = Run(Loop(model, caps, Config(), partial(new_layers, model, caps), None, Reuse(store, caps, 64)))
    finish_of(run, request_of("warm", random_ids(9), n=2))
    store.clear()
    gc.collect()
    before = mx.get_active_memory()
    for i in range(3):
        finish_of(run, request_of(f"r{i}", random_ids(150 + 10 * i, i), n=3))
        gc.collect()
        held = mx.get_active_memory() - before
        assert abs(cache_report(store).used_bytes - held) <= 0.02 * held
    arrays = [a for n in store.tree.nodes() for c in n.checkpoints for a in c.value.arrays()]  # type: ignore[attr-defined]
    assert sum(a.nbytes >= 256 * 1024 for a in arrays) >= 3 * 2 * 3  # prompts, layers, and three snapshots of each


def test_distinct_prompts_of_several_times_the_limit_stay_under_it() -> None:
    seen: list[tuple[float, float]] = []
    subject = in_float32(random_model("wide", None))
    row = measure(subject, 12, 500, 0.03, lambda active, held: seen.append((active, held)))
    assert row["computed GB"] > 3 * 0.03 and row["evictions"] > 5
    assert len(seen) == 12 and max(held for _, held in seen) > 0.8 * 0.03e9
    assert row["most held GB"] <= 0.03
    for active, held in seen:
        assert abs(active - held) <= 0.02 * active
    assert row["most active GB"] <= 0.03 + 0.04  # and one running prompt with its buffers
