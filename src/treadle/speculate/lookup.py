"""Drafts from what the text already said: prompt lookup (docs/speculation.md). No MLX.

The longest suffix of 8 to 2 tokens that occurred before is found, and what followed its most recent occurrence is
proposed. The last tokens are searched as they are, since nothing is cheaper where mostly nothing is found. Older ones
are in `_Run`s, arrays sorted by hash, built by vector operations when they are first asked for a length.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from treadle.types import Ids

LONGEST = 8
SHORTEST = 2
SHORTEST_SHARED = 4  # of a match in other replies: a shorter one says little there

_NEAR = 256  # tokens that are searched as they are, before they become a run
_BYTES = 8  # of a token
_POSITION_BITS = 24
_POSITION_MASK = (1 << _POSITION_BITS) - 1
_MASK = (1 << 64) - 1
_MULTIPLIER = 0x9E3779B97F4A7C15


class Proposal(NamedTuple):
    """Tokens that may follow, and the length of the match that the first of them rests on (0: none)."""

    tokens: tuple[int, ...] = ()
    matched: int = 0


class NgramIndex:
    """The n-grams of one sequence, prompt and output. Nothing is built before the first `propose`.

    `tokens` [num_tokens] is copied. No proposal contains a negative id or one of `barred`. Matches shorter than
    `shortest` tokens do not count.
    """

    def __init__(self, tokens: Ids, barred: frozenset[int] = frozenset(), *, shortest: int = SHORTEST) -> None:
        if not 1 <= shortest <= LONGEST:
            raise ValueError(f"shortest must lie in 1..{LONGEST}, not {shortest}")
        self._tokens = array("q", np.ascontiguousarray(tokens, dtype=np.int64).tobytes())
        self._barred = barred
        self._shortest = shortest
        self._runs: list[_Run] = []  # ascending, without gaps
        self._repeats = False  # whether the last match was as long as any may be
        self._indexed = 0  # n-grams that end before this position are in runs

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens. O(1) per token."""
        self._tokens.extend(tokens)

    def tail(self, count: int) -> list[int]:
        """The last tokens."""
        return self._tokens[-count:].tolist()

    def propose(self, k: int, ahead: Sequence[int] = ()) -> Proposal:
        """Up to `k` tokens that may follow the sequence and `ahead`, which is not kept.

        Where a copied stretch reaches the end of what is known, the proposal goes on as if its tokens were part of
        the sequence. It ends before the first barred token.
        """
        self.catch_up()
        extra = list(ahead)
        matched = 0
        while (room := k + len(ahead) - len(extra)) > 0:
            end, length = self._longest(extra)
            if not length:
                break
            copied = self._copy(end, room, extra)
            kept = self._before_barred(copied)
            extra += kept
            matched = matched or length
            if len(kept) < len(copied):
                break
        drafts = tuple(extra[len(ahead) :])
        return Proposal(drafts, matched) if drafts else Proposal()

    def _copy(self, start: int, count: int, extra: list[int]) -> list[int]:
        known = self._tokens[start : start + count].tolist()
        skip = max(0, start - len(self._tokens))
        return known + extra[skip : skip + count - len(known)]

    def _before_barred(self, tokens: list[int]) -> list[int]:
        if min(tokens, default=0) >= 0 and self._barred.isdisjoint(tokens):
            return tokens
        return tokens[: next(i for i, token in enumerate(tokens) if token < 0 or token in self._barred)]

    def _longest(self, extra: list[int]) -> tuple[int, int]:
        """The end and the length of the longest, then most recent, earlier occurrence of the suffix; length 0: none."""
        waiting = len(self._tokens) - self._indexed
        window = self._tokens[-LONGEST - waiting :]
        window.extend(extra)
        end, length = self._longest_near(window, waiting + len(extra))
        if length < LONGEST and self._runs:
            far_end, far_length = self._longest_far(tuple(window[-LONGEST:]))
            if far_length > length:
                return far_end, far_length
        return end, length

    def _longest_near(self, window: array[int], count: int) -> tuple[int, int]:
        """The same among the last `count` ends, which no run knows: behind the extra tokens but the last, and behind
        those that wait to be indexed.
        """
        held, shortest = window.tobytes(), self._shortest
        wanted = held[-shortest * _BYTES :]
        low, high = max(0, len(window) - count - shortest) * _BYTES, len(held) - _BYTES
        best, best_length = 0, 0
        while best_length < LONGEST and low < high and (at := held.rfind(wanted, low, high)) >= 0:
            high = at + len(wanted) - 1
            if at % _BYTES == 0 and (length := _common_suffix(window, at // _BYTES + shortest)) > best_length:
                best, best_length = at // _BYTES + shortest, length
        if best_length < shortest:
            return 0, 0
        return self._indexed + count - len(window) + best, best_length

    def _longest_far(self, suffix: tuple[int, ...]) -> tuple[int, int]:
        """The same among indexed ends. An occurrence of n tokens is one of n - 1, so the length is found by leaps.

        The first leaps are short, because most texts repeat nothing; where one does, it goes on for a while.
        """
        best_end, leap = 0, LONGEST if self._repeats else 1
        low, high = self._shortest - 1, len(suffix)
        while low < high:
            middle = min(high, low + leap)
            end = self._find(suffix[-middle:])
            if end is None:
                high, leap = middle - 1, max(1, (middle - low) // 2)
            else:
                best_end, low, leap = end, middle, 2 * leap
        self._repeats = low == LONGEST
        return best_end, low if low >= self._shortest else 0

    def _find(self, gram: tuple[int, ...]) -> int | None:
        hashed = _hash(gram)
        for run in reversed(self._runs):
            end = run.find(self._tokens, gram, hashed)
            if end is not None:
                return end
        return None

    def catch_up(self) -> None:
        """If many tokens wait, index all n-grams that are followed by one. `propose` does it; better is when there is
        time.
        """
        start, end = self._indexed, len(self._tokens)
        if end - start <= _NEAR:
            return
        while self._runs and self._runs[-1].size <= end - start:  # so that they stay few
            start = self._runs.pop().start
        self._runs.append(_Run(start, end))
        self._indexed = end


class RecentReplies:
    """The n-grams of the newest replies of all requests, at most `max_tokens` tokens together.

    A second source where a sequence's own index has no match of `SHORTEST_SHARED` tokens or more. The newest reply
    wins among matches of one length.
    """

    def __init__(self, max_tokens: int, barred: frozenset[int] = frozenset()) -> None:
        if max_tokens < 1:
            raise ValueError(f"max_tokens must be positive, not {max_tokens}")
        self._max_tokens = max_tokens
        self._barred = barred
        self._replies: deque[array[int]] = deque()
        self._held = 0
        self._index = self._build()

    def __len__(self) -> int:
        """Tokens held."""
        return self._held

    def add(self, tokens: Sequence[int]) -> None:
        """Remember a reply, its last `max_tokens` tokens if it is longer; the oldest make room."""
        reply = array("q", tokens[-self._max_tokens :])
        if not reply:
            return
        self._replies.append(reply)
        self._held += len(reply)
        if self._held > self._max_tokens:
            self._forget()
        else:
            self._append(self._index, len(self._replies), reply)

    def propose(self, k: int, ahead: Sequence[int]) -> Proposal:
        """Up to `k` tokens that followed the end of `ahead`, the asking sequence's last tokens, in some reply."""
        return self._index.propose(k, ahead[-LONGEST:]) if self._held else Proposal()

    def _forget(self) -> None:
        # A quarter goes at once, so that building anew stays rare. The newest reply always stays.
        while len(self._replies) > 1 and self._held > self._max_tokens * 3 // 4:
            self._held -= len(self._replies.popleft())
        self._index = self._build()

    def _build(self) -> NgramIndex:
        index = NgramIndex(np.empty(0, np.int64), self._barred, shortest=SHORTEST_SHARED)
        for number, reply in enumerate(self._replies, start=1):
            self._append(index, number, reply)
        return index

    @staticmethod
    def _append(index: NgramIndex, number: int, reply: array[int]) -> None:
        # Each reply ends with an id of its own: nothing is copied or matched across it.
        index.extend(reply)
        index.extend((-number,))


class _Run:
    """The n-grams that end at positions in [start, end), for each length sorted by (hash, end). Built when asked."""

    def __init__(self, start: int, end: int) -> None:
        if end > _POSITION_MASK:
            raise ValueError(f"a sequence may have {_POSITION_MASK} tokens, not {end}")
        self.start = start
        self.size = end - start
        self._end = end
        self._sorted: dict[int, memoryview] = {}

    def find(self, tokens: array[int], gram: tuple[int, ...], hashed: int) -> int | None:
        """The last position here at which `gram` ends."""
        entries = self._sorted.get(len(gram))
        if entries is None:
            entries = self._sorted[len(gram)] = self._sort(tokens, len(gram))
        prefix = hashed & ~_POSITION_MASK
        wanted = array("q", gram)
        index = bisect_right(entries, prefix | _POSITION_MASK) - 1  # quicker than numpy's for a single value
        while index >= 0:
            entry = entries[index]
            if entry & ~_POSITION_MASK != prefix:
                return None
            end = entry & _POSITION_MASK
            if tokens[end - len(gram) : end] == wanted:
                return end
            index -= 1
        return None

    def _sort(self, tokens: array[int], length: int) -> memoryview:
        first = max(self.start, length)
        if first >= self._end:
            return memoryview(b"")
        ids = np.frombuffer(tokens, dtype=np.uint64)
        hashed = np.zeros(self._end - first, np.uint64)
        for back in range(length, 0, -1):
            hashed += ids[first - back : self._end - back]
            hashed += np.uint64(1)
            hashed *= np.uint64(_MULTIPLIER)
        hashed &= np.uint64(_MASK ^ _POSITION_MASK)
        hashed |= np.arange(first, self._end, dtype=np.uint64)
        hashed.sort()
        return memoryview(hashed)  # type: ignore[arg-type]


def _hash(gram: tuple[int, ...]) -> int:
    hashed = 0
    for token in gram:
        hashed = (hashed + token + 1) * _MULTIPLIER & _MASK
    return hashed


def _common_suffix(window: array[int], end: int) -> int:
    """How many tokens before `end` equal those before the end of `window`, at most LONGEST."""
    length = 0
    while length < LONGEST and length < end and window[end - 1 - length] == window[-1 - length]:
        length += 1
    return length
