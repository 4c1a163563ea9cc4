"""Where a prompt may be cut before encoding, and what was encoded before: the prefix cache begins at
the text.

A tokenizer splits text at its added tokens before anything else and encodes the pieces on their own. So in
front of an added token a text can be cut and its parts encoded apart, if no other added token can reach over
the cut. Then a conversation that grows needs only its new end encoded.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np

from treadle.types import Ids

if TYPE_CHECKING:
    from tokenizers import AddedToken

EncodeMany = Callable[[Sequence[str]], list[Ids]]

MAX_CUT_TOKENS = 64  # a scan costs time per alternative; turn markers are few
MIN_SEGMENT = 64  # characters between cuts
MAX_CONVERSATIONS = 32  # whole texts compared per look-up


def cut_tokens(added: Iterable[AddedToken], template: str) -> list[str]:
    """Added tokens in front of which a text may always be cut, those in the chat template first.

    Wherever such a token stands, the tokenizer begins a match there, whatever the text before: no added
    token overlaps its start from the left or strips white space over it, no match there strips white space
    before it, and no added token of this tokenizer depends on the characters beside it (`single_word`).
    """
    raw = [token for token in added if not token.normalized and token.content]
    if any(token.single_word for token in raw):
        return []
    texts = [token.content for token in raw]
    stripping = [token.content for token in raw if token.lstrip]
    inner = "\x00".join(text[1:] for text in texts)
    suffixes = {text[start:] for text in texts for start in range(1, len(text))}

    def cuts(text: str) -> bool:
        overlapped = text in inner or any(text[:end] in suffixes for end in range(1, len(text)))
        strips = text[0].isspace() or any(other.startswith(text) for other in stripping)
        return not overlapped and not strips

    def rank(text: str) -> tuple[bool, bool, str]:
        return (
            text not in template,
            any(char.isdigit() for char in text),
            text,
        )  # the unused ones are numbered

    special = sorted((token.content for token in raw if token.special), key=rank)
    return [text for text in special if cuts(text)][:MAX_CUT_TOKENS]


class Cutter:
    """Finds where a text may be cut: in front of cut tokens, at least `MIN_SEGMENT` characters apart."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(re.escape(t) for t in sorted(tokens, key=len, reverse=True)))

    def at(self, text: str, position: int) -> bool:
        """Whether `text` may be cut at `position`."""
        return self._pattern.match(text, position) is not None

    def cuts(self, text: str, start: int) -> list[int]:
        """Cut positions after `start`, ascending."""
        found: list[int] = []
        last = start
        for match in self._pattern.finditer(text, start):
            if match.start() - last >= MIN_SEGMENT:
                last = match.start()
                found.append(last)
        return found


@dataclass(frozen=True, slots=True)
class Conversation:
    """One encoded text: ids[offsets[i]:] are the ids of text[cuts[i]:].

    `cuts` begin with 0 and end with the length, which is a cut for a text that goes on with a cut token.
    """

    text: str
    ids: Ids
    cuts: list[int]
    offsets: list[int]

    @property
    def nbytes(self) -> int:
        return sys.getsizeof(self.text) + self.ids.nbytes + 72 * len(self.cuts)

    def shared_cuts(self, text: str, cutter: Cutter) -> int:
        """How many of `cuts` lie in a prefix shared with `text` and are cuts there too; at least 1."""
        low, step, last = 0, 1, len(self.cuts) - 1
        while low < last and step:  # gallop to the deepest cut before which the two texts are equal
            probe = min(low + step, last)
            start, end = self.cuts[low], self.cuts[probe]
            if text.startswith(self.text[start:end], start):
                low, step = probe, step * 2
            else:
                step //= 2
        while low > 0 and not cutter.at(text, self.cuts[low]):
            low -= 1
        return low + 1


NOTHING = Conversation("", np.empty(0, np.int64), [0], [0])


@dataclass(slots=True)
class SegmentCache:
    """Encoded segments, least recently used out first, bounded in bytes. Not thread-safe."""

    budget: int
    _ids: OrderedDict[str, Ids] = field(default_factory=OrderedDict)
    _nbytes: int = 0

    def get(self, segment: str) -> Ids | None:
        ids = self._ids.get(segment)
        if ids is not None:
            self._ids.move_to_end(segment)
        return ids

    def put(self, segment: str, ids: Ids) -> None:
        if segment in self._ids:
            return
        self._ids[segment] = ids
        self._nbytes += self.size(segment, ids)
        while self._nbytes > self.budget:
            self._nbytes -= self.size(*self._ids.popitem(last=False))

    @staticmethod
    def size(segment: str, ids: Ids) -> int:
        return sys.getsizeof(segment) + sys.getsizeof(ids) + 100

    @property
    def nbytes(self) -> int:
        return self._nbytes


class Memo:
    """Encodes by segments and remembers them, and whole conversations, within `budget` bytes. Thread-safe.

    `encode` must give the ids of texts on their own, without special tokens around them.
    """

    def __init__(self, encode: EncodeMany, tokens: Sequence[str], budget: int) -> None:
        self._encode = encode
        self._cutter = Cutter(tokens)
        self._segments = SegmentCache(budget // 2)
        self._budget = budget - budget // 2
        self._conversations: list[Conversation] = []  # most recently used first
        self._lock = Lock()

    @property
    def nbytes(self) -> int:
        with self._lock:
            return self._segments.nbytes + sum(c.nbytes for c in self._conversations)

    def encode(self, text: str) -> Ids:
        """The ids of `text`, read-only [num_tokens]; only what is new is encoded."""
        known, kept = self._longest(text)
        start, offset = known.cuts[kept - 1], known.offsets[kept - 1]
        cuts = self._cutter.cuts(text, start)
        parts = self._parts([text[a:b] for a, b in pairwise([start, *cuts, len(text)])])
        ids = np.concatenate([known.ids[:offset], *parts])
        ids.flags.writeable = False
        ends = np.cumsum([offset, *(part.size for part in parts)]).tolist()
        made = Conversation(text, ids, [*known.cuts[:kept], *cuts, len(text)], [*known.offsets[: kept - 1], *ends])
        self._remember(made, known if kept >= len(known.cuts) - 1 else None)
        return ids

    def _longest(self, text: str) -> tuple[Conversation, int]:
        """The conversation sharing most with `text`, and how many of its cuts are shared."""
        with self._lock:
            candidates = list(self._conversations)
        best, kept = NOTHING, 1
        for conversation in candidates:
            shared = conversation.shared_cuts(text, self._cutter)
            if conversation.cuts[shared - 1] > best.cuts[kept - 1]:
                best, kept = conversation, shared
        return best, kept

    def _parts(self, segments: Sequence[str]) -> list[Ids]:
        with self._lock:
            found = [self._segments.get(segment) for segment in segments]
        missing = [segment for segment, ids in zip(segments, found, strict=True) if ids is None]
        made = dict(zip(missing, self._encode(missing), strict=True)) if missing else {}
        with self._lock:
            for segment, ids in made.items():
                self._segments.put(segment, ids)
        return [made[segment] if ids is None else ids for segment, ids in zip(segments, found, strict=True)]

    def _remember(self, made: Conversation, grown: Conversation | None) -> None:
        """Keep `made`, in place of the conversation that it has grown from; drop the least recently used."""
        with self._lock:
            kept = [c for c in self._conversations if c is not grown and c.text != made.text]
            kept = [made, *kept[: MAX_CONVERSATIONS - 1]]
            while kept and sum(c.nbytes for c in kept) > self._budget:
                kept.pop()
            self._conversations = kept
