"""Where one sequence stands in its grammar: the mask of its next token. One thread at a time; no MLX."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from treadle.grammar.fault import reason
from treadle.grammar.vocabulary import BITS, Vocabulary, mask_words

Mask = NDArray[np.uint32]
FULL = 0xFFFFFFFF


def free_mask(words: int) -> Mask:
    """uint32 [words] that allows every id."""
    return np.full(words, FULL, np.uint32)


class Matcher:
    """`fault` becomes a sentence when the grammar can no longer be followed; then masks allow everything.

    `ends` are the ids that end the reply: allowed exactly where the grammar may stop. With `after` everything is
    allowed until the text of those ids has come, in whatever tokens.
    """

    def __init__(
        self, inner: LLMatcher, vocabulary: Vocabulary, ends: Collection[int], after: tuple[int, ...] | None = None
    ) -> None:
        self.fault = ""
        self._inner = inner
        self._vocabulary = vocabulary
        self._ends = frozenset(ends)
        self._after = self._text(after or ()).strip()
        self._tail = b""
        self._free = bool(self._after)

    @property
    def finished(self) -> bool:
        """Whether nothing but an end may follow."""
        return not (self._free or self.fault) and bool(self._inner.is_stopped() and self._inner.is_accepting())

    def mask(self) -> Mask:
        """uint32 [mask_words(vocabulary.size)]: bit i of word w is set where id 32 w + i may come next."""
        words = mask_words(self._vocabulary.size)
        if self._free or self.fault:
            return free_mask(words)
        row = np.frombuffer(self._inner.compute_bitmask(), np.uint32)[:words].copy()
        self._set_ends(row)
        if not row.any():
            self._fail("no token may follow, or the grammar is too complex")
            return free_mask(words)
        return row

    def _set_ends(self, row: Mask) -> None:
        """Decide every end by the grammar alone: after a fault inside, llguidance allows an end anywhere."""
        spare = self._vocabulary.size % BITS
        if spare:
            row[-1] &= np.uint32((1 << spare) - 1)
        stops = self._inner.is_accepting()
        for id in self._vocabulary.ends | self._ends:
            bit = np.uint32(1 << (id % BITS))
            if stops and id in self._ends:
                row[id // BITS] |= bit
            else:
                row[id // BITS] &= ~bit

    def accept(self, token: int) -> None:
        """Take a token, not an end, into account. A token that the mask forbids is a fault."""
        if self.fault:
            return
        if self._free:
            read = self._tail + self._text((token,))
            self._free = self._after not in read
            self._tail = read[-len(self._after) :]
        elif not self._inner.consume_token(token):
            self._fail(self._inner.get_error())

    def forced(self) -> list[int]:
        """Tokens that spell what must come next: likely, not the only spelling that a mask allows."""
        if self._free or self.fault or self.finished:
            return []
        return list(self._inner.compute_ff_tokens())

    def _text(self, ids: Collection[int]) -> bytes:
        return bytes(self._vocabulary.tokens.decode_bytes(list(ids)))

    def _fail(self, why: str) -> None:
        self.fault = f"The reply cannot go on by its grammar: {reason(why)}."
