"""Where one sequence stands in its grammar: the mask of its next token. One thread at a time; no MLX."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import Enum, auto
from typing import NamedTuple

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from treadle.grammar.fault import reason
from treadle.grammar.vocabulary import BITS, Vocabulary, mask_words
from treadle.types import Reasoning

Mask = NDArray[np.uint32]
FULL = 0xFFFFFFFF


def free_mask(words: int) -> Mask:
    """uint32 [words] that allows every id."""
    return np.full(words, FULL, np.uint32)


class _Part(Enum):
    """The part of the reply that the next token belongs to."""

    OPENING = auto()  # reasoning if the opener comes, else the answer
    REASONING = auto()
    CLOSING = auto()  # the budget is used up, and the closer is being written
    ANSWER = auto()


class _Place(NamedTuple):
    """What a token may change, beside llguidance's own state, which has read `early` while that is set."""

    part: _Part
    tail: bytes = b""  # OPENING: all that came. REASONING: the end of what came, too short to hold the closer
    length: int = 0  # of this part so far, in tokens
    early: tuple[int, ...] = ()  # OPENING: those of them that may be the answer too
    fault: str = ""


class Matcher:
    """`fault` becomes a sentence when the grammar can no longer be followed; then masks allow everything.

    `start` is the grammar of the answer at its start, and left there; None: the answer is free. `ends` are the ids
    that end the reply: allowed exactly where the answer may stop, and in reasoning if the answer may be empty.
    """

    def __init__(
        self, start: LLMatcher | None, vocabulary: Vocabulary, ends: Collection[int], reasoning: Reasoning | None = None
    ) -> None:
        self._start = start
        self._inner = None if start is None else start.deep_copy()
        self._vocabulary = vocabulary
        self._ends = frozenset(ends)
        self._words = mask_words(vocabulary.size)
        self._closes = () if reasoning is None else reasoning.closer
        self._closer = self._text(self._closes).strip()
        self._budget = None if reasoning is None else reasoning.budget
        opens = () if reasoning is None else reasoning.opener
        self._opener = self._text(opens).strip()
        self._path = {self._text(opens[:i]): id for i, id in enumerate(opens)}  # the next id, by what came
        self._place = self._first(reasoning)

    def _first(self, reasoning: Reasoning | None) -> _Place:
        if reasoning is None:
            return _Place(_Part.ANSWER)
        return _Place(_Part.OPENING) if reasoning.opener else self._thinking(b"", 0)

    @property
    def fault(self) -> str:
        return self._place.fault

    @property
    def finished(self) -> bool:
        """Whether nothing but an end may follow."""
        inner = self._inner
        if inner is None or self.fault or self._place.part is not _Part.ANSWER:
            return False
        return bool(inner.is_stopped() and inner.is_accepting())

    @property
    def free(self) -> bool:
        """Whether nothing is held to anything any more: a budget without a grammar, and the reasoning is over."""
        return self._inner is None and not self.fault and self._place.part is _Part.ANSWER

    def mask(self) -> Mask:
        """uint32 [mask_words(vocabulary.size)]: bit i of word w is set where id 32 w + i may come next."""
        place = self._place
        row = free_mask(self._words)
        if place.part is _Part.CLOSING and not place.fault:
            row[:] = 0
            _set(row, self._closes[place.length])
        elif self._inner is None or place.fault:
            pass
        elif place.part is _Part.REASONING:
            self._set_ends(row, self._inner.is_accepting())
        else:
            row = self._answer_mask(self._inner)
        return row

    def _answer_mask(self, inner: LLMatcher) -> Mask:
        place = self._place
        row: Mask = np.zeros(self._words, np.uint32)
        if self._follows:
            row = np.frombuffer(inner.compute_bitmask(), np.uint32)[: self._words].copy()
            spare = self._vocabulary.size % BITS
            row[-1] &= np.uint32((1 << spare) - 1 if spare else FULL)
            # Ends are decided by the grammar alone: after a fault inside, llguidance allows an end anywhere.
            self._set_ends(row, inner.is_accepting())
        if place.part is _Part.OPENING and place.tail in self._path:
            _set(row, self._path[place.tail])
        if not row.any():
            self._fail("no token may follow, or the grammar is too complex")
            return free_mask(self._words)
        return row

    @property
    def _follows(self) -> bool:
        """Whether the tokens so far may be the answer."""
        return self._place.part is _Part.ANSWER or len(self._place.early) == self._place.length

    def masks(self, draft: Sequence[int]) -> Mask:
        """uint32 [len(draft) + 1, words]: the mask before each token of the draft, and after all of them.

        The matcher stays where it was. Rows behind a token that its mask forbids, or that ends the reply, allow
        everything.
        """
        rows = np.stack([free_mask(self._words)] * (len(draft) + 1))
        rows[0] = self.mask()
        # A copy goes ahead: after llguidance's own way back a mask now and then differs from that of a fresh matcher.
        here = self._inner, self._place
        self._inner = None if self._inner is None else self._inner.deep_copy()
        for i, token in enumerate(draft):
            if token in self._ends or not rows[i, token // BITS] >> np.uint32(token % BITS) & 1:
                break
            self.accept(token)
            rows[i + 1] = self.mask()
        self._inner, self._place = here
        return rows

    def _set_ends(self, row: Mask, stops: bool) -> None:
        for id in self._vocabulary.ends | self._ends:
            _set(row, id, stops and id in self._ends)

    def accept(self, token: int) -> None:
        """Take a token, not an end, into account. A token that the mask forbids is a fault."""
        if self.fault:
            return
        match self._place.part:
            case _Part.OPENING:
                self._accept_opening(token)
            case _Part.REASONING:
                self._read(self._place.tail + self._text((token,)), self._place.length + 1)
            case _Part.CLOSING:
                self._accept_closing(token)
            case _Part.ANSWER:
                self._take([token])

    def _accept_opening(self, token: int) -> None:
        place = self._place
        read = (place.tail + self._text((token,))).lstrip()
        follows = self._follows and self._consumes([token])
        if not follows and self._path.get(place.tail) != token:
            self._fail("a token came that may not follow")
        elif read.startswith(self._opener):
            self._begin_again(())
            self._read(read[len(self._opener) :], 0)
        elif self._opener.startswith(read):
            early = (*place.early, token) if follows else place.early
            self._place = _Place(_Part.OPENING, read, place.length + 1, early)
        else:
            self._place = _Place(_Part.ANSWER)

    def _read(self, read: bytes, length: int) -> None:
        """Go on inside reasoning, of which `read` came last. What comes behind the closer is of the answer."""
        before, closer, behind = read.partition(self._closer)
        if not closer:
            self._place = self._thinking(before[-len(self._closer) :], length)
            return
        self._place = _Place(_Part.ANSWER)
        if behind.strip() and self._inner is not None:
            self._take(self._vocabulary.tokens.tokenize_bytes(behind.lstrip()))

    def _thinking(self, tail: bytes, length: int) -> _Place:
        if self._budget is None or length < self._budget:
            return _Place(_Part.REASONING, tail, length)
        written = [i for i in range(len(self._closes)) if tail.endswith(self._text(self._closes[:i]))]
        return _Place(_Part.CLOSING, length=max(written))

    def _accept_closing(self, token: int) -> None:
        length = self._place.length
        if token != self._closes[length]:
            self._fail("a token came that does not end the reasoning")
        elif length + 1 < len(self._closes):
            self._place = self._place._replace(length=length + 1)
        else:
            self._place = _Place(_Part.ANSWER)

    def _take(self, tokens: list[int]) -> None:
        """Tokens of the answer."""
        if self._inner is None:
            return
        if not self._consumes(tokens):
            self._fail(self._inner.get_error() or "a token came that may not follow")

    def _consumes(self, tokens: list[int]) -> bool:
        """Whether they may come next in the answer; they are read then, and none of them if not."""
        if self._inner is None:
            return True
        ahead = self._inner.deep_copy() if len(tokens) > 1 else self._inner
        if ahead.try_consume_tokens(tokens) != len(tokens):
            return False
        self._inner = ahead
        return True

    def _begin_again(self, tokens: Sequence[int]) -> None:
        """Have the answer read these tokens, and no others. Also the way out of an error, which llguidance has not."""
        if self._start is not None:
            self._inner = self._start.deep_copy()
            self._inner.try_consume_tokens(list(tokens))

    def forced(self) -> list[int]:
        """Tokens that spell what must come next: likely, not the only spelling that a mask allows."""
        place = self._place
        if place.fault or self.finished:
            return []
        if place.part is _Part.CLOSING:
            return list(self._closes[place.length :])
        if self._inner is None or place.part is not _Part.ANSWER:
            return []
        return list(self._inner.compute_ff_tokens())

    def _text(self, ids: Collection[int]) -> bytes:
        return bytes(self._vocabulary.tokens.decode_bytes(list(ids)))

    def _fail(self, why: str) -> None:
        self._place = self._place._replace(fault=f"The reply cannot go on by its grammar: {reason(why)}.")


def _set(row: Mask, id: int, on: bool = True) -> None:
    bit = np.uint32(1 << (id % BITS))
    row[id // BITS] = row[id // BITS] | bit if on else row[id // BITS] & ~bit
