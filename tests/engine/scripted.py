"""Drafts by script: right, wrong, or right for a while, of any length, so that acceptance does not depend on the text."""

from __future__ import annotations

import random
from dataclasses import dataclass

from treadle.engine.sequence import Sequence
from treadle.engine.speculation import Speculation
from treadle.speculate.control import Source
from treadle.speculate.lookup import Proposal
from treadle.speculate.speculator import Draft, Speculator, Terms


@dataclass
class Willing:
    """A control that wants every draft it can get."""

    cooldowns: int = 0

    def settled(self, *counts: object) -> None: ...

    def step(self) -> None: ...


class ScriptedSpeculator(Speculator):
    """Proposes the true continuation, each token spoiled with probability 1 - `right`."""

    def __init__(self, sequence: Sequence, truth: list[int], right: float, vocab: int, seed: int) -> None:
        super().__init__(sequence.tokens, frozenset())
        self.control = Willing()  # type: ignore[assignment]
        self._sequence = sequence
        self._truth = truth
        self._right = right
        self._vocab = vocab
        self._random = random.Random(seed)

    def _proposal(self, limit: int) -> Proposal:
        made = self._sequence.num_generated
        rest = self._truth[made : made + self._random.randint(0, max(0, limit))]
        spoilt = [t if self._random.random() < self._right else self._random.randrange(self._vocab) for t in rest]
        return Proposal(tuple(spoilt), 8 if spoilt else 0)

    def _wanted(self, source: Source, proposal: Proposal, terms: Terms) -> Draft | None:
        tokens = proposal.tokens[: max(0, terms.limit)]
        return Draft(tokens, source) if tokens else None


class ScriptedSpeculation(Speculation):
    """`truths`: the text of each request by id."""

    truths: dict[str, list[int]]
    right = 0.8
    seed = 0

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        if sequence.speculator is not None:
            self.seed += 1
            sequence.speculator = ScriptedSpeculator(
                sequence, self.truths[sequence.request.id], self.right, self._caps.vocab_size, self.seed
            )
