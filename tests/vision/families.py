"""Tiny seeded models of every family that sees, with their tokenizers and the readers of their pictures."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from treadle.models.capabilities import describe
from treadle.models.vlm import Seeing, image_id
from treadle.types import Caps, Ids, Span
from treadle.vision.families import FAMILIES
from treadle.vision.reader import Limits, Reader, Shown
from treadle.vision.spans import find_spans

SPECIALS = (
    "<|end|>", "<|im_start|>", "<image>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>",
    "<start_of_image>", "<end_of_image>", "<fake_token_around_image>", "<global-img>", "[IMG_BREAK]", "[IMG_END]",
    *(f"<row_{i}_col_{j}>" for i in range(1, 5) for j in range(1, 5)),
)  # fmt: skip
IMAGE = SPECIALS.index("<image>")
VOCAB = 288
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}MARKER{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "model_type": "tiny", "hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": VOCAB,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False,
}  # fmt: skip
SIGLIP = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "num_attention_heads": 2, "patch_size": 8,
    "num_hidden_layers": 2, "intermediate_size": 24, "image_size": 32, "num_channels": 3,
}  # fmt: skip
MROPE = {"type": "mrope", "rope_type": "default", "mrope_section": [1, 1, 2]}
PIXTRAL = {
    "model_type": "pixtral", "hidden_size": 16, "head_dim": 8, "num_attention_heads": 2, "num_hidden_layers": 2,
    "intermediate_size": 24, "image_size": 64, "patch_size": 8,
}  # fmt: skip
QWEN = {"image_token_id": IMAGE, "video_token_id": 5, "vision_start_token_id": 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": QWEN
    | {
        "text_config": TEXT | {"rope_scaling": MROPE},
        "vision_config": {
            "model_type": "qwen2_vl", "depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2,
            "patch_size": 4, "spatial_patch_size": 4, "mlp_ratio": 2,
        },
    },
    "qwen2_5_vl": QWEN
    | {
        "text_config": TEXT | {"rope_scaling": MROPE},
        "vision_config": {
            "model_type": "qwen2_5_vl", "depth": 2, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2,
            "intermediate_size": 24, "patch_size": 4, "spatial_patch_size": 4, "window_size": 16,
            "fullatt_block_indexes": [1],
        },
    },
    "qwen3_vl": QWEN
    | {
        "text_config": TEXT | {"rope_scaling": MROPE | {"mrope_interleaved": True}, "head_dim": 8},
        "vision_config": {
            "model_type": "qwen3_vl", "depth": 3, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2,
            "intermediate_size": 24, "patch_size": 4, "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
    },
    "gemma3": {
        "text_config": TEXT
        | {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 24, "sliding_window_pattern": 2,
           "mm_tokens_per_image": 4},
        "vision_config": SIGLIP,
        "image_token_index": IMAGE,
        "hidden_size": 32,
        "mm_tokens_per_image": 4,
        "pad_token_id": 0,
    },
    "idefics3": {"text_config": TEXT, "vision_config": SIGLIP | {"model_type": "idefics3"}, "image_token_id": IMAGE,
                 "scale_factor": 2},
    "smolvlm": {"text_config": TEXT, "vision_config": SIGLIP, "image_token_id": IMAGE, "scale_factor": 2},
    "llava": {
        "text_config": TEXT | {"model_type": "llama"},
        "vision_config": SIGLIP | {"model_type": "clip_vision_model", "projection_dim": 16},
        "image_token_index": IMAGE,
    },
    "pixtral": {"text_config": TEXT | {"model_type": "mistral", "head_dim": 8}, "vision_config": PIXTRAL,
                "image_token_index": IMAGE},
    "mistral3": {"text_config": TEXT | {"model_type": "mistral", "head_dim": 8}, "vision_config": PIXTRAL,
                 "image_token_index": IMAGE, "spatial_merge_size": 2},
}  # fmt: skip
TILED = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
PATCHED = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2,
           "size": {"shortest_edge": 64, "longest_edge": 1024}}  # fmt: skip
SETTINGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": PATCHED,
    "qwen2_5_vl": PATCHED,
    "qwen3_vl": PATCHED,
    "gemma3": {"size": {"height": 32, "width": 32}},
    "idefics3": TILED,
    "smolvlm": TILED,
    "llava": {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
    "pixtral": {"size": {"longest_edge": 48}, "patch_size": 8},
    "mistral3": {"size": {"longest_edge": 48}, "patch_size": 8},
}


def config_of(family: str) -> dict[str, Any]:
    return {"model_type": family, "vocab_size": VOCAB, **CONFIGS[family]}


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes and the special tokens of all families."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({token: i for i, token in enumerate([*SPECIALS, *alphabet])}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    made.chat_template = TEMPLATE.replace("MARKER", "<image>")
    return made


@dataclass(frozen=True)
class Tiny:
    family: str
    model: Seeing
    caps: Caps
    reader: Reader

    def prompt(self, *parts: str | Shown) -> tuple[Ids, tuple[Span, ...]]:
        """Ids of texts and pictures one after the other."""
        before, after = self.reader.family.around
        text = "".join(part if isinstance(part, str) else before + part.text + after for part in parts)
        ids = np.array(tokenizer().encode(text, add_special_tokens=False), np.int64)
        pictures = [part.picture for part in parts if isinstance(part, Shown)]
        return ids, find_spans(ids, IMAGE, pictures, self.reader.family.whole)


def whole_model(family: str) -> Any:
    """mlx-vlm's own model with random weights that depend on the names of the parameters alone."""
    arch = importlib.import_module(f"mlx_vlm.models.{family}")
    config = config_of(family)
    parts = {name: getattr(arch, kind).from_dict(dict(config[name])) for name, kind in
             (("text_config", "TextConfig"), ("vision_config", "VisionConfig"))}  # fmt: skip
    rest = {key: value for key, value in config.items() if key not in parts}
    known = arch.ModelConfig.__dataclass_fields__
    whole = arch.Model(arch.ModelConfig(**parts, **{k: v for k, v in rest.items() if k in known}))
    made = []
    for number, (name, array) in enumerate(sorted(tree_flatten(whole.parameters()))):
        noise = mx.random.normal(array.shape, key=mx.random.key(number)) * 0.25
        norm = array.ndim == 1 and "weight" in name
        made.append((name, (1 + 0.1 * noise if norm else noise).astype(mx.float32)))
    whole.update(tree_unflatten(made))
    mx.eval(whole.parameters())
    return whole


@cache
def tiny(family: str) -> Tiny:
    model = Seeing(whole_model(family), config_of(family))
    caps = describe(model, VOCAB, 512)
    config = config_of(family)
    assert image_id(config) == IMAGE
    return Tiny(family, model, caps, Reader(FAMILIES[family], SETTINGS[family], config, "<image>", IMAGE, Limits()))


@cache
def photo(seed: int, width: int = 40, height: int = 28) -> Any:
    """A picture with large patches of colour."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 255, (4, 5, 3), dtype=np.uint8)).resize((width, height))


def shown(tiny: Tiny, seed: int, **size: int) -> Shown:
    return tiny.reader.show(photo(seed, **size))


def copied(picture: Shown) -> Shown:
    """The same picture, decoded once more."""
    return replace(picture, picture=replace(picture.picture))
