"""What to compute next. Pure: facts in, decisions out; no MLX, no clock.

The rules:
- Decode comes first: every group steps once per turn of the loop.
- Prefill goes one sequence at a time: by turns the one with the fewest tokens left and the oldest, so that a short
  request does not wait behind a long one and a long one always moves on.
- A chunk takes about a second at most: so long may a cancellation or a new request have to wait for it.
- While streams decode, a chunk may stop them for at most `stall_s`, and between two chunks decoding gets
  `(1 - share) / share` times as long as the chunk took, and at least `MIN_STEPS` steps. So fewer than half of a
  stream's steps have a chunk in front of them, and its median inter-token time stays that of plain decoding.
- Rows decode together when their lengths differ by at most a factor of two (or both are short).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SHORT = 1024  # rows below this many tokens always fit together
MIN_STEPS = 3  # with a chunk before every third step at most, the median step has none
MIN_CHUNK = 16
LONGEST_S = 1.0  # a chunk that no stream waits for; a new request and a cancellation do
GRAIN = 16  # chunk sizes are multiples of this, so that few shapes occur


@dataclass(frozen=True, slots=True)
class Prefilling:
    """A sequence that waits for prefill: tokens left, and its place in the order of arrival."""

    left: int
    order: int


def pick(candidates: Sequence[Prefilling], turn: int) -> int:
    """The index of the sequence whose chunk comes next; `turn` counts chunks."""
    key = (lambda c: (c.order,)) if turn % 2 else (lambda c: (c.left, c.order))
    return min(range(len(candidates)), key=lambda i: key(candidates[i]))


def fits_together(lengths: Sequence[int], length: int) -> bool:
    """Whether a row of `length` tokens may join rows of `lengths` without much padding."""
    low, high = min(*lengths, length), max(*lengths, length)
    return high <= SHORT or high <= 2 * low


def aligned(start: int, num_tokens: int, chunk: int) -> int:
    """`num_tokens` or fewer, so that a chunk that passes a multiple of `chunk` ends there.

    On CUDA attention is planned anew for each length that it meets first; so most prompts meet the same lengths.
    """
    border = (start // chunk + 1) * chunk
    return min(num_tokens, border - start)


class Pacer:
    """How many prompt tokens the next chunk gets, from how long chunks and decode steps took.

    `small`: the chunk is read by the small model of sparse prefill, which has a speed of its own.
    """

    def __init__(self, chunk: int, share: float, stall_s: float) -> None:
        self.chunk = chunk
        self.share = share
        self.stall_s = stall_s
        self._speeds: dict[bool, float] = {}  # tokens per second of recent chunks, by whether the small model read them
        self._owed_s = 0.0  # decode time due before the next chunk
        self._steps = MIN_STEPS

    def allowance(self, decoding: bool, small: bool = False) -> int:
        """Most tokens for a chunk now; 0 while running streams are owed time."""
        known = self._speeds.get(small)
        if not decoding:
            return self.chunk if known is None else self._fitting(known, max(LONGEST_S, self.stall_s))
        if self._owed_s > 0 or self._steps < MIN_STEPS:
            return 0
        if known is None:
            return min(self.chunk, MIN_CHUNK * 4)
        return self._fitting(known, self.stall_s)

    def _fitting(self, speed: float, seconds: float) -> int:
        """Tokens that take so long at a speed."""
        return min(self.chunk, max(MIN_CHUNK, int(speed * seconds) // GRAIN * GRAIN))

    def prefilled(self, num_tokens: int, seconds: float, decoding: bool, small: bool = False) -> None:
        speed, known = num_tokens / max(seconds, 1e-6), self._speeds.get(small)
        if num_tokens >= MIN_CHUNK or known is None:
            self._speeds[small] = speed if known is None else 0.7 * known + 0.3 * speed
        self.paused(seconds, decoding)

    def paused(self, seconds: float, decoding: bool) -> None:
        """Running streams waited so long for a chunk, or for other work on a prompt."""
        self._owed_s = seconds * (1 - self.share) / self.share if decoding else 0.0
        self._steps = 0 if decoding else MIN_STEPS

    def decoded(self, seconds: float) -> None:
        self._owed_s -= seconds
        self._steps += 1
