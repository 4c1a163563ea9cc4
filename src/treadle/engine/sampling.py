"""Drawing the next tokens of several rows in one graph on the device. Engine thread only.

Each row keeps its own settings; a row's token never depends on which other rows are there: random numbers come from
(seed, position), and a filter changes only rows that asked for it. Nothing here reads a value back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from treadle.models.upload import on_device
from treadle.types import Ids, Sampling, TokenLogprob

SHORTLIST = 64  # rows with 0 < top_k <= SHORTLIST never sort the whole vocabulary
COLDEST = 1e-6  # lower temperatures are greedy: divided by them, logits could leave the range of float32
NAN_TOKEN = -1  # what is read of a row whose logits are not numbers

Scored = tuple[float, list[int], list[float]]


@dataclass(frozen=True, slots=True)
class Drawn:
    """Lazy results for n rows. What can be told from two numbers of a row is left to the host: `read`, `ahead`."""

    tokens: Any  # int32 [n], ids always
    peaks: Any  # float32 [n]: the model's greatest logit, NaN where one is
    logprobs: Any = None  # float32 [n]: of the drawn token, before temperature and filters
    top_ids: Any = None  # int32 [n, k], best first
    top_logprobs: Any = None  # float32 [n, k]
    best: Any = None  # float32 [n]: what the drawn token was chosen for, in logits; None: not asked
    second: Any = None  # float32 [n]: the same of the next best

    def arrays(self) -> list[Any]:
        mine = (self.tokens, self.peaks, self.logprobs, self.top_ids, self.top_logprobs, self.best, self.second)
        return [a for a in mine if a is not None]

    def read(self) -> list[int]:
        """The tokens, NAN_TOKEN where the logits were not numbers. Waits for the device."""
        return [NAN_TOKEN if p != p else t for t, p in zip(self.tokens.tolist(), self.peaks.tolist(), strict=True)]

    def ahead(self) -> list[float] | None:
        """How far each drawn token was ahead of the next best, in logits; None: that was not asked."""
        if self.second is None:
            return None
        return [a - b for a, b in zip(self.best.tolist(), self.second.tolist(), strict=True)]

    def scored(self) -> list[Scored] | None:
        """By line: the drawn token's log-probability, and the best ids with theirs; None: that was not asked."""
        if self.logprobs is None:
            return None
        chosen = self.logprobs.tolist()
        if self.top_ids is None:
            return [(value, [], []) for value in chosen]
        return list(zip(chosen, self.top_ids.tolist(), self.top_logprobs.tolist(), strict=True))


