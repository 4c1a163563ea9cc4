"""Tiny seeded models written twice: as a GGUF file the way the usual converter does, and as a folder.

The names come from the `gguf` package's own tables, so they are independent of ours.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from mlx.utils import tree_flatten
from numpy.typing import NDArray
from transformers.convert_slow_tokenizer import bytes_to_unicode

from treadle.models import gguf as reader
from treadle.models.architectures import model_classes
from treadle.models.gguf_tokenizer import load_tokenizer

Array = NDArray[np.float32]
TypeOf = Callable[[str], GGMLQuantizationType]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
BYTES = list(bytes_to_unicode().values())
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|end|>"]
MERGES = ["Ġ t", "h e", "Ġt he", "i n", "1 2", "Ġ Ġ"]
TOKENS = [*SPECIAL, *BYTES, *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def float32(name: str) -> GGMLQuantizationType:
    return GGMLQuantizationType.F32


def matrices(kind: GGMLQuantizationType) -> TypeOf:
    return lambda name: GGMLQuantizationType.F32 if "norm" in name or name.endswith(".bias") else kind


@dataclass
class Tiny:
    """A config in Hugging Face style and weights by mlx-lm's names."""

    family: str
    config: dict[str, Any]
    weights: dict[str, Array]
    extra: Callable[[GGUFWriter], None] = field(default=lambda writer: None)


def make(family: str, **changes: Any) -> Tiny:
    """A random model: norms and biases too are random, so that a wrong one shows."""
    config: dict[str, Any] = {
        "model_type": "gemma3_text" if family == "gemma3" else family,
        "vocab_size": len(TOKENS),
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 7 if family == "gemma3" else 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32 if family in ("qwen3", "gemma3") else 16,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": family in ("gemma3", "qwen2"),
    }
    if family == "gemma3":
        config |= {"sliding_window": 8, "rope_local_base_freq": 700.0, "query_pre_attn_scalar": 32}
    config |= changes
    model_class, args_class = model_classes(config)
    model = model_class(args_class.from_dict(config))
    rng = np.random.default_rng(3)
    weights = {}
    for name, value in tree_flatten(model.parameters()):
        if config["tie_word_embeddings"] and name.startswith("lm_head"):
            continue
        centre = 1.0 if "norm" in name and family != "gemma3" else 0.0
        weights[name] = (centre + 0.2 * rng.standard_normal(value.shape)).astype(np.float32)
    return Tiny(family, config, weights)


def _permuted(weight: Array, heads: int) -> Array:
    rest = weight.shape[1:]
    return weight.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(weight.shape)


def stored(tiny: Tiny) -> dict[str, Array]:
    """The weights by GGUF names and as GGUF files hold them."""
    config = tiny.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[tiny.family], config["num_hidden_layers"])
    found: dict[str, Array] = {}
    for name, value in tiny.weights.items():
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
        if tiny.family == "llama" and heads is not None:
            value = _permuted(value, config[heads])
        if tiny.family == "gemma3" and name.endswith("norm.weight"):
            value = value + np.float32(1)
        stem, _, kind = name.rpartition(".")
        target = names.get_name(stem)
        assert target is not None, name
        found[f"{target}.{kind}"] = value
    return found


def write_gguf(path: Path, tiny: Tiny, type_of: TypeOf = float32, **options: Any) -> Path:
    """`options` go to the writer: `split_max_tensors`, `endianess`."""
    writer = GGUFWriter(path, tiny.family, **options)
    config = tiny.config
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    if tiny.family == "gemma3":
        writer.add_sliding_window(config["sliding_window"])
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    add_tokenizer(writer)
    tiny.extra(writer)
    for name, value in stored(tiny).items():
        kind = type_of(name)
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_pad_token_id(TOKENS.index("<|endoftext|>"))
    writer.add_chat_template(TEMPLATE)


def write_folder(folder: Path, tiny: Tiny, tokenizer_from: Path, dtype: Any = mx.float32) -> Path:
    """The same model in Hugging Face layout, with the tokenizer of a GGUF file."""
    folder.mkdir(exist_ok=True)
    arrays = {name: mx.array(value).astype(dtype) for name, value in tiny.weights.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), arrays, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps({**tiny.config, "eos_token_id": 0}))
    load_tokenizer(reader.read(tokenizer_from)).save_pretrained(str(folder))
    return folder
