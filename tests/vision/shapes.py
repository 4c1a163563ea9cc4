"""Pictures of coloured shapes, and conversations about them, for the toy model that `train_shapes.py` makes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from PIL import Image, ImageDraw
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SIZE = 32
COLOURS = {
    "red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220),
    "yellow": (235, 215, 50), "purple": (150, 60, 180), "white": (245, 245, 245),
}  # fmt: skip
SHAPES = ("circle", "square", "triangle", "cross")
NAMES = ("A", "B", "C", "D")  # each picture of a conversation has one, said behind it
KINDS = ("colour", "shape", "both")
SPECIALS = ("<|end|>", "<|user|>", "<|assistant|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>",
            "<|vision_end|>", "<|system|>", "<|tool|>")  # fmt: skip
WORDS = (*COLOURS, *SHAPES, *NAMES, "what", "colour", "shape", "is", "?")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ p.text }}{% endif %}{% endfor %}"
    "{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass(frozen=True)
class Thing:
    """What a picture shows."""

    colour: str
    shape: str

    def answer(self, kind: str) -> str:
        said = {"colour": self.colour, "shape": self.shape, "both": f"{self.colour} {self.shape}"}[kind]
        return f" {said}"


def question(kind: str, name: str) -> str:
    """For example " what colour is B ?"."""
    return f" what{'' if kind == 'both' else ' ' + kind} is {name} ?"


def every_thing() -> list[Thing]:
    return [Thing(colour, shape) for colour in COLOURS for shape in SHAPES]


def any_thing(rng: np.random.Generator) -> Thing:
    return Thing(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)))


def draw(thing: Thing, rng: np.random.Generator) -> Any:
    """One large shape about the middle of a dark ground, with a little noise everywhere."""
    image = Image.new("RGB", (SIZE, SIZE), tuple(int(v) for v in rng.integers(0, 40, 3)))
    pen = ImageDraw.Draw(image)
    r = int(rng.integers(11, 14))
    x, y = (int(v) for v in rng.integers(SIZE // 2 - 2, SIZE // 2 + 2, 2))
    colour = COLOURS[thing.colour]
    if thing.shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill=colour)
    elif thing.shape == "square":
        pen.rectangle((x - r + 1, y - r + 1, x + r - 1, y + r - 1), fill=colour)
    elif thing.shape == "triangle":
        pen.polygon(((x, y - r), (x - r, y + r), (x + r, y + r)), fill=colour)
    else:
        pen.rectangle((x - r, y - 2, x + r, y + 2), fill=colour)
        pen.rectangle((x - 2, y - r, x + 2, y + r), fill=colour)
    pixels = np.asarray(image).astype(np.int16) + rng.integers(-12, 13, (SIZE, SIZE, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


@cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, the special tokens, and each word with a space before it as one token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges: dict[tuple[str, str], None] = {}
    for word in WORDS:
        whole = f"Ġ{word}"
        merges |= {(whole[:n], whole[n]): None for n in range(1, len(whole))}
    tokens = [*SPECIALS, *alphabet, *dict.fromkeys(a + b for a, b in merges)]
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    made.chat_template = TEMPLATE
    return made
