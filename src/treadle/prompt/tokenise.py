"""Prompt text to token ids, fast for conversations that grow.

The memo (`memo.py`) is used only for tokenizers on which a battery of texts proves that cutting changes
nothing; all others are encoded in full, and `Encoder.memoised` says which.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np

from treadle.errors import BadRequest
from treadle.prompt.memo import Memo, cut_tokens
from treadle.types import Ids

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MEMO_BYTES = 64 * 2**20
BATTERY = (
    "", " ", "  ", "\n", "\n\n", "\t", "a", " a", "a ", "Hello world", " leading", "trailing ",
    "two  spaces", "a\n\nb\n", "'s", "don't", "12345", "A.B,c!", "<", "<|", "|>", "</s", "▁", "é",
    "e\u0301", "ﬁ", "İ", "日本語", "👩‍👩‍👧", "\u200b", "\x00", "user\n", "def f(x):\n    return x\n",
)  # fmt: skip


class Encoder:
    """The encoding of one tokenizer; thread-safe. `memoised`: whether the memo serves it, `why` if not."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, memo_bytes: int = MEMO_BYTES) -> None:
        self._tokenizer = tokenizer
        self._lock = Lock()
        self._memo: Memo | None = None
        self._before = self._after = np.empty(0, np.int64)
        self.why = self._prepare(memo_bytes)
        if self.why:
            log.info("Prompts are always encoded in full: %s.", self.why)

    @property
    def memoised(self) -> bool:
        return self._memo is not None

    def encode(self, text: str, add_special_tokens: bool) -> Ids:
        """The ids of `text`, int64 [num_tokens], read-only.

        `add_special_tokens`: as the tokenizer does for a text by itself (BOS, mostly); False for chat
        prompts, whose template writes them. A BOS that the text itself begins with is not doubled. Raises
        BadRequest for text that is no Unicode.
        """
        if self._memo is None:
            ids = self.encode_in_full(text, add_special_tokens)
        else:
            ids = self._memo.encode(text)
            ids = self._around(ids) if add_special_tokens else ids
        return self._undoubled(ids) if add_special_tokens else ids

    def encode_in_full(self, text: str, add_special_tokens: bool) -> Ids:
        """What transformers gives, through its own call; the reference that the memo must equal."""
        _check_unicode(text)
        with self._lock:
            ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return _frozen(np.asarray(ids, np.int64))

    def _around(self, ids: Ids) -> Ids:
        return _frozen(np.concatenate([self._before, ids, self._after]))

    def _undoubled(self, ids: Ids) -> Ids:
        bos = self._tokenizer.bos_token_id
        return ids[1:] if bos is not None and ids[:2].tolist() == [bos, bos] else ids

    def _encode_many(self, texts: Sequence[str]) -> list[Ids]:
        """Each text on its own, no special tokens around it; other Python threads run meanwhile."""
        for text in texts:
            _check_unicode(text)
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        return [_frozen(np.asarray(encoding.ids, np.int64)) for encoding in encodings]

    def _prepare(self, memo_bytes: int) -> str:
        """Set the memo up; the reason if this tokenizer cannot have one."""
        if not self._tokenizer.is_fast:
            return "the tokenizer is not a fast one"
        tokens = cut_tokens(self._tokenizer.added_tokens_decoder.values(), str(self._tokenizer.chat_template or ""))
        if not tokens:
            return "it has no special token that text can be cut at"
        # The call also sets the tokenizer's truncation and padding off, as the memo needs them.
        self._before, self._after = self._surroundings()
        trial = Memo(self._encode_many, tokens, memo_bytes)
        for text in battery(tokens):
            full = self.encode_in_full(text, add_special_tokens=False)
            if not np.array_equal(trial.encode(text), full):
                return f"cutting changes the ids of {text!r}"
            if not np.array_equal(self._around(full), self.encode_in_full(text, add_special_tokens=True)):
                return f"the special tokens around {text!r} depend on it"
        self._memo = Memo(self._encode_many, tokens, memo_bytes)
        return ""

    def _surroundings(self) -> tuple[Ids, Ids]:
        """The special tokens that the tokenizer puts before and after a text."""
        probe = "a"
        bare = self.encode_in_full(probe, add_special_tokens=False)
        full = self.encode_in_full(probe, add_special_tokens=True)
        for start in range(full.size - bare.size + 1):
            if np.array_equal(full[start : start + bare.size], bare):
                return full[:start], full[start + bare.size :]
        return full[:0], full[:0]


def battery(tokens: Sequence[str]) -> Iterator[str]:
    """Texts that would show an effect of cutting: each text beside a cut, and seeded mixtures."""
    draw = random.Random(0)
    filler = "x" * 70  # long enough that the cuts are not skipped
    for text in BATTERY:
        token = draw.choice(tokens)
        yield f"{text}{token}{text}"
        yield f"{filler}{text}{token}{text}{filler}{text}{token}"
    for _ in range(32):
        yield "".join(draw.choice((*BATTERY, *tokens[:8], filler)) for _ in range(draw.randint(2, 12)))


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest("The text has half of a surrogate pair, which is no character.") from error


def _frozen(ids: Ids) -> Ids:
    ids.flags.writeable = False
    return ids


_made: WeakKeyDictionary[PreTrainedTokenizerBase, Encoder] = WeakKeyDictionary()
_lock = Lock()


def encoder_of(tokenizer: PreTrainedTokenizerBase) -> Encoder:
    """The encoder of this tokenizer, made and checked at the first call and kept with it."""
    with _lock:
        if tokenizer not in _made:
            _made[tokenizer] = Encoder(tokenizer)
        return _made[tokenizer]


def encode(tokenizer: PreTrainedTokenizerBase, text: str, add_special_tokens: bool) -> Ids:
    """`Encoder.encode` of the tokenizer's one encoder: int64 [num_tokens], read-only."""
    return encoder_of(tokenizer).encode(text, add_special_tokens)
