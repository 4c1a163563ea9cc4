"""What the families of GGUF files call things, and what mlx-lm calls them. A new family is one more entry.

Only NumPy and facts about formats; no MLX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.errors import LoadError
from treadle.models.gguf import GGUF, Tensor

Config = dict[str, Any]

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
PRE_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
SANDWICH_NORMS = {
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ROPE_FACTORS = "rope_freqs.weight"  # Llama 3's frequency factors; they become `rope_scaling`
# Llama 3.1 to 3.3: (low_freq_factor, high_freq_factor, original_max_position_embeddings).
LLAMA3_ROPE = (1.0, 4.0, 8192)
GEMMA3_27B_LAYERS = 62
# Settings that change what a model computes and that mlx-lm's families have no place for.
UNSUPPORTED = (
    "expert_count",
    "logit_scale",
    "residual_scale",
    "embedding_scale",
    "attention.scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "rope.scaling.attn_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_log_multiplier",
)


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture: `layer` maps the names inside `blk.N.`, `config` writes a Hugging Face config."""

    layer: Mapping[str, str]
    config: Callable[[GGUF], Config]
    permuted: bool = False  # q and k rows are stored in the order of interleaved rotary pairs
    norm_offset: float = 0.0  # what the file adds to every norm weight


def family_of(gguf: GGUF) -> Family:
    """
    Raises:
        LoadError: the architecture, or a variant of it, is not supported.
    """
    family = FAMILIES.get(gguf.architecture)
    if family is None:
        known = ", ".join(sorted(FAMILIES))
        raise LoadError(f"GGUF files of architecture {gguf.architecture!r} are not supported (only {known}).")
    for key in UNSUPPORTED:
        if gguf.hyper(key) not in (None, 0, 1):
            raise LoadError(f"GGUF files with {gguf.architecture}.{key} = {gguf.hyper(key)!r} are not supported.")
    return family


def target_name(family: Family, name: str) -> str:
    """mlx-lm's name of a stored tensor, `model.layers.0.mlp.up_proj.weight` for `blk.0.ffn_up.weight`.

    Raises:
        LoadError: the family has no such tensor.
    """
    stem, _, kind = name.rpartition(".")
    if stem in OUTER:
        return f"{OUTER[stem]}.{kind}"
    block, _, part = stem.partition(".")
    number, _, part = part.partition(".")
    if block == "blk" and number.isdecimal() and part in family.layer:
        return f"model.layers.{int(number)}.{family.layer[part]}.{kind}"
    raise LoadError(f"Tensor {name} is not known for this architecture, so the model cannot be loaded as it is.")


def row_order(family: Family, gguf: GGUF, tensor: Tensor) -> NDArray[np.intp] | None:
    """For stored rows that are permuted: the index of the stored row that each of mlx-lm's rows comes from.

    The conversion to GGUF takes each head's rows from halves `[2, dim / 2]` to pairs `[dim / 2, 2]`.
    """
    part = tensor.name.split(".")[-2]
    if not family.permuted or part not in ("attn_q", "attn_k"):
        return None
    heads = gguf.size("attention.head_count") if part == "attn_q" else _num_kv_heads(gguf)
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise LoadError(f"Tensor {tensor.name} has {rows} rows, which {heads} heads cannot share.")
    return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()


def _num_kv_heads(gguf: GGUF) -> int:
    if gguf.hyper("attention.head_count_kv") is None:
        return gguf.size("attention.head_count")
    return gguf.size("attention.head_count_kv")


def _head_dim(gguf: GGUF) -> int:
    """
    Raises:
        LoadError: keys and values differ, or only part of a head is rotated.
    """
    plain = gguf.size("embedding_length") // gguf.size("attention.head_count")
    dim = int(gguf.hyper("attention.key_length", plain))
    if int(gguf.hyper("attention.value_length", dim)) != dim:
        raise LoadError("GGUF files whose keys and values differ in size are not supported.")
    if int(gguf.hyper("rope.dimension_count", dim)) != dim:
        raise LoadError("GGUF files that rotate only a part of each head are not supported.")
    return dim


