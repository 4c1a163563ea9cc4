"""Tiny seeing models as folders on disk, as they are downloaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from tests.vision.families import SETTINGS, TEXT, config_of, tokenizer, whole_model

FLAT = ("qwen2_vl", "qwen2_5_vl")  # families whose files have the text model's settings at the top


def nest(path: Path) -> Path:
    """The folder of a `FLAT` family as newer transformers write it."""
    config = json.loads((path / "config.json").read_text())
    family, rope = config["model_type"], config.pop("rope_scaling")
    text = {name: config.pop(name) for name in TEXT if name in config} | {"model_type": f"{family}_text"}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": rope["mrope_section"],
                               "rope_theta": text.pop("rope_theta")}  # fmt: skip
    config |= {"model_type": family, "text_config": text}
    config["vision_config"]["model_type"] = f"{family}_vision"
    (path / "config.json").write_text(json.dumps(config))
    old = {"vision_tower.": "model.visual.", "language_model.model.": "model.language_model.", "language_model.": ""}
    weights = {}
    for name, array in mx.load(str(path / "model.safetensors")).items():
        prefix = next(prefix for prefix in old if name.startswith(prefix))
        weights[old[prefix] + name.removeprefix(prefix)] = array
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "pt"})
    return path


def write_folder(path: Path, family: str, *, bits: int | None = None, **config: Any) -> Path:
    """A folder of `family` with the weights of `families.tiny`; the language model's quantised to `bits`."""
    path.mkdir(parents=True, exist_ok=True)
    whole = whole_model(family)
    if bits is not None:
        nn.quantize(whole.language_model, 32, bits)
        config["quantization"] = {"group_size": 32, "bits": bits}
    weights = dict(tree_flatten(whole.parameters()))
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    known = config_of(family)
    if family in FLAT:
        known |= known.pop("text_config") | {"model_type": family}
    (path / "config.json").write_text(json.dumps(known | config))
    (path / "preprocessor_config.json").write_text(json.dumps(SETTINGS[family]))
    own = tokenizer()
    own.save_pretrained(path)
    return path
