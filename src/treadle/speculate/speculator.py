"""The drafts of one request: where they come from, how many there are, and what became of them. No MLX."""

from __future__ import annotations

from typing import NamedTuple

from treadle.speculate.accept import Verdict
from treadle.speculate.control import Control, Source
from treadle.speculate.cost import CostTable
from treadle.speculate.experience import Experience
from treadle.speculate.lookup import LONGEST, SHORTEST_SHARED, NgramIndex, Proposal, RecentReplies
from treadle.types import Ids


class Draft(NamedTuple):
    """A proposed continuation and where it is from."""

    tokens: tuple[int, ...]
    source: Source


class StepTerms(NamedTuple):
    """What a step would cost each of its rows that brings drafts."""

    cost: CostTable
    rows: int  # of the step
    riding: int  # rows that pay for a wider step without drafts of their own
    surcharge_s: float = 0.0  # per draft, beyond the step itself
    padded: bool = True  # whether the step may be padded to a cheaper width


class Speculator:
    """One request's index, its control, and its counts. `extend` with all tokens that are committed."""

    def __init__(
        self,
        tokens: Ids,
        barred: frozenset[int],
        replies: RecentReplies | None = None,
        experience: Experience | None = None,
    ) -> None:
        self.control = Control(experience=experience)
        self.drafted = 0
        self.accepted = 0
        self.plain_next = False  # a line was too close to call: the next step is without drafts
        self._index = NgramIndex(tokens, barred)
        self._replies = replies
        self._expected: tuple[int, int] | None = None  # the token that drafts wait for, and the length of the match

    def extend(self, tokens: list[int]) -> None:
        self._index.extend(tokens)

    def catch_up(self) -> None:
        """What need not be done while others wait."""
        self._index.catch_up()

    def proposal(self, limit: int) -> Proposal:
        """Up to `limit` tokens of what the text, or a recent reply, already said."""
        own = self._index.propose(limit)
        if own.matched >= SHORTEST_SHARED or self._replies is None:
            return own
        shared = self._replies.propose(limit, self._index.tail(LONGEST))
        return shared if shared.matched else own

    def wanted(self, source: Source, proposal: Proposal, limit: int, terms: StepTerms) -> Draft | None:
        """So many of the proposed tokens, `limit` at most, as are worth a check; None: none is."""
        limit = min(limit, len(proposal.tokens))
        wanted = self._number(source, proposal.matched, limit, terms) if limit > 0 else 0
        return Draft(proposal.tokens[:wanted], source) if wanted else None

    def wants_model(self, limit: int, terms: StepTerms) -> int:
        """How many tokens a draft model should propose."""
        return self._number(Source.DRAFT, 0, limit, terms)

    def foresees(self, proposal: Proposal, limit: int, terms: StepTerms) -> bool:
        """Whether drafts will be worth while if the token under way is the first of those proposed.

        Then it is read before the next step, which costs the overlap; `landed` tells whether that was right.
        """
        self._expected = None
        rest = Proposal(proposal.tokens[1:], proposal.matched)
        if self.wanted(Source.LOOKUP, rest, limit, terms) is None:
            return False
        self._expected = proposal.tokens[0], proposal.matched
        return True

    def landed(self, token: int) -> bool:
        """The token that `foresees` waited for: if it is another one, that was a draft refused. Whether it waited."""
        expected, self._expected = self._expected, None
        if expected is not None and token != expected[0]:
            self.control.missed(Source.LOOKUP, expected[1])
        return expected is not None

    def settled(self, draft: Draft | None, verdict: Verdict | None) -> None:
        """What became of a step's drafts; both None after a plain step."""
        if draft is None or verdict is None:
            self.control.step()
            return
        self.control.settled(draft.source, verdict.judged, verdict.matched, verdict.taken - verdict.matched)
        self.drafted += verdict.judged
        self.accepted += verdict.matched

    def _number(self, source: Source, matched: int, limit: int, terms: StepTerms) -> int:
        """How many drafts pay, up to `limit`."""
        return self.control.want(
            source,
            matched,
            terms.rows,
            terms.cost,
            limit,
            draft_s=terms.surcharge_s,
            riding=terms.riding,
            padded=terms.padded,
        )
