"""Where the loop meets sparse prefill: a small model reads a long prompt first and says what may be left out of it.

The loop asks `turn` before it computes anything of a prompt: `reads` decides whether leaving out is worth trying;
`read` lets the small model read one chunk, which is this turn's prefill, and after the last one chooses. From then on
the sequence is one whose prompt has gaps (`Sequence.leave_out`), and nothing else in the loop knows. Whatever fails
here, the prompt is computed whole. Engine thread only.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from treadle.cache.layers import Layers
from treadle.engine import scheduler
from treadle.engine.ending import sentence
from treadle.engine.memory import Ledger
from treadle.engine.reuse import Reuse
from treadle.engine.sequence import Sequence
from treadle.engine.shadow import read_on
from treadle.sparse.score import STEPS, importance
from treadle.sparse.select import LEAST_LIFT, Places, Selection, moved, needed, select, smooth
from treadle.speculate.draft_model import DraftModel
from treadle.types import EXACT, Footprint, KvFormat, Output, Skimming, SparsePrefill

if TYPE_CHECKING:
    from treadle.engine.loop import Loop

log = logging.getLogger("treadle.engine")

UNLIMITED = 2**62
SIGHT = 1024  # tokens that the small model looks back while it reads; in the end it looks at all
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
    sight: int = SIGHT


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

    def turn(self, loop: Loop, sequence: Sequence) -> list[Output] | None:
        """Let the small model read a chunk of a prompt that may be computed in part: this turn's prefill.

        Returns what is to be told of it; None: there is nothing to read, and the large model goes on.
        """
        new_layers = partial(loop.new_layers, sequence.kv)
        if not self.reads(sequence, lambda: loop.reuse.reach(sequence, new_layers)):
            return None
        began, decoding, at = loop.clock(), bool(loop.groups), self._read[sequence].shadow.computed
        n = loop.ledger.chunk(loop.pacer.allowance(decoding, small=True), len(sequence.tokens))
        loop.reuse.make_room(loop.ledger.free - loop.ledger.activations(n, len(sequence.tokens)))
        n = self.read(sequence, scheduler.aligned(at, n, loop.pacer.chunk))
        loop.pacer.prefilled(max(n, 1), loop.clock() - began, decoding, small=True)
        if sequence.places is not None:
            need = loop.ledger.need(len(sequence.tokens), sequence.room, sequence.kv, sequence.picture)
            loop.ledger.promise(sequence.id, need)
        reading = self._read.get(sequence)
        return [] if reading is None else [Output(sequence.id, skimmed=reading.shadow.computed)]

    def reads(self, sequence: Sequence, cached: Callable[[], int]) -> bool:
        """Whether the small model has to read (more of) the prompt; `cached`: tokens that need not be computed."""
        if sequence in self._read:
            return True
        if sequence.sparse is not None or sequence.layers is not None:
            return False
        known = cached()
        if (reason := self._declines(sequence, known)) is not None:
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

    def _declines(self, sequence: Sequence, cached: int) -> str | None:
        """Why a prompt is computed whole, before it was read; None: it may have gaps."""
        uncached = sequence.num_prompt - cached
        terms, asked, most = self.terms, sequence.request.sparse, self._small.caps.context_length
        if asked is False:
            return "The request wants all of the prompt computed."
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
        if not asked and not terms.automatic:
            return "It is done only where a request asks for it."
        if not asked and uncached <= terms.threshold:
            return f"No more than {terms.threshold} tokens are not cached ({uncached})."
        if not asked and terms.doubt is not None:
            return terms.doubt
        return self._gains_nothing(sequence, uncached, self._least(sequence, cached))

    def _gains_nothing(self, sequence: Sequence, uncached: int, kept: int) -> str | None:
        """Why it is not worth it to keep so many of the tokens that are not cached."""
        if kept >= uncached:
            return "All of it would be kept."
        if not sequence.request.sparse and kept > MOST_KEPT * uncached:
            return f"{kept} of {uncached} tokens would be kept in any case."
        return None

    def _least(self, sequence: Sequence, cached: int) -> int:
        """How many tokens that are not cached will be kept at least, whatever the small model says."""
        share = math.ceil(self._share(sequence) * (sequence.num_prompt - cached))
        return max(share, int(self._needed(sequence, cached)[cached:].sum()))

    def _needed(self, sequence: Sequence, cached: int) -> NDArray[np.bool_]:
        request, share = sequence.request, self._share(sequence)
        return needed(request.prompt, request.boundaries, request.spans, self.terms.special, share, cached)

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
            self._put_down(sequence)
            self._settle(sequence, skimmed, selection)
        return n

    def _empty(self) -> Layers:
        layers = self._new_layers(EXACT)
        layers.look_back(self.terms.sight)
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
        shadow, start = skimmed.shadow, skimmed.cached
        assert shadow.layers is not None
        scores = self._score(self._small.model, shadow.layers, int(self._small.known_ids(shadow.tokens[-1:])[0]))
        return select(smooth(scores), self._needed(sequence, start), start, self._share(sequence))

    def _share(self, sequence: Sequence) -> float:
        return self.terms.keep if sequence.request.keep is None else sequence.request.keep

    def _settle(self, sequence: Sequence, skimmed: Skimmed, selection: Selection) -> None:
        request, cached, seconds = sequence.request, skimmed.cached, skimmed.seconds
        n, kept = sequence.num_prompt - cached, len(selection.places)
        if (reason := self._gains_nothing(sequence, n, kept)) is not None:
            self._decline(sequence, cached, reason, seconds)
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
        """A sequence is over."""
        if sequence in self._read:
            skimmed = self._put_down(sequence)
            self._decline(sequence, skimmed.cached, "It ended while the small model was reading.", skimmed.seconds)

    def _put_down(self, sequence: Sequence) -> Skimmed:
        """The small model reads a prompt no further. What it computed stays for others, where nothing has to go."""
        skimmed = self._read.pop(sequence)
        shadow = skimmed.shadow
        if shadow.layers is not None and self._reuse.has_room(shadow.layers.nbytes):
            self._reuse.release(shadow, None)
        else:
            self._reuse.forget(shadow)
        shadow.layers = None
        self._ledger.release(_account(sequence))
        return skimmed


def _account(sequence: Sequence) -> str:
    """The name by which the small model's rows of a prompt are promised."""
    return f"{sequence.id} skimmed"
