"""Models that see: mlx-vlm's model files under the seam of mlx-lm. Engine thread only.

mlx-vlm is an extra (`vision`), imported here and nowhere else, when a folder of such a model is loaded.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from treadle.errors import LoadError
from treadle.models import vlm_nested
from treadle.models.capabilities import mlx_cache
from treadle.runtime import guarded_import
from treadle.types import Picture
from treadle.vision.families import FAMILIES
from treadle.vision.sight import Inlay

log = logging.getLogger(__name__)

INSTALL = "pip install 'treadle[vision]' && pip install --no-deps mlx-vlm==0.7.10"
TESTED = "0.7.10"
CACHES = ("KVCache", "RotatingKVCache")  # of mlx-vlm, whose names are mlx-lm's


def why_not() -> str | None:
    """A sentence when mlx-vlm or Pillow is missing; None when images can be read."""
    missing = [name for name in ("mlx-vlm", "pillow") if not _installed(name)]
    return None if not missing else f"Images need {' and '.join(missing)}, which is not installed: {INSTALL}"


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def mlx_vlm_module(name: str) -> ModuleType:
    """Import `mlx_vlm.<name>`. Raises LoadError: it is missing, or lacks what it needs."""
    if (reason := why_not()) is not None:
        raise LoadError(reason)
    with guarded_import(f"mlx_vlm.{name}"):
        return importlib.import_module(f"mlx_vlm.{name}")


class Seeing(nn.Module):  # type: ignore[misc]
    """A model of mlx-vlm as mlx-lm's model files are called; see `vision.sight.SeeingModel`.

    No state of a request is left on it: models with three positions per token are always given them.
    """

    def __init__(self, whole: Any, config: Mapping[str, Any]) -> None:
        super().__init__()
        self.whole = whole
        family = FAMILIES[config["model_type"]]
        self.image_id = image_id(config)
        self.mrope = family.mrope

    @property
    def layers(self) -> Any:
        return self.whole.language_model.layers

    def make_cache(self) -> list[Any]:
        """mlx-lm's caches of the kinds that the language model asks for. Raises LoadError for another kind."""
        return [_translated(cache) for cache in own_cache(self.whole)]

    def encode(self, picture: Picture) -> tuple[Any, ...]:
        """The embeddings [num_rows, dim] of a picture and, for Qwen3-VL, what is added to the first layers."""
        ids = mx.full((1, picture.num_rows), self.image_id, mx.int32)
        found = self.whole.get_input_embeddings(ids, **self.inputs(picture), mask=mx.ones_like(ids))
        more = found.deepstack_visual_embeds
        return (found.inputs_embeds[0], *(() if more is None else more))

    def inputs(self, picture: Picture) -> dict[str, Any]:
        """The encoder's inputs as arrays, floats in the type of the embeddings."""
        kind = self._embedded(mx.zeros((1, 1), mx.int32)).dtype
        arrays = {name: mx.array(value) for name, value in picture.inputs.items()}
        return {name: a.astype(kind) if a.dtype == mx.float32 else a for name, a in arrays.items()}

    def _embedded(self, ids: Any) -> Any:
        return self.whole.get_input_embeddings(ids, None).inputs_embeds

    def __call__(
        self, ids: Any, cache: Any, pictures: Inlay | None = None, positions: Any = None, shift: Any = None
    ) -> Any:
        given: dict[str, Any] = {}
        if pictures is not None:
            embeddings, *deeper = pictures.rows
            merged = self._embedded(ids)
            merged[0, pictures.places] = embeddings.astype(merged.dtype)
            given["inputs_embeds"] = merged
            if deeper:
                given["visual_pos_masks"] = mx.zeros(ids.shape, mx.bool_)
                given["visual_pos_masks"][0, pictures.places] = True
                given["deepstack_visual_embeds"] = deeper
        language = self.whole.language_model
        if not self.mrope:
            return language(ids, cache=cache, **given).logits
        if positions is None:
            positions = _counted(ids, cache[0].offset, shift)
        # Past the language model's own call, which keeps positions of a request on the module and asks the device.
        hidden = language.model(ids, cache=cache, position_ids=positions, **given)
        tied = language.args.tie_word_embeddings
        return language.model.embed_tokens.as_linear(hidden) if tied else language.lm_head(hidden)


def _counted(ids: Any, start: Any, shift: Any) -> Any:
    """Positions [3, rows, n] of tokens that follow one another from where the cache says that each row stands."""
    rows, n = ids.shape
    if isinstance(start, mx.array) and start.ndim == 2:  # of each token, in a prompt with gaps
        here = start
    else:
        here = mx.arange(n, dtype=mx.int32)[None] + (start[:, None] if isinstance(start, mx.array) else start)
    if shift is not None:
        here = here + shift[:, None]
    return mx.broadcast_to(here, (3, rows, n))


def image_id(config: Mapping[str, Any]) -> int:
    """The id whose embedding a picture takes. Raises LoadError where the config names none."""
    for name in ("image_token_id", "image_token_index"):
        if isinstance(config.get(name), int):
            return int(config[name])
    raise LoadError("config.json names no image token.")


def own_cache(whole: Any) -> list[Any]:
    """Caches of mlx-vlm for its language model."""
    return list(mlx_vlm_module("models.cache").make_prompt_cache(whole.language_model))


def _translated(cache: Any) -> Any:
    name = type(cache).__name__
    if name not in CACHES:
        raise LoadError(f"Its language model keeps a cache ({name}) that cannot be used here.")
    if name == "KVCache":
        return mlx_cache.KVCache()
    return mlx_cache.RotatingKVCache(max_size=cache.max_size, keep=cache.keep)


def load_seeing(path: Path, config: Mapping[str, Any]) -> Seeing:
    """The model of a folder, not evaluated yet. Raises LoadError: one sentence on what is missing or damaged."""
    utils = mlx_vlm_module("utils")
    if config["model_type"] in vlm_nested.FAMILIES:
        vlm_nested.teach(mlx_vlm_module(f"models.{config['model_type']}"))
    try:
        with guarded_import(f"the model in {path}"):
            whole = utils.load_model(path, lazy=True, strict=True)
    except (FileNotFoundError, ValueError, KeyError, TypeError, RuntimeError, OSError, AttributeError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise LoadError(f"The model in {path} cannot be loaded: {reason}.") from error
    return Seeing(whole, config)
