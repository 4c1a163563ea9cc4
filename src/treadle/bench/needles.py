"""Needles in texts: a number that is told once, and asked for at the end."""

from __future__ import annotations

from typing import Any

import numpy as np

from treadle.types import Ids

NEEDLE = "\n\nThe secret number of the {name} is {number}.\n\n"
NAMES = ("lighthouse", "orchard", "violin", "harbour", "comet")


def needle_in(hay: Ids, tokenizer: Any, depth: float, name: str, seed: int) -> tuple[Ids, list[int]]:
    """(prompt, answer): `hay` with a needle at `depth`, a share of it, and the question; the ids that answer it."""
    number = str(48271 * (seed + 7) % 90000 + 10000)
    needle = NEEDLE.format(name=name, number=number)
    asked, answer = _tail(tokenizer, needle[: needle.index(number)].rstrip(), number)
    at = int(depth * len(hay))
    return np.concatenate([hay[:at], _plain(tokenizer, needle), hay[at:], asked]).astype(np.int64), answer


def _plain(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def _tail(tokenizer: Any, question: str, number: str) -> tuple[list[int], list[int]]:
    """The question's ids and those of the answer, as the tokenizer cuts the two together."""
    whole, asked = _plain(tokenizer, f"{question} {number}"), _plain(tokenizer, question)
    same = next((i for i, (a, b) in enumerate(zip(whole, asked, strict=False)) if a != b), len(asked))
    return whole[:same], whole[same:]
