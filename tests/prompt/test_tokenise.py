"""Whatever is remembered, the ids are those of a full encoding."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.output.families import FAMILIES, SPECIALS, byte_level, family
from treadle.errors import BadRequest
from treadle.prompt.memo import MIN_SEGMENT
from treadle.prompt.tokenise import Encoder, encode, encoder_of

FILLER = "the of and " * (MIN_SEGMENT // 11 + 1)
pieces = st.one_of(
    st.sampled_from(
        [*SPECIALS, "<tool>", "two words", "<mask>", "<sep>", FILLER, " ", "\n", "\n\n", "<|", "im_start|>"]
    ),
    st.sampled_from(["The capital", " of", "user\n", "日本", "👩‍👩‍👧", "é", "▁", "'s", "12"]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
)
conversations = st.lists(
    st.lists(pieces, max_size=12).map("".join), min_size=1, max_size=4
)  # each the end of a text that grows


@pytest.mark.parametrize("name", sorted(FAMILIES))
@given(ends=conversations, add=st.booleans(), edit=st.integers(0, 200))
def test_memoised_ids_equal_a_full_encoding(name: str, ends: list[str], add: bool, edit: int) -> None:
    encoder = Encoder(family(name)) if name not in _ENCODERS else _ENCODERS[name]
    _ENCODERS[name] = encoder
    assert encoder.memoised
    text = ""
    for end in ends:
        text += end
        for case in (text, text[:edit], text[:edit] + end):
            full = family(name).encode(case, add_special_tokens=add)
            bos = family(name).bos_token_id
            doubled = add and bos is not None and full[:2] == [bos, bos]
            assert encoder.encode(case, add).tolist() == (full[1:] if doubled else full)


_ENCODERS: dict[str, Encoder] = {}


@pytest.mark.parametrize("name", ["llama", "wordpiece"])
def test_a_bos_that_the_text_begins_with_is_not_doubled(name: str) -> None:
    tokenizer = family(name)
    with_bos, without = (encode(tokenizer, text, True).tolist() for text in ("<s>the", "the"))
    assert with_bos[0] == without[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in with_bos[1:]
    assert encode(tokenizer, "<s>the", False).tolist()[0] == tokenizer.bos_token_id
    assert encode(tokenizer, "the", False).tolist()[0] != tokenizer.bos_token_id


def test_ids_are_read_only_int64() -> None:
    ids = encode(family("gemma"), "The capital", False)
    assert ids.dtype == np.int64 and not ids.flags.writeable
    assert encode(family("gemma"), "", False).shape == (0,)


def test_half_a_surrogate_pair_is_a_bad_request() -> None:
    for add in (True, False):
        with pytest.raises(BadRequest, match="surrogate"):
            encode(family("byte_level"), "a\ud83d", add)


class _Lowering(PreTrainedTokenizerFast):
    """A tokenizer whose Python side encodes differently from its core."""

    def _encode_plus(self, text: str, *args: object, **kwargs: object) -> object:
        return super()._encode_plus(text.lower(), *args, **kwargs)


def test_a_tokenizer_that_overrides_encoding_is_encoded_in_full() -> None:
    tokenizer = _Lowering(tokenizer_object=byte_level().backend_tokenizer)
    encoder = Encoder(tokenizer)
    assert not encoder.memoised and "changes the ids" in encoder.why
    assert encoder.encode("The<|im_start|>", False).tolist() == tokenizer.encode("The<|im_start|>")


def test_a_tokenizer_without_special_tokens_is_encoded_in_full() -> None:
    core = byte_level().backend_tokenizer
    core.add_tokens([AddedToken("word", single_word=True, normalized=False)])
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=core))
    assert not encoder.memoised and "no special token" in encoder.why
    assert encoder.encode("a word", True).tolist() == core.encode("a word").ids


def test_a_stored_truncation_cuts_no_prompt() -> None:
    core = byte_level().backend_tokenizer
    core.enable_truncation(4)
    core.enable_padding(length=9)
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=core))
    assert encoder.memoised
    assert encoder.encode("the of and in is user", False).size > 4
    assert encoder.encode("a", False).size == 1


def test_prefix_spaces_after_special_tokens_are_those_of_a_full_encoding() -> None:
    core = byte_level().backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(True)])
    encoder = Encoder(PreTrainedTokenizerFast(tokenizer_object=core))
    for text in ("a<|im_start|>b", f"{FILLER}<|im_start|>b{FILLER}<|im_end|>7c"):
        assert encoder.encode(text, False).tolist() == core.encode(text, add_special_tokens=False).ids


def test_threads_get_the_ids_of_their_own_text() -> None:
    tokenizer = family("llama")
    texts = [f"<|im_start|>user\n{FILLER * (i % 5)}{i}<|im_end|>{FILLER}<|im_start|>" for i in range(60)]
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda text: encode(tokenizer, text, True).tolist(), texts))
    assert made == [tokenizer.encode(text) for text in texts]


def test_the_encoder_is_made_once_per_tokenizer() -> None:
    assert encoder_of(family("gemma")) is encoder_of(family("gemma"))
