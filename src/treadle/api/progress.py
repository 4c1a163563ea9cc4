"""How far a prompt is, for clients that asked for it with `return_progress`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from treadle.output.stream import Event


class PromptProgress:
    """`totals` are the prompt tokens of each choice. Its time begins with its first progress event.

    The first one of the model itself tells what the prefix cache had; before it a small model may skim the prompt.
    """

    def __init__(self, totals: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._totals = totals
        self._clock = clock
        self._starts: dict[int, float] = {}
        self._cached: dict[int, int] = {}

    def of(self, index: int, event: Event) -> dict[str, int]:
        """`prompt_progress` for a progress event of that choice.

        A sequence that is computed once more after a fault computes its own reply too; that is no prompt.
        """
        total = self._totals[index]
        elapsed = round(1000 * (self._clock() - self._starts.setdefault(index, self._clock())))
        if event.prefilled is None:
            assert event.skimmed is not None
            skimmed = min(event.skimmed, total)
            return {"total": total, "cache": 0, "processed": 0, "skimmed": skimmed, "time_ms": elapsed}
        cached = self._cached.setdefault(index, event.prefilled)
        return {"total": total, "cache": cached, "processed": min(event.prefilled, total), "time_ms": elapsed}
