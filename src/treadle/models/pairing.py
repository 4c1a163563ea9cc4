"""Which small model may draft for which large one. No MLX.

A pair has the same vocabulary, token by token, and is of one family; the draft model is at most a quarter of the size.
`config.draft_model` names one, or says `auto`: then the smallest that is on disk already and fits is taken, and none is
ever downloaded or asked the Hub for. What was named and does not fit is an error; what was found and does not fit, or
is damaged, is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treadle.errors import LoadError
from treadle.models import gguf, gguf_tokenizer
from treadle.models.folder_model import load_folder_tokenizer, read_json
from treadle.models.folders import Progress
from treadle.models.sources import KnownModel, ResolvedSource, known_models, resolve
from treadle.models.weigh import weight_bytes
from treadle.runtime import device_facts
from treadle.system import free_memory
from treadle.types import Batching, Caps, LayerKind

if TYPE_CHECKING:
    from treadle.models.load import LoadedModel

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.25  # of the target's bytes
AUTO, NONE = "auto", "none"


def draft_source(target: ResolvedSource, wanted: str, report: Progress | None) -> ResolvedSource | None:
    """The files of the draft model; None for none. Raises LoadError when a named one cannot be had or cannot fit."""
    if wanted == NONE:
        return None
    if wanted != AUTO:
        named = resolve(wanted, report)
        if (reason := _unlike(target, named)) is not None:
            raise LoadError(f"{named.name} cannot draft for {target.name}: {reason}.")
        return named
    here = sorted((k for k in known_models() if k.downloaded and k.path != target.path), key=lambda k: k.num_bytes)
    return next((source for known in here if (source := _found(target, known)) is not None), None)


def skim_source(target: ResolvedSource, wanted: str | None, report: Progress | None) -> ResolvedSource | None:
    """The files of the model that skims prompts for `target`, of any family. Raises LoadError if it cannot be had."""
    if wanted is None:
        return None
    named = resolve(wanted, report)
    words = different_words(_tokenizer(target), _tokenizer(named))
    if words is not None:
        raise LoadError(f"{named.name} cannot skim for {target.name}: their vocabularies differ ({words}).")
    return named


def cannot_skim(target: LoadedModel, small: LoadedModel) -> str | None:
    """A sentence why a model cannot say what of a prompt matters; None if it can."""
    words = different_words(target.tokenizer, small.tokenizer)
    if words is not None:
        return f"their vocabularies differ ({words})"
    if LayerKind.FOREIGN in small.caps.layers or LayerKind.ROWS not in small.caps.layers:
        return "it has no layer of ours that sees a whole prompt"
    return None


def _found(target: ResolvedSource, known: KnownModel) -> ResolvedSource | None:
    """A model on disk, if its files fit."""
    try:
        source = replace(resolve(str(known.path)), name=known.name)
        reason = _unlike(target, source)
    except LoadError as error:
        reason = error.message
    if reason is None:
        return source
    log.debug("%s cannot draft for %s: %s", known.name, target.name, reason)
    return None


def _unlike(target: ResolvedSource, source: ResolvedSource) -> str | None:
    """Why the files alone rule a pair out. Raises LoadError for files that are damaged."""
    families = [_family(target), _family(source)]
    if families[0] != families[1]:
        return f"it is of the family {families[1]}, not {families[0]}"
    sizes = [weight_bytes(s, device_facts().backend, free_memory()) for s in (target, source)]
    if sizes[1] > LARGEST_SHARE * sizes[0]:
        return f"it has {sizes[1] / 1e6:.3g} MB, more than a quarter of {sizes[0] / 1e6:.3g} MB"
    words = different_words(_tokenizer(target), _tokenizer(source))
    return None if words is None else f"their vocabularies differ ({words})"


def _tokenizer(source: ResolvedSource) -> Any:
    if source.kind == "gguf":
        return gguf_tokenizer.load_tokenizer(gguf.read(source.path))
    return load_folder_tokenizer(source.path)


def _family(source: ResolvedSource) -> str:
    if source.kind == "gguf":
        return str(gguf.architecture_of(source.path))
    return str(read_json(source.path / "config.json").get("model_type")).removesuffix("_text")


def different_words(target: Any, draft: Any) -> str | None:
    """A sentence on the first token id that means different things to two tokenizers; None if all mean the same."""
    own, other = ({id: token for token, id in t.get_vocab().items()} for t in (target, draft))
    for id, token in sorted(own.items()):
        if other.get(id) != token:
            return f"id {id} is {token!r} for one and {other.get(id)!r} for the other"
    return None if len(own) == len(other) else f"one has {len(own)} tokens, the other {len(other)}"


def unfit(caps: Caps) -> str | None:
    """A sentence why a model cannot draft; None if it can. Refused drafts must be taken back, in any row."""
    if any(kind in (LayerKind.STATE, LayerKind.FOREIGN) for kind in caps.layers):
        return "its recurrent layers cannot take refused drafts back"
    if caps.batching is not Batching.RAGGED:
        return f"it cannot compute rows of different length together ({caps.why})"
    return None


def checked(target: LoadedModel, load: Callable[[], LoadedModel], name: str, wanted: bool) -> LoadedModel | None:
    """The loaded draft model if it fits; None if one that was only found does not.

    Raises LoadError when one that is `wanted` in any case does not fit.
    """
    try:
        draft = load()
        words = different_words(target.tokenizer, draft.tokenizer)
        reason = f"their vocabularies differ ({words})" if words is not None else unfit(draft.caps)
    except LoadError as error:
        if wanted:
            raise
        reason = error.message
    if reason is None:
        log.info("%s drafts for %s.", name, target.name)
        return draft
    if wanted:
        raise LoadError(f"{name} cannot draft for {target.name}: {reason}.")
    log.info("%s is on disk but cannot draft for %s: %s", name, target.name, reason)
    return None
