"""Where the loop meets sparse prefill: a small model reads a long prompt first and says what may be left out of it.

Before anything of a prompt is computed, `reads` decides whether that is worth trying; `read` lets the small model read
one chunk, which is this turn's prefill, and after the last one chooses. From then on the sequence is one whose prompt
has gaps (`Sequence.leave_out`), and nothing else in the loop knows. Whatever fails here, the prompt is computed whole.
Engine thread only.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treadle.cache.layers import Layers
from treadle.engine.ending import sentence
from treadle.engine.memory import Ledger
from treadle.engine.reuse import Reuse
from treadle.engine.sequence import Sequence
from treadle.engine.shadow import read_on
from treadle.sparse.score import STEPS, importance
from treadle.sparse.select import LEAST_LIFT, Places, Selection, moved, needed, select, smooth
from treadle.speculate.draft_model import DraftModel
from treadle.types import EXACT, Footprint, KvFormat, Skimming, SparsePrefill

log = logging.getLogger("treadle.engine")

UNLIMITED = 2**62
SIGHT = 4096  # tokens that the small model looks back while it reads; in the end it looks at all
MOST_KEPT = 0.9  # of the tokens; with more, nothing is gained


@dataclass(frozen=True, slots=True)
class Terms:
    """When a part of a prompt may be left out. `fault`: why never; `doubt`: why only where a request insists."""

    threshold: int = 8192  # tokens that are not cached
    keep: float = 0.3  # share of them that is computed
    automatic: bool = True
    special: frozenset[int] = frozenset()  # ids that are always kept
    name: str = ""  # of the small model
    fault: str | None = None
    doubt: str | None = None


@dataclass(slots=True)
class Skimmed:
    """A prompt that the small model is reading."""

    shadow: Sequence  # the same prompt, with the small model's layers
    cached: int  # tokens at its start that the large model has computed already
    seconds: float = 0.0


class Skim:
    """One model's. `small` computes, `new_layers` and `reuse` are of the small model; `ledger` counts its rows too."""

    def __init__(
        self,
        small: DraftModel[Sequence],
        new_layers: Callable[[KvFormat | None], Layers],
        reuse: Reuse,
        terms: Terms,
        ledger: Ledger | None = None,
        clock: Callable[[], float] = time.perf_counter,
        score: Callable[[Any, Layers, int], NDArray[np.float32]] = importance,
    ) -> None:
        self.terms = terms
        self._small = small
        self._ledger = ledger or Ledger(Footprint(), 0, UNLIMITED)
        self._new_layers = new_layers
        self._reuse = reuse
        self._clock = clock
        self._score = score
        self._read: dict[Sequence, Skimmed] = {}
        self._broken = ""  # why the small model is no longer asked

    @property
    def facts(self) -> Skimming:
        terms = self.terms
        automatic = terms.automatic and not (terms.fault or terms.doubt)
        return Skimming(terms.name, terms.threshold, terms.keep, automatic, terms.fault or terms.doubt or "")

    def reads(self, sequence: Sequence, cached: Callable[[], int]) -> bool:
        """Whether the small model has to read (more of) the prompt; `cached`: tokens that need not be computed."""
        if sequence in self._read:
            return True
        if sequence.sparse is not None or sequence.layers is not None:
            return False
        known = cached()
        if (reason := self._declines(sequence, sequence.num_prompt - known)) is not None:
            self._decline(sequence, known, reason, 0.0)
            return False
        shadow = Sequence(replace(sequence.request, spans=()), 0, sequence.arrived, kv=EXACT)
        need = self._small.caps.footprint.rows(sequence.num_prompt + STEPS)
        if need > self._ledger.free:
            self._decline(sequence, known, "There is no memory for the small model's rows.", 0.0)
            return False
        self._ledger.promise(_account(sequence), need)
        self._read[sequence] = Skimmed(shadow, known)
        return True

    def at(self, sequence: Sequence) -> int:
        """How many tokens of a prompt the small model has read."""
        return self._read[sequence].shadow.computed

    def _declines(self, sequence: Sequence, uncached: int) -> str | None:
        """Why a prompt is computed whole, before it was read; None: it may have gaps."""
        terms, asked, most = self.terms, sequence.request.sparse, self._small.caps.context_length
        if asked is False:
            return "The request forbids it."
        if sequence.request.computes_all or sequence.num_generated:
            return "Every token of the prompt is needed."
        if terms.fault is not None:
            return terms.fault
        if sequence.positions is not None:
            return "The prompt's pictures have positions of their own."
        if sequence.num_prompt + STEPS > most:
            return f"The small model reads at most {most} tokens."
        if self._broken:
            return self._broken
        if asked:
            return None
        if not terms.automatic:
            return "It is done only where a request asks for it."
        if uncached <= terms.threshold:
            return f"{uncached} tokens are not cached, which is no more than {terms.threshold}."
        return terms.doubt

    def _decline(self, sequence: Sequence, cached: int, reason: str, seconds: float) -> None:
        n = sequence.num_prompt - cached
        sequence.sparse = SparsePrefill(False, reason, n, n, seconds)
        sequence.chosen = self._clock()

    def read(self, sequence: Sequence, num_tokens: int) -> int:
        """Let the small model read up to so many tokens; after the last one, choose. Returns how many it read."""
        skimmed, began = self._read[sequence], self._clock()
        try:
            n = read_on(skimmed.shadow, num_tokens, self._small, self._reuse, self._empty)
            selection = self._choice(sequence, skimmed) if skimmed.shadow.pending == 1 else None
        except Exception as error:
            log.exception("The small model failed at %s.", sequence.id)
            self._broken = f"The small model failed: {sentence(error)}"
            self._drop(sequence, self._broken)
            return 0
        skimmed.seconds += self._clock() - began
        if selection is not None:
            self.leave(sequence)
            self._settle(sequence, skimmed, selection)
        return n

    def _empty(self) -> Layers:
        layers = self._new_layers(EXACT)
        layers.look_back(SIGHT)
        return layers

    def give_way(self) -> None:
        """Memory is short: prompts that are being read are computed whole."""
        for sequence in list(self._read):
            self._drop(sequence, "Memory ran short while the small model was reading.")

    def _drop(self, sequence: Sequence, reason: str) -> None:
        skimmed = self._read.pop(sequence)
        self._reuse.forget(skimmed.shadow)
        skimmed.shadow.layers = None
        self._ledger.release(_account(sequence))
        self._decline(sequence, skimmed.cached, reason, skimmed.seconds)

    def _choice(self, sequence: Sequence, skimmed: Skimmed) -> Selection:
        shadow, request, share = skimmed.shadow, sequence.request, self._share(sequence)
        assert shadow.layers is not None
        scores = self._score(self._small.model, shadow.layers, int(self._small.known_ids(shadow.tokens[-1:])[0]))
        start = skimmed.cached
        kept = needed(request.prompt, request.boundaries, request.spans, self.terms.special, share, start)
        return select(smooth(scores), kept, start, share)

    def _share(self, sequence: Sequence) -> float:
        return self.terms.keep if sequence.request.keep is None else sequence.request.keep

    def _settle(self, sequence: Sequence, skimmed: Skimmed, selection: Selection) -> None:
        request, cached, seconds = sequence.request, skimmed.cached, skimmed.seconds
        n, kept = sequence.num_prompt - cached, len(selection.places)
        if kept == n:
            self._decline(sequence, cached, "All of it would be kept.", seconds)
            return
        if not request.sparse and kept > MOST_KEPT * n:
            self._decline(sequence, cached, f"{kept} of {n} tokens would be kept in any case.", seconds)
            return
        if not request.sparse and selection.lift < LEAST_LIFT:
            reason = f"Nothing in the prompt stands out (the best parts score {selection.lift:.2f} times the mean)."
            self._decline(sequence, cached, reason, seconds)
            return
        self._leave_out(sequence, np.concatenate([np.arange(cached), selection.places]))
        sequence.sparse = SparsePrefill(True, "A small model chose what is computed.", n, kept, seconds)
        sequence.chosen = self._clock()

    def _leave_out(self, sequence: Sequence, places: Places) -> None:
        request = sequence.request
        spans, boundaries = moved(places, request.spans, request.boundaries)
        left = replace(request, prompt=request.prompt[places], spans=tuple(spans), boundaries=tuple(boundaries))
        sequence.leave_out(left, places)

    def leave(self, sequence: Sequence) -> None:
        """The prompt was read, or its sequence is over. What was computed stays for others, where nothing has to go."""
        skimmed = self._read.pop(sequence, None)
        if skimmed is None:
            return
        shadow = skimmed.shadow
        if shadow.layers is not None and self._reuse.has_room(shadow.layers.nbytes):
            self._reuse.release(shadow, None)
        else:
            self._reuse.forget(shadow)
        shadow.layers = None
        self._ledger.release(_account(sequence))


def _account(sequence: Sequence) -> str:
    """The name by which the small model's rows of a prompt are promised."""
    return f"{sequence.id} skimmed"
