"""Log probabilities in the two shapes of OpenAI's routes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from treadle.output.detokenise import piece_bytes
from treadle.output.stream import Event
from treadle.types import TokenLogprob

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


UNKNOWN = math.nan  # the log probability of a prompt's first token


def _number(value: float) -> float | None:
    """JSON has no infinity: a token that cannot be drawn is reported as OpenAI does, with -9999."""
    return None if math.isnan(value) else max(value, -9999.0)


class ChatLogprobs:
    """`choices[].logprobs` of chat: one entry per token with its text, its bytes and its alternatives."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def entries(self, items: Iterable[TokenLogprob]) -> list[dict[str, Any]]:
        return [
            self._entry(item.token, item.logprob)
            | {"top_logprobs": [self._entry(token, logprob) for token, logprob in item.top]}
            for item in items
        ]

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = piece_bytes(self._tokenizer, token)
        return {"token": raw.decode("utf-8", "replace"), "logprob": _number(logprob), "bytes": list(raw)}


class LegacyLogprobs:
    """`choices[].logprobs` of legacy completions: parallel lists, with each token's offset in characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def block(self, event: Event, start: int) -> dict[str, list[Any]]:
        """The lists for the tokens of one event; an echoed prompt of `start` characters comes before them."""
        return {
            "tokens": [self._name(item.token) for item in event.logprobs],
            "token_logprobs": [_number(item.logprob) for item in event.logprobs],
            "top_logprobs": [self._alternatives(item) for item in event.logprobs],
            "text_offset": [start + offset for offset in event.offsets],
        }

    def _alternatives(self, item: TokenLogprob) -> dict[str, float | None] | None:
        return {self._name(token): _number(logprob) for token, logprob in item.top} or None

    def _name(self, token: int) -> str:
        """The token's text, or OpenAI's spelling of bytes that are no text by themselves."""
        raw = piece_bytes(self._tokenizer, token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def empty_block() -> dict[str, list[Any]]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
