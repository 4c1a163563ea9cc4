"""What a GGUF file calls things becomes mlx-lm's names and a config, or is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.errors import LoadError
from treadle.models.gguf import BLOCK_TYPES, GGUF, Tensor
from treadle.models.gguf_names import FAMILIES, ROPE_FACTORS, family_of, row_order, target_name
from treadle.runtime import mlx_lm_module


def opened(architecture: str = "llama", tensors: dict[str, NDArray[np.float32]] | None = None, **keys: Any) -> GGUF:
    """A file in memory: eight layers of width 64. Dots in keys are written as double underscores."""
    sizes: dict[str, Any] = {
        "block_count": 8,
        "context_length": 131072,
        "embedding_length": 64,
        "feed_forward_length": 128,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": 512,
    }
    sizes |= {key.replace("__", "."): value for key, value in keys.items()}
    metadata = {f"{architecture}.{key}": value for key, value in sizes.items()}
    held = {"token_embd.weight": np.zeros((96, 64), np.float32), **(tensors or {})}
    stored = {name: _tensor(name, values) for name, values in held.items()}
    return GGUF((Path("tiny.gguf"),), {"general.architecture": architecture, **metadata}, stored)


def _tensor(name: str, values: NDArray[np.float32]) -> Tensor:
    return Tensor(name, values.shape, BLOCK_TYPES[0], values.view(np.uint8).reshape(-1, values.shape[-1] * 4))


def test_the_sizes_of_the_file_become_the_config() -> None:
    config = FAMILIES["llama"].config(opened())
    expected = {
        "model_type": "llama",
        "vocab_size": 96,
        "hidden_size": 64,
        "num_hidden_layers": 8,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
    }
    assert {key: config[key] for key in expected} == expected


def test_an_output_matrix_unties_the_embeddings() -> None:
    file = opened(tensors={"output.weight": np.zeros((96, 64), np.float32)})
    assert FAMILIES["llama"].config(file)["tie_word_embeddings"] is False


def test_gemma3_s_windows_and_scales_are_told() -> None:
    config = FAMILIES["gemma3"].config(opened("gemma3", attention__key_length=32, attention__value_length=32))
    assert config["query_pre_attn_scalar"] == 32
    assert (config["sliding_window"], config["sliding_window_pattern"]) == (512, 6)
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1000000.0, 10000.0)
    big = FAMILIES["gemma3"].config(
        opened("gemma3", block_count=62, attention__key_length=32, attention__value_length=32)
    )
    assert big["query_pre_attn_scalar"] == 64 // 4


@pytest.mark.parametrize("architecture", ["mamba2", "gpt2", "phi3"])
def test_an_architecture_that_is_not_known_is_named(architecture: str) -> None:
    with pytest.raises(LoadError, match=f"'{architecture}'.*gemma3, llama, qwen2, qwen3"):
        family_of(opened(architecture))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("logit_scale", 8.0),
        ("final_logit_softcapping", 30.0),
        ("attention.clamp_kqv", 4.0),
    ],
)
def test_settings_that_would_be_ignored_are_refused(key: str, value: float) -> None:
    with pytest.raises(LoadError, match=f"llama.{key}"):
        family_of(opened(**{key.replace(".", "__"): value}))


@pytest.mark.parametrize(
    "keys",
    [
        {"attention__value_length": 8},
        {"rope__dimension_count": 8},
        {"attention__head_count": [4, 2]},
        {"rope__scaling__type": "longrope"},
        {"block_count": None},
    ],
)
def test_shapes_that_do_not_fit_are_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(LoadError):
        FAMILIES["llama"].config(opened(**keys))


@pytest.mark.parametrize(
    "name", ["blk.0.ffn_gate_exps.weight", "blk.x.attn_q.weight", "mm.0.weight", "blk.0.attn_q_norm.weight"]
)
def test_a_tensor_without_a_place_is_refused_by_name(name: str) -> None:
    with pytest.raises(LoadError, match=name):
        target_name(FAMILIES["llama"], name)


def test_names_of_both_kinds_are_translated() -> None:
    family = FAMILIES["gemma3"]
    assert target_name(family, "blk.11.post_ffw_norm.weight") == "model.layers.11.post_feedforward_layernorm.weight"
    assert target_name(family, "token_embd.weight") == "model.embed_tokens.weight"


def test_linear_and_yarn_scaling_are_told() -> None:
    linear = FAMILIES["gemma3"].config(opened("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0))
    assert linear["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 32768, "yarn_beta_fast": 16.0}
    yarn = FAMILIES["qwen2"].config(opened("qwen2", **{f"rope__scaling__{key}": value for key, value in keys.items()}))
    expected = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 16.0,
    }
    assert yarn["rope_scaling"] == expected


def test_llama_3_s_frequency_factors_become_its_scaling() -> None:
    """The factors are computed as the usual converter does, and compared with the frequencies of mlx-lm."""
    base, dim, factor, original = 500000.0, 128, 32.0, 8192
    factors = []
    for frequency in 1.0 / base ** (np.arange(0, dim, 2) / dim):
        length = 2 * np.pi / frequency
        smooth = (original / length - 1.0) / (4.0 - 1.0)
        middle = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1.0 if length < original / 4 else factor if length > original else middle)
    stored = np.array(factors, np.float32)
    keys = {"embedding_length": 512, "rope__freq_base": base}
    scaling = FAMILIES["llama"].config(opened(tensors={ROPE_FACTORS: stored}, **keys))["rope_scaling"]
    rope = mlx_lm_module("models.rope_utils").initialize_rope(dim, base, False, scaling, 131072)
    plain = base ** (np.arange(0, dim, 2) / dim)
    np.testing.assert_allclose(np.array(rope._freqs), plain * stored, rtol=1e-4)


def test_frequency_factors_of_another_kind_are_refused() -> None:
    with pytest.raises(LoadError, match="frequency factors"):
        FAMILIES["llama"].config(opened(tensors={ROPE_FACTORS: np.linspace(1, 9, 8, dtype=np.float32)}))


def test_only_permuted_families_reorder_and_only_queries_and_keys() -> None:
    file = opened()
    queries = _tensor("blk.0.attn_q.weight", np.zeros((64, 64), np.float32))
    assert row_order(FAMILIES["qwen2"], file, queries) is None
    assert row_order(FAMILIES["llama"], file, _tensor("blk.0.attn_v.weight", np.zeros((32, 64), np.float32))) is None
    order = row_order(FAMILIES["llama"], file, queries)
    assert order is not None
    assert order[:4].tolist() == [0, 2, 4, 6]
    assert sorted(order) == list(range(64))
    with pytest.raises(LoadError, match="rows"):
        row_order(FAMILIES["llama"], file, _tensor("blk.0.attn_q.weight", np.zeros((63, 64), np.float32)))
