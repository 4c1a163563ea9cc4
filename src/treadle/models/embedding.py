"""Whether a folder holds a model that was made to embed texts, and how it pools: `embedding_of(folder, name, config)`.

Told by the files of sentence-transformers (`modules.json`, and the folder of its pooling), by a class without an
output layer, or by a name. What these models do that is not done here is refused with a sentence, never guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from treadle.errors import LoadError
from treadle.models.folder_model import read_json, read_list
from treadle.types import Embedding, Pooling

POOLINGS = {"mean_tokens": Pooling.MEAN, "mean": Pooling.MEAN, "lasttoken": Pooling.LAST}
MODES = "pooling_mode_"
POOLING_FOLDER = "1_Pooling"
STAGES = ("Transformer", "Pooling", "Normalize")  # the rest is arithmetic that is not done here


@dataclass(frozen=True, slots=True)
class Known:
    """A family whose folders lose the files above when they are converted, so that their name has to do."""

    pooling: Pooling
    least_size: int | None = None  # the makers say: from here on, every size works


# In names, which are lower case then. Qwen3-Embedding: its model card ("MRL support", "last token").
NAMED = {"qwen3-embedding": Known(Pooling.LAST, least_size=32)}


def embedding_of(path: Path, name: str, config: Mapping[str, Any], *, headless: bool) -> Embedding | None:
    """None for a model that writes and was not made to embed. `headless`: it has no output layer.

    Raises:
        LoadError: a file that is damaged; or a model that could neither embed nor write here.
    """
    known = next((known for key, known in NAMED.items() if key in name.lower()), None)
    if not (headless or known or (path / "modules.json").is_file() or (path / POOLING_FOLDER).is_dir()):
        return None
    found = _found(path, config, known, generates=not headless)
    if found.pooling is None and headless:
        raise LoadError(f"{name} is an embedding model without an output layer, but {found.why}.")
    return found


def _found(path: Path, config: Mapping[str, Any], known: Known | None, *, generates: bool) -> Embedding:
    pooling, why = _pooling(path, known)
    refusal = next(_refusals(path, config), None)
    if refusal is not None:
        pooling, why = None, refusal
    prefix, fault = _prefix(path)
    if fault:
        pooling, why = None, fault
    found = Embedding(pooling, why, prefix=prefix, generates=generates, context_length=_most_tokens(path))
    sizes = config.get("matryoshka_dimensions")
    if isinstance(sizes, list) and all(type(size) is int and size > 0 for size in sizes):
        return replace(found, sizes=tuple(sizes))
    if config.get("is_matryoshka") is True:
        return replace(found, least_size=1)
    return found if known is None else replace(found, least_size=known.least_size)


def _pooling(path: Path, known: Known | None) -> tuple[Pooling | None, str]:
    """How it pools and a sentence about that; None where that is not done here."""
    file = path / _pooling_folder(path) / "config.json"
    if not file.is_file():
        if known is not None:
            return known.pooling, f"{known.pooling} pooling, as models of this name have it"
        return Pooling.MEAN, "mean pooling, as its folder names no other"
    settings = read_json(file)
    named = settings.get("pooling_mode")
    modes = [named] if isinstance(named, str) else [m for m in _modes(settings) if settings[MODES + m] is True]
    if len(modes) != 1 or modes[0] not in POOLINGS:
        return None, f"its pooling ({' and '.join(map(str, modes)) or 'none'}) is not one that is built here"
    return POOLINGS[modes[0]], f"{POOLINGS[modes[0]]} pooling, as its folder says"


def _modes(settings: Mapping[str, Any]) -> list[str]:
    return [key.removeprefix(MODES) for key in settings if key.startswith(MODES)]


def _stages(path: Path) -> list[Mapping[str, Any]]:
    file = path / "modules.json"
    stages = read_list(file) if file.is_file() else []
    return [stage for stage in stages if isinstance(stage, dict)]


def _kind(stage: Mapping[str, Any]) -> str:
    return str(stage.get("type", "")).rpartition(".")[2]


def _pooling_folder(path: Path) -> str:
    found = (str(stage.get("path", "")) for stage in _stages(path) if _kind(stage) == "Pooling")
    return next(found, POOLING_FOLDER)


def _refusals(path: Path, config: Mapping[str, Any]) -> Iterator[str]:
    """What it does that cannot be done right here, as clauses."""
    names = [config.get("model_type"), *(config.get("architectures") or ())]
    both_ways = config.get("use_bidirectional_attention") or config.get("is_causal") is False
    if both_ways or any("bidirectional" in str(name).lower() for name in names):
        yield "its tokens attend to what follows them too, which is not built here"
    if any("model" in str(key).lower() for key in config.get("auto_map") or ()):
        yield "it brings code of its own, which is never run"
    for stage in _stages(path):
        if _kind(stage) not in STAGES:
            yield f"what follows its pooling ({_kind(stage) or 'a nameless stage'}) is not built here"
    if _settings(path, "sentence_bert_config.json").get("do_lower_case"):
        yield "its texts would have to be put in lower case first, which is not built here"


def _prefix(path: Path) -> tuple[str, str]:
    """What stands before every text, and a clause if that cannot be done."""
    settings = _settings(path, "config_sentence_transformers.json")
    name, prompts = settings.get("default_prompt_name"), settings.get("prompts")
    if name is None:
        return "", ""
    prefix = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prefix, str):
        return "", f"its folder names the prompt {str(name)[:100]!r}, but has none of that name"
    if prefix and _settings(path, f"{_pooling_folder(path)}/config.json").get("include_prompt") is False:
        return "", "it pools a text without the prompt before it, which is not built here"
    return prefix, ""


def _most_tokens(path: Path) -> int | None:
    most = _settings(path, "sentence_bert_config.json").get("max_seq_length")
    return most if isinstance(most, int) and most > 0 else None


def _settings(path: Path, name: str) -> dict[str, Any]:
    file = path / name
    return read_json(file) if file.is_file() else {}
