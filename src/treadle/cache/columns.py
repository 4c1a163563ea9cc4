"""Where the tokens of some sequences lie in the buffers of one kind of layer. Engine thread only.

All layers of a kind (full attention, or attention over one window) share one `Columns`, because the same tokens
are written to the same columns in each of them. A step is `begin(counts)`, the forward, `end()`.

- `SoloColumns`: one sequence, columns in token order. Slices are exact, masks are `None` or `"causal"`.
- `BatchColumns`: several sequences in one buffer (`batch_columns.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from treadle.cache import geometry
from treadle.cache.batch_columns import BatchColumns as BatchColumns
from treadle.cache.geometry import needed_window
from treadle.models.upload import numbers_to, on_device

SINKS = 64  # columns at the beginning that are seen from everywhere, because models are used to look at them
FEW = 16  # a step of so many tokens sees all


class SoloColumns:
    """One sequence in token order. Column 0 holds token `first`; `length` tokens have rows."""

    def __init__(self, window: int | None, length: int = 0, first: int = 0) -> None:
        self.window = window
        self.length = length
        self.first = first
        self.count = 0
        self.gap = 0
        self.places: Any = None
        self.in_place = False
        self.sight: int | None = None  # see `look_back`
        self._told: Any = None

    num_rows = 1
    traced = False

    @property
    def partial(self) -> bool:
        """Whether exact rows are kept of some tokens only."""
        return self.window is not None

    def reaches(self, length: int) -> bool:
        """Whether the sequence can go back to its first `length` tokens."""
        return self.window is None or self.first == 0 or length - self.window + 1 >= self.first

    def start_at(self, length: int) -> None:
        """Say that the first `length` tokens came from outside, but for the exact rows of partial layers."""
        self.length = length
        self.first = length if self.partial else 0

    def needed(self, position: int, held: int) -> tuple[int, int]:
        """See `needed_window`."""
        return needed_window(self.window, position, held)

    def opened(self) -> BatchColumns:
        """Columns for several sequences of this kind, none yet."""
        return BatchColumns(self.window)

    def alone(self, row: int, held: int) -> SoloColumns:
        """Columns for a copy of the sequence whose last `held` tokens come along."""
        return SoloColumns(self.window, self.length, self.length - held)

    @property
    def lengths(self) -> list[int]:
        return [self.length]

    @property
    def offset(self) -> Any:
        """Where the step's tokens stand: the position of the first, or int32 [1, n] of each; see `stand`."""
        return self.length + self.gap if self.places is None else self.places

    @property
    def starts(self) -> Any:
        """`offset` as int32 [1], the same array for all layers; None where each token has a place of its own."""
        return None if self.places is not None else self._tell()[:1]

    @property
    def column(self) -> Any:
        """int32 [1]: the first column that this step writes."""
        return self._tell()[1:2]

    def stand(self, gaps: Sequence[int], places: Any) -> None:
        """Say where this step's tokens stand: so far behind their number in the row, or at `places`, int32 [1, n]."""
        self.gap, self.places = (gaps[0] if gaps else 0), places
        self._told = None

    @property
    def index(self) -> int:
        """The next column to be written."""
        return self.length - self.first

    @property
    def read_from(self) -> int:
        """The first column that the step's queries can need."""
        return 0 if self.window is None else max(0, self.index - self.window + 1)

    @property
    def read_to(self) -> int:
        """The end of the columns that hold tokens, this step's included."""
        return self.index + self.count

    def surplus(self, count: int) -> int:
        """Columns at the front that no later step can need, once there are enough of them to be worth a copy."""
        if self.window is None:
            return 0
        keep = self.window + geometry.SLACK
        return self.index - keep if self.index + count > 2 * keep and self.index > keep else 0

    @property
    def unseen(self) -> tuple[int, int]:
        """The columns, from and to, that the queries of this step do not see though they could; see `look_back`."""
        if self.sight is None or self.count <= FEW or self.index - self.sight <= SINKS:
            return 0, 0
        return SINKS, self.index - self.sight

    def begin(self, counts: Sequence[int]) -> None:
        self.count = counts[0]
        self._told = None

    def end(self) -> None:
        self.length += self.count
        self.count = 0

    def view(self, capacity: int) -> tuple[Any, Any, Any]:
        """What a "causal" step sees, as `BatchColumns.view_of`; positions count from column 0 here."""
        told = self._tell()
        return numbers_to(capacity), told[2:3], told[3:]

    def _tell(self) -> Any:
        """int32, what kernels are told in this step: where its first token stands, its column, what `view` gives."""
        if self._told is None:
            self._told = on_device([self.length + self.gap, self.index, *self._facts()], mx.int32)
        return self._told

    def _facts(self) -> tuple[int, ...]:
        return self.index, self.read_to, 0

    def rewind(self, row: int, n: int) -> None:
        """Take the last `n` tokens back. Raises ValueError where a window has passed them."""
        if n > self.length - self.first:
            raise ValueError(f"cannot rewind {n} tokens: only {self.length - self.first} are held")
        self.length -= n

    def make_mask(self, n: int, return_array: bool, window: int | None, additive: Any = None) -> Any:
        """`None`, `"causal"` or bool [n, columns read]; `window` is what the model file asks for.

        `additive` is for batches alone: an exact layout seldom needs an array.
        """
        window = self.window if self.window is not None else window
        total = self.index + n - self.read_from - (self.unseen[1] - self.unseen[0])
        if n == 1 and not return_array and (window is None or total <= window):
            return None
        if not return_array and (window is None or total <= window):
            return "causal"
        columns = mx.arange(total)[None]
        queries = mx.arange(total - n, total)[:, None]
        mask = columns <= queries
        return mask if window is None else mask & (columns > queries - window)


Columns = SoloColumns | BatchColumns
