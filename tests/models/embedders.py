"""Folders of tiny embedding models as their makers publish them, and what they should answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from gguf import GGMLQuantizationType as Kind
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from tests.models.gguf_files import Tiny, make, matrices, write_folder, write_gguf
from treadle.models.architectures import model_classes

STAGES = "sentence_transformers.models"
MEAN, LAST = {"pooling_mode_mean_tokens": True}, {"pooling_mode_lasttoken": True, "include_prompt": True}
MODES = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


@dataclass(frozen=True)
class Embedder:
    folder: Path
    tiny: Tiny

    def states(self, ids: list[int]) -> NDArray[np.float64]:
        """The states after the last norm [n, size], by mlx-lm alone: no cache, one step."""
        model_class, args_class = model_classes(self.tiny.config)
        model = model_class(args_class.from_dict(self.tiny.config))
        model.update(tree_unflatten([(name, mx.array(value)) for name, value in self.tiny.weights.items()]))
        return np.array(model.model(mx.array([ids]))[0], np.float64)

    def mean(self, ids: list[int]) -> NDArray[np.float64]:
        return unit(self.states(ids).mean(axis=0))

    def last(self, ids: list[int]) -> NDArray[np.float64]:
        return unit(self.states(ids)[-1])


def unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    return vector / np.linalg.norm(vector)


def embedder(
    folder: Path,
    family: str,
    pooling: dict[str, Any] | None,
    *,
    stages: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"),
    trunk: bool = False,
    **config: Any,
) -> Embedder:
    """`trunk`: weights as a class without an output layer saves them. `config` goes into config.json."""
    tiny = make(family)
    folder.mkdir(parents=True)
    write_folder(folder, tiny, write_gguf(folder / "tokenizer.gguf", tiny, matrices(Kind.F32)))
    (folder / "tokenizer.gguf").unlink()
    if trunk:
        weights = {
            name.removeprefix("model."): mx.array(value)
            for name, value in tiny.weights.items()
            if not name.startswith("lm_head")
        }
        mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "pt"})
    written = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(written))
    if pooling is not None:
        modules = [
            {"idx": i, "name": str(i), "path": "" if i == 0 else f"{i}_{stage}", "type": f"{STAGES}.{stage}"}
            for i, stage in enumerate(stages)
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        modes = {f"pooling_mode_{mode}": False for mode in MODES}
        (folder / "1_Pooling" / "config.json").write_text(
            json.dumps({"word_embedding_dimension": 64, **modes, **pooling})
        )
    return Embedder(folder, tiny)
