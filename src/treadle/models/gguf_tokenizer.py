"""A fast tokenizer from the metadata of a GGUF file: byte-level BPE (`gpt2`) or SentencePiece BPE (`llama`).

A GGUF file names its pre-tokenizer; the patterns behind the names are those of the models' `tokenizer.json`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from treadle.errors import LoadError
from treadle.models.gguf import GGUF

# Kinds of tokens, the format's `token_type`.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "▁"
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_PUNCTUATION = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _PUNCTUATION
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _PUNCTUATION
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How byte-level BPE cuts text first. `pattern` None: GPT-2's own."""

    pattern: str | None = None
    single_digits: bool = False
    whole_words: bool = False  # a piece that is a token stays whole, whatever the merges say
    nfc: bool = False
    adds_bos: bool = False  # where the file does not say


_GPT2, _DIGITS = PreTokenizer(), PreTokenizer(single_digits=True)
_LLAMA_BPE = PreTokenizer(_LLAMA3, whole_words=True, adds_bos=True)
_QWEN = PreTokenizer(_QWEN2, nfc=True)
PRE_TOKENIZERS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "olmo": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "codeshell": _DIGITS,
    "llama-bpe": _LLAMA_BPE,
    "llama-v3": _LLAMA_BPE,
    "llama3": _LLAMA_BPE,
    "smaug-bpe": _LLAMA_BPE,
    "falcon3": _LLAMA_BPE,
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "tekken": PreTokenizer(_TEKKEN, whole_words=True, adds_bos=True),
}


def load_tokenizer(gguf: GGUF) -> Any:
    """The file's tokenizer as a `PreTrainedTokenizerFast`, with special tokens and chat template.

    Raises:
        LoadError: a kind of tokenizer or pre-tokenizer that is not supported, or damaged metadata.
    """
    from transformers import PreTrainedTokenizerFast

    kind = gguf.require("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise LoadError(f"GGUF files with a tokenizer of kind {kind!r} are not supported (only gpt2 and llama).")
    tokens = _Tokens.of(gguf)
    backend = _byte_level(gguf, tokens) if kind == "gpt2" else _sentencepiece(gguf, tokens)
    backend.add_special_tokens(tokens.added(CONTROL, special=True))
    backend.add_tokens(tokens.added(USER_DEFINED, special=False))
    named = {f"{name}_token": tokens.named(gguf, key) for name, key in _NAMED.items()}
    if _adds_bos(gguf, kind) and named["bos_token"] is not None:
        backend.post_processor = _with_bos(named["bos_token"], backend)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=gguf.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        **{name: token for name, token in named.items() if token is not None},
    )
    tokenizer.model_max_length = gguf.size("context_length")
    return tokenizer


_NAMED = {"bos": "bos_token_id", "eos": "eos_token_id", "unk": "unknown_token_id", "pad": "padding_token_id"}


def end_ids(gguf: GGUF) -> list[int]:
    """The ids that the file declares as ends: of text, of a turn, of a message."""
    found = {gguf.metadata.get(f"tokenizer.ggml.{key}") for key in END_KEYS}
    return sorted(token for token in found if isinstance(token, int))


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The file's vocabulary: text and kind by id."""

    texts: list[str]
    kinds: list[int]

    @classmethod
    def of(cls, gguf: GGUF) -> _Tokens:
        texts = gguf.require("tokenizer.ggml.tokens")
        kinds = gguf.metadata.get("tokenizer.ggml.token_type", [NORMAL] * len(texts))
        if len(kinds) != len(texts):
            raise LoadError(f"{gguf.paths[0].name} is damaged: {len(texts)} tokens, {len(kinds)} token types.")
        return cls(texts, kinds)

    def added(self, kind: int, *, special: bool) -> list[AddedToken]:
        """Tokens that are matched as a whole before anything else; runs of spaces are left to the merges."""
        pairs = zip(self.texts, self.kinds, strict=True)
        chosen = (text for text, own in pairs if own == kind and text.strip(" " + SPACE))
        return [AddedToken(text, normalized=False, special=special) for text in chosen]

    def named(self, gguf: GGUF, key: str) -> str | None:
        """The text of a token that the metadata names by id."""
        token = gguf.metadata.get(f"tokenizer.ggml.{key}")
        return self.texts[token] if isinstance(token, int) and 0 <= token < len(self.texts) else None


def _adds_bos(gguf: GGUF, kind: str) -> bool:
    default = kind == "llama" or _pre_tokenizer(gguf).adds_bos
    return bool(gguf.metadata.get("tokenizer.ggml.add_bos_token", default))


def _with_bos(bos: str, backend: Tokenizer) -> Any:
    special = [(bos, backend.token_to_id(bos))]
    return processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=special)


def _pre_tokenizer(gguf: GGUF) -> PreTokenizer:
    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    if name not in PRE_TOKENIZERS:
        raise LoadError(f"GGUF files with the pre-tokenizer {name!r} are not supported.")
    return PRE_TOKENIZERS[name]


def _bpe(gguf: GGUF, **settings: Any) -> Tokenizer:
    try:
        return Tokenizer(models.BPE(**settings))
    except Exception as error:  # the tokenizers library raises nothing narrower
        raise LoadError(f"The tokenizer of {gguf.paths[0].name} cannot be built: {error}.") from error


def _byte_level(gguf: GGUF, tokens: _Tokens) -> Tokenizer:
    pre = _pre_tokenizer(gguf)
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.require("tokenizer.ggml.merges")]
    vocab = {text: token for token, text in enumerate(tokens.texts)}
    backend = _bpe(gguf, vocab=vocab, merges=merges, ignore_merges=pre.whole_words)
    steps: list[Any] = []
    if pre.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if pre.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pre.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(gguf: GGUF, tokens: _Tokens) -> Tokenizer:
    """BPE over characters with bytes as a fall-back; a space is written as its own mark."""
    vocab = {_spelled(text, kind): token for token, (text, kind) in enumerate(_pairs(tokens))}
    scores = gguf.require("tokenizer.ggml.scores")
    ranked = sorted(_merges(tokens, scores, vocab), key=lambda merge: -merge[0])
    merges = [(left, right) for _, left, right in ranked]
    unknown = tokens.named(gguf, "unknown_token_id")
    backend = _bpe(gguf, vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    prefixed = bool(gguf.metadata.get("tokenizer.ggml.add_space_prefix", True))
    marks = normalizers.Replace(" ", SPACE)
    first = [normalizers.Prepend(SPACE)] if prefixed else []
    backend.normalizer = normalizers.Sequence([*first, marks])
    strip = [decoders.Strip(" ", 1, 0)] if prefixed else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def _pairs(tokens: _Tokens) -> Iterator[tuple[str, int]]:
    return zip(tokens.texts, tokens.kinds, strict=True)


def _spelled(text: str, kind: int) -> str:
    """Runs of spaces are stored with plain spaces; merges know them by the mark."""
    return SPACE * len(text) if kind == USER_DEFINED and not text.strip(" ") else text


def _merges(tokens: _Tokens, scores: list[float], vocab: dict[str, int]) -> Iterator[tuple[float, str, str]]:
    """Every way to make a token of two others, with its score: higher goes first.

    SentencePiece stores no merges: it always joins the pair that makes the best token. Runs of spaces come
    before all others.
    """
    for (text, kind), score in zip(_pairs(tokens), scores, strict=True):
        piece = _spelled(text, kind)
        if kind != NORMAL and piece == text:
            continue
        rank = score if kind == NORMAL else float("inf")
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                yield rank, left, right
