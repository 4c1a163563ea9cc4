"""How the draft model keeps up with the sequences that decode. Engine thread only.

Every sequence has a shadow: the same tokens with the draft model's layers. Its prompt is computed in chunks while the
device has time (`catch_up`), with the draft model's own prefixes from the cache, and the sequence answers meanwhile.
Once level, the shadow becomes a row of the draft model; when the sequence ends, its rows stay for others.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from treadle.cache.layers import Layers
from treadle.engine.reuse import Reuse
from treadle.engine.sequence import Sequence
from treadle.engine.shadow import read_on
from treadle.speculate.draft_model import DraftModel

LEVEL = 32  # tokens behind at which a shadow may join the rows, whose first step computes them
FAR = 64  # tokens behind at which a row that nobody asked for drafts leaves again
GAIN = 0.2  # share of a new measurement in the running mean


@dataclass(slots=True)
class Following:
    """`draft` has a row for each sequence in `draft.keys`; `reuse` and `new_layers` are of the draft model."""

    draft: DraftModel[Sequence]
    reuse: Reuse
    new_layers: Callable[[], Layers]
    seconds: float = 0.0  # per drafted token, lately
    _shadows: dict[Sequence, Sequence] = field(default_factory=dict)

    def begin(self, sequence: Sequence) -> None:
        if self._fits(sequence):
            self._shadows[sequence] = Sequence(sequence.request, sequence.room, sequence.arrived)

    def end(self, sequence: Sequence, stop_id: int | None) -> None:
        """The sequence is over, or starts again."""
        shadow = self._shadows.pop(sequence, None)
        if shadow is None:
            return
        if sequence in self.draft.keys:
            shadow.computed = min(self.draft.known(sequence), len(sequence.tokens))
            self.draft.keep(sequence, shadow.computed)
        self._learn(sequence, shadow)
        self.reuse.release(shadow, stop_id)
        if sequence in self.draft.keys:
            self.draft.drop(sequence)

    def give_up(self) -> None:
        """The model failed: nothing of it is used any more, by nobody."""
        for shadow in self._shadows.values():
            self.reuse.forget(shadow)
        self._shadows.clear()

    def _fits(self, sequence: Sequence) -> bool:
        """Whether the draft model's context has room for more of a sequence."""
        return len(sequence.tokens) + LEVEL < self.draft.caps.context_length

    def _part_from_long_ones(self) -> None:
        for sequence in [s for s in self._shadows if not self._fits(s)]:
            self.end(sequence, None)

    def level(self, sequence: Sequence) -> bool:
        return sequence in self.draft.keys

    def lagging(self) -> bool:
        return len(self._shadows) > len(self.draft.keys)

    def catch_up(self, num_tokens: int) -> int:
        """Compute up to so many tokens of the first shadow that is behind; how many it were."""
        self._part_from_long_ones()
        if not self.lagging():
            return 0
        sequence = next(s for s in self._shadows if s not in self.draft.keys)
        shadow = self._shadows[sequence]
        self._learn(sequence, shadow)
        n = read_on(shadow, num_tokens, self.draft, self.reuse, self.new_layers)
        if shadow.pending <= LEVEL:
            self._join(sequence, shadow)
        return n

    def _join(self, sequence: Sequence, shadow: Sequence) -> None:
        assert shadow.layers is not None
        self.draft.join(sequence, shadow.layers, sequence.request.sampling)
        shadow.layers = None
        if shadow.holder is not None:
            shadow.holder.locate = lambda: (_present(self.draft), self.draft.row(sequence))

    def drafts(self, wanted: Mapping[Sequence, int]) -> dict[Sequence, tuple[int, ...]]:
        """So many tokens for each of these sequences that are level. `keep` must be told what became of them."""
        began = time.perf_counter()
        self._part_from_long_ones()
        self._part_from([s for s in self.draft.keys if self._behind(s) > FAR])
        for sequence in self.draft.keys:
            self.draft.keep(sequence, len(sequence.tokens) - 1)  # a step feeds every row something
        feeds = {s: s.tokens[self.draft.known(s) :] for s in self.draft.keys}
        if not feeds:
            return {}
        count = max(wanted.values())
        made = self.draft.draft(feeds, count)
        for sequence in self.draft.keys:
            if sequence not in wanted:
                self.draft.keep(sequence, len(sequence.tokens))
        taken = (time.perf_counter() - began) / count
        self.seconds = taken if not self.seconds else (1 - GAIN) * self.seconds + GAIN * taken
        return {s: made[s][:n] for s, n in wanted.items() if s in made}

    def keep(self, sequence: Sequence, agreed: int) -> None:
        """Only the first `agreed` tokens that a row holds are those of the sequence."""
        if sequence in self.draft.keys:
            self.draft.keep(sequence, agreed)

    def _behind(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - self.draft.known(sequence)

    def _part_from(self, sequences: Iterable[Sequence]) -> None:
        """Back to layers of their own, to catch up in chunks."""
        for sequence in sequences:
            shadow = self._shadows[sequence]
            layers, row = _present(self.draft), self.draft.row(sequence)
            shadow.computed = self.draft.known(sequence)
            shadow.layers = layers.take(row) if len(self.draft.keys) > 1 else layers
            self.draft.drop(sequence)
            if shadow.holder is not None:
                shadow.holder.locate = partial(_alone, shadow.layers)

    def _learn(self, sequence: Sequence, shadow: Sequence) -> None:
        shadow.commit(sequence.tokens[len(shadow.tokens) :].tolist())


def _alone(layers: Layers) -> tuple[Layers, int]:
    return layers, 0


def _present(draft: DraftModel[Sequence]) -> Layers:
    assert draft.layers is not None
    return draft.layers
