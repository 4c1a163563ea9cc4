"""A small model's attention says what matters: computed as the model computes it, and finding what is asked about."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from tests.tiny import VOCAB, built, tiny
from treadle.models.capabilities import new_layers
from treadle.models.packed_attention import install
from treadle.sparse.score import STEPS, importance, let_watch, watched
from treadle.types import EXACT

PROMPT = np.random.default_rng(4).integers(1, VOCAB, 40).tolist()


def read(model: Any, caps: Any, ids: list[int]) -> Any:
    layers = new_layers(model, caps, EXACT)
    layers.begin([len(ids)])
    model(mx.array([ids]), cache=layers.caches)
    layers.end()
    return layers


@pytest.mark.parametrize("name", ["attention", "window", "moe", "delta", "mamba"])
def test_scores_are_the_attention_of_the_steps_that_follow(name: str) -> None:
    model, caps = tiny(name)
    assert let_watch(model) >= 1
    found = importance(model, read(model, caps, PROMPT[:-1]), PROMPT[-1])
    assert found.shape == (len(PROMPT),) and np.isfinite(found).all()
    assert (found >= 0).all() and (found <= 1).all()
    assert found.sum() > 0.2  # the largest of heads that each spread 1 over prompt and reply


def test_one_layer_by_hand() -> None:
    """Queries and keys with their positions and norms, as a plain computation over the whole text has them."""
    model, caps = built({"model_type": "qwen3", "num_hidden_layers": 1})
    let_watch(model)
    layers = read(model, caps, PROMPT[:-1])
    found = importance(model, layers, PROMPT[-1])
    text = list(PROMPT)
    total = np.zeros(len(PROMPT))
    for _ in range(STEPS):
        layer = model.model.layers[0]
        hidden = layer.input_layernorm(model.model.embed_tokens(mx.array([text])))
        attention, n = layer.self_attn, len(text)
        queries = attention.q_norm(attention.q_proj(hidden).reshape(1, n, 4, 8)).swapaxes(1, 2)
        keys = attention.k_norm(attention.k_proj(hidden).reshape(1, n, 2, 8)).swapaxes(1, 2)
        queries, keys = attention.rope(queries), attention.rope(keys)
        scores = queries[:, :, -1:] @ mx.repeat(keys, 2, axis=1).swapaxes(-1, -2) * attention.scale
        weights = np.array(mx.softmax(scores, axis=-1))[0, :, 0]
        total += weights.max(axis=0)[: len(PROMPT)]
        text.append(int(mx.argmax(model(mx.array([text]))[0, -1]).item()))
    assert np.allclose(found, total / STEPS, atol=1e-4)


def test_nobody_is_watched_outside() -> None:
    model, caps = tiny("attention")
    let_watch(model)
    with watched() as seen:
        read(model, caps, PROMPT[:5])
    assert len(seen) == 4
    read(model, caps, PROMPT[:5])
    assert len(seen) == 4


def test_models_of_one_file_that_come_and_go_are_watched_once() -> None:
    """What packs rows exchanges the same function, at every load."""
    model, caps = tiny("attention")
    for _ in range(3):
        install(model)
        assert let_watch(model) >= 1
    with watched() as seen:
        read(model, caps, PROMPT[:5])
    assert len(seen) == 4


def test_a_model_that_is_not_watched_tells_nothing() -> None:
    model, caps = tiny("attention")
    with pytest.raises(ValueError, match="no layer"):
        importance(lambda ids, cache: mx.zeros((1, 1, VOCAB)), read(model, caps, PROMPT[:-1]), PROMPT[-1])


def test_latent_attention_counts_the_part_with_positions() -> None:
    """deepseek's files hand that part over as a mask; without it another text would score the same at other places."""
    model, caps = tiny("mla")
    let_watch(model)
    layers = read(model, caps, PROMPT[:-1])
    before = layers.lengths[0]
    layers.begin([1])
    with watched() as asked:
        model(mx.array([[PROMPT[-1]]]), cache=layers.caches)
    layers.end()
    assert len(asked) == 4 and all(isinstance(one[3], mx.array) for one in asked)
    layers.rewind(0, layers.lengths[0] - before)
    found = importance(model, layers, PROMPT[-1])
    assert found.shape == (len(PROMPT),) and np.isfinite(found).all() and found.sum() > 0.2
