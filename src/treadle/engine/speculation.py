"""Where the loop meets speculation: which rows bring drafts to the next step, and what became of them.

`foresees` before a step, `plan` when nothing is under way, `settle` after a checked step, `plain` after any other. What
a step costs is measured here, so that drafts are made only where they pay (`speculate/control.py`). Engine thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from treadle.engine.following import Following
from treadle.engine.group import Flight, Group
from treadle.engine.sequence import Found, Sequence
from treadle.models.blocks import Traces
from treadle.speculate.accept import Verdict, judge
from treadle.speculate.control import PROBE_EVERY, WARM_UP, Source, may_pay
from treadle.speculate.cost import CostTable
from treadle.speculate.experience import Experience
from treadle.speculate.lookup import Proposal, RecentReplies
from treadle.speculate.speculator import Draft, Speculator, StepTerms
from treadle.speculate.telemetry import SpeculationCounters
from treadle.types import Batching, Caps, KvFormat, LayerKind

log = logging.getLogger("treadle.engine")
T = TypeVar("T")

MOST_DRAFTS = 15  # per row and step: with the token before them, 16
LONG_MATCH = 4  # tokens from which on a match is trusted more than the draft model
REPLY_TOKENS = 65536  # of recent replies that are remembered
MOST_DENIED = 12  # steps for which nobody is asked if drafts do not pay: asking costs the host time
NOTHING = Draft((), Source.LOOKUP)
Drafts = dict[Sequence, Draft]


class Offer(NamedTuple):
    """What might be drafted, and where it is from."""

    source: Source
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Plan:
    """The drafts of a step, and the tokens per row to which padding it is cheapest."""

    drafts: Mapping[Sequence, Draft]
    width: int


class Speculation:
    """One model's. `noise`: logits closer than this may change places in a step over several tokens.

    `lookup`: whether drafts come from the text itself; `following`: the draft model, if there is one. `barred` ids are
    never drafted. Forced tokens of a grammar are drafted in any case. `counters` go on from an earlier load.
    """

    def __init__(
        self,
        caps: Caps,
        clock: Callable[[], float],
        *,
        lookup: bool = True,
        following: Following | None = None,
        cost: CostTable | None = None,
        noise: float = 0.0,
        barred: frozenset[int] = frozenset(),
        counters: SpeculationCounters | None = None,
    ) -> None:
        self.cost = cost or CostTable()
        self.counters = counters or SpeculationCounters()
        self.following = following
        self.noise = noise
        self.fault = ""  # why the draft model is no longer asked
        self._caps = caps
        self._clock = clock
        self._lookup = lookup
        self._barred = barred
        self._recurrent = LayerKind.STATE in caps.layers
        self._replies = RecentReplies(REPLY_TOKENS, barred)
        self._experience = Experience(WARM_UP, PROBE_EVERY)
        self._costs: dict[KvFormat, CostTable] = {}  # of rows in other formats than the model's
        self._planning_s = 0.0
        self._traces = Traces.count  # made up to the last step
        self._blamed: list[Sequence] = []  # rows for whose sake the device has had nothing to do since `_idle_since`
        self._idle_since = 0.0

    # A sequence's life

    def begin(self, sequence: Sequence) -> None:
        """The sequence starts to decode."""
        if not sequence.request.speculation:
            return
        shared = self._replies if not sequence.request.cache_salt else None
        if sequence.speculator is None:
            sequence.speculator = Speculator(sequence.text, self._barred, shared, self._experience)
        if self.following is not None:
            self.following.begin(sequence)

    def leave(self, sequence: Sequence, stop_id: int | None) -> None:
        """The sequence decodes no more: it is over, or starts again."""
        self._tried(lambda following: following.end(sequence, stop_id), None)

    def end(self, sequence: Sequence, stop_id: int | None) -> None:
        """The sequence is over."""
        self.leave(sequence, stop_id)
        if sequence.speculator is not None:
            self.counters.cooldowns += sequence.speculator.control.cooldowns
            if not sequence.request.cache_salt:
                self._replies.add(sequence.tokens[sequence.num_prompt :].tolist())

    # The draft model

    def catch_up(self, num_tokens: int) -> int:
        """Let the draft model read so much of what a running sequence consists of; how many tokens it did."""
        return self._tried(lambda following: following.catch_up(num_tokens), 0)

    @property
    def lagging(self) -> bool:
        """Whether a running sequence has tokens that the draft model should read."""
        return self.following is not None and self.following.lagging()

    def _tried(self, run: Callable[[Following], T], otherwise: T) -> T:
        """What the draft model says. A failure ends its use, and nobody's request."""
        following = self.following
        if following is None:
            return otherwise
        try:
            return run(following)
        except Exception as error:
            log.exception("The draft model failed; going on without it.")
            self.fault = f"The draft model failed ({type(error).__name__}: {error})."
            self.following = None
            following.give_up()
            return otherwise

    # Before a step

    def foresees(self, group: Group) -> bool:
        """Whether the step under way should be read before the next, because that one will probably bring drafts.

        Where drafts did not pay, rows are not asked again for as many steps as they were denied in a row.
        """
        if group.denied:
            group.denied -= 1
            return False
        if not self._may(group):
            return False
        rows = [row for row in group.rows if self._free(row, launched=1)]
        offers = self._offers(rows, launched=1)
        count = self._candidates(rows, offers)
        if not count:
            return False
        terms = self._terms(group, count)
        expected = [self._expects(row, offers.get(row), terms) for row in rows]  # each is told, not only the first
        if any(expected):
            group.denials = 0
            return True
        group.denials += 1
        group.denied = min(MOST_DENIED, group.denials)
        return False

    def _expects(self, row: Sequence, offer: Offer | None, terms: StepTerms) -> bool:
        assert row.speculator is not None
        if offer is not None and row.speculator.foresees(offer.proposal, _limit(row, launched=1), terms):
            return True
        return self._models(row, terms) > 0

    def landed(self, group: Group) -> None:
        """The step that `foresees` wanted read was read."""
        self._idle_since = self._clock()
        waited = [(row, row.speculator) for row in group.rows if row.speculator is not None]
        self._blamed = [row for row, speculator in waited if speculator.landed(int(row.tokens[-1]))]

    def plan(self, group: Group) -> Plan | None:
        """The drafts of the next step; None: it is a plain one. Nothing may be under way."""
        began = self._clock()
        pending = any(row.pending > 1 for row in group.rows)
        drafts: Drafts = {}
        if self._may(group):
            rows = [row for row in group.rows if self._free(row)]
            offers = self._offers(rows)
            drafts = self._drafts(group, rows, offers)
        for row in group.rows:
            if row.speculator is not None:
                row.speculator.plain_next = False
        if not drafts and not pending:
            return None
        longest = max(row.pending + len(drafts.get(row, NOTHING).tokens) for row in group.rows)
        self._planning_s = 0.0 if self.following else self._clock() - began  # the draft model's has a price of its own
        return Plan(drafts, longest if self._recurrent else self._padded(group, longest))

    def _drafts(self, group: Group, rows: Several[Sequence], offers: Mapping[Sequence, Offer]) -> Drafts:
        count = self._candidates(rows, offers)
        if not count:
            return {}
        terms = self._terms(group, count)
        drafts = self._text_drafts(offers, terms)
        if self.following is not None:
            self._add_model_drafts(rows, offers, terms, drafts)
        elif 0 < len(drafts) < count:  # those who do not draft after all ride along
            drafts = self._text_drafts({row: offers[row] for row in drafts}, self._terms(group, len(drafts)))
        return drafts

    def _padded(self, group: Group, longest: int) -> int:
        """Tokens per row that make the step cheapest; none of them lies beyond the context."""
        room = self._caps.context_length - max(row.computed + row.gap for row in group.rows)
        return self._cost_of(group.rows).cheapest_width(
            len(group.rows), longest, max(longest, min(MOST_DRAFTS + 1, room))
        )

    def _may(self, group: Group) -> bool:
        """Whether drafts may be made now. What plain steps cost is measured again when it was not for long."""
        if len(group.rows) > 1 and self._caps.batching is not Batching.RAGGED:
            return False
        cost, num_rows = self._cost_of(group.rows), len(group.rows)
        return not cost.plain_due(num_rows) and may_pay(num_rows, cost, MOST_DRAFTS, not self._recurrent)

    def _cost_of(self, rows: Several[Sequence]) -> CostTable:
        """Rows held in another way than the model's have prices of their own, which begin as those of the model's."""
        kv = rows[0].kv if rows else None
        if kv is not None and kv not in self._costs:
            self._costs[kv] = self.cost.unpadded()  # no trace serves such rows
        return (self.cost if kv is None else self._costs[kv]).at(sum(row.computed for row in rows))

    def _free(self, row: Sequence, launched: int = 0) -> bool:
        """Whether a row may bring drafts."""
        speculator = row.speculator
        return (
            speculator is not None
            and row.first_token is not None
            and row.pending == 1 - launched
            and not speculator.plain_next
        )

    def _terms(self, group: Group, candidates: int) -> StepTerms:
        """`candidates`: about so many of its rows bring drafts."""
        num_rows = len(group.rows)
        riding = num_rows - max(1, candidates)
        cost = self._cost_of(group.rows)
        return StepTerms(cost, num_rows, riding, self._catching_up(cost, num_rows), not self._recurrent)

    def _catching_up(self, cost: CostTable, num_rows: int) -> float:
        """Seconds per draft that a recurrent model loses by computing accepted tokens again, about every other time."""
        if not self._recurrent:
            return 0.0
        wide, plain = cost.seconds(num_rows * 4), cost.plain(num_rows)
        if wide is None or plain is None:
            return 0.0
        return max(0.0, wide - plain) / 8

    def _offers(self, rows: Several[Sequence], launched: int = 0) -> dict[Sequence, Offer]:
        """What the grammar or the text of each row proposes. `launched`: with the token under way before it."""
        offers: dict[Sequence, Offer] = {}
        for row in rows:
            assert row.speculator is not None
            limit = _limit(row, launched)
            if limit < 1:
                continue
            if not launched and row.matcher is not None and (tokens := row.matcher.forced()):
                offers[row] = Offer(Source.FORCED, Proposal(tuple(tokens)))
            elif self._lookup:
                proposal = row.speculator.proposal(limit + launched)
                if len(proposal.tokens) > launched:
                    offers[row] = Offer(Source.LOOKUP, proposal)
        return offers

    def _candidates(self, rows: Several[Sequence], offers: Mapping[Sequence, Offer]) -> int:
        """How many rows may bring drafts: each pays for a wider step the less, the more of them do."""
        asked = offers if self.following is None else rows
        return sum(self._may_draft(row, offers.get(row)) for row in asked)

    def _may_draft(self, row: Sequence, offer: Offer | None) -> bool:
        assert row.speculator is not None
        ready = row.speculator.control.ready
        if offer is not None and ready(offer.source, offer.proposal.matched):
            return True
        return self._follows(row) and ready(Source.DRAFT, 0)

    def _text_drafts(self, offers: Mapping[Sequence, Offer], terms: StepTerms, last: bool = False) -> Drafts:
        """`last`: nothing else will be asked, so that a short match has its turn too."""
        drafts: Drafts = {}
        for row, (source, proposal) in offers.items():
            assert row.speculator is not None
            short = source is Source.LOOKUP and proposal.matched < LONG_MATCH
            if last or not (short and self._follows(row)):
                draft = row.speculator.wanted(source, proposal, _limit(row), terms)
                if draft is not None:
                    drafts[row] = draft
        return drafts

    def _follows(self, row: Sequence) -> bool:
        return self.following is not None and self.following.level(row)

    def _models(self, row: Sequence, terms: StepTerms) -> int:
        """How many tokens the draft model should propose for a row."""
        if self.following is None or not self.following.level(row):
            return 0
        assert row.speculator is not None
        share = self.following.seconds / len(self.following.draft.keys) * terms.rows
        dearer = terms._replace(surcharge_s=terms.surcharge_s + share)
        return row.speculator.wants_model(_limit(row), dearer)

    def _add_model_drafts(
        self, rows: Several[Sequence], offers: Mapping[Sequence, Offer], terms: StepTerms, drafts: Drafts
    ) -> None:
        wanted = {row: n for row in rows if row not in drafts and (n := self._models(row, terms))}
        if wanted:
            nothing: dict[Sequence, tuple[int, ...]] = {}
            for row, made in self._tried(lambda following: following.drafts(wanted), nothing).items():
                if tokens := self._sound(made):
                    drafts[row] = Draft(tokens, Source.DRAFT)
                else:
                    self._agree(row, 0)
        # A match too short to be trusted before the draft model was asked.
        left = {row: offer for row, offer in offers.items() if row not in drafts and self._follows(row)}
        drafts.update(self._text_drafts(left, terms, last=True))

    def _sound(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Up to the first id that must not be drafted or that this model does not have."""
        for i, token in enumerate(tokens):
            if token in self._barred or token >= self._caps.vocab_size:
                return tokens[:i]
        return tokens

    def meanwhile(self, group: Group) -> None:
        """While the device computes a checked step: what need not be done while it waits."""
        for row in group.rows:
            if row.speculator is not None:
                row.speculator.catch_up()

    # After a step

    def judge(self, flight: Flight, found: Several[Found]) -> list[Verdict]:
        """What stands of a checked step, row by row."""
        return [
            judge(draft, line.tokens, line.gaps, self.noise, row.request.stop_ids, row.room - row.num_generated)
            for row, draft, line in zip(flight.rows, flight.drafts, found, strict=True)
        ]

    def settle(self, plan: Plan, flight: Flight, verdicts: Several[Verdict], seconds: float) -> None:
        """A checked step is over. Called before its tokens are committed. `seconds` since `plan`."""
        seconds += self._planning_s
        for row, verdict in zip(flight.rows, verdicts, strict=True):
            draft = plan.drafts.get(row)
            if row.speculator is not None:
                row.speculator.settled(draft, verdict)
                row.speculator.plain_next = verdict.tie and verdict.taken == 0
            if draft is not None:
                self.counters.settled(draft.source, verdict.judged, verdict.matched)
                self.counters.rewinds += len(draft.tokens) > verdict.kept
            self.counters.ties += verdict.tie
            if self.following is not None:
                self._agree(row, verdict.kept if draft is not None and draft.source is Source.DRAFT else 0)
        with_drafts = [v.matched for row, v in zip(flight.rows, verdicts, strict=True) if row in plan.drafts]
        self.counters.verified(with_drafts, sum(v.taken for v in verdicts), seconds)
        if not self._traced():
            self._cost_of(flight.rows).observe(len(flight.rows) * max(flight.fed), seconds)
        self._blamed, self._idle_since = list(plan.drafts), self._clock()

    def _agree(self, row: Sequence, accepted: int) -> None:
        """Tell the draft model how many of its last drafts are right."""
        length = len(row.tokens) + accepted
        self._tried(lambda following: following.keep(row, length), None)

    def _traced(self) -> bool:
        """Whether a function was traced since the last step: that takes longer than a step, and comes once."""
        before, self._traces = self._traces, Traces.count
        return self._traces != before

    def plain(self, rows: Several[Sequence], seconds: float | None) -> None:
        """A plain step of these rows is over. `seconds` None: it did not overlap with others, so it tells nothing.

        Then the device had to wait until it was launched: a price of drafts just checked, or waited for in vain.
        """
        for row in rows:
            if row.speculator is not None:
                row.speculator.settled(None, None)
        cost, traced = self._cost_of(rows), self._traced()
        if seconds is not None:
            if not traced:
                cost.observe_plain(len(rows), seconds)
                self.counters.plain(len(rows), seconds)
        elif (blamed := [row for row in self._blamed if row in rows]) and (usual := cost.plain(len(rows))):
            share = min(1.0, (self._clock() - self._idle_since) / usual) / len(blamed)
            for row in blamed:
                if row.speculator is not None:
                    row.speculator.control.lost(share)
        self._blamed = []


def _limit(row: Sequence, launched: int = 0) -> int:
    """Most drafts that a row may bring, after so many steps under way: its reply has room for no more."""
    return min(MOST_DRAFTS, row.room - row.num_generated - 1 - launched)
