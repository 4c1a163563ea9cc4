"""A tokenizer for the hash model's ids: the end is 0, the printable ASCII characters follow, the last id is padding."""

from __future__ import annotations

from functools import cache, partial

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.fakes import STOP, VOCAB
from treadle.grammar.compile import Grammars, grammars_of

END = "<|end|>"
LETTERS = [chr(code) for code in range(32, 127)]


@cache
def letters() -> PreTrainedTokenizerFast:
    tokens = [END, *("Ġ" if letter == " " else letter for letter in LETTERS)]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


def ids_of(text: str) -> list[int]:
    return [1 + LETTERS.index(letter) for letter in text]


def text_of(ids: list[int]) -> str:
    return "".join(LETTERS[i - 1] for i in ids)


def grammars() -> Grammars:
    return partial(grammars_of, letters(), VOCAB, frozenset({STOP}))()
