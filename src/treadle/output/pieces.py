"""The bytes that each token id stands for, read once from a tokenizer's own decoder.

Most decoders treat each token alone (byte-level BPE, SentencePiece with byte fallback); for those, text is
the joined bytes of the tokens. A decoder that looks at neighbours (WordPiece, CTC, ...) has no such table.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from functools import reduce
from threading import Lock
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from tokenizers import Tokenizer
from tokenizers.models import BPE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

StepOf = Callable[[str], str]
PieceOf = Callable[[str], bytes]

SPACE_MARK = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
PROBE_TEXTS = ("é", "日本語", "👩‍👩‍👧", "🇫🇷")


def byte_of_char() -> dict[str, int]:
    """GPT-2's reversible map: the printable stand-in of each byte -> the byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(hidden)}


BYTE_OF_CHAR = byte_of_char()
# For str.translate: stand-ins become latin-1 characters; other latin-1 characters one that latin-1 lacks.
_TO_LATIN = dict.fromkeys(range(256), 0xFFFF) | {ord(char): byte for char, byte in BYTE_OF_CHAR.items()}


def byte_level_piece(token: str) -> bytes:
    """A byte-level token's bytes; a token with any character outside the map is verbatim text."""
    try:
        return token.translate(_TO_LATIN).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode("utf-8", "replace")


def byte_fallback_piece(token: str) -> bytes:
    match = BYTE_TOKEN.fullmatch(token)
    return bytes([int(match[1], 16)]) if match else text_piece(token)


def text_piece(token: str) -> bytes:
    return token.encode("utf-8", "replace")


def _spelling(step: dict[str, Any]) -> StepOf | None:
    """A decoder step that rewrites each token's text alone; None when it does anything else."""
    if step["type"] == "Replace" and "String" in step["pattern"]:
        old, new = step["pattern"]["String"], step["content"]
        return lambda token: token.replace(old, new)
    if step["type"] == "Metaspace":
        mark = step["replacement"]
        return lambda token: token.replace(mark, " ")
    return None


def _only_joins(step: dict[str, Any]) -> bool:
    """Whether a step leaves the middle of a text alone: joining, or stripping where the text begins."""
    kind = step["type"]
    return kind == "Fuse" or (kind == "Strip" and int(step["stop"]) == 0)


def piece_function(decoder: dict[str, Any] | None) -> PieceOf | None:
    """How this decoder (as in tokenizer.json) spells one token in a text; None if neighbours matter."""
    if decoder is None:
        return None
    steps = list(decoder["decoders"]) if decoder["type"] == "Sequence" else [decoder]
    spellings: list[StepOf] = []
    while steps and (spelling := _spelling(steps[0])) is not None:
        spellings.append(spelling)
        steps.pop(0)
    to_bytes: PieceOf = text_piece
    if steps and steps[0]["type"] in ("ByteLevel", "ByteFallback"):
        to_bytes = byte_level_piece if steps.pop(0)["type"] == "ByteLevel" else byte_fallback_piece
    if not all(_only_joins(step) for step in steps) or (steps and steps[0]["type"] != "Fuse"):
        return None
    return lambda token: to_bytes(reduce(lambda text, spell: spell(text), spellings, token))


def token_strings(tokenizer: PreTrainedTokenizerBase) -> list[str | None]:
    """The stored spelling of every id, added tokens first; None for ids that nothing uses."""
    added = {int(i): str(token.content) for i, token in tokenizer.added_tokens_decoder.items()}
    by_id = {int(i): str(token) for token, i in tokenizer.get_vocab().items()} | added
    return [by_id.get(i) for i in range(max(by_id, default=-1) + 1)]


