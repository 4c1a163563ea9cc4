"""Drafts by script: right, wrong, or right for a while, of any length: acceptance does not depend on the text."""

from __future__ import annotations

import random
from dataclasses import dataclass

from treadle.engine.group import Group
from treadle.engine.sequence import Sequence
from treadle.engine.speculation import Speculation
from treadle.speculate.control import Source
from treadle.speculate.cost import CostTable
from treadle.speculate.lookup import Proposal
from treadle.speculate.speculator import Draft, Speculator, StepTerms
from treadle.types import Batching


@dataclass
class Willing:
    """A control that wants every draft it can get."""

    cooldowns: int = 0

    def settled(self, *counts: object) -> None: ...

    def step(self) -> None: ...

    def lost(self, *steps: object) -> None: ...

    def want(self, source: Source, matched: int, rows: int, cost: CostTable, limit: int, **rest: object) -> int:
        return max(0, limit)

    def missed(self, *draft: object) -> None: ...

    def ready(self, source: Source, matched: int) -> bool:
        return True


class ScriptedSpeculator(Speculator):
    """Proposes the true continuation, each token spoiled with probability 1 - `right`."""

    def __init__(
        self,
        sequence: Sequence,
        truth: list[int],
        right: float,
        vocab: int,
        seed: int,
        spoilt: int | None = None,
    ) -> None:
        super().__init__(sequence.tokens, frozenset())
        self.control = Willing()  # type: ignore[assignment]
        self._sequence = sequence
        self._truth = truth
        self._right = right
        self._vocab = vocab
        self._spoilt = spoilt
        self._random = random.Random(seed)

    def proposal(self, limit: int) -> Proposal:
        made = self._sequence.num_generated
        rest = self._truth[made : made + self._random.randint(0, max(0, limit))]
        spoilt = [t if self._random.random() < self._right else self._wrong() for t in rest]
        return Proposal(tuple(spoilt), 8 if spoilt else 0)

    def _wrong(self) -> int:
        return self._random.randrange(self._vocab) if self._spoilt is None else self._spoilt

    def wanted(self, source: Source, proposal: Proposal, limit: int, terms: StepTerms) -> Draft | None:
        tokens = proposal.tokens[: max(0, limit)]
        return Draft(tokens, source) if tokens else None


class WillingSpeculation(Speculation):
    """Drafts wherever it can, whatever that costs."""

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        if sequence.speculator is not None:
            sequence.speculator.control = Willing()  # type: ignore[assignment]

    def _may(self, group: Group) -> bool:
        return len(group.rows) == 1 or self._caps.batching is Batching.RAGGED


class ScriptedSpeculation(WillingSpeculation):
    """`truths`: the text of each request by id; `spoilt`: the token that wrong drafts have, None for any."""

    truths: dict[str, list[int]]
    right = 0.8
    seed = 0
    spoilt: int | None = None

    def begin(self, sequence: Sequence) -> None:
        super().begin(sequence)
        if sequence.speculator is not None:
            self.seed += 1
            sequence.speculator = ScriptedSpeculator(
                sequence, self.truths[sequence.request.id], self.right, self._caps.vocab_size, self.seed, self.spoilt
            )
