"""One small tokenizer of each family, trained here: what the text stages must treat alike."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")
CORPUS = (
    "The capital of France is Paris. The quick brown fox jumps over the lazy dog, doesn't it?",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))  # 3\n",
    "Übergrößenträger naïve façade, cœur; ça va? Ελλάδα, Москва, العربية, हिन्दी.",
    "日本語の文章と中国的文字 ひらがな カタカナ 한국어",
    "user assistant system user assistant system the the the of of and and in in is is",
    "x<y>z <b>bold</b> [INST] {'k': 1.5e10} 🙂🙂 👩‍👩‍👧",
) * 3
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _wrap(core: Tokenizer, **settings: object) -> PreTrainedTokenizerFast:
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", unk_token="<unk>", **settings)
    made.chat_template = CHATML
    return made


def _with_bos(core: Tokenizer) -> Tokenizer:
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
    )
    return core


def _train_bpe(core: Tokenizer, alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=list(SPECIALS), initial_alphabet=alphabet, show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)


def _with_byte_tokens(core: Tokenizer) -> models.BPE:
    """The trained model with the 256 byte tokens of SentencePiece and few characters: bytes get used."""
    model = json.loads(core.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"] if all(part.isascii() or "▁" in part for part in pair)]
    kept = [t for t in model["vocab"] if all(c.isascii() or c in "▁é日" for c in t)]
    vocab = {t: i for i, t in enumerate([*kept, *(f"<0x{b:02X}>" for b in range(256))])}
    merges = [(a, b) for a, b in merges if a in vocab and b in vocab and a + b in vocab]
    return models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)


def byte_level() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    _train_bpe(core, pre_tokenizers.ByteLevel.alphabet())
    core.add_tokens([AddedToken("<tool>", normalized=False), AddedToken("two words", normalized=False)])
    return _wrap(core)


def byte_level_prefix_space() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    core.decoder = decoders.ByteLevel()
    _train_bpe(core, pre_tokenizers.ByteLevel.alphabet())
    return _wrap(core)


def llama() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    _train_bpe(core, [])
    core.model = _with_byte_tokens(core)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(_with_bos(core), bos_token="<s>")


def gemma() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.normalizer = normalizers.Replace(" ", "▁")
    core.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    _train_bpe(core, [])
    core.model = _with_byte_tokens(core)
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.add_tokens([AddedToken("\n" * n, normalized=False) for n in (1, 2, 3)])
    return _wrap(_with_bos(core), bos_token="<s>")


def mistral() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    _train_bpe(core, [])
    core.model = _with_byte_tokens(core)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _wrap(_with_bos(core), bos_token="<s>")


def unigram() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.Unigram())
    core.normalizer = normalizers.NFKC()
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=list(SPECIALS), unk_token="<unk>", show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    return _wrap(core)


def wordpiece() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.normalizer = normalizers.BertNormalizer(lowercase=True)
    core.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    core.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=list(SPECIALS), show_progress=False)
    core.train_from_iterator(CORPUS, trainer)
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[(t, core.token_to_id(t)) for t in ("<s>", "</s>")]
    )
    return _wrap(core, bos_token="<s>")


def stripping() -> PreTrainedTokenizerFast:
    """Special tokens that swallow the white space around them."""
    made = byte_level()
    core = made.backend_tokenizer
    core.add_special_tokens([AddedToken("<mask>", lstrip=True, special=True, normalized=False)])
    core.add_special_tokens([AddedToken("<sep>", rstrip=True, special=True, normalized=False)])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", unk_token="<unk>")
    wrapped.chat_template = CHATML
    return wrapped


FAMILIES: dict[str, Callable[[], PreTrainedTokenizerFast]] = {
    "byte_level": byte_level,
    "byte_level_prefix_space": byte_level_prefix_space,
    "llama": llama,
    "gemma": gemma,
    "mistral": mistral,
    "unigram": unigram,
    "wordpiece": wordpiece,
    "stripping": stripping,
}
STRIPS_FIRST_SPACE = ("llama", "mistral", "unigram")


@cache
def family(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of this family, trained once per process (a fraction of a second)."""
    return FAMILIES[name]()
