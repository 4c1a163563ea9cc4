"""Text appears as early as it is certain, and joins to what the tokenizer itself decodes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tests.output.families import FAMILIES, STRIPS_FIRST_SPACE, family
from treadle.output.detokenise import Detokeniser, _WindowPath, piece_bytes
from treadle.output.pieces import BYTE_TOKEN, pieces_of

TEXTS = (
    "The capital of France is Paris.",
    "  two leading spaces, doesn't it?",
    "日本語の文章 한국어 العربية",
    "👩‍👩‍👧 family 🇫🇷 flag 🙂",
    "a\n\n\nb\t c",
)
names = st.sampled_from(sorted(FAMILIES))
texts = st.one_of(st.sampled_from(TEXTS), st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
cut_sets = st.lists(st.integers(0, 60), max_size=8)


def stream(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], cuts: Sequence[int], keep: bool = False) -> str:
    detokeniser = Detokeniser(tokenizer, keep_special=keep)
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return "".join(detokeniser.push(ids[a:b]) for a, b in pairwise(bounds)) + detokeniser.finish()


def decode(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], skip: bool = True) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=skip, clean_up_tokenization_spaces=False))


def behind_opening(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], skip: bool = True) -> str:
    """What decoding adds to a text that has already begun: the reference for a completion."""
    opening = list(pieces_of(tokenizer).opening)
    head = decode(tokenizer, opening, skip)
    return decode(tokenizer, [*opening, *ids], skip).removeprefix(head)


@st.composite
def some_ids(draw: st.DrawFn) -> tuple[str, list[int]]:
    """A family and ids: encoded texts, and any ids but raw byte tokens (their invalid runs differ)."""
    name = draw(names)
    tokenizer = family(name)
    strings = pieces_of(tokenizer).strings
    plain = [i for i, s in enumerate(strings) if s is not None and not BYTE_TOKEN.fullmatch(s)]
    parts = st.one_of(
        texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False)),
        st.lists(st.sampled_from(plain), max_size=12),
    )
    return name, [i for part in draw(st.lists(parts, max_size=4)) for i in part]


@given(some_ids(), cut_sets, st.booleans())
def test_text_equals_the_tokenizers_decoding_for_any_chunks(
    case: tuple[str, list[int]], cuts: list[int], keep: bool
) -> None:
    name, ids = case
    assert stream(family(name), ids, cuts, keep) == behind_opening(family(name), ids, not keep)


@given(st.sampled_from([n for n in sorted(FAMILIES) if n not in STRIPS_FIRST_SPACE]), texts, cut_sets)
def test_without_first_space_stripping_text_equals_decode_of_the_ids_alone(
    name: str, text: str, cuts: list[int]
) -> None:
    ids = family(name).encode(text, add_special_tokens=False)
    assert stream(family(name), ids, cuts) == decode(family(name), ids)


@given(st.sampled_from(STRIPS_FIRST_SPACE), texts)
def test_where_decode_strips_the_first_space_a_completion_keeps_it(name: str, text: str) -> None:
    ids = family(name).encode(text, add_special_tokens=False)
    kept = stream(family(name), ids, range(len(ids)))
    assert kept.lstrip(" ") == decode(family(name), ids).lstrip(" ")
    assert kept in (decode(family(name), ids), " " + decode(family(name), ids)) or name == "unigram"


@pytest.mark.parametrize("name", ["byte_level", "llama", "gemma", "mistral"])
@given(text=texts, cuts=cut_sets)
def test_byte_complete_vocabularies_give_back_any_text(name: str, text: str, cuts: list[int]) -> None:
    tokenizer = family(name)
    prompt = "a" if name in STRIPS_FIRST_SPACE else ""
    head = tokenizer.encode(prompt, add_special_tokens=False)
    ids = tokenizer.encode(prompt + text, add_special_tokens=False)
    if ids[: len(head)] == head and "▁" not in text and not any(s in text for s in tokenizer.all_special_tokens):
        assert stream(tokenizer, ids[len(head) :], cuts) == text


@pytest.mark.parametrize(("name", "mark"), [("byte_level", "Ġ"), *((n, "▁") for n in STRIPS_FIRST_SPACE)])
def test_the_first_token_keeps_its_leading_space(name: str, mark: str) -> None:
    strings = pieces_of(family(name)).strings
    token = next(i for i, s in enumerate(strings) if s and s[0] == mark and s[1:].isalpha())
    assert Detokeniser(family(name)).push([token]) == f" {str(strings[token])[1:]}"


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_no_replacement_character_appears_while_a_character_may_complete(name: str) -> None:
    ids = family(name).encode("क 🙂 日 ü", add_special_tokens=False)
    detokeniser = Detokeniser(family(name))
    parts = [detokeniser.push([i]) for i in ids]
    assert all("\ufffd" not in part for part in parts)
    assert "".join(parts).lstrip() == "क 🙂 日 ü"
    assert detokeniser.finish() == ""


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_invalid_bytes_become_one_replacement_and_block_nothing(name: str) -> None:
    pieces = pieces_of(family(name))
    assert pieces.table is not None
    bad, letter = pieces.table.index(b"\xff"), pieces.table.index(b"a")
    detokeniser = Detokeniser(family(name))
    assert [detokeniser.push([i]) for i in (bad, bad, letter)] == ["\ufffd", "\ufffd", "a"]


@pytest.mark.parametrize("name", ["byte_level", "llama"])
def test_an_incomplete_tail_becomes_one_replacement_at_the_end(name: str) -> None:
    pieces = pieces_of(family(name))
    assert pieces.table is not None
    detokeniser = Detokeniser(family(name))
    assert not detokeniser.pending
    assert detokeniser.push([pieces.table.index(bytes([b])) for b in "🙂".encode()[:3]]) == ""
    assert detokeniser.pending
    assert detokeniser.finish() == "\ufffd"


def test_valid_characters_of_a_broken_byte_run_are_kept() -> None:
    pieces = pieces_of(family("llama"))
    assert pieces.table is not None
    run = [pieces.strings.index(f"<0x{b:02X}>") for b in "ü".encode() + b"\xff"]
    assert stream(family("llama"), run, []) == "ü\ufffd"


def test_special_tokens_are_skipped_unless_kept() -> None:
    ids = family("byte_level").encode("a<|im_end|>b", add_special_tokens=False)
    assert stream(family("byte_level"), ids, []) == "ab"
    assert stream(family("byte_level"), ids, [], keep=True) == "a<|im_end|>b"


def test_unknown_ids_yield_nothing() -> None:
    for name in ("byte_level", "wordpiece"):
        assert stream(family(name), [10**6, -1], []) == ""


class _CountingTable(list[bytes]):
    reads = 0

    def __getitem__(self, index: int) -> bytes:  # type: ignore[override]
        type(self).reads += 1
        return super().__getitem__(index)


def test_one_long_line_reads_each_token_once() -> None:
    tokenizer = family("byte_level")
    ids = tokenizer.encode("the of and " * 2000, add_special_tokens=False)
    detokeniser = Detokeniser(tokenizer)
    table = _CountingTable(detokeniser._path._table)  # type: ignore[attr-defined]
    detokeniser._path._table = table  # type: ignore[attr-defined]
    assert "".join(detokeniser.push([i]) for i in ids) == "the of and " * 2000
    assert table.reads == len(ids)


def _with_decoder(decoder: decoders.Decoder, vocab: Sequence[str]) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({token: i for i, token in enumerate(vocab)}, unk_token=vocab[0]))
    core.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=core)


CTC = _with_decoder(decoders.CTC(), ["<pad>", "|", "a", "b", "c"])
SUFFIX = _with_decoder(decoders.BPEDecoder(suffix="</w>"), ["a</w>", "b", "c</w>", "d"])


@given(st.sampled_from([CTC, SUFFIX]), st.lists(st.integers(0, 3), max_size=40), cut_sets)
def test_other_decoders_stream_exactly(tokenizer: PreTrainedTokenizerFast, ids: list[int], cuts: list[int]) -> None:
    assert pieces_of(tokenizer).table is None
    assert stream(tokenizer, ids, cuts) == decode(tokenizer, ids)


@given(some_ids())
def test_the_window_gives_what_the_table_gives(case: tuple[str, list[int]]) -> None:
    name, ids = case
    pieces = pieces_of(family(name))
    path = _WindowPath(family(name), pieces, pieces.special)
    assert path.push(ids) + path.finish() == stream(family(name), ids, [])


def test_the_bytes_of_one_token_are_its_own() -> None:
    tokenizer = family("byte_level")
    assert piece_bytes(tokenizer, tokenizer.convert_tokens_to_ids("ĠParis")) == b" Paris"
    assert piece_bytes(tokenizer, tokenizer.convert_tokens_to_ids("<|im_end|>")) == b"<|im_end|>"
    half = tokenizer.encode("日", add_special_tokens=False)[0]
    assert piece_bytes(tokenizer, half) == "日".encode()[: len(piece_bytes(tokenizer, half))] != b""
    word = family("wordpiece").convert_tokens_to_ids("the")
    assert piece_bytes(family("wordpiece"), word) == b"the"
    assert piece_bytes(tokenizer, 10**6) == b""


@given(some_ids())
def test_special_tokens_that_are_shown_have_their_text(case: tuple[str, list[int]]) -> None:
    name, ids = case
    special = pieces_of(family(name)).special
    shown = frozenset(sorted(special)[::2])
    visible = [i for i in ids if i not in special - shown]
    some, every = Detokeniser(family(name), shown=shown), Detokeniser(family(name), keep_special=True)
    assert some.push(ids) + some.finish() == every.push(visible) + every.finish()
