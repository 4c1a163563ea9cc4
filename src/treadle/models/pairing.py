"""Which small model may draft for which large one. No MLX.

A pair has the same vocabulary, token by token, and is of one family; the draft model is at most a quarter of the size.
`config.draft_model` names one, or says `auto`: then the smallest that is on disk already and fits is taken, and none is
ever downloaded for it. What was named and does not fit is an error; what was found and does not fit is left out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from treadle.errors import LoadError
from treadle.models import gguf
from treadle.models.folder_model import read_json
from treadle.models.folders import Progress
from treadle.models.sources import ResolvedSource, known_models, resolve
from treadle.models.weigh import weight_bytes
from treadle.runtime import device_facts, free_memory

log = logging.getLogger(__name__)

LARGEST_SHARE = 0.25  # of the target's bytes
AUTO, NONE = "auto", "none"


def draft_source(target: ResolvedSource, wanted: str, report: Progress | None) -> ResolvedSource | None:
    """The files of the draft model; None for none. Raises LoadError when a named one cannot be had or cannot fit."""
    if wanted == NONE:
        return None
    if wanted != AUTO:
        source = resolve(wanted, report)
        if (reason := _unlike(target, source)) is not None:
            raise LoadError(f"{source.name} cannot draft for {target.name}: {reason}.")
        return source
    found = []
    for known in known_models():
        if known.downloaded and known.path is not None and known.path != target.path:
            source = resolve(known.name, None)
            if _unlike(target, source) is None:
                found.append((known.num_bytes, source))
    return min(found, key=lambda pair: pair[0])[1] if found else None


def _unlike(target: ResolvedSource, source: ResolvedSource) -> str | None:
    """Why the files alone rule a pair out."""
    families = [_family(target), _family(source)]
    if families[0] != families[1]:
        return f"it is of the family {families[1]}, not {families[0]}"
    sizes = [weight_bytes(s, device_facts().backend, free_memory()) for s in (target, source)]
    if sizes[1] > LARGEST_SHARE * sizes[0]:
        return f"it has {sizes[1] / 1e6:.0f} MB, more than a quarter of {sizes[0] / 1e6:.0f} MB"
    return None


def _family(source: ResolvedSource) -> str:
    if source.kind == "gguf":
        return str(gguf.read(source.path).metadata.get("general.architecture"))
    return str(read_json(source.path / "config.json").get("model_type"))


def different_words(target: Any, draft: Any) -> str | None:
    """A sentence on the first token id that means different things to two tokenizers; None if all mean the same."""
    own, other = ({id: token for token, id in t.get_vocab().items()} for t in (target, draft))
    for id, token in own.items():
        if other.get(id) != token:
            return f"id {id} is {token!r} for one and {other.get(id)!r} for the other"
    return None if len(own) == len(other) else f"one has {len(own)} tokens, the other {len(other)}"


def checked(target: Any, load: Callable[[], Any], name: str, named: bool) -> Any | None:
    """The loaded draft model if it fits; None if one that was only found does not.

    Raises LoadError when a `named` one does not fit.
    """
    from treadle.speculate.draft_model import unfit

    draft = load()
    words = different_words(target.tokenizer, draft.tokenizer)
    reason = f"their vocabularies differ ({words})" if words is not None else unfit(draft.caps)
    if reason is None:
        log.info("%s drafts for %s.", name, target.name)
        return draft
    if named:
        raise LoadError(f"{name} cannot draft for {target.name}: {reason}.")
    log.info("%s is on disk but cannot draft for %s: %s.", name, target.name, reason)
    return None
