"""Incremental decoding: token ids in, text out, as early as it is certain and never earlier.

Rules:
- A character (code point) whose bytes are spread over tokens is emitted when it is complete. Bytes that can
  never become a character turn into one U+FFFD at once and block nothing; an incomplete tail at the end
  turns into one U+FFFD.
- The text continues another text: a first token " Paris" yields " Paris". `tokenizer.decode` of the same ids
  strips that space for SentencePiece tokenizers (Metaspace, Strip); this is the only difference for valid
  text.
- In a run of byte-fallback tokens that is not UTF-8 the valid characters are kept, where `tokenizer.decode`
  replaces the whole run.
- Ids that the tokenizer does not know yield nothing, as in `tokenizer.decode`.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from treadle.output.pieces import Pieces, pieces_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLACEMENT = "\ufffd"
WINDOW = 8  # groups of tokens (each whole characters) that the general path decodes again
LONGEST_CHAR = 4  # bytes, so also tokens, that one character may need

_Utf8Decoder = getincrementaldecoder("utf-8")


class _Path(Protocol):
    @property
    def pending(self) -> bool: ...
    def push(self, ids: Sequence[int]) -> str: ...
    def finish(self) -> str: ...


class Detokeniser:
    """Text of one growing sequence of ids. Time is linear in the ids, whatever the chunks; not thread-safe.

    For any chunking the pushed texts and `finish()` join to the same text. Special tokens have no text but with
    `keep_special`, or if they are among `shown`.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, keep_special: bool = False, shown: frozenset[int] = frozenset()
    ) -> None:
        pieces = pieces_of(tokenizer)
        table = pieces.table if keep_special else pieces.showing(shown)
        self._path: _Path
        if table is None:
            self._path = _WindowPath(tokenizer, pieces, frozenset() if keep_special else pieces.special - shown)
        else:
            self._path = _TablePath(table)

    @property
    def pending(self) -> bool:
        """Whether the last ids began a character that is still incomplete."""
        return self._path.pending

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids make certain; often that of `ids`, empty inside a character."""
        return self._path.push(ids)

    def finish(self) -> str:
        """The end: one U+FFFD for an incomplete character, else nothing. Push nothing after it."""
        return self._path.finish()


class _TablePath:
    """Joined bytes through one UTF-8 decoder."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._size = len(table)
        self._decoder = _Utf8Decoder("replace")

    @property
    def pending(self) -> bool:
        return bool(self._decoder.getstate()[0])

    def push(self, ids: Sequence[int]) -> str:
        table, size = self._table, self._size
        return self._decoder.decode(b"".join([table[i] for i in ids if 0 <= i < size]))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowPath:
    """The tokenizer decodes the last few tokens with and without the new one; the difference is new text.

    Exact for decoders that look back at most `WINDOW` tokens and never change text already decoded. What
    ends in U+FFFD waits for up to four tokens, for it may still become a character. The window is cut
    between characters only.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, pieces: Pieces, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._size = len(pieces.strings)
        self._groups: list[list[int]] = [list(pieces.opening)]
        self._context = self._groups[0]
        self._base = self._decode(self._context)
        self._held: list[int] = []

    @property
    def pending(self) -> bool:
        return bool(self._held)

    def push(self, ids: Sequence[int]) -> str:
        known = (i for i in ids if 0 <= i < self._size and i not in self._skipped)
        return "".join([self._push_one(i) for i in known])

    def finish(self) -> str:
        return self._release(len(self._held)) if self._held else ""

    def _push_one(self, token: int) -> str:
        self._held.append(token)
        text = self._decode(self._context + self._held)
        if not text.endswith(REPLACEMENT):
            return self._release(len(self._held), text)
        return "" if len(self._held) < LONGEST_CHAR else self._release(self._settled(text))

    def _settled(self, text: str) -> int:
        """How many held tokens stand for text that stays; the oldest is in no incomplete end any more."""
        counts = range(1, len(self._held))
        stays = (n for n in counts if text.startswith(self._decode(self._context + self._held[:n])))
        return next(stays, len(self._held))

    def _release(self, count: int, text: str | None = None) -> str:
        """`text`: of the context and so many held tokens, where it is known."""
        group, self._held = self._held[:count], self._held[count:]
        text = self._decode(self._context + group) if text is None else text
        new = text[_common(self._base, text) :]
        self._groups = [*self._groups, group][-WINDOW:]
        self._context = [token for group in self._groups for token in group]
        self._base = self._decode(self._context)
        return new

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _common(a: str, b: str) -> int:
    """The length of the common prefix."""
    differ = (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))


def piece_bytes(tokenizer: PreTrainedTokenizerBase, token: int) -> bytes:
    """The bytes of one token inside a text, special tokens by name; half a character is possible."""
    pieces = pieces_of(tokenizer)
    if not 0 <= token < len(pieces.strings):
        return b""
    if pieces.table is not None:
        return pieces.table[token]
    path = _WindowPath(tokenizer, pieces, frozenset())
    return (path.push([token]) + path.finish()).encode()
