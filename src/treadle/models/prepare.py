"""From a configuration and a catalogue to the models that an engine may load."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from treadle import runtime, system
from treadle.config import Config
from treadle.errors import ConfigError, LoadError
from treadle.models import pairing
from treadle.models.catalogue import Catalogue, Entry
from treadle.models.folders import Progress
from treadle.models.load import LoadedModel, load_model
from treadle.models.recipe import Prepared, Recipe
from treadle.models.sources import ResolvedSource, resolve, title
from treadle.models.weigh import weight_bytes
from treadle.vision.limits import Limits

log = logging.getLogger(__name__)

Bars = Callable[[], AbstractContextManager[Progress | None]]


@dataclass(frozen=True, slots=True)
class Offer:
    """The first model is loaded at the start; `rules` map patterns to names."""

    first: Recipe
    others: tuple[Recipe, ...]
    rules: Mapping[str, str]


def offer(config: Config, catalogue: Catalogue, bars: Bars = nullcontext) -> Offer:
    """What `config.model`, which may be a name of the catalogue, and the catalogue make together.

    `bars` shows the progress of the first download; later ones go on in silence. Raises ConfigError.
    """
    first = catalogue.find(config.model) or _unlisted(config.model, catalogue)
    others = [entry for entry in catalogue.entries if entry is not first]
    names = {name for entry in (first, *others) for name in entry.names}
    for rule in catalogue.rules:
        if rule.target not in names:
            known = ", ".join(sorted(names))
            raise ConfigError(
                f"{rule.place}: rules.{rule.pattern} names the model {rule.target!r}, but there are {known}.",
                param="rules",
            )
    return Offer(
        _recipe(first, _config(first, config, first=True), bars),
        tuple(_recipe(entry, _config(entry, config, first=False), nullcontext) for entry in others),
        {rule.pattern: rule.target for rule in catalogue.rules},
    )


def _unlisted(source: str, catalogue: Catalogue) -> Entry:
    """A model of the command line that the catalogue does not have."""
    name = title(source)
    if catalogue.find(name) is not None:
        raise ConfigError(
            f"The model {source!r} has the name {name!r} of another one in the models file.", param="model"
        )
    return Entry(name, source, () if source == name else (source,))


def _config(entry: Entry, config: Config, *, first: bool) -> Config:
    """Raises ConfigError where its own settings and those of the server contradict each other."""
    try:
        return entry.config(config, first=first)
    except ConfigError as error:
        raise ConfigError(f"The model {entry.name!r}: {error.message}", param=error.param) from error


def _recipe(entry: Entry, config: Config, bars: Bars) -> Recipe:
    return Recipe(entry.name, config, partial(prepare, entry, config, bars), entry.aliases, entry.pinned, entry.source)


def prepare(entry: Entry, config: Config, bars: Bars = nullcontext) -> Prepared:
    """Download what is missing and weigh it; blocks. Raises LoadError."""
    with bars() as report:
        source = resolve(entry.source, report)
        wanted = config.draft_model if config.speculation in ("auto", "draft") else pairing.NONE
        draft = pairing.draft_source(source, wanted, report)
        skimmer = pairing.skim_source(source, config.specprefill_model, report)
    log.info("Loading %s from %s.", entry.name, source.path)
    if draft is None and config.speculation == "draft":
        raise LoadError(f"No model that is here can draft for {entry.name}: name one (draft_model).")
    alone = _weighed(source, entry, config, None, skimmer)
    if draft is None:
        return alone
    both = _weighed(source, entry, config, draft, skimmer)
    return both if _insists(config) else replace(both, lighter=alone)


def _weighed(
    source: ResolvedSource, entry: Entry, config: Config, draft: ResolvedSource | None, skimmer: ResolvedSource | None
) -> Prepared:
    backend = runtime.device_facts().backend
    sources = {one.path: one for one in (source, draft, skimmer) if one is not None}
    weight = sum(weight_bytes(one, backend, system.free_memory()) for one in sources.values())
    return Prepared(weight, partial(load_entry, source, entry, config, draft, skimmer))


def _insists(config: Config) -> bool:
    """Whether the model is not wanted without one that drafts."""
    return config.draft_model != pairing.AUTO or config.speculation == "draft"


def load_entry(
    source: ResolvedSource,
    entry: Entry,
    config: Config,
    draft: ResolvedSource | None = None,
    skimmer: ResolvedSource | None = None,
) -> LoadedModel:
    """Load a model as its entry wants it, with those that draft and skim. Engine thread; raises as `load_model`."""
    limits = Limits(int(config.image_max_mp * 1e6), config.allow_image_urls)
    loaded = load_model(
        source,
        config.context_length,
        chat_template=entry.chat_template,
        limits=limits,
        compile=config.compile,
    )
    loaded = replace(loaded, name=entry.name, defaults=loaded.defaults | dict(entry.sampling))
    if draft is not None:
        load = partial(load_model, draft, None, compile=config.compile)
        loaded = replace(loaded, draft=pairing.checked(loaded, load, draft.name, _insists(config)))
    return loaded if skimmer is None else replace(loaded, skimmer=_skimmer(loaded, skimmer, config.compile))


def _skimmer(loaded: LoadedModel, source: ResolvedSource, compile: str) -> LoadedModel:
    """The small model that skims: one that is loaded already, where that is the same."""
    known = next((one for one in (loaded, loaded.draft) if one is not None and one.source == str(source.path)), None)
    found = load_model(source, None, compile=compile) if known is None else known
    if (reason := pairing.cannot_skim(loaded, found)) is not None:
        raise LoadError(f"{source.name} cannot skim for {loaded.name}: {reason}.")
    return found
