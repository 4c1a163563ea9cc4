"""Models to measure: the known ones with their weights, and full-size shapes with random weights."""

from __future__ import annotations

import gc
import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from treadle import system
from treadle.engine.compiled import Forward, forward_of
from treadle.errors import LoadError
from treadle.models.capabilities import describe
from treadle.models.placement import DENSE_SHARE, FLOAT32_BYTES
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


GROUP = 64  # values of a quantised weight that share a scale
SPREAD = 0.02  # standard deviation of random weights
LEAST_BITS = 4  # of a file's weights: how much they can grow when they are expanded

Weights = list[tuple[str, Any]]


@dataclass(frozen=True)
class Subject:
    """A model under measurement."""

    name: str
    model: Any
    caps: Caps
    weight_bytes: int
    forward: Forward  # of steps of few tokens, as a server chooses it


def random_model(shape: str, bits: int | None, weights: Weights | None = None) -> Subject:
    """One of SHAPES, changed for the backend as `load_model` does. bfloat16, quantised in groups of 64 with `bits`.

    `weights`: those of `random_weights`; None draws new ones.
    """
    config = SHAPES[shape]
    model = _with(shape, bits, random_weights(shape, bits) if weights is None else weights)
    tune(model, device_facts().backend)
    return _subject(
        f"{shape} {'bf16' if bits is None else f'{bits}-bit'}",
        model,
        describe(model, config["vocab_size"], config["max_position_embeddings"]),
    )


def random_weights(shape: str, bits: int | None) -> Weights:
    """Evaluated one by one, so that little is held twice. Of quantised ones the codes, scales and biases are drawn:
    to quantise random numbers takes minutes in the 8B shape and would say no more about speed.
    """
    drawn = [(name, _drawn(name, like, bits)) for name, like in tree_flatten(_empty(shape, bits).parameters())]
    for _, array in drawn:
        mx.eval(array)
    return drawn


def _drawn(name: str, like: Any, bits: int | None) -> Any:
    if bits is not None and like.dtype == mx.uint32:
        halves = (*like.shape[:-1], 2 * like.shape[-1])  # MLX draws integers as floats, which have 24 bits
        return mx.random.randint(0, 2**16, halves, mx.uint16).view(mx.uint32)
    if bits is not None and name.endswith((".scales", ".biases")):
        last = 2**bits - 1
        scale = SPREAD / math.sqrt((last + 1) ** 2 / 12)  # codes are even over 0..last
        middle = scale if name.endswith(".scales") else -scale * last / 2
        return (middle * mx.random.uniform(0.9, 1.1, like.shape)).astype(mx.bfloat16)
    return (mx.random.normal(like.shape) * SPREAD).astype(mx.bfloat16)


def _empty(shape: str, bits: int | None) -> Any:
    """mlx-lm's model with weights that are not computed."""
    config = SHAPES[shape]
    module = mlx_lm_module(f"models.{config['model_type']}")
    model = module.Model(module.ModelArgs.from_dict(config))
    if bits is not None:
        nn.quantize(model, GROUP, bits)
    model.eval()
    return model


def _with(shape: str, bits: int | None, weights: Weights) -> Any:
    model = _empty(shape, bits)
    model.update(tree_unflatten(weights))
    return model


def known_model(name: str) -> Subject:
    """A model by name, path or id, loaded as the server loads it."""
    from treadle.models.load import load_model
    from treadle.models.sources import resolve

    loaded = load_model(resolve(name, None), None)
    return _subject(loaded.name, loaded.model, loaded.caps)


@cache
def subject_of(name: str) -> Subject:
    """ "random:8b", "random:8b:4" (bits), or a model's name. The same one again, until `forget`."""
    if name.startswith("random:"):
        shape, bits = _shape(name)
        return random_model(shape, bits, _kept(shape, bits))
    return known_model(name)


@cache
def plain_of(name: str) -> Any:
    """The same weights in a model as mlx-lm makes it, for comparisons; the same one again, until `forget`.

    On a CPU weights are expanded to float32 where memory allows: MLX's own packed kernels are slower there.
    """
    if name.startswith("random:"):
        shape, bits = _shape(name)
        return _with(shape, bits, _kept(shape, bits))
    return _known_plain(name)


def forget() -> None:
    """Let the models go that are kept."""
    for kept in (subject_of, plain_of, _kept):
        kept.cache_clear()
    gc.collect()
    mx.clear_cache()


@cache
def _kept(shape: str, bits: int | None) -> Weights:
    return random_weights(shape, bits)


def _shape(name: str) -> tuple[str, int | None]:
    _, shape, *bits = name.split(":")
    if shape not in SHAPES or bits not in ([], ["4"], ["8"]):
        raise LoadError(f"{name!r} is none of random:SHAPE[:4|8], with SHAPE one of {', '.join(SHAPES)}")
    return shape, int(bits[0]) if bits else None


def _known_plain(name: str) -> Any:
    from treadle.models import gguf, gguf_model
    from treadle.models.folder_model import load_folder
    from treadle.models.sources import resolve

    source, backend = resolve(name, None), device_facts().backend
    files = [source.path] if source.path.is_file() else list(source.path.glob("*.safetensors"))
    most = sum(file.stat().st_size for file in files) * 8 // LEAST_BITS * FLOAT32_BYTES
    dense = backend == "cpu" and most <= DENSE_SHARE * system.free_memory()
    if source.kind == "gguf":
        return gguf_model.build(gguf.read(source.path), backend, dense=dense)[0]
    return load_folder(source.path, backend, "dense" if dense else "auto")[0]


def _subject(name: str, model: Any, caps: Caps) -> Subject:
    nbytes = sum(a.nbytes for _, a in tree_flatten(model.parameters()))
    return Subject(name, model, caps, nbytes, forward_of(model, caps, device_facts().backend, "auto"))
