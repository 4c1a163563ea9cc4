"""The memory of some sequences in every layer of a model: the only place that knows shapes and batch rows.

mlx-lm's model files call a cache object per layer (`offset`, `make_mask`, `update_and_fetch`; recurrent layers index
it). `Layers.caches` is that list. One `Layers` holds one sequence in exact layout, or several as rows of shared
buffers. Engine thread only. Arrays may be lazy; only what moves to other buffers is evaluated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import mlx.core as mx

from treadle.cache.columns import BatchColumns, Columns, SoloColumns
from treadle.cache.rows import Rows as Rows
from treadle.cache.rows import held_columns
from treadle.runtime import mlx_lm_module

ArraysCache: Any = mlx_lm_module("models.cache").ArraysCache


class State(ArraysCache):  # type: ignore[misc]
    """The state of one recurrent layer: arrays [rows, ...] that are replaced, never changed, so a reference is a copy.

    Subclasses mlx-lm's class because some model files ask for it by type. `lengths` (int32 [rows] or None) tells a
    step with slices of different length where each row ends.
    """

    def join(self, other: State, rows: int) -> None:
        self.cache: list[Any] = [_stacked(a, b, rows) for a, b in zip(self.cache, other.cache, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        index = mx.array(list(rows))
        self.cache = [None if a is None else a[index] for a in self.cache]

    def arrays(self) -> list[Any]:
        return [a for a in self.cache if a is not None]


class Stack:
    """Several caches of one layer, indexed by the model file."""

    def __init__(self, children: Sequence[Any]) -> None:
        self.children = list(children)

    def __getitem__(self, i: int) -> Any:
        return self.children[i]


def _where(rows: Any, before: Any, after: Any) -> Any:
    """`before` in the rows that are set, `after` in the others; what did not exist was zeros."""
    if after is None:
        return before
    chosen = rows.reshape(-1, *[1] * (after.ndim - 1))
    return mx.where(chosen, mx.zeros_like(after) if before is None else before, after)


def _stacked(a: Any, b: Any, rows: int) -> Any:
    """Append one row; an array that does not exist yet is a row of zeros, as every model file starts it."""
    if a is None and b is None:
        return None
    if a is None:
        a = mx.zeros((rows, *b.shape[1:]), b.dtype)
    if b is None:
        b = mx.zeros((1, *a.shape[1:]), a.dtype)
    return mx.concatenate([a, b])


class Layers:
    """Every layer's memory of one or more sequences (rows).

    A step is `begin(counts)`, `model(ids, cache=layers.caches)`, `end()`. Row numbers follow joins; `drop(row)`
    moves the last row into the hole, and the caller's list must do the same.
    """

    def __init__(self, caches: Sequence[Any], columns: dict[int | None, Columns], foreign: Sequence[Any] = ()) -> None:
        self.caches = list(caches)
        self.columns = columns
        self.foreign = list(foreign)
        self.rows = [c for c in self._flat() if isinstance(c, Rows)]
        self.states = [c for c in self._flat() if isinstance(c, State)]
        self._lengths = [0]
        self._counts = [0]

    def _flat(self) -> Iterator[Any]:
        for cache in self.caches:
            yield from cache.children if isinstance(cache, Stack) else [cache]

    @property
    def num_rows(self) -> int:
        return len(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row that are in the layers."""
        return self._lengths

    def arrays(self) -> list[Any]:
        """Every array, for evaluation."""
        members: list[Any] = [*self.rows, *self.states]
        own = [a for layer in members for a in layer.arrays()]
        return own + [a for c in self.foreign for a in _foreign_arrays(c)]

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays())

    def row_bytes(self) -> dict[int | None, int]:
        """Bytes per token of all layers of a kind, by window; only after a step, when shapes are known."""
        sizes = dict.fromkeys(self.columns, 0)
        for r in self.rows:
            sizes[r.columns.window] += r.token_bytes()
        return sizes

    def reserve(self, num_tokens: int) -> None:
        """Make room for so many tokens at the first write, instead of growing step by step."""
        for r in self.rows:
            window = r.columns.window
            r.reserve = num_tokens if window is None else min(num_tokens, window)

    def look_back(self, num_tokens: int) -> None:
        """Let steps of several tokens see the first `SINKS` tokens and this many before them only, in layers that see
        all: the time for a long prompt then grows with its length alone. Of one sequence whose rows are exact.
        """
        for window, columns in self.columns.items():
            if window is None:
                assert isinstance(columns, SoloColumns) and not columns.partial
                columns.sight = num_tokens

    def begin(
        self, counts: Sequence[int], gaps: Sequence[int] = (), places: Any = None, in_place: bool = False
    ) -> None:
        """Announce how many tokens each row gets in the coming forward (ids are [rows, max(counts)]).

        Tokens stand at their numbers in the row, or `gaps[row]` behind them, where some before them were left out; with
        gaps among themselves, those of a single sequence stand at `places`, int32 [1, n].

        `in_place`: kernels may write this step's rows where they stay, behind MLX's back. The caller promises that the
        forward's result is evaluated before anything else reads these layers, or that all else needs that result.
        """
        self._counts = list(counts)
        self._trim(max(counts))
        for columns in self.columns.values():
            columns.begin(counts)
            columns.stand(gaps, places)
            columns.in_place = in_place
        for r in self.rows:
            if r.grow():
                mx.eval(r.arrays())  # or the old and the new buffers of all layers would be there at once
        ragged = len(set(counts)) > 1
        for state in self.states:
            state.lengths = mx.array(self._counts, mx.int32) if ragged else None

    def end(self) -> None:
        """The forward was built: its tokens are part of every layer now."""
        for columns in self.columns.values():
            columns.end()
        for state in self.states:
            state.lengths = None
        for r in self.rows:
            r.settle()
        self._trim(0)
        self._lengths = [a + b for a, b in zip(self._lengths, self._counts, strict=True)]

    def rewind(self, row: int, n: int) -> None:
        """Take back the last `n` tokens of a row. Raises ValueError where a layer cannot (state, foreign)."""
        if n and (self.states or self.foreign):
            raise ValueError("recurrent and foreign layers rewind only to a checkpoint")
        for columns in self.columns.values():
            columns.rewind(row, n)
        self._lengths[row] -= n

    def states_now(self) -> list[list[Any]]:
        """The recurrent layers of all rows, for `go_back`: references, because steps replace arrays."""
        return [list(state.cache) for state in self.states]

    def go_back(self, states: Sequence[Sequence[Any]], counts: Mapping[int, int]) -> None:
        """Take back the last step, of `counts[row]` tokens, for some rows; `states` are those from before it."""
        for row, n in counts.items():
            for columns in self.columns.values():
                columns.rewind(row, n)
            self._lengths[row] -= n
        refused = mx.array([row in counts for row in range(self.num_rows)])
        for state, before in zip(self.states, states, strict=True):
            state.cache = [_where(refused, a, b) for a, b in zip(before, state.cache, strict=True)]

    def scrub(self) -> None:
        """Make zeros of values that are not finite: what was taken back is still read, with a weight of 0."""
        for r in self.rows:
            if r.keys is not None:
                r.keys, r.values = (mx.where(mx.isfinite(a), a, mx.zeros((), a.dtype)) for a in (r.keys, r.values))

    def set_length(self, length: int) -> None:
        """Say how many tokens were put into a single sequence's layers from outside."""
        self._lengths = [length]

    def state_of(self, row: int) -> list[list[Any]]:
        """The recurrent layers of a row: arrays [1, ...], or None where a layer has not begun.

        Model files leave views of whole chunks behind (the last inputs of a convolution): those are cut to size.
        """
        if self.num_rows == 1:
            for state in self.states:
                state.cache = [None if a is None else mx.contiguous(a) for a in state.cache]
            return [list(state.cache) for state in self.states]
        return [[None if a is None else mx.contiguous(a[row : row + 1]) for a in s.cache] for s in self.states]

    def join(self, other: Layers) -> int:
        """Move the one sequence of `other` in as a new row and return its number; `other` must not be used any more.

        Evaluated layer by layer, so that no more than one layer is held twice.
        """
        if self.foreign or other.foreign:
            raise ValueError("foreign layers hold one sequence only")
        if self.num_rows == 1:
            self._open()
        for window, columns in self.columns.items():
            source = other.columns[window]
            assert isinstance(columns, BatchColumns) and isinstance(source, SoloColumns)
            row, start = columns.take_over(source)
            for mine, theirs in zip(self._of(columns), other._of(source), strict=True):
                mine.adopt(row, start, theirs)
                mx.eval(mine.arrays())
                theirs.release()
        for a, b in zip(self.states, other.states, strict=True):
            a.join(b, self.num_rows)
        self._lengths.append(other.lengths[0])
        return self.num_rows - 1

    def drop(self, row: int) -> None:
        """Forget a row; the last one takes its number. One remaining row gets its exact layout back."""
        last = self.num_rows - 1
        for r in self.rows:
            r.drop(row, last)
        for columns in self.columns.values():
            assert isinstance(columns, BatchColumns)
            columns.drop(row)
        order = list(range(last))
        if row != last:
            order[row] = last
        for state in self.states:
            state.keep(order)
        self._lengths[row] = self._lengths[-1]
        self._lengths.pop()
        if self.num_rows == 1:
            self._close()

    def take(self, row: int) -> Layers:
        """A copy of one row, alone in exact layout."""
        columns: dict[int | None, Columns] = {}
        copies: dict[int, Any] = {}
        twin: Any
        for window, held in self.columns.items():
            columns[window] = alone = held.alone(row, len(held_columns(held, row)))
            for r in self._of(held):
                copies[id(r)] = r.twin(row, alone)
        for state, arrays in zip(self.states, self.state_of(row), strict=True):
            copies[id(state)] = twin = State(len(arrays))
            twin.cache = arrays
        solo = Layers([_rebuilt(c, copies) for c in self.caches], columns)
        solo._lengths = [self._lengths[row]]
        return solo

    def _of(self, columns: Columns) -> list[Rows]:
        return [r for r in self.rows if r.columns is columns]

    def _switch(self, window: int | None, new: Columns) -> None:
        for r in self._of(self.columns[window]):
            r.columns = new
        self.columns[window] = new

    def _open(self) -> None:
        """From exact layout to rows. Buffers stay as they are."""
        for window, columns in self.columns.items():
            if isinstance(columns, SoloColumns):
                batch = columns.opened()
                batch.take_over(columns)
                self._switch(window, batch)

    def _close(self) -> None:
        """From one remaining row to exact layout; moves columns only where they are not in order."""
        for window, columns in self.columns.items():
            for r in self._of(columns):
                r.isolate(r, 0)
            self._switch(window, columns.alone(0, len(held_columns(columns, 0))))

    def _trim(self, count: int) -> None:
        """Drop what windows have passed and holes that batches leave, where that pays."""
        for columns in self.columns.values():
            if isinstance(columns, SoloColumns):
                if surplus := columns.surplus(count):
                    held = slice(surplus, columns.index)
                    columns.first += surplus
                    self._map(columns, lambda a, held=held: mx.contiguous(a[:, :, held]))
            elif columns.waste():
                source, rows = mx.array(columns.squeeze())[:, None, :, None], columns.num_rows
                self._map(columns, lambda a, s=source, n=rows: mx.take_along_axis(a[:n], s, axis=2))

    def _map(self, columns: Columns, f: Callable[..., Any]) -> None:
        """Replace every buffer of the layers of one kind."""
        for r in self._of(columns):
            if r.keys is not None:
                r.keys, r.values = f(r.keys), f(r.values)


def _rebuilt(cache: Any, copies: dict[int, Any]) -> Any:
    if isinstance(cache, Stack):
        return Stack([copies[id(child)] for child in cache.children])
    return copies[id(cache)]


def _foreign_arrays(cache: Any) -> list[Any]:
    found: list[Any] = []
    stack = [cache.state]
    while stack:
        item = stack.pop()
        if isinstance(item, mx.array):
            found.append(item)
        elif isinstance(item, (list, tuple)):
            stack.extend(item)
    return found
