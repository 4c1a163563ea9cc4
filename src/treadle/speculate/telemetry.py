"""What speculation did, as numbers that only go up. No MLX, no clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from treadle.speculate.control import Source

LONGEST_COUNTED = 16  # accepted lengths from here on share the last bin


def _by_source() -> dict[Source, int]:
    return dict.fromkeys(Source, 0)


@dataclass(slots=True)
class SpeculationCounters:
    """Per model, or per request. One thread writes; `snapshot` may be called by any."""

    drafted: dict[Source, int] = field(default_factory=_by_source)
    accepted: dict[Source, int] = field(default_factory=_by_source)
    rounds: int = 0  # verify steps, whatever the number of rows
    rewinds: int = 0  # rows that had to take back refused drafts
    cooldowns: int = 0  # times that a source stopped because it did not pay
    ties: int = 0  # drafts left to the plain step because the top two logits were too close
    lengths: list[int] = field(default_factory=lambda: [0] * (LONGEST_COUNTED + 1))  # rows by accepted drafts
    verify_tokens: int = 0  # emitted by verify steps
    verify_s: float = 0.0
    plain_tokens: int = 0  # emitted by plain steps
    plain_s: float = 0.0

    def settled(self, source: Source, drafted: int, accepted: int) -> None:
        """One row's drafts of one source were checked. Raises ValueError unless 0 <= accepted <= drafted."""
        if not 0 <= accepted <= drafted:
            raise ValueError(f"{accepted} of {drafted} drafts cannot be accepted")
        self.drafted[source] += drafted
        self.accepted[source] += accepted

    def verified(self, accepted: Sequence[int], emitted: int, seconds: float) -> None:
        """One verify step: the accepted drafts of each row that had any, and the tokens emitted by all rows."""
        for length in accepted:
            self.lengths[min(length, LONGEST_COUNTED)] += 1
        self.rounds += 1
        self.verify_tokens += emitted
        self.verify_s += seconds

    def plain(self, emitted: int, seconds: float) -> None:
        """One plain step: the tokens emitted by all rows."""
        self.plain_tokens += emitted
        self.plain_s += seconds

    @property
    def rate(self) -> float | None:
        """Accepted drafts per draft; None before the first."""
        drafted = sum(self.drafted.values())
        return sum(self.accepted.values()) / drafted if drafted else None

    @property
    def speed_up(self) -> float | None:
        """Tokens per second of verify steps over those of plain steps; None until both were seen."""
        if not (self.verify_s > 0 and self.plain_s > 0 and self.plain_tokens):
            return None
        return (self.verify_tokens / self.verify_s) / (self.plain_tokens / self.plain_s)

    def snapshot(self) -> Mapping[str, Any]:
        """A copy that json.dumps accepts."""
        return {
            "drafted": {source.value: count for source, count in self.drafted.items()},
            "accepted": {source.value: count for source, count in self.accepted.items()},
            "rate": self.rate,
            "rounds": self.rounds,
            "rewinds": self.rewinds,
            "cooldowns": self.cooldowns,
            "ties": self.ties,
            "accepted_lengths": list(self.lengths),
            "verify_tokens": self.verify_tokens,
            "verify_s": self.verify_s,
            "plain_tokens": self.plain_tokens,
            "plain_s": self.plain_s,
            "speed_up": self.speed_up,
        }
