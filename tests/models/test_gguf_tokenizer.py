"""A tokenizer built from a GGUF file's metadata cuts and joins text as the model's own does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.builtin import builtin
from tests.models.gguf_files import BYTES, MERGES, SPECIAL, TEMPLATE, TOKENS
from treadle.errors import LoadError
from treadle.models.gguf import GGUF, read
from treadle.models.gguf_tokenizer import PRE_TOKENIZERS, end_ids, load_tokenizer

TEXTS = [
    "The capital of France is",
    " one leading space",
    "   three",
    "a  b   c    d",
    "12345 67 1.5e10",
    "line\nnext\n\n\nlast\n",
    "\r\n\ttabs\t\t",
    "日本語のテキスト。漢字",
    "👩‍👩‍👧‍👦 🎉 🇫🇷",
    "naïve café e\u0301",
    "عربي नमस्ते",
    "don't I'LL we've",
    "",
]


def byte_level(**changes: Any) -> GGUF:
    """A byte-level vocabulary in memory; keys are those after `tokenizer.`, dots as double underscores."""
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 128,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.chat_template": TEMPLATE,
    }
    metadata |= {f"tokenizer.{key.replace('__', '.')}": value for key, value in changes.items()}
    return GGUF((Path("tiny.gguf"),), {key: v for key, v in metadata.items() if v is not None}, {})


PIECES = ["▁", "a", "b", "c", "1", "▁a", "bc", "abc", "▁abc", "aa", "é"]
SPM_TOKENS = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "\n\n", "  ", "   ", *PIECES]


def sentencepiece(**changes: Any) -> GGUF:
    kinds = [2, 3, 3, *[6] * 256, 4, 4, 4, *[1] * len(PIECES)]
    # "bc" beats "▁a": " abc" is then made of "▁", "a", "bc" and so on upwards.
    scores = {"▁a": -3.0, "bc": -1.0, "abc": -4.0, "▁abc": -5.0, "aa": -2.0}
    return byte_level(
        ggml__model="llama",
        ggml__pre=None,
        ggml__merges=None,
        ggml__tokens=SPM_TOKENS,
        ggml__token_type=kinds,
        ggml__scores=[scores.get(token, -1000.0) for token in SPM_TOKENS],
        ggml__unknown_token_id=0,
        **changes,
    )


def cut(tokenizer: Any, text: str) -> list[str]:
    return list(tokenizer.convert_ids_to_tokens(tokenizer.encode(text, add_special_tokens=False)))


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs", "Cn"]), max_size=40))
def test_byte_level_text_survives_the_round_trip(pre: str, text: str) -> None:
    tokenizer = _cached(pre)
    ids = tokenizer.encode(text, add_special_tokens=False)
    normal = tokenizer.backend_tokenizer.normalizer
    assert tokenizer.decode(ids) == (normal.normalize_str(text) if normal else text)


_made: dict[str, Any] = {}


def _cached(pre: str) -> Any:
    if pre not in _made:
        _made[pre] = load_tokenizer(byte_level(ggml__pre=pre))
    return _made[pre]


def test_control_tokens_are_single_ids_in_a_rendered_template() -> None:
    tokenizer = load_tokenizer(byte_level())
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"
    pieces = cut(tokenizer, text)
    assert (pieces[0], pieces[-2]) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == "user\nhi\n"


def test_smollm_splits_digits_and_gpt_2_does_not() -> None:
    assert cut(load_tokenizer(byte_level(ggml__pre="smollm")), "12") == ["1", "2"]
    assert cut(load_tokenizer(byte_level(ggml__pre="gpt-2")), "12") == ["12"]


def test_pre_tokenizers_differ_in_how_many_digits_stay_together() -> None:
    def words(pre: str) -> list[str]:
        backend = load_tokenizer(byte_level(ggml__pre=pre)).backend_tokenizer
        return [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("x 1234'LL")]

    assert words("llama-bpe") == ["x", "Ġ", "123", "4", "'LL"]
    assert words("qwen2") == ["x", "Ġ", "1", "2", "3", "4", "'LL"]
    assert words("gpt-2") == ["x", "Ġ1234", "'", "LL"]


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    tokens = [*SPECIAL, *BYTES, "<think>"]
    kinds = [3] * len(SPECIAL) + [1] * len(BYTES) + [4]
    tokenizer = load_tokenizer(byte_level(ggml__tokens=tokens, ggml__token_type=kinds, ggml__merges=[]))
    assert cut(tokenizer, "a<think>b") == ["a", "<think>", "b"]
    assert tokenizer.decode(tokenizer.encode("a<think>b"), skip_special_tokens=True) == "a<think>b"


def test_the_first_token_is_added_only_where_the_file_or_its_kind_says() -> None:
    assert load_tokenizer(byte_level()).encode("a")[0] != 1
    assert load_tokenizer(byte_level(ggml__add_bos_token=True)).encode("a")[0] == 1
    assert load_tokenizer(byte_level(ggml__pre="llama-bpe")).encode("a")[0] == 1
    assert load_tokenizer(sentencepiece()).encode("a")[0] == 1
    assert load_tokenizer(sentencepiece(ggml__add_bos_token=False)).encode("a")[0] != 1


def test_named_tokens_and_ends_come_from_the_metadata() -> None:
    file = byte_level(ggml__eot_token_id=3, ggml__padding_token_id=0)
    tokenizer = load_tokenizer(file)
    named = (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token)
    assert named == ("<|im_end|>", "<|im_start|>", "<|endoftext|>")
    assert end_ids(file) == [2, 3]


def test_sentencepiece_joins_the_best_scored_pair_first() -> None:
    tokenizer = load_tokenizer(sentencepiece(ggml__add_space_prefix=False))
    assert cut(tokenizer, "abc") == ["abc"]
    assert cut(tokenizer, "ab") == ["a", "b"]
    assert cut(tokenizer, "aaa") == ["aa", "a"]
    assert cut(tokenizer, " abc") == ["▁abc"]


def test_sentencepiece_adds_a_leading_space_unless_told_otherwise() -> None:
    prefixed = load_tokenizer(sentencepiece())
    assert cut(prefixed, "abc") == ["▁abc"]
    assert prefixed.decode(prefixed.encode("abc", add_special_tokens=False)) == "abc"
    assert cut(load_tokenizer(sentencepiece(ggml__add_space_prefix=False)), "abc") == ["abc"]


def test_sentencepiece_keeps_runs_of_spaces_and_lines_whole() -> None:
    tokenizer = load_tokenizer(sentencepiece(ggml__add_space_prefix=False))
    assert cut(tokenizer, "a   b\n\nc") == ["a", "▁▁▁", "b", "\n\n", "c"]


@given(text=st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"]), max_size=30))
def test_sentencepiece_text_survives_the_round_trip_through_bytes(text: str) -> None:
    if "spm" not in _made:
        _made["spm"] = load_tokenizer(sentencepiece(ggml__add_space_prefix=False))
    ids = _made["spm"].encode(text, add_special_tokens=False)
    assert _made["spm"].decode(ids) == text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ggml__model": "bert"}, "tokenizer of kind 'bert'"),
        ({"ggml__pre": "chatglm-bpe"}, "pre-tokenizer 'chatglm-bpe'"),
        ({"ggml__tokens": None}, "tokenizer.ggml.tokens"),
        ({"ggml__token_type": [1]}, "damaged"),
        ({"ggml__merges": ["x y"]}, "cannot be built"),
        ({"ggml__merges": ["xy"]}, "cannot be built"),
    ],
)
def test_what_cannot_be_built_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(LoadError, match=words):
        load_tokenizer(byte_level(**changes))


@pytest.mark.parametrize("text", TEXTS)
def test_the_built_in_model_s_tokenizer_returns_every_text(text: str) -> None:
    if "builtin" not in _made:
        _made["builtin"] = load_tokenizer(read(builtin().path))
    tokenizer = _made["builtin"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_built_in_model_s_tokens_are_the_known_ones() -> None:
    tokenizer = load_tokenizer(read(builtin().path))
    assert tokenizer.encode("The capital of France is 12") == [504, 3575, 282, 4649, 314, 216, 33, 34]
    assert tokenizer.encode("<|im_start|>user\nHi<|im_end|>\n") == [1, 4093, 198, 26843, 2, 198]
    assert len(tokenizer) == 49152
