"""What the requests of one model have seen of each kind of draft, for those to come. Pure: no MLX, no clock.

A request begins with it and soon goes by what it sees itself. Where drafts did not pay, requests that never tried them
leave them alone but for a probe now and then, counted in steps of all requests together.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

PRIOR_WEIGHT = 2.0  # the prior counts as so many drafts
MOST_WEIGHT = 60.0  # drafts that are remembered, about


@dataclass(slots=True)
class Lane:
    """One kind of draft. `mean`: how likely the next draft is accepted; `weight`: drafts that this rests on."""

    experience: Experience
    prior: float
    pause: int  # steps of all requests between two probes, and of a request's first cool-down
    hits: float = 0.0
    weight: float = 0.0
    tried_at: int = 0

    @property
    def mean(self) -> float:
        return (PRIOR_WEIGHT * self.prior + self.hits) / (PRIOR_WEIGHT + self.weight)

    def see(self, judged: int, accepted: int) -> None:
        """`accepted` of `judged` drafts matched."""
        self.hits += accepted
        self.weight += judged
        kept = min(1.0, MOST_WEIGHT / max(self.weight, 1.0))
        self.hits *= kept
        self.weight *= kept
        self.tried_at = self.experience.steps
        if accepted and self.mean >= 0.5:
            self.pause = self.experience.warm_up

    def cool(self) -> None:
        """A request gave up, because drafts did not pay."""
        self.pause = min(2 * self.pause, self.experience.probe_every)

    def due(self) -> bool:
        """Whether it is time that some request tries again."""
        return self.experience.steps - self.tried_at >= self.pause


@dataclass(slots=True)
class Experience:
    """Of one model. `steps` of all its requests so far."""

    warm_up: int
    probe_every: int
    steps: int = 0
    lanes: dict[Hashable, Lane] = field(default_factory=dict)

    def of(self, key: Hashable, prior: float) -> Lane:
        lane = self.lanes.get(key)
        if lane is None:
            lane = self.lanes[key] = Lane(self, prior, self.warm_up)
        return lane
