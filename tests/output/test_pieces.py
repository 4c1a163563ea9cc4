"""The table of bytes is used only where it equals the tokenizer's own decoding."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.output.families import FAMILIES, family
from treadle.output.pieces import BYTE_OF_CHAR, byte_level_piece, piece_function, pieces_of


def test_the_byte_map_covers_each_byte_once() -> None:
    assert sorted(BYTE_OF_CHAR.values()) == list(range(256))
    assert len(BYTE_OF_CHAR) == 256


@pytest.mark.parametrize(
    ("token", "piece"),
    [
        ("ĠParis", b" Paris"),
        ("æĹ¥", "日".encode()),
        ("<|im_end|>", b"<|im_end|>"),
        ("two words", b"two words"),
        ("日", "日".encode()),
        ("\x80", b"\xc2\x80"),
    ],
)
def test_a_byte_level_token_is_bytes_unless_it_holds_a_character_outside_the_map(token: str, piece: bytes) -> None:
    assert byte_level_piece(token) == piece


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "wordpiece"])
def test_families_that_decode_token_by_token_have_a_table(name: str) -> None:
    assert pieces_of(family(name)).table is not None


def test_a_decoder_that_looks_at_neighbours_has_no_table() -> None:
    assert pieces_of(family("wordpiece")).table is None
    assert piece_function({"type": "CTC"}) is None
    assert piece_function(None) is None


def test_steps_after_joining_that_change_the_text_have_no_table() -> None:
    fuse, replace = {"type": "Fuse"}, {"type": "Replace", "pattern": {"String": "a"}, "content": "b"}
    trim_end = {"type": "Strip", "content": " ", "start": 0, "stop": 1}
    assert piece_function({"type": "Sequence", "decoders": [fuse, replace]}) is None
    assert piece_function({"type": "Sequence", "decoders": [fuse, trim_end]}) is None
    assert piece_function({"type": "Sequence", "decoders": [trim_end, fuse]}) is None


class _Shouting(PreTrainedTokenizerFast):
    """A tokenizer whose Python side decodes differently from its decoder."""

    def _decode(self, *args: object, **kwargs: object) -> str:
        return super()._decode(*args, **kwargs).upper()


def test_a_tokenizer_that_overrides_decoding_has_no_table() -> None:
    core = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    core.decoder = decoders.Fuse()
    assert pieces_of(PreTrainedTokenizerFast(tokenizer_object=core)).table is not None
    assert pieces_of(_Shouting(tokenizer_object=core)).table is None


def test_pieces_are_made_once_per_tokenizer() -> None:
    assert pieces_of(family("llama")) is pieces_of(family("llama"))
    assert pieces_of(family("llama")) is not pieces_of(family("gemma"))
