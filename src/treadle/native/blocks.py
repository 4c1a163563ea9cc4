"""Decoder layers of the usual kind as two operations around their attention. CPU backend; engine thread only.

One token takes a layer some thirty operations of MLX, which cost more than they compute. Here it is the cache, the
attention that the model file would call (whoever exchanged it), and one operation before and one behind. Everything
else about the layer stays: weights, names, and what it does where it is called in another way.
"""

from __future__ import annotations

import logging
import sys
from functools import lru_cache
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from treadle.models.rounding import distance, tolerance
from treadle.native import build
from treadle.runtime import mlx_lm_module

log = logging.getLogger(__name__)

# Model files whose layers norm, attend, add, norm, gate and add; each is compared before it is exchanged.
FAMILIES = tuple(f"mlx_lm.models.{name}" for name in ("llama", "qwen2", "qwen3", "mimo", "seed_oss", "ernie4_5"))
LAYERS = ("TransformerBlock", "DecoderLayer")
FREQS = "Llama3RoPE"  # a rotary embedding that is nothing but frequencies
ATTENTION = "scaled_dot_product_attention"
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
COMPARED = (5, 1)  # tokens of the steps that are compared

kernels: Any = build.kernels()
_position: tuple[int, Any] = (0, mx.array(0, mx.int32))


def exchange(model: Any, suits: Any) -> int:
    """Exchange the layers of `model` that are of the kind, if they compute the same; returns how many.

    `suits` says of a product or norm whether the kernels are written for it.
    """
    inner: Any = getattr(model, "model", None)
    if type(inner).__module__ not in FAMILIES:
        return 0
    mx.eval(inner.parameters())
    found = [(layer, made) for layer in inner.layers if (made := _block(layer, suits)) is not None]
    for layer, made in found:
        layer.native = made
    if found and (fault := _fault(found[0][0])) is not None:
        log.warning("Layers of %s are computed as they are: %s.", type(inner).__module__, fault)
        return 0
    for layer, _ in found:
        kind: Any = type(layer)
        layer.__class__ = _exchanged(kind)
    return len(found)


@lru_cache(maxsize=16)
def _exchanged(kind: Any) -> Any:
    file = vars(sys.modules[kind.__module__])

    def call(self: Any, x: Any, mask: Any = None, cache: Any = None) -> Any:
        if cache is None or x.dtype != mx.float32:
            return kind.__call__(self, x, mask, cache)
        native = self.native
        queries, keys, values = native.ask(x, _positions(cache.offset))
        keys, values = cache.update_and_fetch(keys, values)
        scale = self.self_attn.scale
        attended = file[ATTENTION](queries, keys, values, cache=cache, scale=scale, mask=mask)
        return native.rest(x, attended)

    return type(f"Native{kind.__name__}", (kind,), {"__call__": call, "__module__": kind.__module__})


def _positions(offset: Any) -> Any:
    """As an array; all layers of a step have the same."""
    global _position
    if isinstance(offset, mx.array):
        return offset
    if offset != _position[0]:
        _position = (offset, mx.array(offset, mx.int32))
    return _position[1]


def _block(layer: Any, suits: Any) -> Any:
    """None for a layer that is made of other things than those known here."""
    if type(layer).__module__ not in FAMILIES or type(layer).__name__ not in LAYERS:
        return None
    attention, mlp = layer.self_attn, layer.mlp
    members = [owner.get(name) for owner, names in zip((attention, mlp), PRODUCTS, strict=True) for name in names]
    norms = [layer.get("input_layernorm"), layer.get("post_attention_layernorm")]
    head_norms = [norm for name in ("q_norm", "k_norm") if (norm := attention.get(name)) is not None]
    turn = _turn(attention.get("rope"))
    if turn is None or any(one is None or not suits(one) for one in (*members, *norms, *head_norms)):
        return None
    every: tuple[Any, ...] = (norms, head_norms) if head_norms else (norms,)
    if any(type(norm) is not nn.RMSNorm or norm.eps != pair[0].eps for pair in every for norm in pair):
        return None
    return kernels.Layer(
        weights=[[m[key] for key in ("weight", "scales", "biases", "bias") if key in m] for m in members],
        groups=[getattr(m, "group_size", 0) for m in members],
        bits=[getattr(m, "bits", 0) for m in members],
        biased=["bias" in m for m in members],
        norms=[norm["weight"] for norm in norms],
        head_norms=[norm["weight"] for norm in head_norms],
        eps=norms[0].eps,
        head_eps=head_norms[0].eps if head_norms else 0.0,
        heads=attention.n_heads,
        shared=attention.n_kv_heads,
        **turn,
    )


def _turn(rope: Any) -> dict[str, Any] | None:
    if type(rope) is nn.RoPE:
        return {"dims": rope.dims, "traditional": rope.traditional, "base": rope.base, "scale": rope.scale}
    if type(rope).__name__ == FREQS:
        freqs = rope["_freqs"]
        mx.eval(freqs)
        return {"dims": rope.dims, "traditional": rope.traditional, "base": 0.0, "scale": 1.0, "freqs": freqs}
    return None


def _fault(layer: Any) -> str | None:
    """By what a layer differs from itself when exchanged, in a step of some tokens and one of one token."""
    size = layer.input_layernorm.weight.shape[0]
    kind: Any = type(layer)

    def run() -> Any:
        cache = mlx_lm_module("models.cache").KVCache()
        steps = []
        for n in COMPARED:
            hidden = 0.1 * mx.random.normal((1, n, size), key=mx.random.key(n))
            steps.append(layer(hidden, "causal" if n > 1 else None, cache))
        return np.array(mx.concatenate(steps, axis=1))

    wanted = run()
    layer.__class__ = _exchanged(kind)
    try:
        off = distance(wanted, run())
    except (RuntimeError, ValueError, TypeError) as error:  # of a third party's part
        return f"{type(error).__name__}: {error}"
    finally:
        layer.__class__ = kind
    return None if off <= tolerance(mx.float32) else f"they would differ by {off:.2g} of the spread"
