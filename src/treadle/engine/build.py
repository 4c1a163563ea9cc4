"""From a loaded model to the loop that runs it. Engine thread only."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import Any

from treadle.cache.formats import stays_exact
from treadle.cache.store import Store
from treadle.config import Config
from treadle.engine.compiled import Forward, forward_of
from treadle.engine.following import Following
from treadle.engine.loop import Loop
from treadle.engine.memory import Ledger
from treadle.engine.reuse import Reuse
from treadle.engine.sampling import Sampler
from treadle.engine.sequence import Sequence
from treadle.engine.skim import Skim, Terms
from treadle.engine.speculation import Speculation
from treadle.errors import LoadError
from treadle.grammar.compile import grammars_of
from treadle.models.calibration import CalibrationFile, StepCosts
from treadle.models.capabilities import new_layers
from treadle.models.load import LoadedModel
from treadle.models.rope import gaps_fault, let_gaps_in
from treadle.runtime import device_facts
from treadle.sparse.score import let_watch, untold
from treadle.speculate.calibrate import calibrate
from treadle.speculate.cost import CostTable
from treadle.speculate.draft_model import DraftModel
from treadle.speculate.telemetry import SpeculationCounters
from treadle.types import EXACT, Batching, Caps, Drafting, LayerKind
from treadle.vision.sight import Sight

LARGEST_SKIMMER = 0.2  # of the parameters: reading with more costs what leaving out saves
MARKERS = ("pad", "image", "img", "vision", "video", "audio")  # in the names of ids that no reply continues with
log = logging.getLogger("treadle.engine")


def build_loop(
    loaded: LoadedModel,
    config: Config,
    ledger: Ledger,
    store: Store | None,
    counters: SpeculationCounters | None = None,
) -> Loop:
    """The loop of one model. `store` keeps its computed prefixes; None keeps none. `counters`: from an earlier load."""
    forward = _forward(loaded, config)
    return Loop(
        loaded.model,
        loaded.caps,
        config,
        partial(new_layers, loaded.model, loaded.caps),
        ledger,
        Reuse(store, loaded.caps, config.checkpoint_every, loaded.revision, packs=not stays_exact(config.kv_bits)),
        grammars=partial(grammars_of, loaded.tokenizer, loaded.caps.vocab_size, loaded.stop_ids),
        speculation=_speculation(loaded, config, store, counters, forward),
        sight=None if loaded.reader is None else Sight(loaded.model, int(config.image_cache_mb * 2**20), ledger),
        skim=None if loaded.skimmer is None else _skim(loaded, loaded.skimmer, config, store, ledger),
        forward=forward,
    )


def _forward(loaded: LoadedModel, config: Config) -> Forward:
    return forward_of(loaded.model, loaded.caps, device_facts().backend, config.compile)


def _speculation(
    loaded: LoadedModel,
    config: Config,
    store: Store | None,
    counters: SpeculationCounters | None,
    forward: Forward,
) -> Speculation | None:
    if config.speculation == "off" or not can_go_back(loaded.caps):
        return None
    measure = partial(_costs, loaded, forward)
    kept = loaded.calibration
    costs = measure() if kept is None else kept.steps(str(loaded.caps.kv), measure)
    draft = loaded.draft
    return Speculation(
        loaded.caps,
        time.perf_counter,
        lookup=config.speculation in ("auto", "lookup"),
        following=None if draft is None else _following(draft, config, store),
        cost=CostTable.of(costs.verify, costs.plain, forward.widths),
        noise=costs.noise,
        barred=barred_ids(loaded.tokenizer, loaded.stop_ids),
        counters=counters,
    )


def _costs(loaded: LoadedModel, forward: Forward) -> StepCosts:
    caps = loaded.caps
    batches = caps.batching is Batching.RAGGED
    with forward.at_once():
        new = partial(new_layers, loaded.model, caps)
        found = calibrate(forward, caps.vocab_size, new, batches, forward.widths)
    return StepCosts(found.noise, *found.cost.observed())


def keep_costs(calibration: CalibrationFile | None, loop: Loop) -> None:
    """Remember what steps were seen to cost, for the next load of the loop's model."""
    if calibration is not None and loop.speculation is not None:
        costs = StepCosts(loop.speculation.noise, *loop.speculation.cost.observed())
        calibration.learnt(str(loop.caps.kv), costs)


def drafting(loaded: LoadedModel, config: Config) -> Drafting:
    """What speculation is in force with these settings."""
    if config.speculation == "off":
        return Drafting(why="It is switched off.")
    if not can_go_back(loaded.caps):
        return Drafting(why="This model keeps a cache of its own that cannot take refused drafts back.")
    sources = ["lookup"] if config.speculation in ("auto", "lookup") else []
    if loaded.draft is not None:
        return Drafting((*sources, "draft", "forced"), loaded.draft.name)
    return Drafting((*sources, "forced"))


def can_go_back(caps: Caps) -> bool:
    """Whether refused drafts can be taken back at all."""
    return LayerKind.FOREIGN not in caps.layers


def _following(draft: LoadedModel, config: Config, store: Store | None) -> Following:
    rows: DraftModel[Sequence] = DraftModel(
        draft.model, draft.caps, Sampler(draft.caps.vocab_size), _forward(draft, config)
    )
    reuse = Reuse(store, draft.caps, config.checkpoint_every, draft.revision)
    return Following(rows, reuse, partial(new_layers, draft.model, draft.caps))


def _skim(loaded: LoadedModel, small: LoadedModel, config: Config, store: Store | None, ledger: Ledger) -> Skim:
    let_gaps_in(loaded.model)
    let_watch(small.model)
    if (reason := untold(small.model, new_layers(small.model, small.caps, EXACT))) is not None:
        raise LoadError(f"{small.name} cannot skim for {loaded.name}: {reason}.")
    fault = gaps_fault(loaded.model, loaded.caps)
    share = small.num_parameters / loaded.num_parameters
    terms = Terms(
        config.specprefill_threshold,
        config.specprefill_keep_pct,
        config.specprefill,
        special_ids(loaded.tokenizer),
        small.name,
        None if fault is None else f"This model reads whole prompts only: {fault}.",
        f"The small model has {share:.0%} of the size, more than a fifth." if share > LARGEST_SKIMMER else None,
    )
    rows: DraftModel[Sequence] = DraftModel(small.model, small.caps, Sampler(small.caps.vocab_size))
    reuse = Reuse(store, small.caps, config.checkpoint_every, small.revision)
    skim = Skim(rows, partial(new_layers, small.model, small.caps), reuse, terms, ledger)
    log.info("%s skims long prompts. %s", small.name, skim.facts.why)
    return skim


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids that mark messages, roles and the like."""
    if tokenizer is None:  # a model for bare ids
        return frozenset()
    return frozenset(id for id, token in tokenizer.added_tokens_decoder.items() if token.special)


def barred_ids(tokenizer: Any, stop_ids: frozenset[int]) -> frozenset[int]:
    """Special tokens that a draft is cut at: padding and the marks of pictures and sounds, never an end."""
    if tokenizer is None:  # a model for bare ids
        return frozenset()
    marked = (
        id
        for id, token in tokenizer.added_tokens_decoder.items()
        if token.special and any(mark in token.content.lower() for mark in MARKERS)
    )
    return frozenset(marked) - stop_ids
