"""From files on disk to a model that is ready to serve: `load_model` makes a `LoadedModel`."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treadle import runtime, system
from treadle.errors import ConfigError, LoadError
from treadle.models import gguf as gguf_file
from treadle.models import gguf_model, gguf_tokenizer
from treadle.models.calibration import CalibrationFile, calibration
from treadle.models.embedding import embedding_of
from treadle.models.folder_model import (
    check_folder,
    folder_config,
    hold,
    is_headless,
    load_folder,
    load_folder_tokenizer,
    read_json,
)
from treadle.models.placement import WeightForm, hold_dense
from treadle.models.sources import ResolvedSource
from treadle.models.stops import stop_ids, template_of
from treadle.types import Caps, Embedding, Footprint, Vision
from treadle.vision.families import FAMILIES
from treadle.vision.limits import Limits

if TYPE_CHECKING:
    from treadle.vision.reader import Reader

log = logging.getLogger(__name__)

SAMPLING_DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
# The names that GGUF files give the same settings, after `general.sampling.`.
GGUF_SAMPLING = {
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
LENGTH_KEYS = ("max_position_embeddings", "max_sequence_length", "max_seq_len", "n_positions", "seq_length")
FINGERPRINT_BYTES = 65536  # of each end of a weight file


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What may be known of a loaded model on any thread, and kept: it does not hold the weights."""

    name: str
    source: str
    revision: str
    tokenizer: Any
    config: dict[str, Any]
    caps: Caps
    stop_ids: frozenset[int]
    defaults: dict[str, float]
    chat_template: str | None
    reader: Reader | None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """Everything the server needs of one model. `model` is touched by the engine thread only."""

    name: str
    source: str
    revision: str  # changes with the weights and the form they are held in
    model: Any  # mlx-lm's seam: model(ids, cache=...) -> logits
    tokenizer: Any  # a fast transformers tokenizer
    config: dict[str, Any]  # Hugging Face style
    caps: Caps
    stop_ids: frozenset[int]
    defaults: dict[str, float]  # sampling settings that the model's makers recommend
    chat_template: str | None
    reader: Reader | None = None  # prepares pictures for it, where it sees; its threads are those of prompts
    draft: LoadedModel | None = None  # a smaller one with the same vocabulary, which proposes tokens
    skimmer: LoadedModel | None = None  # another, or the same, which says what of a long prompt matters
    calibration: CalibrationFile | None = None  # what was found by trying it; None: that is kept nowhere

    @property
    def footprint(self) -> Footprint:
        """What one sequence occupies, here and in the model that drafts; the one that skims counts for itself."""
        own = self.caps.footprint
        return own if self.draft is None else own.beside(self.draft.caps.footprint)

    @property
    def footprints(self) -> Mapping[str, Footprint]:
        """The same by the format of its rows, where they can have several."""
        draft = self.draft
        forms = self.caps.kv_footprints
        return forms if draft is None else {name: one.beside(draft.caps.footprint) for name, one in forms.items()}

    @property
    def helpers(self) -> list[LoadedModel]:
        """The smaller models that are loaded with it, each once."""
        found = [small for small in (self.draft, self.skimmer) if small is not None]
        return found[:1] if len(found) == 2 and found[0] is found[1] else found

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights, packed ones counted one by one."""
        return int(runtime.mlx_lm_module("utils").get_total_parameters(self.model))

    @property
    def card(self) -> ModelCard:
        return ModelCard(**{field.name: getattr(self, field.name) for field in fields(ModelCard)})


@dataclass(frozen=True, slots=True)
class _Parts:
    model: Any
    tokenizer: Any
    config: dict[str, Any]
    generation: dict[str, Any]
    weight_files: tuple[Path, ...]
    dense: bool
    reader: Reader | None = None
    blind: Vision | None = None  # why a model of a family that sees does not
    embedding: Embedding | None = None  # for a model that was made to embed


def load_model(
    source: ResolvedSource,
    context_length: int | None,
    *,
    weights: WeightForm = "auto",
    chat_template: str | None = None,
    limits: Limits = Limits(),
    compile: str = "auto",
) -> LoadedModel:
    """Load a model; runs on the engine thread and takes seconds to minutes.

    `context_length` in tokens lowers what the model was trained for; `weights`: how quantised ones are held;
    `chat_template`: instead of the model's own; `limits`: of the images it reads;
    `compile`: see `models.compile`.

    Raises:
        LoadError: one sentence on what is missing, damaged or not supported.
        ConfigError: `context_length` is beyond the trained one.
    """
    runtime.prepare()  # before the first import of MLX, which the next line brings
    from treadle.models.tune import tune

    runtime.check_hooks()
    facts = runtime.device_facts()
    if source.kind == "gguf":
        parts = _load_gguf(source, facts.backend, weights)
    else:
        parts = _load_folder(source, facts.backend, weights, limits)
    if chat_template is not None:
        parts.tokenizer.chat_template = chat_template
    length = _context_length(parts.config, context_length)
    tune(parts.model, facts.backend, compile)
    form = "dense" if parts.dense else "packed"
    revision = fingerprint(parts.weight_files, form)
    log.info("%s: weights held %s on %s, context of %d tokens", source.name, form, facts.backend, length)
    known = calibration(revision, [parts.config, parts.embedding], source.name, compile)
    caps = known.caps(length, partial(_caps, parts, length))
    return LoadedModel(
        name=source.name,
        source=str(source.path),
        revision=revision,
        model=parts.model,
        tokenizer=parts.tokenizer,
        config=parts.config,
        caps=caps,
        stop_ids=stop_ids(parts.tokenizer, parts.config, parts.generation),
        defaults=sampling_defaults(parts.generation),
        chat_template=template_of(parts.tokenizer),
        reader=parts.reader if caps.vision is not None and caps.vision.works else None,
        calibration=known,
    )


def _caps(parts: _Parts, length: int) -> Caps:
    """What the model can do, found by trying."""
    from treadle.models.capabilities import describe

    caps = describe(parts.model, _vocab_size(parts), length)
    return replace(_sighted(parts, caps), embedding=_embedding(parts, caps))


def _embedding(parts: _Parts, caps: Caps) -> Embedding | None:
    if parts.embedding is None:
        return None
    from treadle.models.trunk import checked

    found = checked(parts.model, caps, parts.embedding)
    if found.pooling is None and not found.generates:
        raise LoadError(f"This embedding model cannot be served: {found.why}.")
    log.log(logging.WARNING if found.pooling is None else logging.INFO, "Embeddings: %s.", found.why)
    return found


def _sighted(parts: _Parts, caps: Caps) -> Caps:
    """`caps` with what the model can see, and the memory that it takes to see."""
    if parts.reader is None:
        return replace(caps, vision=parts.blind)
    from treadle.models.vlm_folder import checked

    found, (look, scores) = checked(parts.model, caps, parts.config["model_type"], parts.reader, parts.tokenizer)
    log.log(logging.INFO if found.works else logging.WARNING, "Images: %s", found.why)
    footprint = replace(caps.footprint, look_bytes=look, look_score_bytes=scores)
    return replace(caps, vision=found, footprint=footprint)


def _load_gguf(source: ResolvedSource, backend: runtime.Backend, weights: WeightForm) -> _Parts:
    opened = gguf_file.read(source.path)
    tokenizer = gguf_tokenizer.load_tokenizer(opened)
    dense = hold_dense(weights, backend, opened.num_parameters, system.free_memory())
    model, config = gguf_model.build(opened, backend, dense=dense)
    stored = {name: opened.metadata.get(f"general.sampling.{key}") for key, name in GGUF_SAMPLING.items()}
    generation = {name: value for name, value in stored.items() if value is not None}
    return _Parts(model, tokenizer, config, generation, opened.paths, dense, embedding=gguf_model.embedding_of(opened))


def _load_folder(source: ResolvedSource, backend: runtime.Backend, weights: WeightForm, limits: Limits) -> _Parts:
    path = source.path
    blind = _blindness(path)
    if blind is not None and not blind.why:
        return _load_seeing(path, backend, weights, limits)
    try:
        check_folder(path)  # an unknown architecture is told before its tokenizer is looked at
    except LoadError as error:
        raise error if blind is None else LoadError(blind.why) from error
    tokenizer = load_folder_tokenizer(path)
    embedding = embedding_of(path, source.name, folder_config(path), headless=is_headless(path, folder_config(path)))
    model, config, dense = load_folder(path, backend, weights)
    if blind is not None:
        log.warning("%s is loaded for text alone. %s", source.name, blind.why)
    return _Parts(
        model, tokenizer, config, _generation(path), _weight_files(path), dense, blind=blind, embedding=embedding
    )


def _blindness(path: Path) -> Vision | None:
    """None for a model of text alone; otherwise why it cannot see, "" when nothing is in its way."""
    config = folder_config(path)
    name = config.get("model_type")
    if not isinstance(config.get("vision_config"), dict) or not isinstance(name, str):
        return None
    if name not in FAMILIES:
        return Vision(name, False, f"Images for models of type {name!r} are not supported.")
    from treadle.models.vlm import why_not

    if (reason := why_not()) is not None:
        return Vision(name, False, reason)
    from treadle.models.vlm_folder import has_tower

    return Vision(name, False, "" if has_tower(path) else "Its folder has no weights of an image encoder.")


def _load_seeing(path: Path, backend: runtime.Backend, weights: WeightForm, limits: Limits) -> _Parts:
    from treadle.models.vlm import load_seeing
    from treadle.models.vlm_folder import add_template, config_of, reader_of
    from treadle.models.vlm_nested import flattened

    tokenizer = load_folder_tokenizer(path)
    add_template(path, tokenizer)
    config = flattened(folder_config(path))
    model, dense = hold(load_seeing(path, config), path, backend, weights)
    config = config_of(model, config)
    reader = reader_of(path, config, tokenizer, limits)
    parts = _Parts(model, tokenizer, config, _generation(path), _weight_files(path), dense)
    if isinstance(reader, str):
        return replace(parts, blind=Vision(config["model_type"], False, reader))
    return replace(parts, reader=reader)


def _generation(path: Path) -> dict[str, Any]:
    file = path / "generation_config.json"
    return read_json(file) if file.is_file() else {}


def _weight_files(path: Path) -> tuple[Path, ...]:
    return tuple(sorted(path.glob("*.safetensors")))


def sampling_defaults(generation: dict[str, Any]) -> dict[str, float]:
    """The sampling settings of a generation config; none where it turns sampling off."""
    if generation.get("do_sample") is False:
        return {}
    return {key: generation[key] for key in SAMPLING_DEFAULTS if generation.get(key) is not None}


def _number(config: dict[str, Any], key: str) -> int | None:
    """A whole number of the config, or of its `text_config`."""
    value = config.get(key) or (config.get("text_config") or {}).get(key)
    return value if isinstance(value, int) else None


def _context_length(config: dict[str, Any], wanted: int | None) -> int:
    found = [value for key in LENGTH_KEYS if (value := _number(config, key)) is not None]
    trained = found[0] if found else wanted
    if trained is None:
        raise ConfigError("The model names no context length: set context_length.", param="context_length")
    if wanted is not None and wanted > trained:
        raise ConfigError(
            f"context_length is {wanted} tokens, but the model was trained for {trained}.",
            param="context_length",
        )
    return wanted or trained


def _vocab_size(parts: _Parts) -> int:
    """The number of ids that the embedding has."""
    size = _number(parts.config, "vocab_size")
    return size if size is not None else len(parts.tokenizer)


def fingerprint(files: tuple[Path, ...], form: str) -> str:
    """Hex digits from names, sizes and both ends of the weight files, and the form they are held in."""
    digest = hashlib.sha256(form.encode())
    for path in files:
        size = path.stat().st_size
        digest.update(json.dumps([path.name, size]).encode())
        with path.open("rb") as file:
            digest.update(file.read(FINGERPRINT_BYTES))
            file.seek(max(size - FINGERPRINT_BYTES, 0))
            digest.update(file.read())
    return digest.hexdigest()[:16]
