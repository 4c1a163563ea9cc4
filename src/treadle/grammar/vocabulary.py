"""A model's tokens as llguidance needs them: made once, a second or so for large vocabularies. Any thread."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from llguidance import LLTokenizer

from treadle.grammar.fault import GrammarError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BITS = 32


def mask_words(size: int) -> int:
    """Length of the mask of `size` ids, one bit for each."""
    return -(-size // BITS)


class Vocabulary:
    """`tokens` for llguidance; `size` ids that the model can produce, of which `ends` end a reply.

    Ids that only the embedding has (padding) are never allowed; ids that only the tokenizer has cannot be produced.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, size: int, ends: Collection[int]) -> None:
        """Raises GrammarError for a tokenizer whose tokens have no bytes of their own, or without an end."""
        from llguidance.hf import from_tokenizer  # imports transformers

        if not ends:
            raise GrammarError("this model has no end token, so no grammar can end a reply")
        known = max(tokenizer.get_vocab().values(), default=-1) + 1
        try:
            self.tokens: LLTokenizer = from_tokenizer(tokenizer, max(size, known), sorted(ends))
        except ValueError as error:
            raise GrammarError(f"this model's tokenizer cannot be used with a grammar ({error})") from error
        self.size = size
        self.ends = frozenset(ends)