def _common(gguf: GGUF, model_type: str, rope_theta: float) -> Config:
    return {
        "model_type": model_type,
        "vocab_size": gguf.tensor("token_embd.weight").shape[0],
        "hidden_size": gguf.size("embedding_length"),
        "num_hidden_layers": gguf.size("block_count"),
        "intermediate_size": gguf.size("feed_forward_length"),
        "num_attention_heads": gguf.size("attention.head_count"),
        "num_key_value_heads": _num_kv_heads(gguf),
        "head_dim": _head_dim(gguf),
        "rms_norm_eps": gguf.require(f"{gguf.architecture}.attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": gguf.size("context_length"),
        "rope_theta": gguf.hyper("rope.freq_base", rope_theta),
        "rope_scaling": _rope_scaling(gguf),
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
    }


def _rope_scaling(gguf: GGUF) -> Config | None:
    """
    Raises:
        LoadError: a kind of scaling that mlx-lm cannot be told from what the file says.
    """
    if ROPE_FACTORS in gguf.tensors:
        return _llama3_scaling(gguf)
    kind = gguf.hyper("rope.scaling.type", "none")
    factor = float(gguf.hyper("rope.scaling.factor", gguf.hyper("rope.scale_linear", 1.0)))
    if kind == "linear" or (kind == "none" and gguf.hyper("rope.scale_linear") is not None):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = gguf.size("rope.scaling.original_context_length")
        betas = {name: gguf.hyper(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
        given = {name: value for name, value in betas.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **given}
    if kind != "none":
        raise LoadError(f"GGUF files with RoPE scaling {kind!r} are not supported.")
    return None


def _llama3_scaling(gguf: GGUF) -> Config:
    """Llama 3's scaling from the factors it leads to; the file stores those and not the settings.

    Raises:
        LoadError: the factors are not those of Llama 3.1 to 3.3.
    """
    stored = gguf.tensors[ROPE_FACTORS]
    if stored.type.name != "F32":
        raise LoadError(f"Tensor {ROPE_FACTORS} has type {stored.type.name}, not F32.")
    factors = stored.raw.view("<f4").ravel()
    low, high, original = LLAMA3_ROPE
    factor = float(factors.max())
    base = float(gguf.hyper("rope.freq_base", 10000.0))
    wavelengths = 2 * np.pi * base ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    if factor < 1 or not np.allclose(factors, 1 / ((1 - smooth) / factor + smooth), rtol=1e-3):
        raise LoadError(f"The frequency factors in {ROPE_FACTORS} are not those of Llama 3, so they cannot be used.")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama(gguf: GGUF) -> Config:
    return {
        **_common(gguf, "llama", 10000.0),
        "attention_bias": "blk.0.attn_q.bias" in gguf.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in gguf.tensors,
    }


def _qwen2(gguf: GGUF) -> Config:
    config = _common(gguf, "qwen2", 1000000.0)
    if config["head_dim"] * config["num_attention_heads"] != config["hidden_size"]:
        raise LoadError("GGUF files of qwen2 with a head size of their own are not supported.")
    return config


def _qwen3(gguf: GGUF) -> Config:
    return _common(gguf, "qwen3", 1000000.0)


def _gemma3(gguf: GGUF) -> Config:
    config = _common(gguf, "gemma3_text", 1000000.0)
    big = config["num_hidden_layers"] == GEMMA3_27B_LAYERS  # the one size whose queries are scaled otherwise
    scalar = config["hidden_size"] // config["num_attention_heads"] if big else config["head_dim"]
    return {
        **config,
        "rope_local_base_freq": gguf.hyper("rope.freq_base_swa", 10000.0),
        "query_pre_attn_scalar": scalar,
        "sliding_window": gguf.size("attention.sliding_window"),
        "sliding_window_pattern": _window_pattern(gguf),
    }


def _window_pattern(gguf: GGUF) -> int:
    """Every how many layers one attends to everything."""
    pattern = gguf.hyper("attention.sliding_window_pattern", 6)
    if not isinstance(pattern, int) or pattern < 1:
        raise LoadError("GGUF files of gemma3 with a list as sliding window pattern are not supported.")
    return pattern


FAMILIES = {
    "llama": Family({**ATTENTION, **MLP, **PRE_NORMS}, _llama, permuted=True),
    "qwen2": Family({**ATTENTION, **MLP, **PRE_NORMS}, _qwen2),
    "qwen3": Family({**ATTENTION, **MLP, **PRE_NORMS, **QK_NORMS}, _qwen3),
    "gemma3": Family({**ATTENTION, **MLP, **SANDWICH_NORMS, **QK_NORMS}, _gemma3, norm_offset=1.0),
}
