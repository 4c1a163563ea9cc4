"""How many tokens to draft (docs/speculation.md). Pure: no MLX, no clock.

Everything is measured in plain steps: a round costs `ratio` of them and makes `accepted + 1` tokens. Acceptance is
learnt per lane: a source, and for lookup also the length of the match (2 and 3, 4 to 7, 8).

| situation                                             | drafts                                                    |
|-------------------------------------------------------|-----------------------------------------------------------|
| plain steps of about so many rows were never measured | 0                                                         |
| verify steps were never measured                      | as if they cost what plain steps cost                     |
| a lane was never tried by this request                | by what other requests saw, and at first by a prior: a    |
|                                                       | long match is likely to go on                             |
| expected tokens per second beat plain by `min_gain`   | the fewest within 1 % of the best number, and as many     |
|                                                       | more as the padding of the step has room for at no cost   |
| acceptance rises (> 80 %), or falls (< 50 %)          | more, or fewer: the best number moves                     |
| prices are the same as in the last rounds             | the same for up to `_STANDS` rounds, once much was seen   |
| no number beats plain                                 | 0: the lane cools down                                    |
| it has cooled for `warm_up` steps, then for twice as  | a probe: the cheapest number that would pay if all of it  |
| many each time, up to `probe_every`; a lane that the  | were accepted; 0 if none would                            |
| request never tried waits for steps of all requests   |                                                           |
| a round, or a probe, that might overdraw              | fewer, or 0                                               |

Overdrawing: the time lost to rounds, less the time won by them, never exceeds GRACE plain steps and ALLOWANCE of a
step per token made. Whatever the text does, n tokens take at most 1.02 n + 2 plain steps, as far as the cost table is
right; a round that a tie left without a token may add one, and so may steps that were read too early (`lost`). Time won
is kept up to CREDIT steps only, so that a text that changes its nature cannot lose it all again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from itertools import accumulate
from math import sqrt
from operator import mul
from typing import NamedTuple

from treadle.speculate.cost import MOST_WIDTH, CostTable
from treadle.speculate.experience import Experience, Lane

MIN_GAIN = 0.03
WARM_UP = 20  # steps
PROBE_EVERY = 200  # steps
GRACE = 2.0  # plain steps
ALLOWANCE = 0.02  # plain steps per token
CREDIT = 20.0  # plain steps

_DECAY = 0.97  # of what was seen, per round
_STANDS = 4  # rounds for which a decision stands at most, because one round tells little where much was seen
_STANDS_AFTER = 8  # one round for each so many since the last cool-down
_MOST_UNIT = 1e12  # sums in larger units are divided by it, so that they stay numbers
_PRIOR_WEIGHT = 4.0  # the prior counts as so many drafts
_COOLED_WEIGHT = 2.0  # and what is left of the evidence after a cool-down
_POOL_WEIGHT = 8.0  # and the mean of all positions, for each position
_DOUBT = 0.6  # standard errors by which an estimate is raised: what is little known is worth a try
_NEAR_BEST = 0.99


class Source(StrEnum):
    """Where drafts come from."""

    LOOKUP = "lookup"
    DRAFT = "draft"
    FORCED = "forced"


class Control:
    """The decisions for one request. `want` and, where it led to drafts, `settled`; `step` after every other step."""

    def __init__(
        self,
        min_gain: float = MIN_GAIN,
        warm_up: int = WARM_UP,
        probe_every: int = PROBE_EVERY,
        experience: Experience | None = None,
    ) -> None:
        """`experience`: what this model's requests have seen so far, and where this one adds what it sees."""
        self._min_gain = min_gain
        self._warm_up = warm_up
        self._probe_every = probe_every
        self._experience = experience or Experience(warm_up, probe_every)
        self._lanes: dict[tuple[Source, int], _Lane] = {}
        self._asked: dict[Source, _Round] = {}
        self._steps = 0
        self._balance = GRACE  # plain steps that may be lost
        self._cooldowns = 0

    @property
    def cooldowns(self) -> int:
        """Times that a lane stopped because it did not pay, after a probe included."""
        return self._cooldowns

    def want(
        self,
        source: Source,
        matched: int,
        rows: int,
        cost: CostTable,
        limit: int,
        *,
        draft_s: float = 0.0,
        riding: int = 0,
        padded: bool = True,
    ) -> int:
        """The number of drafts, 0 to `limit`, that makes most tokens per second.

        `matched`: tokens of the match that a lookup rests on, 0 for other sources. `rows`: of the step; `riding` of
        them, not this one, have no drafts and pay for the wider step all the same. `draft_s`: seconds per drafted
        token. `padded`: the step may be padded to a cheaper width.
        """
        self._asked.pop(source, None)
        lane = self._lane(source, matched)
        probing = lane.idle
        if not lane.ready(self._steps):
            return 0
        offers = _offers(rows, cost, limit, draft_s, (rows - riding) / rows, padded)
        if offers and offers[-1].most_loss > self._balance:
            offers = tuple(offer for offer in offers if offer.loss <= self._balance)
        chosen = self._best(lane, offers)
        if chosen is None and probing:
            chosen = self._cheapest(offers)
        if chosen is None:
            return 0
        self._asked[source] = _Round(lane, chosen.loss)
        return chosen.room

    def ready(self, source: Source, matched: int) -> bool:
        """Whether such drafts may be wanted now: they have not stopped, or a probe is due."""
        return self._lane(source, matched).ready(self._steps)

    def settled(self, source: Source, drafted: int, accepted: int, more: int = 1) -> None:
        """`accepted` of `drafted` judged drafts matched, and `more` tokens came with them: 0 after a tie.

        Drafts that nobody judged, behind a stop or left to a tie, do not count as drafted. Raises ValueError unless
        the last `want` of this source led to drafts that were not settled yet.
        """
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} of {drafted} drafts cannot be accepted")
        asked = self._asked.pop(source, None)
        if asked is None:
            raise ValueError(f"no drafts of {source.value} are to be settled")
        asked.lane.see(drafted, accepted)
        if asked.lane.streak >= self._warm_up:
            asked.lane.pause = self._warm_up
        won = accepted + more - 1
        self._balance = min(CREDIT, self._balance + won - asked.loss + ALLOWANCE * (accepted + more))
        self._count()

    def step(self) -> None:
        """One step without drafts of this request, its own or as a row that rides along."""
        self._balance = min(CREDIT, self._balance + ALLOWANCE)
        self._count()

    def missed(self, source: Source, matched: int) -> None:
        """Drafts that were not even checked: the token before them, known too early, came out otherwise."""
        self._lane(source, matched).see(1, 0)

    def lost(self, steps: float) -> None:
        """So many plain steps' time was lost beside the rounds themselves."""
        self._balance -= steps

    def _count(self) -> None:
        self._steps += 1
        self._experience.steps += 1

    def survival(self, source: Source, matched: int, count: int) -> tuple[float, ...]:
        """The probability, as decisions take it, that draft i is accepted, for i = 1 to `count`."""
        return tuple(self._lane(source, matched).survival(count))

    def _lane(self, source: Source, matched: int) -> _Lane:
        key, prior = _prior(source, matched)
        lane = self._lanes.get((source, key))
        if lane is None:
            shared = self._experience.of((source, key), prior)
            lane = self._lanes[source, key] = _Lane(shared, shared.mean, shared.pause)
        return lane

    def _best(self, lane: _Lane, offers: tuple[_Offer, ...]) -> _Offer | None:
        if not offers:
            return None
        if lane.stands > 0 and lane.decided[0] is offers:
            return lane.decided[1]
        expected = list(accumulate(lane.survival(offers[-1].drafts)))
        rates = [(1 + offer.share * expected[offer.drafts - 1]) / offer.ratio for offer in offers]
        best = max(rates)
        if best < 1 + self._min_gain:
            self._cool(lane)
            return None
        enough = best * _NEAR_BEST
        chosen = offers[next(i for i, rate in enumerate(rates) if rate >= enough)]
        lane.decided, lane.stands = (offers, chosen), min(_STANDS, lane.streak // _STANDS_AFTER)
        return chosen

    def _cool(self, lane: _Lane) -> None:
        if lane.idle:
            return
        if lane.streak:
            self._cooldowns += 1
        lane.cool(self._steps)
        lane.pause = min(2 * lane.pause, self._probe_every)

    def _cheapest(self, offers: tuple[_Offer, ...]) -> _Offer | None:
        paying = [offer for offer in offers if offer.rate(offer.drafts) >= 1 + self._min_gain]
        return min(paying, key=lambda offer: offer.ratio) if paying else None


def may_pay(rows: int, cost: CostTable, limit: int, padded: bool) -> bool:
    """Whether drafts of all rows pay if all of them are accepted; if not, nobody need be asked for any."""

    def found() -> bool:
        offers = _priced(rows, cost, limit, 0.0, 1.0, padded)
        return any(offer.rate(offer.drafts) >= 1 + MIN_GAIN for offer in offers)

    return cost.plain(rows) is not None and cost.rough(("may pay", rows, limit, padded), found)


def _offers(rows: int, cost: CostTable, limit: int, draft_s: float, share: float, padded: bool) -> tuple[_Offer, ...]:
    """What each number of drafts costs; none while plain steps of so many rows are not known."""
    if draft_s:  # a price of each moment
        return _priced(rows, cost, limit, draft_s, share, padded)
    key = (rows, limit, share, padded)
    return cost.memo(key, lambda: _priced(rows, cost, limit, draft_s, share, padded))


def _priced(rows: int, cost: CostTable, limit: int, draft_s: float, share: float, padded: bool) -> tuple[_Offer, ...]:
    plain = cost.plain(rows)
    if plain is None:
        return ()
    steps = cost.steps(rows, max(limit + 1, MOST_WIDTH), padded)
    offers: list[_Offer] = []
    for drafts in range(1, limit + 1):
        seconds, width = (steps[drafts].seconds, steps[drafts].width) if steps else (plain, drafts + 1)
        ratio = max(1.0, (seconds + drafts * draft_s) / plain)  # only drafts that are right win anything
        loss = (ratio - 1) / share
        most = max(loss, offers[-1].most_loss) if offers else loss
        room = drafts if draft_s else max(drafts, min(limit, width - 1))
        offers.append(_Offer(drafts, ratio, loss, most, share, room))
    return tuple(offers)


@dataclass(frozen=True, slots=True)
class _Offer:
    """A number of drafts and its price in plain steps."""

    drafts: int
    ratio: float  # what the whole step costs
    loss: float  # what one drafting row loses if nothing is accepted
    most_loss: float  # the greatest of those up to this number
    share: float  # of rows that draft
    room: int  # so many drafts cost no more

    def rate(self, accepted: float) -> float:
        """Tokens of all rows per plain step's time, relative to plain steps."""
        return (1 + self.share * accepted) / self.ratio


class _Round(NamedTuple):
    """What the last `want` of a source was about."""

    lane: _Lane
    loss: float


@dataclass(slots=True)
class _Lane:
    """What was seen of one kind of draft: of the drafts at each position that were judged, how many were accepted.

    Instead of what was seen fading, what is new counts for more: `unit` is what the latest round counts for.
    """

    shared: Lane
    prior: float
    pause: int  # steps of the next cool-down
    weight: float = _PRIOR_WEIGHT
    hits: list[float] = field(default_factory=list)
    trials: list[float] = field(default_factory=list)
    unit: float = 1.0
    idle: bool = False
    tried: bool = False
    resume: int = 0  # the step at which a probe is due
    streak: int = 0  # rounds since the last cool-down
    stands: int = 0  # rounds for which `decided` holds: what was chosen, and of which offers
    decided: tuple[tuple[_Offer, ...], _Offer | None] = ((), None)

    def see(self, drafted: int, accepted: int) -> None:
        judged = min(accepted + 1, drafted)
        if judged > len(self.hits):
            self.hits += [0.0] * (judged - len(self.hits))
            self.trials += [0.0] * (judged - len(self.trials))
        self.unit /= _DECAY
        for i in range(judged):
            self.trials[i] += self.unit
        for i in range(accepted):
            self.hits[i] += self.unit
        if self.unit > _MOST_UNIT:
            self._begin_at_one()
        self.tried, self.idle = True, False
        self.streak += 1
        self.stands -= 1
        self.shared.see(judged, accepted)

    def _begin_at_one(self) -> None:
        self.hits, self.trials = ([x / self.unit for x in sums] for sums in (self.hits, self.trials))
        self.unit = 1.0

    def survival(self, count: int) -> list[float]:
        """The probability that draft i is accepted, for i = 1 to `count`."""
        mean = self._mean()
        certain = self.weight + sum(self.trials) / self.unit + (0 if self.tried else self.shared.weight)
        mean = min(1.0, mean + _DOUBT * sqrt(mean * (1 - mean) / certain))
        weight = _POOL_WEIGHT * self.unit
        pooled = weight * mean
        known = zip(self.hits[:count], self.trials, strict=False)
        chances = [(pooled + hits) / (weight + trials) for hits, trials in known]
        chances += [mean] * (count - len(chances))
        return list(accumulate(chances, mul))

    def ready(self, now: int) -> bool:
        """Whether drafts may be wanted: the lane is in use, or may probe."""
        return not self.idle or (now >= self.resume if self.tried else self.shared.due())

    def cool(self, now: int) -> None:
        """Stop until a probe; little of the evidence is kept, so that the probe can overturn it."""
        if self.streak:
            self.prior, self.weight = self._mean(), _COOLED_WEIGHT
            self.hits, self.trials, self.unit = [], [], 1.0
            self.shared.cool()
        self.idle, self.streak, self.stands, self.resume = True, 0, 0, now + self.pause

    def _mean(self) -> float:
        weight = self.weight * self.unit
        return (weight * self.prior + sum(self.hits)) / (weight + sum(self.trials))


def _prior(source: Source, matched: int) -> tuple[int, float]:
    """The lane within the source, and how likely the next draft is accepted before anything was seen."""
    if source is Source.FORCED:
        return 0, 0.99
    if source is Source.DRAFT:
        return 0, 0.6
    if matched >= 8:
        return 8, 0.85
    return (4, 0.6) if matched >= 4 else (2, 0.35)
