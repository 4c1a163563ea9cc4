"""One request that waits or runs, as the recorder knows it from its outputs."""

from __future__ import annotations

from dataclasses import dataclass

from treadle.metrics.snapshot import FinishedRequest, LiveRequest
from treadle.types import Usage


@dataclass(slots=True)
class Track:
    """Times in the recorder's clock. `cached` and `computed` are the prompt's, and only grow."""

    id: str
    model: str
    prompt_tokens: int
    submitted: float
    state: str = "waiting"
    first: float | None = None  # when its first token came
    last: float | None = None  # when its newest tokens came
    generated: int = 0
    cached: int = 0
    computed: int = 0
    seen: int = 0  # how far in the prompt a progress report told that its computation was
    skimmed: int = 0  # prompt tokens that a small model has read, to say which of them are computed
    skimming: bool = False  # whether it is at it

    def prompt_done(self, cached: int, in_layers: int) -> tuple[int, int]:
        """So many prompt tokens are in the layers, of them `cached` for free; what is new: (cached, computed)."""
        new_cached = max(cached - self.cached, 0)
        self.cached += new_cached
        new_computed = max(min(in_layers, self.prompt_tokens) - self.cached - self.computed, 0)
        self.computed += new_computed
        return new_cached, new_computed

    def live(self, now: float) -> LiveRequest:
        return LiveRequest(
            id=self.id,
            job=self.id.partition(":")[0],
            model=self.model,
            state="skim" if self.state == "prefill" and self.skimming else self.state,
            prompt_tokens=self.prompt_tokens,
            prompt_computed=self.prompt_tokens if self.first is not None else max(self.seen, self.cached),
            prompt_skimmed=self.skimmed,
            cached_tokens=self.cached,
            generated_tokens=self.generated,
            age_s=round(now - self.submitted, 3),
            tokens_per_s=self.speed(),
        )

    def speed(self) -> float | None:
        """Tokens per second after the first; None before the second."""
        if self.first is None or self.last is None or self.last <= self.first or self.generated < 2:
            return None
        return round((self.generated - 1) / (self.last - self.first), 2)

    def ended(self, finish: str, usage: Usage, now: float, unix: float) -> FinishedRequest:
        prefill = self.computed / usage.prefill_s if usage.prefill_s > 0 and self.computed else None
        return FinishedRequest(
            id=self.id,
            model=self.model,
            finish=finish,
            ended=unix,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached,
            computed_tokens=self.computed,
            generated_tokens=usage.completion_tokens,
            queue_s=round(usage.queue_s, 6),
            ttft_s=None if self.first is None else round(self.first - self.submitted, 6),
            duration_s=round(now - self.submitted, 6),
            prefill_tokens_per_s=None if prefill is None else round(prefill, 2),
            decode_tokens_per_s=self.speed(),
            vision_s=round(usage.vision_s, 6),
        )
