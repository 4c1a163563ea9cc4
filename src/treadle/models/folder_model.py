"""A model and its tokenizer from a folder in Hugging Face layout (mlx-lm, transformers). Engine thread."""

from __future__ import annotations

import json
import logging
import re
import struct
from pathlib import Path
from typing import Any

from treadle import runtime, system
from treadle.errors import LoadError
from treadle.models.architectures import model_classes, trunk_classes
from treadle.models.placement import WeightForm, hold_dense, widen

log = logging.getLogger(__name__)

TRUNK_WEIGHT = "embed_tokens.weight"
WRITES = re.compile("ForCausalLM|ForConditionalGeneration|LMHead")  # in the names of classes with an output layer


def load_folder(path: Path, backend: runtime.Backend, weights: WeightForm) -> tuple[Any, dict[str, Any], bool]:
    """The model, evaluated, its config, and whether quantised weights were expanded; after `check_folder`.

    On a CPU all floats become float32 where that fits the rule of `widen`; norms and the scales and
    biases of packed weights always do: MLX's packed kernels are hopelessly slow there with 16-bit floats.

    Raises:
        LoadError: one sentence on what is missing, damaged or not supported.
    """
    utils = runtime.mlx_lm_module("utils")
    classes = trunk_classes if _is_trunk(path) else model_classes
    # The embedding stands in for an output layer that there is not; nobody asks it for tokens.
    changed = {"tie_word_embeddings": True} if is_headless(path, folder_config(path)) else None
    try:
        with runtime.guarded_import(f"the model in {path}"):
            model, config = utils.load_model(
                path, lazy=True, strict=True, model_config=changed, get_model_classes=classes
            )
    except (FileNotFoundError, ValueError, KeyError, TypeError, RuntimeError, OSError) as error:
        raise LoadError(f"The model in {path} cannot be loaded: {_first_line(error)}") from error
    model, dense = hold(model, path, backend, weights)
    return model, config, dense


def hold(model: Any, path: Path, backend: runtime.Backend, weights: WeightForm) -> tuple[Any, bool]:
    """A lazily loaded model in the form that suits the backend, evaluated; and whether it was expanded.

    Raises:
        LoadError: the weights cannot be read.
    """
    import mlx.core as mx

    utils = runtime.mlx_lm_module("utils")
    num_parameters = int(utils.get_total_parameters(model))
    free = system.free_memory()
    dense = hold_dense(weights, backend, num_parameters, free)
    if backend == "cpu":  # before expanding, which rounds to the type of the scales
        _widen(model, everything=widen(weights, backend, num_parameters, free))
    if dense:
        model = utils.dequantize_model(model)
    try:
        mx.eval(model.parameters())
    except RuntimeError as error:
        raise LoadError(f"The weights in {path} cannot be read: {_first_line(error)}") from error
    return model, dense


def check_folder(path: Path) -> None:
    """
    Raises:
        LoadError: no config.json, no weights, or a model_type that is not known.
    """
    model_classes(folder_config(path))


def folder_config(path: Path) -> dict[str, Any]:
    """
    Raises:
        LoadError: no config.json, or no weights.
    """
    if not (path / "config.json").is_file():
        raise LoadError(f"{path} is no model folder: it has no config.json.")
    config = read_json(path / "config.json")
    if not any(path.glob("model*.safetensors")):
        raise LoadError(f"{path} has no model*.safetensors weights.")
    return config


def load_folder_tokenizer(path: Path) -> Any:
    """The folder's fast tokenizer; code that comes with a model is never run.

    Raises:
        LoadError: there is none that can be read.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path), trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError, KeyError, ImportError, TypeError, AttributeError) as error:
        if not (path / "tokenizer.json").is_file():
            raise LoadError(f"The tokenizer in {path} cannot be loaded: {_first_line(error)}") from error
        log.info("The tokenizer in %s is read from tokenizer.json alone: %s", path, _first_line(error))
        tokenizer = _plain_tokenizer(path)
    if not tokenizer.is_fast:
        raise LoadError(f"The tokenizer in {path} has no fast form (tokenizer.json), which is needed.")
    return tokenizer


def _plain_tokenizer(path: Path) -> Any:
    from transformers import PreTrainedTokenizerFast

    try:
        return PreTrainedTokenizerFast.from_pretrained(str(path), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise LoadError(f"The tokenizer in {path} cannot be loaded: {_first_line(error)}") from error


def read_json(path: Path) -> dict[str, Any]:
    """
    Raises:
        LoadError: unreadable, or not a JSON object.
    """
    value = _read(path)
    if not isinstance(value, dict):
        raise LoadError(f"{path} is not a JSON object.")
    return value


def read_list(path: Path) -> list[Any]:
    """
    Raises:
        LoadError: unreadable, or not a JSON list.
    """
    value = _read(path)
    if not isinstance(value, list):
        raise LoadError(f"{path} is not a JSON list.")
    return value


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise LoadError(f"{path} cannot be read: {_first_line(error)}") from error


def tensor_names(file: Path) -> list[str]:
    """The tensors of a safetensors file; none if it is damaged, which loading it will tell."""
    with file.open("rb") as opened:
        head = opened.read(8)
        try:
            return list(json.loads(opened.read(struct.unpack("<Q", head)[0])))
        except (ValueError, struct.error, OverflowError, MemoryError):
            return []


def is_headless(path: Path, config: dict[str, Any]) -> bool:
    """Whether the weights and the class are those of a model without an output layer."""
    classes = config.get("architectures") or ()
    return bool(classes) and not any(WRITES.search(str(name)) for name in classes) and _is_trunk(path)


def _is_trunk(path: Path) -> bool:
    """Whether the weights were saved without the prefix that mlx-lm knows them by."""
    return any(TRUNK_WEIGHT in tensor_names(file) for file in path.glob("model*.safetensors"))


def _widen(model: Any, *, everything: bool) -> None:
    """Float parameters to float32: all of them, or those beside packed weights and the small ones."""
    import mlx.core as mx
    import mlx.nn as nn

    for _, module in model.named_modules():
        packed = isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding) or "scales" in module
        own = {name: value for name, value in module.items() if isinstance(value, mx.array)}
        for name, value in own.items():
            half = value.dtype in (mx.float16, mx.bfloat16)
            if half and (everything or packed or value.ndim == 1):
                module[name] = value.astype(mx.float32)


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.rstrip(".") + "."