def random_keys(seeds: Sequence[int], positions: Sequence[int]) -> NDArray[np.uint32]:
    """uint32 [n, 2] from (seed, position) by splitmix64, so that every pair has a key of its own."""
    with np.errstate(over="ignore"):
        x = np.array([s % 2**64 for s in seeds], np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x += np.array(positions, np.uint64) + np.uint64(1)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return np.stack([x >> np.uint64(32), x & np.uint64(0xFFFFFFFF)], axis=1).astype(np.uint32)


class Sampler:
    """The settings of the rows of one group as arrays, and their token counts where penalties need them.

    Row numbers follow the group's: `join` appends, `drop` moves the last row into the hole.
    """

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.rows: list[Sampling] = []
        self._counts: list[Any] = []  # per row: None, or (int32 [vocab] of prompt, int32 [vocab] of output)
        self._table: _Table | None = None

    def join(self, sampling: Sampling, prompt: Ids, output: Ids) -> None:
        """Add a row. `prompt` and `output` are the ids so far, the one about to be fed included."""
        self.rows.append(sampling)
        counts = None
        if sampling.penalised:
            counts = tuple(mx.array(np.bincount(ids, minlength=self.vocab_size)) for ids in (prompt, output))
        self._counts.append(counts)
        self._table = None

    def drop(self, row: int) -> None:
        self.rows[row], self._counts[row] = self.rows[-1], self._counts[-1]
        self.rows.pop()
        self._counts.pop()
        self._table = None

    def draw(self, logits: Any, positions: Sequence[int], mask: NDArray[np.uint32] | None = None) -> Drawn:
        """One token per row from `logits` [rows, vocab]; `positions` are those of the tokens to be drawn.

        `mask` [rows, words] has a bit for each id that may be drawn; every row needs at least one.
        Drawn tokens count at once for the penalties of the next draw.
        """
        table = self._table_of_rows()
        drawn = self._drawn(logits, positions, mask, table, self._counts, gaps=False)
        for row in table.penalised:
            self._counts[row] = _counted(self._counts[row], drawn.tokens[row])
        return drawn

    def check(
        self,
        logits: Any,
        drafts: Sequence[Sequence[int]],
        starts: Sequence[int],
        mask: NDArray[np.uint32] | None = None,
        gaps: bool = True,
    ) -> Drawn:
        """What each row would draw behind each of its drafts: `logits` has len(draft) + 1 lines for every row in turn.

        `starts` are the positions of each row's first; `mask` has an entry per line. Nothing counts for the penalties
        until `count` is told.
        """
        table = self._table_of_rows()
        if table.greedy:
            return self._drawn(logits, (), mask, table, (), gaps)
        positions = [n + j for n, draft in zip(starts, drafts, strict=True) for j in range(len(draft) + 1)]
        lines = [row for row, draft in enumerate(drafts) for _ in range(len(draft) + 1)]
        table = _Table([self.rows[row] for row in lines], self.vocab_size)
        counts: list[Any] = [None] * len(lines)
        start = 0
        for row, draft in enumerate(drafts):
            seen = self._counts[row]
            for j in range(len(draft) + 1) if seen else ():
                counts[start + j] = seen
                seen = _counted(seen, draft[j]) if j < len(draft) else seen
            start += len(draft) + 1
        return self._drawn(logits, positions, mask, table, counts, gaps)

    def _table_of_rows(self) -> _Table:
        if self._table is None:
            self._table = _Table(self.rows, self.vocab_size)
        return self._table

    def count(self, row: int, tokens: Sequence[int]) -> None:
        """Tokens of a row that were checked and stand."""
        if self._counts[row] is not None:
            for token in tokens:
                self._counts[row] = _counted(self._counts[row], token)

    def _drawn(
        self,
        logits: Any,
        positions: Sequence[int],
        mask: NDArray[np.uint32] | None,
        table: _Table,
        counts: Sequence[Any],
        gaps: bool,
    ) -> Drawn:
        """One token per line. `counts` are the lines' token counts, None where a line needs none."""
        logits = logits.astype(mx.float32)
        raw = logits
        if table.bias is not None:
            logits = logits + table.bias
        if table.penalised:
            logits = self._penalise(logits, table, counts)
        if mask is not None:
            logits = mx.where(_expanded(mask, self.vocab_size), logits, -mx.inf)
        ranked = self._perturbed(logits, positions, table) if table.random else logits
        tokens = mx.argmax(ranked, axis=-1).view(mx.int32)
        peaks = mx.max(raw, axis=-1)
        chosen, ids, scores = _logprobs(raw, tokens, table.num_top) if table.num_top is not None else (None, None, None)
        if not gaps:
            return Drawn(tokens, peaks, chosen, ids, scores)
        best = peaks if ranked is raw else mx.max(ranked, axis=-1)
        return Drawn(tokens, peaks, chosen, ids, scores, best, _second(ranked, tokens))

    def _penalise(self, logits: Any, table: _Table, counts: Sequence[Any]) -> Any:
        zero = mx.zeros((self.vocab_size,), mx.int32)
        rows = [c or (zero, zero) for c in counts]
        prompt, output = (mx.stack([r[i] for r in rows]) for i in (0, 1))
        scale = table.column("repetition_penalty")
        scaled = mx.where(logits > 0, logits / scale, logits * scale)
        logits = mx.where((prompt + output > 0) & (scale != 1), scaled, logits)
        logits = logits - table.column("frequency_penalty") * output
        return logits - table.column("presence_penalty") * (output > 0)

    def _perturbed(self, logits: Any, positions: Sequence[int], table: _Table) -> Any:
        """Logits whose greatest entry is the token to draw: with Gumbel noise where a line draws at random.

        The noise is multiplied by the temperature instead of the logits being divided by it, so that distances between
        entries stay logits.
        """
        lines = table.random
        index = _kept(tuple(lines), mx.int32)
        temperature = table.column("temperature")[index]
        scaled = logits[index] / temperature
        floor = _floors(scaled, [table.rows[i] for i in lines])
        if floor is not None:
            scaled = mx.where(scaled >= floor, scaled, -mx.inf)
        keys = on_device(random_keys([table.rows[i].seed for i in lines], [positions[i] for i in lines]), mx.uint32)
        noise = mx.vmap(lambda key: mx.random.gumbel((self.vocab_size,), key=key))(keys)
        drawn = (scaled + noise) * temperature
        return drawn if len(lines) == len(table.rows) else _scattered(logits, index, drawn)


def score(logits: Any, tokens: Ids, sampling: Sampling) -> tuple[TokenLogprob, ...]:
    """What the model gave to each of `tokens` by the line of `logits` [at least len(tokens), vocab] before it."""
    if not len(tokens):
        return ()
    wanted = sampling.logprobs or 0
    lines = logits[: len(tokens)].astype(mx.float32)
    chosen, ids, scores = _logprobs(lines, mx.array(tokens.astype(np.int32)), wanted)
    tops = [()] * len(tokens) if ids is None else zip(ids.tolist(), scores.tolist(), strict=True)
    return tuple(
        TokenLogprob(token, value, tuple(zip(*top, strict=True)))
        for token, value, top in zip(tokens.tolist(), chosen.tolist(), tops, strict=True)
    )


class _Table:
    """What the rows ask for, worked out once per change of membership."""

    def __init__(self, rows: Sequence[Sampling], vocab_size: int) -> None:
        self.rows = rows
        self.random = [i for i, s in enumerate(rows) if s.temperature >= COLDEST]
        self.penalised = [i for i, s in enumerate(rows) if s.penalised]
        self.num_top = max((s.logprobs for s in rows if s.logprobs is not None), default=None)
        self.bias = _bias(rows, vocab_size)
        self.greedy = not self.random and not self.penalised and self.num_top is None and self.bias is None
        self._columns: dict[str, Any] = {}

    def column(self, name: str) -> Any:
        """float32 [rows, 1] of one setting; temperature 0 reads as 1."""
        if name not in self._columns:
            values = [getattr(s, name) or (1.0 if name == "temperature" else 0.0) for s in self.rows]
            self._columns[name] = _column(values)
        return self._columns[name]


def _bias(rows: Sequence[Sampling], vocab_size: int) -> Any:
    if not any(s.logit_bias for s in rows):
        return None
    bias = np.zeros((len(rows), vocab_size), np.float32)
    for line, sampling in zip(bias, rows, strict=True):
        for token, value in sampling.logit_bias:
            line[token] += value
    return on_device(bias, mx.float32)


@lru_cache(maxsize=128)
def _kept(values: tuple[float, ...], dtype: Any) -> Any:
    """[values], which outlives the step."""
    found = on_device(values, dtype)
    mx.async_eval(found)  # type: ignore[no-untyped-call]
    return found


def _column(values: Iterable[float]) -> Any:
    """float32 [values, 1]."""
    return _kept(tuple(values), mx.float32)[:, None]


def _expanded(mask: NDArray[np.uint32], vocab_size: int) -> Any:
    """bool [rows, vocab] from 32 bits per word, lowest first."""
    bits = (mx.array(mask)[:, :, None] >> mx.arange(32, dtype=mx.uint32)) & 1
    return bits.astype(mx.bool_).reshape(len(mask), -1)[:, :vocab_size]


def _scattered(base: Any, index: Any, values: Any) -> Any:
    """A copy with other values at `index`; `base` stays as it is."""
    changed = mx.array(base)
    changed[index] = values
    return changed


def _counted(counts: tuple[Any, Any], token: Any) -> tuple[Any, Any]:
    """Counts with one more token of output; `token` is an int or a lazy scalar."""
    prompt, output = counts
    return prompt, output.at[token].add(1)


def _second(ranked: Any, tokens: Any) -> Any:
    """float32 [n]: the greatest entry of each line beside the drawn one."""
    others = mx.put_along_axis(ranked, tokens[:, None], mx.array(-mx.inf), axis=-1)
    return mx.max(others, axis=-1)


def _floors(scaled: Any, rows: Sequence[Sampling]) -> Any:
    """float32 [n, 1]: the smallest logit each row keeps (-inf where it keeps all), or None when no row filters.

    Values equal to the floor are all kept, so ties never depend on an order.
    """
    result = None
    short = [i for i, s in enumerate(rows) if 0 < s.top_k <= SHORTLIST]
    full = [i for i, s in enumerate(rows) if s.top_k > SHORTLIST or (s.top_k == 0 and s.top_p < 1)]
    for members, sorted_logits in ((short, _shortlist), (full, _sorted)):
        if members:
            result = mx.full((len(rows), 1), -mx.inf) if result is None else result
            index = _kept(tuple(members), mx.int32)
            values = _cut(sorted_logits(scaled[index]), [rows[i] for i in members])
            result = _scattered(result, index, values)
    if any(s.min_p > 0 for s in rows):
        tops = mx.max(scaled, axis=-1, keepdims=True)
        logs = _column(math.log(s.min_p) if s.min_p > 0 else -math.inf for s in rows)
        least = tops + logs
        result = least if result is None else mx.maximum(result, least)
    return result


def _shortlist(scaled: Any) -> Any:
    return mx.sort(mx.topk(scaled, min(SHORTLIST, scaled.shape[-1]), axis=-1), axis=-1)[:, ::-1]


def _sorted(scaled: Any) -> Any:
    return mx.sort(scaled, axis=-1)[:, ::-1]


def _cut(ordered: Any, rows: Sequence[Sampling]) -> Any:
    """The floor of each row after top-k, then top-p over what top-k left. `ordered` is [n, m], largest first."""
    width = ordered.shape[-1]
    limits = _column(s.top_k if 0 < s.top_k < width else width for s in rows)
    kept = mx.where(mx.arange(width)[None] < limits, ordered, -mx.inf)
    probabilities = mx.softmax(kept, axis=-1, precise=True)
    before = mx.cumsum(probabilities, axis=-1) - probabilities
    share = _column(s.top_p if s.top_p < 1 else 2.0 for s in rows)
    inside = (before < share) & (mx.arange(width)[None] < limits)
    last = mx.maximum(mx.sum(inside, axis=-1, keepdims=True) - 1, 0)
    return mx.take_along_axis(ordered, last, axis=-1)


def _logprobs(logits: Any, tokens: Any, num_top: int) -> tuple[Any, Any, Any]:
    """The model's own log probabilities: of the drawn tokens, and the `num_top` likeliest."""
    scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    drawn = mx.take_along_axis(scores, tokens[:, None], axis=-1)[:, 0]
    if num_top == 0:
        return drawn, None, None
    top = mx.argpartition(-scores, num_top - 1, axis=-1)[:, :num_top]
    values = mx.take_along_axis(scores, top, axis=-1)
    order = mx.argsort(-values, axis=-1)
    ids = mx.take_along_axis(top, order, axis=-1).astype(mx.int32)
    return drawn, ids, mx.take_along_axis(values, order, axis=-1)
