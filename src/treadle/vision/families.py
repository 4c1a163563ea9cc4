"""The families of models that see, as data: what prepares their pixels, and what stands for a picture in a prompt.

Pixels are prepared by transformers' own image processors in their NumPy form, with the settings of the model's folder.
Pure but for that import; any thread.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Outputs = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, slots=True)
class Layout:
    """One prepared picture: what the encoder takes, its embeddings, and the text that stands for it."""

    inputs: Outputs
    num_rows: int
    text: str
    grid: tuple[int, int] = (1, 1)


@dataclass(frozen=True, slots=True)
class Frame:
    """What a layout is made from: the processor's outputs, the model's config, and the text of the image token."""

    outputs: Mapping[str, Any]
    config: Mapping[str, Any]
    token: str

    def number(self, *names: str, within: str = "") -> int:
        """The first of these settings of the config, or of a part of it. Raises KeyError."""
        config = self.config.get(within, {}) if within else self.config
        return int(next(config[name] for name in names if config.get(name) is not None))

    def inputs(self, *names: str) -> Outputs:
        return {name: np.asarray(self.outputs[name]) for name in names}


@dataclass(frozen=True, slots=True)
class Family:
    """`processor`: a class of `transformers.models`. `marker`: what chat templates write for a picture, where it is not
    the image token. `around`: texts that must stand before and after it. `call`: more arguments for the processor.
    `mrope`: three positions per token. `whole`: a picture's tokens are computed in one step.
    """

    processor: str
    layout: Callable[[Frame], Layout]
    marker: str | None = None
    around: tuple[str, str] = ("", "")
    call: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda config: {}
    mrope: bool = False
    whole: bool = False
    context: int | None = None  # of models whose config leaves it out


def processor_of(family: Family, settings: Mapping[str, Any]) -> Any:
    """The image processor with the settings of a model's `preprocessor_config.json`."""
    module, name = family.processor.rsplit(".", 1)
    kind = getattr(importlib.import_module(f"transformers.models.{module}"), name)
    return kind.from_dict(dict(settings))


def _qwen(frame: Frame) -> Layout:
    """As many tokens as patches, less by the merger, which makes one of a square of them."""
    _, height, width = np.asarray(frame.outputs["image_grid_thw"])[0].tolist()
    side = frame.number("spatial_merge_size", within="vision_config") if _has_merge(frame) else 2
    grid = (height // side, width // side)
    rows = grid[0] * grid[1]
    return Layout(frame.inputs("pixel_values", "image_grid_thw"), rows, frame.token * rows, grid)


def _has_merge(frame: Frame) -> bool:
    return "spatial_merge_size" in frame.config.get("vision_config", {})


def _gemma3(frame: Frame) -> Layout:
    """A fixed number of tokens between markers."""
    rows = int(frame.config.get("mm_tokens_per_image") or 256)
    text = f"\n\n<start_of_image>{frame.token * rows}<end_of_image>\n\n"
    return Layout(frame.inputs("pixel_values"), rows, text)


def _tiles(frame: Frame) -> Layout:
    """Idefics 3 and SmolVLM: the parts of a large picture row by row, each with its place, then the whole of it."""
    side = frame.number("image_size", within="vision_config") // frame.number("patch_size", within="vision_config")
    each = (side // frame.number("scale_factor")) ** 2
    rows, columns = (int(frame.outputs[name][0][0]) for name in ("rows", "cols"))
    edge, tokens = "<fake_token_around_image>", frame.token * each
    parts = ["".join(f"{edge}<row_{i + 1}_col_{j + 1}>{tokens}" for j in range(columns)) + "\n" for i in range(rows)]
    text = "".join(parts) + ("\n" if rows else "") + f"{edge}<global-img>{tokens}{edge}"
    inputs = frame.inputs("pixel_values", "pixel_attention_mask")
    return Layout(inputs, each * (rows * columns + 1), text)


def _llava(frame: Frame) -> Layout:
    """One token for each patch; the tower's class token counts where the model does not drop it."""
    height, width = np.asarray(frame.outputs["pixel_values"]).shape[-2:]
    patch = frame.number("patch_size", within="vision_config")
    rows = (height // patch) * (width // patch)
    if frame.config.get("vision_feature_select_strategy", "default") != "default":
        rows += 1
    return Layout(frame.inputs("pixel_values"), rows, frame.token * rows)


def _lines(side: int, frame: Frame) -> Layout:
    """Pixtral: row after row of patches with a break behind each, and an end behind the last."""
    height, width = (int(n) // side for n in np.asarray(frame.outputs["image_sizes"])[0])
    lines = "[IMG_BREAK]".join([frame.token * width] * height) + "[IMG_END]"
    return Layout(frame.inputs("pixel_values", "image_sizes"), height * width, lines)


def _pixtral(frame: Frame) -> Layout:
    return _lines(frame.number("patch_size", within="vision_config"), frame)


def _mistral3(frame: Frame) -> Layout:
    merged = int(frame.config.get("spatial_merge_size") or 2)
    return _lines(frame.number("patch_size", within="vision_config") * merged, frame)


def _patches(merge: bool) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    def call(config: Mapping[str, Any]) -> dict[str, Any]:
        side = int(config["vision_config"]["patch_size"])
        return {"patch_size": side * int(config.get("spatial_merge_size") or 2) if merge else side}

    return call


def _located(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"return_row_col_info": True}


QWEN = Family(
    "qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil",
    _qwen,
    around=("<|vision_start|>", "<|vision_end|>"),
    mrope=True,
)
FAMILIES: Mapping[str, Family] = {
    "qwen2_vl": QWEN,
    "qwen2_5_vl": QWEN,
    "qwen3_vl": QWEN,
    "gemma3": Family(
        "gemma3.image_processing_pil_gemma3.Gemma3ImageProcessorPil",
        _gemma3,
        marker="<start_of_image>",
        whole=True,
        context=131_072,
    ),
    "idefics3": Family("idefics3.image_processing_pil_idefics3.Idefics3ImageProcessorPil", _tiles, call=_located),
    "smolvlm": Family("smolvlm.image_processing_pil_smolvlm.SmolVLMImageProcessorPil", _tiles, call=_located),
    "llava": Family("clip.image_processing_pil_clip.CLIPImageProcessorPil", _llava),
    "pixtral": Family(
        "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil", _pixtral, call=_patches(merge=False)
    ),
    "mistral3": Family(
        "pixtral.image_processing_pil_pixtral.PixtralImageProcessorPil", _mistral3, call=_patches(merge=True)
    ),
}
