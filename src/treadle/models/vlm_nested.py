"""Folders of Qwen2-VL and Qwen2.5-VL as newer transformers write them; mlx-vlm 0.7.10 knows the older form only.

The newer form keeps the settings of the language model in `text_config`, has other names for those of its positions,
and puts `model.` before the weights of both halves.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

FAMILIES = ("qwen2_vl", "qwen2_5_vl")
RENAMED = {"model.visual.": "visual.", "model.language_model.": "model."}  # prefixes of weights
_taught: set[str] = set()  # modules of mlx-vlm


def flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A folder's config in the older form; any other is returned as it is."""
    name, text = config.get("model_type"), config.get("text_config")
    if name not in FAMILIES or not isinstance(text, dict) or "hidden_size" in config:
        return dict(config)
    made = {**text, **config, "vision_config": {**config["vision_config"], "model_type": name}}
    del made["text_config"]
    rope = made.pop("rope_parameters", None) or made.pop("rope_scaling", None) or {}
    if "rope_theta" in rope:
        made["rope_theta"] = rope["rope_theta"]
    if "mrope_section" in rope:
        kind = rope.get("rope_type", rope.get("type", "default"))
        made["rope_scaling"] = {"type": kind, "rope_type": kind, "mrope_section": rope["mrope_section"]}
    return made


def renamed(weights: Mapping[str, Any]) -> dict[str, Any]:
    """Weights by their names in the older form."""
    return {_older(name): array for name, array in weights.items()}


def _older(name: str) -> str:
    return next((new + name.removeprefix(old) for old, new in RENAMED.items() if name.startswith(old)), name)


def teach(family: ModuleType) -> None:
    """Let a family's module of mlx-vlm, which reads a folder by itself, take the newer form too; once."""
    if family.__name__ in _taught:
        return
    _taught.add(family.__name__)
    configs, model = family.ModelConfig, family.Model
    from_dict, sanitize = configs.from_dict, model.sanitize

    def read(params: dict[str, Any]) -> Any:
        older = flattened(params)
        params.clear()  # the caller goes on with it
        params.update(older)
        return from_dict(params)

    configs.from_dict = staticmethod(read)
    model.sanitize = lambda self, weights: sanitize(self, renamed(weights))
