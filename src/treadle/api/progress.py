"""How far a prompt is, for clients that asked for it with `return_progress`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from treadle.output.stream import Event


class PromptProgress:
    """`totals` are the prompt tokens of each choice. Its time begins with its first progress event, which tells what
    the prefix cache had."""

    def __init__(self, totals: Sequence[int], clock: Callable[[], float] = time.perf_counter) -> None:
        self._totals = totals
        self._clock = clock
        self._starts: dict[int, tuple[float, int]] = {}

    def of(self, index: int, event: Event) -> dict[str, int]:
        """`prompt_progress` for a progress event of that choice.

        A sequence that is computed once more after a fault computes its own reply too; that is no prompt.
        """
        assert event.prefilled is not None
        total = self._totals[index]
        began, cached = self._starts.setdefault(index, (self._clock(), event.prefilled))
        elapsed = round(1000 * (self._clock() - began))
        return {"total": total, "cache": cached, "processed": min(event.prefilled, total), "time_ms": elapsed}
