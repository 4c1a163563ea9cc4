"""Models to measure: the known ones with their weights, and full-size shapes with random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map

from treadle.models.capabilities import describe
from treadle.models.tune import tune
from treadle.runtime import device_facts, mlx_lm_module
from treadle.types import Caps

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
SHAPES: dict[str, dict[str, Any]] = {
    "8b": {
        **QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "tiny": {  # for what depends on how many steps there are, not on how long one takes
        **QWEN3,
        "vocab_size": 1024,
        "head_dim": 16,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "instant": {
        **QWEN3,
        "vocab_size": 256,
        "head_dim": 8,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "deep": {  # little to compute, and many layers as real models have: 6 KB of rows per token, twice that in float32
        **QWEN3,
        "vocab_size": 1024,
        "head_dim": 64,
        "hidden_size": 64,
        "num_hidden_layers": 24,
        "intermediate_size": 64,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "wide": {  # little to compute, much to keep: 8 KB of rows per token, twice that in float32
        **QWEN3,
        "vocab_size": 1024,
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "0.6b": {
        **QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class Subject:
    """A model under measurement."""

    name: str
    model: Any
    caps: Caps
    weight_bytes: int


def random_model(shape: str, bits: int | None, tuned: bool = True) -> Subject:
    """One of SHAPES with random bfloat16 weights, quantised in groups of 64 when `bits` is given.

    `tuned`: changed for the backend as `load_model` does; not for comparisons with other engines.
    """
    config = SHAPES[shape]
    module = mlx_lm_module(f"models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda a: (mx.random.normal(a.shape) * 0.02).astype(mx.bfloat16), model.parameters()))
    if bits is not None:
        nn.quantize(model, 64, bits)
    model.eval()
    mx.eval(model.parameters())
    if tuned:
        tune(model, device_facts().backend)
    return _subject(
        f"{shape} {'bf16' if bits is None else f'{bits}-bit'}",
        model,
        describe(model, config["vocab_size"], config["max_position_embeddings"]),
    )


def known_model(name: str) -> Subject:
    """A model by name, path or id, loaded as the server loads it."""
    from treadle.models.load import load_model
    from treadle.models.sources import resolve

    loaded = load_model(resolve(name, None), None)
    return _subject(loaded.name, loaded.model, loaded.caps)


def subject_of(name: str, tuned: bool = True) -> Subject:
    """ "random:8b", "random:8b:4" (bits), or a model's name."""
    if name.startswith("random:"):
        _, shape, *bits = name.split(":")
        return random_model(shape, int(bits[0]) if bits else None, tuned)
    return known_model(name)


def _subject(name: str, model: Any, caps: Caps) -> Subject:
    from mlx.utils import tree_flatten

    return Subject(name, model, caps, sum(a.nbytes for _, a in tree_flatten(model.parameters())))
