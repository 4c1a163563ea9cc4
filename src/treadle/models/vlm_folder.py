"""A model that sees, from its folder: weights, the reader of its pictures, and whether both work. Engine thread."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from treadle.errors import BadRequest
from treadle.models.folder_model import read_json, tensor_names
from treadle.models.vlm import Seeing, image_id
from treadle.models.vlm_check import Peaks, judged
from treadle.types import Caps, Ids, Vision
from treadle.vision.encoder import Encoder
from treadle.vision.families import FAMILIES
from treadle.vision.limits import Limits
from treadle.vision.reader import Reader
from treadle.vision.spans import find_spans

TOWERS = ("vision", "visual", "patch_embed")  # in names of weights
SIZE = (64, 48)  # of the picture that a model is tried with
LARGER = (256, 192)  # of the one that shows how memory grows
TEXT = "Here is {}; it shows"
TAIL = " a lake and some more"


def settings_of(path: Path) -> dict[str, Any] | None:
    """The settings of the image processor; None when the folder has none."""
    if (path / "preprocessor_config.json").is_file():
        return read_json(path / "preprocessor_config.json")
    if (path / "processor_config.json").is_file():
        found = read_json(path / "processor_config.json").get("image_processor")
        return found if isinstance(found, dict) else None
    return None


def add_template(path: Path, tokenizer: Any) -> None:
    """Processors keep the chat template in a file of their own, which tokenizers do not read."""
    if not tokenizer.chat_template and (path / "chat_template.json").is_file():
        tokenizer.chat_template = read_json(path / "chat_template.json").get("chat_template")


def has_tower(path: Path) -> bool:
    """Whether a folder has weights of an image encoder, by the headers of its files."""
    return any(tower in name for file in path.glob("*.safetensors") for name in tensor_names(file) for tower in TOWERS)


def config_of(model: Seeing, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the size of the vocabulary that the model really has, and the context that its kind has."""
    text = model.whole.config.text_config
    context = FAMILIES[config["model_type"]].context
    found: dict[str, Any] = {**config, "vocab_size": int(text.vocab_size)}
    if context is not None and "max_position_embeddings" not in (config.get("text_config") or {}):
        found.setdefault("max_position_embeddings", context)
    return found


def reader_of(path: Path, config: Mapping[str, Any], tokenizer: Any, limits: Limits) -> Reader | str:
    """What prepares pictures, or the sentence why there is nothing to do it with."""
    settings = settings_of(path)
    if settings is None:
        return "This model cannot see images here: its folder has no preprocessor_config.json."
    token = tokenizer.convert_ids_to_tokens(image_id(config))
    if token is None:
        return "This model cannot see images here: its tokenizer does not know its image token."
    return Reader(FAMILIES[config["model_type"]], settings, config, token, image_id(config), limits)


def checked(model: Seeing, caps: Caps, family: str, reader: Reader, tokenizer: Any) -> tuple[Vision, tuple[int, int]]:
    """Show the model a picture (see `vlm_check`). Some seconds for a large one.

    With it come `look_bytes` and `look_score_bytes` of the model's footprint.
    """
    before, after = reader.family.around
    try:
        shown = reader.show(_picture(SIZE))
        text = TEXT.format(before + shown.text + after)
        ids, tail = (_ids(tokenizer, part) for part in (text, TAIL))
        spans = find_spans(ids, model.image_id, [shown.picture], reader.family.whole)
    except (BadRequest, ValueError, KeyError, TypeError) as error:
        return Vision(family, False, f"This model cannot see images here: {error}."), (0, 0)
    peaks = Peaks()
    found = judged(model, caps, family, ids, spans, tail[:3].tolist(), peaks)
    if not found.works:
        return found, (0, 0)
    larger = reader.show(_picture(LARGER)).picture
    if larger.num_rows > shown.picture.num_rows:
        Encoder(model.encode, 0, peaks).rows(larger)
    return found, peaks.footprint()


def _picture(size: tuple[int, int]) -> Any:
    return Image.linear_gradient("L").resize(size).convert("RGB")


def _ids(tokenizer: Any, text: str) -> Ids:
    return np.array(tokenizer.encode(text, add_special_tokens=False), np.int64)
