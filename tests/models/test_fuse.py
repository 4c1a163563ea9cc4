"""A model with stacked projections computes what it computed before."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tests.tiny import COMMON, VOCAB
from treadle.models.capabilities import describe
from treadle.models.fuse import fuse_projections
from treadle.models.linear import flatten_rows
from treadle.runtime import mlx_lm_module
from treadle.types import Batching


def model_of(**config: Any) -> Any:
    module = mlx_lm_module(f"models.{config['model_type']}")
    mx.random.seed(3)
    return module.Model(module.ModelArgs.from_dict({**COMMON, **config}))


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama"},
        {"model_type": "qwen2"},
        {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    ],
    ids=["llama", "qwen2 with biases", "llama with biases"],
)
@pytest.mark.parametrize("bits", [4, None], ids=["4 bits", "dense"])
def test_logits_and_abilities_stay_the_same(config: dict[str, Any], bits: int | None) -> None:
    model = model_of(**config)
    if bits is not None:
        nn.quantize(model, 32, bits)
    flatten_rows(model, pad=True)
    few, many, rows = mx.array([[3, 4, 5, 6]]), mx.array([list(range(12))]), mx.array([[i] for i in range(9)])
    before = [np.array(model(ids)) for ids in (few, many, rows)]
    num_values = sum(a.size for _, a in tree_flatten(model.parameters()))
    assert fuse_projections(model) == 8
    for ids, expected in zip((few, many, rows), before, strict=True):
        np.testing.assert_allclose(np.array(model(ids)), expected, atol=1e-4)
    assert sum(a.size for _, a in tree_flatten(model.parameters())) == num_values
    assert describe(model, VOCAB, 512).batching is Batching.RAGGED


def test_projections_of_different_inputs_are_each_their_own() -> None:
    block = nn.Module()
    names = ("q_proj", "k_proj", "v_proj")
    for name, n in zip(names, (32, 64, 32), strict=True):
        block[name] = nn.QuantizedLinear.from_linear(nn.Linear(64, n, bias=False), 32, 4)
    inputs = [mx.random.normal((1, 9, 64)) for _ in range(3)]
    before = [np.array(block[name](x)) for name, x in zip(names, inputs, strict=True)]
    assert fuse_projections(block) == 1
    for name, x, expected in zip(names, inputs, before, strict=True):
        np.testing.assert_allclose(np.array(block[name](x)), expected, atol=1e-5)


def test_layers_of_different_kinds_are_left_alone() -> None:
    block = nn.Module()
    block.gate_proj = nn.Linear(64, 32, bias=False)
    block.up_proj = nn.QuantizedLinear.from_linear(nn.Linear(64, 32, bias=False), 32, 4)
    assert fuse_projections(block) == 0
