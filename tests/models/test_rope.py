"""Tokens may stand anywhere, whatever kind of rotary embedding a model has; or it is said that they may not."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from tests.tiny import built, tiny
from tests.vision.families import CONFIGS
from tests.vision.families import tiny as seeing
from treadle.models.rope import gaps_fault, let_gaps_in
from treadle.types import LayerKind

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {
    "rope_type": "longrope",
    "type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"model_type": "llama"},
    "linear": {"model_type": "llama", "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "llama3": {"model_type": "llama", "rope_scaling": LLAMA3},
    "yarn": {"model_type": "qwen2", "rope_scaling": YARN},
    "longrope": {"model_type": "phi3", "rope_scaling": LONG, "original_max_position_embeddings": 64},
    "with norms of queries and keys": {"model_type": "qwen3"},
    "a part of each head": {"model_type": "glm4", "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_takes_positions_with_gaps(kind: str) -> None:
    model, caps = built(KINDS[kind])
    before = gaps_fault(model, caps)
    let_gaps_in(model)
    let_gaps_in(model)
    assert before is not None
    assert gaps_fault(model, caps) is None


@pytest.mark.parametrize("name", ["moe", "mla"])
def test_experts_and_latent_attention_too(name: str) -> None:
    model, caps = tiny(name)
    let_gaps_in(model)
    assert gaps_fault(model, caps) is None


@pytest.mark.parametrize(("name", "kind"), [("window", "windowed"), ("delta", "state"), ("pair", "state")])
def test_layers_that_need_every_token_are_named(name: str, kind: str) -> None:
    model, caps = tiny(name)
    fault = gaps_fault(model, caps)
    assert fault is not None and kind in fault


def test_learned_positions_are_found_out() -> None:
    """Such models count on from the cache's offset by themselves."""
    sizes = {"n_ctx": 64, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "layer_norm_epsilon": 1e-5}
    model, caps = built({"model_type": "gpt2", **sizes, "num_key_value_heads": 4})
    let_gaps_in(model)
    fault = gaps_fault(model, caps)
    assert fault is not None and "positions cannot have gaps" in fault


@pytest.mark.parametrize("rows", [1, 3])
def test_positions_of_each_token_are_those_of_tokens_alone(rows: int) -> None:
    rope = nn.RoPE(16)
    let_gaps_in(rope)
    x = mx.random.normal((rows, 2, 5, 16))
    places = mx.array(np.random.default_rng(1).integers(0, 1000, (rows, 5)), mx.int32)
    found = rope(x, offset=places)
    for row in range(rows):
        for i in range(5):
            alone = nn.RoPE(16)(x[row : row + 1, :, i : i + 1], offset=int(places[row, i].item()))
            assert mx.allclose(found[row, :, i], alone[0, :, 0], atol=1e-5).item()
    assert mx.allclose(rope(x, offset=7), nn.RoPE(16)(x, offset=7)).item()


@pytest.mark.parametrize("family", CONFIGS)
def test_models_that_see_take_gaps_in_text_where_all_their_layers_see_it_all(family: str) -> None:
    one = seeing(family)
    let_gaps_in(one.model)
    fault = gaps_fault(one.model, one.caps)
    whole = all(kind is LayerKind.ROWS for kind in one.caps.layers)
    assert (fault is None) is whole, fault