class Pieces:
    """What one tokenizer's ids spell. `table` is None when the decoder cannot be expressed token by token.

    table[id]: bytes; special: ids that are skipped by default; strings[id]: the stored spelling;
    opening: ids to decode in front of a text so that its first token keeps its leading space (may be empty).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.strings = token_strings(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.special = frozenset(int(i) for i, token in added.items() if token.special)
        self.opening = _opening(tokenizer, self.strings)
        table = self._build(tokenizer)
        self.table = table if table is not None and _proved(tokenizer, self, table) else None
        self.visible = None if self.table is None else self._without_special(self.table)
        self._showing = {frozenset[int](): self.visible}

    def showing(self, shown: frozenset[int]) -> list[bytes] | None:
        """The table in which the special tokens of `shown` alone keep their text; made once for each set."""
        if shown not in self._showing and self.table is not None:
            hidden = self.special - shown
            self._showing[shown] = [b"" if i in hidden else piece for i, piece in enumerate(self.table)]
        return self._showing.get(shown)

    def _build(self, tokenizer: PreTrainedTokenizerBase) -> list[bytes] | None:
        if not tokenizer.is_fast:
            return None
        spell = piece_function(_decoder_of(tokenizer))
        return None if spell is None else [b"" if s is None else spell(s) for s in self.strings]

    def _without_special(self, table: Sequence[bytes]) -> list[bytes]:
        return [b"" if i in self.special else piece for i, piece in enumerate(table)]


def _decoder_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any] | None:
    """The decoder as tokenizer.json writes it, without writing the vocabulary (seconds for large ones)."""
    bare = Tokenizer(BPE())
    if tokenizer.backend_tokenizer.decoder is None:
        return None
    bare.decoder = tokenizer.backend_tokenizer.decoder
    decoder: dict[str, Any] = json.loads(bare.to_str())["decoder"]
    return decoder


def _decode(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special: bool = False) -> str:
    text = tokenizer.decode(list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
    return str(text)


def _opening(tokenizer: PreTrainedTokenizerBase, strings: Sequence[str | None]) -> tuple[int, ...]:
    """One id to put in front where decoding strips a text's first space (SentencePiece); else nothing."""
    for i, string in enumerate(strings):
        if string and string[0] == SPACE_MARK and string[1:].isascii() and string[1:].isalpha():
            once, twice = _decode(tokenizer, [i]), _decode(tokenizer, [i, i])
            return (i,) if twice == f"{once} {once}" else ()
    return ()


def _samples(pieces: Pieces, table: Sequence[bytes], draw: random.Random) -> list[list[int]]:
    """Random sequences of all ids, and characters spelled by byte tokens where the vocabulary has those.

    A run of byte tokens that is not UTF-8 is left out: there the table keeps the valid characters and
    the tokenizer's decoder replaces the whole run.
    """
    strings = pieces.strings
    byte_ids = {table[i]: i for i, s in enumerate(strings) if s and BYTE_TOKEN.fullmatch(s) and len(table[i]) == 1}
    raw = set(byte_ids.values())
    plain = [i for i, s in enumerate(strings) if s is not None and i not in raw]
    samples = [[draw.choice(plain) for _ in range(draw.randint(1, 24))] for _ in range(48)] if plain else []
    if len(byte_ids) == 256 and plain:
        spelled = [[byte_ids[bytes([b])] for b in text.encode()] for text in PROBE_TEXTS]
        samples += [[draw.choice(plain), *ids, draw.choice(plain)] for ids in spelled]
    return samples


def _proved(tokenizer: PreTrainedTokenizerBase, pieces: Pieces, table: Sequence[bytes]) -> bool:
    """Whether joined pieces equal the tokenizer's own decoding, behind the opening, on a seeded sample."""
    visible = pieces._without_special(table)
    opening = list(pieces.opening)
    for skip, part in ((False, table), (True, visible)):
        head = _decode(tokenizer, opening, skip)
        for ids in _samples(pieces, table, random.Random(0)):
            text = b"".join(part[i] for i in ids).decode("utf-8", "replace")
            if head + text != _decode(tokenizer, opening + ids, skip):
                return False
    return True


_made: WeakKeyDictionary[PreTrainedTokenizerBase, Pieces] = WeakKeyDictionary()
_lock = Lock()


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """The pieces of this tokenizer, made at the first call (a moment) and kept with it."""
    with _lock:
        if tokenizer not in _made:
            _made[tokenizer] = Pieces(tokenizer)
        return _made[tokenizer]
